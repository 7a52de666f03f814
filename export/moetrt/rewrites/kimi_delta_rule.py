"""Kimi's delta rule, whose decay is each channel's own: by token, as `moetrt.rewrites.delta_rule` has it."""

from typing import Any

import torch

from moetrt.rewrites.delta_rule import recurrence

NAME = "chunk_kimi_delta_attention"
SOURCE = "8e949df6d3b4fb16"


def by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``state = exp(g) * state``, then ``state += key (x) beta * (value - key @ state)``; ``out = query @ state``.

    Args:
        query, key, g: ``[batch, seq, heads, Dk]``; g is the decay's logarithm.
        value: ``[batch, seq, heads, Dv]``.
        beta: ``[batch, seq, heads]``, how much of an update is written.
        chunk_size: not used.
        initial_state: ``[batch, heads, Dk, Dv]``; zeros where None.
        output_final_state: whether to return the last state too.
        use_qk_l2norm_in_kernel: whether query and key are brought to length 1.

    Returns:
        ``[batch, seq, heads, Dv]`` in the dtype of ``query``, and the last state or None. float32 throughout.
    """
    dtype = query.dtype
    query, key, value, decay, beta = (x.float() for x in (query, key, value, g.float().exp(), beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    out, state = recurrence(query * query.shape[-1] ** -0.5, key, value, decay, beta, initial_state)
    return out.to(dtype), state if output_final_state else None
