"""Case 55: the bound of a file is in every command that reads it, and none goes beyond it in silence."""

import json
from pathlib import Path

import pytest

from moetrt import cli
from moetrt.bench.model import make_plan
from moetrt.bounds import bounds_of
from moetrt.capture import export
from moetrt.errors import InputError
from moetrt.inspection import inspect_file
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model
from moetrt.parity import compare
from moetrt.profiles import make_profile
from moetrt.source import as_source
from tests.models import lengths

NOTE = "the file is right only where 'tokens' is 1 to 15: Min(tokens, 16*((tokens//16))) <= 0 in tests/models/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``short``, right below 16 tokens, and ``long``, right from 16 on: model.onnx, mapped.onnx and mapping.json."""
    root = tmp_path_factory.mktemp("bounded")
    for name, factory in (("short", lengths.windows), ("long", lengths.windows_long)):
        exported = export(as_source(factory()), root / name)
        map_file(exported.model_path, root / name / "mapped.onnx", report_path=root / name / "mapping.json")
    return root


def test_it_is_in_the_description_and_the_mapped_file(folder: Path) -> None:
    described = json.loads((folder / "short" / "model.onnx.json").read_text())["bounds"]
    assert described["tokens"]["minimum"] == 1
    assert described["tokens"]["maximum"] == 15
    before, after = (bounds_of(load_model(folder / "short" / name)) for name in ("model.onnx", "mapped.onnx"))
    assert before == after != {}
    assert after["tokens"].reason == described["tokens"]["reason"]


def test_map_and_its_report_say_it(folder: Path) -> None:
    (note,) = json.loads((folder / "short" / "mapping.json").read_text())["notes"]
    assert note.startswith(NOTE)


def test_export_and_map_print_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", "tests.models.lengths:windows", "-o", str(tmp_path)]) == 0
    assert NOTE in " ".join(capsys.readouterr().out.split())
    assert cli.run(["map", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "mapped.onnx")]) == 0
    assert f"note: {NOTE}" in " ".join(capsys.readouterr().out.split())


def test_inspect_says_it(folder: Path) -> None:
    found = inspect_file(folder / "short" / "mapped.onnx")
    assert any(line.startswith(NOTE) for line in found.lines())
    assert found.as_dict()["bounds"]["tokens"]["maximum"] == 15


def test_default_profiles_stay_within(folder: Path) -> None:
    assert make_profile(load_model(folder / "short" / "mapped.onnx"))["x"] == ((1, 8), (15, 8), (15, 8))
    assert make_profile(load_model(folder / "long" / "mapped.onnx"))["x"] == ((16, 8), (32, 8), (256, 8))


def test_given_ends_stay_as_they_are_within(folder: Path) -> None:
    short, long = (load_model(folder / name / "mapped.onnx") for name in ("short", "long"))
    assert make_profile(short, {"x": (2, 8)}, {"x": (4, 8)}, {"x": (9, 8)})["x"] == ((2, 8), (4, 8), (9, 8))
    assert make_profile(short, optimum={"x": (4, 8)})["x"] == ((1, 8), (4, 8), (15, 8))
    assert make_profile(long, maximum={"x": (1000, 8)})["x"] == ((16, 8), (32, 8), (1000, 8))


@pytest.mark.parametrize(
    ("name", "end", "size", "taken"),
    [("short", "max", 16, "1 to 15"), ("short", "opt", 16, "1 to 15"), ("long", "min", 15, "at least 16")],
)
def test_a_profile_beyond_it_is_refused(folder: Path, name: str, end: str, size: int, taken: str) -> None:
    shapes = {end: {"x": (size, 8)}}
    with pytest.raises(InputError) as caught:
        make_profile(load_model(folder / name / "mapped.onnx"), shapes.get("min"), shapes.get("opt"), shapes.get("max"))
    assert str(caught.value).startswith(f"{end} of dimension tokens was {size} in x; {taken} is taken: ")


def test_build_refuses_it_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tmp_path / "model.engine"
    words = ["build", str(folder / "short" / "mapped.onnx"), "-o", str(engine), "--max", "x:64x8"]
    assert cli.run(words) == 2
    assert "max of dimension tokens was 64 in x; 1 to 15 is taken" in capsys.readouterr().err
    assert not engine.exists()


def test_bench_plans_within_it_and_refuses_points_beyond(folder: Path, tmp_path: Path) -> None:
    mapped = folder / "short" / "mapped.onnx"
    plan, notes = make_plan(mapped, tmp_path, tool="trtexec-10")
    assert plan.profile["x"] == ((1, 8), (15, 8), (15, 8))
    assert any(note.startswith(NOTE) for note in notes)
    with pytest.raises(InputError, match="of dimension tokens was 16 in x; 1 to 15 is taken"):
        make_plan(mapped, tmp_path, tool="trtexec-10", points=[{"x": (16, 8)}])


def test_compare_refuses_shapes_beyond_it(folder: Path) -> None:
    mapped, source = folder / "short" / "mapped.onnx", as_source(lengths.windows())
    assert compare(mapped, source, sizes={"tokens": 15}).passed
    with pytest.raises(InputError, match="dimension 'tokens' was 16; 1 to 15 is taken: Min"):
        compare(mapped, source, sizes={"tokens": 16})
