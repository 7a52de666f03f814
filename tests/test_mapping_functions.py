"""Tails inside model-local functions and inner graphs, in every version of ONNX that is taken."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxscript
import pytest
from onnx import TensorProto, helper
from onnxscript import opset22

from moetrt.engine import build_engine
from moetrt.errors import InputError
from moetrt.mapping import map_file, map_model
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import operator_of
from tests.mapping_checks import assert_same_numbers, mapped, only
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm, full_tail

OPSETS = range(17, 25)


def constants(graph: Graph) -> list[onnx.NodeProto]:
    return [helper.make_node("Constant", [], [name], value=value) for name, value in graph.initializers.items()]


def function_of(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[str],
    outputs: list[str],
    *,
    opset: int = 22,
    attributes: tuple[str, ...] = (),
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("moetrt", 1), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, imports, attributes)


def with_functions(
    graph: Graph, nodes: list[onnx.NodeProto], *functions: onnx.FunctionProto, opset: int = 22
) -> ir.Model:
    """A model with the inputs and outputs of ``graph``, made of ``nodes`` and the functions that they call."""
    model = helper.make_model(
        helper.make_graph(
            nodes, "outer", list(graph.inputs.values()), list(graph.proto().graph.output), value_info=graph.values
        ),
        functions=functions,
        opset_imports=[helper.make_opsetid(name, v) for name, v in (("", opset), ("moetrt", 1), ("local", 1))],
        ir_version=10,
    )
    return ir.from_proto(model)


def call(name: str, inputs: list[str], outputs: list[str], **attributes: float) -> onnx.NodeProto:
    return helper.make_node(name, inputs, outputs, domain="local", name=f"call_{name}", **attributes)


def split_at_norm(graph: Graph) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto], str]:
    """The nodes before the norm, those of the norm, and the hidden state between them."""
    at = next(index for index, node in enumerate(graph.nodes) if node.op_type == "Pow")
    return graph.nodes[:at], graph.nodes[at:], graph.nodes[at].input[0]


def test_norm_in_a_function_and_the_sum_outside() -> None:
    """Nothing in the function looks like a MoE tail: it is inlined all the same."""
    g = full_tail()
    before, norm, hidden = split_at_norm(g)
    function = function_of("Norm", [*constants(g), *norm], [hidden], g.outputs)
    model = with_functions(g, [*constants(g), *before, call("Norm", [hidden], g.outputs)], function)
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert report.notes == ["1 model-local functions were inlined"]
    assert_same_numbers(g.model(), after)


def test_functions_in_functions_with_attributes() -> None:
    """The block calls the norm, and passes its own eps on."""
    g = full_tail()
    before, norm, hidden = split_at_norm(g)
    eps = next(name for node in norm if node.op_type == "Add" for name in node.input if name in g.initializers)
    makes_eps = helper.make_node("Constant", [], [eps])
    makes_eps.attribute.append(
        onnx.AttributeProto(name="value_float", type=onnx.AttributeProto.FLOAT, ref_attr_name="eps")
    )
    others = [node for node in constants(g) if node.output[0] != eps]
    inner = function_of("Norm", [*others, makes_eps, *norm], [hidden], g.outputs, attributes=("eps",))
    calls_inner = call("Norm", [hidden], g.outputs)
    calls_inner.attribute.append(
        onnx.AttributeProto(name="eps", type=onnx.AttributeProto.FLOAT, ref_attr_name="block_eps")
    )
    outer = function_of("Block", [*others, *before, calls_inner], list(g.inputs), g.outputs, attributes=("block_eps",))
    model = with_functions(g, [call("Block", list(g.inputs), g.outputs, block_eps=3e-4)], outer, inner)
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert only(report).attributes["eps"] == pytest.approx(3e-4)
    assert report.notes == ["2 model-local functions were inlined"]
    # What it was before it was split into functions, with the eps that was passed down.
    g.const(3e-4, name=eps)
    assert_same_numbers(g.model(), after)


def test_gather_form_in_a_function() -> None:
    """No value in a function has a shape before it is inlined."""
    g = Graph()
    hidden = g.add(g.gathered(), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    body = function_of("Tail", [*constants(g), *g.nodes], list(g.inputs), g.outputs)
    model = with_functions(g, [call("Tail", list(g.inputs), g.outputs)], body)
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert only(report).form == "gather"
    assert_same_numbers(g.model(), after)


@onnxscript.script(onnxscript.values.Opset("library", 1))
def rms_norm(x, weight, eps: float):  # type: ignore[no-untyped-def]
    """As onnxscript's own function libraries are written."""
    square = opset22.Mul(x, x)
    mean = opset22.ReduceMean(square, opset22.Constant(value_ints=[-1]), keepdims=1)
    inverse = opset22.Reciprocal(opset22.Sqrt(mean + opset22.Constant(value_float=eps)))
    return x * inverse * weight


