"""Polygraphy's `plugin` tool finds and replaces with ``plugins/`` what `moetrt map` maps."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import yaml
from onnx import helper

from moetrt.capture import export
from moetrt.engine import build_engine
from moetrt.mapping import map_file
from moetrt.onnx_op import attach_functions
from moetrt.source import load_source
from moetrt.spec import OPERATORS
from tests.equivalence import compare_models
from tests.mapping_graphs import HIDDEN, Graph, NormForm, feeds, full_tail

PLUGINS = Path(__file__).parents[1] / "plugins"
POLYGRAPHY = str(Path(sys.executable).with_name("polygraphy"))


def tool(*words: object, code: int = 0) -> str:
    """Runs `polygraphy plugin` with ``plugins/`` and returns what it printed; it must exit with ``code``."""
    command = [sys.executable, POLYGRAPHY, "plugin", *map(str, words), "--plugin-dir", str(PLUGINS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said


def matched(model: Path) -> dict[str, list[dict[str, Any]]]:
    """What `match` writes beside the model: the instances by operator."""
    tool("match", model)
    documents = list(yaml.safe_load_all(model.with_name("config.yaml").read_text()))
    assert all(document["name"] == document["op"] for document in documents)
    return {document["op"]: document["instances"] for document in documents}


def replaced(model: Path, *words: object) -> Path:
    output = model.with_name("replaced.onnx")
    said = tool("replace", model, "-o", output, *words)
    assert "not all instances" not in said
    return output


def plugin_nodes(path: Path) -> list[tuple[str, list[str], list[str], dict[str, Any]]]:
    nodes = [node for node in onnx.load(path, load_external_data=False).graph.node if node.domain == "moetrt"]
    return [
        (
            f"{node.op_type} {node.name}",
            list(node.input),
            list(node.output),
            {entry.name: helper.get_attribute_value(entry) for entry in node.attribute},
        )
        for node in nodes
    ]


def nodes(path: Path) -> list[tuple[str, list[str], list[str]]]:
    found = onnx.load(path, load_external_data=False).graph.node
    return [(node.op_type, list(node.input), list(node.output)) for node in found]


def assert_replaced_as_mapped(model: Path, tails: int) -> Path:
    """Both tools make the same graph: node for node, and every attribute of the plugin nodes."""
    mapped = model.with_name("mapped.onnx")
    map_file(model, mapped)
    found = matched(model)
    assert sum(len(instances) for instances in found.values()) == tails
    output = replaced(model)
    assert plugin_nodes(output) == plugin_nodes(mapped)
    assert sorted(nodes(output)) == sorted(nodes(mapped))
    onnx.checker.check_model(output, full_check=True)
    return output


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 as `moetrt export` writes it: three tails."""
    return export(load_source("moetrt.models:deepseek_v3"), tmp_path_factory.mktemp("deepseek")).model_path


def test_tails_of_an_exported_model(deepseek_v3: Path, plugin_library: Path) -> None:
    output = assert_replaced_as_mapped(deepseek_v3, 3)
    instances = matched(deepseek_v3)["MoEFinalizeAddRMSNorm"]
    for instance in instances:
        assert len(instance["inputs"]) == 5  # rows, weights, shared_output, residual, gamma; the map is the identity
        assert len(instance["outputs"]) == 2
        assert instance["attributes"]["eps"] == pytest.approx(1e-6)
        assert instance["attributes"]["plugin_version"] == "1"
        assert instance["attributes"]["plugin_namespace"] == "moetrt"
    inputs = {"input_ids": np.arange(10).reshape(2, 5)}
    compare_models(ir.load(deepseek_v3), ir.load(output), inputs)
    profiles = {"input_ids": ((1, 1), (1, 16), (4, 64))}
    engine = build_engine(output, output.with_suffix(".engine"), plugin_library=plugin_library, profiles=profiles)
    assert len(engine.plugin_layers) == 3


