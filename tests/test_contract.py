"""The contract: the two FlashInfer layouts, each violation of them, and torch.export's view of the classes."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import moetrt
from moetrt import MoEOutput, UnfinalizedMoEOutput, convert_flashinfer_moe_output

TOKENS, TOP_K, HIDDEN, ROWS = 5, 3, 8, 20


def deferred(flat: bool = False) -> list[torch.Tensor]:
    weights = torch.rand(TOKENS, TOP_K)
    index = torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K)
    if flat:
        weights, index = weights.flatten(), index.flatten()
    return [torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), weights, index]


def convert(output: object, **changes: object) -> object:
    arguments = {"do_finalize": False, "num_tokens": TOKENS, "top_k": TOP_K} | changes
    return convert_flashinfer_moe_output(output, **arguments)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("container", [list, tuple])
def test_case02_deferred_layout_is_viewed_as_tokens_by_top_k(flat: bool, container: type) -> None:
    rows, weights, index = given = deferred(flat)
    result = convert(container(given))
    assert isinstance(result, UnfinalizedMoEOutput)
    assert result.gemm2_permuted is rows
    assert result.expert_weights.shape == result.expanded_idx_to_permuted_idx.shape == (TOKENS, TOP_K)
    assert result.expert_weights.data_ptr() == weights.data_ptr()
    assert torch.equal(result.expanded_idx_to_permuted_idx.flatten(), index.flatten())


def test_deferred_layout_of_no_tokens() -> None:
    rows = torch.empty(0, HIDDEN)
    result = convert([rows, torch.empty(0), torch.empty(0, dtype=torch.int32)], num_tokens=0)
    assert result.expert_weights.shape == (0, TOP_K)


def test_finalized_layouts() -> None:
    tensor = torch.randn(TOKENS, HIDDEN)
    assert convert(tensor, do_finalize=True) is tensor
    assert convert([tensor], do_finalize=True) is tensor
    assert convert((tensor,), do_finalize=True, finalized_output=tensor) is tensor


def replaced(position: int, tensor: object) -> list[object]:
    output: list[object] = list(deferred())
    output[position] = tensor
    return output


@pytest.mark.parametrize(
    ("output", "changes", "message"),
    [
        (deferred(), {"num_tokens": -1}, "num_tokens was -1; an int of at least 0 is taken"),
        (deferred(), {"num_tokens": 2.0}, "num_tokens was 2.0; an int"),
        (deferred(), {"top_k": 0}, "top_k was 0; an int of at least 1 is taken"),
        (deferred(), {"top_k": True}, "top_k was True"),
        (deferred(), {"finalized_output": torch.empty(1)}, "finalized_output was given with do_finalize=False"),
        (torch.empty(2), {}, "a Tensor; a sequence of three tensors is taken"),
        (deferred()[:2], {}, "had 2 entries; exactly three are taken"),
        ([*deferred(), torch.empty(1)], {}, "had 4 entries; exactly three are taken"),
        (replaced(1, None), {}, "expert_weights was a NoneType"),
        (replaced(0, torch.randn(2, ROWS, HIDDEN)), {}, "gemm2_permuted had rank 3"),
        (replaced(2, deferred()[2].long()), {}, "expanded_idx_to_permuted_idx was torch.int64; torch.int32 is taken"),
        (replaced(1, torch.ones(TOKENS, TOP_K, dtype=torch.int32)), {}, "expert_weights was torch.int32"),
        (replaced(1, torch.rand(TOKENS, TOP_K + 1)), {}, r"expert_weights had 20 elements.*5 \* 3 = 15 are taken"),
        (replaced(2, torch.zeros(7, dtype=torch.int32)), {}, "expanded_idx_to_permuted_idx had 7 elements"),
        (replaced(1, torch.rand(TOP_K, TOKENS).t()), {}, "expert_weights was not contiguous"),
        (replaced(0, torch.randn(HIDDEN, ROWS).t()), {}, "gemm2_permuted was not contiguous"),
        (replaced(1, torch.rand(TOKENS, TOP_K, device="meta")), {}, "expert_weights was on meta; cpu"),
        (None, {"do_finalize": True}, "a NoneType; a torch.Tensor is taken"),
        ([], {"do_finalize": True}, "a sequence of 0; a tensor or exactly one is taken"),
        (deferred(), {"do_finalize": True}, "a sequence of 3; a tensor or exactly one is taken"),
    ],
)
def test_each_violation_says_what_was_wrong(output: object, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(output, **changes)


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (torch.empty(TOKENS, HIDDEN + 1), "its shape was"),
        (torch.empty(TOKENS, HIDDEN, dtype=torch.float16), "its dtype was"),
        (torch.empty(TOKENS, HIDDEN, device="meta"), "its device was"),
        (torch.empty(TOKENS, HIDDEN), "its data_ptr was"),
        ([1], "finalized_output was a list"),
    ],
)
def test_a_destination_that_the_result_does_not_alias(destination: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(torch.empty(TOKENS, HIDDEN), do_finalize=True, finalized_output=destination)


class Tail(torch.nn.Module):
    """Takes a contract object and gives one back."""

    def forward(self, moe_output: MoEOutput) -> MoEOutput:
        routed = moe_output.routed
        doubled = UnfinalizedMoEOutput(
            routed.gemm2_permuted * 2, routed.expert_weights, routed.expanded_idx_to_permuted_idx
        )
        return MoEOutput(doubled, moe_output.shared_output, moe_output.routed_scaling_factor)


def test_modules_that_take_and_return_the_classes_export() -> None:
    moe_output = MoEOutput(UnfinalizedMoEOutput(*deferred()), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), 2.5)
    program = torch.export.export(Tail(), (moe_output,))
    result = program.module()(moe_output)
    assert isinstance(result, MoEOutput)
    assert torch.equal(result.routed.gemm2_permuted, moe_output.routed.gemm2_permuted * 2)


@dataclass
class TheirRouted:
    """Another library's class with the contract's field names."""

    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


@dataclass
class TheirOutput:
    """Another library's class with the contract's field names."""

    routed: object
    shared_output: torch.Tensor | None
    routed_scaling_factor: float


def test_objects_of_other_libraries_are_accepted() -> None:
    shared = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    residual, gamma = torch.randn_like(shared), torch.rand(HIDDEN)
    buffers = deferred()
    theirs = moetrt.finalize_add_rms_norm(TheirOutput(TheirRouted(*buffers), shared, 2.5), residual, gamma)
    ours = moetrt.finalize_add_rms_norm(MoEOutput(UnfinalizedMoEOutput(*buffers), shared, 2.5), residual, gamma)
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a, b)


def test_the_front_names_what_is_not_the_contract() -> None:
    with pytest.raises(TypeError, match="moe_output was a Tensor; an object with the fields routed"):
        moetrt.finalize_add(torch.empty(1))
    rows, weights, index = deferred()
    with pytest.raises(
        TypeError, match=r"moe_output.routed was a list \(no gemm2_permuted\); an object with the tensors"
    ):
        moetrt.finalize_add(MoEOutput([rows, weights, index]))
    with pytest.raises(TypeError, match=r"UnfinalizedMoEOutput \(its expert_weights was a NoneType\)"):
        moetrt.finalize_add(MoEOutput(UnfinalizedMoEOutput(rows, None, index)))
    with pytest.raises(ValueError, match=r"moe_output.routed was \[8\]; a finalized tensor \[..., H\] is taken"):
        moetrt.finalize_add(MoEOutput(torch.empty(HIDDEN)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finalized_output_goes_through_the_same_front(dtype: torch.dtype) -> None:
    routed, shared, residual = (torch.randn(2, TOKENS, HIDDEN).to(dtype) for _ in range(3))
    norm, hidden = moetrt.finalize_add_rms_norm(MoEOutput(routed, shared, 2.5), residual, torch.ones(HIDDEN), 1e-5)
    wanted = (routed.float() * 2.5 + shared.float() + residual.float()).to(dtype)
    assert torch.equal(hidden, wanted)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(wanted.float(), (HIDDEN,), eps=1e-5).to(dtype))
    assert torch.equal(moetrt.finalize_add(MoEOutput(routed)), routed.flatten(0, 1))


@pytest.mark.parametrize("name", ["expert_weights", "expanded_idx_to_permuted_idx", "shared", "residual", "gamma"])
def test_operands_on_another_device_are_refused(name: str) -> None:
    rows, weights, index = deferred()
    tensors = {"expert_weights": weights, "expanded_idx_to_permuted_idx": index}
    tensors |= {"shared": rows[:TOKENS], "residual": rows[:TOKENS], "gamma": torch.ones(HIDDEN)}
    tensors[name] = tensors[name].to("meta")
    routed = UnfinalizedMoEOutput(rows, tensors["expert_weights"], tensors["expanded_idx_to_permuted_idx"])
    with pytest.raises(ValueError, match=rf"input {name}\w* was on meta; cpu, where gemm2_permuted is, is taken"):
        moetrt.finalize_add_rms_norm(MoEOutput(routed, tensors["shared"]), tensors["residual"], tensors["gamma"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_front_compiles_in_one_graph(dynamic: bool) -> None:
    buffers, gamma = deferred(), torch.rand(HIDDEN)

    def tail(rows: torch.Tensor, residual: torch.Tensor, factor: float) -> torch.Tensor:
        routed = UnfinalizedMoEOutput(rows, *buffers[1:])
        return moetrt.finalize_add_rms_norm(MoEOutput(routed, None, factor), residual, gamma, eps=1e-5)[0]

    compiled = torch.compile(tail, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    residual = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    for factor in (2.5, 1.0):
        assert torch.equal(compiled(buffers[0], residual, factor), tail(buffers[0], residual, factor))


def test_the_contract_imports_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import moetrt.contract; "
        "print(sorted(n for n in set(sys.modules) - before if not n.startswith('torch')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['moetrt', 'moetrt.contract']"
