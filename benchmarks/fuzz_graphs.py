"""Small graphs that end in a MoE tail, each form of the finalize once: what the fuzz of the mapper mutates.

Inputs are named for what they hold (rows, weights, map, ids, shared, gate, residual), and dimensions for their sizes:
T tokens, N = T * K rows in the routes' order, R rows that a map picks, B and S with B * S = T.
"""

from collections.abc import Callable
from functools import cache

import onnx
from onnx import TensorProto

from tests.mapping_graphs import FLOAT, HIDDEN, TOP_K, Graph, NormForm

EXPERTS = 4

_INT64 = TensorProto.INT64


def _inputs(g: Graph, *, map_dtype: int = _INT64, weights: str = "") -> None:
    g.input("rows", ["R", HIDDEN])
    g.input("weights", ["T", TOP_K], FLOAT[weights or g.dtype])
    g.input("map", ["T", TOP_K], map_dtype)


def _column(g: Graph, value: str) -> str:
    return g.op("Unsqueeze", value, g.ints(-1))


def _summed(g: Graph, products: str, axis: int = 1) -> str:
    return g.op("ReduceSum", products, g.ints(axis), keepdims=0)


def _end(g: Graph, routed: str, norm: NormForm | None = None, *, rank: int = 2, shared: bool = True) -> onnx.ModelProto:
    """A scale, the shared expert's output, the residual and the norm, all of the tokens' shape."""
    tokens: list[int | str] = ["T"] if rank == 2 else ["B", "S"]
    value = g.mul(routed, g.const(2.5))
    if shared:
        value = g.add(value, g.input("shared", [*tokens, HIDDEN]))
    hidden = g.add(g.input("residual", [*tokens, HIDDEN]), value)
    g.output((norm or NormForm()).write(g, hidden, rank=rank), hidden)
    return g.proto("com.microsoft")


def masked_rows(dtype: str = "float32") -> onnx.ModelProto:
    """A map's -1 drops rows, by a Where on them."""
    g = Graph(dtype)
    _inputs(g)
    zero = g.const(0, _INT64)
    rows = g.op("Gather", "rows", g.op("Max", "map", zero), axis=0)
    kept = g.op("Where", _column(g, g.op("GreaterOrEqual", "map", zero)), rows, g.const(0.0))
    return _end(g, _summed(g, g.mul(kept, _column(g, "weights"))))


def masked_rows_of_16_bits() -> onnx.ModelProto:
    """All arithmetic in float16."""
    return masked_rows("float16")


def masked_weights() -> onnx.ModelProto:
    """A map's -1 drops weights, by a Where on them."""
    g = Graph()
    _inputs(g, map_dtype=TensorProto.INT32)
    zero = g.const(0, TensorProto.INT32)
    weights = g.op("Where", g.op("Less", "map", zero), g.const(0.0), "weights")
    rows = g.op("Gather", "rows", g.op("Clip", "map", zero), axis=0)
    return _end(g, _summed(g, g.mul(rows, _column(g, weights))), NormForm(inverse="Div", square="Mul"))


def clamped_on_both_sides() -> onnx.ModelProto:
    """Entries are bounded to [0, R - 1], and dropped by a factor of truth values."""
    g = Graph()
    _inputs(g)
    last = g.op("Sub", g.op("Shape", "rows", start=0, end=1), g.ints(1))
    index = g.op("Min", g.op("Max", "map", g.const(0, _INT64)), last)
    rows = g.op("Gather", "rows", index, axis=0)
    keep = g.cast(g.op("GreaterOrEqual", "map", g.const(0, _INT64)), "float32")
    return _end(g, _summed(g, g.mul(rows, _column(g, g.mul("weights", keep)))), NormForm(gamma_plus_one="left"))


def accumulated_in_float32(dtype: str = "bfloat16", *, layer_norm: bool = False) -> onnx.ModelProto:
    """Rows of 16 bits; all is summed in float32 and rounded once."""
    g = Graph(dtype)
    _inputs(g, weights="float32")
    zero = g.const(0, _INT64)
    rows = g.cast(g.op("Gather", "rows", g.op("Max", "map", zero), axis=0), "float32")
    keep = _column(g, g.op("GreaterOrEqual", "map", zero))
    kept = g.op("Where", keep, rows, g.const(0.0, FLOAT["float32"]))
    routed = _summed(g, g.mul(kept, _column(g, "weights")))
    shared = g.cast(g.input("shared", ["T", HIDDEN]), "float32")
    residual = g.cast(g.input("residual", ["T", HIDDEN]), "float32")
    hidden = g.cast(g.add(residual, g.add(shared, routed)), dtype)
    if layer_norm:
        wide, one = g.cast(hidden, "float32"), FLOAT["float32"]
        g.output(g.op("LayerNormalization", wide, g.vector(5, one), g.vector(6, one), axis=-1), hidden)
    else:
        g.output(NormForm(up=True, down="after", gamma_dtype="float32").write(g, hidden, rank=2), hidden)
    return g.proto()


