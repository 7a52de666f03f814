"""What looks like a MoE finalize and is another sum is left as it is, or listed with the reason."""

from collections.abc import Callable

import pytest

from moetrt.mapping import map_model
from moetrt.mapping_report import MappingReport
from moetrt.onnx_op import operator_of
from tests.mapping_graphs import Graph

H, K, E = 16, 2, 4
INT64 = 7

Build = Callable[[Graph], str]


def report_of(build: Build) -> MappingReport:
    """Maps a graph whose finalized value goes into a residual addition; nothing of it may be mapped."""
    g = Graph()
    g.output(g.add(build(g), g.input("residual", ["T", H])))
    model = g.model()
    report = map_model(model)
    assert report.mapped == 0, report.sites
    assert not any(operator_of(node) for node in model.graph)
    return report


def rows(g: Graph) -> str:
    return g.input("rows", ["R", H])


def ids(g: Graph) -> str:
    return g.input("ids", ["T", K], INT64)


def column(g: Graph, value: str, k: int, *, keep: bool = False) -> str:
    taken = g.op("Gather", value, g.const(k, INT64), axis=1)
    return g.op("Unsqueeze", taken, g.ints(1)) if keep else taken


def looped(g: Graph, weight_columns: tuple[int, ...], map_columns: tuple[int, ...], top_k: int = K) -> str:
    weights = g.input("weights", ["T", top_k])
    at = g.op("Max", g.input("map", ["T", top_k], INT64), g.const(0, INT64))
    rows(g)
    terms = [
        g.mul(g.op("Gather", "rows", column(g, at, k)), column(g, weights, w, keep=True))
        for w, k in zip(weight_columns, map_columns, strict=True)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = g.add(total, term)
    return total


def loop_with_swapped_weights(g: Graph) -> str:
    return looped(g, (1, 0), (0, 1))


def loop_over_one_column_twice(g: Graph) -> str:
    return looped(g, (0, 0), (0, 0))


def loop_that_leaves_a_column_out(g: Graph) -> str:
    return looped(g, (0, 1), (0, 1), top_k=3)


def loop_over_an_unmasked_map(g: Graph) -> str:
    weights, at = g.input("weights", ["T", K]), g.input("map", ["T", K], INT64)
    rows(g)
    first, second = (
        g.mul(g.op("Gather", "rows", column(g, at, k)), column(g, weights, k, keep=True)) for k in range(K)
    )
    return g.add(first, second)


def loop_with_one_mask(g: Graph) -> str:
    """Only the first term is masked: -1 in the second column reads the last row."""
    weights, at = g.input("weights", ["T", K]), g.input("map", ["T", K], INT64)
    rows(g)
    first, second = (
        g.mul(g.op("Gather", "rows", column(g, at, k)), column(g, weights, k, keep=True)) for k in range(K)
    )
    keeps = g.op("Unsqueeze", g.op("GreaterOrEqual", column(g, at, 0), g.const(0, INT64)), g.ints(1))
    return g.add(g.op("Where", keeps, first, g.const(0.0)), second)


def zeros(g: Graph, tokens_of: str, width: str) -> str:
    shape = g.op("Concat", g.op("Shape", tokens_of, start=0, end=1), width, axis=0)
    return g.op("Expand", g.const(0.0), shape)


def scattered_weights(g: Graph, reduction: str, index: str | None = None) -> str:
    weights = g.input("weights", ["T", K])
    index = index or g.op("Max", ids(g), g.const(0, INT64))
    count = g.op("Shape", rows(g), start=0, end=1)
    combine = g.op("ScatterElements", zeros(g, weights, count), index, weights, axis=1, reduction=reduction)
    return g.op("MatMul", combine, "rows")


def scatter_that_keeps_the_last(g: Graph) -> str:
    return scattered_weights(g, "none")


def scatter_that_multiplies(g: Graph) -> str:
    return scattered_weights(g, "mul")


def scatter_by_an_unmasked_map(g: Graph) -> str:
    return scattered_weights(g, "add", ids(g))


def one_hot_of_an_unmasked_map(g: Graph) -> str:
    """ONNX's OneHot takes -1 for the last column."""
    weights = g.op("Unsqueeze", g.input("weights", ["T", K]), g.ints(-1))
    depth = g.op("Shape", rows(g), start=0, end=1)
    picks = g.op("OneHot", ids(g), depth, g.const([0.0, 1.0]), axis=-1)
    return g.op("MatMul", g.op("ReduceSum", g.mul(picks, weights), g.ints(1), keepdims=0), "rows")


def index_added(g: Graph, token: str, weights: str | None = None) -> str:
    weights = weights or g.op("Reshape", g.input("weights", ["T", K]), g.ints(-1, 1))
    into = zeros(g, "weights", g.ints(H))
    added = g.mul(rows(g), weights)
    return g.op("ScatterND", into, g.op("Reshape", token, g.ints(-1, 1)), added, reduction="add")


def index_add_of_given_tokens(g: Graph) -> str:
    return index_added(g, g.input("token", ["R"], INT64))


def counted(g: Graph, value: str, factor: int = K) -> str:
    """0, 1, 2 ... for each route."""
    count = g.op("Squeeze", g.mul(g.op("Shape", value, start=0, end=1), g.ints(factor)))
    return g.op("Range", g.const(0, INT64), count, g.const(1, INT64))


def index_add_of_tokens_in_turn(g: Graph) -> str:
    """Route r belongs to token r modulo T, not r divided by K."""
    g.input("weights", ["T", K])
    return index_added(g, g.op("Mod", counted(g, "weights"), g.op("Squeeze", g.op("Shape", "weights", start=0, end=1))))


def sorted_routes(g: Graph) -> str:
    flat = g.op("Reshape", ids(g), g.ints(-1))
    return g.op("TopK", flat, g.op("Shape", flat), count=2, largest=0) + "_1"


def index_add_with_weights_of_another_order(g: Graph) -> str:
    """The rows are sorted by expert, and the weights are not."""
    g.input("weights", ["T", K])
    return index_added(g, g.op("Div", sorted_routes(g), g.const(K, INT64)))


def rows_put_at_given_places(g: Graph) -> str:
    """Places that are given may repeat: a row would be overwritten."""
    place = g.op("Reshape", g.input("place", ["R"], INT64), g.ints(-1, 1))
    back = g.op("ScatterND", g.op("Expand", g.const(0.0), g.op("Shape", rows(g))), place, "rows")
    routes = g.op("Reshape", back, g.ints(-1, K, H))
    return g.op(
        "ReduceSum", g.mul(routes, g.op("Unsqueeze", g.input("weights", ["T", K]), g.ints(-1))), g.ints(1), keepdims=0
    )


def loop_over_all_experts_but_one(g: Graph) -> str:
    """Routes of the last expert add nothing, and its rows are not there."""
    scores = g.op("TopK", g.input("logits", ["T", E]), g.ints(K), count=2)
    experts, total = f"{scores}_1", None
    for expert in range(E - 1):
        is_its = g.cast(g.op("Equal", experts, g.const(expert, INT64)), "float32")
        weight = g.op("ReduceSum", g.mul(scores, is_its), g.ints(-1), keepdims=1)
        term = g.mul(g.input(f"rows{expert}", ["T", H]), weight)
        total = term if total is None else g.add(total, term)
    assert total is not None
    return total


def all_experts_by_given_ids(g: Graph) -> str:
    """Ids that are given may be -1 or equal."""
    combine = g.op(
        "ScatterElements", zeros(g, g.input("weights", ["T", K]), g.ints(E)), ids(g), "weights", axis=1, reduction="add"
    )
    return g.op("Einsum", combine, g.input("rows", [E, "T", H]), equation="te,eth->th")


def stacked(g: Graph, weight_columns: tuple[int, ...], axis: int = 0, reduced: int = 0) -> str:
    """Stacked terms: [K, T, H] by an axis, summed over one."""
    weights = g.input("weights", ["T", K])
    at = g.op("Max", g.input("map", ["T", K], INT64), g.const(0, INT64))
    rows(g)
    terms = [
        g.op(
            "Unsqueeze",
            g.mul(g.op("Gather", "rows", column(g, at, k)), column(g, weights, w, keep=True)),
            g.ints(axis),
        )
        for k, w in enumerate(weight_columns)
    ]
    return g.op("ReduceSum", g.op("Concat", *terms, axis=axis), g.ints(reduced), keepdims=0)


def stack_with_swapped_weights(g: Graph) -> str:
    return stacked(g, (1, 0))


def sum_node_over_one_column_twice(g: Graph) -> str:
    """ONNX's Sum of as many terms as there are."""
    weights = g.input("weights", ["T", K])
    at = g.op("Max", g.input("map", ["T", K], INT64), g.const(0, INT64))
    rows(g)
    return g.op(
        "Sum", *(g.mul(g.op("Gather", "rows", column(g, at, 0)), column(g, weights, k, keep=True)) for k in range(K))
    )


def positions(g: Graph, *, clamp: bool = True, bound_of: str | None = None) -> str:
    """[B, S, K, H] times [B, S, K], flattened after the sum."""
    at = g.input("map", ["B", "S", K], INT64)
    weights = g.op("Unsqueeze", g.input("weights", ["B", "S", K]), g.ints(-1))
    picked = g.op("Gather", rows(g), g.op("Max", at, g.const(0, INT64)) if clamp else at)
    product = g.mul(picked, weights)
    if bound_of is not None:
        count = g.op("Squeeze", g.op("Shape", bound_of, start=0, end=1))
        kept = g.op("And", g.op("GreaterOrEqual", at, g.const(0, INT64)), g.op("Less", at, count))
        product = g.op("Where", g.op("Unsqueeze", kept, g.ints(-1)), product, g.const(0.0))
    summed = g.op("ReduceSum", product, g.ints(2), keepdims=0)
    return g.op("Reshape", summed, g.ints(-1, H))


def positions_of_an_unmasked_map(g: Graph) -> str:
    return positions(g, clamp=False)


def masked_by_the_rows_of_another_value(g: Graph) -> str:
    return positions(g, bound_of=g.input("others", ["N", H]))


def combine(g: Graph) -> str:
    """GShard's combine weights, [T, E, C]."""
    chosen = g.op("TopK", g.op("Softmax", g.input("logits", ["T", E])), g.ints(K), count=2)
    places = g.op("Unsqueeze", g.input("places", ["T", K, 5]), g.ints(2))
    picks = g.op("OneHot", chosen + "_1", g.const(E, INT64), g.const([0.0, 1.0]), axis=-1)
    picks = g.mul(g.op("Unsqueeze", picks, g.ints(-1)), places)
    weights = g.op("Unsqueeze", chosen, g.ints(2, 3))
    return g.op("ReduceSum", g.mul(picks, weights), g.ints(1), keepdims=0)


def gshard(g: Graph) -> str:
    return g.op("Einsum", combine(g), g.input("rows", [E, 5, H]), equation="tec,ech->th")


def gshard_of_the_other_order(g: Graph) -> str:
    return g.op("Einsum", g.input("rows", [E, 5, H]), combine(g), equation="ech,tec->th")


def gshard_as_a_matrix(g: Graph) -> str:
    flat = g.op("Reshape", combine(g), g.ints(-1, E * 5))
    return g.op("MatMul", flat, g.op("Reshape", g.input("rows", [E, 5, H]), g.ints(E * 5, H)))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (stack_with_swapped_weights, "multiply the rows of some routes by the weights of others"),
        (sum_node_over_one_column_twice, "multiply the rows of some routes by the weights of others"),
        (positions_of_an_unmasked_map, "entries of -1 in the map 'map' would read the last row"),
        (masked_by_the_rows_of_another_value, "which is not what it picks, 'rows'"),
        (gshard, "tokens beyond an expert's capacity are dropped"),
        (gshard_of_the_other_order, "tokens beyond an expert's capacity are dropped"),
        (gshard_as_a_matrix, "tokens beyond an expert's capacity are dropped"),
        (loop_with_swapped_weights, "multiply the rows of some routes by the weights of others"),
        (loop_over_one_column_twice, "do not take each of a token's 2 routes once"),
        (loop_over_an_unmasked_map, "entries of -1 in the map 'map' would read the last row"),
        (loop_with_one_mask, "some terms of Add"),
        (scatter_that_keeps_the_last, "may be equal for one token, and only the last of these would count"),
        (scatter_that_multiplies, "with reduction 'mul'"),
        (scatter_by_an_unmasked_map, "entries of -1 in the map 'ids' would read the last row"),
        (one_hot_of_an_unmasked_map, "entries of -1 in the map 'ids' would read the last row"),
        (index_add_of_given_tokens, "names each token K times"),
        (index_add_of_tokens_in_turn, "names each token K times"),
        (index_add_with_weights_of_another_order, "are not sorted as the rows are"),
        (rows_put_at_given_places, "does not show that this names each route once"),
        (loop_over_all_experts_but_one, "does not show that"),
        (all_experts_by_given_ids, "entries of -1 in 'ids' would read another token's rows"),
    ],
)
def test_what_is_no_sum_of_routes_is_named(build: Build, words: str) -> None:
    report = report_of(build)
    assert (report.found, report.complete) == (1, False)
    assert words in (report.sites[0].reason or "")


