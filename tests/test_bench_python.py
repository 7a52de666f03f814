"""The benchmark through TensorRT's Python module, against a stand-in for the module and for PyTorch's CUDA.

The stand-in keeps a clock of its own: a replay costs what is planted, a plain enqueue twice that. It has no name
that TensorRT's modules have not, and refuses what they refuse: times of events that were not waited for, layer times
before the stream was, an enqueue before every address is set.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetrt import cli
from moetrt.backends import Backend, Gpu
from moetrt.bench import benchmark, python_runtime, trtexec
from moetrt.bench.plan import read_manifest
from moetrt.errors import InputError
from tests.test_bench import tail_name

SHAPES = {"x": (8, 64), "residual": (8, 64), "norm_out": (8, 64), "residual_out": (8, 64)}


class Clock:
    """The GPU: what it has done, and how long that took."""

    now = 0.0
    waited = 0.0
    capturing: list[Any] | None = None
    capture_fails = False
    planted: dict[str, list[tuple[str, float]]] = {}  # noqa: RUF012  set by the fixture

    @classmethod
    def run(cls, ms: float) -> None:
        cls.now += ms


class TensorIOMode:
    INPUT = "in"
    OUTPUT = "out"


class TensorLocation:
    DEVICE = "device"
    HOST = "host"


class LayerInformationFormat:
    JSON = "json"


class IProfiler:
    def __init__(self) -> None:
        pass


class Logger:
    ERROR = 1

    def __init__(self, severity: int) -> None:
        assert severity == self.ERROR


class IExecutionContext:
    def __init__(self, way: str) -> None:
        self.way = way
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.profiler: Any = None
        self.enqueue_emits_profile = True
        self.enqueued = False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert isinstance(shape, tuple)
        self.shapes[name] = shape
        return shape == SHAPES[name]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return SHAPES[name] if len(self.shapes) == 2 else (-1, 64)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if set(self.addresses) != set(SHAPES) or not stream_handle:
            return False
        if Clock.capturing is not None:
            if Clock.capture_fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            Clock.capturing.append(self.layers)
            return True
        # A plain enqueue is as slow again: its launches are part of it.
        Clock.run(2 * sum(ms for _, ms in self.layers))
        self.enqueued = True
        return True

    @property
    def layers(self) -> list[tuple[str, float]]:
        return Clock.planted[self.way]

    def report_to_profiler(self) -> bool:
        assert not self.enqueue_emits_profile
        if not self.enqueued or Clock.waited < Clock.now:
            return False
        for name, ms in self.layers:
            self.profiler.report_layer_time(name, ms)
        return True


class EngineInspector:
    execution_context: Any = None

    def __init__(self, way: str, metadata: dict[str, str]) -> None:
        self.way, self.metadata = way, metadata

    def get_engine_information(self, format: str) -> str:
        assert self.execution_context.way == self.way
        assert format == LayerInformationFormat.JSON
        layers = [{"Name": name, "Metadata": self.metadata[name]} for name, _ in Clock.planted[self.way]]
        return json.dumps({"Layers": layers})


class ICudaEngine:
    num_io_tensors = len(SHAPES)

    def __init__(self, way: str, metadata: dict[str, str]) -> None:
        self.way, self.metadata = way, metadata

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self.way)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self.way, self.metadata)

    def get_tensor_name(self, index: int) -> str:
        return list(SHAPES)[index]

    def get_tensor_mode(self, name: str) -> str:
        return TensorIOMode.INPUT if name in ("x", "residual") else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> str:
        return TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: "Stream") -> None:
        self.at = Clock.now

    def elapsed_time(self, end: "Event") -> float:
        assert end.at <= Clock.waited, "the event was not waited for"
        return end.at - self.at


class Stream:
    cuda_stream = 7

    def synchronize(self) -> None:
        Clock.waited = Clock.now


class CUDAGraph:
    layers: Any = ()

    def replay(self) -> None:
        (layers,) = self.layers
        Clock.run(sum(ms for _, ms in layers))


@contextmanager
def graph(captured: CUDAGraph, *, stream: Stream) -> Iterator[None]:
    Clock.capturing = []
    try:
        yield
        captured.layers = Clock.capturing
    finally:
        Clock.capturing = None


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    yield


CUDA = SimpleNamespace(
    Event=Event,
    Stream=Stream,
    CUDAGraph=CUDAGraph,
    graph=graph,
    stream=on_stream,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    is_available=lambda: True,
    get_device_properties=lambda index: SimpleNamespace(
        name="NVIDIA Test 9000", major=9, minor=0, memory_bus_width=5120, memory_clock_rate=2_500_000
    ),
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, mapped_block: Path) -> Any:
    """A machine with a GPU, PyTorch for CUDA and TensorRT's module, but no trtexec."""
    tail = tail_name(mapped_block)
    Clock.now = Clock.waited = 0.0
    Clock.capture_fails = False
    Clock.planted = {"plugin": [("gemm", 0.75), (tail, 0.25)], "native": [("gemm", 0.75), ("a", 0.5), ("b", 0.75)]}
    inner = f"{tail} (MoEFinalizeAddRMSNorm)"
    metadata = {
        "gemm": "[ONNX Layer: mm]",
        tail: f"[ONNX Layer: {tail}]",
        "a": f"[ONNX Layer: node_Mul | {inner}]",
        "b": f"[ONNX Layer: node_Add | {inner}]",
    }

    class Runtime:
        def __init__(self, logger: Logger) -> None:
            assert isinstance(logger, Logger)

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
            way = serialized_engine.decode()
            return ICudaEngine(way, metadata) if way in Clock.planted else None

    trt = SimpleNamespace(
        __version__="10.16.1.11",
        Logger=Logger,
        Runtime=Runtime,
        IProfiler=IProfiler,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        LayerInformationFormat=LayerInformationFormat,
    )

    def build_engine(model: Path, engine: Path, *, plugin_library: Path | None, detailed: bool, **_: Any) -> None:
        assert detailed
        assert model.is_file()
        assert plugin_library is None or plugin_library.is_file()
        engine.write_text("plugin" if plugin_library else "native")

    gpu = (Gpu("test", (9, 0)),)
    monkeypatch.setattr(benchmark, "gpus", lambda: gpu)
    monkeypatch.setattr(python_runtime, "gpus", lambda: gpu)
    monkeypatch.setattr(trtexec, "find_executable", lambda name: None)
    monkeypatch.setattr(python_runtime, "cuda", CUDA)
    monkeypatch.setattr(python_runtime, "DEVICE", "cpu")
    monkeypatch.setattr(python_runtime, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(python_runtime, "build_engine", build_engine)
    monkeypatch.setattr(python_runtime, "choose", lambda *_, **__: Backend("tensorrt", trt, trt.__version__))
    return trt


def run(mapped_block: Path, folder: Path, *words: str) -> dict[str, Any]:
    plan = ["--repeats", "2", "--seconds", "0.01", "--point", "x:8x64"]
    assert cli.run(["bench", str(mapped_block), "-o", str(folder), *plan, *words]) == 0
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return content


@pytest.mark.parametrize("words", [[], ["--tool", "python"]])
def test_planted_times_come_back_through_the_same_files(
    module: Any, mapped_block: Path, tmp_path: Path, words: list[str]
) -> None:
    result = run(mapped_block, tmp_path / "out", *words)
    assert result["tool"] == "python"
    assert result["versions"]["TensorRT"] == "10.16.1"
    assert result["device"] == "NVIDIA Test 9000"
    assert result["bandwidth"]["bytes_per_second"] == pytest.approx(3.2e12)
    (point,) = result["points"]
    assert point["end_to_end"]["plugin_ms"]["low"]["median"] == pytest.approx(1.0)
    assert point["end_to_end"]["ratio"]["low"]["median"] == pytest.approx(2.0)
    (tail,) = point["tails"]
    assert tail["ratio"]["low"]["median"] == pytest.approx(5.0)
    assert tail["layers"]["native"]["own"] == ["a", "b"]
    times = json.loads((tmp_path / "out/bench/1/plugin.1.times.json").read_text())
    assert len(times) >= python_runtime.LEAST_QUERIES
    assert result["notes"] == []


def test_swapped_times_are_seen(module: Any, mapped_block: Path, tmp_path: Path) -> None:
    Clock.planted["plugin"][0] = ("gemm", 3.75)
    (point,) = run(mapped_block, tmp_path / "out")["points"]
    assert point["end_to_end"]["ratio"]["low"]["median"] == pytest.approx(0.5)


def test_graph_that_cannot_be_captured_is_noted(module: Any, mapped_block: Path, tmp_path: Path) -> None:
    Clock.capture_fails = True
    result = run(mapped_block, tmp_path / "out")
    (note,) = result["notes"]
    assert note.startswith("CUDA graph capture failed, so that launches are timed too: operation not permitted")
    assert result["points"][0]["end_to_end"]["plugin_ms"]["low"]["median"] == pytest.approx(2.0)


def test_saved_inputs_reach_the_engine(module: Any, mapped_block: Path, tmp_path: Path) -> None:
    from polygraphy.json import save_json

    feed = {"x": torch.randn(8, 64), "residual": torch.randn(8, 64)}
    save_json([feed], str(tmp_path / "inputs.json"))
    words = ["--repeats", "1", "--seconds", "0.01", "--load-inputs", str(tmp_path / "inputs.json")]
    assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), *words]) == 0
    plan, _ = read_manifest(tmp_path / "out")
    session = python_runtime._Session(module, tmp_path / "out/bench/plugin.engine", plan.points[0], tmp_path / "out")
    for name, tensor in feed.items():
        assert torch.equal(session._buffers[name], tensor)


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (
            ICudaEngine,
            "get_tensor_location",
            lambda self, name: TensorLocation.HOST,
            "tensor 'x' of .* lies on the host",
        ),
        (
            ICudaEngine,
            "get_tensor_dtype",
            lambda self, name: SimpleNamespace(name="FP8"),
            "is of type FP8; FLOAT, HALF",
        ),
        (ICudaEngine, "create_execution_context", lambda self: None, "has no memory for a context"),
        (IExecutionContext, "set_input_shape", lambda self, name, shape: False, r"does not take \(8, 64\) for .* 'x'"),
        (IExecutionContext, "get_tensor_shape", lambda self, name: (-1, 64), "a size that depends on the data"),
        (IExecutionContext, "execute_async_v3", lambda self, handle: False, "could not enqueue the engine"),
        (IExecutionContext, "report_to_profiler", lambda self: False, "gave no layer times"),
        (CUDA, "is_available", lambda: False, "PyTorch sees no GPU"),
    ],
)
def test_refusals_are_one_line(
    module: Any,
    mapped_block: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
    value: Any,
    said: str,
) -> None:
    monkeypatch.setattr(owner, name, value)
    words = ["--seconds", "0.01", "--point", "x:8x64"]
    assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "out/bench.json").exists()


