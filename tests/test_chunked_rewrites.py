"""Case 55: what Transformers computes by chunks gives the same numbers by token, at every length."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h

from moetrt import chunked_models
from moetrt.parity.runners import float64_copy
from moetrt.rewrites import kimi_delta_rule, mamba2
from moetrt.rewrites.known_forms import known_modules, re_expressed
from moetrt.rewrites.known_functions import FUNCTIONS, functions_replaced

LENGTHS = (1, 3, 4, 5, 64, 65, 129, 257)
"""Around the chunks of 4, 64, 128 and 256."""

FACTORIES: tuple[Callable[[], Any], ...] = (
    chunked_models.deepseek_v4_compressed,
    chunked_models.nemotron_h,
    chunked_models.granite_moe_hybrid,
    chunked_models.minimax,
    chunked_models.kimi_linear,
)

KNOWN = {
    "deepseek_v4_compressed": {"DeepseekV4Indexer", "DeepseekV4CSACompressor", "DeepseekV4HCACompressor"},
    "nemotron_h": {"mamba2_chunk_scan"},
    "granite_moe_hybrid": {"mamba2_chunk_scan"},
    "minimax": {"MiniMaxLightningAttention"},
    "kimi_linear": {"chunk_kimi_delta_attention"},
}


class InFloat64(TorchFunctionMode):
    """While it is on, who asks for float32 gets float64: scans take no dispatch mode, as Float64Mode is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return function(
            *args, **{key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        )


def logits(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    ids = torch.randint(0, 96, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad(), InFloat64():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_a_rewritten_model_gives_its_own_numbers_in_float64(factory: Callable[[], Any]) -> None:
    model = float64_copy(factory())
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # MiniMax's tables, which were rounded to float32
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    before = [copy.copy(module.__dict__.get("forward")) for module in model.modules()]
    for tokens in LENGTHS:
        wanted = logits(model, tokens)
        with functions_replaced(model), re_expressed(model, "gathered"):
            got = logits(model, tokens)
        assert got.shape == wanted.shape
        # Sums over chunks and over tokens round at each token, in float64, in another order.
        assert (got - wanted).abs().max() <= 2.0**-40 * wanted.square().mean().sqrt()
    assert [module.__dict__.get("forward") for module in model.modules()] == before


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_the_rewrites_know_what_this_version_of_transformers_has(factory: Callable[[], Any]) -> None:
    model = factory()
    file = sys.modules[type(model).__module__]
    functions = {name for name, _, _ in FUNCTIONS if hasattr(file, name)}
    before = {name: getattr(file, name) for name in functions}
    with functions_replaced(model):
        assert all(getattr(file, name) is not before[name] for name in functions)
    assert {name: getattr(file, name) for name in functions} == before
    known = {type(model.get_submodule(name)).__name__ for name in known_modules(model)}
    assert known | functions == KNOWN[factory.__name__]


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_mamba2_goes_on_from_a_state(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {"hidden_states": draw(2, tokens, 4, 6), "dt": draw(2, tokens, 4), "A": -draw(4).exp()}
    values |= {"B": draw(2, tokens, 2, 3), "C": draw(2, tokens, 2, 3), "D": draw(4), "dt_bias": draw(4)}
    options = {"initial_states": draw(2, 4, 6, 3), "dt_softplus": True, "dt_limit": (0.01, 2.0)}
    with InFloat64():
        wanted = modeling_nemotron_h.mamba2_chunk_scan(**values, **options, chunk_size=64, return_final_states=True)
        got = mamba2.by_token(**values, **options, chunk_size=64, return_final_states=True)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tokens * 2.0**-45 * theirs.abs().max()


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_kimis_delta_rule_goes_on_from_a_state(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {"query": draw(2, tokens, 4, 8), "key": draw(2, tokens, 4, 8), "value": draw(2, tokens, 4, 6)}
    values |= {"g": -draw(2, tokens, 4, 8).exp(), "beta": draw(2, tokens, 4).sigmoid()}
    options = {"initial_state": draw(2, 4, 8, 6), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with InFloat64():
        wanted = modeling_kimi_linear.chunk_kimi_delta_attention(**values, **options)
        got = kimi_delta_rule.by_token(**values, **options)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tokens * 2.0**-45 * theirs.abs().max()
