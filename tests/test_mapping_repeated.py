"""Case 42: values that need not be of one shape may be repeated where they meet; T is never K's partner."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import fuzz_graphs
from benchmarks.fuzz_compare import Comparison, Session, feeds_of
from benchmarks.fuzz_graphs import accumulated_in_float32
from moetrt.mapping import map_model
from moetrt.mapping_report import MappingReport
from moetrt.onnx_op import attach_functions
from tests.mapping_checks import mapped
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm

INT64 = TensorProto.INT64
Sizes = list[int | str]


def compared(g: Graph, routed: str, tokens: str | int = "T") -> MappingReport:
    """Adds a residual and a norm; maps, and compares at 0, 1, 3 (which is K) and 17 tokens, unnamed sizes 1 too."""
    hidden = g.add(routed, g.input("residual", [tokens, HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return compared_model(g.model())


def compared_model(model: ir.Model) -> MappingReport:
    after, report = mapped(model)
    protos = []
    for each in (model, after):
        copy = each.clone()
        attach_functions(copy)
        protos.append(ir.to_proto(copy))
    session = Session(protos[0])
    comparison, runs = Comparison(protos[0], protos[1], session), 0
    for feeds in feeds_of(protos[0], 0):
        outputs = session.run(feeds.values)
        if outputs is not None:
            runs += 1
            assert comparison.wrong(feeds, outputs) is None
    assert runs
    return report


def operator(report: MappingReport) -> str | None:
    return report.sites[0].operator if report.sites else None


def gathered(g: Graph, index: Sizes, weights: Sizes, *, masked: bool = False, axis: int = 1) -> str:
    """Rows by a map, times the weights, summed over ``axis``, as the inputs lie."""
    rows = g.input("rows", ["R", HIDDEN])
    at, factor = g.input("map", index, INT64), g.input("weights", weights)
    picked = g.op("Gather", rows, g.op("Max", at, g.const(0, INT64)), axis=0)
    if masked:
        keep = g.op("Unsqueeze", g.op("GreaterOrEqual", at, g.const(0, INT64)), g.ints(-1))
        picked = g.op("Where", keep, picked, g.const(0.0))
    products = g.mul(picked, g.op("Unsqueeze", factor, g.ints(-1)))
    return g.op("ReduceSum", products, g.ints(axis), keepdims=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("index", "weights"),
    [
        ([TOP_K, "T"], ["T", TOP_K]),
        (["T", TOP_K], [TOP_K, "T"]),
        (["T", TOP_K], ["T", "U"]),
        (["T", TOP_K], ["U", TOP_K]),
        (["U", TOP_K], ["T", TOP_K]),
        (["T", TOP_K], [1, TOP_K]),
        (["T", TOP_K], ["T", 1]),
        (["T", "U"], ["T", TOP_K]),
        (["T", "K"], ["T", "K"]),
        (["T", "T"], ["T", "T"]),
        ([TOP_K, "T"], [TOP_K, "T"]),
        ([TOP_K, TOP_K], [TOP_K, TOP_K]),
        (["T", TOP_K], ["T", TOP_K]),
    ],
    ids=str,
)
def test_case_42_a_map_and_weights_of_other_shapes(index: Sizes, weights: Sizes, axis: int, masked: bool) -> None:
    """Right at every T that the graph runs at, or not mapped."""
    tokens = index[1 - axis] if index[1 - axis] != TOP_K else TOP_K
    try:
        report = compared(g := Graph(), gathered(g, index, weights, masked=masked, axis=axis), tokens)
    except AssertionError as error:
        if "assert 0" in str(error):
            pytest.fail("the graph runs at no size")
        raise
    if index == weights and index[axis] == TOP_K and index[0] != index[1]:
        assert operator(report) == "MoEFinalizeAddRMSNorm"
    if {str(index), str(weights)} == {str([TOP_K, "T"]), str(["T", TOP_K])}:
        assert operator(report) is None


def test_case_42_says_which_values_meet() -> None:
    g = Graph()
    report = compared(g, gathered(g, [TOP_K, "T"], ["T", TOP_K]), TOP_K)
    assert operator(report) is None
    assert "either may be 1, and would be repeated; give both the same name or number" in str(report.sites[0].reason)


@pytest.mark.parametrize("index", [["T", TOP_K], [TOP_K, "T"]], ids=str)
@pytest.mark.parametrize("equation", ["tk,tkh->th", "kt,tkh->th", "tk,kth->th", "kt,kth->th"])
def test_case_42_an_einsum(equation: str, index: Sizes) -> None:
    """ONNX Runtime repeats a 1 along the letter's dimension in the other operand."""
    g = Graph()
    rows, at = g.input("rows", ["R", HIDDEN]), g.input("map", index, INT64)
    picked = g.op("Gather", rows, g.op("Max", at, g.const(0, INT64)), axis=0)
    letters = equation.partition(",")[0]
    weights = g.input("weights", ["T" if letter == "t" else TOP_K for letter in letters])
    right = (equation[3:6] == "tkh") == (index[0] == "T")
    report = compared(g, g.op("Einsum", weights, picked, equation=equation))
    assert operator(report) == ("MoEFinalizeAddRMSNorm" if right else None)


