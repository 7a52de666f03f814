"""An engine of one node on a GPU, where TensorRT itself is installed: built, deserialised, run, compared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetrt.backends import TENSORRT, TENSORRT_RTX, installed
from moetrt.library import PluginLibrary
from tests.operator_cases import make_case
from tests.plugins.host.host_kernel import Judge
from tests.plugins.node_cases import Node

# TensorRT-RTX builds for no GPU of a data centre after SM80.
RTX_HAS_NO_TARGET = ((9, 0), (10, 0), (10, 3))


@pytest.mark.parametrize("backend", [TENSORRT, TENSORRT_RTX])
@pytest.mark.parametrize("changes", [{"gate": True}, {"norm": False}, {"hidden": 7168, "top_k": 8}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_an_engine_runs_the_operator(
    on_gpu: PluginLibrary, tmp_path: Path, backend: str, changes: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    if not installed(backend):
        pytest.skip(f"{backend} is not installed")
    if backend == TENSORRT_RTX and torch.cuda.get_device_capability() in RTX_HAS_NO_TARGET:
        pytest.skip("TensorRT-RTX has no target for this GPU")
    from moetrt.engine import build_engine
    from moetrt.parity.runners import tensorrt_runner

    case = make_case(**{"hidden": 64, "dtype": dtype, "seed": seed, **changes})
    node = Node(
        case.spec,
        {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in case.tensors.items()},
        {name: tuple(tensor.shape) for name, tensor in case.tensors.items()},
        case.attributes,
    )
    (tmp_path / "node.onnx").write_bytes(node.onnx_model())
    info = build_engine(tmp_path / "node.onnx", tmp_path / "node.engine", backend=backend, plugin_library=on_gpu.path)
    assert len(info.plugin_layers) == 1
    with tensorrt_runner(info.path, plugin_library=on_gpu.path, backend=backend) as runner:
        found = runner.infer({name: tensor.cuda() for name, tensor in case.tensors.items()})
        outputs = tuple(torch.as_tensor(found[name]).cpu() for name in case.spec.outputs)
    assert Judge(case).faults(tuple(output.reshape(-1, output.shape[-1]) for output in outputs)) == []
