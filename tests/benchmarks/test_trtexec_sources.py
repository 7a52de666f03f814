"""The check against NVIDIA's sources, without them: what differs is found, and what does not is not."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trtexec_sources
from moetrt.errors import InputError
from tests.trtexec_stand_in import write_profile, write_times

WANTED = {"engine": "a.engine", "plugin": "a.so", "profile of x": "1 2 3"}
PARSED = [("engine", "a.engine"), ("plugin", "a.so"), ("profile of x", "1 2 3"), ("shape of x", "2"), ("spin", "0")]


def answered(monkeypatch: pytest.MonkeyPatch, out: bytes = b"", said: bytes = b"", code: int = 0) -> None:
    """Has the compiled program say this."""
    done = subprocess.CompletedProcess[bytes]([], code, out, said)
    monkeypatch.setattr(trtexec_sources, "_run", lambda *_: done)


def compared(monkeypatch: pytest.MonkeyPatch, pairs: Sequence[tuple[str, str]], **other: Any) -> tuple[str, str]:
    answered(monkeypatch, "".join(f"{name}\0{value}\0" for name, value in pairs).encode(), **other)
    check = trtexec_sources._compared(Path("program"), "a line", ["trtexec", "--spelled"], WANTED)
    return check.ours, check.theirs


def test_parsed_as_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    # The run's shape follows from the profile; the spin was not asked about.
    assert compared(monkeypatch, PARSED) == ("", "")


@pytest.mark.parametrize(
    ("pairs", "ours", "theirs"),
    [
        ([("engine", "b"), *PARSED[1:]], "engine: a.engine", "engine: b"),
        (PARSED[:2], "profile of x: 1 2 3", "-"),
        ([*PARSED, ("plugin", "b.so")], "-", "plugin: b.so"),
        ([*PARSED, ("shape of x,y", "2")], "-", "shape of x,y: 2"),
        ([*PARSED, ("file of x", "x.bin")], "-", "file of x: x.bin"),
    ],
)
def test_parsed_otherwise(
    monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[str, str]], ours: str, theirs: str
) -> None:
    assert compared(monkeypatch, pairs) == (ours, theirs)


@pytest.mark.parametrize("code", [0, 1])
def test_warned_of_or_refused(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert compared(monkeypatch, PARSED, said=b"--spelled is deprecated\n", code=code) == (
        "--spelled",
        "--spelled is deprecated",
    )


@pytest.mark.parametrize(("told", "same"), [("0.5", True), ("0.6", False)])
def test_median_of_queries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, same: bool) -> None:
    answered(monkeypatch, f"Timing trace has 3 queries\nGPU Compute Time: mean = 1 ms, median = {told} ms\n".encode())
    write_times(tmp_path / "t.json", [0.1, 0.5, 0.7])
    assert all((check.ours == "") == same for check in trtexec_sources.times(Path("program"), tmp_path))


@pytest.mark.parametrize(("told", "same"), [("0.2500", True), ("0.2600", False)])
def test_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, same: bool) -> None:
    layers = [(name, 0.0 if name == "not run" else 0.25) for name in trtexec_sources._LAYERS]
    rows = [f"  1.00  0.2500  {told}  20.0   {name}" for name, ms in layers if ms]
    answered(monkeypatch, "\n".join([*rows, "  5.00  1.2500  1.2500  100.0   Total", ""]).encode())
    write_profile(tmp_path / "p.json", layers, count=25)
    assert (trtexec_sources.profile(Path("program"), tmp_path).ours == "") == same


def test_input_that_is_read_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answered(monkeypatch, bytes(48))
    checks = {check.what: check.theirs for check in trtexec_sources.raw(Path("program"), tmp_path)}
    assert checks["input of float32"] == "other numbers"


@pytest.mark.parametrize("names", ["NV_TENSORRT_{}", "TRT_{}_ENTERPRISE"])
def test_version_of_the_sources(names: str, tmp_path: Path) -> None:
    header = tmp_path / "include" / "NvInferVersion.h"
    header.parent.mkdir()
    parts = {"MAJOR": 10, "MINOR": 16, "PATCH": 1, "BUILD": 9}
    header.write_text("".join(f"#define {names.format(part)} {number} //!< it\n" for part, number in parts.items()))
    assert trtexec_sources.version_of(tmp_path) == "10.16.1"
    header.write_text("#define NV_TENSORRT_MAJOR 10\n")
    with pytest.raises(InputError, match=r"NvInferVersion\.h' names no version of TensorRT"):
        trtexec_sources.version_of(tmp_path)
