"""Case 38: a map bounded from above too is read as the graph reads it, in every order of the bounds."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from benchmarks.fuzz_compare import Session
from moetrt.onnx_op import attach_functions
from tests.mapping_checks import RELATIVE, mapped, only
from tests.mapping_graphs import HIDDEN, ROWS, TOP_K, Graph, NormForm

MASKS = ["none", "rows", "weights", "factor", "both sides"]
BOUNDS = ["Min(Max)", "Max(Min)", "Clip", "Clip then Min", "Min then Clip", "Where", "fused Max"]
TOKENS = 7


class Bounded:
    """Rows picked by a map that is bounded to [0, R - 1], and masked or not."""

    def __init__(self, bounds: str, mask: str, *, dtype: int = TensorProto.INT64, number: bool = False) -> None:
        self.g = g = Graph()
        self.dtype = dtype
        rows = g.input("rows", [ROWS if number else "R", HIDDEN])
        weights, index = g.input("weights", ["T", TOP_K]), g.input("map", ["T", TOP_K], dtype)
        self.zero = g.const(0, dtype)
        if number:
            self.last = g.const(ROWS - 1, dtype)
        else:
            count = g.op(
                "Sub", g.op("Gather", g.op("Shape", rows), g.const(0, TensorProto.INT64)), g.const(1, TensorProto.INT64)
            )
            self.last = count if dtype == TensorProto.INT64 else g.op("Cast", count, to=dtype)
        keep = g.op("GreaterOrEqual", index, self.zero)
        if mask == "both sides":
            keep = g.op("And", keep, g.op("Less", index, self._count(rows)))
        if mask == "weights":
            weights = g.op("Where", keep, weights, g.const(0.0))
        if mask == "factor":
            weights = g.mul(weights, g.cast(keep, "float32"))
        picked = g.op("Gather", rows, self.bounded(bounds, index), axis=0)
        if mask in ("rows", "both sides"):
            picked = g.op("Where", g.op("Unsqueeze", keep, g.ints(-1)), picked, g.const(0.0))
        routed = g.op("ReduceSum", g.mul(picked, g.op("Unsqueeze", weights, g.ints(-1))), g.ints(1), keepdims=0)
        hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
        g.output(NormForm().write(g, hidden, rank=2), hidden)

    def _count(self, rows: str) -> str:
        count = self.g.op("Shape", rows, start=0, end=1)
        return count if self.dtype == TensorProto.INT64 else self.g.op("Cast", count, to=self.dtype)

    def bounded(self, bounds: str, index: str) -> str:
        g, zero, last = self.g, self.zero, self.last
        if bounds == "Min(Max)":
            return g.op("Min", g.op("Max", index, zero), last)
        if bounds == "Max(Min)":
            return g.op("Max", zero, g.op("Min", last, index))
        if bounds == "Clip":
            return g.op("Clip", index, zero, last)
        if bounds == "Clip then Min":
            return g.op("Min", last, g.op("Clip", index, zero))
        if bounds == "Min then Clip":
            return g.op("Clip", g.op("Min", index, last), zero)
        if bounds == "Where":
            raised = g.op("Where", g.op("Less", index, zero), zero, index)
            return g.op("Where", g.op("Greater", raised, last), last, raised)
        # Max and Min of three, as an optimiser merges them.
        return g.op("Min", g.op("Max", index, zero, zero), last, last)


def numbers(model: ir.Model, entries: np.ndarray) -> list[np.ndarray]:
    copy = model.clone()
    attach_functions(copy)
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {
        "rows": random.standard_normal((ROWS, HIDDEN), dtype=np.float32),
        "weights": random.random((TOKENS, TOP_K), dtype=np.float32),
        "residual": random.standard_normal((TOKENS, HIDDEN), dtype=np.float32),
        "map": entries,
    }
    outputs = Session(ir.to_proto(copy)).run(feeds)
    assert outputs is not None
    return list(outputs.values())


def check(graph: Bounded) -> str | None:
    """The numbers stay, for entries below 0 and beyond R; gives the operator, or None where the site is not mapped."""
    model = graph.g.model()
    after, report = mapped(model)
    entries = np.random.default_rng(1).integers(-3, ROWS + 5, (TOKENS, TOP_K))
    entries[0] = [ROWS, ROWS + 4, 2**31 - 1]
    entries[1] = [-1, 0, ROWS - 1]
    entries = entries.astype(np.int64 if graph.dtype == TensorProto.INT64 else np.int32)
    for before, now in zip(numbers(model, entries), numbers(after, entries), strict=True):
        assert np.isfinite(before).all()
        assert np.abs(before - now).max() <= RELATIVE["float32"] * np.abs(before).max()
    return only(report).operator


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_case_38_both_orders_of_the_bounds_keep_the_numbers(bounds: str, mask: str) -> None:
    operator = check(Bounded(bounds, mask))
    if bounds in ("Min(Max)", "Max(Min)", "Clip", "Clip then Min", "Min then Clip"):
        assert operator == "MoEFinalizeAddRMSNorm"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bounds", ["Min(Max)", "Max(Min)", "Clip"])
def test_case_38_a_bound_that_is_a_number(bounds: str, mask: str) -> None:
    assert check(Bounded(bounds, mask, number=True)) == "MoEFinalizeAddRMSNorm"


@pytest.mark.parametrize("bounds", ["Min(Max)", "Max(Min)", "Clip"])
def test_case_38_a_map_of_32_bits(bounds: str) -> None:
    assert check(Bounded(bounds, "rows", dtype=TensorProto.INT32)) == "MoEFinalizeAddRMSNorm"


@pytest.mark.parametrize("clamp_first", [False, True])
@pytest.mark.parametrize("bounds", ["Min(Max)", "Max(Min)"])
def test_case_38_term_by_term(bounds: str, clamp_first: bool) -> None:
    """Each term bounds its own column of the map, or all are bounded before."""
    graph = Bounded(bounds, "none")
    g = graph.g = Graph()
    graph.zero = g.const(0, TensorProto.INT64)
    rows, weights = g.input("rows", ["R", HIDDEN]), g.input("weights", ["T", TOP_K])
    index = g.input("map", ["T", TOP_K], TensorProto.INT64)
    graph.last = g.op("Sub", g.op("Shape", rows, start=0, end=1), g.ints(1))
    total = ""
    whole = graph.bounded(bounds, index) if clamp_first else index
    for k in range(TOP_K):
        column = g.op("Gather", whole, g.const(k, TensorProto.INT64), axis=1)
        picked = g.op("Gather", rows, column if clamp_first else graph.bounded(bounds, column), axis=0)
        product = g.mul(picked, g.op("Slice", weights, g.ints(k), g.ints(k + 1), g.ints(1)))
        total = g.add(total, product) if total else product
    hidden = g.add(total, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    assert check(graph) == "MoEFinalizeAddRMSNorm"


@pytest.mark.parametrize("clamp", [False, True])
def test_case_38_a_one_hot_matrix_has_no_one_for_an_entry_beyond(clamp: bool) -> None:
    graph = Bounded("Clip", "none")
    g = graph.g = Graph()
    rows, weights = g.input("rows", ["R", HIDDEN]), g.input("weights", ["T", TOP_K])
    index, count = g.input("map", ["T", TOP_K], TensorProto.INT64), g.op("Shape", rows, start=0, end=1)
    index = g.op("Max", index, g.const(0, TensorProto.INT64))
    if clamp:
        index = g.op("Min", index, g.op("Sub", count, g.ints(1)))
    picks = g.op("OneHot", index, count, g.const([0.0, 1.0]), axis=-1)
    matrix = g.op("ReduceSum", g.mul(picks, g.op("Unsqueeze", weights, g.ints(-1))), g.ints(1), keepdims=0)
    hidden = g.add(g.op("MatMul", matrix, rows), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    assert check(graph) == "MoEFinalizeAddRMSNorm"
