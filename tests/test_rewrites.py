"""What is re-expressed for the export: in PyTorch it gives the model's own numbers, and it leaves no trace."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.jamba import modeling_jamba

from moetrt import chunked_models, models
from moetrt.capture import capture, export
from moetrt.errors import InputError
from moetrt.experts import EXPERTS_FORMS, deferred_finalize
from moetrt.huggingface import causal_lm
from moetrt.mapping import map_file, map_model
from moetrt.onnx_files import load_model
from moetrt.parity import compare
from moetrt.parity.twins import float32_twin
from moetrt.rewrites import rewritten, selective_scan
from moetrt.rewrites.complex_numbers import Pair, real_pairs
from moetrt.rewrites.known_forms import FORMS, digest, known_modules
from moetrt.rewrites.scalars import scalars_keep_their_value
from moetrt.source import as_source, load_source
from tests.equivalence import run_model

FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek_v2": models.deepseek_v2,
    "llama4": models.llama4,
    "llama4_top3": lambda: models.llama4(top_k=3),
    "phimoe": models.phimoe,
    "dbrx": models.dbrx,
    "jamba": models.jamba,
}


def logits(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    ids = torch.randint(0, 96, (3, tokens), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@contextmanager
def for_export(model: torch.nn.Module, form: str = "gathered") -> Iterator[None]:
    """What `moetrt.capture` puts around its trace."""
    with deferred_finalize(model, form), rewritten(model, form):
        yield


@pytest.mark.parametrize("form", EXPERTS_FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_the_models_own(family: str, form: str) -> None:
    model = FAMILIES[family]()
    model.set_experts_implementation("eager")
    # One token, and more and fewer than Phi-3.5-MoE's short and Llama-4's chunk length of 16.
    for tokens in (1, 11, 40):
        wanted = logits(model, tokens)
        with for_export(model, form):
            got = logits(model, tokens)
        # Measured: at most 3.9e-7 of the largest logit.
        assert (got - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("form", EXPERTS_FORMS)
@pytest.mark.parametrize("family", ["llama4", "dbrx"])
def test_half_precision_is_nearer_to_float32_than_the_models_own(family: str, form: str) -> None:
    """One MoE module alone, so that a route near a tie cannot flip: its router's logits are given, or the same."""
    model = FAMILIES[family]()
    module = model.get_submodule(next(iter(known_modules(model))))
    generator = torch.Generator().manual_seed(0)
    inputs: tuple[torch.Tensor, ...] = (torch.randn(2, 24, 64, generator=generator).bfloat16(),)
    if family == "dbrx":
        index = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(48)])
        inputs += (index, torch.rand(48, 3, generator=generator).bfloat16())
    with torch.no_grad():
        module.bfloat16()
        eager = output_of(module, inputs)
        with for_export(model, form):
            ours = output_of(module, inputs)
        module.float()
        wide = tuple(x.float() if x.is_floating_point() else x for x in inputs)
        gold = output_of(module, wide)
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert ours.shape == eager.shape
    assert (ours - gold).norm() <= (eager - gold).norm()


