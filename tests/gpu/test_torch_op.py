"""The PyTorch operator on a GPU runs the library's kernel: its numbers, streams, graphs and torch.compile."""

import warnings
from typing import Any

import pytest
import torch

import moetrt.torch_op  # noqa: F401  registers torch.ops.moetrt
from moetrt import cuda_op
from moetrt.errors import InputError
from moetrt.library import PluginLibrary
from tests.operator_cases import Case, make_case
from tests.plugins.driver import Driver
from tests.plugins.host.host_kernel import Judge
from tests.plugins.operator_runs import CASES, Prepared, case_named


def call(case: Case, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """The op on a GPU; a warning is an error."""
    op = getattr(torch.ops.moetrt, case.spec.torch_name)
    inputs = [case.tensors.get(entry.name) for entry in case.spec.inputs]
    flags = {entry.name for entry in case.spec.attributes if entry.kind == "FLAG"}
    attributes: dict[str, Any] = {
        name: bool(value) if name in flags else value for name, value in case.attributes.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = op(*(None if tensor is None else tensor.to(device) for tensor in inputs), **attributes)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CASES)
def test_every_case(on_gpu: PluginLibrary, name: str, seed: int) -> None:
    case = case_named(name, torch.bfloat16, seed)
    outputs = tuple(output.cpu().reshape(-1, output.shape[-1]) for output in call(case))
    assert Judge(case).faults(outputs) == []


def test_it_is_the_very_kernel_that_an_engine_runs(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    case = case_named("DeepSeek-V3", torch.bfloat16, seed)
    for got, wanted in zip(call(case), Prepared(driver, case).results(), strict=True):
        assert torch.equal(got.cpu().view(torch.int16), wanted.view(torch.int16))


def test_it_runs_on_the_current_stream(on_gpu: PluginLibrary, seed: int) -> None:
    case = make_case(tokens=64, top_k=8, hidden=7168, dtype=torch.bfloat16, absent=0.0, seed=seed)
    late = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # The rows are there only after a long kernel on the same stream.
        rows = torch.full_like(late["gemm2_permuted"], float("nan"))
        torch.cuda._sleep(50_000_000)
        rows.copy_(late["gemm2_permuted"])
        outputs = torch.ops.moetrt.moe_finalize_add_rms_norm(
            rows, late["expert_weights"], late["expanded_idx_to_permuted_idx"], late["shared_output"], None,
            late["residual"], late["gamma"],
        )  # fmt: skip
    stream.synchronize()
    assert Judge(case).faults(tuple(output.cpu() for output in outputs)) == []


def test_in_torch_compile_and_in_a_cuda_graph(on_gpu: PluginLibrary, seed: int) -> None:
    case = case_named("case10 one token", torch.bfloat16, seed)
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    names = [entry.name for entry in case.spec.inputs]

    def tail(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        norm, hidden = torch.ops.moetrt.moe_finalize_add_rms_norm(*(given.get(name) for name in names))
        return norm, hidden

    expected = tail(tensors)
    compiled = torch.compile(tail, fullgraph=True)(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tail(tensors)
    graph.replay()
    torch.cuda.synchronize()
    for outputs in (compiled, captured):
        for got, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(got, wanted)


def test_a_tensor_on_another_device_is_refused(on_gpu: PluginLibrary, seed: int) -> None:
    case = make_case(hidden=64, seed=seed)
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()} | {"gamma": case.tensors["gamma"]}
    with pytest.raises(InputError, match="input gamma was on cpu; cuda:0, where gemm2_permuted is, is taken"):
        cuda_op.run_on_cuda(case.spec, tensors, {})


@pytest.mark.parametrize("name", ["DeepSeek-V3", "case10 one token", "case11 H=20000"])
def test_on_two_gpus_in_turn(on_gpu: PluginLibrary, name: str, seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = case_named(name, torch.bfloat16, seed)
    judge = Judge(case)
    # The current device stays the first: the kernel runs where the tensors are.
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        outputs = call(case, device)
        assert {str(output.device) for output in outputs} == {device}
        assert judge.faults(tuple(output.cpu().reshape(-1, output.shape[-1]) for output in outputs)) == []
    assert torch.cuda.current_device() == 0
