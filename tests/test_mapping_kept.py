"""Rows that a Where drops by truth values of its own, not the map's -1: they become -1 in the map, and are not read.

Truth values that multiply are weights: a NaN times 0 is one, before and after.
"""

import numpy as np
import pytest

from moetrt.mapping_report import Site
from tests.equivalence import compare_models
from tests.mapping_checks import RELATIVE, mapped, only
from tests.mapping_graphs import HIDDEN, ROWS, TOP_K, Graph, NormForm, feeds

BOOL, INT32, INT64 = 9, 6, 7


def column(g: Graph, value: str) -> str:
    return g.op("Unsqueeze", value, g.ints(-1))


def kept(g: Graph, where: str, rows: str, weights: str, valid: str, swap: bool) -> str:
    """``rows * weights``, of which the truth values keep some: before or after the product, on the weights, or as 0."""
    zero, weights, truth = g.const(0.0), column(g, weights), column(g, valid)

    def choose(value: str) -> str:
        return g.op("Where", truth, zero, value) if swap else g.op("Where", truth, value, zero)

    if where == "rows":
        return g.mul(choose(rows), weights, swap)
    if where == "products":
        return choose(g.mul(rows, weights, swap))
    if where == "weights":
        return g.mul(rows, choose(weights), swap)
    assert where == "factor"
    return g.mul(g.mul(rows, weights), g.cast(truth, g.dtype), swap)


def check(g: Graph, routed: str, least: int = 0) -> Site:
    """Maps the graph; its numbers stay, also where what is dropped is not a number."""
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm(up=True, down="before").write(g, hidden, rank=2), hidden)
    before = g.model()
    after, report = mapped(before)
    for seed in range(2):
        given = feeds(before, seed)
        random = np.random.default_rng(seed)
        for name in given.keys() & {"map", "valid"}:
            shape = given[name].shape
            given[name] = random.integers(least if name == "map" else 0, ROWS if name == "map" else 2, shape).astype(
                given[name].dtype
            )
        for nan in (False, True):
            if nan:
                given["rows"].reshape(-1, HIDDEN)[::5] = np.nan
            for difference in compare_models(before, after, given):
                assert difference.relative <= RELATIVE[g.dtype], str(difference)
    return only(report)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("where", ["rows", "products"])
def test_picked_rows(where: str, clamped: bool, swap: bool) -> None:
    """Entries below 0 read a row from the end, or the first where they are clamped, if they are kept."""
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT64)
    weights, valid = g.input("weights", ["T", TOP_K]), g.input("valid", ["T", TOP_K], BOOL)
    picked = g.op("Gather", rows, g.op("Max", index, g.const(0, INT64)) if clamped else index)
    products = kept(g, where, picked, weights, valid, swap)
    site = check(g, g.op("ReduceSum", products, g.ints(1), keepdims=0), least=-5)
    assert site.matched, site.reason


@pytest.mark.parametrize("where", ["weights", "factor"])
def test_truth_values_that_multiply_are_weights(where: str) -> None:
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT32)
    weights, valid = g.input("weights", ["T", TOP_K]), g.input("valid", ["T", TOP_K], BOOL)
    picked = g.op("Gather", rows, g.op("Max", index, g.const(0, INT32)))
    products = kept(g, where, picked, weights, valid, False)
    assert check(g, g.op("ReduceSum", products, g.ints(1), keepdims=0)).matched


@pytest.mark.parametrize("mask", ["own", "ids"])
@pytest.mark.parametrize("where", ["rows", "factor"])
def test_beside_the_maps_own_mask(where: str, mask: str) -> None:
    """``map >= 0``, or the same of other numbers: the experts that lie on this rank."""
    g = Graph()
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT32)
    weights, zero = g.input("weights", ["T", TOP_K]), g.const(0, INT32)
    picked = g.op("Gather", rows, g.op("Max", index, zero))
    if mask == "own":
        products = g.op("Where", column(g, g.op("GreaterOrEqual", index, zero)), g.mul(picked, column(g, weights)), "z")
        g.const(0.0, name="z")
        valid = g.input("valid", ["T", TOP_K], BOOL)
        products = kept(g, where, products, weights, valid, False)
    else:
        ids = g.input("ids", ["T", TOP_K], INT32)
        on_rank = g.op("Greater", g.op("Sub", ids, g.const(1, INT32)), g.const(-1, INT32))
        products = kept(g, where, picked, weights, on_rank, False)
    site = check(g, g.op("ReduceSum", products, g.ints(1), keepdims=0), least=-1 if mask == "own" else 0)
    assert site.matched, site.reason


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("where", ["rows", "products"])
def test_rows_in_order(where: str, k_first: bool, swap: bool) -> None:
    """[T, K, H] or [K, T, H]: the rows get a map, of their own numbers."""
    g = Graph("float16")
    sizes: list[int | str] = [TOP_K, "T"] if k_first else ["T", TOP_K]
    rows, weights = g.input("rows", [*sizes, HIDDEN]), g.input("weights", sizes)
    products = kept(g, where, rows, weights, g.input("valid", sizes, BOOL), swap)
    site = check(g, g.op("ReduceSum", products, g.ints(0 if k_first else 1), keepdims=0))
    assert site.matched, site.reason
    assert "expanded_idx_to_permuted_idx" in site.inputs


def test_batch_and_sequence() -> None:
    g = Graph()
    sizes: list[int | str] = ["B", "S", TOP_K]
    rows, weights = g.input("rows", [*sizes, HIDDEN]), g.input("weights", sizes)
    products = kept(g, "products", rows, weights, g.input("valid", sizes, BOOL), False)
    hidden = g.add(g.op("ReduceSum", products, g.ints(2), keepdims=0), g.input("residual", ["B", "S", HIDDEN]))
    g.output(NormForm().write(g, hidden), hidden)
    model = g.model()
    after, report = mapped(model)
    assert only(report).matched
    for difference in compare_models(model, after, feeds(model)):
        assert difference.relative <= RELATIVE["float32"], str(difference)


@pytest.mark.parametrize("shape", [["T", 1], ["U", TOP_K]])
def test_truth_values_that_may_be_repeated_are_no_masks(shape: list[int | str]) -> None:
    """One a token, or of tokens with another name."""
    g = Graph()
    rows, weights = g.input("rows", ["T", TOP_K, HIDDEN]), g.input("weights", ["T", TOP_K])
    products = kept(g, "products", rows, weights, g.input("valid", shape, BOOL), False)
    g.output(g.op("ReduceSum", products, g.ints(1), keepdims=0))
    _, report = mapped(g.model())
    assert report.sites == []


def test_columns_that_are_dropped_are_no_rows() -> None:
    g = Graph()
    rows, weights = g.input("rows", ["T", TOP_K, HIDDEN]), g.input("weights", ["T", TOP_K])
    valid = g.input("valid", ["T", TOP_K, HIDDEN], BOOL)
    products = g.op("Where", valid, g.mul(rows, column(g, weights)), g.const(0.0))
    hidden = g.add(g.op("ReduceSum", products, g.ints(1), keepdims=0), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    _, report = mapped(g.model())
    assert report.sites == []
