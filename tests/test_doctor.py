"""`moetrt doctor` finds what is there, and says what to do about what is not."""

import json
from pathlib import Path

import pytest

from moetrt import backends, cli, doctor


def by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def checks() -> dict[str, doctor.Check]:
    return by_name(doctor.examine())


def test_nothing_needed_is_missing_here(checks: dict[str, doctor.Check]) -> None:
    assert [check for check in checks.values() if check.needed and check.status == "missing"] == []


def test_library_answers_with_its_version_and_abi(checks: dict[str, doctor.Check], plugin_library: Path) -> None:
    detail = checks["plugin library"].detail
    assert str(plugin_library) in detail
    assert "ABI 2" in detail


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_both_registries_have_both_operators(checks: dict[str, doctor.Check], module: str) -> None:
    check = checks[f"registry {module}"]
    assert check.status == "ok"
    assert "moetrt::MoEFinalizeAdd::1, moetrt::MoEFinalizeAddRMSNorm::1" in check.detail


def test_the_unversioned_name_points_at_the_library_beside_it(checks: dict[str, doctor.Check]) -> None:
    check = checks["unversioned name"]
    assert check.status == "ok"
    link = Path(check.detail.split(" -> ")[0])
    assert link.name == "libtensorrt_rtx.so"
    assert link.resolve().parent == link.parent


def test_a_missing_library_is_said_with_its_remedy_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOETRT_PLUGIN_LIBRARY", str(tmp_path / "none.so"))
    assert cli.run(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "missing plugin library: " in captured.out
    assert "-> moetrt doctor --build" in captured.out
    assert captured.err == "moetrt: error: missing: plugin library\n"


def test_a_library_of_another_make_has_no_creators_of_ours(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"not a library")
    check = doctor._registry("tensorrt_lean_bindings", other)
    assert check.status == "missing"
    assert check.remedy


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", (*doctor._PACKAGES, "a-package-that-is-not-there"))
    check = by_name(list(doctor._packages()))["packages"]
    assert check.status == "missing"
    assert check.detail.startswith("no a-package-that-is-not-there; torch ")
    assert check.remedy == "pip install a-package-that-is-not-there"


@pytest.mark.parametrize(("cuda", "remedy"), [((12, 9), "driver 580 or later"), ((13, 0), "")])
def test_a_driver_older_than_the_librarys_runtime_is_said(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int], remedy: str
) -> None:
    monkeypatch.setattr(backends, "gpus", lambda: (backends.Gpu("a GPU", (9, 0)),))
    monkeypatch.setattr(backends, "driver_cuda", lambda: cuda)
    check = doctor._gpu()
    assert check.detail == f"a GPU (SM90); the driver takes CUDA {cuda[0]}.{cuda[1]}"
    assert check.remedy.endswith(remedy)
    assert bool(check.remedy) == bool(remedy)


def test_json_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda build: [doctor.Check("GPU", "none", "no driver", needed=False)])
    assert cli.run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "GPU", "status": "none", "detail": "no driver", "remedy": "", "needed": False}
    ]