def accumulated_before_layer_norm() -> onnx.ModelProto:
    """A LayerNorm follows, which is no RMSNorm."""
    return accumulated_in_float32("float16", layer_norm=True)


def loop_over_routes() -> onnx.ModelProto:
    """Term by term, as torch unrolls a loop over k."""
    g = Graph()
    _inputs(g)
    total, index = "", g.op("Max", "map", g.const(0, _INT64))
    for k in range(TOP_K):
        at = g.const(k, _INT64)
        weight = g.op("Slice", "weights", g.ints(k), g.ints(k + 1), g.ints(1))
        product = g.mul(g.op("Gather", "rows", g.op("Gather", index, at, axis=1), axis=0), weight)
        total = g.add(total, product) if total else product
    return _end(g, total, shared=False)


def einsum() -> onnx.ModelProto:
    """Weighted and summed by one Einsum."""
    g = Graph()
    _inputs(g)
    rows = g.op("Gather", "rows", g.op("Clip", "map", g.const(0, _INT64)), axis=0)
    return _end(g, g.op("Einsum", "weights", rows, equation="tk,tkh->th"), NormForm(mean="SumDiv"))


def product_with_weights() -> onnx.ModelProto:
    """Weighted and summed by one MatMul."""
    g = Graph()
    _inputs(g)
    rows = g.op("Gather", "rows", g.op("Max", "map", g.const(0, _INT64)), axis=0)
    product = g.op("MatMul", g.op("Unsqueeze", "weights", g.ints(1)), rows)
    return _end(g, g.op("Squeeze", product, g.ints(1)), NormForm(positive_axis=True))


def routes_before_tokens() -> onnx.ModelProto:
    """Map and weights are transposed to [K, T]."""
    g = Graph()
    _inputs(g)
    index = g.op("Max", g.op("Transpose", "map", perm=[1, 0]), g.const(0, _INT64))
    weights = g.op("Transpose", "weights", perm=[1, 0])
    return _end(g, _summed(g, g.mul(g.op("Gather", "rows", index, axis=0), _column(g, weights)), 0))


def map_given_by_routes() -> onnx.ModelProto:
    """Map and weights are given as [K, T]."""
    g = Graph()
    g.input("rows", ["R", HIDDEN])
    g.input("weights", [TOP_K, "T"])
    g.input("map", [TOP_K, "T"], _INT64)
    rows = g.op("Gather", "rows", g.op("Max", "map", g.const(0, _INT64)), axis=0)
    return _end(g, _summed(g, g.mul(rows, _column(g, "weights")), 0), shared=False)


def one_hot_matrix() -> onnx.ModelProto:
    """A matrix [T, R] of weights times the rows."""
    g = Graph()
    _inputs(g)
    depth, values = g.op("Shape", "rows", start=0, end=1), g.const([0.0, 1.0])
    picks = g.op("OneHot", g.op("Max", "map", g.const(0, _INT64)), depth, values, axis=-1)
    return _end(g, g.op("MatMul", _summed(g, g.mul(picks, _column(g, "weights"))), "rows"))


def matrix_of_comparisons() -> onnx.ModelProto:
    """The same matrix by comparing the map with the rows' numbers, in which -1 picks none."""
    g = Graph()
    _inputs(g)
    count = g.op("Squeeze", g.op("Shape", "rows", start=0, end=1))
    numbers = g.op("Range", g.const(0, _INT64), count, g.const(1, _INT64))
    picks = g.cast(g.op("Equal", _column(g, "map"), numbers), "float32")
    return _end(g, g.op("MatMul", _summed(g, g.mul(picks, _column(g, "weights"))), "rows"))


def every_experts_rows() -> onnx.ModelProto:
    """Every expert's rows for every token, of which a router's choice is summed."""
    g = Graph()
    g.input("rows", [EXPERTS, "T", HIDDEN])
    values, ids = g.op("TopK", g.input("scores", ["T", EXPERTS]), g.ints(2), count=2), ""
    ids = f"{values}_1"
    tokens = g.op("Shape", "scores", start=0, end=1)
    zeros = g.op("Expand", g.const(0.0), g.op("Concat", tokens, g.ints(EXPERTS), axis=0))
    combine = g.op("ScatterElements", zeros, ids, values, axis=1)
    return _end(g, g.op("Einsum", combine, "rows", equation="te,eth->th"))


