"""Weights with fewer numbers than routes: one a token, one for each of its K places, or one in all."""

import pytest

from moetrt.mapping import map_model
from tests.mapping_checks import matched
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm

INT32 = 6

COLUMNS: dict[str, tuple[list[int | str], str]] = {
    "one a token": (["T", 1, 1], "t"),
    "one a place": ([1, TOP_K, 1], "k"),
    "one a place, of two dimensions": ([TOP_K, 1], "k"),
    "one": ([1, 1, 1], ""),
    "a number": ([], ""),
}


def picked(g: Graph, masked: bool = True) -> str:
    """[T, K, H] out of rows by a map."""
    rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT32)
    zero = g.const(0, INT32)
    found = g.op("Gather", rows, g.op("Max", index, zero))
    keep = g.op("Unsqueeze", g.op("GreaterOrEqual", index, zero), g.ints(-1))
    return g.op("Where", keep, found, g.const(0.0)) if masked else found


def layer(g: Graph, routed: str) -> Graph:
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm(up=True, down="before").write(g, hidden, rank=2), hidden)
    return g


def summed(g: Graph, products: str, axis: int = 1) -> str:
    return g.op("ReduceSum", products, g.ints(axis), keepdims=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("few", COLUMNS)
def test_weights_of_picked_rows(few: str, swap: bool, dtype: str) -> None:
    g = Graph(dtype)
    weights = g.input("weights", COLUMNS[few][0])
    site = matched(layer(g, summed(g, g.mul(picked(g), weights, swap))))
    assert (site.shapes["expert_weights"] or [])[-1] == TOP_K
    assert site.attributes["apply_expert_weights"] == 1


@pytest.mark.parametrize("few", COLUMNS)
def test_beside_weights_of_each_route(few: str) -> None:
    """A number a token, or a learned one a place, multiplies the weighted rows."""
    g = Graph()
    weights = g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1))
    products = g.mul(g.mul(picked(g), weights), g.input("few", COLUMNS[few][0]))
    matched(layer(g, summed(g, products)))


@pytest.mark.parametrize("few", COLUMNS)
@pytest.mark.parametrize("k_first", [False, True])
def test_rows_in_order(few: str, k_first: bool) -> None:
    """[T, K, H] or [K, T, H]."""
    g = Graph()
    shape: list[int | str] = ["T", TOP_K, HIDDEN]
    column = list(COLUMNS[few][0])
    if k_first:
        shape[:2] = shape[1::-1]
        column = [TOP_K, 1, 1] if COLUMNS[few][1] == "k" else ["T", 1] if COLUMNS[few][1] == "t" else column
    products = g.mul(g.input("rows", shape), g.input("weights", column))
    matched(layer(g, summed(g, products, 0 if k_first else 1)))


@pytest.mark.parametrize("letters", ["t", "k", ""])
def test_in_an_einsum(letters: str) -> None:
    g = Graph()
    shape: list[int | str] = [{"t": "T", "k": TOP_K}[letter] for letter in letters]
    routed = g.op("Einsum", picked(g), g.input("weights", shape), equation=f"tkh,{letters}->th")
    matched(layer(g, routed))


def test_batch_and_sequence() -> None:
    g = Graph()
    rows, weights = g.input("rows", ["B", "S", TOP_K, HIDDEN]), g.input("weights", ["B", "S", 1, 1])
    hidden = g.add(summed(g, g.mul(rows, weights), 2), g.input("residual", ["B", "S", HIDDEN]))
    g.output(NormForm().write(g, hidden), hidden)
    matched(g)


@pytest.mark.parametrize("shape", [["B", 1, 1, 1], ["U", TOP_K, 1, 1]])
def test_a_number_of_something_else_is_none(shape: list[int | str]) -> None:
    """One a batch entry, or one a place and batch entry."""
    g = Graph()
    rows = g.input("rows", ["B", TOP_K, TOP_K, HIDDEN])
    hidden = g.add(summed(g, g.mul(rows, g.input("weights", shape)), 2), g.input("residual", ["B", TOP_K, HIDDEN]))
    g.output(NormForm().write(g, hidden), hidden)
    assert map_model(g.model()).sites == []


def test_tokens_of_another_name_may_be_repeated() -> None:
    g = Graph()
    products = g.mul(picked(g), g.input("weights", ["U", 1, 1]))
    assert map_model(layer(g, summed(g, products)).model()).sites == []


def test_without_a_layers_end_a_number_a_token_says_nothing() -> None:
    g = Graph()
    g.output(g.op("Relu", summed(g, g.mul(picked(g, masked=False), g.input("weights", ["T", 1, 1])))))
    assert map_model(g.model()).sites == []
