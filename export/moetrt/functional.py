"""The functional front: a contract's output goes in, the next layer's input comes out."""

from typing import Any

import torch

import moetrt.torch_op  # noqa: F401  registers torch.ops.moetrt
from moetrt.contract import is_moe_output, is_unfinalized
from moetrt.errors import InputTypeError
from moetrt.reference import REFERENCE_DTYPES, operand
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OperatorSpec, check_operands


def finalize_add_rms_norm(
    moe_output: Any,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    eps: float = 1e-6,
    *,
    shared_gate: torch.Tensor | None = None,
    residual_scale: float = 1.0,
    combine_scale: float = 1.0,
    weight_bias: float = 0.0,
    weight_before_cast: bool = True,
    apply_expert_weights: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finalizes a MoE output, adds the shared expert's part and the residual, and normalises the sum.

    Args:
        moe_output: a `moetrt.MoEOutput` whose ``routed`` is unfinalized, or another library's object with the same
            fields.
        residual: ``[..., H]``, the rows' dtype, or None.
        gamma: ``[H]``, the rows' dtype or float32.
        eps: added to the mean square.
        shared_gate: ``[T, 1]`` logits; ``shared_output`` is multiplied by their sigmoid.
        residual_scale: multiplies the residual.
        combine_scale: multiplies the sum of routed and shared part.
        weight_bias: 0, or 1 for norms that multiply by ``1 + gamma``.
        weight_before_cast: True: gamma is multiplied in float32 and the product rounded once; False: the normalised
            value is rounded to the rows' dtype first (Llama, Qwen and DeepSeek in Hugging Face).
        apply_expert_weights: False where the router's weights were applied before GEMM1.

    Returns:
        ``(norm_out, residual_out)``, the rows' dtype, the shape of residual, else of ``shared_output``, else
        ``[T, H]``.

    Raises:
        InputTypeError, InputError: a type, dtype, shape or attribute that is not taken.
    """
    inputs = _inputs(moe_output, shared_gate)
    inputs |= {"residual": residual, "gamma": gamma}
    return _call(
        FINALIZE_ADD_RMS_NORM,
        inputs,
        eps=eps,
        residual_scale=residual_scale,
        combine_scale=combine_scale,
        routed_scaling_factor=moe_output.routed_scaling_factor,
        weight_bias=weight_bias,
        weight_before_cast=weight_before_cast,
        apply_expert_weights=apply_expert_weights,
    )


def finalize_add(
    moe_output: Any,
    *,
    shared_gate: torch.Tensor | None = None,
    combine_scale: float = 1.0,
    apply_expert_weights: bool = True,
) -> torch.Tensor:
    """Finalizes a MoE output and adds the shared expert's part: what a tensor-parallel rank hands to its all-reduce.

    Args, errors: as of `finalize_add_rms_norm`.

    Returns:
        hidden, the rows' dtype, the shape of ``shared_output``, else ``[T, Hp]``.
    """
    return _call(
        FINALIZE_ADD,
        _inputs(moe_output, shared_gate),
        combine_scale=combine_scale,
        routed_scaling_factor=moe_output.routed_scaling_factor,
        apply_expert_weights=apply_expert_weights,
    )


def _inputs(moe_output: Any, shared_gate: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    if not is_moe_output(moe_output):
        raise InputTypeError(
            f"moe_output was a {type(moe_output).__name__}; an object with the fields routed, shared_output and "
            "routed_scaling_factor is taken"
        )
    routed = moe_output.routed
    if not is_unfinalized(routed):
        raise InputTypeError(
            f"moe_output.routed was a {type(routed).__name__}; an object with the tensors gemm2_permuted, "
            "expert_weights and expanded_idx_to_permuted_idx is taken: call the MoE layer with do_finalize=False"
        )
    return {
        "gemm2_permuted": routed.gemm2_permuted,
        "expert_weights": routed.expert_weights,
        "expanded_idx_to_permuted_idx": routed.expanded_idx_to_permuted_idx,
        "shared_output": moe_output.shared_output,
        "shared_gate": shared_gate,
    }


def _call(spec: OperatorSpec, inputs: dict[str, torch.Tensor | None], **attributes: Any) -> Any:
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputTypeError(f"{spec.name}: input {name} was a {type(tensor).__name__}; a torch.Tensor is taken")
    # Checked here too, so that the message is ours and not wrapped in the dispatcher's.
    check_operands(spec, {name: operand(tensor) for name, tensor in given.items()}, data_dtypes=REFERENCE_DTYPES)
    spec.complete(attributes)
    op = getattr(torch.ops.moetrt, spec.torch_name)
    return op(*(inputs[entry.name] for entry in spec.inputs), **attributes)
