"""A graph in wider numbers means what it did: functions that others share, and what they refer to, stay."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.errors import InputError
from moetrt.functional import finalize_add, finalize_add_rms_norm
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import operator_of
from moetrt.parity import compare
from moetrt.parity.runners import OrtRunner, session_of, side_by_side
from moetrt.parity.twins import evaluate, float32_twin
from moetrt.source import Source

WIDER = {ir.DataType.FLOAT: ir.DataType.DOUBLE}


class BothOperators(torch.nn.Module):
    """A layer with a norm and a last one without."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(
        self, rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        first = MoEOutput(UnfinalizedMoEOutput(rows, weights, index))
        norm, hidden = finalize_add_rms_norm(first, residual, self.gamma, eps=1e-6)
        last = MoEOutput(UnfinalizedMoEOutput(rows * 2, weights, index), routed_scaling_factor=2.5)
        return norm + hidden + finalize_add(last)


def both_operators(dtype: torch.dtype) -> Source:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "rows": torch.randn(12, 16, generator=generator).to(dtype),
        "weights": torch.rand(6, 2, generator=generator),
        "index": torch.arange(12, dtype=torch.int32).view(6, 2),
        "residual": torch.randn(6, 16, generator=generator).to(dtype),
    }
    return Source(BothOperators().to(dtype), inputs, description="BothOperators")


Mapped = tuple[Source, Path]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapped:
    """The model, and its folder with ``model.onnx`` and ``mapped.onnx``."""
    source, folder = both_operators(request.param), tmp_path_factory.mktemp("both")
    assert map_file(export(source, folder).model_path, folder / "mapped.onnx").mapped == 2
    return source, folder


def test_case_37_a_model_with_both_operators_agrees(both: Mapped, tmp_path: Path) -> None:
    source, folder = both
    report = compare(folder / "mapped.onnx", source)
    assert [tail.operator for tail in report.tails] == ["MoEFinalizeAddRMSNorm", "MoEFinalizeAdd"]
    assert all(error < 2.0**-20 for tail in report.tails for error in tail.error.values())
    assert report.passed, report.verdict
    # A fault in either is found all the same.
    for place in (0, 1):
        model = load_model(folder / "mapped.onnx")
        node = [node for node in model.graph if operator_of(node)][place]
        node.attributes["routed_scaling_factor"] = ir.AttrFloat32("routed_scaling_factor", 5.0)
        faulty = save_model(model, tmp_path / f"faulty{place}.onnx")
        cause = compare(faulty, source, unmapped_path=folder / "model.onnx").cause
        assert f"the first tail that is off is {place + 1} of 2" in cause
        assert "routed_scaling_factor was 5" in cause


def test_case_37_a_body_may_call_functions(both: Mapped, tmp_path: Path) -> None:
    """Of a tail that runs by itself, the functions come along that its own calls."""
    source, folder = both
    model = load_model(folder / "mapped.onnx")
    norm = next(function for function in model.functions.values() if function.name == "MoEFinalizeAddRMSNorm")
    mean = next(node for node in norm if node.op_type == "ReduceMean")
    given = [ir.val(f"given{place}") for place in range(len(mean.inputs))]
    inner = ir.Node("", "ReduceMean", given, list(mean.attributes.values()))
    helper = function("Mean", [inner], given)
    mean.domain, mean.op_type = "test", "Mean"
    mean.attributes.clear()
    model.functions[helper.identifier()] = helper
    for imports in (model.opset_imports, norm.opset_imports):
        imports["test"] = 1
    path = save_model(model, tmp_path / "helper.onnx")
    report = compare(path, source, unmapped_path=folder / "model.onnx")
    assert report.passed, report.verdict
    assert {output.runner for output in report.outputs if output.tail} == {"onnxruntime", "kernel-host"}
    # What the inner function does is on trial too.
    inner.op_type = "ReduceSum"
    cause = compare(save_model(model, path), source, unmapped_path=folder / "model.onnx").cause
    assert "is the tail it replaced, but its function in the file computes norm_out wrongly" in cause


def test_case_37_the_graph_before_mapping_may_have_functions(both: Mapped, tmp_path: Path) -> None:
    """The mapper looks for tails in functions, so the graph before mapping has its own inlined too."""
    source, folder = both
    model = load_model(folder / "model.onnx")
    graph = model.graph
    weights = list(graph.initializers.values())
    inner = [*graph.inputs, *weights]
    outside = [ir.Value(name=v.name, type=v.type, shape=v.shape, const_value=v.const_value) for v in inner]
    nodes, results = list(graph), list(graph.outputs)
    call = ir.Node("test", "Whole", outside, num_outputs=len(results))
    for mine, value in zip(call.outputs, results, strict=True):
        mine.name, mine.type, mine.shape = value.name, value.type, value.shape
    for node in nodes:
        graph.remove(node)
    for values in (graph.inputs, graph.outputs, graph.initializers):
        values.clear()
    for value in weights:
        value.const_value = None
    imports = dict(graph.opset_imports)
    body = ir.Function(
        "test", "Whole", graph=ir.Graph(inner, results, nodes=nodes, opset_imports=imports), attributes=()
    )
    count = len(inner) - len(weights)
    main = ir.Graph(
        outside[:count],
        list(call.outputs),
        nodes=[call],
        initializers=outside[count:],
        opset_imports=imports | {"test": 1},
        name="main",
    )
    whole = ir.Model(main, ir_version=model.ir_version, functions=[*model.functions.values(), body])
    path = save_model(whole, tmp_path / "model.onnx")
    assert map_file(path, tmp_path / "mapped.onnx").mapped == 2
    report = compare(tmp_path / "mapped.onnx", source)
    assert report.notes == ("the graph before mapping is 'model.onnx' beside it",)
    assert [tail.passed for tail in report.tails] == [True, True]
    assert report.passed


