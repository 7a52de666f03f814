"""The benchmark of a mapped model: the plugin against TensorRT's native layers of the same file, run and read.

Where trtexec (or tensorrt_rtx) and a GPU are, the plan's commands are run one after the other; where there are only a
GPU and TensorRT's Python module, `moetrt.bench.python_runtime` does the same through it; elsewhere bench.sh is written
for the machine that has them, and its files are read back wherever the folder is.
"""

import json
import math
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetrt.backends import TENSORRT, TENSORRT_RTX, gpus, installed
from moetrt.bench import trtexec
from moetrt.bench.model import Shapes, copy_library, make_plan, read_feeds, write_inputs
from moetrt.bench.plan import (
    MANIFEST,
    NATIVE,
    PLUGIN,
    PYTHON,
    SCRIPT,
    TOOLS,
    Plan,
    manifest_text,
    read_manifest,
    script_text,
)
from moetrt.bench.result import BenchResult, Compared, Range, read_result
from moetrt.bench.trtexec_files import first_error
from moetrt.console import Output
from moetrt.errors import InputError
from moetrt.files import check_distinct, existing_file, file_sha256, output_directory, write_atomically
from moetrt.library import library_sha256
from moetrt.onnx_files import files_of, load_model
from moetrt.provenance import command as command_line
from moetrt.provenance import versions
from moetrt.report.pages import page_files

RESULT = "bench.json"

TIME_LIMIT = 3600.0
"""Seconds that a command may take where nobody says otherwise: building an engine is slow."""

_MOST_ROWS = 12
"""Tails that are printed; bench.json has all of them."""


@dataclass(frozen=True)
class Choice:
    """What a benchmark runs with.

    Attributes:
        tool: one of `moetrt.bench.plan.TOOLS`.
        executable: the program; None for the Python module, or where it is not to be had here.
        runs_here: whether this machine can run it.
        why: one line for people.
    """

    tool: str
    executable: Path | None
    runs_here: bool
    why: str


def choose_tool(tool: str) -> Choice:
    """What to run a benchmark with on this machine.

    Args:
        tool: one of `moetrt.bench.plan.TOOLS`, or "auto": trtexec of whatever version is here, else tensorrt_rtx, else
            TensorRT's Python module; without a GPU, or with none of them, a script for trtexec.

    Raises:
        InputError: there is no such tool, or the executable that is here is of another TensorRT than was asked for, or
            of one that is not taken.
    """
    if tool not in ("auto", *TOOLS):
        raise InputError(f"tool was '{tool}'; auto, {', '.join(TOOLS)} are taken")
    gpu = bool(gpus())
    here = "" if gpu else "; no GPU is to be seen here"
    if tool == "auto":
        trtexec_path = trtexec.find_executable("trtexec")
        version = trtexec.version_of(trtexec_path) if trtexec_path else None
        if trtexec_path and version:
            return Choice(
                trtexec.key_of_version(version), trtexec_path, gpu, f"{trtexec_path} of TensorRT {version}{here}"
            )
        rtx_path = trtexec.find_executable("tensorrt_rtx")
        if rtx_path:
            return Choice("tensorrt-rtx", rtx_path, gpu, f"{rtx_path}{here}")
        if gpu and (installed(TENSORRT) or installed(TENSORRT_RTX)):
            return Choice(PYTHON, None, True, "TensorRT's Python module; trtexec is not here")
        return Choice(
            "trtexec-11",
            None,
            False,
            f"trtexec is not here{here}; the commands are those of TensorRT 11's trtexec, --tool names another",
        )
    if tool == PYTHON:
        if not gpu:
            raise InputError("tool python runs on a GPU and none is to be seen; trtexec-10 and others write a script")
        return Choice(PYTHON, None, True, "TensorRT's Python module")
    wanted = trtexec.tool(tool)
    path = trtexec.find_executable(wanted.executable)
    if path is None:
        return Choice(tool, None, False, f"{wanted.executable} is not here{here}")
    if tool.startswith("trtexec-"):
        version = trtexec.version_of(path)
        if version is None:
            raise InputError(f"'{path}' does not say which TensorRT it is of; it is taken for no {tool}")
        if trtexec.key_of_version(version) != tool:
            raise InputError(
                f"'{path}' is of TensorRT {version}; tool was {tool}, {trtexec.key_of_version(version)} is taken"
            )
    return Choice(tool, path, gpu, f"{path}{here}")


def check_program(choice: Choice) -> None:
    """Checks that there are command lines to print or write.

    Raises:
        InputError: the choice is the Python module.
    """
    if choice.tool == PYTHON:
        raise InputError("tool python has no command lines; --tool trtexec-10, trtexec-11 or tensorrt-rtx has")


