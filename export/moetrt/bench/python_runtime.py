"""The benchmark through TensorRT's Python module, where trtexec is not: the same plan, the same files.

As trtexec 11 does: no copies are timed, the queries are replays of a CUDA graph, and the layers are timed in a pass of
their own after them. The queries of a batch are queued before any of them is waited for, so that the gaps between two
launches of the host are not timed.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import cuda

from moetrt.backends import Backend, choose, gpus
from moetrt.bench.plan import NATIVE, PLUGIN, Plan, Point
from moetrt.engine import build_engine
from moetrt.errors import InputError
from moetrt.files import write_atomically
from moetrt.library import library_sha256

DEVICE = "cuda"
DEFAULT_SECONDS = 3.0
WARMUP_SECONDS = 0.2
LEAST_QUERIES = 10
BATCH = 16

_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


def run_plan(
    plan: Plan, folder: Path, *, backend: str | None = None, progress: Callable[[str], None] | None = None
) -> None:
    """Builds both engines and measures every run of a plan; the files are those that trtexec would have written.

    Args:
        plan: for the tool "python".
        folder: where the manifest lies.
        backend: as for `moetrt.backends.choose`.
        progress: told of each step before it starts.

    Raises:
        InputError: there is no GPU that both TensorRT and PyTorch can use, or TensorRT refused the model.
    """
    if not gpus():
        raise InputError("the benchmark runs on a GPU and none is to be seen")
    if not cuda.is_available():
        raise InputError("PyTorch sees no GPU; its build for CUDA times the queries")
    say = progress or (lambda _: None)
    chosen = choose(backend, progress=say)
    runs = list(plan.runs())
    count = len(runs) + 2
    for number, way in enumerate((PLUGIN, NATIVE), 1):
        say(f"[{number}/{count}] build, {way}")
        library = plan.library_of(way)
        build_engine(
            folder / plan.model,
            folder / plan.engine(way),
            backend=chosen.name,
            plugin_library=folder / library if library else None,
            profiles=plan.profile,
            detailed=True,
            progress=say,
        )
        _write_log(plan, folder, way, plan.build_log(way), chosen, [])
    for number, (point, repeat, way) in enumerate(runs, 3):
        say(f"[{number}/{count}] {point.title}, repeat {repeat} of {plan.repeats}, {way}")
        prefix = plan.prefix(point, repeat, way)
        for what in ("times", "profile", "layers"):
            (folder / f"{prefix}.{what}.json").unlink(missing_ok=True)
        warnings: list[str] = []
        with _Session(chosen.module, folder / plan.engine(way), point, folder) as session:
            times = session.times(plan.seconds or DEFAULT_SECONDS, warnings)
            profile = session.profile(plan.seconds or DEFAULT_SECONDS)
            layers = session.layer_information()
        _write(folder / f"{prefix}.times.json", json.dumps(times_content(times)))
        _write(folder / f"{prefix}.profile.json", json.dumps(profile_content(profile)))
        _write(folder / f"{prefix}.layers.json", layers)
        _write_log(plan, folder, way, f"{prefix}.log", chosen, warnings)


class _Session:
    """An engine on the GPU with a context and buffers for one point; all are let go of at the end."""

    def __init__(self, trt: Any, engine_path: Path, point: Point, folder: Path) -> None:
        self._trt = trt
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine_path.read_bytes())
        if self._engine is None:
            raise InputError(f"TensorRT {trt.__version__} does not load '{engine_path}'")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise InputError(f"TensorRT {trt.__version__} has no memory for a context of '{engine_path}'")
        self._stream = cuda.Stream()
        self._buffers: dict[str, torch.Tensor] = {}
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        for name in names:
            if self._engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise InputError(f"tensor '{name}' of '{engine_path}' lies on the host; tensors on the GPU are taken")
        for name in inputs:
            if not self._context.set_input_shape(name, tuple(point.shapes[name])):
                raise InputError(f"TensorRT does not take {point.shapes[name]} for the input '{name}'")
        for name in names:
            self._buffers[name] = self._buffer(name, point, folder, is_input=name in inputs)
            self._context.set_tensor_address(name, self._buffers[name].data_ptr())

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *exception: object) -> None:
        cuda.synchronize()
        # In this order: a context must not outlive its engine.
        del self._context, self._engine, self._runtime
        self._buffers.clear()
        cuda.empty_cache()

    def _buffer(self, name: str, point: Point, folder: Path, *, is_input: bool) -> torch.Tensor:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise InputError(f"tensor '{name}' is of type {kind}; {', '.join(_DTYPES)} are taken")
        dtype = _DTYPES[kind]
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise InputError(f"output '{name}' has a size that depends on the data: {shape}")
        if not is_input:
            return torch.empty(shape, dtype=dtype, device=DEVICE)
        if name in point.inputs:
            data = bytearray((folder / point.inputs[name]).read_bytes())
            return torch.frombuffer(data, dtype=dtype).reshape(shape).to(DEVICE)
        generator = torch.Generator().manual_seed(0)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        most = 2 if dtype == torch.bool else 128
        return torch.randint(most, shape, generator=generator).to(dtype).to(DEVICE)

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise InputError(f"TensorRT {self._trt.__version__} could not enqueue the engine")

    def times(self, seconds: float, warnings: list[str]) -> list[float]:
        """GPU time of each query, in milliseconds."""
        query = self._captured(warnings)
        with cuda.stream(self._stream):
            for _ in _until(WARMUP_SECONDS, 1):
                query()
                self._stream.synchronize()
            milliseconds: list[float] = []
            for _ in _until(seconds, -(-LEAST_QUERIES // BATCH)):
                events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(BATCH)]
                for start, end in events:
                    start.record(self._stream)
                    query()
                    end.record(self._stream)
                self._stream.synchronize()
                milliseconds += [start.elapsed_time(end) for start, end in events]
        return milliseconds

    def _captured(self, warnings: list[str]) -> Callable[[], None]:
        """One query as a replay of a CUDA graph; as a plain enqueue, with a warning, where it cannot be captured."""
        # Twice: the first may compile kernels or allocate, which a capture forbids.
        for _ in range(2):
            self._enqueue()
        self._stream.synchronize()
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph, stream=self._stream):
                self._enqueue()
        except (RuntimeError, InputError) as error:
            reason = " ".join(str(error).split())
            warnings.append(f"CUDA graph capture failed, so that launches are timed too: {reason}")
            self._stream = cuda.Stream()
            return self._enqueue
        return graph.replay

    def profile(self, seconds: float) -> list[list[tuple[str, float]]]:
        """For each iteration: the layers in order, each with its GPU time in milliseconds."""
        profiler = _profiler(self._trt)
        self._context.profiler = profiler
        self._context.enqueue_emits_profile = False
        iterations = []
        for _ in _until(seconds, LEAST_QUERIES):
            profiler.layers.clear()
            self._enqueue()
            self._stream.synchronize()
            if not self._context.report_to_profiler():
                raise InputError(f"TensorRT {self._trt.__version__} gave no layer times")
            iterations.append(list(profiler.layers))
        return iterations

    def layer_information(self) -> str:
        """The engine's layers at these shapes, as trtexec's --exportLayerInfo writes them."""
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context
        return str(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON))


def times_content(milliseconds: list[float]) -> list[dict[str, float]]:
    """What --exportTimes would have written: no transfers, queries one after the other."""
    content = []
    start = 0.0
    for value in milliseconds:
        end = start + value
        content.append(
            {
                "startEnqMs": start,
                "endEnqMs": start,
                "startH2dMs": start,
                "endH2dMs": start,
                "startComputeMs": start,
                "endComputeMs": end,
                "startD2hMs": end,
                "endD2hMs": end,
                "h2dMs": 0.0,
                "computeMs": value,
                "d2hMs": 0.0,
                "latencyMs": value,
            }
        )
        start = end
    return content


def profile_content(iterations: list[list[tuple[str, float]]]) -> list[dict[str, Any]]:
    """What --exportProfile would have written.

    Raises:
        InputError: the iterations differ in their layers.
    """
    names = [name for name, _ in iterations[0]]
    if any([name for name, _ in layers] != names for layers in iterations):
        raise InputError("TensorRT's profiler named other layers in one iteration than in the next")
    columns = [[layers[place][1] for layers in iterations] for place in range(len(names))]
    total = sum(map(sum, columns))
    return [{"count": len(iterations)}] + [
        {
            "name": name,
            "timeMs": sum(column),
            "averageMs": statistics.fmean(column),
            "medianMs": statistics.median(column),
            "percentage": 100 * sum(column) / total if total else 0.0,
        }
        for name, column in zip(names, columns, strict=True)
    ]


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.layers: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.layers.append((layer_name, ms))

    return Profiler()


def _until(seconds: float, least: int) -> Iterator[int]:
    """Counts until the time is over, and at least so far."""
    started = time.monotonic()
    count = 0
    while count < least or time.monotonic() - started < seconds:
        yield count
        count += 1


def _device_lines() -> list[str]:
    """The GPU, in the words that trtexec has for it; without bus and clock where this PyTorch does not tell them."""
    properties = cuda.get_device_properties(0)
    lines = [f"Selected Device: {properties.name}", f"Compute Capability: {properties.major}.{properties.minor}"]
    bus, clock = getattr(properties, "memory_bus_width", None), getattr(properties, "memory_clock_rate", None)
    if bus and clock:
        # PyTorch has the clock in kHz.
        lines += [f"Memory Bus Width: {bus} bits", f"Memory Clock Rate: {clock / 1e6} GHz"]
    return lines


def _write_log(plan: Plan, folder: Path, way: str, name: str, chosen: Backend, warnings: list[str]) -> None:
    library = library_sha256(folder / plan.library) if way == PLUGIN else "none"
    title = "TensorRT-RTX" if chosen.is_rtx else "TensorRT"
    lines = [
        f"{plan.stamp(way)} {library}",
        f"{title} version: {'.'.join(chosen.version.split('.')[:3])} (the Python module, PyTorch {torch.__version__})",
        *_device_lines(),
        *(f"[W] {warning}" for warning in warnings),
    ]
    _write(folder / name, "\n".join(lines) + "\n")


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
