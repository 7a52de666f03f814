"""MiniMax's lightning attention, as a scan over tokens: Transformers loops over blocks of 256 in Python."""

from typing import Any

import torch
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

SOURCES = {"": "020daaec8403ff9d"}


def forward(
    attention: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor | None,
    cache: None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``state = exp(-slope) * state + key (x) value``, from zeros; ``out = query @ state``, normalised and gated.

    Args:
        attention: Transformers' module.
        hidden_states: ``[batch, seq, H]``.
        position_embeddings: not used, as in Transformers.
        attention_mask: ``[batch, seq]``: what it has 0 for adds nothing to the state; None where all count.
        cache: None.

    Returns:
        ``[batch, seq, H]`` in its dtype, and the last state ``[batch, heads, D, D]``, which is float32 throughout.
    """
    batch, seq = hidden_states.shape[:2]
    qkv = attention.act_fn(attention.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    qkv = qkv.reshape(batch, seq, attention.num_attention_heads, 3 * attention.head_dim)
    decay = torch.exp(-attention.slope_rate.float())[:, 0, 0].expand(seq, batch, -1)

    def step(state: torch.Tensor, now: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        decay, query, key, value = now
        state = decay[..., None, None] * state + key.unsqueeze(-1) * value.unsqueeze(-2)
        return state, (query.unsqueeze(-2) @ state).squeeze(-2)

    # scan takes no views that overlap: each input is a tensor of its own, tokens first.
    tokens_first = [x.float().transpose(0, 1).contiguous() for x in qkv.split(attention.head_dim, dim=3)]
    heads, width = tokens_first[0].shape[2:]
    initial = tokens_first[0].new_zeros(batch, heads, width, width)
    state, out = scan(step, initial, [decay.contiguous(), *tokens_first])
    out = attention.norm(out.transpose(0, 1).to(hidden_states.dtype).reshape(batch, seq, -1))
    return attention.out_proj(F.sigmoid(attention.output_gate(hidden_states)) * out), state