@pytest.mark.parametrize("tokens", ["T", "U", 1])
def test_case_42_a_product(tokens: str | int) -> None:
    g = Graph()
    rows, at = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64)
    picked = g.op("Gather", rows, g.op("Max", at, g.const(0, INT64)), axis=0)
    weights = g.op("Unsqueeze", g.input("weights", [tokens, TOP_K]), g.ints(1))
    report = compared(g, g.op("Squeeze", g.op("MatMul", weights, picked), g.ints(1)))
    assert (operator(report) == "MoEFinalizeAddRMSNorm") == (tokens == "T")


@pytest.mark.parametrize(
    "shape", [["T", HIDDEN], [HIDDEN, "T"], ["U", HIDDEN], [1, HIDDEN], ["T", "U"], [3, HIDDEN]], ids=str
)
def test_case_42_what_is_added(shape: Sizes) -> None:
    """A residual of [H, T] is repeated at T = 1; so is one of another dimension's name or number."""
    g = Graph()
    added = g.add(gathered(g, ["T", TOP_K], ["T", TOP_K]), g.input("shared", shape))
    site = compared(g, added).sites[0]
    assert (site.operator == "MoEFinalizeAddRMSNorm") == (shape == ["T", HIDDEN])


@pytest.mark.parametrize("axis", [0, 1])
def test_case_42_a_gather_along_the_columns(axis: int) -> None:
    """Along axis 1 the map picks columns, and no rows."""
    g = Graph()
    rows, at = g.input("rows", ["R", "R"] if axis else ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64)
    picked = g.op("Gather", rows, g.op("Max", at, g.const(0, INT64)), axis=axis)
    if axis:
        picked = g.op("Slice", g.op("Transpose", picked, perm=[1, 2, 0]), g.ints(0), g.ints(HIDDEN), g.ints(2))
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    report = compared(g, g.op("ReduceSum", g.mul(picked, weights), g.ints(1), keepdims=0))
    assert (operator(report) == "MoEFinalizeAddRMSNorm") == (axis == 0)


def test_case_42_weights_of_a_matrix_with_fewer_rows() -> None:
    """A ScatterElements takes fewer rows of weights than the matrix has, which then has rows of 0."""
    g = Graph()
    rows = g.input("rows", [4, "T", HIDDEN])
    scores = g.input("scores", ["U", 4])
    weights = g.op("TopK", scores, g.ints(2), count=2)
    size = g.op("Concat", g.op("Shape", rows, start=1, end=2), g.ints(4), axis=0)
    matrix = g.op("ScatterElements", g.op("Expand", g.const(0.0), size), f"{weights}_1", weights, axis=1)
    report = compared(g, g.op("Einsum", matrix, rows, equation="te,eth->th"))
    assert operator(report) is None


