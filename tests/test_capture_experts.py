"""The experts implementations: in PyTorch they give what the families' own forward gives, and they leave no trace."""

import pytest
import torch

from moetrt import models
from moetrt.errors import InputError
from moetrt.experts import EXPERTS_FORMS, deferred_finalize, experts_modules
from tests.models import families

FAMILIES = [
    families.deepseek_v3,
    models.qwen3_moe,
    models.qwen2_moe,
    models.mixtral,
    models.olmoe,
    models.glm4_moe,
    models.gpt_oss,
    models.minimax_m2,
    models.qwen3_next,
    models.qwen3_5_moe,
]


def logits(model: torch.nn.Module, tokens: int = 11) -> torch.Tensor:
    ids = torch.randint(0, 96, (3, tokens), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("form", EXPERTS_FORMS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_forms_agree_with_the_eager_forward(family, form: str) -> None:
    model = family()
    model.set_experts_implementation("eager")
    wanted = logits(model)
    with deferred_finalize(model, form):
        got = logits(model)
    # Measured: at most 4e-7 of the largest logit.
    assert (got - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", EXPERTS_FORMS)
def test_half_precision_is_nearer_to_float32_than_the_eager_forward(form: str, dtype: torch.dtype) -> None:
    """One experts module alone, so that a route near a tie cannot flip."""
    model = models.qwen3_moe()
    experts = next(iter(experts_modules(model).values()))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(32, 64, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(32)])
    weights = torch.rand(32, 2, generator=generator).to(dtype)
    half = experts.to(dtype)
    half.config._experts_implementation = "eager"
    with torch.no_grad():
        eager = half(tokens, index, weights)
        with deferred_finalize(model, form):
            ours = half(tokens, index, weights)
        gold = half.float()(tokens.float(), index, weights.float())
    assert ours.dtype == dtype
    assert (ours - gold).norm() <= (eager - gold).norm()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("form", EXPERTS_FORMS)
def test_few_tokens(form: str, tokens: int) -> None:
    model = models.qwen3_moe()
    wanted = logits(model, tokens)
    with deferred_finalize(model, form):
        assert torch.allclose(logits(model, tokens), wanted, atol=1e-6)


def test_case28_implementation_is_restored() -> None:
    model = families.deepseek_v3()
    before = model.get_experts_implementation()
    assert before[""] == "grouped_mm"  # Transformers' default
    with deferred_finalize(model):
        assert model.get_experts_implementation()[""] == "moetrt_gathered"
    assert model.get_experts_implementation() == before
    with pytest.raises(RuntimeError, match="in the block"), deferred_finalize(model, "dense"):
        raise RuntimeError("in the block")
    assert model.get_experts_implementation() == before


def test_models_inside_another_module_are_found() -> None:
    outer = torch.nn.ModuleDict({"moe": models.qwen3_moe(), "dense": families.llama(), "head": torch.nn.Linear(2, 2)})
    with deferred_finalize(outer):
        assert outer["moe"].get_experts_implementation()[""] == "moetrt_gathered"
    assert outer["moe"].get_experts_implementation()[""] == "grouped_mm"


def test_what_is_refused() -> None:
    model = models.qwen3_moe()
    unknown = pytest.raises(InputError, match="the experts form was 'fast'; gathered or dense is taken")
    with unknown, deferred_finalize(model, "fast"):
        pass
    next(iter(experts_modules(model).values()))._is_expert_parallel = True
    spread = pytest.raises(InputError, match=r"experts of 'model.layers.0.mlp.experts' are spread over ranks")
    with spread, deferred_finalize(model):
        pass
    assert model.get_experts_implementation()[""] == "grouped_mm"
