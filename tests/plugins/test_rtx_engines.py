"""Engines of one-node models, built by TensorRT-RTX with the plugin; and what it refuses, in our words."""

from collections.abc import Mapping
from typing import Any

import pytest

from moetrt.library import PluginLibrary
from moetrt.spec import OperatorSpec
from tests.plugins.node_cases import ALL_COMBINATIONS, Node, combination_id, concrete, make_node

MAP = "expanded_idx_to_permuted_idx"
LABEL = "MoEFinalizeAddRMSNorm 'layers.3/tail': "
LOW = {"T": 1, "R": 4, "B": 1, "S": 1}
HIGH = {"T": 64, "R": 256, "B": 8, "S": 8}


class Rtx:
    """A builder whose own registry holds the plugin library."""

    def __init__(self, library: PluginLibrary) -> None:
        from moetrt.backends import choose

        self.trt: Any = choose("tensorrt-rtx").module
        trt = self.trt
        errors: list[tuple[str, str]] = []

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def log(self, severity: object, message: str) -> None:
                if severity == trt.ILogger.ERROR:
                    errors.append((message, library.last_error()))

        # Each of TensorRT's errors, with what our last refusal was when it was told.
        self.errors = errors
        self.logger = Logger()
        self.builder = self.trt.Builder(self.logger)
        registry = self.builder.get_plugin_registry()
        assert any(creator.plugin_namespace == "moetrt" for creator in registry.all_creators_recursive) or (
            registry.load_library(str(library.path)) is not None
        )

    def parse(self, node: Node) -> Any:
        """TensorRT's network of the one-node model, None where the parser fails."""
        trt = self.trt
        network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, self.logger)
        return network if parser.parse(node.onnx_model()) else None

    def build(self, node: Node, network: Any, low: Mapping[str, int], high: Mapping[str, int]) -> bytes | None:
        config = self.builder.create_builder_config()
        profile = self.builder.create_optimization_profile()
        for name in node.inputs:
            shape = node.shapes[name]
            if any(isinstance(dim, str) for dim in shape):
                profile.set_shape(name, concrete(shape, low), concrete(shape, high), concrete(shape, high))
        config.add_optimization_profile(profile)
        engine = self.builder.build_serialized_network(network, config)
        return None if engine is None else bytes(engine)


@pytest.fixture(scope="module")
def rtx(loaded: PluginLibrary) -> Rtx:
    return Rtx(loaded)


def dtype_name(rtx: Rtx, dtype: object) -> str:
    trt = rtx.trt
    return {trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16"}[dtype]


@pytest.mark.parametrize("data", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("spec", "optional"), ALL_COMBINATIONS, ids=combination_id)
def test_case03_13_an_engine_of_every_combination(
    rtx: Rtx, library: PluginLibrary, spec: OperatorSpec, optional: tuple[str, ...], data: str
) -> None:
    # Without a map R is a function of T: there both are fixed.
    node = make_node(spec, optional=optional, data=data, side="float32", leading=("B", "S"))
    if MAP not in optional:
        node = make_node(spec, optional=optional, data=data, side="float32", tokens=8, rows=32, leading=(2, 4))
    network = rtx.parse(node)
    assert network is not None
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    assert [(layer.name, layer.type) for layer in layers] == [(node.name, rtx.trt.LayerType.PLUGIN_V3)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    wanted = tuple(-1 if isinstance(dim, str) else dim for dim in node.output_shape)
    assert [(output.name, tuple(output.shape)) for output in outputs] == [(name, wanted) for name in spec.outputs]
    assert {dtype_name(rtx, output.dtype) for output in outputs} == {data}
    engine = rtx.build(node, network, LOW, HIGH)
    assert engine is not None
    assert spec.name.encode() in engine
    assert library.last_error() == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 2688, "stride": 2816},  # case 12
        {"top_k": 1},
        {"top_k": 32},
        {"hidden": 1},
        {"hidden": 7168, "top_k": 8},
        {"side": "float32"},
        {"side": "bfloat16"},
    ],
    ids=str,
)
def test_case10_11_12_an_engine_over_sizes(rtx: Rtx, library: PluginLibrary, changes: dict[str, Any]) -> None:
    node = make_node(**changes)
    network = rtx.parse(node)
    assert network is not None
    assert rtx.build(node, network, LOW, HIGH) is not None
    assert library.last_error() == ""


