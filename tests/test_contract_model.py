"""The model written against the contract alone: its quirks are there, and it computes what it says without them."""

import pytest
import torch
from torch.nn import functional as F

from moetrt.contract_model import ContractConfig, ContractDecoder, MoE, contract_decoder_source

CONFIG = ContractConfig()
MOE_LAYERS = (1, 2)


@pytest.fixture
def decoder() -> ContractDecoder:
    module = contract_decoder_source(CONFIG).module
    assert isinstance(module, ContractDecoder)
    return module


def moe(decoder: ContractDecoder, layer: int) -> MoE:
    found = decoder.get_submodule(f"layers.{layer}.mlp")
    assert isinstance(found, MoE)
    return found


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_each_route_finds_its_experts_row_and_no_row_is_shared(
    decoder: ContractDecoder, layer: int, tokens: int
) -> None:
    module = moe(decoder, layer)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        output, gate = module(x)
        scores = F.linear(x, module.router).softmax(-1)
    routed = output.routed
    assert not isinstance(routed, torch.Tensor)
    rows, weights, index = routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
    assert weights.dtype == torch.float32
    assert gate.shape == (tokens, 1)
    count = tokens * CONFIG.num_experts_per_tok + CONFIG.num_experts * (CONFIG.tile - 1)
    assert rows.shape == (count, CONFIG.hidden_size + CONFIG.row_padding)
    chosen = scores.topk(CONFIG.num_experts_per_tok).indices
    # The null expert has no row.
    assert torch.equal(index == -1, chosen == CONFIG.num_experts)
    used = index[index >= 0]
    assert len(used.unique()) == len(used)
    unused = torch.ones(count, dtype=torch.bool).index_fill(0, used.long(), False)
    assert rows[unused].isnan().all()
    assert rows[:, CONFIG.hidden_size :].isnan().all()
    for token, place in (index >= 0).nonzero().tolist():
        expert = int(chosen[token, place])
        wanted = module.down[expert] @ F.gelu(module.up[expert] @ x[token])
        torch.testing.assert_close(rows[index[token, place], : CONFIG.hidden_size], wanted, rtol=0, atol=1e-5)
    # Each expert begins at a multiple of the tile, and its rows follow each other.
    for expert in range(CONFIG.num_experts):
        its = index[chosen == expert].sort().values
        if len(its):
            assert its[0] % CONFIG.tile == 0
            assert torch.equal(its, torch.arange(its[0], its[0] + len(its), dtype=its.dtype))


def test_some_routes_have_no_expert(decoder: ContractDecoder) -> None:
    """What the map's -1 is tried with."""
    source = contract_decoder_source(CONFIG)
    seen = []
    for layer in MOE_LAYERS:
        moe(decoder, layer).register_forward_hook(
            lambda _, __, result: seen.append(result[0].routed.expanded_idx_to_permuted_idx)
        )
    with torch.no_grad():
        logits = decoder(*source.make_inputs(1, batch=3, seq=13).values())
    assert logits.isfinite().all()
    assert len(seen) == len(MOE_LAYERS)
    assert all((index == -1).any() and (index != -1).any() for index in seen)


def test_the_model_is_what_its_formula_says(decoder: ContractDecoder) -> None:
    """Without the contract: every expert on every token, weighted by the scores of the chosen ones, in float64."""
    source = contract_decoder_source(CONFIG)
    (ids,) = source.make_inputs(2, batch=2, seq=9).values()
    with torch.no_grad():
        got = decoder(ids)
        decoder.double()
        hidden = decoder.embedding(ids)
        layers = list(decoder.layers)
        for layer in layers:
            hidden = hidden + layer.attention(norm(layer.norm, hidden))
            normed = norm(layer.inner_norm, hidden)
            if not isinstance(layer.mlp, MoE):
                hidden = hidden + layer.mlp(normed)
                continue
            scores = F.linear(normed, layer.mlp.router).softmax(-1)
            top = scores.topk(CONFIG.num_experts_per_tok)
            kept = torch.zeros_like(scores).scatter(-1, top.indices, top.values)[..., : CONFIG.num_experts]
            inner = F.gelu(torch.einsum("efh,bsh->bsef", layer.mlp.up, normed))
            routed = torch.einsum("ehf,bsef,bse->bsh", layer.mlp.down, inner, kept)
            shared = F.linear(normed, layer.mlp.shared_gate).sigmoid() * layer.mlp.shared(normed)
            hidden = 0.75 * hidden + 1.25 * (1.5 * routed + shared)
        wanted = F.linear(norm(decoder.norm, hidden), decoder.embedding.weight)
    # Three layers of sums of at most 64 terms in float32, each of which rounds half a unit at worst.
    assert (got - wanted).abs().max() <= 3 * 64 * torch.finfo(torch.float32).eps * wanted.abs().max()


def norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.eps) * (1 + module.gamma)
