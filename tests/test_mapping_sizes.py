"""A dimension of 1 is repeated: what is added or multiplied is taken where the graph shows the sum's size for it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
from onnx import TensorProto

from moetrt.mapping import map_model
from moetrt.mapping_report import Site
from tests.equivalence import compare_models, seeded_inputs
from tests.mapping_checks import RELATIVE, mapped, only
from tests.mapping_graphs import HIDDEN, RANGES, ROWS, SIZES, TOKENS, TOP_K, Graph, NormForm

COUNT = ROWS // TOKENS
"""K, where the rows lie one a route."""


def finished(g: Graph, hidden: str, rank: int = 2) -> ir.Model:
    g.output(NormForm().write(g, hidden, rank=rank), hidden)
    return g.model()


def check(model: ir.Model, *sizes: dict[str, int]) -> tuple[Site, ir.Model]:
    """Maps the model; its numbers must stay for each of these sizes."""
    after, report = mapped(model)
    for given in sizes:
        feeds = seeded_inputs(model, SIZES | given, ranges=RANGES)
        for difference in compare_models(model, after, feeds):
            assert difference.relative <= RELATIVE["float32"], str(difference)
    return only(report), after


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def residual(g: Graph) -> str:
    return g.add(g.routed(), g.input("added", ["U", HIDDEN]))


def shared(g: Graph) -> str:
    return g.add(g.add(g.routed(), g.input("added", ["U", HIDDEN])), g.input("residual", ["T", HIDDEN]))


def gathered(g: Graph) -> str:
    return g.add(g.gathered(), g.input("added", ["U", HIDDEN]))


@pytest.mark.parametrize("form", [residual, shared, gathered])
def test_an_addend_of_another_name_is_declined(form: Callable[[Graph], str]) -> None:
    g = Graph()
    site, _ = check(finished(g, form(g)), {"U": TOKENS}, {"U": 1})
    assert site.operator == "MoEFinalizeAdd"
    assert "one of whose dimensions is 'U' where the sum has 'T'" in str(site.reason)


def test_an_addend_cut_to_one_token_is_declined() -> None:
    """``x[:, :1] + y``: the graph does not say how long the slice is."""
    g = Graph()
    x = g.input("residual", ["B", "S", HIDDEN])
    cut = g.op("Slice", x, g.ints(0), g.ints(1), g.ints(1))
    site, _ = check(finished(g, g.add(g.to_tokens(g.routed()), cut), 3), {}, {"S": 1, "B": TOKENS})
    assert site.operator == "MoEFinalizeAdd"
    assert "adds" in str(site.reason)


def test_an_addend_that_is_flattened_is_spread_over_the_tokens() -> None:
    g = Graph()
    flat = g.op("Reshape", g.input("residual", ["B", "S", HIDDEN]), g.ints(-1, HIDDEN))
    site, after = check(finished(g, g.add(g.routed(), flat)), {}, {"B": 1, "S": 1})
    assert site.matched, site.reason
    assert "Expand" in op_types(after)


def test_a_gate_that_is_flattened_is_spread_over_the_tokens() -> None:
    g = Graph()
    gate = g.op("Reshape", g.op("Sigmoid", g.input("gate", ["B", "S", 1])), g.ints(-1, 1))
    gated = g.mul(g.input("shared", ["T", HIDDEN]), gate)
    hidden = g.add(g.add(g.routed(), gated), g.input("residual", ["T", HIDDEN]))
    site, _ = check(finished(g, hidden), {}, {"B": 1, "S": 1})
    assert site.matched, site.reason
    assert site.inputs["shared_output"]["value"] == "shared"
    assert "shared_gate" in site.inputs


def test_a_gate_of_another_name_stays_in_the_graph() -> None:
    g = Graph()
    gated = g.mul(g.input("shared", ["T", HIDDEN]), g.op("Sigmoid", g.input("gate", ["U", 1])))
    hidden = g.add(g.add(g.routed(), gated), g.input("residual", ["T", HIDDEN]))
    site, _ = check(finished(g, hidden), {"U": TOKENS}, {"U": 1})
    assert "shared_gate" not in site.inputs


def products(g: Graph, rows: str, weights: str) -> str:
    return g.op("ReduceSum", g.mul(rows, g.op("Unsqueeze", weights, g.ints(-1))), g.ints(1), keepdims=0)


def test_weights_of_another_name_than_the_map_are_declined() -> None:
    g = Graph()
    index = g.op("Max", g.input("map", ["T", TOP_K], TensorProto.INT64), g.const(0, TensorProto.INT64))
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), index)
    total = products(g, picked, g.input("weights", ["U", TOP_K]))
    site, _ = check(finished(g, g.add(total, g.input("residual", ["T", HIDDEN]))), {"U": TOKENS}, {"U": 1})
    assert site.operator is None
    assert "have 'U' rows" in str(site.reason)
    assert "has 'T'" in str(site.reason)


@pytest.mark.parametrize("shape", [["U", COUNT], ["T", "X"]])
def test_weights_that_may_be_repeated_over_the_rows_are_declined(shape: list[int | str]) -> None:
    g = Graph()
    rows = g.op("Reshape", g.input("rows", ["R", HIDDEN]), g.ints(-1, COUNT, HIDDEN))
    total = products(g, rows, g.input("weights", shape))
    model = finished(g, g.add(total, g.input("residual", ["T", HIDDEN])))
    site, _ = check(model, {"U": TOKENS, "X": COUNT}, {"U": 1, "X": 1})
    assert site.operator is None
    assert "'U'" in str(site.reason) or "'X' columns" in str(site.reason)


def test_dimensions_without_a_name_are_followed() -> None:
    """The sum gets its shape from the residual's, which the file does not name."""
    g = Graph()
    g.input("residual", ["B", "S", HIDDEN])
    model = finished(g, g.add(g.to_tokens(g.routed()), "residual"), 3)
    unnamed = ir.Shape([None, None, HIDDEN])
    after = ir.from_proto(ir.to_proto(model))
    for graph in (model.graph, after.graph):
        for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
            if value.shape is not None and len(value.shape) == 3:
                value.shape = unnamed if value.name == "residual" or value.is_graph_output() else None
    report = map_model(after)
    site = only(report)
    assert site.matched, site.reason
    assert "Expand" not in op_types(after)
    assert next(value for value in after.graph.inputs if value.name == "residual").shape == unnamed


def test_formulas_of_the_same_names_are_equal() -> None:
    g = Graph()
    for name, shape in (("rows", ["R", HIDDEN]), ("weights", ["B*S", TOP_K]), ("map", ["B*S", TOP_K])):
        g.input(name, shape, TensorProto.INT32 if name == "map" else None)
    hidden = g.add(g.gathered(), g.input("added", ["S*B", HIDDEN]))
    after, report = mapped(finished(g, hidden))
    assert only(report).matched, only(report).reason
    assert "Expand" not in op_types(after)
