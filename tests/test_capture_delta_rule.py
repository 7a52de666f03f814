"""Linear attention as a scan over tokens: Transformers' numbers for any length, and no trace left in Transformers."""

import pytest
import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from moetrt import models
from moetrt.errors import InputError
from moetrt.rewrites.delta_rule import NAME, by_token
from moetrt.rewrites.known_functions import functions_replaced


def inputs(seq: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """2 key heads that serve 4 value heads of another width."""
    generator = torch.Generator().manual_seed(seq)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, seq, *shape, generator=generator).to(dtype)

    return {
        "query": draw(2, 8),
        "key": draw(2, 8),
        "value": draw(4, 6),
        "g": -torch.nn.functional.softplus(draw(4).float()),
        "beta": draw(4).sigmoid(),
    }


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("seq", [1, 2, 63, 64, 65, 130])
def test_it_gives_what_the_chunks_give(seq: int, normalised: bool) -> None:
    values = inputs(seq)
    if not normalised:
        # Longer keys than 1 let the state grow with every token.
        values["key"] = values["key"] / 8
    state = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": normalised}
    wanted, wanted_state = modeling_qwen3_next.torch_chunk_gated_delta_rule(**values, **options)
    got, got_state = by_token(**values, **options)
    # Both round to float32 at every token, in another order; a decay below 1 forgets old errors.
    for one, other in ((got, wanted), (got_state, wanted_state)):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 2 * seq**0.5 * 2**-20 * other.abs().max()


def test_half_precision_comes_back_as_it_went_in() -> None:
    got, state = by_token(**inputs(5, torch.bfloat16), use_qk_l2norm_in_kernel=True)
    wanted, _ = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        **inputs(5, torch.bfloat16), use_qk_l2norm_in_kernel=True
    )
    assert (got.dtype, state) == (torch.bfloat16, None)
    # One unit in the last place of bfloat16.
    assert (got.float() - wanted.float()).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "file"), [(models.qwen3_next, modeling_qwen3_next), (models.qwen3_5_moe, modeling_qwen3_5_moe)]
)
def test_it_is_set_for_the_export_alone(family, file) -> None:
    before = getattr(file, NAME)

    def use() -> None:
        with functions_replaced(family()):
            assert getattr(file, NAME) is by_token
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        use()
    assert getattr(file, NAME) is before


def test_another_models_files_are_left_alone() -> None:
    with functions_replaced(models.qwen3_moe()):
        assert getattr(modeling_qwen3_next, NAME) is not by_token


def test_code_that_was_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(query: torch.Tensor) -> torch.Tensor:
        return query

    model = models.qwen3_next()
    monkeypatch.setattr(modeling_qwen3_next, NAME, other)
    line = f"'{NAME}' of .*modeling_qwen3_next is not the code that moetrt knows, so it is not exported"
    with pytest.raises(InputError, match=line), functions_replaced(model):
        pass
    assert getattr(modeling_qwen3_next, NAME) is other
