"""Bad input on every entrance of the command line: one line that names it, exit code 2, and nothing half written.

The command line's side of cases 21 (a mapping that finds nothing) and 32 (a wrong shape name).
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from moetrt import cli, onnx_files
from moetrt.parity.replay import save_inputs
from tests.test_onnx_files import nested

BLOCK = "contract_to_engine:block"  # what the fixture mapped_block was exported from

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command line and returns the one line it may print on stderr (the process's own, not Python's alone)."""

    def run(*words: object, code: int = 2) -> str:
        capfd.readouterr()
        assert cli.run([str(word) for word in words]) == code
        error = capfd.readouterr().err
        lines = error.splitlines()
        assert len(lines) == 1, error
        assert lines[0].startswith("moetrt: error: ")
        assert "Traceback" not in error
        return lines[0]

    return run


@pytest.fixture
def plain_onnx(tmp_path: Path) -> Path:
    """A valid ONNX model without MoE."""
    node = helper.make_node("Relu", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 22)])
    path = tmp_path / "plain.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def not_onnx(tmp_path: Path) -> Path:
    path = tmp_path / "notes.onnx"
    path.write_text("these are notes, not a model\n")
    return path


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder that nobody can make, root included: its parent is a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "folder"


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ------------------------------------------------------------------------------------------------------------ a file


@pytest.mark.parametrize(
    "words",
    [
        ["map", "missing.onnx", "-o", "out.onnx"],
        ["inspect", "missing.onnx"],
        ["build", "missing.onnx", "-o", "out.engine"],
        ["compare", "missing.onnx", "--against", "moetrt.models:deepseek_v3"],
    ],
    ids=lambda words: words[0],
)
def test_a_missing_file(words: list[str], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "ONNX model 'missing.onnx' does not exist" in refused(*words)
    assert contents(tmp_path) == set()


@pytest.mark.parametrize("command", ["map", "inspect", "build"])
def test_not_onnx(command: str, refused: Refused, not_onnx: Path) -> None:
    before = contents(not_onnx.parent)
    output = [] if command == "inspect" else ["-o", not_onnx.with_name("out")]
    line = refused(command, not_onnx, *output)
    assert str(not_onnx) in line
    assert "is not an ONNX model" in line
    assert contents(not_onnx.parent) == before


def test_a_folder_for_a_file(refused: Refused, tmp_path: Path) -> None:
    assert "is not a file" in refused("map", tmp_path, "-o", tmp_path / "out.onnx")


def test_weights_that_were_left_behind(refused: Refused, mapped_block: Path, tmp_path: Path) -> None:
    moved = shutil.copy(mapped_block, tmp_path / "moved.onnx")
    line = refused("build", moved, "-o", tmp_path / "out.engine")
    assert "data file" in line
    assert contents(tmp_path) == {"moved.onnx"}


# ----------------------------------------------------------------------------------------------------------- a source


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no/such/folder", "does not exist"),
        ("no_such_module:factory", "no module 'no_such_module'"),
        ("moetrt.models:no_such_factory", "no_such_factory"),
        ("words without meaning", "is taken"),
    ],
)
def test_export_of_no_source(source: str, said: str, refused: Refused, tmp_path: Path) -> None:
    line = refused("export", source, "-o", tmp_path / "out")
    assert said in line
    assert contents(tmp_path) <= {"out"}


def test_a_factory_that_exits_does_not_end_the_command(
    refused: Refused, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", "tests.models.wrong:exits", "-o", str(tmp_path / "out")]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "this is not moetrt's\nmoetrt: error: source 'tests.models.wrong:exits' raised SystemExit: 0\n"
    )
    assert "SystemExit: 5" in refused("export", "tests.models.wrong:module_exits", "-o", tmp_path / "out")
    assert contents(tmp_path) == set()


def test_what_a_factory_prints_is_not_among_the_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", "tests.models.wrong:talks", "-o", str(tmp_path)]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("ok     load     Linear  ")
    assert "this is not" not in shown.out
    assert shown.err == "this is not moetrt's\n"


def test_export_of_a_folder_without_a_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("export", tmp_path / "empty", "-o", tmp_path / "out")