def test_case_42_what_a_transpose_makes_of_the_tokens_is_merged_with_no_other_size() -> None:
    """[16, T] meets [T, 16] where T is 1 or 16; that the rows' number is 3 * T says nothing of that."""
    g = Graph()
    weights = g.op("TopK", g.input("scores", ["T", 4]), g.ints(TOP_K), count=2)
    weighted = g.mul(g.input("rows", ["N", HIDDEN]), g.op("Reshape", weights, g.ints(-1, 1)))
    routed = g.op("ReduceSum", g.op("Reshape", weighted, g.ints(-1, TOP_K, HIDDEN)), g.ints(1), keepdims=0)
    compared(g, g.op("Transpose", routed, perm=[1, 0]))


@pytest.mark.parametrize("op_type", ["Identity", "Expand"])
def test_a_sum_over_axes_that_inference_does_not_know_has_no_known_shape(op_type: str) -> None:
    """It was an IndexError."""
    g = Graph()
    rows, at = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64)
    picked = g.op("Gather", rows, g.op("Max", at, g.const(0, INT64)), axis=0)
    products = g.mul(picked, g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1)))
    axis = g.op(op_type, g.ints(1), *([g.ints(1)] if op_type == "Expand" else []))
    g.output(g.op("ReduceSum", products, axis, keepdims=0))
    report = map_model(g.model())
    assert operator(report) is None
    assert "has shape None; H, its last dimension, is taken as a number" in str(report.sites[0].reason)


def test_case_42_weights_for_each_row_of_one_long_token() -> None:
    """Rows [1, N, H] by weights [3 * T, 1]: these are no K places of one token."""
    g = Graph()
    weights = g.op("TopK", g.input("scores", ["T", 4]), g.ints(TOP_K), count=2)
    rows = g.op("Unsqueeze", g.input("rows", ["N", HIDDEN]), g.ints(0))
    weighted = g.mul(rows, g.op("Reshape", weights, g.ints(-1, 1)))
    compared(g, g.op("ReduceSum", g.op("Reshape", weighted, g.ints(-1, TOP_K, HIDDEN)), g.ints(1), keepdims=0))


def test_case_42_a_part_of_a_map_of_routes_by_tokens() -> None:
    """Entries [K, T - 1] meet weights [K, T] at T = 2 alone."""
    g = Graph()
    at = g.op("Slice", g.input("map", [TOP_K, "T"], INT64), g.ints(1), g.ints(2**31), g.ints(1))
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), g.op("Max", at, g.const(0, INT64)), axis=0)
    products = g.mul(picked, g.op("Unsqueeze", g.input("weights", [TOP_K, "T"]), g.ints(-1)))
    compared(g, g.op("ReduceSum", products, g.ints(0), keepdims=0))


@pytest.mark.parametrize(("column", "taken"), [(f"{TOP_K}*T", True), ("U", False)])
def test_case_42_a_column_of_several_times_the_tokens(column: str, taken: bool) -> None:
    """Several times the tokens are no 1, whatever the rows' own number is named; another name may be 1."""
    g = Graph()
    flat = g.op("Reshape", g.input("weights", ["T", TOP_K]), g.ints(-1, 1))
    g.values.append(helper.make_tensor_value_info(flat, TensorProto.FLOAT, [column, 1]))
    products = g.op("Reshape", g.mul(g.input("rows", ["N", HIDDEN]), flat), g.ints(-1, TOP_K, HIDDEN))
    report = compared(g, g.op("ReduceSum", products, g.ints(1), keepdims=0))
    assert operator(report) == ("MoEFinalizeAddRMSNorm" if taken else None)


