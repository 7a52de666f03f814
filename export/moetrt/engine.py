"""A mapped ONNX file becomes a TensorRT engine, and a JSON file beside it says what it was made from."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Lock, current_thread, main_thread
from types import FrameType
from typing import Any, Literal

import onnx_ir as ir

from moetrt.backends import TENSORRT, Backend, Progress, choose, gpus
from moetrt.bounds import bounds_of
from moetrt.errors import InputError, InputTypeError
from moetrt.files import (
    Named,
    check_distinct,
    existing_file,
    file_sha256,
    output_directory,
    output_file,
    write_atomically,
)
from moetrt.json_files import read_json
from moetrt.library import PluginLibrary, find_plugin_library, library_sha256, load_plugin_library
from moetrt.onnx_files import files_of, load_model
from moetrt.onnx_op import check_node, operator_of
from moetrt.profiles import Profile, make_profile, split_profiles
from moetrt.provenance import command, versions
from moetrt.registry import check_functions, check_registry, has_ours, our_nodes, plugin_ids, run_as_functions

FORMAT = "moetrt.engine/1"


@dataclass(frozen=True)
class EngineInfo:
    """What was built; the sidecar file holds the same, with the SHA-256 sums of the engine and the ONNX file.

    Attributes:
        path: the engine file.
        sidecar: the JSON file beside it.
        onnx_path: what it was built from.
        backend: "tensorrt" or "tensorrt-rtx".
        version: that TensorRT's version.
        targets: compute capabilities, such as "SM89"; "default" is what TensorRT-RTX takes by itself (SM80 and later).
        layer_count: layers of TensorRT's network, before it fuses them.
        plugin_layers: names of its plugin layers, in order.
        plugin_library: file name of the library; None for an engine without plugins.
        plugin_library_sha256: of that file.
        profile: input name -> (min, opt, max) shapes; every input of the model.
        warnings: lines that the user should see.
    """

    path: Path
    sidecar: Path
    onnx_path: Path
    backend: str
    version: str
    targets: tuple[str, ...]
    layer_count: int
    plugin_layers: tuple[str, ...]
    plugin_library: str | None
    plugin_library_sha256: str | None
    profile: dict[str, Profile]
    warnings: tuple[str, ...]


def build_engine(
    onnx_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    plugin_library: str | os.PathLike[str] | Literal[True] | None = True,
    profiles: Mapping[str, Sequence[Sequence[int] | None]] | None = None,
    targets: Sequence[str] | None = None,
    detailed: bool = False,
    progress: Progress | None = None,
) -> EngineInfo:
    """Builds an engine from an ONNX file.

    Args:
        onnx_path: the mapped model; external data beside it.
        engine_path: the engine to write; ``<engine_path>.json`` is written beside it.
        backend: "tensorrt" (builds on and for the GPU of this machine) or "tensorrt-rtx" (needs no GPU); None: see
            `moetrt.backends.resolve`.
        plugin_library: the library that serves our nodes; True is the one that came with the package. None builds
            the same file without the plugin: TensorRT runs the functions in the file.
        profiles: input name -> (min, opt, max) shapes, each None where left out; see `make_profile`.
        targets: TensorRT-RTX alone: compute capabilities such as "SM89" or "8.9"; None is its default, SM80 and later.
        detailed: keep in the engine which ONNX nodes each layer computes, for a per-layer profile.
        progress: called with one line at each step.

    Returns:
        What was built, with the plugin layers as TensorRT's network has them.

    Raises:
        InputError, InputTypeError: one line for whatever was not taken; neither file is written or changed then.
        KeyboardInterrupt: SIGINT came, in the main thread; neither file is written or changed then either.
    """
    say = progress or (lambda _: None)
    source = existing_file(onnx_path, "ONNX model")
    target = output_file(engine_path)
    sidecar = output_file(target.with_name(target.name + ".json"), "description of the engine")
    model = load_model(source)
    library = _library_path(plugin_library)
    libraries: list[Named] = [("plugin library", library)] if library else []
    check_distinct(
        [*files_of(model, source), *libraries], [("output file", target), ("description of the engine", sidecar)]
    )
    for node in our_nodes(model):
        if operator_of(node) is not None:
            # The plugin refuses the same, but TensorRT says so in several lines of its own.
            check_node(node)
    profile = make_profile(model, *split_profiles(profiles))
    chosen = choose(backend, progress=progress)
    target_names = _target_names(chosen, targets)
    if chosen.name == TENSORRT and not gpus():
        raise InputError("backend tensorrt builds on a GPU and none is to be seen; tensorrt-rtx builds without one")
    # Asked before the build, which may take long.
    output_directory(target.parent)

    say(f"reading {source.name} with {chosen.name} {chosen.version}")
    with _TensorRT(chosen) as tensorrt:
        network = tensorrt.parse(model, source, library)
        layers, plugin_layers = tensorrt.layers(network)
        say(f"building {layers} layers, {len(plugin_layers)} of them plugin layers")
        engine = tensorrt.build(network, source, profile, target_names, say, detailed=detailed)

    info = EngineInfo(
        path=target,
        sidecar=sidecar,
        onnx_path=source,
        backend=chosen.name,
        version=chosen.version,
        targets=tuple(target_names) if chosen.is_rtx and target_names else _own_targets(chosen),
        layer_count=layers,
        plugin_layers=tuple(plugin_layers),
        plugin_library=library.name if library else None,
        plugin_library_sha256=library_sha256(library) if library else None,
        profile=profile,
        warnings=(*map(str, bounds_of(model).values()), *(run_as_functions(model, plugin_layers) if library else ())),
    )
    try:
        # Entered first, so renamed last: an engine never lies beside the description of an older one.
        with ExitStack() as stack:
            temporary = stack.enter_context(write_atomically(target))
            temporary_sidecar = stack.enter_context(write_atomically(sidecar))
            temporary.write_bytes(memoryview(engine))
            temporary_sidecar.write_text(json.dumps(_sidecar(info, temporary), indent=2) + "\n")
    except OSError as error:
        raise InputError(f"engine '{target}' cannot be written: {error.strerror or error}") from error
    say(f"wrote {target}")
    return info


def read_sidecar(engine_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON beside an engine.

    Raises:
        InputError: there is none, or it does not describe this engine (the engine file was changed since).
    """
    engine = existing_file(engine_path, "engine")
    path = engine.with_name(engine.name + ".json")
    content = read_json(path, "description of the engine", FORMAT, "moetrt build")
    if content["engine_sha256"].sha256() != file_sha256(engine):
        raise InputError(f"'{path}' describes another engine than '{engine}'; build it again")
    return dict(content.value)


