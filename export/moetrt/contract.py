"""The contract between a MoE layer that defers its finalize and the tail that performs it.

A serving stack's expert GEMMs hand on three buffers instead of one finished tensor (vLLM's ``MoEOutput``, FlashInfer's
``do_finalize=False``). This module imports torch and nothing else, so that any stack can take it.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class UnfinalizedMoEOutput:
    """A MoE layer's rows before they are weighted and summed per token.

    Attributes:
        gemm2_permuted: ``[R, Hp]``, bf16, fp16 or fp32: one row per route, permuted so that rows of one expert lie
            together. ``Hp`` is at least the hidden size; R is not a function of the number of tokens.
        expert_weights: ``[T, K]``, the dtype of the rows or fp32: the routing weight of each route.
        expanded_idx_to_permuted_idx: ``[T, K]`` int32: the row of each route, -1 where the expert is on another rank.
    """

    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


@dataclass
class MoEOutput:
    """What a MoE layer returns to the tail.

    Attributes:
        routed: the routed experts' part: unfinalized, or a finalized tensor ``[..., H]``.
        shared_output: the shared expert's part, ``[..., H]``, or None.
        routed_scaling_factor: multiplies the routed part; 1.0 where the routing method folded it into the weights.
    """

    routed: UnfinalizedMoEOutput | torch.Tensor
    shared_output: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0


torch.export.register_dataclass(UnfinalizedMoEOutput, serialized_type_name="moetrt.UnfinalizedMoEOutput")
torch.export.register_dataclass(MoEOutput, serialized_type_name="moetrt.MoEOutput")


def is_moe_output(value: object) -> bool:
    """Whether ``value`` has the fields of `MoEOutput`, ours or another library's class."""
    return all(hasattr(value, name) for name in ("routed", "shared_output", "routed_scaling_factor"))


def convert_flashinfer_moe_output(
    flashinfer_output: Any,
    *,
    do_finalize: bool,
    num_tokens: int,
    top_k: int,
    finalized_output: torch.Tensor | None = None,
) -> torch.Tensor | UnfinalizedMoEOutput:
    """Takes what a FlashInfer fused-MoE call returned and gives it the contract's form.

    Args:
        flashinfer_output: the call's result. Finalized: a tensor, or a list or tuple of exactly one. Deferred: exactly
            three tensors, ``(gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx)``: rows ``[R, Hp]``; weights
            and int32 map of ``num_tokens * top_k`` elements in any shape; all contiguous and on one device.
        do_finalize: the flag that the call was made with.
        num_tokens: T, at least 0.
        top_k: K, at least 1.
        finalized_output: the destination that the call was given, if any; only with ``do_finalize=True``. The result
            must be that very buffer.

    Returns:
        The finalized tensor, or an `UnfinalizedMoEOutput` whose weights and map are views of shape ``[T, K]``.

    Raises:
        ValueError: what is given is not one of the two layouts; the message says what was wrong.
    """
    _check_count("num_tokens", num_tokens, 0)
    _check_count("top_k", top_k, 1)
    if do_finalize:
        return _finalized(flashinfer_output, finalized_output)
    if finalized_output is not None:
        raise ValueError("finalized_output was given with do_finalize=False; a deferred call has no destination")
    return _deferred(flashinfer_output, num_tokens, top_k)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} was {value!r}; an int of at least {least} is taken")


def _finalized(output: Any, destination: torch.Tensor | None) -> torch.Tensor:
    if isinstance(output, list | tuple):
        if len(output) != 1:
            raise ValueError(f"the finalized output was a sequence of {len(output)}; a tensor or exactly one is taken")
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"the finalized output was a {type(output).__name__}; a torch.Tensor is taken")
    if destination is not None:
        if not isinstance(destination, torch.Tensor):
            raise ValueError(f"finalized_output was a {type(destination).__name__}; a torch.Tensor or None is taken")
        for what, got, wanted in (
            ("shape", tuple(output.shape), tuple(destination.shape)),
            ("dtype", output.dtype, destination.dtype),
            ("device", output.device, destination.device),
            ("data_ptr", output.data_ptr(), destination.data_ptr()),
        ):
            if got != wanted:
                raise ValueError(
                    f"the finalized output does not alias finalized_output: its {what} was {got}, {wanted} is taken"
                )
    return output


def _deferred(output: Any, num_tokens: int, top_k: int) -> UnfinalizedMoEOutput:
    names = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    if not isinstance(output, list | tuple):
        raise ValueError(f"the deferred output was a {type(output).__name__}; a sequence of three tensors is taken")
    if len(output) != len(names):
        raise ValueError(f"the deferred output had {len(output)} entries; exactly three are taken: {', '.join(names)}")
    for name, tensor in zip(names, output, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} was a {type(tensor).__name__}; a torch.Tensor is taken")
    rows, weights, index = output
    if rows.dim() != 2:
        raise ValueError(f"gemm2_permuted had rank {rows.dim()}, shape {tuple(rows.shape)}; rank 2 is taken")
    if index.dtype != torch.int32:
        raise ValueError(f"expanded_idx_to_permuted_idx was {index.dtype}; torch.int32 is taken")
    if not weights.dtype.is_floating_point:
        raise ValueError(f"expert_weights was {weights.dtype}; a floating-point dtype is taken")
    expanded = num_tokens * top_k
    for name, tensor in zip(names, output, strict=True):
        if name != "gemm2_permuted" and tensor.numel() != expanded:
            raise ValueError(
                f"{name} had {tensor.numel()} elements, shape {tuple(tensor.shape)}; "
                f"num_tokens * top_k = {num_tokens} * {top_k} = {expanded} are taken"
            )
        if tensor.device != rows.device:
            raise ValueError(f"{name} was on {tensor.device}; {rows.device}, where gemm2_permuted is, is taken")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} was not contiguous (strides {tensor.stride()}); a contiguous tensor is taken")
    return UnfinalizedMoEOutput(rows, weights.view(num_tokens, top_k), index.view(num_tokens, top_k))