def prepare(
    model_path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    choice: Choice,
    *,
    plugin_library: str | os.PathLike[str] | None = None,
    minimum: Shapes | None = None,
    optimum: Shapes | None = None,
    maximum: Shapes | None = None,
    points: Sequence[Shapes] = (),
    inputs_path: str | os.PathLike[str] | None = None,
    repeats: int = 5,
    seconds: float | None = None,
    time_limit: float = TIME_LIMIT,
    write: bool = True,
) -> tuple[Plan, list[str]]:
    """Plans a benchmark and writes its folder: manifest, library, inputs and, for a tool that is a program, the script.

    Args:
        model_path, plugin_library, minimum, optimum, maximum, points, repeats, seconds: as for `make_plan`.
        folder: where everything goes.
        choice: what it is to be run with.
        inputs_path: saved inputs, each feed a point, in place of ``points``.
        time_limit: seconds that each command may take.
        write: False only plans.

    Returns:
        The plan, and lines that the user should see.

    Raises:
        InputError: as `make_plan`, or a file cannot be written.
    """
    place = Path(folder)
    if not 0 < time_limit < math.inf:
        raise InputError(f"time limit was {time_limit:g} s; a number above 0 is taken")
    feeds = read_feeds(inputs_path) if inputs_path is not None else []
    plan, notes = make_plan(
        model_path,
        place,
        tool=choice.tool,
        plugin_library=plugin_library,
        minimum=minimum,
        optimum=optimum,
        maximum=maximum,
        points=points,
        feeds=feeds,
        inputs_name=f"inputs '{inputs_path}'",
        repeats=repeats,
        seconds=seconds,
    )
    if write:
        _check_outputs(plan, place, model_path, inputs_path)
        output_directory(place)
        copy_library(plan, place, plugin_library)
        write_inputs(plan, place, feeds)
        _write_plan(plan, place, time_limit, notes)
        # The figures of an older run.
        (place / RESULT).unlink(missing_ok=True)
    return plan, notes


def _check_outputs(
    plan: Plan, folder: Path, model_path: str | os.PathLike[str], inputs_path: str | os.PathLike[str] | None
) -> None:
    """Checks that the benchmark's files are none of those that it reads."""
    read = files_of(load_model(model_path), model_path)
    if inputs_path is not None:
        read.append(("inputs file that is read", inputs_path))
    written = [MANIFEST, SCRIPT, RESULT, *(file for point in plan.points for file in point.inputs.values())]
    written += [f"{plan.engine(way)}" for way in (PLUGIN, NATIVE)]
    places = [folder / file for file in written] + page_files(folder)
    check_distinct(read, [("file of the benchmark", place) for place in places])


def _write_plan(plan: Plan, folder: Path, time_limit: float, notes: Sequence[str]) -> None:
    with write_atomically(folder / MANIFEST) as temporary:
        temporary.write_text(manifest_text(plan, command_line(), versions(), notes), encoding="utf-8")
    if plan.tool == PYTHON:
        return
    with write_atomically(folder / SCRIPT) as temporary:
        temporary.write_text(script_text(plan, time_limit=time_limit), encoding="utf-8")
        temporary.chmod(0o755)


def run_plan(
    plan: Plan, folder: Path, executable: Path, *, time_limit: float, progress: Callable[[str], None] | None = None
) -> None:
    """Runs every command of a plan in its folder, output captured in the logs.

    Args:
        plan: for a tool that is a program.
        folder: where the manifest lies.
        executable: the program.
        time_limit: seconds that each command may take.
        progress: told of each command before it starts.

    Raises:
        InputError: a command failed (with its first error), took too long, or left out a file.
    """
    say = progress or (lambda _: None)
    library = library_sha256(folder / plan.library)
    steps = plan.steps()
    for number, step in enumerate(steps, 1):
        say(f"[{number}/{len(steps)}] {step.title}")
        log = folder / step.log
        log.parent.mkdir(parents=True, exist_ok=True)
        for output in step.outputs:
            (folder / output).unlink(missing_ok=True)
        with log.open("w", encoding="utf-8") as file:
            print(f"{plan.stamp(step.way)} {library if step.way == PLUGIN else 'none'}", file=file, flush=True)
            command = [str(executable.absolute()), *step.command[1:]]
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=time_limit,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise InputError(
                    f"{step.title}: took longer than {time_limit:g} s (--time-limit allows more); see '{log}'"
                ) from error
            except OSError as error:
                raise InputError(f"'{executable}' cannot be run: {error.strerror or error}") from error
        text = log.read_text(encoding="utf-8", errors="replace")
        if done.returncode != 0:
            said = first_error(text.partition("\n")[2])
            raise InputError(f"{step.title}: {executable.name} ended with code {done.returncode}: {said}; see '{log}'")
        for output in step.outputs:
            if not (folder / output).is_file():
                raise InputError(f"{step.title}: {executable.name} wrote no '{folder / output}'; see '{log}'")