@pytest.mark.parametrize("cut", [False, True])
def test_case_42_what_is_scattered_has_the_shape_of_its_indices(cut: bool) -> None:
    """TorchScript cuts the weights to that shape, which onnx cannot tell; of more columns, the first are taken."""
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64)
    weights = g.input("weights", ["T", TOP_K + 2 if cut else TOP_K])
    size = g.op("Concat", g.op("Shape", index, end=1), g.op("Shape", rows, end=1), axis=0)
    at = g.op("Max", index, g.const(0, INT64))
    sliced = g.op("Slice", weights, g.ints(0, 0), g.op("Shape", at))
    matrix = g.op("ScatterElements", g.op("Expand", g.const(0.0), size), at, sliced, axis=1, reduction="add")
    report = compared(g, g.op("MatMul", matrix, rows))
    assert operator(report) == "MoEFinalizeAddRMSNorm"


def test_case_42_rows_of_which_nobody_says_how_many_a_token_has() -> None:
    """Rows [T, ?, H] by weights [T, K], where ? may be 1."""
    g = Graph()
    index = g.op("Max", g.input("map", ["T", "U"], INT64), g.const(0, INT64))
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), index, axis=0)
    kept = g.op("Where", g.op("GreaterOrEqual", g.ints(1), g.ints(0)), picked, g.const(0.0))
    g.values += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", "unk__0", HIDDEN]) for name in (picked, kept)
    ]
    g.values.append(helper.make_tensor_value_info(index, INT64, ["T", "unk__0"]))
    products = g.mul(kept, g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1)))
    report = compared(g, g.op("ReduceSum", products, g.ints(1), keepdims=0))
    assert operator(report) is None


def test_case_42_a_part_of_the_tokens_in_a_combine_matrix() -> None:
    """The choices of all tokens but the first are scattered into the rows of the first ones."""
    g = Graph()
    scores = g.input("scores", ["T", 4])
    part = g.op("Slice", scores, g.ints(1), g.ints(2**31), g.ints(0))
    values = g.op("TopK", part, g.ints(2), count=2)
    sizes = g.op("Concat", g.op("Shape", scores, end=1), g.ints(4), axis=0)
    matrix = g.op("ScatterElements", g.op("Expand", g.const(0.0), sizes), f"{values}_1", values, axis=1)
    report = compared(g, g.op("Einsum", matrix, g.input("rows", [4, "T", HIDDEN]), equation="te,eth->th"))
    assert operator(report) is None


@pytest.mark.parametrize("tokens", [None, "B", "T"])
def test_case_42_sorted_weights(tokens: str | None) -> None:
    """A table's first numbers, or more tokens' weights, are taken as they multiply the rows: the map picks them too."""
    g = Graph()
    flat = g.op("Reshape", g.input("ids", ["T", TOP_K], INT64), g.ints(-1))
    order = f"{g.op('TopK', flat, g.op('Shape', flat), count=2, largest=0)}_1"
    source = g.const([0.5] * 64)
    if tokens is not None:
        source = g.op("Reshape", g.input("weights", [tokens, TOP_K]), g.ints(-1))
    weights = g.op("Unsqueeze", g.op("Gather", source, order, axis=0), g.ints(-1))
    token = g.op("Unsqueeze", g.op("Div", order, g.const(TOP_K, INT64)), g.ints(-1))
    sizes = g.op("Concat", g.op("Shape", "ids", end=1), g.ints(HIDDEN), axis=0)
    rows = g.mul(g.input("rows", ["N", HIDDEN]), weights)
    report = compared(g, g.op("ScatterND", g.op("Expand", g.const(0.0), sizes), token, rows, reduction="add"))
    assert operator(report) == "MoEFinalizeAddRMSNorm"


