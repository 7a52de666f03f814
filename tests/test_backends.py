"""Which TensorRT is chosen, the line where it cannot be, and the link beside TensorRT-RTX's ONNX parser."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetrt import backends
from moetrt.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backends.ENVIRONMENT_VARIABLE, raising=False)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process of its own: the choice holds for a whole process."""
    path = os.pathsep.join([*environment.pop("prepend", "").split(os.pathsep), str(REPOSITORY / "export")])
    kept = {k: v for k, v in os.environ.items() if k not in (backends.ENVIRONMENT_VARIABLE, backends.POLYGRAPHY_SWITCH)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": path.strip(os.pathsep), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_unknown_backend_names_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^backend was 'onnx'; taken are tensorrt and tensorrt-rtx$"):
        backends.resolve("onnx")
    with pytest.raises(InputError, match=r"^backend was '\['onnx'\]'; taken are"):
        backends.resolve(["onnx"])  # type: ignore[arg-type]
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "trt")
    with pytest.raises(InputError, match=r"^backend \(from MOETRT_BACKEND\) was 'trt'; taken are"):
        backends.resolve()


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "installed", lambda name: False)
    with pytest.raises(InputError, match=r"tensorrt is not installed; pip install 'moetrt\[tensorrt\]'$"):
        backends.resolve("tensorrt")
    with pytest.raises(InputError, match=r"tensorrt_rtx is not installed; pip install 'moetrt\[rtx\]'$"):
        backends.resolve()


@pytest.mark.parametrize(
    ("has_tensorrt", "has_gpu", "expected"),
    [(True, True, "tensorrt"), (True, False, "tensorrt-rtx"), (False, True, "tensorrt-rtx")],
)
def test_tensorrt_needs_a_gpu_to_be_the_default(
    monkeypatch: pytest.MonkeyPatch, has_tensorrt: bool, has_gpu: bool, expected: str
) -> None:
    monkeypatch.setattr(backends, "installed", lambda name: name == "tensorrt-rtx" or has_tensorrt)
    monkeypatch.setattr(backends, "gpus", lambda: (backends.Gpu("a GPU", (9, 0)),) if has_gpu else ())
    assert backends.resolve() == expected


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "installed", lambda name: True)
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "tensorrt")
    assert backends.resolve() == "tensorrt"
    assert backends.resolve("tensorrt-rtx") == "tensorrt-rtx"


def test_a_process_holds_to_its_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = backends.choose()
    assert backends.choose() is chosen
    assert chosen.version == chosen.module.__version__
    other = "tensorrt" if chosen.is_rtx else "tensorrt-rtx"
    monkeypatch.setattr(backends, "installed", lambda name: True)
    with pytest.raises(InputError, match=rf"^backend {other}: this process uses {chosen.name} already"):
        backends.choose(other)


def test_a_version_that_is_too_old_is_refused() -> None:
    done = python(
        "import tensorrt_rtx; tensorrt_rtx.__version__ = '1.6.0.1'\n"
        "from moetrt import backends\n"
        "try: backends.choose('tensorrt-rtx')\n"
        "except ValueError as error: print(error)"
    )
    assert done.stdout == "backend tensorrt-rtx: version 1.6.0.1 is too old; 1.7 or later is taken\n", done.stderr


def test_polygraphy_is_switched_before_it_is_imported() -> None:
    done = python(
        "from moetrt import backends\n"
        "chosen = backends.choose('tensorrt-rtx')\n"
        "from polygraphy.backend.trt import get_trt_logger\n"
        "assert isinstance(get_trt_logger(), chosen.module.ILogger)\n"
        "import os; print(os.environ['POLYGRAPHY_USE_TENSORRT_RTX'])"
    )
    assert done.stdout == "1\n", done.stderr


def test_polygraphy_imported_too_early_is_named() -> None:
    done = python(
        "import polygraphy.util\n"
        "from moetrt import backends\n"
        "try: backends.choose('tensorrt-rtx')\n"
        "except ValueError as error: print(error)"
    )
    assert done.stdout.startswith("backend tensorrt-rtx: Polygraphy was imported before"), done.stderr
    assert "POLYGRAPHY_USE_TENSORRT_RTX=1" in done.stdout


