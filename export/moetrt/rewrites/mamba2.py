"""Mamba-2's scan (Nemotron-3, Granite 4), as a scan over tokens: Transformers pads to whole chunks and multiplies them.

How many chunks there are is a number of Python's in parts of it, so that a traced graph holds the example's.
"""

from typing import Any

import torch
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

NAME = "mamba2_chunk_scan"
SOURCE = "0ff4dfd967ee0176"


def by_token(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``state = exp(A * dt) * state + dt * hidden (x) B``; ``out = state @ C``, and D times hidden beside it.

    Args:
        hidden_states: ``[batch, seq, heads, P]``.
        dt: ``[batch, seq, heads]``.
        A, D, dt_bias: ``[heads]``.
        B, C: ``[batch, seq, groups, N]``; a group serves as many heads in a row as go into it.
        chunk_size: not used.
        initial_states: ``[batch, heads, P, N]``; zeros where None.
        dt_softplus: whether softplus makes dt positive.
        dt_limit: what dt is clamped to.
        return_final_states: whether to return the last state too.

    Returns:
        ``[batch, seq, heads, P]`` in float32, and the last state where asked for.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    hidden = hidden_states.float()
    heads = hidden.shape[2]
    B, C = (x.float().repeat_interleave(heads // x.shape[2], dim=2) for x in (B, C))
    decay = torch.exp(A.float() * dt)
    if initial_states is None:
        initial_states = hidden.new_zeros(hidden.shape[0], heads, hidden.shape[3], B.shape[3])

    def step(state: torch.Tensor, now: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        update, decay, B, C = now
        state = decay[..., None, None] * state + update.unsqueeze(-1) * B.unsqueeze(-2)
        return state, (state @ C.unsqueeze(-1)).squeeze(-1)

    # scan takes no views that overlap: each input is a tensor of its own, tokens first.
    tokens_first = [x.transpose(0, 1).contiguous() for x in (hidden * dt[..., None], decay, B, C)]
    state, out = scan(step, initial_states.float(), tokens_first)
    out = out.transpose(0, 1)
    if D is not None:
        out = out + D[..., None] * hidden
    return (out, state) if return_final_states else out