def function(
    name: str, nodes: list[ir.Node], given: list[ir.Value], *, overload: str = "", defaults: tuple[ir.Attr, ...] = ()
) -> ir.Function:
    graph = ir.Graph(given, [nodes[-1].outputs[0]], nodes=nodes, opset_imports={"": 22, "test": 1}, name=name)
    return ir.Function("test", name, overload, graph=graph, attributes=defaults)


def scaled(kind: str, *, overload: str = "") -> ir.Function:
    """``x`` times a constant that the call's attribute ``factor`` gives."""
    x = ir.val("x")
    types = {"value_float": ir.AttributeType.FLOAT, "value": ir.AttributeType.TENSOR}
    constant = ir.Node("", "Constant", [], [ir.RefAttr(kind, "factor", types[kind])])
    product = ir.node("Mul", [x, constant.outputs[0]])
    default = ir.Attr("factor", types[kind], 3.0 if kind == "value_float" else None)
    return function("Scaled", [constant, product], [x], overload=overload, defaults=(default,))


def called(functions: list[ir.Function], calls: list[tuple[str, str, list[ir.Attr]]], dtype: ir.DataType) -> ir.Model:
    """A graph that calls each in turn on its input ``x`` [3]: its outputs are ``y0``, ``y1`` and so on."""
    x = ir.val("x", dtype, [3])
    nodes = []
    for place, (name, overload, attributes) in enumerate(calls):
        node = ir.Node("test", name, [x], attributes, overload=overload, name=f"call{place}")
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = f"y{place}", dtype, ir.Shape([3])
        nodes.append(node)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 22, "test": 1}, name="main")
    return ir.Model(graph, ir_version=10, functions=functions)


def in_float64(model: ir.Model, name: str, x: torch.Tensor) -> torch.Tensor:
    return evaluate(model, [name], {"x": x}, wider=WIDER)[name]


X = torch.tensor([0.1, -2.0, 3.0], dtype=torch.float64)
FACTOR = float(np.float32(0.7))


def test_case_37_evaluating_one_value_leaves_the_other_functions_alone() -> None:
    """Overloads of one function, given an attribute or its default: each as often as it is asked for."""
    factor = ir.AttrFloat32("factor", 0.7)
    model = called(
        [scaled("value_float"), scaled("value_float", overload="other")],
        [("Scaled", "", [factor]), ("Scaled", "other", [factor]), ("Scaled", "", [])],
        ir.DataType.FLOAT,
    )
    before = str(ir.to_proto(model))
    for _ in range(2):
        for name, wanted in (("y0", FACTOR), ("y1", FACTOR), ("y2", 3.0)):
            assert torch.equal(in_float64(model, name, X), X * wanted)
    assert str(ir.to_proto(model)) == before


def test_case_37_functions_that_call_functions_are_left_alone() -> None:
    x = ir.val("x")
    inner = ir.Node("test", "Scaled", [x], [ir.RefAttr("factor", "outer", ir.AttributeType.FLOAT)])
    twice = ir.node("Add", [inner.outputs[0], x])
    outer = function("Outer", [inner, twice], [x], defaults=(ir.Attr("outer", ir.AttributeType.FLOAT, None),))
    model = called(
        [scaled("value_float"), outer],
        [("Scaled", "", [ir.AttrFloat32("factor", 2.0)]), ("Outer", "", [ir.AttrFloat32("outer", 0.7)])],
        ir.DataType.FLOAT,
    )
    before = str(ir.to_proto(model))
    # y0 alone calls Scaled: Outer is not needed, and what it refers to stays.
    assert torch.equal(in_float64(model, "y0", X), X * 2)
    assert torch.equal(in_float64(model, "y1", X), X * FACTOR + X)
    assert str(ir.to_proto(model)) == before


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_case_37_a_twin_resolves_what_a_function_refers_to(tmp_path: Path, dtype: ir.DataType) -> None:
    """A tensor, and the type that a Cast names, are 16 bits at the call: nothing is left of them in the twin."""
    x = ir.val("x")
    cast = ir.Node("", "Cast", [x], [ir.RefAttr("to", "kind", ir.AttributeType.INT)])
    square = ir.node("Mul", [cast.outputs[0], cast.outputs[0]])
    squared = function("Squared", [cast, square], [x], defaults=(ir.Attr("kind", ir.AttributeType.INT, None),))
    factor = ir.AttrTensor("factor", ir.tensor(np.array([0.75], dtype.numpy())))
    model = called(
        [scaled("value"), squared],
        [("Scaled", "", [factor]), ("Squared", "", [ir.AttrInt64("kind", dtype)])],
        dtype,
    )
    before = str(ir.to_proto(model))
    twin = float32_twin(model.clone())
    # The clone shared its functions' attributes with the model.
    assert str(ir.to_proto(model)) == before
    x32 = X.float()
    result = side_by_side([OrtRunner(session_of(twin, tmp_path / "twin.onnx", "the twin"), name="twin")], {"x": x32})
    assert torch.equal(result["twin"]["y0"], x32 * 0.75)
    assert torch.equal(result["twin"]["y1"], x32 * x32)


def test_functions_that_cannot_be_put_in_their_places_are_named() -> None:
    """An opset of its own is taken by no inliner: one line says so."""
    odd = scaled("value_float")
    odd.opset_imports[""] = 21
    model = called([odd], [("Scaled", "", [])], ir.DataType.FLOAT)
    with pytest.raises(InputError, match="Opset mismatch when inlining"):
        in_float64(model, "y0", X)
