"""Einsums that take rows, weights and a one-hot matrix at once, in all orders of operands and whatever the letters."""

from collections.abc import Mapping
from itertools import permutations

import pytest
from onnx import TensorProto, helper

from moetrt.mapping import map_model
from moetrt.mapping_report import MappingReport, Site
from tests.mapping_checks import matched
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm

E, INT32, INT64 = 4, 6, 7


def operands(g: Graph, layout: Mapping[str, str]) -> dict[str, str]:
    """Operands by name, laid out as their letters say: t tokens, k routes, e experts or rows, h columns."""
    scores = g.input("scores", ["T", E])
    weights = g.op("TopK", scores, g.ints(TOP_K), axis=-1, count=2)
    ids = g.nodes[-1].output[1]
    given = {"weights": weights, "more": g.input("more", ["T", TOP_K])}
    if layout.get("rows") == "eh":
        rows, index = g.input("rows", ["R", HIDDEN]), g.input("map", ["T", TOP_K], INT32)
        count = g.op("Squeeze", g.op("Shape", rows, start=0, end=1))
        places = g.op("Range", g.const(0, INT64), count, g.const(1, INT64))
        equal = g.op("Equal", g.op("Unsqueeze", g.op("Cast", index, to=INT64), g.ints(-1)), places)
        given |= {"rows": rows, "matrix": g.cast(equal, "float32")}
    else:
        matrix = g.op("OneHot", ids, g.const(E, INT64), g.const([0.0, 1.0]), axis=-1)
        given |= {"rows": g.input("rows", ["T", E, HIDDEN]), "matrix": matrix}
    if layout.get("rows", "").startswith("tk"):
        given["rows"] = g.input("routes", ["T", TOP_K, HIDDEN])
    plain = {"weights": "tk", "more": "tk", "matrix": "tke", "rows": "tkh" if "k" in layout["rows"] else "teh"}
    taken = {}
    for name, letters in layout.items():
        value = given[name]
        if letters != plain[name] and len(letters) == len(plain[name]):
            value = g.op("Transpose", value, perm=[plain[name].index(letter) for letter in letters])
        taken[name] = value
    return taken