def test_export_of_a_model_without_moe(refused: Refused, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    line = refused("export", tmp_path / "dense", "-o", tmp_path / "out")
    assert "without MoE" in line
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--dtype", "fp8"], "fp8"),
        (["--opset", "9"], "9"),
        (["--dynamic", "ids:0"], "ids:0"),
        (["--dynamic", "nothing:0=batch"], "'nothing'"),
        (["--experts", "sorted"], "'sorted'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_export_options_that_are_not_taken(option: list[str], said: str, refused: Refused, tmp_path: Path) -> None:
    assert said in refused("export", "moetrt.models:deepseek_v3", "-o", tmp_path / "out", *option)
    assert not list(tmp_path.glob("out/*"))


def test_export_without_transformers_names_the_extra(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("moetrt.source.load_source", absent)
    line = refused("export", BLOCK, "-o", tmp_path / "out")
    assert line == "moetrt: error: transformers is not installed; pip install 'moetrt[hf]'"


# ----------------------------------------------------------------------------------------------------------- mapping


@pytest.mark.parametrize("kind", ["deep", "large", "zeros"])
@pytest.mark.parametrize(
    "words",
    [
        "inspect {bad}",
        "map {bad} -o {folder}/mapped.onnx",
        "build {bad} -o {folder}/e.engine",
        f"compare {{bad}} --against {BLOCK}",
        f"compare {{good}} --against {BLOCK} --unmapped {{bad}}",
        "bench {bad} -o {folder}/bench",
        "bench {bad} -o {folder}/bench --dry-run",
    ],
)
def test_case47_case48_what_protobuf_does_not_read_is_refused_on_every_entrance(
    refused: Refused, tmp_path: Path, mapped_block: Path, kind: str, words: str
) -> None:
    bad, folder = tmp_path / "bad.onnx", tmp_path / "folder"
    bad.write_bytes(nested(45) if kind == "deep" else b"\x08\x0a" if kind == "large" else b"")
    if kind != "deep":
        os.truncate(bad, 3 * 10**9 if kind == "large" else 2 * 10**9)
    started = time.process_time()
    line = refused(*(word.format(bad=bad, good=mapped_block, folder=folder) for word in words.split()))
    assert {"deep": "nested too deep", "large": "3000000000 bytes", "zeros": "first byte was 0x00"}[kind] in line
    # The file takes 5 s and 2 GB to read; the rest is imports, and the hash of files that a plan is held against.
    assert kind == "deep" or time.process_time() - started < 3
    assert not folder.exists() or not any(folder.iterdir())


def test_case21_a_model_without_moe_is_not_mapped_in_silence(refused: Refused, plain_onnx: Path) -> None:
    output = plain_onnx.with_name("out.onnx")
    line = refused("map", plain_onnx, "-o", output, code=1)
    assert "has no MoE tail" in line
    onnx.checker.check_model(output)
    assert cli.run(["map", str(plain_onnx), "-o", str(output), "--allow-unmatched"]) == 0


def test_case21_building_a_model_without_tails_says_so(refused: Refused, plain_onnx: Path) -> None:
    line = refused("build", plain_onnx, "-o", plain_onnx.with_name("out.engine"), code=1)
    assert "no mapped tail" in line


# ---------------------------------------------------------------------------------------------------------- building


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "tensorflow"], "'tensorflow'; taken are tensorrt and tensorrt-rtx"),
        (["--min", "hidden:1x64"], "'hidden'"),
        (["--min", "x:1x64x1"], "rank 3"),
        (["--min", "x:9x64", "--opt", "x:4x64"], "above"),
        (["--opt", "x:4x65"], "x"),
        (["--opt", "x"], "NAME:DIMS"),
        (["--max", "x:99999999999999999999x64"], "at most 2147483647 is taken"),
        (["--max", "x:2147483648x64"], "0 to 2147483647 is taken"),
        (["--target", "SM20"], "'SM20'"),
        (["--plugin", "missing.so"], "'missing.so' does not exist"),
        (["--plugin", "missing.so", "--no-plugin"], "--no-plugin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_case32_build_options_that_are_not_taken(
    options: list[str], said: str, refused: Refused, mapped_block: Path, tmp_path: Path
) -> None:
    assert said in refused("build", mapped_block, "-o", tmp_path / "out.engine", *options)
    assert contents(tmp_path) == set()


def test_case32_a_wrong_shape_name_is_answered_with_the_names_there_are(
    refused: Refused, mapped_block: Path, tmp_path: Path
) -> None:
    line = refused("build", mapped_block, "-o", tmp_path / "out.engine", "--opt", "hidden:4x64")
    assert "'hidden'" in line
    assert "x, residual" in line


def test_a_library_that_is_not_a_plugin(refused: Refused, mapped_block: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    assert "cannot be loaded" in refused("build", mapped_block, "-o", tmp_path / "e", "--plugin", text)
    # A library that is none of TensorRT's: one that every Python has loaded.
    import _ctypes

    line = refused("build", mapped_block, "-o", tmp_path / "e", "--plugin", _ctypes.__file__)
    assert "is not moetrt's" in line
    assert contents(tmp_path) == {"text.so"}


def test_a_map_of_int64(refused: Refused, mapped_block: Path, tmp_path: Path) -> None:
    model = ir.load(mapped_block)
    (node,) = [node for node in model.graph if node.domain == "moetrt"]
    index = next(value for value in node.inputs if value is not None and value.dtype == ir.DataType.INT32)
    cast = ir.node("Cast", [index], {"to": ir.DataType.INT64})
    cast.outputs[0].name, cast.outputs[0].dtype = "index64", ir.DataType.INT64
    cast.outputs[0].shape = index.shape
    model.graph.insert_before(node, cast)
    node.replace_input_with(list(node.inputs).index(index), cast.outputs[0])
    broken = mapped_block.with_name("int64.onnx")
    ir.save(model, broken)
    try:
        line = refused("build", broken, "-o", tmp_path / "out.engine")
        assert "input expanded_idx_to_permuted_idx was int64; int32 is taken" in line
        assert contents(tmp_path) == set()
    finally:
        broken.unlink()


# ---------------------------------------------------------------------------------------------------------- comparing


def test_compare_with_another_model(refused: Refused, mapped_block: Path) -> None:
    line = refused("compare", mapped_block, "--against", "moetrt.models:deepseek_v3")
    assert "input_ids" in line


def test_compare_with_a_shape_the_model_has_not(refused: Refused, mapped_block: Path) -> None:
    line = refused("compare", mapped_block, "--against", BLOCK, "--shapes", "hidden:4x64")
    assert "'hidden'" in line


def test_compare_with_a_seed_that_torch_has_not(refused: Refused, mapped_block: Path) -> None:
    line = refused("compare", mapped_block, "--against", BLOCK, "--seed", "9" * 23)
    assert f"the seed was {'9' * 23}; " in line


def test_compare_says_what_differs(refused: Refused, mapped_block: Path) -> None:
    model = onnx.load(mapped_block)
    for initializer in model.graph.initializer:
        if initializer.name == "gamma":
            wrong = onnx.numpy_helper.to_array(initializer) * np.float32(1.01)
            initializer.CopyFrom(onnx.numpy_helper.from_array(wrong, "gamma"))
    broken = mapped_block.with_name("wrong_gamma.onnx")
    onnx.save(model, broken)
    try:
        line = refused("compare", broken, "--against", BLOCK, code=1)
        assert "the first tail that is off is 1 of 1, MoEFinalizeAddRMSNorm: gamma is 1.01 times the original" in line
    finally:
        broken.unlink()


# ------------------------------------------------------------------------------------------------------------- output


def test_an_unwritable_output_folder_on_every_command(refused: Refused, mapped_block: Path, unwritable: Path) -> None:
    for words in (
        ["export", BLOCK, "-o", unwritable],
        ["map", mapped_block, "-o", unwritable / "out.onnx"],
        ["build", mapped_block, "-o", unwritable / "out.engine"],
        ["demo", "-o", unwritable],
    ):
        line = refused(*words)
        assert "cannot be written" in line, words
        assert str(unwritable) in line, words
    assert contents(unwritable.parent.parent) == {"file"}


def test_a_report_that_cannot_be_written(refused: Refused, mapped_block: Path, unwritable: Path) -> None:
    out = unwritable.parent.parent / "out.onnx"
    line = refused("map", mapped_block, "-o", out, "--report", unwritable / "report.json")
    assert "cannot be written" in line
    assert not out.exists()


@pytest.mark.parametrize("command", ["export", "map", "build", "demo"])
def test_outputs_that_are_no_file_of_the_users(refused: Refused, mapped_block: Path, command: str) -> None:
    source = {"export": [BLOCK], "demo": []}.get(command, [mapped_block])
    assert "was ''; a path is taken" in refused(command, *source, "-o", "")
    if command in ("map", "build"):
        assert "'/dev/full' is a device" in refused(command, *source, "-o", "/dev/full")
        assert Path("/dev/full").is_char_device()


def test_an_output_that_another_file_of_the_run_is(refused: Refused, mapped_block: Path) -> None:
    out = mapped_block.with_name("out.onnx")
    before = mapped_block.read_bytes()
    for report in (mapped_block, out, f"{out}.data"):
        assert f"report '{report}' is the" in refused("map", mapped_block, "-o", out, "--report", report)
    assert "is the ONNX model itself" in refused("build", mapped_block, "-o", mapped_block)
    assert not out.exists()
    assert mapped_block.read_bytes() == before


def test_compare_overwrites_no_file_that_it_reads(
    refused: Refused, mapped_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was named nor what is looked for beside the model, nor either's data."""
    monkeypatch.setattr(onnx_files, "SMALL_TENSOR_BYTES", 16)
    for name in ("model", "mapped", "other"):
        onnx_files.save_model(onnx_files.load_model(mapped_block), tmp_path / f"{name}.onnx")
    other = tmp_path / "other.onnx"
    source = tmp_path / "source"
    source.mkdir()
    named = {"--engine": tmp_path / "e.engine", "--plugin": tmp_path / "p.so"}
    for path in (*named.values(), source / "config.json", tmp_path / "raw" / "x.bin"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    common = ["compare", tmp_path / "mapped.onnx", "--against"]
    implied = [tmp_path / name for name in ("model.onnx", "model.onnx.data", "mapped.onnx.data")]
    for path in (*implied, *named.values()):
        for option in ("--json", "--save-inputs"):
            assert f"'{path}' is the" in refused(*common, BLOCK, *sum(named.items(), ()), option, path)
    for path in (other, tmp_path / "other.onnx.data"):
        assert f"'{path}' is the" in refused(*common, BLOCK, "--unmapped", other, "--json", path)
    config = source / "config.json"
    assert f"'{config}' is the file of the source itself" in refused(*common, source, "--json", config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("net = None")
    assert "'own.py' is the file of the source itself" in refused(*common, "own:net", "--json", "own.py")
    (tmp_path / "own.py").unlink()
    # A package runs its own file before a module of it, and what is installed is found by sys.path.
    (tmp_path / "pack").mkdir()
    for name in ("pack/__init__.py", "pack/nets.py"):
        (tmp_path / name).write_text("raise RuntimeError('nothing is run to find it')")
        assert f"'{tmp_path / name}' is the file of the source itself" in refused(
            *common, "pack.nets:net", "--json", tmp_path / name
        )
    shutil.rmtree(tmp_path / "pack")
    installed = cli.__file__.replace("cli.py", "models.py")
    assert "is the file of the source itself" in refused(*common, "moetrt.models:deepseek_v3", "--json", installed)
    raw = ["--save-inputs-raw", tmp_path / "raw"]
    assert "x.bin' is the engine itself" in refused(*common, BLOCK, *raw, "--engine", tmp_path / "raw" / "x.bin")
    assert "is not a folder" in refused(*common, BLOCK, "--save-inputs-raw", other)
    page = tmp_path / "report.json"
    assert "is the report itself" in refused(*common, BLOCK, "--json", page, "--report", tmp_path)
    # That is what --report writes there.
    twice = ["--json", tmp_path / "parity.json", "--report", tmp_path]
    assert "there is no module 'none'" in refused(*common, "none:net", *twice)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tool", "foo"], "tool was 'foo'; auto, trtexec-10, trtexec-11, tensorrt-rtx, python are taken"),
        (["--point", "x:0x64"], "point gives input 'x' the shape 0x64, of no element: there is nothing to time"),
        (["--min", "x:0x64", "--opt", "x:4x64", "--point", "x:0x64"], "of no element"),
        (["--load-inputs", "{}"], "inputs '{}' have 'x' as torch.float16; the model takes torch.float32"),
    ],
)
def test_bench_options_that_are_not_taken(
    refused: Refused, mapped_block: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    saved = save_inputs({"x": torch.ones(3, 64).half(), "residual": torch.ones(3, 64)}, tmp_path / "inputs.json")
    common = ["bench", mapped_block, "-o", tmp_path / "out", "--dry-run"]
    if "--tool" not in words:
        common += ["--tool", "trtexec-11"]
    assert says.format(saved) in refused(*common, *(word.format(saved) for word in words))


def test_a_file_mapped_onto_itself_says_what_is_lost(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.onnx", "b.onnx"):
        onnx_files.save_model(onnx_files.load_model(mapped_block), tmp_path / "a.onnx")
        capsys.readouterr()
        assert cli.run(["map", str(tmp_path / "a.onnx"), "-o", str(tmp_path / name)]) == 0
        assert ("the graph before mapping is gone" in capsys.readouterr().out) == (name == "a.onnx")


def test_bench_and_families_overwrite_no_file_of_their_own(
    refused: Refused, mapped_block: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    assert "is the JSON file itself" in refused("families", "--json", page, "--page", page)
    saved = save_inputs({"x": torch.ones(3, 64), "residual": torch.ones(3, 64)}, tmp_path / "bench.json")
    line = refused("bench", mapped_block, "-o", tmp_path, "--tool", "trtexec-11", "--script", "--load-inputs", saved)
    assert "is the inputs file that is read itself" in line
    assert list(tmp_path.iterdir()) == [saved]


def test_an_invalid_model_is_named_by_every_command(refused: Refused, plain_onnx: Path) -> None:
    model = onnx.load(plain_onnx)
    model.graph.node[0].input[0] = "zzz"
    onnx.save(model, plain_onnx)
    output = ["-o", plain_onnx.with_name("output")]
    for words in (["map", plain_onnx, *output], ["inspect", plain_onnx], ["build", plain_onnx, *output]):
        line = refused(*words)
        assert f"ONNX model '{plain_onnx}' is not valid" in line, words
        assert "'zzz'" in line, words


def moetrt(*words: object, folder: Path, closed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own; ``closed`` is what the shell does to its streams."""
    command = shlex.join([sys.executable, "-m", "moetrt", *map(str, words)])
    return subprocess.run(
        ["/bin/sh", "-c", f"{command} {closed}"],
        cwd=folder,
        # Streams keep what they could not write, as they do for a user.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_stdout_that_is_closed_is_no_fault_where_a_file_is_written(mapped_block: Path, tmp_path: Path) -> None:
    done = moetrt("map", mapped_block, "-o", tmp_path / "out.onnx", folder=tmp_path, closed=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out.onnx").is_file()


@pytest.mark.parametrize(
    "words", [["inspect", "plain.onnx"], ["inspect", "plain.onnx", "--json"], ["doctor"], ["families"]]
)
def test_what_only_prints_says_that_stdout_is_closed(plain_onnx: Path, words: list[str]) -> None:
    """At once: all families would run for many minutes."""
    done = moetrt(*words, folder=plain_onnx.parent, closed=">&-")
    assert done.returncode == 2
    assert done.stderr.startswith("moetrt: error: the output cannot be written: stdout is closed, and ")
    assert done.stderr.count("\n") == 1
    assert moetrt("inspect", "plain.onnx", "-q", folder=plain_onnx.parent, closed=">&-").returncode == 0


@pytest.mark.parametrize("words", [["inspect", "plain.onnx"], ["inspect", "plain.onnx", "--json"], ["--help"]])
def test_stdout_that_is_full_is_one_line(plain_onnx: Path, words: list[str]) -> None:
    done = moetrt(*words, folder=plain_onnx.parent, closed=">/dev/full")
    assert done.returncode == 2
    assert done.stderr == "moetrt: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_the_exit_code_is_the_same_where_stderr_is_lost(tmp_path: Path, closed: str) -> None:
    assert moetrt("inspect", "missing.onnx", folder=tmp_path, closed=closed).returncode == 2


def test_a_name_that_the_terminal_has_no_letters_for_is_escaped(plain_onnx: Path) -> None:
    name = "\u00fc x.onnx"
    shutil.copy(plain_onnx, plain_onnx.with_name(name))
    done = moetrt("inspect", name, folder=plain_onnx.parent, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc x.onnx" in done.stdout


def test_what_the_system_refuses_is_not_a_fault_of_moetrt(refused: Refused) -> None:
    name = "x" * 5000
    assert refused("inspect", name).endswith(": File name too long")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_build_exits_with_130(refused: Refused, mapped_block: Path, tmp_path: Path) -> None:
    timer = threading.Timer(0, signal.raise_signal, [signal.SIGINT])

    def interrupted(*_: object, **__: object) -> None:
        timer.start()
        timer.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moetrt.engine._TensorRT.parse", interrupted)
        patch.setattr("moetrt.engine._TensorRT.layers", lambda *_: (0, []))
        line = refused("build", mapped_block, "-o", tmp_path / "out.engine", code=130)
    assert line == "moetrt: error: interrupted"
    assert contents(tmp_path) == set()


def test_the_installed_command_exits_with_2_and_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "moetrt", "map", "missing.onnx", "-o", "out.onnx"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "moetrt: error: ONNX model 'missing.onnx' does not exist\n"
    assert done.stdout == ""