def test_function_of_an_onnxscript_library() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = g.op("rms_norm", hidden, g.vector(1), domain="library", eps=2e-5)
    g.values.append(helper.make_tensor_value_info(normal, TensorProto.FLOAT, ["T", HIDDEN]))
    g.output(normal, hidden)
    proto = g.proto("library")
    proto.functions.append(rms_norm.to_function_proto())
    model = ir.from_proto(proto)
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert only(report).attributes["eps"] == pytest.approx(2e-5)
    assert_same_numbers(model, after)


def norm_as_function(opset: int, model_opset: int) -> ir.Model:
    """A norm whose constants are inputs of the function: its operators are few, and the same from opset 18 to 24."""
    g = full_tail(opset=opset)
    before, norm, hidden = split_at_norm(g)
    numbers = [name for node in norm for name in node.input if name in g.initializers]
    function = function_of("Norm", norm, [hidden, *numbers], g.outputs, opset=opset)
    nodes = [*constants(g), *before, call("Norm", [hidden, *numbers], g.outputs)]
    return with_functions(g, nodes, function, opset=model_opset)


@pytest.mark.parametrize(("opset", "model_opset"), [(18, 22), (21, 24), (24, 22)])
def test_function_of_another_opset_with_the_same_operators(opset: int, model_opset: int) -> None:
    model = norm_as_function(opset, model_opset)
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert report.notes == ["1 model-local functions were inlined"]
    assert_same_numbers(model, after)


def test_function_of_another_opset_with_other_operators(tmp_path: Path) -> None:
    """Opset 17 has the axes of ReduceMean as an attribute: that function stays; onnx.checker refuses such a file."""
    model = norm_as_function(17, 22)
    proto = ir.to_proto(model)
    report = map_model(model)
    assert (only(report).operator, only(report).matched) == ("MoEFinalizeAdd", False)
    assert "Norm 'call_Norm' follows, which is no part of a MoE tail" in (only(report).reason or "")
    assert report.notes == [
        "function 'Norm' was not looked into: its ReduceMean is that of opset 17, the model's of 22; export both with "
        "one opset"
    ]
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="FunctionOp imports version 17 whereas model imports version 22"):
        map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx")


def test_bodies_of_other_plugins_stay() -> None:
    """Another plugin's node is found by its name: its function is its body for readers without that plugin."""
    g = full_tail()
    before, norm, hidden = split_at_norm(g)
    function = function_of("OtherPlugin", [*constants(g), *norm], [hidden], g.outputs)
    node = call("OtherPlugin", [hidden], g.outputs, plugin_version="1", plugin_namespace="other")  # type: ignore[arg-type]
    model = with_functions(g, [*constants(g), *before, node], function)
    after, report = mapped(model)
    assert (only(report).operator, only(report).matched) == ("MoEFinalizeAdd", False)
    assert ("local", "OtherPlugin", "") in after.functions
    assert report.notes == []
    assert_same_numbers(model, after)


def test_functions_that_call_each_other_are_refused() -> None:
    g = full_tail()
    one = function_of("One", [call("Two", ["x"], ["y"])], ["x"], ["y"])
    two = function_of("Two", [call("One", ["x"], ["y"])], ["x"], ["y"])
    with pytest.raises(InputError, match="functions call each other in a circle"):
        map_model(with_functions(g, [*constants(g), *g.nodes], one, two))


# Inner graphs


