"""The tail in separate kernels, written in Triton for the comparison: finalize, shared add, residual add + RMSNorm.

Each reads its operands once and writes its result once, sums in float32, and takes the launch settings that were the
fastest among a few.
"""

import torch
import triton
import triton.language as tl

FINALIZE_BLOCKS = (512, 1024, 2048)
"""Elements of a row that one program of the finalize kernel takes."""

NORM_WARPS = (4, 8, 16)
"""Warps of a program of the add + RMSNorm kernel, which takes a whole row."""

_ADD_BLOCK = 1024


@triton.jit
def _finalize(rows, weights, index, out, factor, stride, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(index + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k).to(tl.float32)
        total += weight * tl.load(rows + row * stride + columns, mask=mask & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * hidden + columns, (total * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _shared_add(routed, shared, gate, out, hidden, GATED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    places = token * hidden + columns
    added = tl.load(shared + places, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        added *= tl.sigmoid(tl.load(gate + token).to(tl.float32))
    total = tl.load(routed + places, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm(x, residual, gamma, norm_out, residual_out, eps, hidden, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    places = token * hidden + columns
    total = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(residual_out.dtype.element_ty)
    tl.store(residual_out + places, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / hidden + eps)
    normed = (wide * scale).to(norm_out.dtype.element_ty).to(tl.float32)
    weight = tl.load(gamma + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(norm_out + places, (normed * weight).to(norm_out.dtype.element_ty), mask=mask)


def finalize(
    rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, factor: float, out: torch.Tensor, *, block: int
) -> None:
    """``out[t] = factor * sum over k of weights[t, k] * rows[index[t, k]]``; -1 adds nothing."""
    tokens, hidden = out.shape
    grid = (tokens, triton.cdiv(hidden, block))
    _finalize[grid](rows, weights, index, out, factor, rows.stride(0), hidden, K=index.shape[1], BLOCK=block)


def shared_add(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out = routed + sigmoid(gate) * shared``; gate [T, 1] or None."""
    tokens, hidden = out.shape
    grid = (tokens, triton.cdiv(hidden, _ADD_BLOCK))
    gated = gate is not None
    _shared_add[grid](routed, shared, gate if gated else routed, out, hidden, GATED=gated, BLOCK=_ADD_BLOCK)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    norm_out: torch.Tensor,
    residual_out: torch.Tensor,
    eps: float,
    *,
    warps: int,
) -> None:
    """``residual_out = x + residual`` and ``norm_out = RMSNorm(residual_out; gamma, eps)``, rounded before gamma."""
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(tokens,)](x, residual, gamma, norm_out, residual_out, eps, hidden, BLOCK=block, num_warps=warps)
