"""Options that the benchmarks do not take: one line, exit code 2, nothing written."""

from pathlib import Path

import pytest

from benchmarks import accuracy, gpu_check, traffic, trtexec_sources

DRY = ["--dry-run", "--skip-tests"]
REFUSED = {
    "accuracy, no tokens": (accuracy.main, ["--tokens", "0"], "--tokens was 0; 1 to 1024 is taken"),
    "accuracy, too many": (accuracy.main, ["--tokens", "10" * 12], "1 to 1024 is taken"),
    "accuracy, seed": (accuracy.main, ["--seed", "-1"], "--seed was -1; 0 to"),
    "traffic, infinite": (traffic.main, ["--bandwidth", "inf"], "--bandwidth was inf; 1e-06 to 1e+06 is taken"),
    "traffic, nan": (traffic.main, ["--bandwidth", "nan"], "--bandwidth was nan"),
    "traffic, two sizes": (traffic.main, ["--model", "gpt-oss", "-K", "4"], "was given with another top_k"),
    "traffic, model": (traffic.main, ["--model", "nope"], "model was 'nope'; one of deepseek-v3"),
    "check, tokens": (gpu_check.main, [*DRY, "--tokens", "1", "-1"], "--tokens was -1; 1 to"),
    "check, seconds": (gpu_check.main, [*DRY, "--seconds", "nan"], "--seconds was nan; 1 to 3600 is taken"),
    "check, library": (gpu_check.main, [*DRY, "--library", "x.so"], "--library was given with --dry-run"),
    "trtexec, no sources": (
        trtexec_sources.main,
        ["--tensorrt-source", "nowhere"],
        "header of the TensorRT sources 'nowhere/include/NvInferVersion.h' does not exist",
    ),
    "check, output": (gpu_check.main, [*DRY, "--output", "/proc/x"], "output folder '/proc/x' cannot be written"),
}


@pytest.mark.parametrize(("main", "words", "said"), REFUSED.values(), ids=REFUSED)
def test_options_that_are_not_taken(
    main: object,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2  # type: ignore[operator]
    error = capsys.readouterr().err
    assert error.startswith("moetrt: error: ")
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_nan_holds_no_rule() -> None:
    nan = accuracy.Errors(1.0, 1.0, float("nan"))
    model = next(iter(accuracy.MODELS.values()))
    assert len(accuracy.Row(model, "routed", nan, nan, nan).faults()) == 5
