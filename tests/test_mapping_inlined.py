"""A mapped file that another tool optimised has the operators' bodies inlined: it is mapped again, to the same."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper
import onnx_ir as ir
import pytest
import torch

from moetrt.mapping import inference_problem, map_model
from moetrt.onnx_op import make_model, named_inputs, operator_of
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, Operand, OperatorSpec
from tests.equivalence import run_model, seeded_inputs
from tests.foreign_graphs import by_onnxruntime, by_onnxscript, export_form, inputs_of
from tests.mapping_graphs import SIZES, TOP_K, Graph, NormForm

Inline = Callable[[onnx.ModelProto], onnx.ModelProto]

# onnxsim leaves the nodes and their functions.
INLINE: dict[str, Inline] = {
    "onnxruntime": by_onnxruntime,
    "onnxscript": by_onnxscript,
    "onnx": onnx.inliner.inline_local_functions,
}

FORM = "loop_over_k"
ATTRIBUTES = ("eps", "routed_scaling_factor", "combine_scale", "residual_scale", "weight_before_cast")


def mapped(model: onnx.ModelProto) -> onnx.ModelProto:
    once = ir.from_proto(model)
    assert map_model(once).complete
    return ir.to_proto(once)


def node_of(model: ir.Model) -> ir.Node:
    (node,) = (node for node in model.graph if operator_of(node))
    return node


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tool", INLINE)
def test_an_inlined_body_is_mapped_to_the_same_node(tool: str, dtype: torch.dtype) -> None:
    once = mapped(export_form(FORM, "dynamo", dtype))
    inlined = INLINE[tool](once)
    assert not inlined.functions
    assert "MoEFinalizeAddRMSNorm" not in {node.op_type for node in inlined.graph.node}
    again = ir.from_proto(inlined)
    report = map_model(again)
    assert report.complete, [site.became for site in report.sites]
    assert report.sites[0].dtype == ("FLOAT" if dtype == torch.float32 else "FLOAT16")
    first, second = node_of(ir.from_proto(once)), node_of(again)
    for name in ATTRIBUTES:
        if name != "weight_before_cast" or dtype == torch.float16:  # nothing is rounded in float32
            assert first.attributes[name].value == pytest.approx(second.attributes[name].value, rel=1e-6), name
    tensors = {name: tensor.numpy() for name, tensor in inputs_of(FORM, dtype, batch=3, seq=5, seed=1).items()}
    wanted = run_model(ir.from_proto(once), tensors)
    for name, value in run_model(again, tensors).items():
        # The same body on the same values.
        np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.parametrize("tool", INLINE)
@pytest.mark.parametrize("entry", [-2, 1000])
def test_entries_that_name_no_row_stay_as_they_were(tool: str, entry: int) -> None:
    """Below -1 the mask of the graph adds nothing; from R on the operator gives NaN."""
    once = mapped(export_form(FORM, "dynamo"))
    again = ir.from_proto(INLINE[tool](once))
    map_model(again)
    tensors = {name: tensor.numpy() for name, tensor in inputs_of(FORM).items()}
    tensors["index"][2, 0] = entry
    value, wanted = (run_model(model, tensors)["hidden"] for model in (again, ir.from_proto(once)))
    np.testing.assert_array_equal(value, wanted)
    tokens = np.isnan(value.reshape(-1, tensors["rows"].shape[-1])).any(axis=1).tolist()
    assert tokens == [entry > 0 and token == 2 for token in range(len(tokens))]


def clamped_before() -> onnx.ModelProto:
    """A graph whose map is clamped to 0, so that no row is dropped."""
    g = Graph()
    index = g.op("Max", g.input("map", ["T", TOP_K], onnx.TensorProto.INT64), g.const(0, onnx.TensorProto.INT64))
    picked = g.op("Gather", g.input("rows", ["R", HIDDEN]), index)
    products = g.mul(picked, g.op("Unsqueeze", g.input("weights", ["T", TOP_K]), g.ints(-1)))
    hidden = g.add(g.op("ReduceSum", products, g.ints(1), keepdims=0), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return g.proto()


@pytest.mark.parametrize("tool", INLINE)
def test_a_map_that_was_clamped_before_the_body_is_taken_as_it_is(tool: str) -> None:
    once = mapped(clamped_before())
    again = ir.from_proto(INLINE[tool](once))
    report = map_model(again)
    assert report.complete, [site.became for site in report.sites]
    count = SIZES["R"]
    feeds = seeded_inputs(ir.from_proto(once), SIZES, seed=0, ranges={"map": (0, count)})
    for entry in (-1, -2, 0, count - 1, count):
        feeds["map"][1, 0] = entry
        got, wanted = (run_model(model, feeds) for model in (again, ir.from_proto(once)))
        for name, value in got.items():
            np.testing.assert_array_equal(value, wanted[name])
            assert np.isnan(value[1]).all() == (entry == count)


def scaled(dtype: str) -> onnx.ModelProto:
    """A tail whose experts' sum is scaled."""
    g = Graph(dtype)
    value = g.routed(routed_scaling_factor=2.5)
    hidden = g.add(value, g.input("residual", ["T", 16]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return ir.to_proto(g.model())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tool", INLINE)
def test_the_scale_of_an_inlined_body_is_found(tool: str, dtype: str) -> None:
    once = mapped(scaled(dtype))
    again = ir.from_proto(INLINE[tool](once))
    report = map_model(again)
    assert report.complete, [site.became for site in report.sites]
    assert report.sites[0].attributes["routed_scaling_factor"] == 2.5


INPUTS: dict[str, list[str]] = {
    "all": ["expanded_idx_to_permuted_idx", "shared_output", "shared_gate", "residual"],
    "map and residual": ["expanded_idx_to_permuted_idx", "residual"],
    "map": ["expanded_idx_to_permuted_idx"],
    "shared and residual": ["shared_output", "shared_gate", "residual"],
    "residual": ["residual"],
}
"""The optional inputs of an operator."""
TOKENS, ROWS, HIDDEN = 6, 18, 16


def alone(spec: OperatorSpec, names: list[str], dtype: str, leading: int = 1, named: bool = True) -> ir.Model:
    """One operator with its function, gamma stored; not ``named``: each input has a name of its own for T."""
    shapes = {
        "gemm2_permuted": (dtype, [None, HIDDEN]),
        "expert_weights": ("float32", [None, 3]),
        "expanded_idx_to_permuted_idx": ("int32", [None, 3]),
        "shared_output": (dtype, [None, HIDDEN]),
        "shared_gate": (dtype, [None, 1]),
        "residual": (dtype, [None] * leading + [HIDDEN]),
        "gamma": ("float32", [HIDDEN]),
    }
    given = [entry.name for entry in spec.inputs if not entry.optional or entry.name in names]
    attributes = {"routed_scaling_factor": 2.5, "combine_scale": 0.5} | (
        {"residual_scale": 0.25, "weight_bias": 1.0, "eps": 1e-5} if spec == FINALIZE_ADD_RMS_NORM else {}
    )
    model = make_model(spec, {name: Operand(*shapes[name]) for name in given}, attributes)
    for value in list(model.graph.inputs):
        if value.name == "gamma":
            value.const_value = ir.tensor(np.linspace(-0.5, 0.5, HIDDEN, dtype=np.float32), name="gamma")
            model.graph.inputs.remove(value)
            model.graph.register_initializer(value)
        elif not named:
            assert value.shape is not None
            value.shape = ir.Shape([f"{value.name}_0" if size == "T" else size for size in value.shape])
    return model


def assert_mapped_back(before: ir.Model, tool: str, spec: OperatorSpec, names: list[str]) -> None:
    """The same operator with the same inputs, and the same numbers for every kind of entry."""
    inlined = INLINE[tool](ir.to_proto(before))
    assert not inlined.functions
    after = ir.from_proto(inlined)
    report = map_model(after)
    assert report.complete, [site.became for site in report.sites]
    node = node_of(after)
    assert (node.op_type, set(named_inputs(node)) >= set(names)) == (spec.name, True)
    assert inference_problem(after) is None
    sizes = {"R": ROWS, "residual_0": 2, "residual_1": 3}
    sizes |= {"T": TOKENS} | {f"{value.name}_0": TOKENS for value in before.graph.inputs if value.name != "residual"}
    if before.graph.inputs[-1].name == "residual" and len(before.graph.inputs[-1].shape or ()) == 2:
        sizes["residual_0"] = TOKENS
    given = seeded_inputs(before, sizes, ranges={"expanded_idx_to_permuted_idx": (-1, ROWS)})
    if "expanded_idx_to_permuted_idx" in given:
        given["expanded_idx_to_permuted_idx"][:5, 1] = [-2, -1, 0, ROWS - 1, ROWS]
        # What no entry names is never read.
        given["gemm2_permuted"][~np.isin(np.arange(ROWS), given["expanded_idx_to_permuted_idx"])] = np.nan
    wanted = run_model(before, given)
    for name, value in run_model(after, given).items():
        np.testing.assert_array_equal(value, wanted[name])
        tokens = np.isnan(value.reshape(TOKENS, -1)).any(axis=1).tolist()
        assert tokens == ([True, *[False] * 3, True, False] if "expanded_idx_to_permuted_idx" in given else [False] * 6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("tool", INLINE)
def test_an_operator_alone_is_mapped_back(tool: str, inputs: str, dtype: str) -> None:
    names = INPUTS[inputs]
    assert_mapped_back(alone(FINALIZE_ADD_RMS_NORM, names, dtype), tool, FINALIZE_ADD_RMS_NORM, names)


@pytest.mark.parametrize("tool", INLINE)
@pytest.mark.parametrize("inputs", ["all", "map and residual"])
def test_residuals_of_batch_and_sequence(tool: str, inputs: str) -> None:
    names = INPUTS[inputs]
    assert_mapped_back(alone(FINALIZE_ADD_RMS_NORM, names, "float16", leading=2), tool, FINALIZE_ADD_RMS_NORM, names)


@pytest.mark.parametrize("tool", INLINE)
def test_a_sum_alone_is_mapped_back(tool: str) -> None:
    names = INPUTS["all"][:-1]
    assert_mapped_back(alone(FINALIZE_ADD, names, "float16"), tool, FINALIZE_ADD, names)


@pytest.mark.parametrize("inputs", ["all", "map and residual"])
@pytest.mark.parametrize("tool", INLINE)
def test_the_body_says_that_its_inputs_have_as_many_tokens(tool: str, inputs: str) -> None:
    """Each input of the graph has a name of its own for T; elsewhere one of them might be 1 and be repeated."""
    names = INPUTS[inputs]
    model = alone(FINALIZE_ADD_RMS_NORM, names, "float32", named=False)
    assert_mapped_back(model, tool, FINALIZE_ADD_RMS_NORM, names)


def test_names_of_tokens_count_where_no_body_says_that_they_are_one() -> None:
    """The same with 0 in place of NaN: anybody's graph."""
    inlined = by_onnxscript(ir.to_proto(alone(FINALIZE_ADD_RMS_NORM, INPUTS["all"], "float32", named=False)))
    inlined.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0), "zero"))
    (total,) = (node for node in inlined.graph.node if node.op_type == "ReduceSum")
    (where,) = (node for node in inlined.graph.node if node.output[0] == total.input[0])
    where.input[2] = "zero"
    report = map_model(ir.from_proto(inlined))
    assert (report.found, report.mapped) == (1, 0)
    assert "give both the same name" in (report.sites[0].reason or "")


