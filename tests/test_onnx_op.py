"""The node, the function and the translations: ONNX Runtime runs the function, the reference says what is right."""

from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moetrt
from moetrt import onnx_op
from moetrt.reference import operand, reference
from moetrt.spec import DOMAIN, FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OPERATORS, Operand
from tests.operator_cases import Case, make_case, random_cases

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One rounding to the dtype may fall the other way where the two sums differ in the last bit of float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def ort_value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    if tensor.dtype == torch.bfloat16:
        array = tensor.contiguous().view(torch.uint16).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


def run_in_onnxruntime(model: ir.Model, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Runs a model whose bfloat16 outputs get a Cast to float32 first, which loses nothing."""
    proto = ir.to_proto(model)
    dtype = tensors["gemm2_permuted"].dtype
    for output in proto.graph.output:
        proto.graph.node.append(onnx.helper.make_node("Cast", [output.name], [f"{output.name}_f32"], to=1))
        output.name = f"{output.name}_f32"
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = session.run_with_ort_values(None, {name: ort_value(tensor) for name, tensor in tensors.items()})
    return [torch.from_numpy(np.array(output.numpy())).to(dtype) for output in outputs]


def model_of(case: Case, *, opset: int = 22, dynamic: bool = False) -> ir.Model:
    operands = {name: operand(tensor) for name, tensor in case.tensors.items()}
    if dynamic:
        operands = {
            name: entry
            if name == "gamma"
            else Operand(entry.dtype, [*[None] * (len(entry.shape) - 1), entry.shape[-1]])
            for name, entry in operands.items()
        }
    return onnx_op.make_model(case.spec, operands, case.attributes, opset=opset)


def check(case: Case, **options: object) -> None:
    got = run_in_onnxruntime(model_of(case, **options), case.tensors)
    dtype = case.tensors["gemm2_permuted"].dtype
    wanted = reference(case.spec, case.tensors, case.attributes)
    for output, expected in zip(got, wanted, strict=True):
        assert output.shape == expected.shape
        torch.testing.assert_close(
            output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True, check_dtype=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opset", [17, 18, 20, 22, 23])
@pytest.mark.parametrize("norm", [True, False])
def test_the_function_runs_at_every_opset(dtype: torch.dtype, opset: int, norm: bool) -> None:
    check(make_case(dtype=dtype, norm=norm, gate=True, leading=(2, 3), rows=20, stride=12), opset=opset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_before_cast", [True, False])
@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
def test_case13_14_15_the_norms_forms(dtype: torch.dtype, weight_before_cast: bool, weight_bias: float) -> None:
    for gamma_dtype in (dtype, torch.float32):
        attributes = {"weight_before_cast": weight_before_cast, "weight_bias": weight_bias, "eps": 1e-3}
        check(make_case(dtype=dtype, gamma_dtype=gamma_dtype, residual_scale=0.5, combine_scale=0.3, **attributes))


@pytest.mark.parametrize("entry", [20, 21, 2**31 - 1, -2])
def test_case08_map_entries_outside(entry: int) -> None:
    case = make_case(rows=20)
    case.tensors["expanded_idx_to_permuted_idx"][2, 1] = entry
    check(case)


def test_case05_06_weights_ignored_and_rows_not_named() -> None:
    case = make_case(rows=40, apply_expert_weights=False, absent=0.5)
    case.tensors["expert_weights"][:] = float("nan")
    check(case)


@settings(deadline=None, max_examples=100)
@given(case=random_cases(), dynamic=st.booleans())
def test_the_function_is_the_reference(case: Case, dynamic: bool) -> None:
    check(case, dynamic=dynamic)


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)
def test_the_model_passes_the_checker_and_strict_shape_inference(spec: object, tmp_path: Path) -> None:
    case = make_case(norm=spec is FINALIZE_ADD_RMS_NORM, gate=True)
    proto = ir.to_proto(model_of(case, dynamic=True))
    onnx.checker.check_model(proto, full_check=True)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    for output in inferred.graph.output:
        assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        assert output.type.tensor_type.HasField("shape")


def test_a_node_writes_every_attribute() -> None:
    case = make_case()
    operands = {name: operand(tensor) for name, tensor in case.tensors.items()}
    model = onnx_op.make_model(case.spec, operands, {"eps": 1e-5})
    node = next(iter(model.graph))
    assert [value.name for value in node.inputs] == list(case.tensors)
    assert set(node.attributes) == {
        *(entry.name for entry in case.spec.all_attributes),
        "plugin_version",
        "plugin_namespace",
    }
    assert node.attributes["plugin_version"].as_string() == "1"
    assert node.attributes["plugin_namespace"].as_string() == node.domain == DOMAIN
    assert onnx_op.named_inputs(node).keys() == case.tensors.keys()
    read = onnx_op.read_attributes(node)
    assert read.keys() == {entry.name for entry in case.spec.attributes}
    assert read["eps"] == pytest.approx(1e-5)


def test_input_lists_that_differ_get_an_overload_each() -> None:
    rows = ir.Value(name="rows", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([18, 8]))
    weights = ir.Value(name="weights", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([6, 3]))
    shared = ir.Value(name="shared", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([6, 8]))
    common = {"gemm2_permuted": rows, "expert_weights": weights}
    nodes = [
        onnx_op.make_node(FINALIZE_ADD, common, {}, name="plain"),
        onnx_op.make_node(FINALIZE_ADD, common | {"shared_output": shared}, {}, name="with_shared"),
    ]
    for node in nodes:
        node.outputs[0].name, node.outputs[0].shape = node.name, ir.Shape([6, 8])
    graph = ir.Graph(
        [rows, weights, shared],
        [node.outputs[0] for node in nodes],
        nodes=nodes,
        opset_imports={"": 22, DOMAIN: 1},
        name="two",
    )
    model = ir.Model(graph, ir_version=9)
    onnx_op.attach_functions(model)
    assert len({node.overload for node in nodes}) == 2
    assert {key[2] for key in model.functions} == {node.overload for node in nodes}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    tensors = {"rows": torch.randn(18, 8), "weights": torch.rand(6, 3), "shared": torch.randn(6, 8)}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    plain, added = session.run(None, {name: tensor.numpy() for name, tensor in tensors.items()})
    np.testing.assert_allclose(added - plain, tensors["shared"].numpy(), atol=1e-5)
    # Attaching again changes nothing, and a lone input list has no overload.
    onnx_op.attach_functions(model)
    assert len(model.functions) == 2
    onnx_op.remove_functions(model)
    assert not model.functions


def test_a_node_that_the_operator_does_not_take_is_refused() -> None:
    case = make_case()
    operands = {name: operand(tensor) for name, tensor in case.tensors.items()}
    operands["expanded_idx_to_permuted_idx"] = Operand("int64", (6, 3))
    with pytest.raises(TypeError, match="expanded_idx_to_permuted_idx was int64; int32 is taken"):
        onnx_op.make_model(case.spec, operands, {})
    index = ir.Value(name="map", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([6, 3]))
    rows = ir.Value(name="rows", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([18, 8]))
    weights = ir.Value(name="weights", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([6, 3]))
    inputs = {"gemm2_permuted": rows, "expert_weights": weights, "expanded_idx_to_permuted_idx": index}
    with pytest.raises(TypeError, match=r"node 'tail' \(MoEFinalizeAdd\).*was int64; int32 is taken"):
        onnx_op.make_node(FINALIZE_ADD, inputs, {}, name="tail")


class ContractTail(torch.nn.Module):
    """A tail written with the functional front."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(case.tensors["gamma"])
        self.attributes = {name: value for name, value in case.attributes.items() if name != "routed_scaling_factor"}
        self.factor = case.attributes["routed_scaling_factor"]

    def forward(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        index: torch.Tensor,
        shared: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        moe_output = moetrt.MoEOutput(moetrt.UnfinalizedMoEOutput(rows, weights, index), shared, self.factor)
        return moetrt.finalize_add_rms_norm(moe_output, residual, self.gamma, **self.attributes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_onnx_writes_the_node(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, routed_scaling_factor=2.5, eps=1e-5, weight_before_cast=False)
    names = [name for name in case.tensors if name != "gamma"]
    program = torch.onnx.export(
        ContractTail(case).eval(),
        tuple(case.tensors[name] for name in names),
        dynamo=True,
        verbose=False,
        opset_version=22,
        input_names=names,
        custom_translation_table=onnx_op.translation_table(),
        dynamic_shapes=tuple({0: torch.export.Dim.DYNAMIC} for _ in names),
    )
    model = program.model
    nodes = [node for node in model.graph if onnx_op.operator_of(node)]
    assert [node.op_type for node in nodes] == ["MoEFinalizeAddRMSNorm"]
    wanted = FINALIZE_ADD_RMS_NORM.complete(case.attributes)
    assert onnx_op.read_attributes(nodes[0]) == pytest.approx(wanted, rel=1e-6)
    assert list(onnx_op.named_inputs(nodes[0])) == list(case.tensors)
    assert nodes[0].attributes["plugin_version"].as_string() == "1"
    onnx_op.attach_functions(model)
    outputs = run_in_onnxruntime(model, {name: case.tensors[name] for name in names})
    for output, expected in zip(outputs, reference(case.spec, case.tensors, case.attributes), strict=True):
        torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