def branch(graph: Graph, name: str) -> onnx.GraphProto:
    """The graph's nodes as a branch of If, with their constants, and no shapes but those that inference finds."""
    outputs = [helper.make_empty_tensor_value_info(output) for output in graph.outputs]
    return helper.make_graph(graph.nodes, name, [], outputs, list(graph.initializers.values()))


def branched(both: bool) -> ir.Model:
    """An If with a tail in one branch or in both, which then use the same names for their values."""
    g = full_tail()
    known = list(g.proto().graph.output)
    other = Graph()
    residual = other.input("residual", ["B", "S", HIDDEN])
    other.output(other.op("Neg", residual), other.op("Abs", residual))
    second = full_tail(NormForm(inverse="Div")) if both else other
    g.input("flag", [], TensorProto.BOOL)
    chosen = helper.make_node(
        "If", ["flag"], ["one", "two"], name="if", then_branch=branch(g, "then"), else_branch=branch(second, "else")
    )
    for value, name in zip(known, ("one", "two"), strict=True):
        value.name = name
    proto = helper.make_model(
        helper.make_graph([chosen], "outer", list(g.inputs.values()), known),
        opset_imports=[helper.make_opsetid("", 22), helper.make_opsetid("moetrt", 1)],
        ir_version=10,
    )
    return ir.from_proto(proto)


@pytest.mark.parametrize("both", [False, True])
def test_tail_in_a_branch(both: bool) -> None:
    model = branched(both)
    after, report = mapped(model)
    assert (report.found, report.mapped) == ((2, 2) if both else (1, 1)), [site.reason for site in report.sites]
    for site in report.sites:
        assert site.shapes["norm_out"] == ["B", "S", HIDDEN]
    found = [node for inner in after.graphs() for node in inner if operator_of(node)]
    assert all(node.graph is not after.graph for node in found)
    assert_same_numbers(model, after)


