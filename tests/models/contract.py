"""Modules that use the contract, one factory a kind, used as sources by tests: ``tests.models.contract:NAME``.

Sizes: T=6 tokens, K=3, H=32, R=24 permuted rows of which 18 are used.
"""

from dataclasses import dataclass

import torch

from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.functional import finalize_add, finalize_add_rms_norm

TOKENS, TOP_K, HIDDEN, ROWS = 6, 3, 32, 24

DYNAMIC = {
    "gemm2_permuted": {0: "rows"},
    "expert_weights": {0: "tokens"},
    "expanded_idx_to_permuted_idx": {0: "tokens"},
    "shared_output": {0: "tokens"},
    "residual": {0: "tokens"},
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The operator's inputs; some routes are on another rank (-1)."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(ROWS, generator=generator)[: TOKENS * TOP_K].view(TOKENS, TOP_K).to(torch.int32)
    index[0, 0] = -1
    index[3] = -1
    return {
        "gemm2_permuted": torch.randn(ROWS, HIDDEN, generator=generator),
        "expert_weights": torch.rand(TOKENS, TOP_K, generator=generator),
        "expanded_idx_to_permuted_idx": index,
        "shared_output": torch.randn(TOKENS, HIDDEN, generator=generator),
        "residual": torch.randn(TOKENS, HIDDEN, generator=generator),
    }


def _gamma() -> torch.nn.Parameter:
    return torch.nn.Parameter(1 + 0.1 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)))


class Front(torch.nn.Module):
    """Takes the contract's output and calls the functional front."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = _gamma()

    def forward(self, moe_output: MoEOutput, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return finalize_add_rms_norm(moe_output, residual, self.gamma, eps=1e-5)


class GatherForm(torch.nn.Module):
    """The same tail in plain PyTorch: rows by the map, those of -1 masked, weighted, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = _gamma()

    def forward(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        here = expanded_idx_to_permuted_idx >= 0
        index = torch.where(here, expanded_idx_to_permuted_idx, 0).long()
        rows = gemm2_permuted[index]
        rows = torch.where(here.unsqueeze(-1), rows, 0.0)
        routed = (rows * expert_weights.unsqueeze(-1)).sum(dim=1)
        hidden = routed * 2.5 + shared_output + residual
        norm = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gamma
        return norm, hidden


class Producer(torch.nn.Module):
    """Returns the contract's output: a MoE layer that defers its finalize."""

    def forward(self, rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> MoEOutput:
        return MoEOutput(UnfinalizedMoEOutput(rows * 2, weights, index), shared_output=None, routed_scaling_factor=2.5)


class FinalizeOnly(torch.nn.Module):
    """What a tensor-parallel rank hands to its all-reduce."""

    def forward(self, moe_output: MoEOutput) -> torch.Tensor:
        return finalize_add(moe_output)


@dataclass
class ForeignUnfinalized:
    """Another library's class with the contract's fields."""

    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


@dataclass(frozen=True)
class ForeignOutput:
    """Another library's class with the contract's fields, in another order."""

    shared_output: torch.Tensor | None
    routed: ForeignUnfinalized
    routed_scaling_factor: float


_Result = tuple[torch.nn.Module, dict[str, object], dict[str, dict[int, str]]]


def front() -> _Result:
    """A MoEOutput and a residual go into the functional front; tokens and rows are dynamic."""
    given = tensors()
    moe_output = MoEOutput(UnfinalizedMoEOutput(*list(given.values())[:3]), given["shared_output"], 2.5)
    return Front(), {"moe_output": moe_output, "residual": given["residual"]}, DYNAMIC


def foreign() -> _Result:
    """The same with another library's classes."""
    given = tensors()
    moe_output = ForeignOutput(given["shared_output"], ForeignUnfinalized(*list(given.values())[:3]), 2.5)
    return Front(), {"moe_output": moe_output, "residual": given["residual"]}, DYNAMIC


def gather_form() -> _Result:
    """The plain PyTorch form."""
    return GatherForm(), dict(tensors()), DYNAMIC


def producer() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A module that returns the contract's dataclasses; every dimension is fixed."""
    return Producer(), tuple(tensors().values())[:3]


def finalize_only() -> tuple[torch.nn.Module, tuple[MoEOutput]]:
    """The operator without residual and norm; every dimension is fixed."""
    given = tensors()
    return FinalizeOnly(), (MoEOutput(UnfinalizedMoEOutput(*list(given.values())[:3]), given["shared_output"], 2.5),)
