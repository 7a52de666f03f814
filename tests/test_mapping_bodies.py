"""A tail in the body of an If, a Loop or a Scan is mapped where its constants are those of the outer graph."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from moetrt.mapping import map_model
from moetrt.onnx_op import operator_of
from tests.equivalence import compare_models
from tests.mapping_checks import RELATIVE, mapped
from tests.mapping_graphs import HIDDEN, Graph, NormForm, feeds

INT64 = TensorProto.INT64


def layer() -> tuple[Graph, str]:
    """A tail, and the sum that it ends in; what it reads are inputs of the graph, its constants initializers."""
    g = Graph()
    residual = g.input("residual", ["T", HIDDEN])
    hidden = g.add(g.gathered(), residual)
    return g, g.add(NormForm().write(g, hidden, rank=2), hidden)


def with_body(kind: str, constants: str = "initializers") -> ir.Model:
    """The layer in a body; the constants stay outside, are computed inside, or are defaults of inputs."""
    g, result = layer()
    inner, g.nodes = g.nodes, []
    if constants == "computed":
        computed = [node for node in inner if node.op_type in ("Unsqueeze", "ReduceSum", "ReduceMean")]
        for number, node in enumerate(computed):
            inner.insert(0, helper.make_node("Reshape", [node.input[1], g.ints(1)], [f"axes_{number}"]))
            node.input[1] = f"axes_{number}"
    info = helper.make_tensor_value_info(result, TensorProto.FLOAT, ["T", HIDDEN])
    body = helper.make_graph(inner, "body", [], [info])
    if kind == "If":
        condition = g.input("condition", [], TensorProto.BOOL)
        other = helper.make_graph([helper.make_node("Identity", ["residual"], ["same"])], "other", [], [])
        other.output.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, ["T", HIDDEN]))
        g.output(g.op("If", condition, then_branch=body, else_branch=other))
    else:
        state = helper.make_tensor_value_info("state", TensorProto.FLOAT, ["T", HIDDEN])
        for node in body.node:
            node.input[:] = ["state" if name == "residual" else name for name in node.input]
        if kind == "Loop":
            body.input.extend(
                [
                    helper.make_tensor_value_info("step", INT64, []),
                    helper.make_tensor_value_info("go", TensorProto.BOOL, []),
                    state,
                ]
            )
            body.node.append(helper.make_node("Identity", ["go"], ["goes"]))
            body.output.insert(0, helper.make_tensor_value_info("goes", TensorProto.BOOL, []))
            g.output(g.op("Loop", g.const(2, INT64), "", "residual", body=body))
        else:
            body.input.append(state)
            g.output(g.op("Scan", g.op("Unsqueeze", "residual", g.ints(0)), body=body, num_scan_inputs=1))
    if constants == "nodes":
        g.nodes[:0] = [
            helper.make_node("Constant", [], [name], name=f"node_{name}", value=tensor)
            for name, tensor in g.initializers.items()
        ]
        g.initializers.clear()
    elif constants == "defaults":
        for name, tensor in g.initializers.items():
            g.input(name, list(tensor.dims), tensor.data_type)
    proto = g.proto()
    shape = [1, "T", HIDDEN] if kind == "Scan" else ["T", HIDDEN]
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info(g.outputs[0], TensorProto.FLOAT, shape))
    return ir.from_proto(proto)


@pytest.mark.parametrize("constants", ["initializers", "nodes", "computed"])
@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_the_outer_constants_of_a_body_are_seen(kind: str, constants: str) -> None:
    before = with_body(kind, constants)
    after, report = mapped(before)
    assert (report.found, report.complete) == (1, True), [site.became for site in report.sites]
    assert [node.op_type for graph in after.graphs() for node in graph if operator_of(node)] == [
        "MoEFinalizeAddRMSNorm"
    ]
    for seed in range(2):
        given = feeds(before, seed) | ({"condition": np.array(True)} if kind == "If" else {})
        for difference in compare_models(before, after, given):
            assert difference.relative <= RELATIVE["float32"], str(difference)


def test_what_inference_is_given_stays_out_of_the_file() -> None:
    before = with_body("If")
    map_model(before)
    (branch,) = (graph for graph in before.graphs() if graph.name == "body")
    assert not branch.initializers


def test_a_default_that_may_be_another_is_no_constant() -> None:
    """The axes, the shapes and the numbers of the body are defaults of inputs: another run may have others."""
    report = map_model(with_body("If", "defaults"))
    assert not report.complete
    assert not any(site.operator for site in report.sites)
