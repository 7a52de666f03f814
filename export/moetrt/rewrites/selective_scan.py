"""Mamba's selective scan (Jamba), as a scan over tokens: Transformers loops over the example's tokens in Python."""

from typing import Any

import torch
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

NAME = "mamba_selective_scan"
SOURCE = "e84ef12af9539078"


def by_token(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``state = exp(A * dt) * state + dt * B * hidden``, from zeros; ``out = state @ C``.

    Args:
        hidden_states, dt, z: ``[batch, I, seq]``; z gates what comes out.
        A: ``[I, N]`` float32.
        B, C: ``[batch, N, seq]``.
        D: ``[I]``, multiplies hidden_states beside the state.
        delta_bias: ``[I]``, added to dt.
        delta_softplus: whether softplus makes dt positive.
        return_last_state: whether to return the state ``[batch, I, N]`` too.

    Returns:
        ``[batch, I, seq]``, in the dtype that Transformers' own has; the state is float32 throughout.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)

    def step(state: torch.Tensor, now: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, dt, B, C = now
        update = dt[..., None] * B[:, None].float() * hidden[..., None].float()
        state = (torch.exp(A * dt[..., None]) * state + update).float()
        return state, torch.matmul(state.to(hidden.dtype), C.unsqueeze(-1)).squeeze(-1)

    initial = torch.zeros(*hidden_states.shape[:2], A.shape[1], dtype=torch.float32, device=hidden_states.device)
    # scan takes no views that overlap: each input is a tensor of its own, tokens first.
    tokens_first = [x.permute(2, 0, 1).contiguous() for x in (hidden_states, dt, B, C)]
    state, out = scan(step, initial, tokens_first)
    out = out.permute(1, 2, 0)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, state) if return_last_state else out
