"""The README's commands and snippets, run from top to bottom in one folder, as a reader without a GPU runs them."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from moetrt.bench import benchmark
from tests.documents import ROOT, Session
from tests.test_docs import Stage
from tests.test_readme import INDENTED, README
from tests.trtexec_stand_in import parse

PROGRAMS = ("moetrt", "make", "trtexec", "polygraphy")
COMMANDS = [line for line in INDENTED if re.match(rf"(?:[A-Z_]+=\S+ )?(?:{'|'.join(PROGRAMS)}) ", line)]

# Run by tests of their own, or nothing but a way to them.
ELSEWHERE = {
    "moetrt families": "tests/test_families.py",
    "make demo": "tests/test_demo.py",
    "make test": "all of them",
}


def elsewhere(line: str) -> bool:
    return any(line.startswith(start) for start in ELSEWHERE)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, plugin_library: Path) -> Stage:
    """A folder from which the clone's patterns are seen, and in whose model/ the plugin library lies."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "plugins").symlink_to(ROOT / "plugins")
    (folder / "model").mkdir()
    shutil.copy(plugin_library, folder / "model" / "libmoetrt_plugins.so")
    return Stage(folder)


def run(stage: Session, line: str) -> None:
    """Runs one line; those of TensorRT's own tools name files beside the model."""
    if line.startswith("trtexec "):
        for version in ((10, 8), (11, 1)):
            options, libraries, _ = parse(shlex.split(line)[1:], version)
            # dlopen looks for a name without a slash in the system's folders alone.
            assert all("/" in library for library in libraries)
            assert options["--onnx"] == "mapped.onnx"
        return
    if "--read" in line:
        stage.command("bash model/bench.sh", with_trtexec=True)
        assert stage.code == 0
    folder = stage.folder
    if "--plugins ./libmoetrt_plugins.so" in line:
        stage.folder = folder / "model"
    try:
        said = stage.command(line)
    finally:
        stage.folder = folder
    assert stage.code == 0, f"{line}\n{said}"


def test_commands(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "gpus", lambda: ())
    lines = [line for line in COMMANDS if not elsewhere(line)]
    assert len(lines) > 10
    for line in lines:
        run(stage, line)
    made = {path.name for path in (stage.folder / "model").iterdir()}
    assert {"model.engine", "bench.json", "report.html", "inputs.json", "replaced.onnx"} <= made


def test_what_runs_elsewhere_is_shown() -> None:
    assert all(any(line.startswith(start) for line in COMMANDS) for start in ELSEWHERE)
    assert all((ROOT / place).exists() for place in ELSEWHERE.values() if "/" in place)


def snippets() -> list[str]:
    found = [block for block in re.findall(r"(?:^    .*\n|^\n)+", README, re.MULTILINE) if "import" in block]
    return ["\n".join(line[4:] for line in block.splitlines()) for block in found]


def test_snippets(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, whole = snippets()
    given = {
        "gemm2_permuted": torch.randn(12, 16),
        "expert_weights": torch.rand(4, 2),
        "expanded_idx_to_permuted_idx": torch.arange(8, dtype=torch.int32).view(4, 2),
        "shared": torch.randn(4, 16),
        "residual": torch.randn(4, 16),
        "gamma": torch.ones(16),
    }
    exec(tail, given)
    assert given["norm_out"].shape == given["residual_out"].shape == (4, 16)

    monkeypatch.chdir(stage.folder)
    names: dict[str, object] = {}
    exec(whole, names)
    report, parity, engine = (names[name] for name in ("report", "parity", "engine"))
    assert report.complete  # type: ignore[attr-defined]
    assert parity.passed  # type: ignore[attr-defined]
    assert len(engine.plugin_layers) == len(report.sites)  # type: ignore[attr-defined]
