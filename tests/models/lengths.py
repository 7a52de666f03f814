"""Small modules whose Python code depends on a length, each ending in a MoE tail: `NAME()` gives module and inputs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from moetrt import MoEOutput, UnfinalizedMoEOutput, finalize_add_rms_norm

HIDDEN = 8
CHUNK = 16

Context = Callable[..., torch.Tensor]
"""Takes the inputs ``[tokens, HIDDEN]``, and gives ``[HIDDEN]``, which is added to every token."""


class Layer(nn.Module):
    """One tail of two routes a token, whose rows depend on what ``context`` makes of the inputs."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.rows = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """``[tokens, HIDDEN]`` in and out."""
        rows = self.rows(x + (self.context(x) if y is None else self.context(x, y))).view(-1, HIDDEN)
        index = torch.arange(2 * x.shape[0], dtype=torch.int32).view(-1, 2)
        routed = UnfinalizedMoEOutput(rows, x[:, :2].softmax(-1), index)
        return finalize_add_rms_norm(MoEOutput(routed), x, self.gamma)[0]


def _made(context: Context, *sizes: int, names: tuple[str, ...] = ("tokens",)) -> Any:
    torch.manual_seed(0)
    inputs = {name: torch.randn(size, HIDDEN) for name, size in zip("xy", sizes, strict=False)}
    return Layer(context).eval(), inputs, {name: {0: symbol} for name, symbol in zip(inputs, names, strict=True)}


def _windows(x: torch.Tensor) -> torch.Tensor:
    whole = x[: x.shape[0] // CHUNK * CHUNK]
    if whole.shape[0] > 0:
        return whole.view(-1, CHUNK, HIDDEN).mean((0, 1))
    return torch.zeros(HIDDEN)


def _chunked(x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % CHUNK))
    return padded.view(-1, CHUNK, HIDDEN).sum(1).square().sum(0) / x.shape[0]


def _looped(x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % CHUNK)).view(-1, CHUNK, HIDDEN)
    state = torch.zeros(HIDDEN)
    for chunk in range(padded.shape[0]):
        state = 0.5 * state + padded[chunk].mean(0)
    return state


def windows() -> Any:
    return _made(_windows, 8)


def windows_long() -> Any:
    return _made(_windows, 40)


def padded() -> Any:
    return _made(_chunked, 8)


def looped() -> Any:
    return _made(_looped, 40)


def split() -> Any:
    return _made(lambda x: sum(chunk.mean(0) * 0.5**place for place, chunk in enumerate(x.split(CHUNK))), 40)


def by_four() -> Any:
    return _made(lambda x: x.mean(0) if x.shape[0] % 4 == 0 else x.sum(0), 8)


def by_row() -> Any:
    return _made(lambda x: torch.stack([row * 0.5 for row in x]).sum(0), 8)


def not_five() -> Any:
    return _made(lambda x: x.mean(0) if x.shape[0] == 5 else x.amax(0), 8)


def at_least_four() -> Any:
    return _made(lambda x: x.mean(0) + 1 / max(x.shape[0], 4), 8)


def first_sixteen() -> Any:
    return _made(lambda x: torch.arange(x.shape[0])[:CHUNK].float().mean() + x[: 5 * CHUNK].mean(0), 8)


def half() -> Any:
    return _made(lambda x: x[: int(x.shape[0] * 0.5)].mean(0), 9)


def third() -> Any:
    return _made(lambda x: x[: math.ceil(x.shape[0] / 3)].mean(0), 8)


def logarithm() -> Any:
    return _made(lambda x: x.mean(0) * math.log(x.shape[0]), 8)


def as_number() -> Any:
    return _made(lambda x: x.mean(0) / float(x.shape[0]), 8)


def branch_and_number() -> Any:
    return _made(lambda x: (x.mean(0) if x.shape[0] > 5 else x.amax(0)) / float(x.shape[0]), 8)


def checked() -> Any:
    def context(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 100_000)
        return x.mean(0)

    return _made(context, 8)


def table() -> Any:
    """Learned positions, of which there are as many as there are."""
    positions = torch.linspace(-1, 1, 64 * HIDDEN).view(64, HIDDEN)
    return _made(lambda x: (x + positions[: x.shape[0]]).mean(0), 8)


def sixth() -> Any:
    return _made(lambda x: x[5], 8)


def reshaped() -> Any:
    return _made(lambda x: x.reshape(-1, 4 * HIDDEN).mean(0)[:HIDDEN], 8)


def in_a_scan() -> Any:
    """A branch in the body of a scan over the channels."""

    def step(state: torch.Tensor, channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = channel.sum() if channel.shape[0] > 5 else channel.amax()
        return state + total, state * 1

    def context(x: torch.Tensor) -> torch.Tensor:
        return scan(step, x.new_zeros(()), x.T.contiguous())[1]

    return _made(context, 8)


def single() -> Any:
    return _made(lambda x: x.amin(0) if x.shape[0] == 1 else x.mean(0) + x.amax(0), 8)


def _compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mean(0) if x.shape[0] == y.shape[0] else y.mean(0)


def same_size() -> Any:
    return _made(_compared, 8, 8, names=("one", "other"))


def same_name() -> Any:
    return _made(_compared, 8, 8, names=("tokens", "tokens"))


def other_size() -> Any:
    return _made(_compared, 8, 12, names=("one", "other"))


def fewer() -> Any:
    return _made(lambda x, y: x.mean(0) if x.shape[0] < y.shape[0] else y.mean(0), 8, 12, names=("one", "other"))


def added() -> Any:
    return _made(lambda x, y: (x + y).mean(0), 8, 8, names=("one", "other"))