@pytest.mark.parametrize(
    "attributes",
    [
        {"eps": 0.0},
        {"residual_scale": 0.5, "combine_scale": 2.0, "routed_scaling_factor": 2.5},
        {"weight_bias": 1.0, "weight_before_cast": 0},
        {"apply_expert_weights": 0},
    ],
    ids=str,
)
def test_case04_05_14_15_attributes_reach_the_engine(rtx: Rtx, attributes: dict[str, Any]) -> None:
    plain, changed = make_node(), make_node().with_attributes(**attributes)
    engines = []
    for node in (plain, changed):
        network = rtx.parse(node)
        assert network is not None
        engines.append(rtx.build(node, network, LOW, HIGH))
    assert engines[1] is not None
    assert engines[0] != engines[1]


WRONG: list[tuple[str, Node, str]] = [
    (
        "map of int64",
        make_node().with_input(MAP, dtype="int64"),
        f"input {MAP} was int64; int32 is taken",
    ),
    (
        "rows of int32",
        make_node(data="int32"),
        "input gemm2_permuted was int32; bfloat16 or float16 or float32 is taken",
    ),
    (
        "weights of another half",
        make_node().with_input("expert_weights", dtype="float16"),
        "input expert_weights was float16; bfloat16 or float32 is taken (gemm2_permuted is bfloat16)",
    ),
    (
        "residual of another dtype",
        make_node().with_input("residual", dtype="float32"),
        "input residual was float32; bfloat16 is taken (gemm2_permuted is bfloat16)",
    ),
    ("case 2: flat map", make_node().with_input(MAP, shape=("R",)), f"input {MAP} was [?]; rank 2, [T, K], is taken"),
    (
        "narrow rows",
        make_node(stride=32),
        "input gemm2_permuted was [?, 32]; Hp >= H = 64 in [R, Hp] is taken",
    ),
    (
        "gamma of another size",
        make_node().with_input("gamma", shape=(63,)),
        "input residual was [?, 64]; a last dimension of H = 63 is taken",
    ),
    (
        "tokens that differ",
        make_node(tokens=8, rows=32).with_input("residual", shape=(9, 64)),
        "input residual was [9, 64]; leading dimensions that multiply to T = 8 is taken",
    ),
    (
        "flag without its input",
        make_node().with_attributes(has_shared_output=1),
        "5 inputs were given; its has_* attributes name 6 (gemm2_permuted, expert_weights, "
        f"{MAP}, shared_output, residual, gamma), and an absent input is left out, not empty",
    ),
    ("eps as INT", make_node().with_attributes(eps=1), "attribute eps was int32; float32 is taken"),
    (
        "eps below 0",
        make_node().with_attributes(eps=-1.0),
        "attribute eps was -1; a finite float of at least 0 is taken",
    ),
    ("eps as text", make_node().with_attributes(eps="1e-6"), "attribute eps was text; float32 is taken"),
    ("eps twice", make_node().with_attributes(eps=[1e-6, 1e-5]), "attribute eps was 2 values; one is taken"),
    (
        "flag as FLOAT",
        make_node().with_attributes(weight_before_cast=1.0),
        "attribute weight_before_cast was float32; int32 is taken",
    ),
    (
        "flag of 2",
        make_node().with_attributes(apply_expert_weights=2),
        "attribute apply_expert_weights was 2; 0 or 1 is taken",
    ),
    (
        "gate alone",
        make_node().with_attributes(has_shared_gate=1),
        "attribute has_shared_gate was 1 with has_shared_output 0; the gate is taken only with what it gates",
    ),
]


@pytest.mark.parametrize(("node", "line"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_refusal_is_one_line_before_tensorrts_own(
    rtx: Rtx, library: PluginLibrary, capfd: pytest.CaptureFixture[str], node: Node, line: str
) -> None:
    rtx.errors.clear()
    assert rtx.parse(node) is None
    assert library.last_error() == LABEL + line
    assert capfd.readouterr().err == f"[moetrt] {LABEL}{line}\n"
    # TensorRT has its say too; by its first word ours was told.
    assert {ours for _, ours in rtx.errors} == {LABEL + line}


def test_ranges_that_cannot_meet_are_refused_at_build(
    rtx: Rtx, library: PluginLibrary, capfd: pytest.CaptureFixture[str]
) -> None:
    node = make_node(leading=("B", "S"))
    network = rtx.parse(node)
    assert network is not None
    rtx.errors.clear()
    assert rtx.build(node, network, LOW | {"B": 2, "S": 40}, HIGH | {"B": 8, "S": 64}) is None
    line = f"{LABEL}input residual was [2..8, 40..64, 64]; leading dimensions that multiply to T = 1..64 is taken"
    assert library.last_error() == line
    assert capfd.readouterr().err == f"[moetrt] {line}\n"
    assert {ours for _, ours in rtx.errors} == {line}
