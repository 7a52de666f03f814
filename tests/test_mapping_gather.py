"""The contract written in plain PyTorch is found after torch.onnx has translated it, and gives PyTorch's numbers."""

import warnings
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from moetrt.mapping import inference_problem, map_model
from moetrt.mapping_report import MappingReport, Site
from moetrt.onnx_op import operator_of
from tests.equivalence import compare_models, run_model
from tests.foreign_graphs import HIDDEN, TOP_K, Tail
from tests.mapping_graphs import Graph, NormForm

TOKENS, ROWS = 6, 20
BATCH = 2

Finalize = Callable[[Tensor, Tensor, Tensor], Tensor]


def where_rows(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picked = torch.where((index >= 0)[..., None], rows[index.clamp(min=0).long()], 0.0)
    return (picked * weights[..., None]).sum(1)


def where_without_clamp(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * torch.where((index < 0).unsqueeze(-1), 0.0, rows[index.long()])).sum(dim=1)


def masked_fill_einsum(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    tokens, top_k = index.shape
    picked = torch.index_select(rows, 0, index.clamp(min=0).reshape(-1)).reshape(tokens, top_k, -1)
    return torch.einsum("tk,tkh->th", weights, picked.masked_fill((index == -1).unsqueeze(-1), 0))


def masked_weights_flat(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    tokens, top_k = index.shape
    at = torch.where(index < 0, torch.zeros_like(index), index)
    picked = torch.index_select(rows, 0, at.view(-1)) * (weights * (index != -1)).view(-1, 1)
    return picked.view(tokens, top_k, -1).sum(dim=1)


def masked_weights_bmm(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    kept = weights.masked_fill(index < 0, 0.0)
    return torch.bmm(kept.unsqueeze(1), rows[index.clamp_min(0).long()]).squeeze(1)


def mask_multiplied_in_float32(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picked = rows[index.clamp(0, rows.shape[0] - 1).long()].float() * weights.float().unsqueeze(-1)
    return (picked * (index >= 0).unsqueeze(-1)).sum(-2).to(rows.dtype)


def masked_index_einsum(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """torch.onnx leaves int32 indices in a GatherND, which ONNX does not take: only the mapped file is valid."""
    valid = index > -1
    picked = rows[torch.where(valid, index, 0)]
    return torch.einsum(
        "abc,ab->ac", torch.where(valid.unsqueeze(-1), picked, torch.zeros((), dtype=rows.dtype)), weights
    )


def scaled_products(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picked = rows[index.clamp(min=0).long()].masked_fill(~(index >= 0)[..., None], 0.0)
    return (picked * weights[..., None] * 2.5).sum(1)


def without_weights(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.where((index >= 0)[..., None], rows[index.clamp(min=0).long()], 0.0).sum(1)


def clamped_and_unmasked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """An entry of -1 reads row 0 here, so the operator gets the clamped map."""
    return (rows[index.clamp(min=0).long()] * weights[..., None]).sum(1)


def inverse_permutation(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The map is computed: where each route went when routes were sorted by expert."""
    tokens, top_k = index.shape
    place = torch.argsort(torch.argsort(index.flatten()))
    return (rows[place].view(tokens, top_k, -1) * weights.unsqueeze(-1)).sum(dim=1)


def scattered_permutation(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The same map, made by scattering the places."""
    order = torch.argsort(index.flatten())
    place = torch.zeros_like(order).scatter(0, order, torch.arange(order.numel()))
    return (rows[place].view(*index.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def masked_by_another_value(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    other = (index + 1).clamp(max=3)
    return (torch.where((other >= 0)[..., None], rows[index.clamp(min=0).long()], 0.0) * weights[..., None]).sum(1)


def clamped_below_the_last_row(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Entries above 3 read row 3: the mask is of the map before that."""
    return (torch.where((index >= 0)[..., None], rows[index.clamp(0, 3).long()], 0.0) * weights[..., None]).sum(1)


def masked_weights_by_another_value(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    kept = weights * (index.flip(1) >= 0)
    return (rows[index.clamp(min=0).long()] * kept[..., None]).sum(1)


FORMS: dict[str, Finalize] = {
    form.__name__: form
    for form in (
        where_rows,
        where_without_clamp,
        masked_fill_einsum,
        masked_weights_flat,
        masked_weights_bmm,
        mask_multiplied_in_float32,
        masked_index_einsum,
        scaled_products,
        without_weights,
        clamped_and_unmasked,
        inverse_permutation,
        scattered_permutation,
        masked_by_another_value,
        masked_weights_by_another_value,
        clamped_below_the_last_row,
    )
}


def inputs(
    dtype: torch.dtype, index_dtype: torch.dtype, weights_dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    index = torch.randint(-1, ROWS, (TOKENS, TOP_K), generator=random)
    index[0, 0], index[1] = -1, -1
    return (
        normal(ROWS, HIDDEN).to(dtype),
        normal(TOKENS, TOP_K).to(weights_dtype),
        index.to(index_dtype),
        normal(TOKENS, HIDDEN).to(dtype),
        normal(BATCH, TOKENS // BATCH, HIDDEN).to(dtype),
    )


def export(module: nn.Module, example: tuple[Tensor, ...]) -> ir.Model:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, {0: dynamic}, {0: dynamic}, {0: dynamic}, {0: dynamic, 1: dynamic})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, example, dynamic_shapes=shapes[: len(example)], opset_version=22, dynamo=True, verbose=False
        )
    assert program is not None
    return program.model


def check(finalize: Finalize, dtype: torch.dtype, index_dtype: torch.dtype, weights_dtype: torch.dtype) -> Site:
    """Exports and maps the module; ONNX Runtime must give what PyTorch gives."""
    example = inputs(dtype, index_dtype, weights_dtype)
    module = Tail(finalize).to(dtype)
    model = export(module, example)
    report = map_model(model)
    assert inference_problem(model) is None
    assert (report.found, report.mapped) == (1, 1), [site.reason for site in report.sites]
    assert [node.op_type for node in model.graph if operator_of(node)] == ["MoEFinalizeAddRMSNorm"]
    for seed in range(3):
        tensors = inputs(dtype, index_dtype, weights_dtype, seed)
        names = [value.name or "" for value in model.graph.inputs]
        values = run_model(model, dict(zip(names, (tensor.numpy() for tensor in tensors), strict=False)))
        with torch.no_grad():
            expected = module(*tensors)
        tolerance = 4e-3 if dtype == torch.float16 else 2e-6
        for got, want in zip(values.values(), expected, strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance * float(want.abs().max()))
    return report.sites[0]


@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_is_found(name: str) -> None:
    finalize = FORMS[name]
    site = check(finalize, torch.float32, torch.int32, torch.float32)
    assert site.form == "gather"
    assert site.inputs["expanded_idx_to_permuted_idx"]["dtype"] == "INT32"
    assert site.attributes["apply_expert_weights"] == int(name != "without_weights")
    assert site.attributes["routed_scaling_factor"] == (2.5 if name == "scaled_products" else 1.0)
    if name not in (
        "inverse_permutation",
        "scattered_permutation",
        "clamped_and_unmasked",
        "masked_weights_by_another_value",
    ):
        # Every entry below 0 is masked: those below -1 are raised to it first.
        assert "expanded_idx_to_permuted_idx/" in site.inputs["expanded_idx_to_permuted_idx"]["value"]


@pytest.mark.parametrize("name", ["where_rows", "mask_multiplied_in_float32"])
def test_int64_map_is_cast(name: str) -> None:
    assert check(FORMS[name], torch.float32, torch.int64, torch.float32).matched


@pytest.mark.parametrize("name", ["where_rows", "mask_multiplied_in_float32", "masked_weights_flat"])
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.float32])
def test_half_precision_rows(name: str, weights_dtype: torch.dtype) -> None:
    """The rows' dtype is the operator's, also where the products are summed in float32."""
    site = check(FORMS[name], torch.float16, torch.int32, weights_dtype)
    assert site.dtype == "FLOAT16"
    assert site.inputs["expert_weights"]["dtype"] == ("FLOAT16" if weights_dtype == torch.float16 else "FLOAT")
    assert site.attributes["weight_before_cast"] == 0


def reported(finalize: Finalize) -> MappingReport:
    example = inputs(torch.float32, torch.int32, torch.float32)
    model = export(Tail(finalize), example)
    return map_model(model)


def unmasked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index.long()] * weights[..., None]).sum(1)


@pytest.mark.parametrize(
    ("finalize", "words"),
    [
        (unmasked, "entries of -1 in the map 'index' would read the last row: mask them"),
    ],
)
def test_what_would_be_wrong_is_not_mapped(finalize: Finalize, words: str) -> None:
    report = reported(finalize)
    assert (report.found, report.mapped, report.complete) == (1, 0, False)
    assert report.sites[0].operator is None
    assert words in (report.sites[0].reason or "")


def test_other_sums_of_gathered_rows_are_no_tails() -> None:
    """A bag of embeddings: the rows are a weight of the model."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, HIDDEN))

        def forward(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
            return where_rows(self.table, weights, index) + rows[:1]

    model = export(Bag(), inputs(torch.float32, torch.int32, torch.float32)[:3])
    assert map_model(model).found == 0
    assert not any(operator_of(node) for node in model.graph)


def test_sum_over_another_axis_is_no_tail() -> None:
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("index", ["T", TOP_K], 6)
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    picked = g.mul(g.op("Gather", rows, index), weights)
    g.output(g.op("ReduceSum", picked, g.ints(0), keepdims=0))
    assert map_model(g.model()).found == 0


@pytest.mark.parametrize("what", ["weights", "columns"])
def test_expanded_weights(what: str) -> None:
    """Weights repeated along H are taken as they were; one weight a token, repeated along K, is left repeated."""
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], 6)
    if what == "columns":
        weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
        shape = g.op("Concat", g.op("Shape", weights, start=0, end=2), g.ints(HIDDEN), axis=0)
        weights = g.op("Expand", weights, shape)
    else:
        weights = g.op("Expand", g.input("weights", ["T", 1]), g.op("Shape", index))
        weights = g.op("Unsqueeze", weights, g.ints(-1))
    picked = g.op("Gather", rows, g.op("Max", index, g.const(0, 6)))
    hidden = g.add(g.op("ReduceSum", g.mul(picked, weights), g.ints(1), keepdims=0), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    model = g.model()
    report = map_model(model)
    assert report.mapped == 1, report.sites
    assert (report.sites[0].shapes["expert_weights"] or [])[-1] == TOP_K
    example = [tensor.numpy() for tensor in inputs(torch.float32, torch.int32, torch.float32)]
    feeds = {"rows": example[0], "map": example[2], "weights": example[1], "residual": example[3]}
    feeds["weights"] = feeds["weights"] if what == "columns" else feeds["weights"][:, :1]
    for difference in compare_models(g.model(), model, feeds):
        assert difference.relative < 2e-6, str(difference)


def test_gathered_rows_with_another_reader_stay() -> None:
    """Something else reads the gathered rows: their nodes stay for it, and the tail is mapped all the same."""
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], 6)
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    picked = g.op("Gather", rows, g.op("Max", index, g.const(0, 6)))
    value = g.op("ReduceSum", g.mul(picked, weights), g.ints(1), keepdims=0)
    hidden = g.add(value, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), g.op("Neg", picked))
    model = g.model()
    assert map_model(model).mapped == 1
    assert [node.op_type for node in model.graph] == ["Max", "Gather", "MoEFinalizeAddRMSNorm", "Neg"]


def gathered(g: Graph, index: str, weights: str) -> Graph:
    """Rows of ``index`` times ``weights``, summed, added to the residual and normalised."""
    picked = g.mul(g.op("Gather", "rows", index), weights)
    hidden = g.add(g.op("ReduceSum", picked, g.ints(1), keepdims=0), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return g


@pytest.mark.parametrize("bound", ["R - 1", "R - 1 by Gather", "constant", "too low", "none"])
def test_upper_bounds_of_the_clamp(bound: str) -> None:
    """A clamp to [0, R-1] changes no entry that the contract allows; a lower bound does."""
    g = Graph()
    rows = g.input("rows", [ROWS if bound in ("constant", "too low") else "R", HIDDEN])
    index = g.input("map", ["T", TOP_K], 6)
    if bound == "R - 1":
        last = [g.cast_int32(g.op("Sub", g.op("Squeeze", g.op("Shape", rows, end=1)), g.const(1, 7)))]
    elif bound == "R - 1 by Gather":
        last = [g.cast_int32(g.op("Sub", g.op("Gather", g.op("Shape", rows), g.const(0, 7)), g.const(1, 7)))]
    else:
        last = {"constant": [g.const(ROWS - 1, 6)], "too low": [g.const(3, 6)], "none": []}[bound]
    at = g.op("Clip", index, g.const(0, 6), *last)
    mask = g.op("Unsqueeze", g.op("Cast", g.op("Less", g.const(-1, 6), index), to=1), g.ints(-1))
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    model = gathered(g, at, g.mul(mask, weights)).model()
    before = ir.from_proto(ir.to_proto(model))
    site = map_model(model).sites[0]
    assert site.matched, site.reason
    # Where entries read another row, the mask is one of the weights alone.
    value = site.inputs["expanded_idx_to_permuted_idx"]["value"].rpartition("/")[2]
    assert value.startswith(("Max", "Min")) == (bound != "too low")
    example = [tensor.numpy() for tensor in inputs(torch.float32, torch.int32, torch.float32)]
    feeds = {"rows": example[0], "map": example[2], "weights": example[1], "residual": example[3]}
    for difference in compare_models(before, model, feeds):
        assert difference.relative < 2e-6, str(difference)


@pytest.mark.parametrize("layer", [True, False], ids=["residual and norm", "residual"])
def test_given_rows_of_three_dimensions(layer: bool) -> None:
    """[T, K, H] and weights that no router is seen to choose: what ends a layer is a tail, another sum is pooling."""
    g = Graph()
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    products = g.mul(g.input("rows", ["T", TOP_K, HIDDEN]), weights)
    hidden = g.add(g.op("ReduceSum", products, g.ints(1), keepdims=0), g.input("residual", ["T", HIDDEN]))
    g.output(*([NormForm().write(g, hidden, rank=2)] if layer else []), hidden)
    model = g.model()
    report = map_model(model)
    assert [site.matched for site in report.sites] == [True] * layer
    random = np.random.default_rng(0)
    shapes = {"rows": (TOKENS, TOP_K, HIDDEN), "weights": (TOKENS, TOP_K), "residual": (TOKENS, HIDDEN)}
    feeds = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for difference in compare_models(g.model(), model, feeds):
        assert difference.relative < 2e-6, str(difference)


def test_flat_map_and_weights_of_three_dimensions() -> None:
    """One number a route in the routes' order, in whatever shape, is given to the operator as [T, K]."""
    g = Graph()
    g.input("rows", ["R", HIDDEN])
    index = g.op("Reshape", g.op("Max", g.input("map", ["N"], 7), g.const(0, 7)), g.ints(-1, TOP_K))
    weights = g.op("Reshape", g.input("weights", ["B", "S", TOP_K]), g.ints(-1, TOP_K, 1))
    model = gathered(g, index, weights).model()
    report = map_model(model)
    assert report.mapped == 1, report.sites
    random = np.random.default_rng(0)
    feeds = {
        "rows": random.standard_normal((ROWS, HIDDEN), np.float32),
        "map": random.integers(0, ROWS, TOKENS * TOP_K),
        "weights": random.standard_normal((BATCH, TOKENS // BATCH, TOP_K), np.float32),
        "residual": random.standard_normal((TOKENS, HIDDEN), np.float32),
    }
    for difference in compare_models(g.model(), model, feeds):
        assert difference.relative < 2e-6, str(difference)


def test_flat_map_of_unknown_top_k() -> None:
    g = Graph()
    g.input("rows", ["R", HIDDEN])
    weights = g.op("Unsqueeze", g.input("weights", ["T", "K"]), g.ints(-1))
    index = g.op("Reshape", g.op("Max", g.input("map", ["N"], 6), g.const(0, 6)), g.op("Shape", "weights"))
    site = map_model(gathered(g, index, weights).model()).sites[0]
    assert site.operator is None
    assert "[T, K] is taken where K is no number" in (site.reason or "")


def test_weights_of_another_half_dtype() -> None:
    g = Graph("float16")
    rows = g.cast(g.input("rows", ["R", HIDDEN]), "float32")
    weights = g.cast(g.op("Unsqueeze", g.input("weights", ["T", TOP_K], 16), g.ints(-1)), "float32")
    picked = g.op("Gather", rows, g.op("Max", g.input("map", ["T", TOP_K], 6), g.const(0, 6)))
    g.output(g.cast(g.op("ReduceSum", g.mul(picked, weights), g.ints(1), keepdims=0), "float16"))
    site = map_model(g.model()).sites[0]
    assert site.operator is None
    assert "are BFLOAT16; the rows are FLOAT16" in (site.reason or "")


def test_sum_that_stays_in_float32() -> None:
    g = Graph("float16")
    rows, index = g.input("rows", ["R", HIDDEN]), g.op("Max", g.input("map", ["T", TOP_K], 6), g.const(0, 6))
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K], 1), g.ints(-1))
    picked = g.mul(g.cast(g.op("Gather", rows, index), "float32"), weights)
    g.output(g.op("ReduceSum", picked, g.ints(1), keepdims=0))
    model = g.model()
    site = map_model(model).sites[0]
    assert (site.operator, site.matched) == (None, False)
    assert "stays FLOAT while the rows are FLOAT16: cast it to the rows' dtype" in (site.reason or "")
    assert not any(operator_of(node) for node in model.graph)