def output_of(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result = module(*inputs)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("family", ["deepseek_v2", "llama4", "phimoe", "dbrx", "jamba"])
def test_case28_the_model_is_left_as_it_was(family: str) -> None:
    model = FAMILIES[family]()
    before = state(model)
    with for_export(model):
        assert state(model) != before
    assert state(model) == before
    with pytest.raises(RuntimeError, match="in the block"), for_export(model, "dense"):
        raise RuntimeError("in the block")
    assert state(model) == before
    assert torch.polar(torch.ones(2), torch.ones(2)).is_complex()


def state(model: torch.nn.Module) -> dict[str, Any]:
    """Everything a module object holds itself, the implementation that its config names, and the functions it calls."""
    found: dict[str, Any] = {"implementation": model.get_experts_implementation()[""]}
    found |= {f"file.{name}": id(value) for name, value in vars(inspect.getmodule(type(model))).items()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "config":
                found[f"{name}.{key}"] = value if isinstance(value, int | float | str | None) else id(value)
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            found[f"{name}.{key}"] = (id(tensor), tensor.data_ptr(), tensor._version)
    return found


def test_selective_scan_by_token_gives_what_the_loop_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, dt, z = (torch.randn(2, 6, 33, generator=generator) for _ in range(3))
    B, C = (torch.randn(2, 4, 33, generator=generator) for _ in range(2))
    A, D, bias = -torch.rand(6, 4, generator=generator), torch.randn(6), torch.randn(6)
    for options in ({}, {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}):
        # Without softplus a step may be negative, and the state grows.
        steps = dt if options else dt.abs() / 4
        wanted, wanted_state = modeling_jamba.mamba_selective_scan(
            hidden, steps, A, B, C, return_last_state=True, **options
        )
        got, state = selective_scan.by_token(hidden, steps, A, B, C, return_last_state=True, **options)
        for one, other in ((got, wanted), (state, wanted_state)):
            assert one.shape == other.shape
            # Each of 33 tokens rounds a few times, and what was rounded decays.
            assert (one - other).abs().max() <= 33 * torch.finfo(torch.float32).eps * other.abs().max()
        assert torch.equal(selective_scan.by_token(hidden, steps, A, B, C, **options), got)


def test_llama4_of_three_experts_a_token_is_mapped_in_the_dense_form(tmp_path: Path) -> None:
    """The released models choose one; `moetrt families` takes that one through all steps, in the gathered form."""
    model = models.llama4(top_k=3)
    source = as_source(model)
    exported = export(source, tmp_path, experts="dense")
    graph = load_model(exported.model_path).graph
    # The choice that is made once more is one node with the router's own.
    assert sum(node.op_type == "TopK" for node in graph) == 2
    # No weight is stored twice, or transposed.
    stored = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value)
    assert 0 <= stored - sum(tensor.nbytes for tensor in model.parameters()) < 2048
    report = map_file(exported.model_path, tmp_path / "mapped.onnx")
    assert (report.found, report.expected, report.mapped) == (2, 2, 2), report.summary()
    for site in report.sites:
        assert site.operator == "MoEFinalizeAddRMSNorm"
        assert set(site.inputs) >= {"expanded_idx_to_permuted_idx", "shared_output", "residual"}
        assert site.attributes["apply_expert_weights"] == 0
    for seed, sizes in enumerate(({"batch": 1, "seq": 1}, {"batch": 3, "seq": 13}, {"batch": 1, "seq": 40})):
        parity = compare(tmp_path / "mapped.onnx", source, seed=seed, sizes=sizes)
        assert parity.passed, parity.lines()


def test_every_known_form_is_in_this_version_of_transformers() -> None:
    """A form that no model has any more would never be used, and nothing would say so."""
    families = [*FAMILIES.values(), chunked_models.minimax, chunked_models.deepseek_v4_compressed]
    found = [form for family in families for form in known_modules(family()).values()]
    assert all(form in found for form in FORMS)


def test_a_family_that_copies_the_code_is_known_without_a_name(tmp_path: Path) -> None:
    model = models.llama4()
    moe = model.model.layers[1].feed_forward
    path = tmp_path / "copied.py"
    source = inspect.getsource(type(moe)).replace("class Llama4TextMoe", "class OtherMoe")
    path.write_text(f"import torch\nfrom torch import nn\n\n{source}")
    spec = importlib.util.spec_from_file_location("copied", path)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    moe.__class__ = copied.OtherMoe
    assert set(known_modules(model)) == {"model.layers.1.feed_forward", "model.layers.3.feed_forward"}


@pytest.mark.parametrize("part", ["", "experts", "router"])
def test_a_forward_that_is_not_the_known_one_is_refused(part: str) -> None:
    model = models.llama4()
    assert causal_lm(model, "the model").tails_expected == 2
    for number in (1, 3):
        module = model.get_submodule(f"model.layers.{number}.feed_forward").get_submodule(part)
        changed = type("Changed", (type(module),), {"forward": lambda self, x: type(self).__mro__[1].forward(self, x)})
        module.__class__ = changed
    line = "the experts of Llama4ForCausalLM take no experts implementation and their code is none that moetrt knows"
    with pytest.raises(InputError, match=line):
        causal_lm(model, "the model")


def test_a_forward_on_the_instance_is_not_the_known_one() -> None:
    model = models.dbrx()
    experts = model.transformer.blocks[0].ffn.experts
    own = experts.forward
    experts.forward = lambda *args: own(*args)
    assert set(known_modules(model)) == {"transformer.blocks.1.ffn.experts"}


def test_what_has_no_source_has_no_digest() -> None:
    assert digest(len) == ""
    assert digest(eval("lambda x: x")) == ""


def pair_of(x: torch.Tensor) -> Any:
    return torch.view_as_complex(x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x * y,
        lambda x, y: x + y,
        lambda x, y: torch.mul(x, y),
        lambda x, y: torch.add(x, y),
        lambda x, y: x * 0.5 + 2,
        lambda x, y: 2 + 0.5 * x,
        lambda x, y: x * (1 + 2j),
        lambda x, y: x * torch.arange(4.0),
        lambda x, y: torch.arange(4.0) * x,
        lambda x, y: torch.arange(4.0) + x,
        lambda x, y: x.conj() * y,
        lambda x, y: x.unsqueeze(1) * y[:, None],
        lambda x, y: x[:, :, None, :] * y[:, :, None, 1:2],
        lambda x, y: torch.unsqueeze(x, 0),
        lambda x, y: torch.transpose(x, -1, -2),
        lambda x, y: x.transpose(0, 1).reshape(-1, 4).squeeze(0),
        lambda x, y: x.permute(2, 0, 1).flatten(1),
        lambda x, y: x[:1].expand(2, -1, -1).repeat(1, 2, 1),
        lambda x, y: x.to(y.device).view(6, x.shape[-1]),
        lambda x, y: torch.complex(torch.real(x), y.imag) * x.size(0) * x.size()[1] * x.dim() * x.ndim,
        lambda x, y: torch.polar(x.real.abs(), y.imag),
    ],
)
def test_pairs_are_complex_numbers(compute: Callable[[Any, Any], Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 4, 2, generator=generator) for _ in range(2))
    wanted = torch.view_as_real(compute(pair_of(first), pair_of(second)))
    with real_pairs():
        result = compute(pair_of(first), pair_of(second))
        got = torch.view_as_real(result)
    assert isinstance(result, Pair)
    assert got.shape == wanted.shape
    # A product is two roundings and a sum, in another order where a processor fuses them.
    assert (got - wanted).abs().max() <= 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x.to(torch.complex128), r"to\(torch.complex128\)"),
        (lambda x: x.abs(), "abs"),
        (lambda x: torch.exp(x), "exp"),
        (lambda x: torch.cat((x, x)), "cat"),
        (lambda x: torch.mul(torch.ones(2), other=x), "mul"),
    ],
)
def test_other_uses_of_complex_numbers_are_refused_by_name(compute: Callable[[Any], Any], name: str) -> None:
    with real_pairs():
        pair = pair_of(torch.ones(2, 2))
        with pytest.raises((InputError, AttributeError), match=f"complex numbers were used in '{name}'; ONNX has none"):
            compute(pair)


