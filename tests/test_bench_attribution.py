"""Which tail a layer belongs to, by what TensorRT's own parser writes into its layers' metadata.

TensorRT-RTX's parser and builder are asked. What the profile makes of an engine's layers needs a GPU: tests/gpu.
"""

from pathlib import Path

import onnx_ir as ir
import pytest

from moetrt import backends
from moetrt.bench.model import make_plan
from moetrt.bench.plan import Plan
from moetrt.bench.result import attribute
from moetrt.bench.trtexec_files import Layer, onnx_origins
from moetrt.capture import export
from moetrt.engine import build_engine
from moetrt.library import load_plugin_library
from moetrt.mapping import map_file
from moetrt.source import load_source
from tests.engine_strings import check_every_layer, engine_strings

TAILS = 2


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    exported = export(load_source("moetrt.models:qwen2_moe"), folder)
    report = map_file(exported.model_path, folder / "mapped.onnx")
    assert report.mapped == TAILS
    return folder / "mapped.onnx"


@pytest.fixture
def plan(mapped: Path, tmp_path: Path) -> Plan:
    return make_plan(mapped, tmp_path, tool="trtexec-11", points=[{"input_ids": (1, 8)}])[0]


def parsed_layers(path: Path, plugin_library: Path | None) -> list[tuple[str, str, Layer]]:
    """(type, metadata, layer) of every layer of TensorRT's network."""
    trt = backends.choose(backends.TENSORRT_RTX).module
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    registry = builder.get_plugin_registry()
    if plugin_library is None:
        registry.parent_search_enabled = False
    else:
        load_plugin_library(plugin_library).register_creators()
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    assert parser.parse_from_file(str(path)), parser.get_error(0)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return [(layer.type.name, layer.metadata, Layer(layer.name, onnx_origins(layer.metadata))) for layer in layers]


def test_random_token_ids_are_noted(mapped: Path, tmp_path: Path) -> None:
    _, notes = make_plan(mapped, tmp_path, tool="trtexec-11")
    rows = next(value.shape[0] for name, value in ir.load(mapped).graph.initializers.items() if "embed_tokens" in name)
    assert notes[0].startswith(
        "input 'input_ids' gets random whole numbers, -128 to 127 from trtexec, which are not valid token ids: it "
        f"looks rows up in a table of {rows}, 0 to {int(rows) - 1}; use --load-inputs"
    )


def test_native_layers_name_their_tail(mapped: Path, plan: Plan) -> None:
    layers = parsed_layers(mapped, None)
    assert not any(kind == "PLUGIN_V3" for kind, _, _ in layers)
    parts = {layer.name: attribute(layer, plan.tails) for _, _, layer in layers}
    for tail in plan.tails:
        # The text alone, as a person would look for it.
        wanted = {layer.name for _, metadata, layer in layers if f"| {tail.name} (" in metadata}
        assert {name for name, part in parts.items() if tail.name in part.tails} == wanted
        kinds = {kind for kind, _, layer in layers if layer.name in wanted}
        assert {"GATHER", "REDUCE", "ELEMENTWISE", "UNARY"} <= kinds or len(wanted) > 20
    # A layer of the network is one node's: nothing is shared before TensorRT fuses.
    assert not any(part.shared for part in parts.values())


def test_plugin_layer_is_the_tails_alone(mapped: Path, plan: Plan, plugin_library: Path) -> None:
    layers = parsed_layers(mapped, plugin_library)
    found = [attribute(layer, plan.tails).tails for kind, _, layer in layers if kind == "PLUGIN_V3"]
    assert sorted(name for tails in found for name in tails) == sorted(tail.name for tail in plan.tails)
    assert all(len(tails) == 1 for tails in found)
    others = [attribute(layer, plan.tails) for kind, _, layer in layers if kind != "PLUGIN_V3"]
    assert not any(part.tails for part in others)


def test_fused_layers_are_own_or_shared(mapped: Path, plan: Plan) -> None:
    layers = parsed_layers(mapped, None)
    first = plan.tails[0]
    of_tail = [metadata for _, metadata, _ in layers if f"| {first.name} (" in metadata]
    gemm = next(metadata for kind, metadata, _ in layers if kind == "MATRIX_MULTIPLY")
    for separator in ("\x1f", "\x1e"):
        own = attribute(Layer("__myl", onnx_origins(separator.join(of_tail))), plan.tails)
        assert (own.tails, own.shared) == (frozenset([first.name]), False)
        shared = attribute(Layer("__myl", onnx_origins(separator.join([gemm, *of_tail]))), plan.tails)
        assert (shared.tails, shared.shared) == (frozenset([first.name]), True)


def test_engine_is_built_with_its_layers_nodes(mapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 49: a detailed engine of another model than the demo's is read alike."""
    from polygraphy.backend import tensorrt_rtx

    real, asked = tensorrt_rtx.CreateConfigRTX, []

    def config(**options: object) -> object:
        asked.append(options.get("profiling_verbosity"))
        return real(**options)

    monkeypatch.setattr(tensorrt_rtx, "CreateConfigRTX", config)
    path = tmp_path / "native.engine"
    profiles = {"input_ids": (None, (1, 8), None)}
    build_engine(mapped, path, backend=backends.TENSORRT_RTX, plugin_library=None, profiles=profiles, detailed=True)
    assert asked == [backends.choose().module.ProfilingVerbosity.DETAILED]
    assert "\x1f" in check_every_layer(engine_strings(path), mapped, plugin=False)
