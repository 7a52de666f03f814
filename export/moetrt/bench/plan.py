"""What a benchmark will do: its points, repeats and command lines, as a manifest, and as a script for another machine.

Everything lies in one folder, and every path in it is relative to that folder:

    DIR/bench.manifest.json          the plan; says which model, which library and which tool the figures are of
    DIR/bench.sh                     runs the plan on the machine that has trtexec
    DIR/bench.json                   the figures, once they were read
    DIR/bench/libmoetrt_plugins.so   the library, copied
    DIR/bench/plugin.engine          and native.engine, each with its .log
    DIR/bench/1/plugin.3.times.json  point 1, repeat 3; beside it .profile.json, .layers.json and .log
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrt.bench import trtexec
from moetrt.errors import InputError
from moetrt.json_files import Field, read_json
from moetrt.profiles import Profile, Shape

MANIFEST = "bench.manifest.json"
SCRIPT = "bench.sh"
FILES = "bench"
"""The folder beside them that has everything else."""

FORMAT = "moetrt.bench-manifest/1"

PLUGIN = "plugin"
NATIVE = "native"
PYTHON = "python"
"""The tool that stands for TensorRT's Python module in place of an executable."""

TOOLS = (*trtexec.TOOLS, PYTHON)


@dataclass(frozen=True)
class TailOfModel:
    """One tail of the mapped model.

    Attributes:
        name: of its node.
        operator: its op_type.
        floor_bytes: by point: the bytes that it must move; None where the file's shapes do not tell T.
    """

    name: str
    operator: str
    floor_bytes: tuple[int | None, ...]


@dataclass(frozen=True)
class Point:
    """Sizes to measure at.

    Attributes:
        name: "1", "2", ...: its folder.
        shapes: sizes of every input.
        inputs: input name -> file with its raw bytes, relative to the benchmark's folder; empty: random numbers.
    """

    name: str
    shapes: Mapping[str, Shape]
    inputs: Mapping[str, str]

    @property
    def title(self) -> str:
        """The sizes, for people."""
        return trtexec.shapes_text(self.shapes)