def test_case_42_a_part_of_the_rows_that_were_picked() -> None:
    """Rows [T - 1, K, H] meet weights [T, K, 1] at T = 2 alone."""
    g = Graph()
    index = g.op("Max", g.input("map", ["T", TOP_K], INT64), g.const(0, INT64))
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), index, axis=0)
    part = g.op("Slice", picked, g.ints(1), g.ints(2**31), g.ints(0))
    products = g.mul(part, g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1)))
    report = compared(g, g.op("ReduceSum", products, g.ints(1), keepdims=0))
    assert operator(report) is None


def test_a_known_rank_stays_where_inference_finds_another_one() -> None:
    """The zeros' H goes through [1, 1], and ONNX Runtime's inference gives them three dimensions."""
    g = Graph()
    flat = g.op("Reshape", g.input("ids", ["T", TOP_K], INT64), g.ints(-1))
    order = f"{g.op('TopK', flat, g.op('Shape', flat), count=2, largest=0)}_1"
    token = g.op("Unsqueeze", g.op("Div", order, g.const(TOP_K, INT64)), g.ints(-1))
    sorted_weights = g.op("Gather", g.op("Reshape", g.input("weights", ["T", TOP_K]), g.ints(-1)), order, axis=0)
    width = g.ints(HIDDEN)
    again = g.op("Reshape", g.op("Reshape", width, g.ints(-1, 1)), g.op("Shape", width))
    zeros = g.op("Expand", g.const(0.0), g.op("Concat", g.op("Shape", "ids", end=1), again, axis=0))
    g.values.append(helper.make_tensor_value_info(zeros, TensorProto.FLOAT, ["T", "unk__4"]))
    rows = g.mul(g.input("rows", ["N", HIDDEN]), g.op("Unsqueeze", sorted_weights, g.ints(-1)))
    compared(g, g.op("ScatterND", zeros, token, rows, reduction="add"))


def test_terms_of_bfloat16_over_tokens_that_nobody_counts() -> None:
    """ONNX Runtime runs the mapped graph too."""
    proto = onnx.ModelProto()
    proto.CopyFrom(accumulated_in_float32())
    del proto.graph.value_info[:]
    number, column = next(each for each in enumerate(proto.graph.node) if each[1].input[0] == "weights")
    proto.graph.node.insert(number + 1, helper.make_node("Neg", ["column"], [column.output[0]]))
    column.output[0] = "column"
    masked = next(node for node in proto.graph.node if node.op_type == "GreaterOrEqual")
    masked.input[0] = "flat"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1, TOP_K]), "sizes"))
    proto.graph.node.insert(0, helper.make_node("Reshape", ["map", "sizes"], ["flat"]))
    report = compared_model(ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True)))
    assert operator(report) is not None


@pytest.mark.parametrize("to", [TensorProto.BOOL, TensorProto.INT8, TensorProto.INT32])
def test_case_42_a_length_that_a_cast_changes(to: int) -> None:
    """Up to 2**32 + 1 columns are all of them; cast to BOOL, INT8 or INT32 that number is 1."""
    g = Graph()
    end = g.op("Cast", g.op("Cast", g.ints(2**32 + 1), to=to), to=INT64)
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64), axis=0)
    part = g.op("Slice", picked, g.ints(0), end, g.ints(2))
    routed = g.op("Einsum", g.input("weights", ["T", TOP_K]), part, equation="tk,tkh->th")
    compared(g, routed)


def test_case_42_the_first_of_no_tokens() -> None:
    """The first token's weights, for all: of 0 tokens there are none."""
    g = Graph()
    first = g.op("Slice", g.input("weights", ["T", TOP_K]), g.ints(0), g.ints(1), g.ints(0))
    matrix = g.op("OneHot", g.op("Max", g.input("map", ["T", TOP_K], INT64), g.const(0, INT64)), *one_hot_ends(g))
    combined = g.op("ReduceSum", g.mul(matrix, g.op("Unsqueeze", first, g.ints(-1))), g.ints(1), keepdims=0)
    compared(g, g.op("MatMul", combined, "rows"))