def test_list_counts_and_include_chooses(deepseek_v3: Path) -> None:
    said = tool("list", deepseek_v3)
    assert "'MoEFinalizeAddRMSNorm': 3" in said
    assert "'MoEFinalizeAdd': 0" in said
    assert "{'MoEFinalizeAdd': 0}" in tool("list", deepseek_v3, "--include", "MoEFinalizeAdd")
    assert "{'MoEFinalizeAdd': 0}" in tool("list", deepseek_v3, "--exclude", "MoEFinalizeAddRMSNorm")


def test_weights_may_stay_in_their_file(deepseek_v3: Path) -> None:
    """Without this option Polygraphy writes them into the model, which cannot be larger than 2 GB."""
    matched(deepseek_v3)
    output = replaced(deepseek_v3, "--ignore-external-data")
    assert output.stat().st_size < 1_000_000
    compare_models(ir.load(deepseek_v3), ir.load(output), {"input_ids": np.arange(10).reshape(2, 5)})


def test_some_of_the_tails_and_another_attribute(deepseek_v3: Path) -> None:
    instances = matched(deepseek_v3)["MoEFinalizeAddRMSNorm"]
    instances[1]["attributes"]["eps"] = 0.25
    del instances[2]
    config = deepseek_v3.with_name("edited.yaml")
    config.write_text(
        yaml.safe_dump({"name": "MoEFinalizeAddRMSNorm", "op": "MoEFinalizeAddRMSNorm"} | {"instances": instances})
    )
    output = replaced(deepseek_v3, "--config", config)
    found = plugin_nodes(output)
    assert [name.split()[0] for name, *_ in found] == ["MoEFinalizeAddRMSNorm"] * 2 + ["MoEFinalizeAdd"]
    assert found[1][3]["eps"] == 0.25
    onnx.checker.check_model(output, full_check=True)


def test_a_contract_model_has_its_plugin_node_already(mapped_block: Path) -> None:
    model = mapped_block.with_name("model.onnx")
    instances = matched(model)
    assert [len(found) for found in instances.values()] == [1]
    assert plugin_nodes(replaced(model)) == plugin_nodes(mapped_block)


def save(graph: Graph, folder: Path) -> Path:
    """The graph's file, with the functions that its captured finalize nodes need."""
    model = graph.model()
    attach_functions(model)
    path = folder / "model.onnx"
    onnx.save(ir.to_proto(model), path)
    return path


@pytest.mark.parametrize(
    "form", [NormForm(), NormForm(constant_nodes=True), NormForm(up=True, down="after")], ids=["plain", "nodes", "up"]
)
def test_what_stands_beside_the_plugin_node_comes_along(form: NormForm, tmp_path: Path) -> None:
    """The shared output's Reshape to the residual's shape is new, and the sum has a third reader."""
    model = save(full_tail(form, third_reader=True), tmp_path)
    output = assert_replaced_as_mapped(model, 1)
    compare_models(ir.load(model), ir.load(output), feeds(ir.load(model)))


def test_a_constant_that_stands_later_is_moved_up(tmp_path: Path) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = NormForm().write(g, hidden, rank=2)
    gamma = next(name for name in g.initializers if g.initializers[name].dims == [HIDDEN])
    last = next(node for node in g.nodes if gamma in node.input)
    constant = helper.make_node("Constant", [], [gamma], name="gamma", value=g.initializers.pop(gamma))
    g.nodes.insert(g.nodes.index(last), constant)
    g.output(normal, hidden)
    output = assert_replaced_as_mapped(save(g, tmp_path), 1)
    assert nodes(output)[0][0] == "Constant"


def two_tails(*, norm: bool) -> Graph:
    """One tail with a residual and one without: two input lists. Without ``norm`` a mean of another axis follows."""
    g = Graph()
    residual = g.input("residual", ["T", HIDDEN])
    for value in (g.add(g.routed(), residual), g.routed()):
        g.output(NormForm().write(g, value, rank=2) if norm else g.op("Relu", value))
    return g


def test_tails_that_differ_in_their_inputs(tmp_path: Path) -> None:
    model = save(two_tails(norm=True), tmp_path)
    assert [len(found) for found in matched(model).values()] == [2]
    # GraphSurgeon knows no overloads of functions, so the file needs the plugin.
    assert len(plugin_nodes(replaced(model))) == 2
    assert not onnx.load(model.with_name("replaced.onnx")).functions


