"""Case 40: a model and the data file beside it were written together, and every reader sees where they were not."""

import os
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
import onnxruntime
import pytest
from onnx import numpy_helper

from moetrt import capture, cli, files
from moetrt.errors import InputError
from moetrt.external_data import mark_of
from moetrt.files import sole_writer
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from tests.conftest import BLOCK
from tests.test_onnx_files import WEIGHT, linear_model

REPLACED = r"its data file '.*' was replaced, and holds other weights; expected the one that it was written with"


def of(number: int) -> onnx.ModelProto:
    """A model whose graph says which weights are its own: all are ``number``, and so is the bias."""
    proto = linear_model(np.full_like(WEIGHT, number))
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32(number), "bias"))
    return proto


def written(path: Path, number: int) -> Path:
    """Writes that model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_model(ir.from_proto(of(number)), path)


def run(path: Path) -> float:
    """What ONNX Runtime makes of ones: 65 times the number, where graph and weights are of one model."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.ones((1, 64), np.float32)})[0][0, 0])


def at_once(*writers: Callable[[], object]) -> None:
    """Runs the writers in threads, which start together; what one raises is raised here."""
    barrier = threading.Barrier(len(writers))
    raised: list[BaseException] = []

    def work(writer: Callable[[], object]) -> None:
        barrier.wait()
        try:
            writer()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


@pytest.fixture
def slow_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a data file's renaming and its model's, another writer has its turn."""
    rename = os.replace

    def slowly(source: str, target: str) -> None:
        rename(source, target)
        time.sleep(0.004)

    monkeypatch.setattr(files.os, "replace", slowly)


@pytest.mark.usefixtures("slow_renames")
def test_case_40_two_maps_into_one_folder_at_once(tmp_path: Path) -> None:
    sources = [written(tmp_path / str(number) / "m.onnx", number) for number in (1, 2)]
    out = tmp_path / "out" / "m.onnx"
    for _ in range(20):
        at_once(
            *(lambda source=source: map_file(source, out, report_path=out.with_suffix(".json")) for source in sources)
        )
        load_model(out)
        assert run(out) in (65, 130)
        number = int(run(out)) // 65
        assert f'"file": "../{number}/m.onnx"' in out.with_suffix(".json").read_text()
    assert sorted(os.listdir(out.parent)) == ["m.json", "m.onnx", "m.onnx.data"]


@pytest.mark.usefixtures("slow_renames")
def test_case_40_two_exports_into_one_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch traces is not what is tried here."""
    monkeypatch.setattr(capture, "capture", lambda source, **_: ir.from_proto(of(source.number)))
    source = type("Source", (), {"description": "a model", "tails_expected": None})
    sources = [type("Source", (source,), {"number": number}) for number in (1, 2)]
    for _ in range(20):
        at_once(*(lambda source=source: capture.export(source, tmp_path) for source in sources))
        assert run(tmp_path / "model.onnx") in (65, 130)
        sidecar = (tmp_path / "model.onnx.json").read_text()
        assert files.file_sha256(tmp_path / "model.onnx") in sidecar


def test_case_40_a_writer_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom moetrt.files import sole_writer\n"
        "with sole_writer(sys.argv[1]):\n    print('in', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "m.onnx"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        told: list[str] = []

        def wait() -> None:
            with sole_writer(tmp_path / "m.onnx", told.append):
                told.append("in")

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not told:
            time.sleep(0.001)
        assert told == ["waiting for another process that writes here"]
        process.send_signal(signal.SIGKILL)
        waiting.join(30)
    assert told[-1] == "in"
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_written_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sole_writer(tmp_path / "a" / "b" / "m.onnx"):
        assert 1 / 0
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(files.fcntl, "flock", refused)
    map_file(written(tmp_path / "1" / "m.onnx", 1), tmp_path / "out" / "m.onnx")
    assert run(tmp_path / "out" / "m.onnx") == 65


def test_case_40_the_data_of_another_is_seen(tmp_path: Path) -> None:
    first, second = (written(tmp_path / str(number) / "m.onnx", number) for number in (1, 2))
    shutil.copy(f"{second}.data", f"{first}.data")
    with pytest.raises(InputError, match=REPLACED):
        load_model(first)
    # Nothing else could tell: ONNX Runtime reads it.
    assert run(first) == 64 * 2 + 1