@dataclass(frozen=True)
class Step:
    """One command of the plan, to be run in the benchmark's folder.

    Attributes:
        title: what it does, for people.
        way: PLUGIN or NATIVE.
        command: the argument list.
        log: the file that takes its output.
        outputs: the files that it writes.
    """

    title: str
    way: str
    command: tuple[str, ...]
    log: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A whole benchmark; everything that its figures depend on.

    Attributes:
        tool: a key of `TOOLS`.
        model: the mapped file, relative to the benchmark's folder.
        model_sha256: of that file (its external data is not part of it).
        library: the plugin library, likewise.
        library_sha256: of that file.
        profile: input name -> (min, opt, max) of every input.
        dynamic: the inputs that have a dynamic dimension: trtexec takes no shapes of others.
        points: sizes to measure at.
        repeats: how often each way is run at each point.
        seconds: measure each run for at least this long; None is the tool's default.
        tails: the model's tails.
    """

    tool: str
    model: str
    model_sha256: str
    library: str
    library_sha256: str
    profile: Mapping[str, Profile]
    dynamic: tuple[str, ...]
    points: tuple[Point, ...]
    repeats: int
    seconds: float | None
    tails: tuple[TailOfModel, ...]

    @property
    def key(self) -> str:
        """Names the plan: every log starts with it, so that a file of another benchmark is told apart."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON."""
        return {
            "tool": self.tool,
            "model": {"file": self.model, "sha256": self.model_sha256},
            "library": {"file": self.library, "sha256": self.library_sha256},
            "profile": {
                name: dict(zip(("min", "opt", "max"), map(list, bounds), strict=True))
                for name, bounds in self.profile.items()
            },
            "dynamic": list(self.dynamic),
            "points": [
                {
                    "name": point.name,
                    "shapes": {name: list(shape) for name, shape in point.shapes.items()},
                    "inputs": dict(point.inputs),
                }
                for point in self.points
            ],
            "repeats": self.repeats,
            "seconds": self.seconds,
            "tails": [
                {"name": tail.name, "operator": tail.operator, "floor_bytes": list(tail.floor_bytes)}
                for tail in self.tails
            ],
        }

    @classmethod
    def read(cls, content: Field) -> "Plan":
        """The plan that `as_dict` gave.

        Raises:
            InputError: it is none.
        """
        return cls(
            tool=content["tool"].of(str),
            model=content["model"]["file"].file(),
            model_sha256=content["model"]["sha256"].sha256(),
            library=content["library"]["file"].file(),
            library_sha256=content["library"]["sha256"].sha256(),
            profile={
                name: (bounds["min"].sizes(), bounds["opt"].sizes(), bounds["max"].sizes())
                for name, bounds in content["profile"].items().items()
            },
            dynamic=tuple(name.of(str) for name in content["dynamic"].entries()),
            points=tuple(
                Point(
                    entry["name"].of(str),
                    {name: shape.sizes() for name, shape in entry["shapes"].items().items()},
                    {name: file.file() for name, file in entry["inputs"].items().items()},
                )
                for entry in content["points"].entries()
            ),
            repeats=content["repeats"].count(),
            seconds=content["seconds"].or_none(float),
            tails=tuple(
                TailOfModel(
                    entry["name"].of(str),
                    entry["operator"].of(str),
                    tuple(size.or_none(int) for size in entry["floor_bytes"].entries()),
                )
                for entry in content["tails"].entries()
            ),
        )

    def library_of(self, way: str) -> str | None:
        """The library that a way loads, relative to the benchmark's folder."""
        return self.library if way == PLUGIN else None

    def prefix(self, point: Point, repeat: int, way: str) -> str:
        """Where a run's files go: ``PREFIX.times.json`` and so on."""
        return f"{FILES}/{point.name}/{way}.{repeat}"

    def engine(self, way: str) -> str:
        """Where a way's engine goes."""
        return f"{FILES}/{way}.engine"

    def build_log(self, way: str) -> str:
        """Where the log of its build goes."""
        return f"{FILES}/{way}.log"

    def ways(self, repeat: int) -> tuple[str, str]:
        """The order within a repeat, turned round each time, so that a clock that drifts favours neither."""
        return (PLUGIN, NATIVE) if repeat % 2 else (NATIVE, PLUGIN)

    def runs(self) -> Iterator[tuple[Point, int, str]]:
        """(point, repeat, way) of every run, in order; repeats count from 1."""
        for point in self.points:
            for repeat in range(1, self.repeats + 1):
                for way in self.ways(repeat):
                    yield point, repeat, way

    def stamp(self, way: str) -> str:
        """How every log of a way starts; the SHA-256 sum of the library that was loaded follows, or "none"."""
        return f"moetrt bench {self.key} {way} library"

    def steps(self) -> list[Step]:
        """Every command line, in order. Not for the tool PYTHON, which has none."""
        profile = {name: self.profile[name] for name in self.dynamic}
        steps = []
        for way in (PLUGIN, NATIVE):
            engine = self.engine(way)
            build = trtexec.build_command(
                self.model, engine, tool_key=self.tool, plugin_library=self.library_of(way), profile=profile
            )
            steps.append(Step(f"build, {way}", way, tuple(build), self.build_log(way), (engine,)))
        for point, repeat, way in self.runs():
            prefix = self.prefix(point, repeat, way)
            run = trtexec.run_command(
                self.engine(way),
                tool_key=self.tool,
                plugin_library=self.library_of(way),
                shapes={name: point.shapes[name] for name in self.dynamic},
                inputs=point.inputs,
                seconds=self.seconds,
                export_prefix=prefix,
                per_layer=True,
            )
            outputs = tuple(f"{prefix}.{what}.json" for what in ("times", "profile", "layers"))
            title = f"{point.title}, repeat {repeat} of {self.repeats}, {way}"
            steps.append(Step(title, way, tuple(run), f"{prefix}.log", outputs))
        return steps


def manifest_text(plan: Plan, command: str | None, versions: Mapping[str, str], notes: Sequence[str]) -> str:
    """The manifest: the plan, its key, what made it, and what a reader of the figures should know."""
    made = {"command": command, "versions": dict(versions), "notes": list(notes)}
    return json.dumps({"format": FORMAT, "key": plan.key} | made | plan.as_dict(), indent=2) + "\n"


@dataclass(frozen=True)
class Made:
    """What a manifest says beside the plan.

    Attributes:
        command: that makes the benchmark again; None where it was planned from Python.
        versions: of what planned it.
        notes: what a reader of the figures should know.
    """

    command: str | None
    versions: Mapping[str, str]
    notes: tuple[str, ...]


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Plan, Made]:
    """The plan in a benchmark's folder, and what its manifest says beside it.

    Raises:
        InputError: there is none, or it was changed.
    """
    path = Path(folder) / MANIFEST
    content = read_json(path, "manifest of the benchmark", FORMAT, "moetrt bench")
    plan = Plan.read(content)
    if content["key"].of(str) != plan.key:
        raise InputError(f"'{path}' was changed since moetrt bench wrote it, or another version of moetrt did")
    return plan, Made(
        command=content["command"].or_none(str),
        versions={name: version.of(str) for name, version in content["versions"].items().items()},
        notes=tuple(note.of(str) for note in content["notes"].entries()),
    )