def _sidecar(info: EngineInfo, engine: Path) -> dict[str, Any]:
    content = {
        "format": FORMAT,
        "command": command(),
        "versions": versions("polygraphy") | {info.backend: info.version},
        "engine": info.path.name,
    } | asdict(info)
    del content["path"], content["sidecar"]
    content["onnx_path"] = os.path.relpath(info.onnx_path, info.path.parent)
    content["profile"] = {
        name: dict(zip(("min", "opt", "max"), bounds, strict=True)) for name, bounds in info.profile.items()
    }
    return content | {"engine_sha256": file_sha256(engine), "onnx_sha256": file_sha256(info.onnx_path)}


def _library_path(plugin_library: str | os.PathLike[str] | Literal[True] | None) -> Path | None:
    if plugin_library is None:
        return None
    if plugin_library is True:
        return find_plugin_library()
    return existing_file(plugin_library, "plugin library").absolute()


def _target_names(chosen: Backend, targets: Sequence[str] | None) -> list[str]:
    if not targets:
        return []
    if not isinstance(targets, Sequence) or isinstance(targets, str) or not all(isinstance(t, str) for t in targets):
        raise InputTypeError(f"targets were {targets!r}; a sequence of names such as 'SM89' is taken")
    if not chosen.is_rtx:
        raise InputError(f"targets were {', '.join(targets)}; backend {chosen.name} builds for the GPU of this machine")
    taken = [name for name in chosen.module.ComputeCapability.__members__ if name.startswith("SM")]
    names = []
    for text in targets:
        name = "SM" + text.upper().removeprefix("SM").replace(".", "")
        if name not in taken:
            raise InputError(f"target was '{text}'; TensorRT-RTX {chosen.version} builds for {', '.join(taken)}")
        names.append(name)
    return names