def read_bench(
    model_path: str | os.PathLike[str], folder: str | os.PathLike[str], *, bandwidth: float | None = None
) -> BenchResult:
    """Reads a benchmark's folder and writes its figures into ``bench.json`` there.

    Args:
        model_path: the mapped model that the figures must be of.
        folder: where the manifest lies.
        bandwidth: of the GPU's memory, bytes a second; None takes what the logs tell.

    Raises:
        InputError: as `read_result`; or the benchmark is of another model.
    """
    place = Path(folder)
    plan, manifest = read_manifest(place)
    source = existing_file(model_path, "ONNX model")
    found = file_sha256(source)
    if found != plan.model_sha256:
        raise InputError(
            f"benchmark '{place}' is of another model than '{source}': SHA-256 {plan.model_sha256[:12]}..., "
            f"not {found[:12]}..."
        )
    result = read_result(plan, place, manifest, bandwidth=bandwidth)
    with write_atomically(place / RESULT) as temporary:
        temporary.write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    return result


def print_result(out: Output, result: BenchResult) -> None:
    """Prints the figures of every point."""
    told = f"TensorRT {result.versions['TensorRT']}" if "TensorRT" in result.versions else "TensorRT, version not told"
    out.line(f"{Path(result.plan.model).name}, {told} ({result.plan.tool}), {result.device or 'GPU not told'}")
    out.line(f"median ± interquartile range over {result.plan.repeats} repeats; ratio: native / plugin in one repeat")
    if result.bandwidth is not None:
        source = result.bandwidth_source
        out.line(f"floor: the bytes that a tail must move, at {result.bandwidth / 1e12:.2f} TB/s ({source})")
    for entry in result.points:
        out.line()
        out.heading(entry.point.title)
        share = ", ".join(f"{way} {_told(entry.share[way], 1, 100, ' %')}" for way in (PLUGIN, NATIVE))
        out.table(
            ("", "plugin, us", "native, us", "ratio", "floor, us"),
            [
                _row(entry.end_to_end, "end to end", None),
                _row(entry.all_tails, "all tails", result.bandwidth),
                *(_row(tail, _short(tail.name), result.bandwidth) for tail in entry.tails[:_MOST_ROWS]),
            ],
        )
        if len(entry.tails) > _MOST_ROWS:
            out.line(f"and {len(entry.tails) - _MOST_ROWS} tails more in {RESULT}")
        out.line(f"tails' share of the layers' time: {share}")
        native = [timing.native_ms for timing in (entry.all_tails, *entry.tails)]
        if not all(figure is None or figure.exact for figure in native):
            out.line("a range: native layers that a tail shares with other nodes have one time, not counted or counted")
        for way, unknown in entry.unattributed.items():
            if unknown.median > 0:
                out.line(f"{way}: {unknown.median:.1%} of the time is in layers that do not name their nodes")
    for note in result.notes:
        out.line(f"note: {note}")


def _row(compared: Compared, name: str, bandwidth: float | None) -> tuple[str, ...]:
    floor = compared.floor_ms(bandwidth)
    return (
        name,
        compared.plugin_ms.text(1, 1e3),
        _told(compared.native_ms, 1, 1e3),
        _told(compared.ratio, 2) if compared.ratio is not None else "-",
        "-" if floor is None else f"{floor * 1e3:.2f}",
    )


def _told(figure: Range | None, digits: int, unit: float = 1.0, end: str = "") -> str:
    return "not found" if figure is None else figure.text(digits, unit) + end


def _short(name: str) -> str:
    return name.rpartition("/MoEFinalize")[0] or name


def run_here(
    plan: Plan,
    folder: str | os.PathLike[str],
    choice: Choice,
    *,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Runs a plan on this machine, with the executable or the Python module that was chosen.

    Raises:
        InputError: as `run_plan`, or as `moetrt.bench.python_runtime.run_plan`.
    """
    if choice.executable is not None:
        run_plan(plan, Path(folder), choice.executable, time_limit=time_limit, progress=progress)
    else:
        from moetrt.bench import python_runtime

        python_runtime.run_plan(plan, Path(folder), progress=progress)


def script_lines(plan: Plan, folder: str | os.PathLike[str]) -> list[str]:
    """What to do on the machine that can run the plan."""
    place = Path(folder)
    read = ["moetrt", "bench", os.path.normpath(place / plan.model), "-o", str(place), "--read"]
    return [
        f"script: {place / SCRIPT}; nothing was run",
        f"on the machine with the GPU:  {shlex.join(['bash', str(place / SCRIPT)])}",
        f"then, here or there:          {shlex.join(read)}",
    ]


def commands_text(plan: Plan) -> str:
    """Every command line of the plan, for the shell, in the benchmark's folder."""
    return "\n".join(f"# {step.title}\n{trtexec.command_text(step.command)}" for step in plan.steps())