def one_hot_ends(g: Graph) -> tuple[str, str]:
    """As many columns as there are rows; 0 and 1."""
    count = g.op("Shape", g.input("rows", ["R", HIDDEN]), end=1)
    return count, g.const([0.0, 1.0])


def sorted_rows(g: Graph, rows: str, order: str, sorted_weights: str) -> str:
    """Rows that lie as ``order`` sorts the routes, added into their tokens."""
    token = g.op("Unsqueeze", g.op("Div", order, g.const(TOP_K, INT64)), g.ints(-1))
    sizes = g.op("Concat", g.op("Shape", "ids", end=1), g.ints(HIDDEN), axis=0)
    products = g.mul(rows, g.op("Unsqueeze", sorted_weights, g.ints(-1)))
    return g.op("ScatterND", g.op("Expand", g.const(0.0), sizes), token, products, reduction="add")


def argsort(g: Graph) -> str:
    flat = g.op("Reshape", g.input("ids", ["T", TOP_K], INT64), g.ints(-1))
    return f"{g.op('TopK', flat, g.op('Shape', flat), count=2, largest=0)}_1"


@pytest.mark.parametrize("bound", [20, 40])
def test_case_42_a_bound_beyond_few_tokens(bound: int) -> None:
    """The routes beyond a number are another token's: with few tokens there are none."""
    g = Graph()
    order, most = argsort(g), g.const(bound, INT64)
    bounded = g.op("Where", g.op("Greater", order, most), most, order)
    weights = g.op("Gather", g.op("Reshape", g.input("weights", ["T", TOP_K]), g.ints(-1)), bounded, axis=0)
    report = compared(g, sorted_rows(g, g.input("rows", ["N", HIDDEN]), bounded, weights))
    assert operator(report) is None


@pytest.mark.parametrize("part", ["sum", "first"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_case_42_one_row_for_all_routes(is_sorted: bool, part: str) -> None:
    g = Graph()
    row = g.input("rows", ["N", HIDDEN])
    if part == "sum":
        row = g.op("ReduceSum", row, g.ints(0), keepdims=1)
    else:
        row = g.op("Slice", row, g.ints(0), g.ints(1), g.ints(0))
    if is_sorted:
        order = argsort(g)
        weights = g.op("Gather", g.op("Reshape", g.input("weights", ["T", TOP_K]), g.ints(-1)), order, axis=0)
        routed = sorted_rows(g, row, order, weights)
    else:
        chosen = g.op("TopK", g.input("scores", ["T", 4]), g.ints(TOP_K), count=2)
        products = g.mul(row, g.op("Reshape", chosen, g.ints(-1, 1)))
        routed = g.op("ReduceSum", g.op("Reshape", products, g.ints(-1, TOP_K, HIDDEN)), g.ints(1), keepdims=0)
    assert operator(compared(g, routed)) is None


def test_case_42_a_part_of_the_tokens_of_the_picked_rows() -> None:
    """Of one token there is none left, and of two the one is repeated."""
    g = Graph()
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), g.input("map", [TOP_K, "T"], INT64), axis=0)
    later = g.op("Slice", picked, g.ints(1), g.ints(2**63 - 1), g.ints(1))
    products = g.mul(later, g.op("Unsqueeze", g.input("weights", [TOP_K, "T"]), g.ints(-1)))
    assert operator(compared(g, g.op("ReduceSum", products, g.ints(0), keepdims=0))) is None


def test_case_42_a_matrix_of_two_tokens_or_more() -> None:
    g = Graph()
    chosen = g.op("TopK", g.input("scores", ["T", 4]), g.ints(TOP_K), count=2)
    sizes = g.op("Max", g.op("Concat", g.op("Shape", "scores", end=1), g.ints(4), axis=0), g.ints(2))
    zeros = g.op("Expand", g.const(0.0), sizes)
    matrix = g.op("ScatterElements", zeros, f"{chosen}_1", chosen, axis=1)
    routed = g.op("Einsum", matrix, g.input("rows", [4, "T", HIDDEN]), equation="te,eth->th")
    assert operator(compared(g, routed)) is None


