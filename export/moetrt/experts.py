"""Transformers' MoE layers made to end in the operator: experts implementations of ours, set while a model is exported.

Transformers lets an implementation replace an experts module's forward. What arrives there is the contract's own data:
tokens, chosen experts and their weights. The implementations here run GEMM1, activation and GEMM2 in a form that ONNX
has operators for, leave the rows unweighted, and end in ``moetrt::moe_finalize_add``.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import moetrt.torch_op  # noqa: F401  (registers the operator)
from moetrt.errors import InputError

EXPERTS_FORMS = ("gathered", "dense")
"""How the expert GEMMs of a Transformers model are written down; ONNX has no grouped GEMM.

``gathered`` copies the weights of each route's expert and multiplies one row with each copy: no needless arithmetic,
but ``T * K`` copies of an expert's weights pass through memory (DeepSeek-V3 in bf16: 470 MB a token and layer), so it
suits decode steps and short prompts. ``dense`` multiplies every token with every expert and lets the map pick the
rows: the weights are read once and memory grows by ``E`` rows a token (6 MB there), at ``E / K`` times the arithmetic;
it suits longer prompts, from about ``E / K`` tokens on.
"""

Linear = Callable[..., torch.Tensor]
"""``(rows, weight, bias=None, *, transposed)``: one GEMM of each row with its expert's matrix; the weight is
``[E, out, in]``, or ``[E, in, out]`` where ``transposed``, the bias ``[E, out]``."""

ExpertsMLP = Callable[[torch.Tensor, Linear], torch.Tensor]
"""GEMM1, activation and GEMM2 from rows to rows, the `Linear` that it is given for each GEMM."""

_Rows = tuple[torch.Tensor, torch.Tensor | None]


def experts_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The experts modules in ``module`` whose implementation can be replaced, by name; one for each MoE layer."""
    # Transformers' decorator for experts classes sets these on every instance.
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return {name: child for name, child in module.named_modules() if all(hasattr(child, mark) for mark in marks)}


@contextmanager
def deferred_finalize(module: torch.nn.Module, form: str = "gathered") -> Iterator[None]:
    """While the block runs, the Transformers models in ``module`` end their MoE layers in ``moetrt::moe_finalize_add``.

    Args:
        module: a Transformers model, or a module that holds some; nothing happens where it holds none.
        form: one of ``EXPERTS_FORMS``.

    Raises:
        InputError: an unknown form, or experts that are spread over ranks.
    """
    if form not in EXPERTS_FORMS:
        raise InputError(f"the experts form was '{form}'; {' or '.join(EXPERTS_FORMS)} is taken")
    for name, experts in experts_modules(module).items():
        if getattr(experts, "_is_expert_parallel", False):
            raise InputError(f"the experts of '{name}' are spread over ranks; a model loaded on one rank is taken")
    if any(_models(module)):
        _register()
    before = [(model, model.get_experts_implementation()) for model in _models(module) if experts_modules(model)]
    try:
        for model, _ in before:
            model.set_experts_implementation(f"moetrt_{form}")
        yield
    finally:
        for model, implementation in before:
            model.set_experts_implementation(implementation)