def sorted_routes() -> onnx.ModelProto:
    """Rows that lie as the routes were sorted by expert, added into their tokens."""
    g = Graph()
    g.input("rows", ["N", HIDDEN])
    g.input("weights", ["T", TOP_K])
    g.input("ids", ["T", TOP_K], _INT64)
    flat = g.op("Reshape", "ids", g.ints(-1))
    order = f"{g.op('TopK', flat, g.op('Shape', flat), count=2, largest=0)}_1"
    weights = g.op("Gather", g.op("Reshape", "weights", g.ints(-1)), order, axis=0)
    token = g.op("Div", order, g.const(TOP_K, _INT64))
    tokens = g.op("Shape", "ids", start=0, end=1)
    zeros = g.op("Expand", g.const(0.0), g.op("Concat", tokens, g.ints(HIDDEN), axis=0))
    weighted = g.mul("rows", _column(g, weights))
    return _end(g, g.op("ScatterND", zeros, _column(g, token), weighted, reduction="add"))


def rows_by_route() -> onnx.ModelProto:
    """Rows in the routes' own order, by a router's weights."""
    g = Graph()
    g.input("rows", ["N", HIDDEN])
    weights = g.op("TopK", g.op("Softmax", g.input("scores", ["T", EXPERTS])), g.ints(TOP_K), count=2)
    weighted = g.mul("rows", g.op("Reshape", weights, g.ints(-1, 1)))
    return _end(g, _summed(g, g.op("Reshape", weighted, g.ints(-1, TOP_K, HIDDEN))))


def tokens_not_flattened() -> onnx.ModelProto:
    """Tokens as [B, S] from the map to the norm."""
    g = Graph()
    g.input("rows", ["R", HIDDEN])
    g.input("weights", ["B", "S", TOP_K])
    g.input("map", ["B", "S", TOP_K], _INT64)
    zero = g.const(0, _INT64)
    rows = g.op("Gather", "rows", g.op("Max", "map", zero), axis=0)
    kept = g.op("Where", _column(g, g.op("Greater", "map", g.const(-1, _INT64))), rows, g.const(0.0))
    return _end(g, _summed(g, g.mul(kept, _column(g, "weights")), 2), rank=3)


def captured(dtype: str = "float32") -> onnx.ModelProto:
    """What the export leaves: the operator's node, a gated shared expert, a Reshape to [B, S, H]."""
    g = Graph(dtype)
    routed = g.routed(routed_scaling_factor=2.5)
    gate = g.op("Sigmoid", g.input("gate", ["T", 1]))
    value = g.to_tokens(
        g.add(g.mul(gate, g.input("shared", ["T", HIDDEN])), routed), g.input("residual", ["B", "S", HIDDEN])
    )
    hidden = g.add("residual", value)
    g.output(NormForm(swap_gamma=True).write(g, hidden), hidden)
    return g.proto()


def captured_in_16_bits() -> onnx.ModelProto:
    """What the export of a float16 model leaves."""
    return captured("float16")


def gated_and_reshaped() -> onnx.ModelProto:
    """A gated shared expert, a Reshape to [B, S, H], a scale of the whole."""
    g = Graph()
    routed = g.gathered()
    gate = g.op("Sigmoid", g.input("gate", ["T", 1]))
    value = g.to_tokens(
        g.add(g.mul(g.input("shared", ["T", HIDDEN]), gate), routed), g.input("residual", ["B", "S", HIDDEN])
    )
    hidden = g.add(g.mul(value, g.const(0.5)), "residual")
    g.output(NormForm(inverse="Pow").write(g, hidden), hidden)
    return g.proto()


GRAPHS: tuple[Callable[[], onnx.ModelProto], ...] = (
    masked_rows,
    masked_rows_of_16_bits,
    masked_weights,
    clamped_on_both_sides,
    accumulated_in_float32,
    accumulated_before_layer_norm,
    loop_over_routes,
    einsum,
    product_with_weights,
    routes_before_tokens,
    map_given_by_routes,
    one_hot_matrix,
    matrix_of_comparisons,
    every_experts_rows,
    sorted_routes,
    rows_by_route,
    tokens_not_flattened,
    captured,
    captured_in_16_bits,
    gated_and_reshaped,
)


@cache
def graph(number: int) -> onnx.ModelProto:
    """One of `GRAPHS`, with the types of all values; not to be changed."""
    return GRAPHS[number]()
