"""A router whose experts reach no tail that was found is a site that is not mapped; another TopK never is one.

That no router of a model whose tails are mapped is one: tests/test_families.py and tests/test_mapping_foreign_models.py
hold the number of sites against the number of MoE layers, of every family in `moetrt.models`.
"""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from moetrt import cli
from moetrt.inspection import inspect_file
from moetrt.mapping import map_model
from moetrt.mapping_report import MappingReport
from moetrt.segments.routers import FORM
from tests.equivalence import compare_models
from tests.foreign_graphs import OPTIMISERS
from tests.mapping_graphs import Graph, NormForm

T, H, E, K, VOCABULARY, INT64 = 6, 16, 8, 2, 96, 7


def exported(module: nn.Module, *example: Tensor, exporter: str = "dynamo") -> onnx.ModelProto:
    """The module as ONNX, the first dimension of each input dynamic."""
    module.eval()
    names = [f"x{number}" for number in range(len(example))]
    with warnings.catch_warnings(), io.BytesIO() as file:
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            axes = {name: {0: "T"} for name in names}
            torch.onnx.export(
                module, example, file, opset_version=17, dynamo=False, input_names=names, dynamic_axes=axes
            )
            return onnx.load_from_string(file.getvalue())
        shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
        program = torch.onnx.export(
            module, example, dynamic_shapes=(shapes,), opset_version=22, dynamo=True, verbose=False, input_names=names
        )
    assert program is not None
    return ir.to_proto(program.model)


def report_of(model: onnx.ModelProto) -> MappingReport:
    return map_model(ir.from_proto(model))


class Layers(nn.Module):
    """A function of hidden states and the layers that it needs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        self.layers = nn.ModuleDict(layers)
        self.experts = nn.Parameter(torch.randn(E, H, H))

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(self, *x)


def maxima_of_experts(self: Layers, x: Tensor) -> Tensor:
    """The experts' outputs meet by their maximum: no finalize that anybody maps."""
    weights, ids = torch.topk(self.layers["router"](x).softmax(-1), K)
    products = torch.einsum("th,tkhf->tkf", x, self.experts[ids])
    return x + (products * weights[..., None]).amax(1)


