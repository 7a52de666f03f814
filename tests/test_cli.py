"""The command line from a model to an engine, as the README shows it, and what it prints on the way."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from moetrt import cli

BLOCK = "contract_to_engine:block"  # what the fixture mapped_block was exported from


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    """Runs the command line, which must succeed without a word on stderr, and returns what it printed."""

    def run(*words: object) -> str:
        capsys.readouterr()
        code = cli.run([str(word) for word in words])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


def test_from_model_to_engine(tmp_path: Path, said) -> None:
    model, mapped, report = tmp_path / "m/model.onnx", tmp_path / "m/mapped.onnx", tmp_path / "m/report.json"
    text = said("export", BLOCK, "-o", model.parent)
    assert "tails: 1 expected, 1 captured" in text
    # The line that it ends in is the next command.
    assert text.splitlines()[-1] == f"next: moetrt map {model} -o {mapped}"

    text = said("map", model, "-o", mapped, "--report", report)
    assert "tails: 1 found, 1 expected, 1 mapped" in text
    assert json.loads(report.read_text())["complete"] is True

    engine = tmp_path / "m/block.engine"
    text = said("build", mapped, "-o", engine, "--min", "x:1x64", "residual:1x64", "--max", "x:8x64,residual:8x64")
    assert "plugin layers: 1" in text
    described = json.loads(engine.with_name("block.engine.json").read_text())
    assert described["profile"]["x"] == {"min": [1, 64], "opt": [8, 64], "max": [8, 64]}
    assert len(described["plugin_layers"]) == 1

    text = said("build", mapped, "-o", tmp_path / "m/baseline.engine", "--no-plugin", "--max", "x:8x64")
    assert "plugin layers: 0" in text
    assert "profile: smallest / tuned for / largest" in text
    assert "  x: 1x64 / 8x64 / 8x64" in text
    assert "  residual: 1x64 / 8x64 / 8x64" in text


def test_inspect_says_what_each_reader_runs(mapped_block: Path, said) -> None:
    text = said("inspect", mapped_block)
    assert "MoEFinalizeAddRMSNorm" in text
    assert "routed_scaling_factor=2.5" in text
    assert "without it: the function body" in text
    assert json.loads(said("inspect", mapped_block, "--json"))["tails"][0]["attributes"]["routed_scaling_factor"] == 2.5


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_compare_passes_with_figures(dtype: str, request: pytest.FixtureRequest, said) -> None:
    model = request.getfixturevalue("mapped_block" if dtype == "fp32" else "mapped_block_fp16")
    text = said("compare", model, "--against", BLOCK, "--dtype", dtype, "--seed", 3, "--shapes", "x:17x64")
    assert "within tolerance" in text
    assert "x [17x64]" in text
    assert "worst element" in text
    assert "tolerance:" in text


def test_without_functions_only_the_plugin_can_run_it(mapped_block: Path, tmp_path: Path, said) -> None:
    bare = mapped_block.with_name("bare.onnx")
    said("map", mapped_block, "-o", bare, "--no-function")
    assert not onnx.load(bare, load_external_data=False).functions
    assert "plugin layers: 1" in said("build", bare, "-o", tmp_path / "bare.engine")
    bare.unlink()


def test_a_static_export_has_no_dynamic_dimensions(tmp_path: Path, said) -> None:
    said("export", BLOCK, "-o", tmp_path, "--static", "--opset", 20)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [5, 64]
    assert {entry.version for entry in model.opset_import if entry.domain == ""} == {20}


def test_quiet_prints_nothing(mapped_block: Path, tmp_path: Path, said) -> None:
    assert said("map", mapped_block, "-o", mapped_block.with_name("again.onnx"), "-q") == ""
    mapped_block.with_name("again.onnx").unlink()


def test_what_is_piped_is_plain_text_and_a_row_is_a_line(mapped_block: Path) -> None:
    command = [sys.executable, "-m", "moetrt", "map", str(mapped_block), "-o", "again.onnx"]
    done = subprocess.run(command, cwd=mapped_block.parent, capture_output=True, text=True, check=True)
    mapped_block.with_name("again.onnx").unlink()
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    # The step, the table's head and its one row.
    assert len(done.stdout.splitlines()) == 3


def test_a_reader_that_leaves_a_pipe_is_no_error(mapped_block: Path) -> None:
    command = f"'{sys.executable}' -m moetrt inspect '{mapped_block}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "mapped.onnx" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_pipe_that_is_closed_ends_a_command_as_it_does_other_tools(mapped_block: Path, option: str) -> None:
    """With 128 + SIGPIPE: 1 would say that the run fell short."""
    command = f"'{sys.executable}' -m moetrt inspect '{mapped_block}' {option} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
