"""DeepSeek-V4's compressed attention: Transformers compresses whole windows of tokens, if there are any.

Whether there are is a branch on the length. Here the last window is filled up with zeros, so that there always is one,
and no query sees it before it is whole: Transformers' own mask says so.
"""

import sys
from typing import Any

import torch
from torch.nn import functional as F

INDEXER = {"": "6bbdc02f0254e050"}
SPARSE = {"": "02fbf9f7947ae891"}
HEAVY = {"": "087d985268d8d5db"}


def indexer(
    module: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: None,
    layer_idx: int,
) -> torch.Tensor:
    """The windows ``[batch, seq, index_topk]`` that each query attends to, -1 where there are fewer before it.

    Args:
        module: Transformers' module.
        hidden_states: ``[batch, seq, H]``.
        q_residual: ``[batch, seq, q_lora_rank]``.
        position_ids: ``[batch, seq]``, from 0.
        cache: None.
        layer_idx: not used.
    """
    batch, seq, _ = hidden_states.shape
    compressed = _compressed(module, *_overlapping(module, hidden_states))
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    query = module.q_b_proj(q_residual).view(batch, seq, -1, module.head_dim).transpose(1, 2)
    query = _rotated(module, query, cos, sin).transpose(1, 2)
    scores = module.scorer(query, compressed, hidden_states)
    whole = ((position_ids + 1) // module.compress_rate).unsqueeze(-1)
    windows = torch.arange(compressed.shape[1], device=scores.device)
    scores = scores.masked_fill(windows >= whole, float("-inf"))
    # As many are chosen at every length: what is added is masked as what is not whole.
    chosen = F.pad(scores, (0, module.index_topk), value=float("-inf")).topk(module.index_topk, dim=-1).indices
    return torch.where(chosen >= whole, torch.full_like(chosen, -1), chosen)


def sparse(
    module: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: None,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed windows ``[batch, 1, windows, head_dim]``, and what is added to the scores of each query and window.

    Args:
        module, hidden_states, q_residual, position_ids, cache, layer_idx: as of `indexer`.
    """
    batch, seq, _ = hidden_states.shape
    compressed = _compressed(module, *_overlapping(module, hidden_states)).unsqueeze(1)
    chosen = module.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    windows = compressed.shape[2]
    chosen = torch.where(chosen >= 0, chosen, torch.full_like(chosen, windows))
    bias = compressed.new_full((batch, 1, seq, windows + 1), float("-inf"))
    return compressed, bias.scatter(-1, chosen.unsqueeze(1), 0.0)[..., :windows]


def heavy(
    module: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: None,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sparse`, where each query attends to every window that is whole before it."""
    batch, seq, _ = hidden_states.shape
    compressed = _compressed(module, *_windows(module, hidden_states)).unsqueeze(1)
    windows = torch.arange(compressed.shape[2], device=compressed.device)
    whole = ((position_ids + 1) // module.compress_rate)[:, None, :, None]
    bias = compressed.new_zeros((batch, 1, seq, compressed.shape[2]))
    return compressed, bias.masked_fill(windows >= whole, float("-inf"))


def _windows(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and gates ``[batch, windows, rate, width]``, the last window filled up with zeros."""
    batch, seq, _ = hidden_states.shape
    rate = module.compress_rate
    windows = (seq + rate - 1) // rate
    kv, gate = (
        F.pad(x, (0, 0, 0, windows * rate - seq)).view(batch, windows, rate, x.shape[-1])
        for x in (module.kv_proj(hidden_states), module.gate_proj(hidden_states))
    )
    return kv, gate + module.position_bias


def _overlapping(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and gates ``[batch, windows, 2 * rate, head_dim]``, half of them the window's before; the first has none."""
    kv, gate = _windows(module, hidden_states)
    width = module.head_dim
    both = []
    for x, filled in ((kv, 0.0), (gate, float("-inf"))):
        before = F.pad(x[..., :width], (0, 0, 0, 0, 1, 0), value=filled)[:, :-1]
        both.append(torch.cat((before, x[..., width:]), dim=2))
    return both[0], both[1]


def _compressed(module: Any, kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """One entry a window, ``[batch, windows, head_dim]``, normalised and at its first token's position."""
    weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    compressed = module.kv_norm((kv * weights).sum(dim=2))
    positions = torch.arange(compressed.shape[1], device=compressed.device) * module.compress_rate
    positions = positions.unsqueeze(0).expand(compressed.shape[0], -1)
    cos, sin = module.rotary_emb(compressed, position_ids=positions, layer_type=module.rope_layer_type)
    return _rotated(module, compressed.unsqueeze(1), cos, sin).squeeze(1)


def _rotated(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` at its positions, by the function of the module's own file."""
    rotated: torch.Tensor = sys.modules[type(module).__module__].apply_rotary_pos_emb(x, cos, sin)
    return rotated
