"""A Cast that rounds is part of a model's numbers: mapping keeps what it does, or leaves the nodes as they are."""

from __future__ import annotations

import pytest
from onnx import TensorProto

from tests.mapping_checks import assert_same_numbers, mapped, matched, only
from tests.mapping_graphs import FLOAT, HIDDEN, ROWS, TOKENS, Graph, NormForm

INDEX = TensorProto.INT64
COUNT = ROWS // TOKENS
"""K, where the rows lie one a route."""

NARROW = ["bfloat16", "float16"]


def rounded(g: Graph, value: str, dtype: str, back: str = "float32") -> str:
    return g.cast(g.cast(value, dtype), back)


def norm_with_gamma(g: Graph, hidden: str, gamma: str) -> str:
    """RMSNorm in float32; rounded at the end where the rows are."""
    wide = g.cast(hidden, "float32") if g.dtype != "float32" else hidden
    mean = g.mean(g.mul(wide, wide), -1)
    root = g.op("Sqrt", g.add(mean, g.const(1e-5, FLOAT["float32"])))
    normal = g.mul(g.op("Div", wide, root), gamma)
    return g.cast(normal, g.dtype) if g.dtype != "float32" else normal


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("how", ["gamma", "one plus rounded", "rounded one plus"])
@pytest.mark.parametrize("narrow", NARROW)
def test_a_rounded_gamma_is_the_rounded_numbers(narrow: str, how: str, dtype: str) -> None:
    g = Graph(dtype)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    gamma, one = g.vector(3, FLOAT["float32"]), g.const(1.0, FLOAT["float32"])
    if how == "gamma":
        gamma = rounded(g, gamma, narrow)
    elif how == "one plus rounded":
        gamma = g.add(rounded(g, gamma, narrow), one)
    else:
        gamma = rounded(g, g.add(gamma, one), narrow)
    g.output(norm_with_gamma(g, hidden, gamma), hidden)
    site = matched(g)
    assert site.shapes["gamma"] == [HIDDEN]
    assert site.attributes["weight_bias"] == 0.0


def test_a_gamma_that_is_only_widened_stays_the_stored_one() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    gamma = g.add(g.cast(g.vector(3, FLOAT["float32"], "stored"), "float32"), g.const(1.0))
    g.output(norm_with_gamma(g, hidden, gamma), hidden)
    site = matched(g)
    assert site.inputs["gamma"]["value"] == "stored"
    assert site.attributes["weight_bias"] == 1.0


@pytest.mark.parametrize("narrow", NARROW)
def test_a_gate_that_is_rounded_is_no_gate_of_the_operator(narrow: str) -> None:
    g = Graph()
    gate = rounded(g, g.op("Sigmoid", g.input("gate", ["T", 1])), narrow)
    product = g.mul(g.input("shared", ["T", HIDDEN]), gate)
    hidden = g.add(g.add(g.routed(), product), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    site = matched(g)
    assert site.inputs["shared_output"]["value"] == product
    assert "shared_gate" not in site.inputs


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("where", ["rows", "picked", "products"])
@pytest.mark.parametrize("form", ["gather", "rows by route", "loop"])
def test_rows_and_products_that_are_rounded_stay_as_they_are(form: str, where: str, narrow: str) -> None:
    g = Graph()
    rows, weights = g.input("rows", ["R", HIDDEN]), g.input("weights", ["T", COUNT])
    if where == "rows":
        rows = rounded(g, rows, narrow)
    if form == "rows by route":
        parts = [(g.op("Reshape", rows, g.ints(-1, COUNT, HIDDEN)), g.op("Unsqueeze", weights, g.ints(-1)))]
    elif form == "gather":
        index = g.op("Max", g.input("map", ["T", COUNT], INDEX), g.const(0, INDEX))
        parts = [(g.op("Gather", rows, index), g.op("Unsqueeze", weights, g.ints(-1)))]
    else:
        index = g.op("Max", g.input("map", ["T", COUNT], INDEX), g.const(0, INDEX))
        parts = [
            (
                g.op("Gather", rows, g.op("Gather", index, g.const(k, INDEX), axis=1)),
                g.op("Slice", weights, g.ints(k), g.ints(k + 1), g.ints(1)),
            )
            for k in range(COUNT)
        ]
    products = []
    for picked, weight in parts:
        product = g.mul(rounded(g, picked, narrow) if where == "picked" else picked, weight)
        products.append(rounded(g, product, narrow) if where == "products" else product)
    if form == "loop":
        total = products[0]
        for product in products[1:]:
            total = g.add(total, product)
    else:
        total = g.op("ReduceSum", products[0], g.ints(1), keepdims=0)
    hidden = g.add(total, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    model = g.model()
    after, report = mapped(model)
    site = only(report)
    assert site.operator is None
    # The rows that are picked are of 16 bits, and the residual is not.
    words = "mixed dtypes" if where == "rows" else f"is rounded to {narrow.upper()} on the way from the rows"
    assert words in str(site.reason)
    assert_same_numbers(model, after)
