"""Every way by which the plugins reach a registry, each in a fresh process and with a real TensorRT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetrt.spec import OPERATORS, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tests.plugins.node_cases import make_node

RTX = "tensorrt_rtx"
LEAN = "tensorrt_lean_bindings"
OURS = sorted([name, PLUGIN_VERSION, PLUGIN_NAMESPACE] for name in OPERATORS)

PRELUDE = """
import ctypes, importlib, json, sys
library, module = sys.argv[1:3]
def bring():
    global trt, logger, registry
    trt = importlib.import_module(module)
    # A builder or a runtime is what makes TensorRT talk; lean's runtime needs a GPU.
    logger = trt.Logger(trt.Logger.WARNING)
    if hasattr(trt, "Builder"):
        global builder
        builder = trt.Builder(logger)
    registry = trt.get_plugin_registry()
def ours(registry):
    return sorted([c.name, c.plugin_version, c.plugin_namespace] for c in registry.all_creators
                  if c.plugin_namespace == "moetrt")
"""


def ask(library: Path, module: str, script: str, **environment: str) -> tuple[object, str]:
    """What ``script`` prints as JSON, and what the process wrote to standard error."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MOETRT_", "POLYGRAPHY_"))}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(library), module],
        capture_output=True,
        text=True,
        timeout=120,
        env=inherited | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_load_library_registers_once_and_deregister_takes_away(plugin_library: Path, module: str) -> None:
    script = """
bring()
before = ours(registry)
handle = registry.load_library(library)
during = ours(registry)
registry.deregister_library(handle)
after = ours(registry)
again = registry.load_library(library) is not None
print(json.dumps([before, handle is not None, during, after, again, ours(registry)]))
"""
    answer, errors = ask(plugin_library, module, script)
    assert answer == [[], True, OURS, [], True, OURS]
    assert errors == ""


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_a_bare_dlopen_before_tensorrt_registers(plugin_library: Path, module: str) -> None:
    script = "ctypes.CDLL(library); bring(); print(json.dumps(ours(registry)))"
    assert ask(plugin_library, module, script) == (OURS, "")


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_a_bare_dlopen_after_tensorrt_registers_once(plugin_library: Path, module: str) -> None:
    script = "bring(); [ctypes.CDLL(library) for _ in range(2)]; print(json.dumps(ours(registry)))"
    assert ask(plugin_library, module, script) == (OURS, "")


def test_the_switch_to_rtx_opens_rtx_alone(plugin_library: Path) -> None:
    script = """
ctypes.CDLL(library)
print(json.dumps(sorted({line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/tensorrt_" in line})))
"""
    loaded, _ = ask(plugin_library, RTX, script, POLYGRAPHY_USE_TENSORRT_RTX="1")
    assert loaded == ["libtensorrt_rtx.so.1"]


def test_a_named_tensorrt_is_the_one_that_is_opened(plugin_library: Path) -> None:
    import tensorrt_lean_libs

    named = str(Path(tensorrt_lean_libs.__file__).parent / "libnvinfer_lean.so.11")
    script = "ctypes.CDLL(library); bring(); print(json.dumps(ours(registry)))"
    assert ask(plugin_library, LEAN, script, MOETRT_TENSORRT_LIBRARY=named)[0] == OURS
    assert ask(plugin_library, RTX, script, MOETRT_TENSORRT_LIBRARY=named)[0] == []


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_load_library_after_a_bare_dlopen_takes_over(plugin_library: Path, module: str) -> None:
    script = """
ctypes.CDLL(library); bring()
handle = registry.load_library(library)
during = ours(registry)
registry.deregister_library(handle)
print(json.dumps([handle is not None, during, ours(registry)]))
"""
    assert ask(plugin_library, module, script) == ([True, OURS, []], "")


def test_registration_on_request_serves_a_later_tensorrt(plugin_library: Path) -> None:
    script = """
functions = ctypes.CDLL(library)
first = functions.moetrt_register_creators()
bring()
before = ours(registry)
second = functions.moetrt_register_creators()
print(json.dumps([first, before, second, functions.moetrt_register_creators(), ours(registry)]))
"""
    # A name that opens nothing: no TensorRT is loaded until it is imported.
    answer, errors = ask(plugin_library, RTX, script, MOETRT_TENSORRT_LIBRARY="none.so")
    assert answer == [0, [], 1, 1, OURS]
    assert errors == (
        "[moetrt] MOETRT_TENSORRT_LIBRARY was 'none.so', which cannot be opened; "
        "the path of a TensorRT library is taken\n"
    )


