"""A mapped ONNX file becomes a TensorRT engine, and a JSON file beside it says what it was made from."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import onnx_ir as ir

from moetrt.backends import TENSORRT, Backend, Progress, choose, gpus
from moetrt.errors import InputError
from moetrt.files import existing_file, output_directory, write_atomically
from moetrt.library import PluginLibrary, find_plugin_library, library_sha256, load_plugin_library
from moetrt.onnx_files import load_model
from moetrt.onnx_op import check_node, operator_of
from moetrt.spec import DOMAIN, OPERATORS, PLUGIN_NAMESPACE

Shape = tuple[int, ...]
Profile = tuple[Shape, Shape, Shape]
PluginId = tuple[str, str, str]
"""Name, version and namespace: what TensorRT's registry looks a plugin up by."""

DEFAULT_RANGE = (1, 32, 256)
"""(min, opt, max) of a dynamic dimension for which no shape is given."""


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


def parse_shapes(texts: Iterable[str]) -> dict[str, Shape]:
    """Reads shapes as the command line takes them.

    Args:
        texts: each "NAME:DIMS", DIMS being sizes with "x" or "," between them, as in "hidden:4x2048". A name may hold
            colons: the last one counts.

    Raises:
        InputError: a text is not of this form, a size is not a whole number of at least 0, or a name comes twice.
    """
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, colon, sizes = text.rpartition(":")
        if not colon or not name or not re.fullmatch(r"\d+([x,]\d+)*", sizes):
            raise InputError(f"shape was '{text}'; NAME:DIMS is taken, such as hidden:4x2048")
        if name in shapes:
            raise InputError(f"shape of {name} is given twice: {_dims(shapes[name])} and {sizes}")
        shapes[name] = tuple(int(size) for size in re.split("[x,]", sizes))
    return shapes


def make_profile(
    model: ir.Model,
    minimum: Mapping[str, Sequence[int]] | None = None,
    optimum: Mapping[str, Sequence[int]] | None = None,
    maximum: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Profile]:
    """The range of shapes of every input of ``model``.

    A bound that is left out for an input takes the nearest one that is given: the smallest and the largest take the
    optimum, the optimum takes the largest, else the smallest. An input with none takes what the others say of its named
    dimensions, and `DEFAULT_RANGE` for the rest.

    Args:
        model: its graph inputs say the names, ranks and static dimensions.
        minimum, optimum, maximum: input name -> sizes.

    Returns:
        Input name -> (min, opt, max), in the order of the model's inputs.

    Raises:
        InputError: a name that is no input, another rank, another size than a static dimension's, min > opt or
            opt > max, or one named dimension with two ranges.
    """
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    given: dict[str, list[Sequence[int] | None]] = {}
    for position, shapes in enumerate((minimum, optimum, maximum)):
        for name, sizes in (shapes or {}).items():
            if name not in inputs:
                raise InputError(f"shape of '{name}': the model has no such input; its inputs are {', '.join(inputs)}")
            given.setdefault(name, [None, None, None])[position] = sizes

    profile: dict[str, Profile] = {}
    named: dict[str, tuple[tuple[int, int, int], str]] = {}
    for name, (low, best, high) in given.items():
        dimensions = _checked_dims(inputs[name], {"min": low, "opt": best, "max": high})
        nearest = next(sizes for sizes in (best, high, low) if sizes is not None)
        low, high = nearest if low is None else low, nearest if high is None else high
        profile[name] = bounds = (tuple(low), tuple(nearest), tuple(high))
        for axis, dimension in enumerate(dimensions):
            symbol = dimension.value if isinstance(dimension, ir.SymbolicDim) else None
            if symbol is not None:
                sizes_of_axis = (bounds[0][axis], bounds[1][axis], bounds[2][axis])
                known, where = named.setdefault(symbol, (sizes_of_axis, name))
                if known != sizes_of_axis:
                    raise InputError(
                        f"dimension {symbol} is {_range(known)} in {where} and {_range(sizes_of_axis)} in {name}; "
                        "one dimension has one range"
                    )
    for name, value in inputs.items():
        if name not in profile:
            ranges = [
                (dimension,) * 3
                if isinstance(dimension, int)
                else named.get(dimension.value or "", (DEFAULT_RANGE, ""))[0]
                for dimension in _dims_of(value)
            ]
            profile[name] = (
                tuple(low for low, _, _ in ranges),
                tuple(best for _, best, _ in ranges),
                tuple(high for _, _, high in ranges),
            )
    return {name: profile[name] for name in inputs}


