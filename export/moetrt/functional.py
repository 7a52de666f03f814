"""The functional front: a contract's output goes in, the next layer's input comes out."""

from typing import Any

import torch

import moetrt.torch_op  # noqa: F401  registers torch.ops.moetrt
from moetrt.contract import is_moe_output
from moetrt.errors import InputError, InputTypeError
from moetrt.reference import check_tensors
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OperatorSpec


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
        moe_output: a `moetrt.MoEOutput`, or another library's object with the same fields. Its ``routed`` may be
            unfinalized or finalized already, ``[..., H]``: then it is one route a token with weight 1.
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
        InputTypeError, InputError: a type, dtype, shape, device or attribute that is not taken.
    """
    inputs = _inputs(moe_output, shared_gate) | {"residual": residual, "gamma": gamma}
    return _call(
        FINALIZE_ADD_RMS_NORM,
        inputs,
        eps=eps,
        residual_scale=residual_scale,
        combine_scale=combine_scale,
        routed_scaling_factor=moe_output.routed_scaling_factor,
        weight_bias=weight_bias,
        weight_before_cast=weight_before_cast,
        apply_expert_weights=apply_expert_weights and not isinstance(moe_output.routed, torch.Tensor),
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
        apply_expert_weights=apply_expert_weights and not isinstance(moe_output.routed, torch.Tensor),
    )


def _inputs(moe_output: Any, shared_gate: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    if not is_moe_output(moe_output):
        raise InputTypeError(
            f"moe_output was a {type(moe_output).__name__}; an object with the fields routed, shared_output and "
            "routed_scaling_factor is taken"
        )
    return _routed(moe_output.routed) | {"shared_output": moe_output.shared_output, "shared_gate": shared_gate}


def _routed(routed: Any) -> dict[str, torch.Tensor | None]:
    names = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    if isinstance(routed, torch.Tensor):
        if routed.dim() < 2:
            raise InputError(f"moe_output.routed was {list(routed.shape)}; a finalized tensor [..., H] is taken")
        rows = routed.flatten(0, -2)
        # Not read: they only say that each token has one route.
        return {names[0]: rows, names[1]: rows.new_ones(rows.shape[0], 1)}
    for name in names:
        if not isinstance(getattr(routed, name, None), torch.Tensor):
            has = f"its {name} was a {type(getattr(routed, name)).__name__}" if hasattr(routed, name) else f"no {name}"
            raise InputTypeError(
                f"moe_output.routed was a {type(routed).__name__} ({has}); an object with the tensors "
                f"{', '.join(names)}, or one finalized tensor, is taken"
            )
    return {name: getattr(routed, name) for name in names}


def _call(spec: OperatorSpec, inputs: dict[str, torch.Tensor | None], **attributes: Any) -> Any:
    if not torch.compiler.is_compiling():
        # The op checks all this itself; here the message is not wrapped in the dispatcher's.
        check_tensors(spec, {name: tensor for name, tensor in inputs.items() if tensor is not None})
        spec.complete(attributes)
    op = getattr(torch.ops.moetrt, spec.torch_name)
    return op(*(inputs.get(entry.name) for entry in spec.inputs), **attributes)