def test_columns_that_the_graph_cuts_by_an_unknown_width_are_named() -> None:
    """onnx's own inliner folds nothing: how many columns are summed is the Shape of what has no known width."""
    model = alone(FINALIZE_ADD, INPUTS["all"][:-1], "float32")
    for value in model.graph.inputs:
        if value.name == "shared_output":
            value.shape = ir.Shape(["T", "H"])
    report = map_model(ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model))))
    assert (report.found, report.mapped, report.complete) == (1, 0, False)
    assert "map the file before it is optimised" in (report.sites[0].reason or "")


@pytest.mark.parametrize("form", ["loop_over_k", "map_of_k_and_tokens", "dense_einsum"])
def test_a_float16_file_that_was_widened_for_a_cpu_is_named(form: str) -> None:
    """ONNX Runtime computes such a file in float32 throughout: the rounding of the sum is gone."""
    widened = by_onnxruntime(export_form(form, "dynamo", torch.float16))
    assert any("InsertedPrecisionFreeCast_" in name for node in widened.graph.node for name in node.output)
    report = map_model(ir.from_proto(widened))
    assert (report.found, report.mapped, report.complete) == (1, 0, False), [site.became for site in report.sites]
    assert "ONNX Runtime widened this file when it optimised it for a CPU" in (report.sites[0].reason or "")
    assert "map it before it is optimised" in (report.sites[0].reason or "")