def _own_targets(chosen: Backend) -> tuple[str, ...]:
    if chosen.is_rtx:
        return ("default",)
    major, minor = gpus()[0].compute_capability
    return (f"SM{major}{minor}",)


_ONE_AT_A_TIME = Lock()


@contextmanager
def _interrupts_kept() -> Iterator[Callable[[], bool]]:
    """Keeps back the first SIGINT until the block ends; gives what says whether it came.

    Raised while TensorRT calls back, a KeyboardInterrupt is lost: TensorRT prints it and builds to the end. A second
    SIGINT does what it would have done without us.

    Raises:
        KeyboardInterrupt: when the block ends, in place of what it may have raised.
    """
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread gets signals; SIG_IGN and handlers that are not Python's stay.
    if current_thread() is not main_thread() or not callable(before):
        yield lambda: False
        return
    came = False

    def keep(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            before(number, frame)
        came = True

    signal.signal(signal.SIGINT, keep)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt


class _TensorRT:
    """One build: TensorRT's messages are collected while it lasts, and turned into one line when it fails."""

    def __init__(self, chosen: Backend) -> None:
        self.chosen = chosen
        self._library: PluginLibrary | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "_TensorRT":
        from polygraphy.backend.trt import util as trt_util
        from polygraphy.logger import G_LOGGER

        # Both loggers are the process's, not the build's.
        self._stack.enter_context(_ONE_AT_A_TIME)
        self._interrupted = self._stack.enter_context(_interrupts_kept())
        # Polygraphy hands its one logger to every TensorRT object; ours stands in for it.
        trt_util.get_trt_logger()
        self._stack.callback(setattr, trt_util, "TRT_LOGGER", trt_util.TRT_LOGGER)
        self._logger = trt_util.TRT_LOGGER = _collecting_logger(self.chosen.module)
        self._logger.errors.clear()
        # Polygraphy's own messages repeat TensorRT's.
        self._stack.enter_context(G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def parse(self, model: ir.Model, source: Path, library: Path | None) -> tuple[Any, Any, Any]:
        """Loads the plugin library and parses the file; gives Polygraphy's (builder, network, parser)."""
        from polygraphy.backend.trt import NetworkFromOnnxPath
        from polygraphy.exception import PolygraphyException

        if library is not None:
            # After TensorRT was imported: the library registers its plugins with those that are loaded.
            self._library = load_plugin_library(library)
            self._library.clear_last_error()
            # A refusal becomes the one line of the exception.
            self._stack.enter_context(self._library.errors_kept())
        build = self

        class NetworkWithPlugins(NetworkFromOnnxPath):
            """Parses with or without our plugins, as this build asks for, whatever the process has registered."""

            def call_impl(self) -> Any:
                builder, network, parser = super(NetworkFromOnnxPath, self).call_impl()
                registry = builder.get_plugin_registry()
                creators = plugin_ids(registry.all_creators_recursive)
                if library is not None:
                    if build._library is not None and not has_ours(creators):
                        # It was loaded by somebody before this TensorRT was.
                        build._library.register_creators()
                        creators = plugin_ids(registry.all_creators_recursive)
                    check_registry(model, creators)
                elif has_ours(creators):
                    # They are registered for the whole process: keep this builder from looking there.
                    registry.parent_search_enabled = False
                check_functions(model, with_plugin=library is not None)
                if not parser.parse_from_file(str(source)):
                    raise build.failure(f"'{source}'", [parser.get_error(i) for i in range(parser.num_errors)])
                return builder, network, parser

        flags = getattr(self.chosen.module, "NetworkDefinitionCreationFlag", None)
        # The types are those of the file: without this, TensorRT 10 may compute a bf16 model in another one.
        strongly_typed = hasattr(flags, "STRONGLY_TYPED")
        try:
            parsed: tuple[Any, Any, Any] = NetworkWithPlugins(str(source), strongly_typed=strongly_typed)()
        except PolygraphyException as error:
            raise self.failure(f"'{source}'", [error]) from error
        return parsed

    def layers(self, parsed: tuple[Any, Any, Any]) -> tuple[int, list[str]]:
        """The number of layers of TensorRT's network, and the names of its plugin layers."""
        network = parsed[1]
        kind = self.chosen.module.LayerType.PLUGIN_V3
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        return len(layers), [layer.name for layer in layers if layer.type == kind]

    def build(
        self,
        parsed: tuple[Any, Any, Any],
        source: Path,
        profile: Mapping[str, Profile],
        targets: list[str],
        say: Progress,
        *,
        detailed: bool,
    ) -> Any:
        """Builds and serialises the engine; gives TensorRT's host memory."""
        from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork
        from polygraphy.backend.trt import Profile as TrtProfile
        from polygraphy.exception import PolygraphyException

        shapes = TrtProfile()
        for name, (low, best, high) in profile.items():
            shapes.add(name, min=low, opt=best, max=high)
        monitor = _progress_monitor(self.chosen.module, say, self._interrupted)
        options: dict[str, Any] = {"profiles": [shapes], "progress_monitor": monitor}
        if detailed:
            options["profiling_verbosity"] = self.chosen.module.ProfilingVerbosity.DETAILED
        config: Any
        if self.chosen.is_rtx:
            from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

            capabilities = [(int(name[2:-1]), int(name[-1])) for name in targets] or None
            config = CreateConfigRTX(compute_capabilities=capabilities, **options)
        else:
            # TensorRT's own default, and trtexec's; Polygraphy's is off.
            config = CreateConfig(tf32=True, **options)
        try:
            return EngineBytesFromNetwork(parsed[:2], config)()
        except (PolygraphyException, RuntimeError) as error:  # RuntimeError: what TensorRT's own Python raises
            raise self.failure(f"'{source}'", [error]) from error

    def failure(self, what: str, reported: Sequence[object]) -> InputError:
        """One line: the plugin's refusal first, since TensorRT's own words name neither the node nor the input."""
        backend = f"{self.chosen.name} {self.chosen.version}"
        refusal = self._library.last_error() if self._library is not None else ""
        if refusal:
            return InputError(f"{refusal} ({what}, {backend})")
        errors = [line for line in self._logger.errors if not _IS_NOISE.search(line)]
        errors += [" ".join(str(error).split()) for error in reported]
        said = _FRAME.sub("", errors[0])[:_LONGEST] if errors else "it gave no reason"
        return InputError(f"{backend} does not take {what}: {said}")


_LONGEST = 400
# Without a GPU each refusal is followed by one of these; frames around a node's text say nothing by themselves.
_IS_NOISE = re.compile(r"cudaError 35|CUDA initialization failure|While parsing node|--- (Begin|End) node")


# Where in TensorRT's sources the message was made.
_FRAME = re.compile(r" In \w+ at \S+?(?=\)|$)")


@cache
def _collecting_logger(trt: Any) -> Any:
    """The logger of every build in this process: TensorRT keeps the first one that it is given."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


def _progress_monitor(trt: Any, say: Progress, cancelled: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            # The phases within phases come and go too fast to be read.
            if parent is None:
                self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self.steps:
                say(f"{phase}: step {step + 1} of {self.steps[phase]}")
            return not cancelled()

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()