def _dims_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
    if value.shape is None:
        raise InputError(f"input '{value.name}' of the model has no rank; TensorRT takes inputs of known rank")
    return list(value.shape)


def _checked_dims(value: ir.Value, bounds: Mapping[str, Sequence[int] | None]) -> list[int | ir.SymbolicDim]:
    dimensions = _dims_of(value)
    taken = "x".join(str(dim) if isinstance(dim, int) else (dim.value or "?") for dim in dimensions)
    given = [(which, shape) for which, shape in bounds.items() if shape is not None]
    for which, shape in given:
        if len(shape) != len(dimensions):
            raise InputError(
                f"{which} shape of '{value.name}' was {_dims(shape)}, rank {len(shape)}; "
                f"rank {len(dimensions)}, [{taken}], is taken"
            )
        for size, dimension in zip(shape, dimensions, strict=True):
            if isinstance(dimension, int) and dimension != size:
                raise InputError(
                    f"{which} shape of '{value.name}' was {_dims(shape)}; [{taken}] is taken: "
                    f"the model fixes {dimension} where {size} was given"
                )
    for (lower, below), (upper, above) in pairwise(given):
        if any(a > b for a, b in zip(below, above, strict=True)):
            raise InputError(
                f"{lower} shape of '{value.name}', {_dims(below)}, is above its {upper} shape, {_dims(above)}"
            )
    return dimensions


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _range(sizes: Sequence[int]) -> str:
    return "/".join(map(str, sizes))