def test_complex_numbers_of_other_code_stay_as_they_are() -> None:
    with real_pairs():
        assert torch.fft.fft(torch.ones(4)).is_complex()
        assert torch.ones(2, dtype=torch.complex64).is_complex()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 0.22,
        lambda x: 0.22 * x,
        lambda x: torch.mul(x, 0.22),
        lambda x: x.mul(0.22),
        lambda x: x / 6.1,
        lambda x: torch.div(x, 0.7),
    ],
)
def test_products_of_halves_and_numbers_are_pytorchs(
    compute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = compute(x)
    seen: list[torch.dtype] = []
    with scalars_keep_their_value(), Dtypes(seen):
        got = compute(x)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    assert seen == [torch.float32]


class Dtypes(TorchDispatchMode):
    """Keeps the dtypes that arithmetic is done in."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("mul", "div", "add", "reciprocal"):
            tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
            if tensor.dim():
                self.seen.append(tensor.dtype)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 0.5,  # which bfloat16 has
        lambda x: x * 3,
        lambda x: x.float() * 0.22,
        lambda x: x * x,
        lambda x: x + 0.22,  # which PyTorch rounds to bfloat16
        lambda x: 0.22 / x,
        lambda x: torch.add(x, x, alpha=0.22),
        lambda x: x * float("nan"),
    ],
)
def test_other_arithmetic_is_left_as_it_is(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    wanted: list[torch.dtype] = []
    got: list[torch.dtype] = []
    with Dtypes(wanted):
        compute(x)
    with scalars_keep_their_value(), Dtypes(got):
        compute(x)
    assert got == wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_granites_multiplier_is_in_the_plugins_attribute_as_it_stands_in_the_config(dtype: str) -> None:
    report = map_model(capture(load_source("moetrt.models:granite_moe", dtype=dtype)))
    assert report.complete, report.summary()
    assert [site.attributes["routed_scaling_factor"] for site in report.sites] == pytest.approx([0.22] * 2, rel=1e-7)


class Attention(torch.nn.Module):
    """Attention alone, with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key=key, value=value, **self.options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": -0.3},
        {"attn_mask": torch.tril(torch.ones(5, 5)).bool()},
        {"enable_gqa": True, "scale": 0.7},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_attentions_scale_is_not_rounded(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """12^-0.5, and its square root, are no numbers of 16 bits: rounded ones are off by some tenths of a percent."""
    generator = torch.Generator().manual_seed(0)
    heads = 1 if options.get("enable_gqa") else 2
    shapes = ((1, 2, 5, 12), (1, heads, 5, 12), (1, heads, 5, 12))
    inputs = [(3 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    model = float32_twin(capture(as_source((Attention(**options), tuple(inputs))), dynamic=False))
    feeds = {name: tensor.float().numpy() for name, tensor in zip(("query", "key", "value"), inputs, strict=True)}
    (got,) = run_model(model, feeds).values()
    wanted = Attention(**options)(*(tensor.double() for tensor in inputs))
    # A mean of 5 values, of weights that are exponentials of sums of 12 products up to 80 or so.
    np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=2.0**-24 * 80 * 12 * float(wanted.abs().max()))


def test_attentions_scale_stays_where_16_bits_have_it() -> None:
    query = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    with scalars_keep_their_value(), Dtypes(seen):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch.float32 not in seen