def test_case_42_a_sum_with_as_many_rows_as_there_are() -> None:
    """The residual is one token's and all rows', or all tokens' and one row's."""
    g = Graph()
    routed = gathered(g, ["T", TOP_K], ["T", TOP_K])
    wide = g.add("rows", g.input("more", ["T", HIDDEN]))
    again = g.op("Reshape", g.op("Reshape", wide, g.ints(-1, HIDDEN)), g.op("Shape", wide))
    report = compared(g, g.add(routed, again))
    assert "residual" not in report.sites[0].inputs


def test_case_42_weights_of_one_token_in_bfloat16() -> None:
    """ONNX Runtime has no Expand of bfloat16."""
    model = ir.from_proto(fuzz_graphs.accumulated_in_float32())
    weights = next(value for value in model.graph.inputs if value.name == "weights")
    weights.dtype, weights.shape = ir.DataType.BFLOAT16, ir.Shape([1, TOP_K])
    (column,) = weights.consumers()
    column.outputs[0].dtype = ir.DataType.BFLOAT16
    cast = ir.node("Cast", [column.outputs[0]], {"to": ir.DataType.FLOAT})
    column.outputs[0].replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, column.outputs[0])
    model.graph.insert_after(column, cast)
    assert operator(compared_model(model)) == "MoEFinalizeAddRMSNorm"


def test_case_42_a_masked_one_hot_matrix_of_entries_beyond_the_rows() -> None:
    """An entry beyond the rows picks none, also where something else drops routes."""
    g = Graph()
    entries = g.op("Max", g.input("map", ["T", TOP_K], INT64), g.const(0, INT64))
    g.input("rows", ["R", HIDDEN])
    column = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    matrix = g.op("OneHot", entries, g.op("Shape", "rows", end=1), g.const([0.0, 1.0]))
    matrix = g.op("Where", g.op("Less", column, g.const(0.2)), g.const(0.0), matrix)
    combined = g.op("ReduceSum", g.mul(matrix, column), g.ints(1), keepdims=0)
    assert operator(compared(g, g.op("MatMul", combined, "rows"))) == "MoEFinalizeAddRMSNorm"


@pytest.mark.parametrize("clamp", ["none", "Max", "Clip", "Where", "to another row"])
@pytest.mark.parametrize("einsum", [False, True])
def test_case_38_a_clamped_map_in_a_matrix_of_comparisons(clamp: str, einsum: bool) -> None:
    """``clamp(map) == arange(R)`` picks the clamp's row for -1, where ``map == arange(R)`` picks none."""
    g = Graph()
    index, zero = g.input("map", ["T", TOP_K], INT64), g.const(0, INT64)
    if clamp in ("Max", "Clip"):
        index = g.op(clamp, index, zero)
    elif clamp != "none":
        index = g.op("Where", g.op("Less", index, zero), zero if clamp == "Where" else g.const(3, INT64), index)
    count = g.op("Squeeze", g.op("Shape", g.input("rows", ["R", HIDDEN]), end=1))
    numbers = g.op("Range", zero, count, g.const(1, INT64))
    matrix = g.cast(g.op("Equal", g.op("Unsqueeze", index, g.ints(-1)), numbers), "float32")
    weights = g.input("weights", ["T", TOP_K])
    if einsum:
        routed = g.op("Einsum", weights, matrix, "rows", equation="tk,tkr,rh->th")
    else:
        products = g.mul(matrix, g.op("Unsqueeze", weights, g.ints(-1)))
        routed = g.op("MatMul", g.op("ReduceSum", products, g.ints(1), keepdims=0), "rows")
    report = compared(g, routed)
    assert operator(report) == "MoEFinalizeAddRMSNorm"