def tail(layout: Mapping[str, str], order: tuple[int, ...] | None = None, letters: str = "tkeh") -> Graph:
    """A residual and a norm after the Einsum of what ``layout`` says, in this order of operands."""
    g = Graph()
    values = operands(g, layout)
    names = [list(layout)[place] for place in order or range(len(layout))]
    spelled = ",".join(layout[name] for name in names).translate(str.maketrans("tkeh", letters))
    equation = f"{spelled}->{letters[0]}{letters[3]}"
    hidden = g.add(g.op("Einsum", *(values[name] for name in names), equation=equation), g.input("residual", ["T", 16]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    used = {name for node in g.nodes for name in node.input}
    g.inputs = {name: value for name, value in g.inputs.items() if name in used}
    return g


LAYOUTS: dict[str, dict[str, str]] = {
    "one-hot": {"matrix": "tke", "weights": "tk", "rows": "teh"},
    "experts first": {"matrix": "tke", "weights": "tk", "rows": "eth"},
    "experts before routes": {"matrix": "tek", "weights": "tk", "rows": "teh"},
    "experts, routes and tokens": {"matrix": "ekt", "weights": "kt", "rows": "eth"},
    "routes first": {"matrix": "kte", "weights": "kt", "rows": "teh"},
    "rows of no token": {"matrix": "tke", "weights": "tk", "rows": "eh"},
    "transposed one-hot of rows": {"matrix": "etk", "weights": "kt", "rows": "eh"},
    "two weights": {"matrix": "tke", "weights": "tk", "more": "kt", "rows": "teh"},
    "routes' rows": {"rows": "tkh", "weights": "tk", "more": "tk"},
    "routes' rows and transposed weights": {"rows": "tkh", "weights": "kt", "more": "tk"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    site = matched(tail(LAYOUTS[layout]))
    assert (site.shapes["expert_weights"] or [])[-1] == TOP_K
    assert (site.shapes["gemm2_permuted"] or [])[-1] == HIDDEN


@pytest.mark.parametrize("layout", ["one-hot", "rows of no token", "routes' rows"])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_every_order_of_operands(order: tuple[int, ...], layout: str) -> None:
    matched(tail(LAYOUTS[layout], order))


@pytest.mark.parametrize("layout", ["one-hot", "experts first", "routes' rows"])
@pytest.mark.parametrize("letters", ["abcd", "dcba", "TKeh", "hekt"])
def test_letters_are_names(letters: str, layout: str) -> None:
    matched(tail(LAYOUTS[layout], letters=letters))


def test_a_one_hot_matrix_without_weights() -> None:
    matched(tail({"matrix": "tke", "rows": "teh"}))


def report_of(g: Graph) -> MappingReport:
    return map_model(g.model())


def left_alone(g: Graph) -> Site:
    """The one site, of which nothing is mapped."""
    report = report_of(g)
    assert (report.found, report.mapped) == (1, 0), [site.became for site in report.sites]
    return report.sites[0]


def test_a_weight_for_every_expert_is_named() -> None:
    g = Graph()
    values = operands(g, LAYOUTS["one-hot"])
    g.output(g.op("Einsum", values["matrix"], "scores", values["rows"], equation="tke,te,teh->th"))
    assert "'scores', which has a number for every expert of a token: gather those" in (left_alone(g).reason or "")


@pytest.mark.parametrize(
    "equation",
    [
        "tkh,tk,tk->kh",  # tokens are summed
        "tkh,tk,tk->tk",  # columns are summed
        "tkh,tk,tk->ht",  # the result is transposed
        "tkh,tk,t->th",  # one number a token
    ],
)
def test_other_einsums_are_no_tails(equation: str) -> None:
    g = Graph()
    rows, weights = g.input("rows", ["T", TOP_K, HIDDEN]), g.input("weights", ["T", TOP_K])
    last = g.input("token", ["T"]) if ",t-" in equation else weights
    g.output(g.op("Einsum", rows, weights, last, equation=equation))
    assert report_of(g).sites == []


def ellipsis(equation: str, shapes: list[list[int | str]]) -> Graph:
    """Rows that a router chose and weights, in an Einsum of dimensions without letters."""
    g = Graph()
    tokens = shapes[0][:-2]
    scores = g.op("TopK", g.input("scores", [*tokens, E]), g.ints(TOP_K), axis=-1, count=2)
    rows, others = g.input("rows", shapes[0]), []
    for number, shape in enumerate(shapes[1:]):
        others.append(scores if shape == [*tokens, TOP_K] else g.input(f"weights_{number}", shape))
    first = equation.startswith("...kh")
    total = g.op("Einsum", *([rows, *others] if first else [*others, rows]), equation=equation)
    g.values.append(helper.make_tensor_value_info(total, TensorProto.FLOAT, [*tokens, HIDDEN]))
    hidden = g.add(total, g.input("residual", [*tokens, HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=len(tokens) + 1), hidden)
    return g


@pytest.mark.parametrize("tokens", [["T"], ["B", "S"]])
@pytest.mark.parametrize("equation", ["...kh,...k->...h", "...k,...kh->...h", "...k, ...kh -> ...h"])
def test_an_ellipsis_stands_for_the_tokens(equation: str, tokens: list[int | str]) -> None:
    matched(ellipsis(equation, [[*tokens, TOP_K, HIDDEN], [*tokens, TOP_K]]))


def test_an_ellipsis_and_one_weight_a_place() -> None:
    matched(ellipsis("...kh,k,...k->...h", [["T", TOP_K, HIDDEN], [TOP_K], ["T", TOP_K]]))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...kh,...k->...h", [["T", TOP_K, HIDDEN], [TOP_K]]),  # of another rank: repeated
        ("...kh,...k->...h", [["T", TOP_K, HIDDEN], [1, TOP_K]]),  # repeated
    ],
)
def test_an_ellipsis_that_repeats_an_operand_is_no_tail(equation: str, shapes: list[list[int | str]]) -> None:
    assert report_of(ellipsis(equation, shapes)).mapped == 0