def test_a_builders_own_registry_can_load_the_library(plugin_library: Path) -> None:
    script = """
bring()
local = builder.get_plugin_registry()
handle = local.load_library(library)
print(json.dumps([handle is not None, ours(local), ours(registry)]))
"""
    assert ask(plugin_library, RTX, script) == ([True, OURS, []], "")


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_fields_are_those_of_the_table(plugin_library: Path, module: str) -> None:
    script = """
bring()
registry.load_library(library)
answer = {}
for name, version, namespace in ours(registry):
    creator = registry.get_creator(name, version, namespace)
    answer[name] = [[f.name, f.type.name, f.size, f.data.tolist()] for f in creator.field_names]
print(json.dumps(answer))
"""
    answer, _ = ask(plugin_library, module, script)
    assert isinstance(answer, dict)
    assert set(answer) == set(OPERATORS)
    for name, spec in OPERATORS.items():
        kinds = {"FLOAT": "FLOAT32", "FLAG": "INT32"}
        wanted = [[entry.name, kinds[entry.kind], 1, [pytest.approx(entry.default)]] for entry in spec.all_attributes]
        assert answer[name] == wanted


@pytest.mark.parametrize("module", [RTX, LEAN])
def test_create_plugin_takes_right_and_refuses_wrong_attributes(plugin_library: Path, module: str) -> None:
    script = """
import numpy as np
bring()
registry.load_library(library)
functions = ctypes.CDLL(library)
functions.moetrt_last_error.restype = ctypes.c_char_p
creator = registry.get_creator("MoEFinalizeAddRMSNorm", "1", "moetrt")
kinds = trt.PluginFieldType
def create(*fields):
    functions.moetrt_clear_last_error()
    made = creator.create_plugin("a node", trt.PluginFieldCollection([trt.PluginField(*f) for f in fields]),
                                 trt.TensorRTPhase.BUILD)
    return [made is not None, functions.moetrt_last_error().decode()]
print(json.dumps([
    create(),
    create(("eps", np.array([1e-5], np.float32), kinds.FLOAT32),
           ("has_residual", np.array([0], np.int32), kinds.INT32)),
    create(("eps", np.array([1e-5], np.float64), kinds.FLOAT64)),
    create(("has_residual", np.array([1], np.int64), kinds.INT64)),
    create(("weight_before_cast", np.array([3], np.int32), kinds.INT32)),
    create(("has_biass", np.array([3], np.int32), kinds.INT32)),
]))
"""
    answer, errors = ask(plugin_library, module, script)
    assert isinstance(answer, list)
    node = "MoEFinalizeAddRMSNorm 'a node': "
    assert answer[:2] == [[True, ""], [True, ""]]
    assert answer[2] == [False, f"{node}attribute eps was float64; float32 is taken"]
    assert answer[3] == [False, f"{node}attribute has_residual was int64; int32 is taken"]
    assert answer[4] == [False, f"{node}attribute weight_before_cast was 3; 0 or 1 is taken"]
    assert answer[5][1].startswith(
        f"{node}attribute has_biass is unknown; taken are has_expanded_idx_to_permuted_idx, "
    )
    ours = [line.removeprefix("[moetrt] ") for line in errors.splitlines() if line.startswith("[moetrt] ")]
    assert ours == [line for _, line in answer[2:]]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moetrt.backends import choose

    # The parser opens TensorRT-RTX by a name that its package lacks; choosing the backend sees to it.
    choose("tensorrt-rtx")
    path = tmp_path_factory.mktemp("polygraphy") / "one_node.onnx"
    path.write_bytes(make_node(data="float32").onnx_model())
    return path


def polygraphy(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / "polygraphy", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_polygraphy_convert_uses_the_plugin(plugin_library: Path, one_node: Path, tmp_path: Path) -> None:
    engine = tmp_path / "one_node.engine"
    shapes = [f"{name}:[4,64]" if name == "gemm2_permuted" else f"{name}:[1,{size}]" for name, size in SIZES]
    bounds = [word for bound in ("min", "opt", "max") for word in (f"--trt-{bound}-shapes", *shapes)]
    polygraphy("convert", str(one_node), "-o", str(engine), "--plugins", str(plugin_library), *bounds)
    assert b"MoEFinalizeAddRMSNorm" in engine.read_bytes()


SIZES = (("gemm2_permuted", 64), ("expert_weights", 4), ("expanded_idx_to_permuted_idx", 4), ("residual", 64))


def test_polygraphy_inspect_shows_the_plugin_layer(plugin_library: Path, one_node: Path, tmp_path: Path) -> None:
    # Polygraphy's inspect imports "tensorrt" whatever the switch says; a module of that name stands for TensorRT-RTX.
    (tmp_path / "tensorrt.py").write_text("from tensorrt_rtx import *\nfrom tensorrt_rtx import __version__\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = polygraphy(
        *("inspect", "model", str(one_node), "--display-as=trt", "--show", "layers", "--plugins", str(plugin_library)),
        PYTHONPATH=path,
    )
    assert "layers.3/tail [Op: LayerType.PLUGIN_V3]" in said
