"""Command lines for TensorRT's own executables: trtexec 10 and 11, and TensorRT-RTX's tensorrt_rtx.

The option names are those of trtexec's sources, 10.8 to 11.1 (`benchmarks.trtexec_sources` has their own parser read
these lines), and of TensorRT-RTX's documentation. The one spelling that NVIDIA documents for trtexec alone and that
tensorrt_rtx is taken to share is ``--dynamicPlugins``.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetrt.bench.trtexec_files import version_in
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


def key_of_version(version: str) -> str:
    """The tool that trtexec of this version is, such as "trtexec-10" for 10.16.1.

    Raises:
        InputError: it is too old or newer than what is known.
    """
    numbers = [int(part) for part in version.split(".")]
    if numbers[:2] >= [10, 8] and numbers[0] <= 11:
        return f"trtexec-{numbers[0]}"
    raise InputError(f"trtexec is of TensorRT {version}; 10.8 to 11 are taken")


def find_executable(name: str) -> Path | None:
    """Looks for a tool's executable: on PATH, then in TensorRT_ROOT, then where NVIDIA's packages put it."""
    found = shutil.which(name)
    if found:
        return Path(found)
    roots = [root for root in (os.environ.get("TensorRT_ROOT"), "/usr/src/tensorrt") if root]
    places = [Path(root) / "bin" / name for root in roots]
    return next((place for place in places if os.access(place, os.X_OK) and place.is_file()), None)


def version_of(executable: str | os.PathLike[str]) -> str | None:
    """The version of TensorRT that an executable's help names; None where it does not run or does not say."""
    try:
        done = subprocess.run(
            [executable, "--help"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return version_in(done.stdout + done.stderr)


def shapes_text(shapes: Mapping[str, Shape]) -> str:
    """Spells shapes as the tools take them: ``name:1x16,other:1x16``; a name with a colon goes in single quotes.

    Raises:
        InputError: a name has a comma or a single quote, which the tools do not take.
    """
    return ",".join(f"{_name(name)}:{'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())


def inputs_text(inputs: Mapping[str, str | os.PathLike[str]]) -> str:
    """Spells files of inputs as ``--loadInputs`` takes them: ``name:file,other:file``.

    Raises:
        InputError: a name or a path has a comma or a single quote, which the tools do not take.
    """
    for name, file in inputs.items():
        if "," in str(file) or "'" in str(file):
            raise InputError(
                f"file '{file}' of input '{name}' has a comma or a quote in its path, which trtexec does not take"
            )
    # What stands before the last colon is the name, unless the name is quoted.
    return ",".join(f"{_name(name, quoted=':' in str(file))}:{file}" for name, file in inputs.items())


def _name(name: str, *, quoted: bool = False) -> str:
    if "," in name or "'" in name:
        raise InputError(f"input '{name}' has a comma or a quote in its name, which trtexec does not take")
    return f"'{name}'" if quoted or ":" in name else name


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
    inputs: Mapping[str, str | os.PathLike[str]] | None = None,
    seconds: float | None = None,
) -> list[str]:
    """The command that times an engine.

    Args:
        engine_path: the engine.
        tool_key: a key of `TOOLS`.
        plugin_library: libmoetrt_plugins.so; None for an engine that was built without it.
        shapes: input name -> sizes to run at; None for a model without dynamic dimensions.
        export_prefix: ``<prefix>.times.json`` (and, per layer, ``.profile.json`` and ``.layers.json``) are written.
        per_layer: also profile each layer, in a pass of its own.
        inputs: input name -> file with its raw bytes; random numbers for the rest.
        seconds: measure for at least this long; None is the tool's own default, 3.
    """
    chosen = tool(tool_key)
    command = [chosen.executable, f"--loadEngine={Path(engine_path)}"]
    command += _plugin(plugin_library)
    if shapes:
        command.append(f"--shapes={shapes_text(shapes)}")
    if inputs:
        command.append(f"--loadInputs={inputs_text(inputs)}")
    command += chosen.steady
    if seconds is not None:
        command.append(f"--duration={seconds:g}")
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
    if library is None:
        return []
    path = str(Path(library))
    # A bare name would be looked for on the linker's path alone.
    return [f"--dynamicPlugins={path if '/' in path else './' + path}"]