def attention_pooling(g: Graph) -> str:
    """[T, S, H] of which S positions are pooled by weights that no router chose."""
    weights = g.op("Unsqueeze", g.input("scores", ["T", 8]), g.ints(-1))
    return g.op("ReduceSum", g.mul(g.input("states", ["T", 8, H]), weights), g.ints(1), keepdims=0)


def masked_mean(g: Graph) -> str:
    mask = g.cast(g.op("Unsqueeze", g.input("mask", ["T", "S"], INT64), g.ints(-1)), "float32")
    return g.op("ReduceSum", g.mul(g.input("states", ["T", "S", H]), mask), g.ints(1), keepdims=0)


def sum_of_products(g: Graph) -> str:
    first = g.mul(g.input("a", ["T", H]), g.input("p", ["T", 1]))
    return g.add(first, g.mul(g.input("b", ["T", H]), g.input("q", ["T", 1])))


def embeddings_among_text(g: Graph) -> str:
    """An image's embeddings are put where a mask says: no sum."""
    places = g.op("Transpose", g.op("NonZero", g.input("is_image", ["T"], 9)), perm=[1, 0])
    return g.op("ScatterND", g.input("text", ["T", H]), places, g.input("image", ["N", H]))


def linear_layer(g: Graph) -> str:
    return g.op("Gemm", g.input("states", ["T", H]), g.const([[0.5] * H] * H), g.const([1.0] * H))


