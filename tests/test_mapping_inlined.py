"""A mapped file that another tool optimised has the operators' bodies inlined: it is mapped again, to the same."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch

from moetrt.mapping import map_model
from moetrt.onnx_op import operator_of
from tests.equivalence import run_model
from tests.foreign_graphs import by_onnxruntime, by_onnxscript, export_form, inputs_of
from tests.mapping_graphs import Graph, NormForm

Inline = Callable[[onnx.ModelProto], onnx.ModelProto]

# onnxsim leaves the nodes and their functions.
INLINE: dict[str, Inline] = {"onnxruntime": by_onnxruntime, "onnxscript": by_onnxscript}

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


def test_columns_that_the_graph_cuts_by_an_unknown_width_are_named() -> None:
    """onnx's own inliner folds nothing: how many columns are summed is a Shape."""
    inlined = onnx.inliner.inline_local_functions(mapped(export_form(FORM, "dynamo")))
    report = map_model(ir.from_proto(inlined))
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
