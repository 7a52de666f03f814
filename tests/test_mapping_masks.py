"""Entries of a map below 0: a mask drops those that it names, and Gather reads the others from the end."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from moetrt.mapping_report import Site
from moetrt.onnx_op import named_inputs, operator_of
from tests.equivalence import compare_models, run_model
from tests.mapping_checks import RELATIVE, mapped, only
from tests.mapping_graphs import HIDDEN, ROWS, TOKENS, TOP_K, Graph, NormForm, feeds

INT64 = TensorProto.INT64
LEAST = -5
"""The least entry of the maps here; R is larger, so that Gather can read it from the end."""


class Masked:
    """A graph whose rows a map picks; ``keep`` is the mask, [T, K]."""

    def __init__(self, mask: str, clamped: bool, dtype: int = INT64) -> None:
        self.g = g = Graph()
        self.dtype = dtype
        self.rows = g.input("rows", ["R", HIDDEN])
        self.weights = g.input("weights", ["T", TOP_K])
        self.map = g.input("map", ["T", TOP_K], dtype)
        zero, one = g.const(0, dtype), g.const(-1, dtype)
        self.keep = {
            ">= 0": lambda: g.op("GreaterOrEqual", self.map, zero),
            "> -1": lambda: g.op("Greater", self.map, one),
            "not < 0": lambda: g.op("Not", g.op("Less", self.map, zero)),
            "!= -1": lambda: g.op("Not", g.op("Equal", self.map, one)),
        }[mask]()
        self.index = g.op("Max", self.map, zero) if clamped else self.map

    def column(self, value: str) -> str:
        return self.g.op("Unsqueeze", value, self.g.ints(-1))

    def where_rows(self) -> str:
        picked = self.g.op("Where", self.column(self.keep), self.g.op("Gather", self.rows, self.index), self.g.const(0))
        return self.summed(picked, self.weights)

    def where_products(self) -> str:
        products = self.g.mul(self.g.op("Gather", self.rows, self.index), self.column(self.weights))
        kept = self.g.op("Where", self.column(self.keep), products, self.g.const(0))
        return self.g.op("ReduceSum", kept, self.g.ints(1), keepdims=0)

    def where_weights(self) -> str:
        return self.summed(
            self.g.op("Gather", self.rows, self.index), self.g.op("Where", self.keep, self.weights, self.g.const(0))
        )

    def factor(self) -> str:
        weights = self.g.mul(self.weights, self.g.cast(self.keep, "float32"))
        return self.summed(self.g.op("Gather", self.rows, self.index), weights)

    def loop(self) -> str:
        g, total = self.g, ""
        for k in range(TOP_K):
            at = g.const(k, INT64)
            picked = g.op("Gather", self.rows, g.op("Gather", self.index, at, axis=1))
            keep = g.op("Unsqueeze", g.op("Gather", self.keep, at, axis=1), g.ints(-1))
            weight = g.op("Slice", self.weights, g.ints(k), g.ints(k + 1), g.ints(1))
            product = g.mul(g.op("Where", keep, picked, g.const(0)), weight)
            total = g.add(total, product) if total else product
        return total

    def summed(self, picked: str, weights: str) -> str:
        return self.g.op("ReduceSum", self.g.mul(picked, self.column(weights)), self.g.ints(1), keepdims=0)


FORMS = ["where_rows", "where_products", "where_weights", "factor", "loop"]


def check(g: Graph, routed: str) -> tuple[Site, ir.Model]:
    """Maps the graph; its numbers must stay with entries from `LEAST` on."""
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    model = g.model()
    after, report = mapped(model)
    for seed in range(3):
        given = feeds(model, seed)
        if "map" in given:
            entries = np.random.default_rng(seed).integers(LEAST, ROWS, (TOKENS, TOP_K))
            entries[0], entries[1, 0] = [-1, -2, LEAST], -1
            given["map"] = entries.astype(given["map"].dtype)
        for difference in compare_models(model, after, given):
            assert difference.relative <= RELATIVE["float32"], str(difference)
    return only(report), after


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("mask", [">= 0", "> -1", "not < 0"])
@pytest.mark.parametrize("form", FORMS)
def test_every_entry_below_0_is_dropped(form: str, mask: str, clamped: bool) -> None:
    masked = Masked(mask, clamped)
    site, _ = check(masked.g, getattr(masked, form)())
    assert site.matched, site.reason


@pytest.mark.parametrize("dtype", [INT64, TensorProto.INT32])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("form", FORMS[:-1])
def test_a_mask_that_names_minus_one_spares_the_others(form: str, clamped: bool, dtype: int) -> None:
    masked = Masked("!= -1", clamped, dtype)
    site, _ = check(masked.g, getattr(masked, form)())
    assert site.matched, site.reason


@pytest.mark.parametrize("clamped", [False, True])
def test_a_loop_whose_masks_name_minus_one_is_declined(clamped: bool) -> None:
    masked = Masked("!= -1", clamped)
    site, _ = check(masked.g, masked.loop())
    assert site.operator is None
    assert "mask where it is below 0" in str(site.reason)


def map_of(model: ir.Model) -> str:
    node = next(node for node in model.graph if operator_of(node))
    return str(named_inputs(node)["expanded_idx_to_permuted_idx"].name)


@pytest.mark.parametrize("mask", [">= 0", "!= -1"])
def test_a_map_that_the_graph_shows_to_hold_no_less_than_minus_one_stays(mask: str) -> None:
    masked = Masked(mask, True, TensorProto.INT32)
    g = masked.g
    raised = g.op("Max", "map", g.const(-1, TensorProto.INT32))
    for node in g.nodes[:-1]:
        node.input[:] = [raised if name == "map" else name for name in node.input]
    g.nodes.insert(0, g.nodes.pop())
    site, after = check(g, masked.where_rows())
    assert site.matched, site.reason
    assert map_of(after) == raised


@pytest.mark.parametrize(("what", "number"), [("rows", np.nan), ("rows", np.inf), ("weights", np.inf)])
@pytest.mark.parametrize("form", FORMS)
def test_what_the_mask_drops_does_not_spread(form: str, what: str, number: float) -> None:
    """In the graph before, 0 times it does in some of the forms."""
    masked = Masked(">= 0", True)
    _, after = check(masked.g, getattr(masked, form)())
    given = feeds(masked.g.model())
    given["map"] = np.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K) % (ROWS - 1) + 1
    given["map"][1, 0] = -1
    wanted = run_model(after, given)
    given[what][(1, 0) if what == "weights" else 0] = number
    for name, value in run_model(after, given).items():
        np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.parametrize("mask", [">= 0", "!= -1"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("least", [0, -1, -2])
def test_a_map_that_is_clamped_before_its_mask_is_taken_as_it_is(form: str, mask: str, least: int) -> None:
    """Of a map clamped to 0 no row is dropped: an entry of -1 reads row 0, in the graph as in the operator."""
    masked = Masked(mask, True)
    g = masked.g
    raised = g.op("Max", "map", g.const(least, INT64))
    for node in g.nodes[:-1]:
        node.input[:] = [raised if name == "map" else name for name in node.input]
    g.nodes.insert(0, g.nodes.pop())
    site, _ = check(g, getattr(masked, form)())
    if form == "loop" and (mask, least) == ("!= -1", -2):
        assert "mask where it is below 0" in str(site.reason)
    else:
        assert site.matched, site.reason


def test_a_mask_of_the_map_before_it_was_clamped_drops_what_was_below_0() -> None:
    """Two masks: one of the clamped map, which drops nothing, and one of the map before."""
    masked = Masked(">= 0", True)
    g = masked.g
    of_clamped = g.op("GreaterOrEqual", masked.index, g.const(0, INT64))
    index = g.op("Where", of_clamped, masked.index, g.const(0, INT64))
    picked = g.op("Where", masked.column(of_clamped), g.op("Gather", "rows", index), g.const(0))
    site, _ = check(g, masked.summed(g.op("Where", masked.column(masked.keep), picked, g.const(0)), "weights"))
    assert site.matched, site.reason


def test_a_captured_map_stays() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    after, _ = mapped(g.model())
    assert map_of(after) == "map"


def test_a_map_that_is_clamped_from_both_sides_needs_no_mask() -> None:
    masked = Masked(">= 0", False)
    g = masked.g
    masked.index = g.op("Clip", "map", g.const(0, INT64), g.const(3, INT64))
    site, _ = check(g, masked.summed(g.op("Gather", "rows", masked.index), "weights"))
    assert site.matched, site.reason


def test_rows_of_the_experts_that_a_topk_chose_need_no_mask() -> None:
    """The number of a token's row is token * E + expert."""
    g, experts = Graph(), ROWS // TOKENS
    rows, scores = g.input("rows", ["R", HIDDEN]), g.input("scores", ["T", experts])
    weights = g.op("TopK", scores, g.ints(TOP_K), axis=-1, count=2)
    chosen = g.nodes[-1].output[1]
    count = g.op("Squeeze", g.op("Shape", scores, start=0, end=1))
    token = g.op("Range", g.const(0, INT64), count, g.const(1, INT64))
    begin = g.mul(g.op("Unsqueeze", token, g.ints(1)), g.const(experts, INT64))
    picked = g.op("Gather", rows, g.add(begin, chosen))
    products = g.mul(picked, g.op("Unsqueeze", weights, g.ints(-1)))
    site, _ = check(g, g.op("ReduceSum", products, g.ints(1), keepdims=0))
    assert site.matched, site.reason
