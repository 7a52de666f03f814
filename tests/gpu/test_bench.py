"""The benchmark on a GPU: through TensorRT's Python module and through trtexec, each where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moetrt import cli
from moetrt.backends import ENVIRONMENT_VARIABLE, TENSORRT, TENSORRT_RTX, installed
from moetrt.bench import trtexec
from moetrt.library import PluginLibrary
from tests.gpu.test_engine import RTX_HAS_NO_TARGET

POINTS = ["--point", "x:16x64", "residual:16x64", "--point", "x:256x64", "residual:256x64"]


def run(model: Path, folder: Path, library: PluginLibrary, tool: str) -> dict[str, Any]:
    options = ["--tool", tool, "--plugin", str(library.path), "--repeats", "2", "--seconds", "0.5"]
    assert cli.run(["bench", str(model), "-o", str(folder), *options, *POINTS]) == 0
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return content


def check(result: dict[str, Any]) -> None:
    """What must hold whatever the times are."""
    assert result["device"] == torch.cuda.get_device_name()
    assert [point["name"] for point in result["points"]] == ["1", "2"]
    for point in result["points"]:
        assert all(value > 0 for value in point["end_to_end"]["plugin_ms"]["low"]["runs"])
        (tail,) = point["tails"]
        # The plugin is a layer of its own; the native tail is layers of its own or shared with others, never nothing.
        assert len(tail["layers"]["plugin"]["own"]) >= 1
        assert tail["layers"]["native"]["own"] or tail["layers"]["native"]["shared"]
        assert 0 < point["share_in_tails"]["plugin"]["low"]["median"] < 1


@pytest.mark.parametrize("backend", [TENSORRT, TENSORRT_RTX])
def test_through_the_python_module(
    on_gpu: PluginLibrary, mapped_block: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed(backend):
        pytest.skip(f"{backend} is not installed")
    if backend == TENSORRT_RTX and torch.cuda.get_device_capability() in RTX_HAS_NO_TARGET:
        pytest.skip("TensorRT-RTX has no target for this GPU")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    check(run(mapped_block, tmp_path / "out", on_gpu, "python"))


@pytest.mark.parametrize("executable", sorted({tool.executable for tool in trtexec.TOOLS.values()}))
def test_through_the_executable(on_gpu: PluginLibrary, mapped_block: Path, tmp_path: Path, executable: str) -> None:
    path = trtexec.find_executable(executable)
    if path is None:
        pytest.skip(f"{executable} is not installed")
    if executable == "tensorrt_rtx" and torch.cuda.get_device_capability() in RTX_HAS_NO_TARGET:
        pytest.skip("TensorRT-RTX has no target for this GPU")
    version = trtexec.version_of(path)
    tool = "tensorrt-rtx" if executable == "tensorrt_rtx" else trtexec.key_of_version(version or "")
    check(run(mapped_block, tmp_path / "out", on_gpu, tool))
