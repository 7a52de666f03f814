"""DBRX's experts: the interface's arguments, but matrices of all experts in one and a loop of their own."""

from typing import Any

import torch

from moetrt.experts import Linear, expert_rows, finalize

SOURCES = {"": "a839bd2837effeb3", "mlp": "946b2d3ece156538"}


def forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    experts_form: str,
) -> torch.Tensor:
    """``[..., H]`` and the chosen experts' indices and weights ``[T, K]`` go in; ``[..., H]`` comes out."""
    shape = (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)
    gate, up, down = (weight.view(shape) for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2))

    def mlp(rows: torch.Tensor, linear: Linear) -> torch.Tensor:
        inner = experts.mlp.activation_fn(linear(rows, gate, transposed=False)) * linear(rows, up, transposed=False)
        return linear(inner, down, transposed=True)

    tokens = hidden_states.reshape(-1, experts.hidden_size)
    rows, index = expert_rows(experts_form, mlp, tokens, top_k_index)
    return finalize(rows, top_k_weights, index).view(hidden_states.shape)