def two_activations_multiplied(g: Graph) -> str:
    return g.op("MatMul", g.input("a", ["T", "R"]), rows(g))


def stack_summed_over_tokens(g: Graph) -> str:
    summed = stacked(g, (0, 1), axis=1, reduced=0)
    return g.op("Reshape", g.op("ReduceSum", summed, g.ints(0), keepdims=1), g.ints(-1, H))


def gshard_dispatch(g: Graph) -> str:
    """The other way: tokens into the experts' places."""
    placed = g.op("Einsum", combine(g), g.input("x", ["T", H]), equation="tec,th->ech")
    return g.op("Reshape", placed, g.ints(-1, H))


def test_case21_of_dispatched_tokens_only_the_router_is_named() -> None:
    assert [site.form for site in report_of(gshard_dispatch).sites] == ["router"]


def attention_over_heads(g: Graph) -> str:
    """Two letters are summed, and no router chose the weights."""
    scores, values = g.input("scores", ["T", 4, 5]), g.input("values", [4, 5, H])
    return g.op("Einsum", scores, values, equation="tec,ech->th")


def positions_pooled(g: Graph) -> str:
    """[B, S, N, H] pooled over N by weights that no router chose."""
    weights = g.op("Unsqueeze", g.input("scores", ["B", "S", 8]), g.ints(-1))
    pooled = g.op("ReduceSum", g.mul(g.input("states", ["B", "S", 8, H]), weights), g.ints(2), keepdims=0)
    return g.op("Reshape", pooled, g.ints(-1, H))


@pytest.mark.parametrize(
    "build",
    [
        stack_summed_over_tokens,
        attention_over_heads,
        positions_pooled,
        attention_pooling,
        masked_mean,
        sum_of_products,
        loop_that_leaves_a_column_out,
        embeddings_among_text,
        linear_layer,
        two_activations_multiplied,
    ],
)
def test_other_sums_are_no_sites(build: Build) -> None:
    assert report_of(build).sites == []