def grouped_maxima(self: Layers, x: Tensor) -> Tensor:
    """DeepSeek's choice: the two best of each of four groups, then groups, then experts."""
    scores = self.layers["router"](x).sigmoid()
    groups = scores.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(groups).scatter(1, groups.topk(2, dim=-1)[1], 1.0)
    allowed = scores.masked_fill(mask.repeat_interleave(E // 4, dim=1) == 0, 0.0)
    ids = allowed.topk(K, dim=-1)[1]
    products = torch.einsum("th,tkhf->tkf", x, self.experts[ids])
    return x + (products * scores.gather(1, ids)[..., None]).amax(1)


def llama4_by_hand(self: Layers, x: Tensor) -> Tensor:
    """The scores multiply what the experts read, and the sum over all experts has neither weights nor a map."""
    top, ids = torch.topk(self.layers["router"](x), K)
    scores = torch.full((x.shape[0], E), float("-inf")).scatter(1, ids, top).sigmoid().t()
    return x + torch.bmm(scores[..., None] * x[None], self.experts).sum(0)


UNKNOWN = {form.__name__: form for form in (maxima_of_experts, grouped_maxima, llama4_by_hand)}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", UNKNOWN)
def test_case21_router_without_a_tail_is_a_site(form: str, exporter: str) -> None:
    model = exported(Layers(UNKNOWN[form], router=nn.Linear(H, E, bias=False)), torch.randn(T, H), exporter=exporter)
    report = report_of(model)
    assert (report.found, report.mapped, report.complete) == (1, 0, False), [site.became for site in report.sites]
    (site,) = report.sites
    assert (site.form, site.operator, site.matched) == (FORM, None, False)
    assert f"chooses {K} of {E} experts" in (site.reason or "")
    assert "TopK" in site.name
    assert "gather each token's rows by a map and sum them over k" in (site.reason or "")
    assert report.notes == []


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_case21_after_an_optimiser(optimiser: str) -> None:
    model = exported(Layers(grouped_maxima, router=nn.Linear(H, E, bias=False)), torch.randn(T, H))
    report = report_of(OPTIMISERS[optimiser](model))
    assert [site.form for site in report.sites] == [FORM]


def one_layer_maps(self: Layers, x: Tensor) -> Tensor:
    """Two MoE layers, of which the second is written in a way that is known."""
    x = maxima_of_experts(self, x)
    weights, ids = torch.topk(self.layers["second"](x).softmax(-1), K)
    rows = torch.einsum("th,tkhf->tkf", x, self.experts[ids])
    return x + (rows * weights[..., None]).sum(1)


def routed_without_weights(self: Layers, x: Tensor) -> Tensor:
    """The weights are all 1: what the router chose is in the rows alone."""
    ids = torch.topk(self.layers["router"](x), K)[1]
    rows = torch.bmm(x.repeat_interleave(K, 0)[:, None], self.experts[ids.reshape(-1)]).squeeze(1)
    return x + (rows.view(-1, K, H) * torch.ones_like(ids, dtype=x.dtype)[..., None]).sum(1)


def after_a_maximum(self: Layers, x: Tensor) -> Tensor:
    return routed_without_weights(self, maxima_of_experts(self, x))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", [routed_without_weights, after_a_maximum])
def test_router_of_a_tail_without_weights_is_none(form: Callable[..., Tensor], exporter: str) -> None:
    """The router of the layer before, which reaches no tail, stays one."""
    report = report_of(exported(Layers(form, router=nn.Linear(H, E)), torch.randn(T, H), exporter=exporter))
    routers = [site for site in report.sites if site.form == FORM]
    assert (report.mapped, len(routers)) == (1, int(form is after_a_maximum)), [site.became for site in report.sites]


def test_case21_where_only_some_layers_map_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Layers(one_layer_maps, router=nn.Linear(H, E), second=nn.Linear(H, E))
    path, mapped = tmp_path / "model.onnx", tmp_path / "mapped.onnx"
    onnx.save_model(exported(module, torch.randn(T, H)), path)
    assert cli.run(["map", str(path), "-o", str(mapped)]) == 1
    captured = capsys.readouterr()
    assert "tails: 2 found, unknown expected, 1 mapped" in captured.out
    assert "chooses 2 of 8 experts" in " ".join(captured.out.split())
    assert "--allow-unmatched accepts that" in captured.err
    assert cli.run(["map", str(path), "-o", str(mapped), "--allow-unmatched"]) == 0
    inspection = inspect_file(path)
    assert sorted(site.form == FORM for site in inspection.sites) == [False, True]
    assert any(f": {FORM}, " in line for line in inspection.lines())


# TopK nodes that choose no experts.


def sampled(self: Layers, x: Tensor) -> Tensor:
    top, ids = torch.topk(self.layers["head"](x), K)
    cumulated = top.softmax(-1).cumsum(-1)
    return ids.gather(1, (cumulated < 0.5).sum(-1, keepdim=True).clamp(max=K - 1))


def filtered(self: Layers, x: Tensor) -> Tensor:
    logits = self.layers["head"](x)
    return logits.masked_fill(logits < logits.topk(K)[0][:, -1:], float("-inf")).softmax(-1)


def next_words(self: Layers, x: Tensor) -> Tensor:
    """Multi-token prediction: the best words' embeddings go into the next layer."""
    ids = torch.topk(self.layers["head"](x), K)[1]
    return self.layers["next"](self.layers["words"](ids)).sum(1)


def beam_search(self: Layers, x: Tensor, scores: Tensor) -> Tensor:
    """[beams, H] states; the best of beams times words, and the states of their beams go on."""
    log = self.layers["head"](x).log_softmax(-1) + scores
    best, at = torch.topk(log.reshape(1, -1), 4)
    return self.layers["next"](x[(at // VOCABULARY).reshape(-1)]) + best.reshape(-1, 1)


def mixture_of_depths(self: Layers, x: Tensor) -> Tensor:
    """[B, S, H]: the tokens that go through the layer are chosen."""
    weights, at = torch.topk(self.layers["token"](x).squeeze(-1), 4, dim=1)
    index = at[..., None].expand(-1, -1, H)
    chosen = self.layers["next"](x.gather(1, index)) * weights[..., None]
    return x.scatter_add(1, index, chosen)


def boxes(self: Layers, x: Tensor) -> Tensor:
    """[B, N, H]: the best places of an image, as detectors choose their queries."""
    best = torch.topk(self.layers["classes"](x).amax(-1), 4, dim=1)[1]
    return self.layers["next"](x.gather(1, best[..., None].expand(-1, -1, H)))


def sparse_attention(self: Layers, x: Tensor) -> Tensor:
    """[B, S, H]: each query reads its best keys alone."""
    scores = x @ x.transpose(1, 2)
    kept = scores.masked_fill(scores < scores.topk(4)[0][..., -1:], float("-inf")).softmax(-1)
    return self.layers["next"](kept @ x)


def nearest_rows(self: Layers, x: Tensor, table: Tensor) -> Tensor:
    """The nearest rows of a table, as in retrieval."""
    best = torch.topk(x @ table.t(), K)[1]
    return self.layers["next"](table[best].mean(1))


def soft_embedding(self: Layers, x: Tensor) -> Tensor:
    """The best words' embeddings, weighed by their scores, go into the next layer."""
    best, ids = torch.topk(self.layers["head"](x).softmax(-1), K)
    return self.layers["next"]((self.layers["words"](ids) * best[..., None]).sum(1))


def nearest_codes(self: Layers, x: Tensor) -> Tensor:
    """The mean of the nearest rows of a matrix that the scores are products with too."""
    best, ids = torch.topk(self.layers["head"](x), K)
    return x + torch.bmm(best.softmax(-1)[:, None], self.layers["head"].weight[ids])[:, 0]


def sparse_embedding(self: Layers, x: Tensor) -> Tensor:
    """The same as a product of a matrix of mostly zeros."""
    best, ids = torch.topk(self.layers["head"](x).softmax(-1), K)
    return x + torch.zeros(x.shape[0], VOCABULARY).scatter(1, ids, best) @ self.layers["words"].weight


OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "sampled": (sampled, ((T, H),)),
    "filtered": (filtered, ((T, H),)),
    "next_words": (next_words, ((T, H),)),
    "soft_embedding": (soft_embedding, ((T, H),)),
    "nearest_codes": (nearest_codes, ((T, H),)),
    "sparse_embedding": (sparse_embedding, ((T, H),)),
    "beam_search": (beam_search, ((T, H), (T, 1))),
    "mixture_of_depths": (mixture_of_depths, ((2, 8, H),)),
    "boxes": (boxes, ((2, 8, H),)),
    "sparse_attention": (sparse_attention, ((2, 8, H),)),
    "nearest_rows": (nearest_rows, ((T, H), (40, H))),
}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", OTHERS)
def test_other_topk_nodes_are_no_sites(form: str, exporter: str) -> None:
    function, shapes = OTHERS[form]
    layers = {
        "head": nn.Linear(H, VOCABULARY),
        "next": nn.Linear(H, H),
        "words": nn.Embedding(VOCABULARY, H),
        "token": nn.Linear(H, 1),
        "classes": nn.Linear(H, 5),
    }
    model = exported(Layers(function, **layers), *(torch.randn(shape) for shape in shapes), exporter=exporter)
    assert any(node.op_type == "TopK" for node in model.graph.node)
    report = report_of(model)
    assert (report.sites, report.notes) == ([], [])


@pytest.mark.parametrize("what", ["sampling", "vocabulary", "sorting"])
def test_scores_that_reach_nothing_are_no_routers(what: str) -> None:
    g = Graph()
    width = 50000 if what == "vocabulary" else E
    logits = g.input("logits", ["T", width])
    chosen = g.op("TopK", logits, g.ints(E if what == "sorting" else K), count=2)
    g.output(chosen if what == "sampling" else g.op("Neg", chosen))
    assert map_model(g.model()).sites == []


# Routers without TopK.


def best_expert(self: Layers, x: Tensor) -> Tensor:
    """Switch: one expert a token, and so no sum; its weights are picked."""
    scores = self.layers["router"](x).softmax(-1)
    best = scores.max(-1)
    return x + torch.bmm(x[:, None], self.experts[best.indices])[:, 0] * best.values[:, None]


def best_experts_rows(self: Layers, x: Tensor) -> Tensor:
    """Every expert's rows, of which the best one's are picked."""
    scores = self.layers["router"](x).softmax(-1)
    best = scores.argmax(-1, keepdim=True)
    rows = torch.einsum("th,ehf->tef", x, self.experts)
    picked = rows.gather(1, best[..., None].expand(-1, 1, H))[:, 0]
    return x + picked * scores.gather(1, best)


def sorted_experts(self: Layers, x: Tensor) -> Tensor:
    weights, ids = torch.sort(self.layers["router"](x).softmax(-1), dim=-1, descending=True)
    products = torch.einsum("th,tkhf->tkf", x, self.experts[ids[:, :K]])
    return x + (products * weights[:, :K, None]).amax(1)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    ("form", "chosen", "operator"),
    [(best_expert, 1, "ArgMax"), (best_experts_rows, 1, "ArgMax"), (sorted_experts, K, "TopK")],
)
def test_a_router_without_a_choice_of_k(form: Callable[..., Tensor], chosen: int, operator: str, exporter: str) -> None:
    report = report_of(exported(Layers(form, router=nn.Linear(H, E)), torch.randn(T, H), exporter=exporter))
    (site,) = report.sites
    assert (site.form, site.operator, site.matched) == (FORM, None, False)
    assert f"chooses {chosen} of {E} experts" in (site.reason or "")
    assert operator in site.name


def maxima(g: Graph, choose: Callable[[Graph, str], tuple[str, str]], *, given: bool = False) -> Graph:
    """Experts whose weights a choice among scores takes, and which meet by their maximum: no finalize."""
    x = g.input("x", ["T", H])
    gate = g.input("gate", [H, E]) if given else g.const(np.ones((H, E)))
    weights, ids = choose(g, g.op("Softmax", g.op("MatMul", x, gate)))
    experts = g.input("experts", [E, H, H]) if given else g.const(np.ones((E, H, H)))
    rows = g.op("MatMul", g.op("Unsqueeze", x, g.ints(1, 2)), g.op("Gather", experts, ids))
    products = g.mul(g.op("Squeeze", rows, g.ints(2)), g.op("Unsqueeze", weights, g.ints(-1)))
    g.output(g.op("ReduceMax", products, g.ints(1), keepdims=0))
    return g


def ordered(g: Graph, scores: str, **how: int) -> tuple[str, str]:
    values = g.op("TopK", scores, g.ints(E), count=2, **how)
    return values, g.nodes[-1].output[1]


def last_of_all(g: Graph, scores: str) -> tuple[str, str]:
    values, ids = ordered(g, scores, largest=0)
    first, second = (g.op("Slice", value, g.ints(-K), g.ints(E), g.ints(1)) for value in (values, ids))
    return first, second


def split_from_all(g: Graph, scores: str) -> tuple[str, str]:
    first, second = (g.op("Split", value, g.ints(K, E - K), axis=1, count=2) for value in ordered(g, scores))
    return first, second


def gathered_from_all(g: Graph, scores: str) -> tuple[str, str]:
    first, second = (g.op("Gather", value, g.ints(*range(K)), axis=1) for value in ordered(g, scores))
    return first, second


def along_the_first_axis(g: Graph, scores: str) -> tuple[str, str]:
    values = g.op("TopK", g.op("Transpose", scores, perm=[1, 0]), g.ints(K), axis=0, count=2)
    first, second = (g.op("Transpose", value, perm=[1, 0]) for value in (values, g.nodes[-1].output[1]))
    return first, second


def best_k(g: Graph, scores: str) -> tuple[str, str]:
    return g.op("TopK", scores, g.ints(K), count=2), g.nodes[-1].output[1]


@pytest.mark.parametrize(
    "choose", [last_of_all, split_from_all, gathered_from_all, along_the_first_axis], ids=lambda form: form.__name__
)
def test_experts_that_are_taken_of_sorted_ones(choose: Callable[[Graph, str], tuple[str, str]]) -> None:
    (site,) = map_model(maxima(Graph(), choose).model()).sites
    assert f"chooses {K} of {E} experts" in (site.reason or "")


def test_a_router_whose_weights_are_given() -> None:
    (site,) = map_model(maxima(Graph(), best_k, given=True).model()).sites
    assert f"chooses {K} of {E} experts" in (site.reason or "")


@pytest.mark.parametrize("default", [False, True])
def test_a_router_whose_k_is_given(default: bool) -> None:
    def choose(g: Graph, scores: str) -> tuple[str, str]:
        if default:
            g.const([K], INT64, name="k")
        return g.op("TopK", scores, g.op("Add", g.input("k", [1], INT64), g.ints(0)), count=2), g.nodes[-1].output[1]

    (site,) = map_model(ir.from_proto(without_sizes(maxima(Graph(), choose)))).sites
    assert "'k' can be given with each run" in (site.reason or "")


def without_sizes(g: Graph) -> onnx.ModelProto:
    """The graph without what its builder inferred from defaults."""
    model = g.proto()
    del model.graph.value_info[:]
    return model


def experts_sum(choose: Callable[[Graph, str], tuple[str, str]]) -> ir.Model:
    """A residual and a norm after the weighted sum over the experts that are chosen."""
    g = Graph()
    x = g.input("x", ["T", H])
    numbers = np.random.default_rng(3)
    weights, ids = choose(g, g.op("Softmax", g.op("MatMul", x, g.const(numbers.normal(size=(H, E))))))
    rows = g.op("Gather", g.const(numbers.normal(size=(E, H, H))), ids)
    rows = g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", x, g.ints(1, 2)), rows), g.ints(2))
    routed = g.op("ReduceSum", g.mul(rows, g.op("Unsqueeze", weights, g.ints(-1))), g.ints(1), keepdims=0)
    hidden = g.add(routed, x)
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return ir.from_proto(without_sizes(g))


def test_a_sum_whose_k_has_a_default_that_can_be_overridden_stays() -> None:
    def choose(g: Graph, scores: str) -> tuple[str, str]:
        g.const([K], INT64, name="k")
        return g.op("TopK", scores, g.input("k", [1], INT64), count=2), g.nodes[-1].output[1]

    model = experts_sum(choose)
    report = map_model(after := ir.from_proto(ir.to_proto(model)))
    (site,) = report.sites
    assert not report.complete
    assert "how many of them is not known ('k' can be given with each run)" in (site.reason or "")
    for count in (1, 3):
        feeds = {"x": np.ones((T, H), np.float32), "k": np.array([count])}
        assert all(difference.relative == 0 for difference in compare_models(model, after, feeds))


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_sum_over_some_of_all_that_were_sorted(end: str) -> None:
    """As TorchScript writes a sort: a TopK of as many as the scores' shape says."""

    def choose(g: Graph, scores: str) -> tuple[str, str]:
        count = g.op("Gather", g.op("Shape", scores), g.ints(-1))
        values = g.op("TopK", scores, count, count=2, largest=int(end == "first"))
        ids = g.nodes[-1].output[1]
        bounds = (0, K) if end == "first" else (-K, np.iinfo(np.int64).max)
        starts, ends = (g.op("Constant", value_ints=[bound]) for bound in bounds)
        first, second = (g.op("Slice", value, starts, ends, g.ints(1)) for value in (values, ids))
        return first, second

    model = experts_sum(choose)
    report = map_model(after := ir.from_proto(ir.to_proto(model)))
    assert (report.found, report.complete) == (1, True), [site.became for site in report.sites]
    feeds = {"x": np.random.default_rng(1).normal(size=(T, H)).astype(np.float32)}
    for difference in compare_models(model, after, feeds):
        assert difference.relative < 2e-6, str(difference)


def test_rows_in_a_shape_that_can_be_overridden_stay() -> None:
    g = Graph()
    picked = g.op("Gather", g.input("rows", ["R", H]), g.op("Max", g.input("map", ["N"], INT64), g.const(0, INT64)))
    shape = g.input("shape", [3], INT64)
    g.const([-1, K, H], INT64, name="shape")
    products = g.mul(g.op("Reshape", picked, shape), g.op("Unsqueeze", g.input("weights", ["T", K]), g.ints(-1)))
    hidden = g.add(g.op("ReduceSum", products, g.ints(1), keepdims=0), g.input("residual", ["T", H]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    assert map_model(ir.from_proto(without_sizes(g))).mapped == 0


def best_of_all_experts(self: Layers, x: Tensor) -> Tensor:
    """Every expert's rows times the one-hot weights of the best: a sum over the experts."""
    scores = self.layers["router"](x).softmax(-1)
    chosen = torch.nn.functional.one_hot(scores.argmax(-1), E).to(x.dtype) * scores
    return x + (torch.einsum("th,ehf->tef", x, self.experts) * chosen[..., None]).sum(1)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_sum_over_all_experts_by_the_best_ones_weight(exporter: str) -> None:
    model = exported(Layers(best_of_all_experts, router=nn.Linear(H, E)), torch.randn(T, H), exporter=exporter)
    mapped = ir.from_proto(model)
    report = map_model(mapped)
    assert (report.found, report.mapped) == (1, 1), [site.became for site in report.sites]
    for difference in compare_models(ir.from_proto(model), mapped, {"x0": np.ones((3, H), np.float32)}):
        assert difference.relative < 2e-6, str(difference)


def greedy(self: Layers, x: Tensor) -> Tensor:
    return self.layers["next"](self.layers["words"](self.layers["head"](x).argmax(-1)))  # type: ignore[no-any-return]


def greedy_one_hot(self: Layers, x: Tensor) -> Tensor:
    best = torch.nn.functional.one_hot(self.layers["head"](x).argmax(-1), VOCABULARY).to(x.dtype)
    return self.layers["next"](best @ self.layers["words"].weight)  # type: ignore[no-any-return]


def codebook(self: Layers, x: Tensor) -> Tensor:
    """The nearest code, straight through, and a layer after it."""
    scores = self.layers["codes"](x)
    code = self.layers["codes"].weight[scores.argmax(-1)]
    return self.layers["next"](x + (code - x))  # type: ignore[no-any-return]


def top_p(self: Layers, x: Tensor) -> Tensor:
    scores, words = torch.sort(self.layers["head"](x), dim=-1, descending=True)
    kept = scores.masked_fill(scores.softmax(-1).cumsum(-1) > 0.9, float("-inf"))
    return words.gather(1, kept.argmax(-1, keepdim=True))


def classes(self: Layers, x: Tensor) -> Tensor:
    """[B, N, H]: the best class of each box, and where it is none."""
    logits = self.layers["classes"](x)
    return torch.where((logits.argmax(-1) == 0)[..., None], 0.0, self.layers["next"](x))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", [greedy, greedy_one_hot, codebook, top_p, classes])
def test_other_choices_of_the_best_are_no_sites(form: Callable[..., Tensor], exporter: str) -> None:
    layers = {
        "head": nn.Linear(H, VOCABULARY),
        "next": nn.Linear(H, H),
        "words": nn.Embedding(VOCABULARY, H),
        "codes": nn.Linear(H, E, bias=False),
        "classes": nn.Linear(H, 5),
    }
    x = torch.randn((2, 8, H) if form is classes else (T, H))
    model = exported(Layers(form, **layers), x, exporter=exporter)
    assert any(node.op_type in ("ArgMax", "TopK") for node in model.graph.node)
    report = report_of(model)
    assert (report.sites, report.notes) == ([], [])


def quantised(shapes: bool) -> Graph:
    """A gate in 4 bits, as ONNX Runtime's quantiser writes it, whose experts meet by their maximum."""
    g = Graph()
    x = g.input("x", ["T", H])
    packed = g.const(np.zeros((E, 1, 8)), TensorProto.UINT8)
    gate = g.op("MatMulNBits", x, packed, g.const([1.0] * E), domain="com.microsoft", K=H, N=E, bits=4, block_size=16)
    if shapes:
        g.values.append(helper.make_tensor_value_info(gate, TensorProto.FLOAT, ["T", E]))
    weights = g.op("TopK", g.op("Softmax", gate), g.ints(K), axis=-1, count=2)
    experts = g.op("Gather", g.const(np.ones((E, H, H))), g.nodes[-1].output[1])
    rows = g.op("MatMul", g.op("Unsqueeze", x, g.ints(1, 2)), experts)
    products = g.mul(g.op("Squeeze", rows, g.ints(2)), g.op("Unsqueeze", weights, g.ints(-1)))
    g.values.append(helper.make_tensor_value_info(products, TensorProto.FLOAT, ["T", K, H]))
    g.output(products)
    return g


@pytest.mark.parametrize("shapes", [True, False])
def test_a_quantised_router_without_a_tail_is_a_site(shapes: bool) -> None:
    g = quantised(shapes)
    (site,) = map_model(ir.from_proto(g.proto("com.microsoft"))).sites
    assert site.form == FORM
    assert f"chooses {K} of {E} experts" in (site.reason or "")


def test_a_quantised_router_of_a_tail_is_heard() -> None:
    g = quantised(shapes=True)
    routed = g.op("ReduceSum", g.outputs.pop(), g.ints(1), keepdims=0)
    hidden = g.add(routed, "x")
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    report = map_model(ir.from_proto(g.proto("com.microsoft")))
    assert report.complete, [site.became for site in report.sites]
    assert report.found == 1


@pytest.mark.parametrize("operator", ["MoE", "QMoE"])
def test_a_whole_layer_in_one_node_is_a_site(operator: str) -> None:
    g = Graph()
    x, scores = g.input("x", ["T", H]), g.input("scores", ["T", E])
    made = g.op(operator, x, scores, g.const(np.ones((E, H, H))), g.const(np.ones((E, H, H))), domain="com.microsoft")
    g.values.append(helper.make_tensor_value_info(made, TensorProto.FLOAT, ["T", H]))
    g.output(g.add(made, x))
    (site,) = map_model(ir.from_proto(g.proto("com.microsoft"))).sites
    assert (site.form, site.operator) == (FORM, None)
    assert "ONNX Runtime's own operator for a whole MoE layer" in (site.reason or "")
