"""The graphs of a model are found as onnx_ir finds them, and a file that is mapped is serialised twice (case 47)."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from moetrt.graphs import graphs_of, nodes_of
from moetrt.mapping import map_file


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    made = helper.make_node("Relu", ["x"], [f"{name}_y"], name=f"{name}_relu")
    output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["T"])
    return helper.make_graph([*nodes, made], name, [], [output])


def choice(name: str, *inner: onnx.NodeProto) -> onnx.NodeProto:
    bodies = {"then_branch": branch(f"{name}_then", *inner), "else_branch": branch(f"{name}_else")}
    return helper.make_node("If", ["flag"], [f"{name}_out"], name=name, **bodies)


def model_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T"]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    last = helper.make_node("Identity", [nodes[-1].output[0]], ["y"], name="last")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T"])
    graph = helper.make_graph([*nodes, last], "graph", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_case47_graphs_are_those_of_onnx_ir_in_its_order() -> None:
    model = ir.from_proto(model_of(choice("first", choice("inner")), choice("second")))
    graphs = list(graphs_of(model))
    assert graphs == list(model.graphs())
    names = ["graph", "first_else", "first_then", "inner_else", "inner_then", "second_else", "second_then"]
    assert [graph.name for graph in graphs] == names
    assert list(nodes_of(model)) == [node for graph in model.graphs() for node in graph]


def test_case47_bodies_are_looked_for_after_the_graph() -> None:
    """What the caller takes out of the model's own graph is not walked."""
    model = ir.from_proto(model_of(choice("first"), choice("second")))
    graphs = graphs_of(model)
    own = next(graphs)
    own.remove(own[0])
    assert [graph.name for graph in graphs] == ["second_else", "second_then"]


def test_case47_a_file_is_written_as_a_message_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the inference of what the file does not say, and for the file: the last check looks at what is written."""
    source = tmp_path / "model.onnx"
    onnx.save(model_of(choice("first")), source)
    written: list[object] = []
    to_proto = ir.to_proto

    def counted(model: ir.Model) -> onnx.ModelProto:
        written.append(model)
        return to_proto(model)

    monkeypatch.setattr(ir, "to_proto", counted)
    map_file(source, tmp_path / "mapped.onnx")
    assert len(written) == 2