def our_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes that mean one of our operators: by op_type, by domain, or by the plugin namespace they name.

    A node of our domain that only calls a function of the file under another name is none of them.
    """
    functions = {(function.domain, function.name) for function in model.functions.values()}
    for graph in model.graphs():
        for node in graph:
            known = node.op_type in OPERATORS
            asks = node.domain == DOMAIN or _string(node, "plugin_namespace") == PLUGIN_NAMESPACE
            calls = (node.domain, node.op_type) in functions and "plugin_version" not in node.attributes
            if known or (asks and not calls):
                yield node


def _string(node: ir.Node, name: str) -> str | None:
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, str) else None


def _has_function(model: ir.Model, node: ir.Node) -> bool:
    # TensorRT finds functions by op_type alone.
    return any(function.name == node.op_type for function in model.functions.values())


def _title(node: ir.Node) -> str:
    return f"node '{node.name or (node.outputs[0].name if node.outputs else node.op_type)}'"


def check_registry(model: ir.Model, creators: Iterable[PluginId]) -> None:
    """Checks that each node of ours finds its plugin, before TensorRT parses the file.

    TensorRT says the same sentence whether the op, the version or the namespace is wrong; this says which. A node that
    names no namespace and has a function in the file is passed over: TensorRT runs the function.

    Args:
        model: the mapped model.
        creators: (name, version, namespace) of each plugin that the registry has.

    Raises:
        InputError: a node's op, domain, ``plugin_version`` or ``plugin_namespace`` is not that of a plugin of ours.
    """
    ours = [creator for creator in creators if creator[0] in OPERATORS or creator[2] == PLUGIN_NAMESPACE]
    for node in our_nodes(model):
        version, namespace = _string(node, "plugin_version"), _string(node, "plugin_namespace")
        if namespace is None and _has_function(model, node):
            continue
        # What TensorRT's parser looks up: it takes the domain for the namespace where no attribute names one.
        asked = (node.op_type, version or "1", node.domain if namespace is None else namespace)
        if asked in ours and node.domain == DOMAIN:
            continue
        if not ours:
            raise InputError(f"{_title(node)} needs the plugin {node.op_type}; the registry has none of moetrt's")
        wrong = []
        names = sorted({name for name, _, _ in ours})
        if node.op_type not in names:
            wrong.append(f"op was '{node.op_type}'; {' or '.join(names)} is taken")
        versions = sorted({v for name, v, _ in ours if name == node.op_type or node.op_type not in names})
        if asked[1] not in versions:
            wrong.append(f"plugin_version was '{version}'; '{' or '.join(versions)}' is taken")
        spaces = sorted({space for _, _, space in ours})
        if namespace is not None and namespace not in spaces:
            wrong.append(f"plugin_namespace was '{namespace}'; '{' or '.join(spaces)}' is taken")
        if node.domain != DOMAIN:
            wrong.append(f"domain was '{node.domain}'; '{DOMAIN}' is taken")
        raise InputError(f"{_title(node)} finds no plugin: {'; '.join(wrong)}")


def run_as_functions(model: ir.Model, plugin_layers: Sequence[str]) -> list[str]:
    """Warns of the nodes for which TensorRT runs the function in the file although the plugin is there.

    Args:
        model: the mapped model.
        plugin_layers: the plugin layers of TensorRT's network, which bear the nodes' names.
    """
    warnings = []
    for node in our_nodes(model):
        lacking = [name for name in ("plugin_version", "plugin_namespace") if name not in node.attributes]
        if node.name not in plugin_layers and _has_function(model, node) and (node.name or lacking):
            why = f" has no attribute {' and no attribute '.join(lacking)}:" if lacking else ":"
            warnings.append(
                f"{_title(node)}{why} TensorRT runs the function {node.op_type} of the file, not the plugin"
            )
    return warnings


def check_functions(model: ir.Model, *, with_plugin: bool) -> None:
    """Checks that TensorRT can run the functions of the nodes that the plugin does not serve.

    Raises:
        InputError: a node has no function, or nodes of one op differ in their optional inputs: TensorRT finds a
            function by op_type alone, so it would run one node's function for the other.
    """
    input_lists: dict[str, dict[str, str]] = {}
    for node in our_nodes(model):
        if with_plugin and ("plugin_namespace" in node.attributes or not _has_function(model, node)):
            continue
        if not _has_function(model, node):
            raise InputError(
                f"{_title(node)} is {node.op_type} and the file has no function of that name: "
                "it can be built with the plugin library only"
            )
        input_lists.setdefault(node.op_type, {}).setdefault(node.overload, _title(node))
    for op_type, overloads in input_lists.items():
        if len(overloads) > 1:
            raise InputError(
                f"{' and '.join(list(overloads.values())[:2])} are {op_type} with different optional inputs, and "
                "TensorRT cannot tell their functions apart: such a file needs the plugin"
            )


def build_engine(
    onnx_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    plugin_library: str | os.PathLike[str] | Literal[True] | None = True,
    profiles: Mapping[str, Sequence[Sequence[int] | None]] | None = None,
    targets: Sequence[str] | None = None,
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
        progress: called with one line at each step.

    Returns:
        What was built, with the plugin layers as TensorRT's network has them.

    Raises:
        InputError, InputTypeError: one line for whatever was not taken; neither file is written or changed then.
    """
    say = progress or (lambda _: None)
    source = existing_file(onnx_path, "ONNX model")
    target = Path(engine_path)
    if target.is_dir():
        raise InputError(f"output file '{target}' is a folder")
    if target.exists() and target.samefile(source):
        raise InputError(f"output file '{target}' is the ONNX model itself; another name is taken")
    model = load_model(source)
    for node in our_nodes(model):
        if operator_of(node) is not None:
            # The plugin refuses the same, but TensorRT says so in several lines of its own.
            check_node(node)
    bounds = [{name: p[i] for name, p in (profiles or {}).items() if p[i] is not None} for i in range(3)]
    profile = make_profile(model, *bounds)  # type: ignore[arg-type]
    library = _library_path(plugin_library)
    chosen = choose(backend, progress=progress)
    target_names = _target_names(chosen, targets)
    if chosen.name == TENSORRT and not gpus():
        raise InputError("backend tensorrt builds on a GPU and none is to be seen; tensorrt-rtx builds without one")
    # Asked before the build, which may take long.
    output_directory(target.parent)
    sidecar = target.with_name(target.name + ".json")

    say(f"reading {source.name} with {chosen.name} {chosen.version}")
    with _TensorRT(chosen) as tensorrt:
        network = tensorrt.parse(model, source, library)
        layers, plugin_layers = tensorrt.layers(network)
        say(f"building {layers} layers, {len(plugin_layers)} of them plugin layers")
        engine = tensorrt.build(network, source, profile, target_names, say)

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
        warnings=tuple(run_as_functions(model, plugin_layers)) if library else (),
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
    path = existing_file(engine.with_name(engine.name + ".json"), "description of the engine")
    try:
        content = json.loads(path.read_text())
        recorded = content["engine_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{path}' does not describe an engine of moetrt") from error
    if recorded != _sha256(engine):
        raise InputError(f"'{path}' describes another engine than '{engine}'; build it again")
    return dict(content)


