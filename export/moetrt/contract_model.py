"""A language model that no library has, written against the contract alone, with what serving stacks do to a tail.

Its MoE layers sort routes by expert and pad each expert's rows to a tile; rows that no route has, and the end of every
row, hold NaN; some routes have no expert at all; the router computes in float32; the shared expert lies behind a gate;
and one call finalizes, scales both sides, adds and normalises with ``1 + gamma``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.functional import finalize_add_rms_norm
from moetrt.source import Source


@dataclass(frozen=True)
class ContractConfig:
    """Sizes of a `ContractDecoder`.

    Attributes:
        tile: rows of one expert are padded to a multiple of it.
        row_padding: how much longer than ``hidden_size`` a row is.
    """

    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 48
    num_hidden_layers: int = 3
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 3
    tile: int = 4
    row_padding: int = 8
    routed_scaling_factor: float = 1.5
    residual_scale: float = 0.75
    combine_scale: float = 1.25
    eps: float = 1e-5

    def get_text_config(self) -> "ContractConfig":
        """Itself, as with Transformers' configs."""
        return self


def _random(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


class Norm(torch.nn.Module):
    """RMSNorm that multiplies by ``1 + gamma``, in float32."""

    def __init__(self, config: ContractConfig) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(0.1 * torch.randn(config.hidden_size))
        self.eps = config.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.gamma.float())).to(x.dtype)


class Attention(torch.nn.Module):
    """Causal attention whose heads share one key and value, and look less at what is far away: [B, S, H] both ways."""

    def __init__(self, config: ContractConfig) -> None:
        super().__init__()
        self.heads, self.width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.query = _random(config.hidden_size, config.hidden_size)
        self.key_value = _random(2 * self.width, config.hidden_size)
        self.out = _random(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = F.linear(x, self.query).view(batch, length, self.heads, self.width).transpose(1, 2)
        key, value = F.linear(x, self.key_value).unsqueeze(1).chunk(2, dim=-1)
        position = torch.arange(length, device=x.device)
        distance = position.unsqueeze(1) - position
        slope = torch.arange(1, self.heads + 1, device=x.device).view(-1, 1, 1) / (8 * self.heads)
        bias = torch.where(distance >= 0, -slope * distance, -math.inf)
        scores = (query @ key.transpose(2, 3) / math.sqrt(self.width)).float() + bias
        mixed = scores.softmax(-1).to(x.dtype) @ value
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.out)


class MLP(torch.nn.Module):
    """A dense layer, and the shared expert."""

    def __init__(self, config: ContractConfig) -> None:
        super().__init__()
        self.up = _random(config.intermediate_size, config.hidden_size)
        self.down = _random(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class MoE(torch.nn.Module):
    """Experts, a null expert that gives nothing, and a shared one: [T, H] goes in."""

    def __init__(self, config: ContractConfig) -> None:
        super().__init__()
        self.config = config
        self.router = _random(config.num_experts + 1, config.hidden_size)
        self.up = _random(config.num_experts, config.intermediate_size, config.hidden_size)
        self.down = _random(config.num_experts, config.hidden_size, config.intermediate_size)
        self.shared = MLP(config)
        self.shared_gate = _random(1, config.hidden_size)

    def forward(self, x: torch.Tensor) -> tuple[MoEOutput, torch.Tensor]:
        """The unfinalized output, and the gate's logits [T, 1]."""
        scores = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, chosen = scores.topk(self.config.num_experts_per_tok)
        index, token, expert, used = self._permute(chosen)
        inner = F.gelu(self.up.index_select(0, expert) @ x.index_select(0, token).unsqueeze(2))
        rows = (self.down.index_select(0, expert) @ inner).squeeze(2)
        rows = torch.where(used.unsqueeze(1), rows, math.nan)
        rows = F.pad(rows, (0, self.config.row_padding), value=math.nan)
        output = MoEOutput(
            UnfinalizedMoEOutput(rows, weights, index), self.shared(x), self.config.routed_scaling_factor
        )
        return output, F.linear(x, self.shared_gate)

    def _permute(self, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The map [T, K], and for each of R rows its token, its expert and whether a route has it."""
        tokens, top_k = chosen.shape
        experts, tile = self.config.num_experts, self.config.tile
        route = chosen.reshape(-1)
        # The null expert, which is the last, has no column.
        is_of = (route.unsqueeze(1) == torch.arange(experts, device=chosen.device)).long()
        so_far = is_of.cumsum(0)
        padded = (is_of.sum(0) + tile - 1) // tile * tile
        place = ((padded.cumsum(0) - padded + so_far - 1) * is_of).sum(1)
        here = route < experts
        # As many as any choice can need, and one more for the routes that have no row.
        count = tokens * top_k + experts * (tile - 1)
        row = torch.where(here, place, count)
        empty = row.new_zeros(count + 1)
        token = empty.scatter(0, row, torch.arange(tokens * top_k, device=chosen.device) // top_k)
        expert = empty.scatter(0, row, torch.where(here, route, 0))
        used = empty.scatter(0, row, torch.ones_like(row))
        index = torch.where(here, place, -1).view(tokens, top_k).to(torch.int32)
        return index, token[:count], expert[:count], used[:count] > 0


class Layer(torch.nn.Module):
    """Attention, then a dense layer or a MoE."""

    def __init__(self, config: ContractConfig, number: int) -> None:
        super().__init__()
        self.norm, self.inner_norm = Norm(config), Norm(config)
        self.attention = Attention(config)
        self.mlp = MLP(config) if number < config.first_k_dense_replace else MoE(config)


class ContractDecoder(torch.nn.Module):
    """Token ids [batch, seq] to logits [batch, seq, vocabulary]."""

    def __init__(self, config: ContractConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        config = self.config
        layers: list[Any] = list(self.layers)
        hidden = self.embedding(input_ids)
        normed = layers[0].norm(hidden)
        for layer, after in zip(layers, [*(layer.norm for layer in layers[1:]), self.norm], strict=True):
            hidden = hidden + layer.attention(normed)
            normed = layer.inner_norm(hidden)
            if isinstance(layer.mlp, MoE):
                moe_output, gate = layer.mlp(normed.flatten(0, 1))
                # The end of this layer and the beginning of the next are one operator.
                normed, hidden = finalize_add_rms_norm(
                    moe_output,
                    hidden,
                    after.gamma,
                    config.eps,
                    shared_gate=gate,
                    residual_scale=config.residual_scale,
                    combine_scale=config.combine_scale,
                    weight_bias=1.0,
                )
            else:
                hidden = hidden + layer.mlp(normed)
                normed = after(hidden)
        return F.linear(normed, self.embedding.weight)


def contract_decoder_source(config: ContractConfig) -> Source:
    """The model with random weights, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ContractDecoder(config).eval()

    def draw(seed: int, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (sizes["batch"], sizes["seq"])
        return {"input_ids": torch.randint(0, config.vocab_size, shape, generator=generator)}

    return Source(
        module=module,
        example_inputs=draw(0, {"batch": 2, "seq": 8}),
        dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}},
        output_names=("logits",),
        tails_expected=config.num_hidden_layers - config.first_k_dense_replace,
        description=type(module).__name__,
        random_inputs=draw,
    )
