"""Llama-4's MoE block: the router's weights multiply the experts' input, and every expert sees every token.

Transformers multiplies the tokens by a score for each expert, 0 where it was not chosen, and sums what all experts
give. The chosen ones alone give the same sum: an expert without biases makes 0 of 0.
"""

from typing import Any

import torch

from moetrt.experts import Linear, expert_rows, finalize

SOURCES = {"": "3089415137fa1e5f", "experts": "2c875d2afcfbdec1", "router": "bfadae9815373f9a"}


def forward(block: Any, hidden_states: torch.Tensor, *, experts_form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., H]`` goes in; ``[T, H]`` and the router's logits ``[T, E]`` come out."""
    tokens = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(tokens)
    # The router's own choice once more, which it does not hand on; equal nodes become one in the graph.
    chosen = torch.topk(logits, block.router.top_k, dim=1).indices

    def mlp(rows: torch.Tensor, linear: Linear) -> torch.Tensor:
        gate, up = linear(rows, block.experts.gate_up_proj, transposed=True).chunk(2, dim=-1)
        return linear(up * block.experts.act_fn(gate), block.experts.down_proj, transposed=True)

    rows, index = expert_rows(experts_form, mlp, tokens, chosen, input_scales=scores)
    weights = scores.gather(1, chosen)
    hidden = finalize(rows, weights, index, block.shared_expert(tokens), apply_expert_weights=False)
    return hidden, logits