def test_case_40_the_data_of_another_tool_is_seen(tmp_path: Path) -> None:
    """torch.onnx too calls it model.onnx.data."""
    path = written(tmp_path / "m.onnx", 1)
    onnx.save(of(2), tmp_path / "other.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    with pytest.raises(InputError, match=REPLACED):
        load_model(path)


def test_each_writing_is_another(tmp_path: Path) -> None:
    """The same model twice has another mark each time, as nobody looked at all of its weights."""
    path = written(tmp_path / "m.onnx", 1)
    kept = tmp_path / "kept.onnx"
    shutil.copy(path, kept)
    written(path, 1)
    load_model(path)
    with pytest.raises(InputError, match=REPLACED):
        load_model(kept)


def test_mapping_twice_gives_the_same_files(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", 1)
    copies = [tmp_path / name / "m.onnx" for name in "ab"]
    for copy in copies:
        map_file(path, copy)
    assert copies[0].read_bytes() == copies[1].read_bytes()
    assert Path(f"{copies[0]}.data").read_bytes() == Path(f"{copies[1]}.data").read_bytes()
    assert mark_of(f"{copies[0]}.data") != mark_of(f"{path}.data")
    map_file(path, tmp_path / "beside.onnx")
    assert sorted(path.name for path in tmp_path.glob("*.data")) == ["m.onnx.data"]
    load_model(tmp_path / "beside.onnx")


def test_a_mapped_file_onto_itself_and_again(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", 1)
    for _ in range(2):
        map_file(path, path)
        load_model(path)
        assert run(path) == 65


@pytest.mark.parametrize("location", ["m.onnx.data", "other.data"])
def test_a_file_that_another_tool_saved_again_is_taken(tmp_path: Path, location: str) -> None:
    path = written(tmp_path / "m.onnx", 1)
    (tmp_path / "again").mkdir()
    again = tmp_path / "again" / "m.onnx"
    onnx.save(onnx.load(path), again, save_as_external_data=True, location=location, size_threshold=0)
    load_model(again)
    save_model(load_model(again), tmp_path / "third" / "m.onnx")
    load_model(tmp_path / "third" / "m.onnx")
    # The graph alone, with the data as it was.
    onnx.save(onnx.load(path, load_external_data=False), path)
    load_model(path)


def test_a_file_without_a_mark_is_taken_and_one_that_lost_it_is_not(tmp_path: Path) -> None:
    onnx.save(of(1), tmp_path / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    map_file(tmp_path / "m.onnx", tmp_path / "beside.onnx")
    load_model(tmp_path / "beside.onnx")
    path = written(tmp_path / "own.onnx", 1)
    data = Path(f"{path}.data")
    data.write_bytes(data.read_bytes()[: WEIGHT.nbytes])
    with pytest.raises(InputError, match=REPLACED):
        load_model(path)


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_case_40_data_that_is_replaced_while_a_model_is_mapped(tmp_path: Path, folder: str) -> None:
    path = written(tmp_path / "m.onnx", 1)
    model = load_model(path)
    written(path, 2)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"data file '.*m\.onnx\.data' was replaced while its model was read"):
        save_model(model, tmp_path / folder / "mapped.onnx")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "command",
    [
        "map {model} -o {out}/m.onnx",
        "inspect {model}",
        "compare {model} --against " + BLOCK,
        "build {model} -o {out}/m.engine",
        "bench {model} -o {out} --script --tool trtexec-11",
        "report {folder}",
    ],
)
def test_case_40_every_command_refuses_a_mapped_file_beside_a_new_export(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = Path(shutil.copytree(mapped_block.parent, tmp_path / "got"))
    mapped = folder / "mapped.onnx"
    map_file(folder / "model.onnx", mapped, report_path=folder / "mapping.json")
    source = ir.load(folder / "model.onnx")
    ir.external_data.load_to_model(source)
    save_model(source, folder / "model.onnx")
    words = command.format(model=mapped, out=tmp_path / "out", folder=folder).split()
    assert cli.run(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("moetrt: error: ")]) == 1
    assert "mapped.onnx': its data file 'model.onnx.data' was replaced, and holds other weights" in lines[-1]
    assert not (tmp_path / "out").exists()
