"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5), as a scan over tokens: ONNX Scan takes any length.

Transformers works through chunks of 64 tokens in a Python loop. A traced graph would hold the example's number of
chunks, so that longer inputs do not run, and 63 steps of arithmetic for each of them.
"""

from typing import Any

import torch
from torch._higher_order_ops.scan import scan

NAME = "torch_chunk_gated_delta_rule"
SOURCE = "10c023608ca373ed"


def by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``state = exp(g) * state``, then ``state += key (x) beta * (value - key @ state)``; ``out = query @ state``.

    Args:
        query, key: ``[batch, seq, key heads, Dk]``.
        value: ``[batch, seq, value heads, Dv]``; a key head serves as many value heads in a row as go into it.
        g, beta: ``[batch, seq, value heads]``; the decay's logarithm, and how much of an update is written.
        initial_state: ``[batch, value heads, Dk, Dv]``; zeros where None.
        output_final_state: whether to return the last state too.
        use_qk_l2norm_in_kernel: whether query and key are brought to length 1.

    Returns:
        ``[batch, seq, value heads, Dv]`` in the dtype of ``query``, and the last state or None. float32 throughout.
    """
    dtype = query.dtype
    query, key, value, decay, beta = (x.float() for x in (query, key, value, g.float().exp(), beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    heads = value.shape[2]
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    out, state = recurrence(query, key, value, decay[..., None], beta, initial_state)
    return out.to(dtype), state if output_final_state else None


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule of float32 tensors, token by token.

    Args:
        query, key: ``[batch, seq, heads, Dk]``.
        value: ``[batch, seq, heads, Dv]``.
        decay: ``[batch, seq, heads, Dk]``, or 1 in place of Dk.
        beta: ``[batch, seq, heads]``.
        state: ``[batch, heads, Dk, Dv]``; zeros where None.

    Returns:
        ``[batch, seq, heads, Dv]``, and the last state.
    """
    if state is None:
        state = query.new_zeros(query.shape[0], query.shape[2], query.shape[-1], value.shape[-1])

    def step(state: torch.Tensor, now: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = now
        state = state * decay.unsqueeze(-1)
        known = (key.unsqueeze(-2) @ state).squeeze(-2)
        state = state + key.unsqueeze(-1) * (beta.unsqueeze(-1) * (value - known)).unsqueeze(-2)
        return state, (query.unsqueeze(-2) @ state).squeeze(-2)

    # scan takes no views that overlap: each input is a tensor of its own, tokens first.
    tokens_first = [x.transpose(0, 1).contiguous() for x in (query, key, value, decay, beta)]
    state, out = scan(step, state.float(), tokens_first)
    return out.transpose(0, 1), state