# ------------------------------------------------------------------------------------------------------------- the link


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins for TensorRT-RTX's two libraries, which count as the loaded ones."""
    names = {"libtensorrt_rtx.so": "libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so": "libparser.so.1"}
    for name in names.values():
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(backends, "_loaded_library", lambda stem: tmp_path / names[stem])
    return tmp_path


def link_and_listen() -> list[str]:
    said: list[str] = []
    link = backends.link_unversioned_name(progress=said.append)
    assert os.path.samefile(link, link.parent / "libtensorrt_rtx.so.1")
    return said


def test_the_link_is_made_once_and_told_once(libraries: Path) -> None:
    (said,) = link_and_listen()
    assert "libtensorrt_rtx.so -> libtensorrt_rtx.so.1" in said
    assert (libraries / "libtensorrt_rtx.so").readlink() == Path("libtensorrt_rtx.so.1")
    assert link_and_listen() == []


@pytest.mark.parametrize("old", ["libtensorrt_rtx.so.0", "other.so", "/nowhere/libtensorrt_rtx.so.1"])
def test_a_dangling_or_wrong_old_link_is_replaced(libraries: Path, old: str) -> None:
    (libraries / "other.so").write_bytes(b"another copy")
    (libraries / "libtensorrt_rtx.so").symlink_to(old)
    assert len(link_and_listen()) == 1
    assert sorted(path.name for path in libraries.iterdir()) == [
        "libparser.so.1",
        "libtensorrt_rtx.so",
        "libtensorrt_rtx.so.1",
        "other.so",
    ]


def test_a_file_in_the_place_of_the_link_is_left_alone(libraries: Path) -> None:
    (libraries / "libtensorrt_rtx.so").write_bytes(b"another copy")
    with pytest.raises(InputError, match=r"is a file of another TensorRT-RTX than the one that is loaded"):
        backends.link_unversioned_name()
    assert (libraries / "libtensorrt_rtx.so").read_bytes() == b"another copy"


def test_a_folder_that_cannot_be_written_is_named(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody can make files there, root included.
    parser = Path("/proc/self/libtensorrt_onnxparser_rtx.so.1")
    library = libraries / "libtensorrt_rtx.so.1"
    monkeypatch.setattr(backends, "_loaded_library", lambda stem: parser if "parser" in stem else library)
    with pytest.raises(InputError, match=r"its folder cannot be written .*; have it made once: ln -s .* /proc/self/"):
        backends.link_unversioned_name()


def _race(folder: str, rounds: int) -> None:
    here = Path(folder)
    for _ in range(rounds):
        # Another process's link, or a wrong one, may come at any moment.
        wrong = here / f"wrong-{os.getpid()}"
        wrong.symlink_to("nowhere")
        os.replace(wrong, here / "libtensorrt_rtx.so")
        backends.link_unversioned_name()


def test_processes_may_make_the_link_at_once(libraries: Path) -> None:
    # Forked, so that they see the stand-ins.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_race, args=(str(libraries), 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    backends.link_unversioned_name()
    assert len(link_and_listen()) == 0
    assert len(list(libraries.iterdir())) == 3


def test_a_fresh_installation_is_linked_to_the_copy_that_is_loaded(tmp_path: Path) -> None:
    """The real libraries, in a folder of their own as pip would leave them: the parser then finds its plugin."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.origin is not None
    package = tmp_path / "tensorrt_rtx_libs"
    package.mkdir()
    for file in Path(spec.origin).parent.iterdir():
        if file.is_file() and not file.is_symlink():
            _link_or_copy(file, package / file.name)
    code = (
        "from moetrt import backends\n"
        "backends.choose('tensorrt-rtx', progress=print)\n"
        "print(backends._loaded_library('libtensorrt_rtx.so'))"
    )
    first, second = python(code, prepend=str(tmp_path)), python(code, prepend=str(tmp_path))
    library = str(package / "libtensorrt_rtx.so.1")
    assert first.stdout.splitlines()[-1] == library, first.stderr
    assert first.stdout.startswith(f"linked {package / 'libtensorrt_rtx.so'} -> libtensorrt_rtx.so.1")
    assert second.stdout.splitlines() == [library], second.stderr


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        target.write_bytes(source.read_bytes())
