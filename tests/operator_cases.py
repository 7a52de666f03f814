"""Inputs of the operators, and a float64 computation of them that shares nothing with the project's definition."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OperatorSpec


@dataclass
class Case:
    """One call of an operator."""

    spec: OperatorSpec
    tensors: dict[str, torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)


def make_case(
    *,
    tokens: int = 6,
    top_k: int = 3,
    rows: int | None = None,
    hidden: int = 8,
    stride: int | None = None,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    gamma_dtype: torch.dtype | None = None,
    mapped: bool = True,
    absent: float = 0.2,
    shared: bool = True,
    gate: bool = False,
    residual: bool = True,
    norm: bool = True,
    leading: tuple[int, ...] | None = None,
    seed: int = 0,
    **attributes: Any,
) -> Case:
    """Random inputs; ``absent`` is the share of routes whose map entry is -1, rows that nobody names hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if rows is None or not mapped:
        rows = tokens * top_k
    stride = stride or hidden
    tensors = {"gemm2_permuted": normal(rows, stride).to(dtype)}
    tensors["expert_weights"] = torch.rand(tokens, top_k, generator=generator).to(weights_dtype)
    if mapped:
        index = torch.randint(0, max(rows, 1), (tokens, top_k), generator=generator, dtype=torch.int32)
        index[torch.rand(tokens, top_k, generator=generator) < (absent if rows else 1.0)] = -1
        tensors["expanded_idx_to_permuted_idx"] = index
        named = torch.zeros(rows, dtype=torch.bool)
        named[index[index >= 0].long()] = True
        tensors["gemm2_permuted"][~named] = float("nan")
        tensors["gemm2_permuted"][:, hidden:] = float("nan")
    shape = (*(leading or (tokens,)), hidden)
    if shared:
        tensors["shared_output"] = normal(*shape).to(dtype)
        if gate:
            tensors["shared_gate"] = normal(tokens, 1).to(gate_dtype)
    if norm:
        if residual:
            tensors["residual"] = normal(*shape).to(dtype)
        tensors["gamma"] = (1 + 0.1 * normal(hidden)).to(gamma_dtype or dtype)
    return Case(FINALIZE_ADD_RMS_NORM if norm else FINALIZE_ADD, tensors, attributes)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Cases of every operator, dtype, optional input and attribute; small sizes, down to no tokens."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    either = st.sampled_from([dtype, torch.float32])
    hidden, norm, tokens = draw(st.integers(1, 40)), draw(st.booleans()), draw(st.integers(0, 9))
    attributes: dict[str, Any] = {
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "combine_scale": draw(st.sampled_from([1.0, 0.22])),
        "apply_expert_weights": draw(st.booleans()),
    }
    if norm:
        attributes |= {"residual_scale": draw(st.sampled_from([1.0, 0.5])), "eps": draw(st.sampled_from([1e-5, 0.1]))}
        attributes |= {"weight_bias": draw(st.sampled_from([0.0, 1.0])), "weight_before_cast": draw(st.booleans())}
    return make_case(
        tokens=tokens,
        top_k=draw(st.integers(1, 9)),
        rows=draw(st.integers(1, 60)),
        hidden=hidden,
        # MoEFinalizeAdd without a shared output is as wide as the rows.
        stride=hidden + draw(st.integers(0, 9)) if norm else hidden,
        dtype=dtype,
        weights_dtype=draw(either),
        gate_dtype=draw(either),
        gamma_dtype=draw(either),
        mapped=draw(st.booleans()),
        absent=draw(st.sampled_from([0.0, 0.3, 1.0])),
        shared=draw(st.booleans()),
        gate=draw(st.booleans()),
        residual=draw(st.booleans()),
        norm=norm,
        leading=draw(st.sampled_from([(tokens,), (1, tokens), (tokens, 1)])),
        seed=draw(st.integers(0, 1000)),
        **attributes,
    )


def gold(case: Case) -> tuple[np.ndarray, ...]:
    """The operator's outputs in float64 with no rounding in between: a loop over tokens and routes, in numpy."""
    values = case.spec.complete(case.attributes)
    arrays = {
        name: tensor.to(torch.int64 if name.endswith("permuted_idx") else torch.float64).numpy()
        for name, tensor in case.tensors.items()
    }
    rows, weights = arrays["gemm2_permuted"], arrays["expert_weights"]
    like = arrays.get("residual", arrays.get("shared_output"))
    hidden = len(arrays["gamma"]) if "gamma" in arrays else rows.shape[1] if like is None else like.shape[-1]
    tokens, top_k = weights.shape
    index = arrays.get("expanded_idx_to_permuted_idx", np.arange(tokens * top_k).reshape(tokens, top_k))
    total = np.zeros((tokens, hidden))
    for token in range(tokens):
        for k in range(top_k):
            row = index[token, k]
            if row == -1:
                continue
            if not 0 <= row < len(rows):
                total[token] = np.nan
                continue
            weight = weights[token, k] if values["apply_expert_weights"] else 1.0
            total[token] += weight * rows[row, :hidden]
    scale = np.float64(np.float32(values["routed_scaling_factor"]))
    total = total * scale
    if "shared_output" in arrays:
        shared = arrays["shared_output"].reshape(-1, hidden)
        if "shared_gate" in arrays:
            shared = shared / (1 + np.exp(-arrays["shared_gate"]))
        total = total + shared
    total = total * np.float64(np.float32(values["combine_scale"]))
    if "residual" in arrays:
        total = total + arrays["residual"].reshape(-1, hidden) * np.float64(np.float32(values["residual_scale"]))
    shape = total.shape if like is None else like.shape
    if case.spec is FINALIZE_ADD:
        return (total.reshape(shape),)
    mean_square = (total**2).mean(-1, keepdims=True)
    norm = total / np.sqrt(mean_square + np.float64(np.float32(values["eps"])))
    norm = norm * (arrays["gamma"] + values["weight_bias"])
    return norm.reshape(shape), total.reshape(shape)
