"""Inspection says what each reader runs, and warns of what will surprise."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper

from moetrt.cli import cli
from moetrt.errors import InputError
from moetrt.inspection import (
    ONNX_RUNTIME,
    TENSORRT_ALONE,
    TENSORRT_PLUGIN,
    Inspection,
    inspect_file,
    spelling_differences,
)
from moetrt.mapping import TAILS_EXPECTED, map_model
from moetrt.onnx_files import save_model
from moetrt.onnx_op import operator_of
from tests.mapping_graphs import HIDDEN, Graph, NormForm, full_tail


def inspected(model: ir.Model, folder: Path) -> Inspection:
    return inspect_file(save_model(model, folder / "model.onnx"))


def mapped_model(*, function: bool = True) -> ir.Model:
    model = full_tail().model()
    model.metadata_props[TAILS_EXPECTED] = "1"
    map_model(model, function=function)
    return model


def the_node(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if operator_of(node))


def test_mapped_file(tmp_path: Path) -> None:
    found = inspected(mapped_model(), tmp_path)
    assert found.warnings == []
    assert found.readers == {
        ONNX_RUNTIME: "the function body",
        TENSORRT_PLUGIN: "the plugin",
        TENSORRT_ALONE: "the function body, as native layers",
    }
    assert found.expected == 1
    tail = found.tails[0]
    assert (tail.operator, tail.dtype, tail.plugin_version, tail.plugin_namespace) == (
        "MoEFinalizeAddRMSNorm",
        "FLOAT",
        "1",
        "moetrt",
    )
    assert tail.attributes["eps"] == pytest.approx(1e-5)
    assert tail.inputs["residual"] == {"value": "residual", "dtype": "FLOAT", "shape": ["B", "S", HIDDEN]}
    assert list(tail.outputs) == ["norm_out", "residual_out"]
    json.dumps(found.as_dict())
    text = "\n".join(found.lines())
    assert "routed_scaling_factor=2.5" in text
    assert "in  gamma: FLOAT [16]" in text


def test_bfloat16_file(tmp_path: Path) -> None:
    model = full_tail(NormForm(up=True, down="before"), dtype="bfloat16").model()
    map_model(model)
    found = inspected(model, tmp_path)
    assert found.tails[0].dtype == "BFLOAT16"
    assert "no bfloat16 arithmetic for the rest of the model" in found.readers[ONNX_RUNTIME]


def test_file_without_functions(tmp_path: Path) -> None:
    found = inspected(mapped_model(function=False), tmp_path)
    assert found.readers[TENSORRT_PLUGIN] == "the plugin"
    assert found.readers[ONNX_RUNTIME].startswith("cannot run it")
    assert found.readers[TENSORRT_ALONE].startswith("cannot run it")
    assert any("(--no-function)" in warning for warning in found.warnings)


@pytest.mark.parametrize("missing", [["plugin_version"], ["plugin_namespace"], ["plugin_version", "plugin_namespace"]])
def test_case30_function_without_plugin_attributes(tmp_path: Path, missing: list[str]) -> None:
    model = mapped_model()
    for name in missing:
        del the_node(model).attributes[name]
    found = inspected(model, tmp_path)
    assert len(found.warnings) == 1
    if "plugin_namespace" in missing:
        assert f"has a function but no {' and no '.join(missing)}: TensorRT will run the function" in found.warnings[0]
        assert found.readers[TENSORRT_PLUGIN] == "the plugin for 0 nodes, the function body for 1"
    else:
        assert "has no plugin_version; moetrt map writes both" in found.warnings[0]
        assert found.readers[TENSORRT_PLUGIN] == "the plugin"


def test_case30_function_of_the_same_name_in_another_domain(tmp_path: Path) -> None:
    proto = ir.to_proto(mapped_model(function=False))
    proto.functions.append(
        helper.make_function(
            "other", "MoEFinalizeAddRMSNorm", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])],
            [helper.make_opsetid("", 22)],
        )
    )  # fmt: skip
    proto.opset_import.append(helper.make_opsetid("other", 1))
    found = inspected(ir.from_proto(proto), tmp_path)
    assert any("is in the domain 'other': TensorRT finds functions by name alone" in w for w in found.warnings)


def test_overloads_need_the_plugin(tmp_path: Path) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    hidden = g.add(hidden, NormForm().write(g, hidden, rank=2))
    hidden = g.add(g.add(g.routed(), g.input("shared", ["T", HIDDEN])), hidden)
    g.output(NormForm().write(g, hidden, rank=2))
    model = g.model()
    map_model(model)
    found = inspected(model, tmp_path)
    assert found.readers[TENSORRT_ALONE].startswith("cannot run it")
    assert found.readers[TENSORRT_PLUGIN] == "the plugin"
    assert found.readers[ONNX_RUNTIME] == "the function body"
    assert any("one overload an input list: TensorRT needs the plugin" in warning for warning in found.warnings)


def set_text(name: str, value: str) -> Callable[[ir.Node], None]:
    def change(node: ir.Node) -> None:
        node.attributes[name] = ir.AttrString(name, value)

    return change


def set_op(op_type: str) -> Callable[[ir.Node], None]:
    def change(node: ir.Node) -> None:
        node.op_type = op_type

    return change


def set_domain(domain: str) -> Callable[[ir.Node], None]:
    def change(node: ir.Node) -> None:
        node.domain = domain

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_op("MoEFinalizeAddRmsNorm"), "op was 'MoEFinalizeAddRmsNorm'; 'MoEFinalizeAddRMSNorm' is taken"),
        (set_op("MoeFinalizeAddRMSNorm"), "op was 'MoeFinalizeAddRMSNorm'; 'MoEFinalizeAddRMSNorm' is taken"),
        (set_op("FinalizeAdd"), "op was 'FinalizeAdd'; 'MoEFinalizeAdd' is taken"),
        (set_op("Gelu"), "op was 'Gelu'; MoEFinalizeAddRMSNorm or MoEFinalizeAdd is taken"),
        (set_domain("trt.plugins"), "domain was 'trt.plugins'; 'moetrt' is taken"),
        (set_domain("Moetrt"), "domain was 'Moetrt'; 'moetrt' is taken"),
        (set_domain(""), "domain was ''; 'moetrt' is taken"),
        (set_text("plugin_version", "2"), "plugin_version was '2'; '1' is taken"),
        (set_text("plugin_namespace", ""), "plugin_namespace was ''; 'moetrt' is taken"),
    ],
)
def test_case29_one_thing_wrong_at_a_time(change: Callable[[ir.Node], None], words: str) -> None:
    node = the_node(mapped_model())
    assert spelling_differences(node) == []
    change(node)
    differences = spelling_differences(node)
    assert len(differences) == 1
    assert words in differences[0]
    assert f"node '{node.name}'" in differences[0]


def test_case29_two_things_wrong_are_both_named(tmp_path: Path) -> None:
    model = mapped_model()
    set_domain("moe_trt")(the_node(model))
    node = next(node for node in model.graph if node.domain == "moe_trt")
    set_text("plugin_version", "1.0")(node)
    model.graph.opset_imports["moe_trt"] = 1
    found = inspected(model, tmp_path)
    assert found.tails == []
    assert sum("is taken" in warning for warning in found.warnings) == 2


def test_other_nodes_are_no_near_misses() -> None:
    for op_type, domain in (("Add", ""), ("FusedMoE", "com.microsoft"), ("RMSNorm", "vllm"), ("MoE", "com.microsoft")):
        assert spelling_differences(ir.node(op_type, [], domain=domain)) == []


def test_unmapped_and_unmatched_tails_are_named(tmp_path: Path) -> None:
    found = inspected(full_tail().model(), tmp_path)
    assert any("is not mapped yet: moetrt map makes it MoEFinalizeAddRMSNorm" in warning for warning in found.warnings)
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    g.output(g.op("LayerNormalization", hidden, g.vector(1), g.vector(2)), hidden)
    model = g.model()
    model.metadata_props[TAILS_EXPECTED] = "2"
    map_model(model)
    found = inspected(model, tmp_path)
    assert any("is MoEFinalizeAdd without its norm: LayerNormalization" in warning for warning in found.warnings)
    assert "2 tails are expected, but 1 are found" in found.warnings


def test_operands_that_are_not_taken(tmp_path: Path) -> None:
    """A map of int64, and flags that do not fit the inputs."""
    proto = ir.to_proto(mapped_model())
    index = next(value for value in proto.graph.input if value.name == "map")
    index.type.tensor_type.elem_type = onnx.TensorProto.INT64
    found = inspected(ir.from_proto(proto), tmp_path)
    assert any("input expanded_idx_to_permuted_idx was int64; int32 is taken" in warning for warning in found.warnings)
    model = mapped_model()
    the_node(model).attributes["has_shared_output"] = ir.AttrInt64("has_shared_output", 0)
    found = inspected(model, tmp_path)
    assert any("its inputs were" in warning for warning in found.warnings)


def test_unsorted_topk(tmp_path: Path) -> None:
    g = full_tail()
    g.output(g.op("TopK", "weights", g.ints(2), sorted=0, count=2))
    found = inspected(g.model(), tmp_path)
    assert any("TopK nodes have sorted=0" in warning for warning in found.warnings)


def test_model_without_moe_and_bad_files(tmp_path: Path) -> None:
    g = Graph()
    g.output(g.op("Neg", g.input("residual", ["T", HIDDEN])))
    found = inspected(g.model(), tmp_path)
    assert (found.tails, found.readers, found.warnings) == ([], {}, [])
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(InputError, match="is not an ONNX model"):
        inspect_file(tmp_path / "text.onnx")


def set_attribute(attribute: ir.Attr) -> ir.Model:
    model = mapped_model()
    the_node(model).attributes[attribute.name] = attribute
    return model


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (ir.AttrInt64("eps", 1), "attribute eps was 1, INT; FLOAT is taken"),
        (ir.AttrFloat32("weight_before_cast", 1.0), "attribute weight_before_cast was 1.0, FLOAT; INT is taken"),
        (ir.AttrFloat32("has_residual", 1.0), "attribute has_residual was 1.0, FLOAT; INT is taken"),
        (ir.AttrFloat32("weight_bias", 2.0), "attribute weight_bias was 2.0; 0 or 1 is taken"),
        (ir.AttrInt64("has_residual", 2), "attribute has_residual was 2; 0 or 1 is taken"),
        (
            ir.AttrFloat32("epsilon", 1e-6),
            "attribute epsilon is unknown; taken are apply_expert_weights, combine_scale",
        ),
    ],
)
def test_attributes_that_the_plugin_refuses_are_named_once(tmp_path: Path, attribute: ir.Attr, words: str) -> None:
    model = set_attribute(attribute)
    found = inspected(model, tmp_path)
    assert found.refused == 1
    said = [warning for warning in found.warnings if words in warning]
    assert len(said) == 1
    assert said[0].startswith(f"node '{the_node(model).name}' (MoEFinalizeAddRMSNorm): ")
    assert len(found.warnings) == 1
    with pytest.raises(ValueError if "unknown" in words or "0 or 1" in words else TypeError, match=words):
        map_model(model)


def test_inspect_of_a_refused_node_falls_short(tmp_path: Path) -> None:
    save_model(set_attribute(ir.AttrInt64("eps", 1)), tmp_path / "model.onnx")
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "model.onnx")])
    assert done.exit_code == 1
    assert done.output.count("attribute eps was 1, INT; FLOAT is taken") == 1
    assert "the plugin refuses 1 of the 1 nodes in" in str(done.exception)


def test_every_site_of_an_unmapped_file_is_listed(tmp_path: Path) -> None:
    """Names of the nodes that would go in and of the one that would come out, form, attributes, dtype and reason."""
    g = Graph()
    hidden = g.add(g.mul(g.routed(), g.const(2.5)), g.input("residual", ["T", HIDDEN]))
    hidden = g.add(hidden, NormForm().write(g, hidden, eps=3e-5, rank=2))
    hidden = g.add(g.routed(), hidden)
    g.output(g.op("LayerNormalization", hidden, g.vector(1), g.vector(2)), hidden)
    first, second = inspected(g.model(), tmp_path).sites
    assert (first.operator, first.matched, first.form, first.dtype) == (
        "MoEFinalizeAddRMSNorm", True, "finalize node", "FLOAT"
    )  # fmt: skip
    assert first.name == "node_moefinalizeadd_0/MoEFinalizeAddRMSNorm"
    assert first.nodes == [node.name for node in g.nodes[:10]]
    assert first.attributes["eps"] == 3e-5
    assert first.attributes["routed_scaling_factor"] == 2.5
    assert first.inputs["residual"]["value"] == "residual"
    assert first.outputs["residual_out"]["value"] == "add_2"
    assert (second.operator, second.matched) == ("MoEFinalizeAdd", False)
    assert second.reason is not None
    assert "LayerNorm, not RMSNorm" in second.reason
    found = inspected(g.model(), tmp_path)
    text = "\n".join(found.lines())
    assert (
        f"{g.nodes[0].name}: MoEFinalizeAdd, FLOAT; moetrt map: MoEFinalizeAddRMSNorm\n    nodes: {g.nodes[0].name}, "
        in text
    )
    last = next(node.name for node in reversed(g.nodes) if node.op_type == "MoEFinalizeAdd")
    assert f"{last}: MoEFinalizeAdd, FLOAT; moetrt map: MoEFinalizeAdd without its norm: LayerNorm" in text
    assert text.count("moetrt map: ") == 2  # case 43: each is listed once
    assert "finalize node" not in text
    assert "    out residual_out: FLOAT [T, 16] (add_2)" in text
    written = json.loads(json.dumps(found.as_dict()))["sites"]
    assert [site["dtype"] for site in written] == ["FLOAT", "FLOAT"]
    assert written[0]["nodes"] == first.nodes


def test_site_that_cannot_be_mapped_says_what_was_found(tmp_path: Path) -> None:
    """Rows times weights summed in float32 over half rows, and no cast back: the values are named all the same."""
    g = Graph("float16")
    g.routed()
    g.nodes.clear()
    g.values.clear()
    zero = g.const(0.0)
    index = g.op("Max", "map", g.const(0, onnx.TensorProto.INT32))
    routes = g.op("Gather", "rows", index, axis=0)
    kept = g.op("GreaterOrEqual", "map", g.const(0, onnx.TensorProto.INT32))
    routes = g.op("Where", g.op("Unsqueeze", kept, g.ints(-1)), routes, zero)
    weighted = g.op("Mul", g.cast(routes, "float32"), g.op("Unsqueeze", "weights", g.ints(-1)))
    g.output(g.op("ReduceSum", weighted, g.ints(1), keepdims=0))
    (site,) = inspected(g.model(), tmp_path).sites
    assert (site.operator, site.matched, site.form, site.dtype) == (None, False, "gather", "FLOAT16")
    assert site.reason is not None
    assert "stays FLOAT while the rows are FLOAT16: cast it to the rows' dtype" in site.reason
    assert {name: entry["value"] for name, entry in site.inputs.items()} == {
        "gemm2_permuted": "rows",
        "expert_weights": "weights",
        "expanded_idx_to_permuted_idx": "map",
    }
    assert site.attributes == {"routed_scaling_factor": 1.0, "apply_expert_weights": 1}
    assert site.outputs["hidden"]["dtype"] == "FLOAT"


def test_standard_operators_by_their_other_name(tmp_path: Path) -> None:
    proto = ir.to_proto(mapped_model())
    for opset in (*proto.opset_import, *proto.functions[0].opset_import):
        opset.domain = opset.domain or "ai.onnx"
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    found = inspect_file(tmp_path / "model.onnx")
    assert found.opset == 22
    assert found.warnings == []
