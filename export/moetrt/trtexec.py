"""Command lines for TensorRT's own executables: trtexec 10 and 11, and TensorRT-RTX's tensorrt_rtx.

The option names were read from trtexec's sources (10.8 to 11.1) and from TensorRT-RTX's documentation. The one spelling
that NVIDIA documents for trtexec alone and that tensorrt_rtx is taken to share is ``--dynamicPlugins``.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetrt.errors import InputError

Shape = Sequence[int]
Profile = tuple[Shape, Shape, Shape]


@dataclass(frozen=True)
class Tool:
    """One executable and what it wants.

    Attributes:
        key: the name that `build_command` and the command line take.
        executable: the program.
        title: the name for people.
        strict: options that a build needs for the types of the ONNX file to be kept. None where that is the default,
            here and below.
        steady: options that a measurement needs so that neither copies nor launches are timed.
        profile: options that a per-layer profile needs so as not to disturb the timing.
    """

    key: str
    executable: str
    title: str
    strict: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()


TOOLS: dict[str, Tool] = {
    tool.key: tool
    for tool in (
        Tool(
            key="trtexec-10",
            executable="trtexec",
            title="TensorRT 10.8 and later",
            strict=("--stronglyTyped",),
            steady=("--noDataTransfers", "--useSpinWait", "--useCudaGraph"),
            profile=("--separateProfileRun",),
        ),
        # TensorRT 11 networks are always strongly typed; transfers are off, spin wait and CUDA graphs on by default.
        Tool(key="trtexec-11", executable="trtexec", title="TensorRT 11"),
        Tool(key="tensorrt-rtx", executable="tensorrt_rtx", title="TensorRT-RTX 1.7 and later"),
    )
}


def tool(key: str) -> Tool:
    """Returns the tool of that name.

    Raises:
        InputError: there is none.
    """
    if key not in TOOLS:
        raise InputError(f"trtexec tool was '{key}'; taken are {', '.join(TOOLS)}")
    return TOOLS[key]


def shapes_text(shapes: Mapping[str, Shape]) -> str:
    """Spells shapes as the tools take them: ``name:1x16,other:1x16``."""
    return ",".join(f"{name}:{'x'.join(str(size) for size in shape)}" for name, shape in shapes.items())


def build_command(
    onnx_path: str | os.PathLike[str],
    engine_path: str | os.PathLike[str],
    *,
    tool_key: str = "trtexec-11",
    plugin_library: str | os.PathLike[str] | None,
    profile: Mapping[str, Profile] | None = None,
) -> list[str]:
    """The command that builds an engine on the machine it will run on.

    Args:
        onnx_path: the mapped model.
        engine_path: the engine to write.
        tool_key: a key of `TOOLS`.
        plugin_library: libmoetrt_plugins.so; None builds the unfused baseline from the same file.
        profile: input name -> (min, opt, max) sizes; None for a model without dynamic dimensions.

    Returns:
        The argument list; `command_text` makes a line for the shell of it.
    """
    chosen = tool(tool_key)
    command = [chosen.executable, f"--onnx={Path(onnx_path)}", f"--saveEngine={Path(engine_path)}"]
    command += _plugin(plugin_library)
    for position, option in enumerate(("--minShapes", "--optShapes", "--maxShapes")):
        if profile:
            command.append(f"{option}={shapes_text({name: bounds[position] for name, bounds in profile.items()})}")
    # Layer information has the plugin layers' names and types only when the engine was built with it.
    return [*command, *chosen.strict, "--profilingVerbosity=detailed", "--skipInference"]


def run_command(
    engine_path: str | os.PathLike[str],
    *,
    tool_key: str = "trtexec-11",
    plugin_library: str | os.PathLike[str] | None,
    shapes: Mapping[str, Shape] | None = None,
    export_prefix: str | os.PathLike[str] | None = None,
    per_layer: bool = False,
) -> list[str]:
    """The command that times an engine.

    Args:
        engine_path: the engine.
        tool_key: a key of `TOOLS`.
        plugin_library: libmoetrt_plugins.so; None for an engine that was built without it.
        shapes: input name -> sizes to run at; None for a model without dynamic dimensions.
        export_prefix: ``<prefix>.times.json`` (and, per layer, ``.profile.json`` and ``.layers.json``) are written.
        per_layer: also profile each layer, in a pass of its own.
    """
    chosen = tool(tool_key)
    command = [chosen.executable, f"--loadEngine={Path(engine_path)}"]
    command += _plugin(plugin_library)
    if shapes:
        command.append(f"--shapes={shapes_text(shapes)}")
    command += chosen.steady
    if export_prefix is not None:
        command.append(f"--exportTimes={export_prefix}.times.json")
    if per_layer:
        command += [*chosen.profile, "--profilingVerbosity=detailed"]
        if export_prefix is not None:
            command += [
                f"--exportProfile={export_prefix}.profile.json",
                f"--exportLayerInfo={export_prefix}.layers.json",
            ]
    return command


def command_text(command: Sequence[str], *, width: int = 100) -> str:
    """A command as a shell takes it, broken with backslashes where it is longer than ``width`` characters."""
    quoted = [shlex.quote(word) for word in command]
    whole = " ".join(quoted)
    return whole if len(whole) <= width else " \\\n    ".join(quoted)


def _plugin(library: str | os.PathLike[str] | None) -> list[str]:
    return [] if library is None else [f"--dynamicPlugins={Path(library)}"]
