"""Mapping takes time in proportion to the graph, whatever stands in long rows (case 47)."""

import time

import pytest

from moetrt.mapping import map_model
from tests.mapping_graphs import HIDDEN, Graph


def seconds(op_type: str, count: int, beside: bool) -> float:
    """What mapping takes of the processor for ``count`` nodes one after another, or beside one another."""
    g = Graph("float32")
    value = g.op("Relu", g.input("x", ["T", HIDDEN]))
    others = {"Add": [g.vector(0)], "Mul": [g.const(1.5)], "MatMul": [g.vector(0, shape=[HIDDEN])]}
    for _ in range(count):
        made = g.op(op_type, value, *others.get(op_type, []), **({"to": 1} if op_type == "Cast" else {}))
        value = value if beside else made
    g.output(made)
    model = g.model()
    started = time.process_time()
    map_model(model)
    return time.process_time() - started


@pytest.mark.parametrize("beside", [False, True], ids=["in a row", "beside one another"])
@pytest.mark.parametrize("op_type", ["Cast", "Add", "Mul", "MatMul", "Identity", "Transpose"])
def test_case47_time_grows_with_the_graph_and_no_faster(op_type: str, beside: bool) -> None:
    """Eight times the nodes take eight times as long; where each looked at all before it, 64 times."""
    seconds(op_type, 100, beside)
    assert seconds(op_type, 3200, beside) < 20 * seconds(op_type, 400, beside)
