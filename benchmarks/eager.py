"""The tail as PyTorch models write it, one operation after the other in the rows' dtype."""

from collections.abc import Mapping

import torch

EPS = 1e-6


def eager_routed(tensors: Mapping[str, torch.Tensor], factor: float, *, running: bool = False) -> torch.Tensor:
    """The weighted sum over a token's routes, [T, H]; ``running``: in an accumulator of the rows' dtype."""
    rows, index = tensors["gemm2_permuted"], tensors["expanded_idx_to_permuted_idx"]
    routes = rows[index.long()] * tensors["expert_weights"].to(rows.dtype).unsqueeze(-1)
    if running:
        routed = routes[:, 0]
        for k in range(1, routes.shape[1]):
            routed = routed + routes[:, k]
    else:
        routed = routes.sum(1)
    return routed if factor == 1 else routed * factor


def eager_tail(
    tensors: Mapping[str, torch.Tensor], factor: float, *, running: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tail: ``(norm_out, residual_out)``, [T, H]; the norm in float32 inside, rounded before gamma.

    Args:
        tensors: the operator's inputs by name, residual and gamma among them; every route is on this rank.
        factor: routed_scaling_factor.
        running: as of `eager_routed`.
    """
    hidden = eager_routed(tensors, factor, running=running)
    if "shared_output" in tensors:
        shared = tensors["shared_output"]
        hidden = hidden + (torch.sigmoid(tensors["shared_gate"]) * shared if "shared_gate" in tensors else shared)
    hidden = tensors["residual"] + hidden
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return tensors["gamma"] * normed.to(hidden.dtype), hidden