def script_text(plan: Plan, *, time_limit: float) -> str:
    """A bash script that runs the plan where the tool is: paths relative to its own folder, nothing else needed.

    Args:
        plan: for a tool with an executable.
        time_limit: seconds that each command may take.
    """
    tool = trtexec.tool(plan.tool)
    steps = plan.steps()
    lines = [
        "#!/usr/bin/env bash",
        f"# Builds and times {Path(plan.model).name} with the plugin and with {tool.title}'s own layers.",
        "# On the machine with the GPU, beside the files it was written with:",
        "#   bash bench.sh [MODEL]         MODEL: the mapped file, where it lies elsewhere than it did",
        f"#   TRTEXEC=/path/to/{tool.executable} LIMIT=7200 bash bench.sh",
        "# Then, on any machine that has the folder: moetrt bench MODEL -o FOLDER --read",
        "set -euo pipefail",
        "",
        'fail() { echo "bench.sh: error: $*" >&2; exit 1; }',
        'if [[ $# -gt 0 ]]; then MODEL=$(realpath -- "$1"); fi',
        'if [[ ${TRTEXEC-} == */* ]]; then TRTEXEC=$(realpath -- "$TRTEXEC"); fi',
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"MODEL=${{MODEL-{shlex.quote(plan.model)}}}",
        f"TRTEXEC=${{TRTEXEC-{tool.executable}}}",
        f"LIMIT=${{LIMIT-{time_limit:g}}}",
        f"LIBRARY={shlex.quote(plan.library)}",
        "",
        f'command -v "$TRTEXEC" >/dev/null || fail "$TRTEXEC is not there; {tool.title} has it (TRTEXEC=... names it)"',
        '[[ -f $MODEL ]] || fail "$MODEL is not there; bash bench.sh MODEL names it"',
        f'[[ $(sha256sum -- "$MODEL") == {plan.model_sha256}* ]] ||'
        ' fail "$MODEL is not the file that this was written for"',
        '[[ -f $LIBRARY ]] || fail "$LIBRARY is not there; it lay beside this script"',
        *_version_check(plan.tool),
        'LIBRARY_SHA256=$(sha256sum -- "$LIBRARY")',
        "LIBRARY_SHA256=${LIBRARY_SHA256%% *}",
        "",
        "DONE=0",
        "# step TITLE LOG LIBRARY-SHA256 WAY OUTPUTS -- COMMAND...",
        "step() {",
        "  local title=$1 log=$2 library=$3 way=$4; shift 4",
        '  local outputs=(); while [[ $1 != -- ]]; do outputs+=("$1"); shift; done; shift',
        f'  DONE=$((DONE + 1)); echo "[$DONE/{len(steps)}] $title"',
        '  mkdir -p -- "$(dirname -- "$log")"; rm -f -- "${outputs[@]}"',
        f'  echo "moetrt bench {plan.key} $way library $library" >"$log"',
        "  local code=0",
        '  timeout --foreground "$LIMIT" "$@" >>"$log" 2>&1 || code=$?',
        '  if [[ $code == 124 ]]; then fail "$title took longer than $LIMIT s (LIMIT=... allows more); see $log"; fi',
        "  if [[ $code != 0 ]]; then",
        '    grep -m 1 -e "^\\[moetrt\\]" "$log" >&2 || grep -m 1 -F "[E]" "$log" >&2 ||',
        '      { grep -v -e "^&&&&" "$log" | tail -n 1 >&2; }',
        '    fail "$title ended with code $code; see $log"',
        "  fi",
        '  local output; for output in "${outputs[@]}"; do',
        '    [[ -s $output ]] || fail "$title wrote no $output; see $log"',
        "  done",
        "}",
        "",
    ]
    for step in steps:
        library = '"$LIBRARY_SHA256"' if step.way == PLUGIN else "none"
        words = [shlex.quote(step.title), shlex.quote(step.log), library, step.way]
        words += [shlex.quote(output) for output in step.outputs]
        lines.append(f"step {' '.join(words)} -- \\")
        lines.append("  " + " \\\n    ".join(['"$TRTEXEC"', *(_script_word(word, plan) for word in step.command[1:])]))
    lines += ["", f'echo "done; figures: moetrt bench MODEL -o FOLDER --read (the folder with {MANIFEST})"']
    return "\n".join(lines) + "\n"


def _version_check(tool: str) -> list[str]:
    if tool == "tensorrt-rtx":
        # What its banner looks like is not known; the reader looks again.
        return []
    major = tool.removeprefix("trtexec-")
    return [
        'HELP=$("$TRTEXEC" --help 2>&1 || true)',
        r'[[ $HELP =~ \[TensorRT\ v([0-9]{5,})\] ]] || fail "$TRTEXEC does not say which TensorRT it is of"',
        "VERSION=${BASH_REMATCH[1]}",
        f"[[ $((VERSION / 10000)) == {major} ]] ||"
        f' fail "$TRTEXEC is of TensorRT $((VERSION / 10000)); this was written for {major}'
        ' (moetrt bench --tool trtexec-$((VERSION / 10000)) writes for it)"',
        *(
            ['(( VERSION >= 100800 )) || fail "$TRTEXEC is of TensorRT 10.$((VERSION / 100 % 100)); 10.8 is needed"']
            if major == "10"
            else []
        ),
    ]


def _script_word(word: str, plan: Plan) -> str:
    return '--onnx="$MODEL"' if word == f"--onnx={Path(plan.model)}" else shlex.quote(word)
