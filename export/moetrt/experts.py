"""Transformers' MoE layers made to end in the operator: experts implementations of ours, set while a model is exported.

Transformers lets an implementation replace an experts module's forward. What arrives there is the contract's own data:
tokens, chosen experts and their weights. The implementations here run GEMM1, activation and GEMM2 in a form that ONNX
has operators for, leave the rows unweighted, and end in ``moetrt::moe_finalize_add``.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _gathered(
    experts: Any, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One row a route, in the order of the routes: the map is the identity, and is left out.

    Args:
        experts: the experts module: weights ``[E, out, in]``, or ``[E, in, out]`` where ``is_transposed``.
        tokens: ``[T, H]``.
        top_k_index: ``[T, K]``, the chosen experts.
        top_k_weights: ``[T, K]``, their weights.

    Returns:
        ``[T, H]``, the dtype of ``tokens``.
    """
    chosen = top_k_index.reshape(-1)
    top_k = top_k_index.shape[1]
    rows = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, tokens.shape[1])

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        # index_select becomes ONNX Gather; indexing by a tensor would become GatherND on a copy of the weights.
        weight = getattr(experts, name).index_select(0, chosen)
        if experts.is_transposed:
            out = torch.bmm(rows.unsqueeze(1), weight).squeeze(1)
        else:
            out = torch.bmm(weight, rows.unsqueeze(2)).squeeze(2)
        return out + getattr(experts, f"{name}_bias").index_select(0, chosen) if experts.has_bias else out

    return _finalize(_mlp(experts, rows, linear), top_k_weights, None)


def _dense(experts: Any, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Every token through every expert: row ``e*T + t``, and the map names the rows of the chosen experts.

    Arguments and result as of ``_gathered``.
    """
    count = tokens.shape[0]

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        # The weights stay the left operand as they are stored: a transposed copy of them would be written to the file.
        weight = getattr(experts, name)
        if experts.is_transposed:
            out = torch.matmul(rows, weight)
        else:
            out = torch.matmul(weight, rows.transpose(1, 2)).transpose(1, 2)
        return out + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else out

    every = _mlp(experts, tokens.unsqueeze(0), linear)
    index = top_k_index * count + torch.arange(count, device=tokens.device).unsqueeze(1)
    return _finalize(every.reshape(-1, every.shape[-1]), top_k_weights, index.to(torch.int32))


def _mlp(experts: Any, rows: torch.Tensor, linear: Callable[[torch.Tensor, str], torch.Tensor]) -> torch.Tensor:
    """GEMM1, activation and GEMM2, ``linear(rows, name of the weight)`` being the GEMM."""
    if experts.has_gate:
        inner = experts._apply_gate(linear(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows, "up_proj"))
    out = linear(inner, "down_proj")
    normed: torch.Tensor = experts.post_expert_norm(out) if experts.has_post_expert_norm else out
    return normed


def _finalize(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    if weights.dtype != rows.dtype:
        weights = weights.float()
    hidden: torch.Tensor = torch.ops.moetrt.moe_finalize_add(rows, weights, index, None, None)
    return hidden


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for form, implementation in zip(EXPERTS_FORMS, (_gathered, _dense), strict=True):
        ALL_EXPERTS_FUNCTIONS.register(f"moetrt_{form}", implementation)
