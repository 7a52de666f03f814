"""What ONNX does not define for bfloat16 is exported between Casts (case 58)."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from moetrt.bfloat16 import widen_undefined
from moetrt.capture import capture
from moetrt.mapping import inference_problem, map_model
from moetrt.models import llama4
from moetrt.onnx_files import proto_of
from moetrt.source import as_source

BF16, FLOAT, INT64 = TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.INT64


def undefined(model: ir.Model) -> list[str]:
    """The nodes that onnx's schemas do not allow the dtypes of."""
    found = []
    for node in (node for graph in model.graphs() for node in graph if node.domain == ""):
        schema = onnx.defs.get_schema(node.op_type, model.graph.opset_imports[""], "")
        allowed = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
        for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
            for index, value in enumerate(values):
                kinds = allowed.get(formals[min(index, len(formals) - 1)].type_str)
                if (
                    value is not None
                    and value.dtype == ir.DataType.BFLOAT16
                    and kinds
                    and "tensor(bfloat16)" not in kinds
                ):
                    found.append(f"{node.op_type} {value.name}")
    return found


def test_case58_llama4_in_bf16_at_opset_22_is_valid() -> None:
    whole = llama4()
    del whole.model.layers[2:]  # the first two are a layer without experts and one with them
    model = capture(as_source(whole.bfloat16()), opset=22)
    assert undefined(model) == []
    assert inference_problem(model) is None
    assert any(node.op_type == "TopK" for node in model.graph)
    report = map_model(model)
    assert report.complete, report.summary()
    assert report.notes == []


NODES = {
    "TopK": (["x", "two"], 2, {}, [[3, 8]]),
    "Einsum": (["x", "y"], 1, {"equation": "th,kh->tk"}, [[3, 8], [4, 8]]),
    "OneHot": (["at", "eight", "ends"], 1, {}, [[3], [2]]),
    "Range": (["start", "end", "step"], 1, {}, [[], [], []]),
    "Compress": (["x", "kept"], 1, {"axis": 0}, [[3, 8]]),
    "Celu": (["x"], 1, {}, [[3, 8]]),
    "Shrink": (["x"], 1, {"lambd": 0.5}, [[3, 8]]),
    "Unique": (["x"], 4, {}, [[3, 8]]),
    "ReverseSequence": (["x", "lengths"], 1, {"time_axis": 1, "batch_axis": 0}, [[3, 8]]),
}
GIVEN = {
    "two": np.array([2]),
    "eight": np.array(8),
    "kept": np.array([True, False, True]),
    "lengths": np.array([8, 2, 5]),
}


def around(op_type: str, opset: int, dtype: int) -> onnx.ModelProto:
    """The node in ``dtype``, of inputs rounded to bfloat16, its first output rounded to it: both float32 outside."""
    names, count, attributes, shapes = NODES[op_type]
    free = [name for name in names if name not in GIVEN]
    floats = [name for name in free if name != "at"]
    outputs = [f"out_{index}" for index in range(count)]
    nodes = []
    for name in floats:
        nodes.append(helper.make_node("Cast", [f"{name}_given"], [f"{name}_rounded"], to=BF16))
        nodes.append(helper.make_node("Cast", [f"{name}_rounded"], [name], to=dtype))
    nodes.append(helper.make_node(op_type, names, ["made", *outputs[1:]], name="node", **attributes))
    nodes.append(helper.make_node("Cast", ["made"], ["made_rounded"], to=BF16))
    nodes.append(helper.make_node("Cast", ["made_rounded"], ["out_0"], to=FLOAT))
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(*((f"{name}_given", FLOAT) if name in floats else (name, INT64)), shape)
            for name, shape in zip(free, shapes, strict=True)
        ],
        [helper.make_tensor_value_info(name, INT64 if place else FLOAT, None) for place, name in enumerate(outputs)],
        [numpy_helper.from_array(array, name) for name, array in GIVEN.items() if name in names],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(proto)


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {}
    for place, value in enumerate(session.get_inputs()):
        array = random.standard_normal(value.shape) if value.shape else np.array((0.0, 6.0, 1.5)[place])
        feeds[value.name] = np.arange(3) if value.type == "tensor(int64)" else array.astype(np.float32)
    return session.run(None, feeds)


@pytest.mark.parametrize("opset", [22, 24])
@pytest.mark.parametrize("op_type", NODES)
def test_case58_every_operator_without_bfloat16_gets_casts(op_type: str, opset: int) -> None:
    """What it gives is what float32 gives of the same numbers, rounded once."""
    model = ir.from_proto(around(op_type, opset, BF16))
    defined = op_type == "TopK" and opset == 24
    assert (undefined(model) == []) == defined
    assert widen_undefined(model) == (0 if defined else 1)
    assert undefined(model) == []
    after = proto_of(model)
    onnx.checker.check_model(after, full_check=True)
    if not defined:  # ONNX Runtime has no TopK in bfloat16 either
        for one, other in zip(run(after), run(around(op_type, opset, FLOAT)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_case58_outputs_of_the_graph_and_inner_graphs_keep_their_names() -> None:
    x, out = (helper.make_tensor_value_info(name, BF16, [3, 8]) for name in ("x", "inner"))
    body = helper.make_graph([helper.make_node("Celu", ["x"], ["inner"])], "body", [], [out])
    choose = helper.make_node("If", ["c"], ["chosen"], then_branch=body, else_branch=body)
    celu = helper.make_node("Celu", ["chosen"], ["y"], name="last")
    c, y = helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_tensor_value_info("y", BF16, [3, 8])
    graph = helper.make_graph([choose, celu], "g", [x, c], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert widen_undefined(model) == 3
    assert [[value.name for value in graph.outputs] for graph in model.graphs()] == [["y"], ["inner"], ["inner"]]
    assert {value.dtype for graph in model.graphs() for value in graph.outputs} == {ir.DataType.BFLOAT16}
    assert undefined(model) == []
    onnx.checker.check_model(proto_of(model), full_check=True)