def is_transformers_model(value: object) -> bool:
    """Whether ``value`` is a Transformers model. Transformers is an extra: where nobody imported it, there is none."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PreTrainedModel)


def _models(module: torch.nn.Module) -> list[Any]:
    """The outermost Transformers models in ``module``; setting one sets the models inside it."""
    if is_transformers_model(module):
        return [module]
    return [model for child in module.children() for model in _models(child)]


def expert_rows(
    form: str,
    mlp: ExpertsMLP,
    tokens: torch.Tensor,
    top_k_index: torch.Tensor,
    input_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """GEMM1, activation and GEMM2 of the chosen experts, in a form that ONNX has operators for.

    Args:
        form: one of ``EXPERTS_FORMS``.
        mlp: the experts' own arithmetic.
        tokens: ``[T, H]``.
        top_k_index: ``[T, K]``, the chosen experts.
        input_scales: ``[T, E]`` that multiply the tokens before GEMM1; None where nothing does.

    Returns:
        The rows ``[R, H]``, not weighted, and their map ``[T, K]`` int32; None is the identity.
    """
    return (_gathered if form == "gathered" else _dense)(mlp, tokens, top_k_index, input_scales)


def _gathered(
    mlp: ExpertsMLP, tokens: torch.Tensor, top_k_index: torch.Tensor, input_scales: torch.Tensor | None
) -> _Rows:
    """One row a route, in the order of the routes: the map is the identity."""
    chosen = top_k_index.reshape(-1)
    top_k = top_k_index.shape[1]
    rows = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, tokens.shape[1])
    if input_scales is not None:
        rows = rows * input_scales.gather(1, top_k_index).reshape(-1, 1)

    def linear(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool
    ) -> torch.Tensor:
        # index_select becomes ONNX Gather; indexing by a tensor would become GatherND on a copy of the weights.
        own = weight.index_select(0, chosen)
        if transposed:
            out = torch.bmm(rows.unsqueeze(1), own).squeeze(1)
        else:
            out = torch.bmm(own, rows.unsqueeze(2)).squeeze(2)
        return out if bias is None else out + bias.index_select(0, chosen)

    return mlp(rows, linear), None


def _dense(
    mlp: ExpertsMLP, tokens: torch.Tensor, top_k_index: torch.Tensor, input_scales: torch.Tensor | None
) -> _Rows:
    """Every token through every expert: row ``e*T + t``, and the map names the rows of the chosen experts."""
    count = tokens.shape[0]
    rows = tokens.unsqueeze(0)
    if input_scales is not None:
        rows = rows * input_scales.t().unsqueeze(2)

    def linear(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool
    ) -> torch.Tensor:
        # The weights stay the left operand as they are stored: a transposed copy of them would be written to the file.
        out = rows @ weight if transposed else (weight @ rows.transpose(1, 2)).transpose(1, 2)
        return out if bias is None else out + bias.unsqueeze(1)

    every = mlp(rows, linear)
    index = top_k_index * count + torch.arange(count, device=tokens.device).unsqueeze(1)
    return every.reshape(-1, every.shape[-1]), index.to(torch.int32)


def finalize(
    rows: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor | None,
    shared_output: torch.Tensor | None = None,
    *,
    apply_expert_weights: bool = True,
) -> torch.Tensor:
    """The operator that a tail begins with: the rows weighted and summed for each token, and the shared output added.

    Args:
        rows, index: as of `expert_rows`.
        weights: ``[T, K]``, of the chosen experts.
        shared_output: ``[T, H]``, or None.
        apply_expert_weights: False where the weights were applied before GEMM1.

    Returns:
        ``[T, H]``, the dtype of the rows.
    """
    if weights.dtype != rows.dtype:
        weights = weights.float()
    hidden: torch.Tensor = torch.ops.moetrt.moe_finalize_add(
        rows, weights, index, shared_output, None, apply_expert_weights=apply_expert_weights
    )
    return hidden


def _implementation(form: str) -> Callable[..., torch.Tensor]:
    """An experts implementation as Transformers calls it: module, tokens, chosen experts and their weights."""

    def run(experts: Any, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        rows, index = expert_rows(form, partial(_mlp, experts), tokens, top_k_index)
        return finalize(rows, top_k_weights, index)

    return run


def _mlp(experts: Any, rows: torch.Tensor, linear: Linear) -> torch.Tensor:
    """GEMM1, activation and GEMM2 as Transformers' experts interface defines them."""

    def gemm(rows: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        return linear(rows, getattr(experts, name), bias, transposed=experts.is_transposed)

    if experts.has_gate:
        inner = experts._apply_gate(gemm(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(gemm(rows, "up_proj"))
    out = gemm(inner, "down_proj")
    normed: torch.Tensor = experts.post_expert_norm(out) if experts.has_post_expert_norm else out
    return normed


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for form in EXPERTS_FORMS:
        ALL_EXPERTS_FUNCTIONS.register(f"moetrt_{form}", _implementation(form))
