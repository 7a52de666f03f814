"""The rows of a tail have K times the tokens in the default profile, however its map is an input (case 45)."""

from collections.abc import Callable

import pytest
from onnx import TensorProto, helper

from moetrt.mapping import map_model
from moetrt.profiles import make_profile
from tests.mapping_graphs import FLOAT, HIDDEN, TOP_K, Graph

INT64, INT32, ROWS = TensorProto.INT64, TensorProto.INT32, "gemm2_permuted"

Make = Callable[[Graph], str]


def given(g: Graph, shape: list[int | str] | None = None, dtype: int = INT64) -> str:
    return g.input("map", shape or ["T", TOP_K], dtype)


def masked(g: Graph) -> str:
    index, none = given(g), g.const(-1, INT64)
    return g.op("Where", g.op("GreaterOrEqual", index, g.const(0, INT64)), index, none)


MAPS: dict[str, Make] = {
    "int32": lambda g: given(g, dtype=INT32),
    "Cast": given,
    "Where": masked,
    "Max": lambda g: g.op("Max", given(g), g.const(0, INT64)),
    "Min": lambda g: g.op("Min", given(g), g.const(7, INT64)),
    "Clip": lambda g: g.op("Clip", given(g), g.const(0, INT64), g.const(7, INT64)),
    "Max of Min": lambda g: g.op("Max", g.op("Min", given(g), g.const(7, INT64)), g.const(0, INT64)),
    "bound is an input": lambda g: g.op("Min", given(g), g.input("last", [], INT64)),
    "Reshape of all": lambda g: g.op("Reshape", given(g, ["N"]), g.ints(-1, TOP_K)),
    "Reshape of tokens": lambda g: g.op("Reshape", given(g, ["B", "S", TOP_K]), g.ints(-1, TOP_K)),
    "Unsqueeze": lambda g: g.op("Squeeze", g.op("Unsqueeze", given(g), g.ints(2)), g.ints(2)),
    "Squeeze": lambda g: g.op("Squeeze", given(g, ["T", 1, TOP_K]), g.ints(1)),
}

WANTED = {"Reshape of all": (1, 32, 256), "Reshape of tokens": (1, 32 * 32 * TOP_K, 256 * 256 * TOP_K)}


def tail(make: Make | None, dtype: str = "float32", *, weights: Make | None = None) -> Graph:
    """A finalize of rows that are an input, of a map that ``make`` makes; None: of rows in the routes' order."""
    g = Graph(dtype)
    rows = g.input(ROWS, ["R", HIDDEN])
    weight = weights(g) if weights else g.input("weights", ["T", TOP_K], TensorProto.FLOAT)
    inputs = [rows, weight]
    if make is not None:
        index = make(g)
        inputs.append(index if g.inputs["map"].type.tensor_type.elem_type == INT32 else g.cast_int32(index))
    flag = int(make is not None)
    g.output(g.op("MoEFinalizeAdd", *inputs, domain="moetrt", has_expanded_idx_to_permuted_idx=flag))
    g.values.append(helper.make_tensor_value_info(g.outputs[0], FLOAT[dtype], ["T", HIDDEN]))
    return g


@pytest.mark.parametrize("form", MAPS)
def test_case45_rows_of_a_map_that_is_an_input(form: str) -> None:
    profile = make_profile(tail(MAPS[form]).model())
    bounds = WANTED.get(form, (1, 32 * TOP_K, 256 * TOP_K))
    assert profile[ROWS] == tuple((size, HIDDEN) for size in bounds)


def test_case45_tokens_that_are_given_count() -> None:
    model = tail(MAPS["Where"]).model()
    profile = make_profile(model, {}, {"map": (64, TOP_K)}, {"map": (300, TOP_K)})
    assert profile[ROWS] == ((1, HIDDEN), (64 * TOP_K, HIDDEN), (300 * TOP_K, HIDDEN))
    assert make_profile(model, {}, {}, {ROWS: (5, HIDDEN)})[ROWS][2] == (5, HIDDEN)


def softmax(g: Graph) -> str:
    return g.op("Softmax", g.input("weights", ["T", TOP_K], TensorProto.FLOAT))


def reshaped(g: Graph) -> str:
    return g.op("Reshape", g.input("weights", ["T", TOP_K, 1], TensorProto.FLOAT), g.ints(-1, TOP_K))


@pytest.mark.parametrize("weights", [None, softmax, reshaped], ids=["given", "Softmax", "Reshape"])
def test_case45_rows_in_the_routes_order_are_counted_by_their_weights(weights: Make | None) -> None:
    profile = make_profile(tail(None, weights=weights).model())
    assert profile[ROWS] == ((1, HIDDEN), (32 * TOP_K, HIDDEN), (256 * TOP_K, HIDDEN))


def test_case45_a_foreign_graph_with_an_int64_map_after_mapping() -> None:
    """The map goes through Max and Where in the graph before, and through a Cast in the mapped one."""
    g = Graph()
    g.inputs["map"] = g.inputs.pop(g.input("map", ["T", TOP_K], INT64))
    g.input("rows", ["R", HIDDEN])
    g.input("weights", ["T", TOP_K], FLOAT["float32"])
    zero = g.const(0, INT64)
    picked = g.op("Gather", "rows", g.op("Max", "map", zero), axis=0)
    keep = g.op("Unsqueeze", g.op("GreaterOrEqual", "map", zero), g.ints(-1))
    weighted = g.mul(g.op("Where", keep, picked, g.const(0.0)), g.op("Unsqueeze", "weights", g.ints(-1)))
    g.output(g.op("ReduceSum", weighted, g.ints(1), keepdims=0))
    model = g.model()
    assert map_model(model).mapped == 1
    assert make_profile(model)["rows"] == ((1, HIDDEN), (32 * TOP_K, HIDDEN), (256 * TOP_K, HIDDEN))


def test_case45_rows_as_many_as_tokens_stay_so() -> None:
    g = tail(MAPS["int32"])
    g.inputs[ROWS].type.tensor_type.shape.dim[0].dim_param = "T"
    assert make_profile(g.model())[ROWS] == ((1, HIDDEN), (32, HIDDEN), (256, HIDDEN))
