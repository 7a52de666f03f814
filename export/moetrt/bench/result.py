"""A benchmark's figures: what its files say, the plugin against the native layers, end to end and tail by tail.

Which time is a tail's: the profile has a time for each layer, and the engine says of each layer which ONNX nodes it
computes. A layer whose nodes are all one tail's is that tail's alone. A layer that computes nodes of a tail and of
something else (TensorRT fuses across the border) has one time that cannot be divided: it is kept apart, and the ratio
is given as a range, from none of it to all of it. A layer without a word about its nodes counts for a tail only where
its name has the tail's node name in it, and for that tail alone only where it has nothing else; else it is
unattributed, and its share of the time is given. A tail of which no native layer is found has no native time and no
ratio.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrt.bench.plan import MANIFEST, NATIVE, PLUGIN, PYTHON, Made, Plan, Point, TailOfModel
from moetrt.bench.trtexec_files import Layer, Log, first_error, read_layers, read_log, read_profile, read_times
from moetrt.errors import InputError

FORMAT = "moetrt.bench/1"

STATISTICS = (
    "Each run gives the median of its queries (end to end) or of its iterations (a layer; a tail is the sum of its "
    "layers' medians). A figure is the median of those over the repeats, its spread the interquartile range. A ratio "
    "is taken within each repeat, native over plugin, and then treated alike."
)

_COARSE = 0.01
"""A query's time whose steps are a larger part of it than this is told of."""


