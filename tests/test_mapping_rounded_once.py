"""Case 36: two terms added to the experts' sum in float32 and one rounding after them, where no RMSNorm follows."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from benchmarks.fuzz_compare import Session, feeds_of, in_float64
from moetrt.mapping import map_model
from moetrt.mapping_report import Site
from moetrt.onnx_op import attach_functions, named_inputs, operator_of
from tests.mapping_checks import mapped, only
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm

FLOAT = TensorProto.FLOAT
DTYPES = ["float16", "bfloat16"]


class Rounded:
    """A graph whose routed sum, shared and residual are added in float32; `hidden` rounds them once."""

    def __init__(self, dtype: str, *, gated: bool = False, captured: bool = False, residuals: int = 1) -> None:
        self.g = g = Graph(dtype)
        if captured:
            routed = g.cast(g.routed(), "float32")
        else:
            g.routed()
            g.nodes.pop()
            g.values.pop()
            zero = g.const(0, TensorProto.INT32)
            rows = g.cast(g.op("Gather", "rows", g.op("Max", "map", zero), axis=0), "float32")
            keep = g.op("Unsqueeze", g.op("GreaterOrEqual", "map", zero), g.ints(-1))
            kept = g.op("Where", keep, rows, g.const(0.0, FLOAT))
            weighted = g.mul(kept, g.op("Unsqueeze", "weights", g.ints(-1)))
            routed = g.op("ReduceSum", weighted, g.ints(1), keepdims=0)
        shared = g.cast(g.input("shared", ["T", HIDDEN]), "float32")
        if gated:
            shared = g.mul(g.op("Sigmoid", g.cast(g.input("gate", ["T", 1]), "float32")), shared)
        value = g.add(shared, routed)
        for number in range(residuals):
            value = g.add(g.cast(g.input(f"residual{number}", ["T", HIDDEN]), "float32"), value)
        self.hidden = g.cast(value, dtype)

    def wide(self) -> str:
        return self.g.cast(self.hidden, "float32")


def layer_norm(graph: Rounded) -> None:
    g = graph.g
    g.output(g.op("LayerNormalization", graph.wide(), g.vector(5, FLOAT), g.vector(6, FLOAT), axis=-1), graph.hidden)


def product(graph: Rounded) -> None:
    g = graph.g
    g.output(g.op("MatMul", graph.wide(), g.const(np.eye(HIDDEN)[:, :4], FLOAT)))


def layer_scale(graph: Rounded) -> None:
    graph.g.output(graph.g.mul(graph.wide(), graph.g.vector(5, FLOAT)))


def given_gamma(graph: Rounded) -> None:
    g = graph.g
    normal = NormForm(up=True).normalised(g, graph.hidden, rank=2)
    g.output(g.mul(normal, g.input("gamma", [HIDDEN], FLOAT)), graph.hidden)


def graph_output(graph: Rounded) -> None:
    graph.g.output(graph.hidden)


def third_reader(graph: Rounded) -> None:
    g = graph.g
    layer_norm(graph)
    g.output(g.op("Neg", graph.wide()))


def eps_of_each_column(graph: Rounded) -> None:
    g, wide = graph.g, graph.wide()
    mean = g.mean(g.op("Pow", wide, g.const(2.0, FLOAT)))
    root = g.op("Sqrt", g.add(mean, g.vector(7, FLOAT)))
    g.output(g.mul(g.op("Div", wide, root), g.vector(5, FLOAT)), graph.hidden)


def sum_of_squares(graph: Rounded) -> None:
    g, wide = graph.g, graph.wide()
    total = g.reduce("ReduceSum", g.op("Pow", wide, g.const(2.0, FLOAT)))
    root = g.op("Sqrt", g.add(total, g.const(1e-6, FLOAT)))
    g.output(g.mul(g.op("Div", wide, root), g.vector(5, FLOAT)), graph.hidden)


ENDS: list[Callable[[Rounded], None]] = [
    layer_norm,
    product,
    layer_scale,
    given_gamma,
    graph_output,
    third_reader,
    eps_of_each_column,
    sum_of_squares,
]


def proto_of(model: ir.Model) -> onnx.ModelProto:
    copy = model.clone()
    attach_functions(copy)
    return ir.to_proto(copy)


def check_errors(model: ir.Model, after: ir.Model, given: list[dict[str, np.ndarray]] | None = None) -> None:
    """Each output of the mapped model is as near to float64 as the model's own, for ``given`` or the fuzz's inputs."""
    original = proto_of(model)
    before, exact = Session(original), Session(in_float64(original))
    mapped_session = Session(proto_of(after))
    compared = 0
    drawn = [feeds.values for feeds in feeds_of(original, 0) if "NaN" not in feeds.what and "beyond" not in feeds.what]
    for values in given or drawn:
        first, second = before.run(values), mapped_session.run(values)
        wide = {name: value if value.dtype.kind == "i" else value.astype(float) for name, value in values.items()}
        right = exact.run(wide)
        assert first is not None
        assert second is not None
        assert right is not None
        for name, value in first.items():
            own, ours = (np.abs(of.astype(float) - right[name]) for of in (value, second[name]))
            scale = np.abs(right[name]).max(initial=0.0)
            # Sums of float32 in another order: a rounding to 16 bits may then go the other way, in few elements.
            assert np.linalg.norm(ours) <= 1.02 * np.linalg.norm(own) + 2.0**-22 * scale * np.sqrt(ours.size)
            compared += ours.size
    assert compared > 0


def checked(graph: Rounded) -> tuple[ir.Model, Site]:
    model = graph.g.model()
    after, report = mapped(model)
    check_errors(model, after)
    return after, only(report)


def node_of(model: ir.Model) -> ir.Node:
    (node,) = [node for node in model.graph if operator_of(node)]
    return node


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_case_36_the_second_term_stays_an_add(end: Callable[[Rounded], None], dtype: str, gated: bool) -> None:
    graph = Rounded(dtype, gated=gated)
    end(graph)
    after, site = checked(graph)
    assert site.operator == "MoEFinalizeAdd"
    assert "two terms are added in FLOAT" in (site.reason or "")
    given = named_inputs(node_of(after))
    assert given["gemm2_permuted"].dtype == given["shared_output"].dtype == ir.DataType.FLOAT
    assert ("shared_gate" in given) == gated
    # The residual is added to what the operator gives, and the rounding comes after it.
    (reader,) = [usage.node for usage in node_of(after).outputs[0].uses()]
    assert reader.op_type == "Add"
    assert [usage.node.op_type for usage in reader.outputs[0].uses()] == ["Cast"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_an_rms_norm_takes_both_terms(dtype: str) -> None:
    graph = Rounded(dtype)
    norm = NormForm(up=True, down="after", gamma_dtype="float32")
    graph.g.output(norm.write(graph.g, graph.hidden, rank=2), graph.hidden)
    after, site = checked(graph)
    assert site.operator == "MoEFinalizeAddRMSNorm", site.reason
    assert not any(node.op_type == "Add" for node in after.graph)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_of_two_residuals_none_is_dropped(dtype: str) -> None:
    """The sum stays in float32 at the third addition, where nothing is rounded yet: it is not mapped."""
    graph = Rounded(dtype, residuals=2)
    layer_norm(graph)
    _, site = checked(graph)
    assert site.operator is None
    assert "a third addition" in (site.reason or "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_what_export_wrote_keeps_its_own_rounding(dtype: str) -> None:
    """The MoEFinalizeAdd that is there rounds its sum; the two terms are added in float32 after that, as they were."""
    graph = Rounded(dtype, captured=True)
    layer_norm(graph)
    after, site = checked(graph)
    assert site.operator == "MoEFinalizeAdd"
    assert [node.op_type for node in after.graph].count("Add") == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_a_scale_before_the_rounding_stays_behind_the_add(dtype: str) -> None:
    graph = Rounded(dtype)
    cast = graph.g.nodes.pop()
    scaled = graph.g.mul(cast.input[0], graph.g.const(0.25, FLOAT))
    graph.hidden = graph.g.cast(scaled, dtype)
    layer_norm(graph)
    after, site = checked(graph)
    assert site.operator == "MoEFinalizeAdd"
    assert [node.op_type for node in after.graph if node.op_type in ("Add", "Mul")] == ["Add", "Mul"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_in_the_body_of_an_if(dtype: str) -> None:
    graph = Rounded(dtype)
    graph_output(graph)
    inner = graph.g.proto()
    body = onnx.GraphProto()
    body.CopyFrom(inner.graph)
    del body.input[:]
    condition = helper.make_tensor_value_info("condition", TensorProto.BOOL, [])
    both = [helper.make_attribute(name, body) for name in ("then_branch", "else_branch")]
    choice = helper.make_node("If", ["condition"], ["chosen"], name="choice")
    choice.attribute.extend(both)
    output = helper.make_tensor_value_info("chosen", inner.graph.output[0].type.tensor_type.elem_type, None)
    outer = helper.make_graph([choice], "outer", [condition, *inner.graph.input], [output])
    model = ir.from_proto(
        onnx.shape_inference.infer_shapes(
            helper.make_model(outer, opset_imports=inner.opset_import, ir_version=10), data_prop=True
        )
    )
    report = map_model(model)
    assert [site.operator for site in report.sites] == ["MoEFinalizeAdd"] * 2
    for branch in ("then_branch", "else_branch"):
        nodes = [node.op_type for node in model.graph[0].attributes[branch].as_graph()]
        assert [nodes.count(kind) for kind in ("MoEFinalizeAdd", "Add", "ReduceSum")] == [1, 1, 0]


class Module(torch.nn.Module):
    """The experts' rows are weighted and summed, and both terms added, in float32."""

    def forward(
        self,
        rows: torch.Tensor,
        map: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        picked = torch.where((map >= 0).unsqueeze(-1), rows[map.clamp(min=0)].float(), 0.0)
        routed = (picked * weights.unsqueeze(-1)).sum(1)
        return (residual.float() + (shared.float() + routed)).to(rows.dtype)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_36_as_torch_exports_it(dtype: torch.dtype, dynamo: bool) -> None:
    tokens, count = 6, 24
    inputs = {
        "rows": torch.randn(count, HIDDEN).to(dtype),
        "map": torch.randint(-1, count, (tokens, TOP_K)),
        "weights": torch.rand(tokens, TOP_K),
        "shared": torch.randn(tokens, HIDDEN).to(dtype),
        "residual": torch.randn(tokens, HIDDEN).to(dtype),
    }
    names = {name: "R" if name == "rows" else "T" for name in inputs}
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in names}
            program = torch.onnx.export(
                Module(),
                tuple(inputs.values()),
                input_names=list(inputs),
                dynamo=True,
                dynamic_shapes=dynamic,
                verbose=False,
            )
            assert program is not None
            proto = program.model_proto
        else:
            torch.onnx.export(
                Module(),
                tuple(inputs.values()),
                file,
                input_names=list(inputs),
                dynamo=False,
                dynamic_axes={name: {0: size} for name, size in names.items()},
            )
            proto = onnx.load_from_string(file.getvalue())
    model = ir.from_proto(proto)
    after, report = mapped(model)
    assert only(report).operator == "MoEFinalizeAdd"
    numpy = {
        name: value.view(torch.uint16).numpy().view(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
        if value.dtype == torch.bfloat16
        else value.numpy()
        for name, value in inputs.items()
    }
    check_errors(model, after, [numpy])