@pytest.mark.parametrize("inner", ["norm", "gamma"])
def test_norm_in_a_branch_and_the_sum_outside(inner: str) -> None:
    """An inner graph's outputs must be its own: the norm stays there, and the rest is mapped."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    within = Graph()
    if inner == "norm":
        normal = NormForm().write(within, hidden, rank=2)
    else:
        inverse = g.op("Reciprocal", g.op("Sqrt", g.add(g.mean(g.op("Mul", hidden, hidden)), g.const(1e-5))))
        normal = within.mul(g.mul(hidden, inverse), within.vector(1))
    info = helper.make_tensor_value_info(normal, TensorProto.FLOAT, ["T", HIDDEN])
    # Names of one graph only: those of the outer one are taken.
    prefix = {name: f"inner_{name}" for node in within.nodes for name in node.output}
    prefix |= {name: f"inner_{name}" for name in within.initializers}
    for node in within.nodes:
        node.input[:] = [prefix.get(name, name) for name in node.input]
        node.output[:] = [prefix[name] for name in node.output]
    for name, tensor in within.initializers.items():
        tensor.name = prefix[name]
    info.name = prefix[normal]
    other = helper.make_tensor_value_info("other", TensorProto.FLOAT, ["T", HIDDEN])
    chosen = g.op(
        "If",
        g.input("flag", [], TensorProto.BOOL),
        then_branch=helper.make_graph(within.nodes, "then", [], [info], list(within.initializers.values())),
        else_branch=helper.make_graph([helper.make_node("Neg", [hidden], ["other"])], "else", [], [other]),
    )
    g.output(chosen, hidden)
    model = g.model()
    after, report = mapped(model)
    site = only(report)
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert "is in an inner graph" in (site.reason or "")
    assert_same_numbers(model, after)


def looped() -> ir.Model:
    """Three layers with the same weights: the residual stream is what the loop carries."""
    g = Graph()
    g.input("residual", ["T", HIDDEN])
    body = Graph()
    routed = body.routed()
    hidden = body.add("carried", body.op("Mul", routed, body.const(0.5, name="half")))
    normal = NormForm().write(body, hidden, rank=2)
    body.output(body.op("Identity", "going"), body.add(hidden, body.op("Tanh", normal)))
    for name in ("rows", "weights", "map"):
        g.inputs[name] = body.inputs[name]
    graph = helper.make_graph(
        body.nodes,
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, ["T", HIDDEN]),
        ],
        [helper.make_empty_tensor_value_info(name) for name in body.outputs],
        list(body.initializers.values()),
    )
    trips, going = g.const(3, TensorProto.INT64), g.const(True, TensorProto.BOOL)
    result = g.op("Loop", trips, going, "residual", body=graph)
    g.values.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, ["T", HIDDEN]))
    g.output(result)
    return g.model()


def test_tail_in_the_body_of_a_loop() -> None:
    model = looped()
    after, report = mapped(model)
    assert only(report).matched, only(report).reason
    assert_same_numbers(model, after)


# Versions


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    """The function's body is written for the model's own opset, and runs there."""
    model = full_tail(opset=opset).model()
    after, report = mapped(model)
    assert only(report).matched
    (function,) = after.functions.values()
    assert function.opset_imports[""] == after.graph.opset_imports[""] == opset
    assert_same_numbers(model, after)


@pytest.mark.parametrize("version", range(8, onnx.IR_VERSION + 1))
def test_every_ir_version(version: int, tmp_path: Path) -> None:
    """Functions came with IR version 8, overloads with 10: the version stays unless an overload needs a later one."""
    g = full_tail()
    proto = g.proto()
    proto.ir_version = version
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx").complete
    after = load_model(tmp_path / "mapped.onnx")
    assert after.ir_version == version
    assert_same_numbers(ir.from_proto(proto), after)


@pytest.mark.parametrize("nodes_too", [False, True])
def test_standard_operators_imported_by_their_other_name(nodes_too: bool, tmp_path: Path) -> None:
    proto = full_tail().proto()
    proto.opset_import[0].domain = "ai.onnx"
    if nodes_too:
        for node in proto.graph.node:
            node.domain = node.domain or "ai.onnx"
    report = map_model(model := ir.from_proto(proto))
    assert report.complete
    assert dict(model.graph.opset_imports) == {"": 22, "moetrt": 1}
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx").complete
    assert_same_numbers(full_tail().model(), load_model(tmp_path / "mapped.onnx"))


def test_standard_operators_imported_twice(tmp_path: Path) -> None:
    proto = full_tail().proto()
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 21))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="standard operators are imported as opset 21 and 22; one is taken"):
        map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx")
    with pytest.raises(InputError, match=r"imported twice, as opset 22 and, by the name 'ai.onnx', as 21"):
        map_model(ir.from_proto(proto))


# TensorRT-RTX

PROFILES = {
    "rows": ((4, HIDDEN), (24, HIDDEN), (128, HIDDEN)),
    "weights": ((1, TOP_K), (6, TOP_K), (32, TOP_K)),
    "map": ((1, TOP_K), (6, TOP_K), (32, TOP_K)),
    "shared": ((1, HIDDEN), (6, HIDDEN), (32, HIDDEN)),
    "residual": ((1, 1, HIDDEN), (2, 3, HIDDEN), (4, 8, HIDDEN)),
}
"""T is 1, 6 and 32, as [T, H] and as [B, S, H]."""


@pytest.mark.parametrize("which", ["opset 17", "opset 24", "branches", "loop"])
def test_tensorrt_rtx_builds_it_with_the_plugin_and_without(which: str, tmp_path: Path, plugin_library: Path) -> None:
    if which.startswith("opset"):
        model = full_tail(opset=int(which.removeprefix("opset "))).model()
    else:
        model = looped() if which == "loop" else branched(both=True)
    profiles = {name: PROFILES[name] for name in (value.name for value in model.graph.inputs) if name in PROFILES}
    if which == "loop":
        profiles["residual"] = PROFILES["shared"]
    after, report = mapped(model)
    path = save_model(after, tmp_path / "mapped.onnx")
    layers = []
    for library in (plugin_library, None):
        engine = build_engine(
            path, tmp_path / "it.engine", backend="tensorrt-rtx", plugin_library=library, profiles=profiles
        )
        layers.append(len(engine.plugin_layers))
    assert layers == [report.mapped, 0]
    assert report.mapped == (2 if which == "branches" else 1)