def _sidecar(info: EngineInfo, engine: Path) -> dict[str, Any]:
    content = asdict(info)
    del content["path"], content["sidecar"]
    content["onnx_path"] = os.path.relpath(info.onnx_path, info.path.parent)
    content["profile"] = {
        name: dict(zip(("min", "opt", "max"), bounds, strict=True)) for name, bounds in info.profile.items()
    }
    return content | {"engine_sha256": _sha256(engine), "onnx_sha256": _sha256(info.onnx_path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _library_path(plugin_library: str | os.PathLike[str] | Literal[True] | None) -> Path | None:
    if plugin_library is None:
        return None
    if plugin_library is True:
        return find_plugin_library()
    return existing_file(plugin_library, "plugin library").absolute()


def _target_names(chosen: Backend, targets: Sequence[str] | None) -> list[str]:
    if not targets:
        return []
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
                creators = _creators(registry.all_creators_recursive)
                if library is not None:
                    if build._library is not None and not _has_ours(creators):
                        # It was loaded by somebody before this TensorRT was.
                        build._library.register_creators()
                        creators = _creators(registry.all_creators_recursive)
                    check_registry(model, creators)
                elif _has_ours(creators):
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
    ) -> Any:
        """Builds and serialises the engine; gives TensorRT's host memory."""
        from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork
        from polygraphy.backend.trt import Profile as TrtProfile
        from polygraphy.exception import PolygraphyException

        shapes = TrtProfile()
        for name, (low, best, high) in profile.items():
            shapes.add(name, min=low, opt=best, max=high)
        options: dict[str, Any] = {"profiles": [shapes], "progress_monitor": _progress_monitor(self.chosen.module, say)}
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
        except PolygraphyException as error:
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


def _creators(creators: Iterable[Any]) -> list[PluginId]:
    # Creators of interfaces that the Python module does not know have none of these.
    fields = ("name", "plugin_version", "plugin_namespace")
    return [tuple(getattr(creator, field, "") for field in fields) for creator in creators]  # type: ignore[misc]


def _has_ours(creators: Iterable[PluginId]) -> bool:
    return any(namespace == PLUGIN_NAMESPACE for _, _, namespace in creators)


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


def _progress_monitor(trt: Any, say: Progress) -> Any:
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
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()