@dataclass(frozen=True)
class Spread:
    """One figure over the repeats."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def iqr(self) -> float | None:
        """The interquartile range; None for a single run."""
        if len(self.runs) < 2:
            return None
        lower, _, upper = statistics.quantiles(self.runs, n=4, method="inclusive")
        return upper - lower

    def as_dict(self) -> dict[str, Any]:
        """The figure for JSON."""
        return {"median": self.median, "iqr": self.iqr, "runs": list(self.runs)}

    def text(self, digits: int = 1, unit: float = 1.0) -> str:
        """``median +- iqr``, times ``unit``."""
        spread = "" if self.iqr is None else f" ± {self.iqr * unit:.{digits}f}"
        return f"{self.median * unit:.{digits}f}{spread}"


@dataclass(frozen=True)
class Range:
    """A figure of which only bounds can be told: ``low`` without the layers that are shared, ``high`` with them."""

    low: Spread
    high: Spread

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def as_dict(self) -> dict[str, Any]:
        """The figure for JSON; ``exact`` says whether both bounds are one."""
        return {"low": self.low.as_dict(), "high": self.high.as_dict(), "exact": self.exact}

    def text(self, digits: int = 1, unit: float = 1.0) -> str:
        """One figure where it is exact, else the medians of both bounds."""
        if self.exact:
            return self.low.text(digits, unit)
        return f"{self.low.median * unit:.{digits}f} to {self.high.median * unit:.{digits}f}"


@dataclass(frozen=True)
class Compared:
    """The plugin and the native layers at one point, end to end, of one tail or of all tails.

    Attributes:
        name: what is compared.
        plugin_ms, native_ms: GPU time, milliseconds; of the native layers None where they were not found.
        ratio: native over plugin within each repeat; above 1 the plugin is faster; None likewise.
        floor_bytes: what must be moved; None where it is not known, or for the whole model.
        layers: by way, the names of the layers that are its own and of those that it shares.
    """

    name: str
    plugin_ms: Range
    native_ms: Range | None
    ratio: Range | None
    floor_bytes: int | None = None
    layers: dict[str, dict[str, list[str]]] | None = None

    def as_dict(self, bandwidth: float | None) -> dict[str, Any]:
        """The figures for JSON; the floor is in milliseconds at ``bandwidth`` bytes a second."""
        content: dict[str, Any] = {
            "name": self.name,
            "plugin_ms": self.plugin_ms.as_dict(),
            "native_ms": None if self.native_ms is None else self.native_ms.as_dict(),
            "ratio": None if self.ratio is None else self.ratio.as_dict(),
        }
        if self.layers is not None:
            content["layers"] = self.layers
            floor = self.floor_ms(bandwidth)
            content["floor"] = {"bytes": self.floor_bytes, "ms": floor}
            if floor is not None:
                content["floor"]["of_plugin_time"] = floor / self.plugin_ms.high.median
        return content

    def floor_ms(self, bandwidth: float | None) -> float | None:
        """The time that its bytes take at that bandwidth; None where either is not known."""
        if self.floor_bytes is None or bandwidth is None:
            return None
        return self.floor_bytes / bandwidth * 1e3


@dataclass(frozen=True)
class PointResult:
    """What came out at one point.

    Attributes:
        point: its sizes.
        end_to_end: GPU time of a whole query.
        tails: each tail, in the order of the model.
        all_tails: their sum; a layer that two tails share counts once.
        share: by way: the tails' part of the profile's time, 0 to 1; None where layers of a tail were not found.
        unattributed: by way: the part of the profile's time in layers that say nothing of their nodes.
    """

    point: Point
    end_to_end: Compared
    tails: tuple[Compared, ...]
    all_tails: Compared
    share: dict[str, Range | None]
    unattributed: dict[str, Spread]


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark gave.

    Attributes:
        plan: what was run.
        command: that makes the benchmark again; None where it was planned from Python.
        versions: of moetrt, and of TensorRT as the logs say.
        device: the GPU's name.
        bandwidth: bytes a second that the floor is for; None where neither the user nor the log told.
        bandwidth_source: where it comes from.
        points: the figures.
        notes: what a reader of the figures should know, trtexec's own warnings among them.
    """

    plan: Plan
    command: str | None
    versions: dict[str, str]
    device: str | None
    bandwidth: float | None
    bandwidth_source: str
    points: tuple[PointResult, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        plan = self.plan
        return {
            "format": FORMAT,
            "command": self.command,
            "versions": self.versions,
            "model": {"file": plan.model, "sha256": plan.model_sha256},
            "library": {"file": plan.library, "sha256": plan.library_sha256},
            "tool": plan.tool,
            "device": self.device,
            "bandwidth": {"bytes_per_second": self.bandwidth, "source": self.bandwidth_source},
            "repeats": plan.repeats,
            "statistics": STATISTICS,
            "points": [
                {
                    "name": entry.point.name,
                    "shapes": {name: list(shape) for name, shape in entry.point.shapes.items()},
                    "end_to_end": entry.end_to_end.as_dict(None),
                    "all_tails": entry.all_tails.as_dict(self.bandwidth),
                    "share_in_tails": {
                        way: None if share is None else share.as_dict() for way, share in entry.share.items()
                    },
                    "unattributed": {way: share.as_dict() for way, share in entry.unattributed.items()},
                    "tails": [tail.as_dict(self.bandwidth) for tail in entry.tails],
                }
                for entry in self.points
            ],
            "notes": list(self.notes),
        }


def read_result(plan: Plan, folder: Path, manifest: Made, *, bandwidth: float | None = None) -> BenchResult:
    """Reads a benchmark's files and works its figures out.

    Args:
        plan, manifest: as `read_manifest` gave them.
        folder: where the files lie.
        bandwidth: of the GPU's memory, bytes a second; None takes what the logs tell.

    Raises:
        InputError: a file is missing, cut off, of another benchmark or of another version of TensorRT; or the engine
            with the plugin has no layer for a tail.
    """
    logs = [_log(plan, folder, plan.build_log(way), way) for way in (PLUGIN, NATIVE)]
    runs: dict[tuple[str, int, str], _Run] = {}
    for point, repeat, way in plan.runs():
        prefix = plan.prefix(point, repeat, way)
        logs.append(_log(plan, folder, f"{prefix}.log", way))
        runs[point.name, repeat, way] = _Run(plan, folder, prefix, way)
    told = [log for _, log, _ in logs]
    version = _one([(file, log.version) for file, log, _ in logs], "TensorRT")
    device = _one([(file, log.device) for file, log, _ in logs], "the GPU")
    library = _one([(file, library) for file, _, library in logs if library != "none"], "the plugin library")
    _check_same_layers(plan, runs)
    points = tuple(_point_result(plan, index, runs) for index in range(len(plan.points)))
    notes = [*manifest.notes, *_warnings(told), *_coarse(plan, runs)]
    if version is None:
        notes.append("the logs do not say which TensorRT was run")
    if library != plan.library_sha256:
        notes.append(f"the plugin library that ran is another than {MANIFEST}'s: its SHA-256 is {library}")
    source = "given"
    if bandwidth is None:
        bandwidth = next((log.bandwidth for log in told if log.bandwidth is not None), None)
        source = "bus width x memory clock x 2, from the log" if bandwidth is not None else "not known"
    return BenchResult(
        plan=plan,
        command=manifest.command,
        versions={**manifest.versions, **({"TensorRT": version} if version else {})},
        device=device,
        bandwidth=bandwidth,
        bandwidth_source=source,
        points=points,
        notes=tuple(dict.fromkeys([*notes, *_not_found(points)])),
    )


def _check_same_layers(plan: Plan, runs: Mapping[tuple[str, int, str], "_Run"]) -> None:
    """One engine ran in all runs of a way: they have the same layers, and at one point times of the same."""
    first: dict[tuple[str, str], _Run] = {}
    for (point, _, way), run in runs.items():
        for part, found in (("", run.layers), (point, sorted(run.parts))):
            other = first.setdefault((way, part), run)
            if found != (other.layers if not part else sorted(other.parts)):
                raise InputError(
                    f"'{run.layers_path if not part else run.profile.path}' has other layers than "
                    f"'{other.layers_path if not part else other.profile.path}', and both are of one engine, {way}; "
                    "run the benchmark again"
                )


def _warnings(logs: Sequence[Log]) -> list[str]:
    """The logs' warnings: of those that differ in numbers alone, as each run has its own, the first."""
    alike: dict[str, list[str]] = {}
    for log in logs:
        for warning in log.warnings:
            found = alike.setdefault(re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", warning), [])
            if warning not in found:
                found.append(warning)
    return [
        first + (f" (and {len(others)} more with other numbers: see the logs)" if others else "")
        for first, *others in alike.values()
    ]


def _coarse(plan: Plan, runs: Mapping[tuple[str, int, str], "_Run"]) -> list[str]:
    """What to say of queries that are short beside what trtexec can tell of them."""
    if plan.tool == PYTHON:
        return []
    return [
        f"a {way} query of point {point} takes {run.compute_ms * 1e3:.3g} us, told in steps of "
        f"{run.times.step_ms * 1e3:.2g} us, which are trtexec's after {run.times.end_ms / 1e3:.2g} s; a shorter "
        "--seconds has finer ones"
        for (point, repeat, way), run in runs.items()
        if repeat == 1 and run.times.step_ms > _COARSE * run.compute_ms
    ]


def _not_found(points: Sequence[PointResult]) -> list[str]:
    """What to say of tails whose native layers no file names."""
    names = list(dict.fromkeys(tail.name for point in points for tail in point.tails if tail.native_ms is None))
    if not names:
        return []
    what = f"tail '{names[0]}'" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
    return [
        f"no native layer that took time names a node of {what}: its native time is not found and it has no ratio, and "
        "neither has the sum of all tails"
    ]


def _log(plan: Plan, folder: Path, name: str, way: str) -> tuple[Path, Log, str]:
    """The log, checked, with the library's sum in its first line."""
    path = folder / name
    if not path.exists():
        raise InputError(f"log '{path}' does not exist: the benchmark was not run, or not to its end")
    log = read_log(path)
    if log.failed:
        raise InputError(f"log '{path}' is of a run that failed: {first_error(log.text)}; run the benchmark again")
    stamp, _, library = log.text.partition("\n")[0].rpartition(" ")
    if stamp != plan.stamp(way):
        raise InputError(f"log '{path}' is of another benchmark than {MANIFEST} beside it; run the benchmark again")
    if plan.tool.startswith("trtexec-"):
        if log.version is None:
            raise InputError(f"log '{path}' names no TensorRT version; the run did not start: {first_error(log.text)}")
        if log.version.partition(".")[0] != plan.tool.removeprefix("trtexec-"):
            raise InputError(f"log '{path}' is of TensorRT {log.version}; this benchmark is for {plan.tool}")
        if not log.passed:
            raise InputError(
                f"log '{path}' has no PASSED line of trtexec's: the run did not end, or the log was cut off; run the "
                "benchmark again"
            )
    return path, log, library


def _one(found: Sequence[tuple[Path, str | None]], what: str) -> str | None:
    """The one value that all logs have; None where none has any."""
    values = [(file, value) for file, value in found if value is not None]
    for file, value in values[1:]:
        if value != values[0][1]:
            raise InputError(
                f"the logs differ in {what}: '{values[0][0]}' has {values[0][1]}, '{file}' has {value}; "
                "run the benchmark again on one machine"
            )
    return values[0][1] if values else None


class _Run:
    """The files of one run."""

    def __init__(self, plan: Plan, folder: Path, prefix: str, way: str) -> None:
        self.layers_path = folder / f"{prefix}.layers.json"
        self.times = read_times(folder / f"{prefix}.times.json")
        self.compute_ms = statistics.median(self.times.compute_ms)
        self.profile = read_profile(folder / f"{prefix}.profile.json")
        self.layers = read_layers(self.layers_path)
        for entry in self.profile.layers:
            if entry.name not in self.layers:
                raise InputError(
                    f"profile '{self.profile.path}' times layer '{entry.name}', which '{self.layers_path}' does not "
                    "have: they are not of one engine; run the benchmark again"
                )
        self.parts = {entry.name: attribute(self.layers[entry.name], plan.tails) for entry in self.profile.layers}
        self._check_way(plan, way)

    def _check_way(self, plan: Plan, way: str) -> None:
        """The parser says of a plugin's layer that it is the tail's node, of a native one that it is in its function.

        Raises:
            InputError: the engine without the plugin has one for a tail, or the other runs a tail's function.
        """
        for layer in self.layers.values():
            words = {word for origin in layer.origins or () for word in origin.split(" | ")}
            for tail in plan.tails:
                if way == NATIVE and (tail.name in words or (layer.origins is None and layer.name == tail.name)):
                    found, other = "a plugin layer", "they are of the engine with the plugin"
                elif way == PLUGIN and f"{tail.name} ({tail.operator})" in words:
                    found, other = "a native layer", "they are of the native engine, or the plugin was not loaded"
                else:
                    continue
                raise InputError(
                    f"layers '{self.layers_path}' have {found}, '{layer.name}', for tail '{tail.name}': {other}; run "
                    "the benchmark again"
                )

    def total(self, chosen: Iterable[str]) -> float:
        names = set(chosen)
        return sum(entry.median_ms for entry in self.profile.layers if entry.name in names)

    def own(self, tails: set[str]) -> list[str]:
        """The layers that are these tails' alone."""
        return [name for name, part in self.parts.items() if part.tails and part.tails <= tails and not part.shared]

    def shared(self, tails: set[str]) -> list[str]:
        """The layers that compute something of these tails and something else."""
        own = set(self.own(tails))
        return [name for name, part in self.parts.items() if part.tails & tails and name not in own]


@dataclass(frozen=True)
class Part:
    """What a layer computes.

    Attributes:
        tails: the tails that it has nodes of.
        shared: whether it has other nodes too.
        known: whether anything is known of it.
    """

    tails: frozenset[str]
    shared: bool
    known: bool


_COPY = re.compile(r"^Reformatting CopyNode for \w+ Tensor \d+ to (?=.)")
"""What TensorRT puts before a layer's name for the copies of its inputs and outputs."""


def attribute(layer: Layer, tails: Sequence[TailOfModel]) -> Part:
    """Which tails a layer computes nodes of; see the head of this file."""
    if layer.origins is None:
        named = frozenset(tail.name for tail in tails if _names(layer.name, tail.name))
        return Part(named, bool(named) and _COPY.sub("", layer.name) not in named, bool(named))
    by_origin = {tail.name: tail.name for tail in tails} | {
        f"{tail.name} ({tail.operator})": tail.name for tail in tails
    }
    # "INNER | TAIL (OPERATOR)": the tail may itself lie in a function.
    of = [{by_origin[word] for word in origin.split(" | ") if word in by_origin} for origin in layer.origins]
    found = frozenset(name for names in of for name in names)
    return Part(found, bool(found) and (any(not names for names in of) or len(found) > 1), True)


def _names(layer: str, tail: str) -> bool:
    """Whether a layer's name has the whole of a tail's name in it."""
    return re.search(rf"(?<![\w./]){re.escape(tail)}(?![\w./])", layer) is not None


def _point_result(plan: Plan, index: int, runs: dict[tuple[str, int, str], _Run]) -> PointResult:
    point = plan.points[index]
    repeats = range(1, plan.repeats + 1)
    by_way = {way: [runs[point.name, repeat, way] for repeat in repeats] for way in (PLUGIN, NATIVE)}

    seen = {
        tail.name
        for tail in plan.tails
        if all(run.total([*run.own({tail.name}), *run.shared({tail.name})]) > 0 for run in by_way[NATIVE])
    }

    def compared(name: str, tails: set[str], floor_bytes: int | None) -> Compared:
        bounds: dict[str, Range] = {}
        layers: dict[str, dict[str, list[str]]] = {}
        found = all(name in seen for name in tails)
        for way, of_way in by_way.items():
            own = [run.total(run.own(tails)) for run in of_way]
            shared = [run.total(run.shared(tails)) for run in of_way]
            bounds[way] = Range(Spread(tuple(own)), Spread(tuple(a + b for a, b in zip(own, shared, strict=True))))
            layers[way] = {"own": of_way[0].own(tails), "shared": of_way[0].shared(tails)}
        return _compared(name, bounds[PLUGIN], bounds[NATIVE] if found else None, floor_bytes, layers)

    for way, of_way in by_way.items():
        for tail in plan.tails:
            for run in of_way:
                _check_tail(plan, point, way, tail, run)
    whole = {way: Spread(tuple(run.compute_ms for run in of_way)) for way, of_way in by_way.items()}
    floors = [tail.floor_bytes[index] for tail in plan.tails]
    all_floor = None if None in floors else sum(floor for floor in floors if floor is not None)
    all_tails = compared("all tails", {tail.name for tail in plan.tails}, all_floor)
    share = {
        way: bounds and Range(_share(bounds.low, by_way[way]), _share(bounds.high, by_way[way]))
        for way, bounds in ((PLUGIN, all_tails.plugin_ms), (NATIVE, all_tails.native_ms))
    }
    unattributed = {
        way: Spread(
            tuple(
                run.total(name for name, part in run.parts.items() if not part.known) / run.profile.total_ms
                for run in of_way
            )
        )
        for way, of_way in by_way.items()
    }
    return PointResult(
        point=point,
        end_to_end=_compared("end to end", Range(whole[PLUGIN], whole[PLUGIN]), Range(whole[NATIVE], whole[NATIVE])),
        tails=tuple(compared(tail.name, {tail.name}, tail.floor_bytes[index]) for tail in plan.tails),
        all_tails=all_tails,
        share=share,
        unattributed=unattributed,
    )


def _check_tail(plan: Plan, point: Point, way: str, tail: TailOfModel, run: _Run) -> None:
    """The plugin is one layer, so that a time for it must be there; native layers may hide all they like."""
    if run.profile.total_ms <= 0:
        raise InputError(f"a {way} profile of point {point.name} has no time at all")
    if way == PLUGIN and run.total(run.own({tail.name})) <= 0:
        raise InputError(
            f"no layer of the engine with the plugin is tail '{tail.name}' alone, or it took no time: was it built "
            "with --dynamicPlugins and --profilingVerbosity=detailed?"
        )


def _share(part: Spread, runs: Sequence[_Run]) -> Spread:
    return Spread(tuple(value / run.profile.total_ms for value, run in zip(part.runs, runs, strict=True)))


def _compared(
    name: str,
    plugin: Range,
    native: Range | None,
    floor_bytes: int | None = None,
    layers: dict[str, dict[str, list[str]]] | None = None,
) -> Compared:
    if native is None:
        return Compared(name, plugin, None, None, floor_bytes, layers)
    low = tuple(a / b for a, b in zip(native.low.runs, plugin.high.runs, strict=True))
    high = tuple(a / b for a, b in zip(native.high.runs, plugin.low.runs, strict=True))
    return Compared(name, plugin, native, Range(Spread(low), Spread(high)), floor_bytes, layers)