def test_tails_without_a_norm_are_the_other_operators(tmp_path: Path) -> None:
    model = save(two_tails(norm=False), tmp_path)
    found = matched(model)
    assert list(found) == ["MoEFinalizeAdd"]
    assert len(found["MoEFinalizeAdd"]) == 2
    map_file(model, tmp_path / "mapped.onnx")
    assert plugin_nodes(replaced(model)) == plugin_nodes(tmp_path / "mapped.onnx")


def no_tail() -> Graph:
    g = Graph()
    g.output(g.op("Relu", g.input("x", ["T", HIDDEN])))
    return g


def test_a_file_without_tails(tmp_path: Path) -> None:
    model = save(no_tail(), tmp_path)
    assert matched(model) == {}
    assert nodes(replaced(model)) == nodes(model)


def test_a_config_of_another_model_is_named(tmp_path: Path) -> None:
    model = save(full_tail(), tmp_path)
    found = matched(model)["MoEFinalizeAddRMSNorm"]
    found[0]["outputs"].reverse()
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"name": "MoEFinalizeAddRMSNorm", "op": "MoEFinalizeAddRMSNorm", "instances": found})
    )
    said = tool("replace", model, "-o", tmp_path / "replaced.onnx")
    assert f"no tail for MoEFinalizeAddRMSNorm leads from {found[0]['inputs']} to {found[0]['outputs']}" in said
    assert "not all instances of MoEFinalizeAddRMSNorm were replaced" in said
    assert nodes(tmp_path / "replaced.onnx") == nodes(model)


def test_a_tail_in_a_function_is_named(tmp_path: Path) -> None:
    g = full_tail()
    model = g.proto()
    names = [value.name for value in (*model.graph.input, *model.graph.initializer)]
    function = helper.make_function("local", "Tail", names, g.outputs, list(model.graph.node), list(model.opset_import))
    call = helper.make_node("Tail", names, g.outputs, domain="local", name="call")
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.append(call)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    said = tool("match", path)
    assert "is in a model-local function; `moetrt map` inlines it" in said
    assert matched(path) == {}


def test_a_tail_in_a_branch_is_named(tmp_path: Path) -> None:
    """The tool knows the tensors of the outermost graph alone."""
    model = full_tail().proto()
    branches = []
    for name in ("then", "else"):
        branch = helper.make_graph(model.graph.node, name, [], [])
        for index, value in enumerate(model.graph.output):
            branch.output.add().CopyFrom(value)
            renamed = helper.make_node("Identity", [value.name], [f"{name}_{index}"])
            branch.node.append(renamed)
            branch.output[index].name = f"{name}_{index}"
        branches.append(branch)
    for index, branch in enumerate(branches):
        for node in branch.node:
            node.name = f"{node.name}_{index}"
    outputs = [value.name for value in model.graph.output]
    choice = helper.make_node("If", ["choice"], outputs, name="if", then_branch=branches[0], else_branch=branches[1])
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.append(choice)
    model.graph.input.append(helper.make_tensor_value_info("choice", onnx.TensorProto.BOOL, []))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert tool("list", path).count("is in an inner graph, which this tool passes over") == 4


@pytest.mark.parametrize(
    ("opset", "flag", "words"),
    [
        (16, 1, "the opset was 16; 17 or later is taken"),
        (22, 0, "its has_* attributes say gemm2_permuted, expert_weights"),
    ],
    ids=["opset", "inputs"],
)
def test_a_graph_that_is_not_taken_is_one_line(opset: int, flag: int, words: str, tmp_path: Path) -> None:
    model = full_tail().proto()
    model.opset_import[0].version = opset
    attribute = next(entry for node in model.graph.node for entry in node.attribute if entry.name.startswith("has_"))
    attribute.i = flag
    onnx.save(model, tmp_path / "model.onnx")
    said = tool("match", tmp_path / "model.onnx", code=1)
    assert "[!] [moetrt]" in said
    assert words in said
    assert not (tmp_path / "config.yaml").exists()


def test_every_operator_has_its_pattern_and_nothing_else_does() -> None:
    assert {path.parent.name for path in PLUGINS.glob("*/pattern.py")} == set(OPERATORS)