def test_engine_that_does_not_load(module: Any, mapped_block: Path, tmp_path: Path) -> None:
    run(mapped_block, tmp_path / "out")
    plan, _ = read_manifest(tmp_path / "out")
    (tmp_path / "out/bench/plugin.engine").write_text("another")
    with pytest.raises(InputError, match=r"TensorRT 10\.16\.1\.11 does not load '.*plugin\.engine'"):
        python_runtime._Session(module, tmp_path / "out/bench/plugin.engine", plan.points[0], tmp_path / "out")


def test_profile_that_changes_is_refused() -> None:
    with pytest.raises(InputError, match="named other layers in one iteration"):
        python_runtime.profile_content([[("a", 1.0)], [("b", 1.0)]])


def test_layers_of_one_name_stay_apart() -> None:
    content = python_runtime.profile_content([[("a", 1.0), ("a", 3.0)], [("a", 2.0), ("a", 5.0)]])
    assert [layer["medianMs"] for layer in content[1:]] == [1.5, 4.0]


NAMES = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
kinds = ("ICudaEngine", "IExecutionContext", "EngineInspector", "Runtime", "IProfiler")
kinds += ("TensorIOMode", "TensorLocation", "LayerInformationFormat", "DataType")
print(json.dumps({"": dir(module)} | {kind: dir(getattr(module, kind)) for kind in kinds if hasattr(module, kind)}))
"""


@pytest.mark.parametrize("name", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_stand_in_has_no_name_that_the_module_has_not(name: str, module: Any) -> None:
    """The lean runtime is TensorRT 11's, without builder and inspector; each in a process of its own."""
    done = subprocess.run([sys.executable, "-c", NAMES, name], capture_output=True, text=True, check=True)
    real = {kind: set(names) for kind, names in json.loads(done.stdout).items()}
    lean = name != "tensorrt_rtx"
    absent = {"LayerInformationFormat"} if lean else set()
    assert set(vars(module)) - absent <= real[""]
    for kind in (ICudaEngine, IExecutionContext, EngineInspector):
        used = {part for part in vars(kind) if not part.startswith("_") and part not in ("way", "layers", "metadata")}
        if lean and kind is EngineInspector:
            continue
        assert used - ({"create_engine_inspector"} if lean else set()) <= real[kind.__name__], kind.__name__
    assert {"profiler", "enqueue_emits_profile"} <= real["IExecutionContext"]
    assert "deserialize_cuda_engine" in real["Runtime"]
    assert "report_layer_time" in real["IProfiler"]
    assert {"INPUT", "OUTPUT"} <= real["TensorIOMode"]
    assert {"DEVICE", "HOST"} <= real["TensorLocation"]
    assert set(python_runtime._DTYPES) <= real["DataType"]
    assert lean or "JSON" in real["LayerInformationFormat"]


def test_names_of_pytorch_are_there() -> None:
    for name in vars(CUDA):
        assert hasattr(torch.cuda, name), name
