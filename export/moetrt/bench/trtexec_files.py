"""The files that trtexec writes, read back: times, per-layer profile, layer information, and its log.

The layouts were read from trtexec's sources, 10.8 to 11.1. What is peculiar to them: numbers come from C++ streams, so
that one may be ``nan`` or ``inf``; layer names are written without escapes; the first entry of a profile is the count
of iterations; the times leave the warm-up out.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrt.errors import InputError
from moetrt.files import existing_file

TIMES = "times"
PROFILE = "profile"
LAYERS = "layers"
LOG = "log"

_OPTION = {TIMES: "--exportTimes", PROFILE: "--exportProfile", LAYERS: "--exportLayerInfo"}

# C++ streams print these where JSON has nothing; only ever as a whole value.
_NOT_FINITE = re.compile(r'(?<=" : )(-?)(nan|inf)(?=\s*[,}\s])')
_PROFILE_LINE = re.compile(
    r'^[, ]*\{ *"name" : "(?P<name>.*)", "timeMs" : \S+, "averageMs" : (?P<average>\S+), '
    r'"medianMs" : (?P<median>\S+), "percentage" : \S+ \}$'
)


@dataclass(frozen=True)
class Times:
    """One run, without its warm-up.

    Attributes:
        compute_ms: GPU time of each query, in milliseconds.
        latency_ms: with the copies to and from the device, where they were not left out.
        end_ms: when the last query ended, since the start of the run, its warm-up included.
    """

    compute_ms: tuple[float, ...]
    latency_ms: tuple[float, ...]
    end_ms: float

    @property
    def step_ms(self) -> float:
        """What a query's time is a multiple of at the end of the run.

        trtexec takes the difference of two 32-bit floats that count from the start of the run.
        """
        return math.ldexp(1.0, math.frexp(self.end_ms)[1] - 24)


@dataclass(frozen=True)
class LayerTime:
    """One layer of a profile: average and median GPU time over its iterations, in milliseconds."""

    name: str
    average_ms: float
    median_ms: float


@dataclass(frozen=True)
class Profile:
    """A per-layer profile: its file, its number of iterations, and the layers in the order in which they ran."""

    path: Path
    iterations: int
    layers: tuple[LayerTime, ...]

    @property
    def total_ms(self) -> float:
        """The sum of the layers' medians."""
        return sum(layer.median_ms for layer in self.layers)


@dataclass(frozen=True)
class Layer:
    """One layer of an engine.

    Attributes:
        name: as the profile has it.
        origins: the ONNX nodes that it computes, as of `onnx_origins`; None where the engine does not say.
    """

    name: str
    origins: tuple[str, ...] | None


@dataclass(frozen=True)
class Log:
    """What a run of trtexec printed.

    Attributes:
        text: all of it.
        version: of TensorRT, such as "10.16.1"; None where the log does not say.
        device: the GPU's name; None likewise.
        bandwidth: of its memory in bytes a second, from bus width and memory clock (two transfers a clock).
        warnings: the lines that trtexec marks as such, without their time.
        passed, failed: whether it has the line that trtexec ends with where all went well, or where something did not.
    """

    text: str
    version: str | None
    device: str | None
    bandwidth: float | None
    warnings: tuple[str, ...]
    passed: bool
    failed: bool


def read_times(path: str | os.PathLike[str]) -> Times:
    """Reads what ``--exportTimes`` wrote.

    Raises:
        InputError: the file is missing, cut off or another one; or a time is no finite number above 0.
    """
    file, entries = _read(path, TIMES)
    if not isinstance(entries, list) or not entries:
        raise InputError(f"times '{file}' has no query; trtexec's --exportTimes writes one entry a query")
    try:
        compute = tuple(float(entry["computeMs"]) for entry in entries)
        latency = tuple(float(entry["latencyMs"]) for entry in entries)
        end = max(float(entry["endComputeMs"]) for entry in entries)
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"times '{file}' is no file of trtexec's --exportTimes: an entry has no computeMs") from error
    for query, value in enumerate(compute):
        if not 0 < value < math.inf:
            raise InputError(
                f"times '{file}': computeMs of query {query} was {value}; a finite number above 0 is taken"
            )
    return Times(compute, latency, end)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads what ``--exportProfile`` wrote.

    Raises:
        InputError: the file is missing, cut off or another one; or a layer has no finite time.
    """
    file, entries = _read(path, PROFILE)
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict) or "count" not in entries[0]:
        raise InputError(f"profile '{file}' is no file of trtexec's --exportProfile: its first entry is no count")
    try:
        layers = tuple(
            LayerTime(str(entry["name"]), float(entry["averageMs"]), float(entry["medianMs"])) for entry in entries[1:]
        )
        iterations = int(entries[0]["count"])
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"profile '{file}' is no file of trtexec's --exportProfile: a layer has no medianMs"
        ) from error
    if not layers:
        raise InputError(f"profile '{file}' has no layer; no iteration was profiled")
    for layer in layers:
        if not 0 <= layer.median_ms < math.inf:
            raise InputError(
                f"profile '{file}': medianMs of layer '{layer.name}' was {layer.median_ms}; "
                "a finite number of at least 0 is taken"
            )
    return Profile(file, iterations, layers)


def read_layers(path: str | os.PathLike[str]) -> dict[str, Layer]:
    """Reads what ``--exportLayerInfo`` wrote: layers by name.

    A name that two layers with other origins share says nothing about either: its origins are None.

    Raises:
        InputError: the file is missing, cut off or another one.
    """
    file, content = _read(path, LAYERS)
    if not isinstance(content, dict) or not isinstance(content.get("Layers"), list):
        raise InputError(f"layers '{file}' is no file of trtexec's --exportLayerInfo: it has no Layers")
    found: dict[str, Layer] = {}
    for entry in content["Layers"]:
        # Without --profilingVerbosity=detailed an entry is the name alone.
        name, metadata = (entry, None) if isinstance(entry, str) else (entry.get("Name"), entry.get("Metadata"))
        if not isinstance(name, str):
            raise InputError(f"layers '{file}' is no file of trtexec's --exportLayerInfo: a layer has no Name")
        layer = Layer(name, onnx_origins(metadata) if metadata else None)
        if name in found and found[name].origins != layer.origins:
            layer = Layer(name, None)
        found[name] = layer
    return found


def onnx_origins(metadata: str) -> tuple[str, ...] | None:
    """The ONNX nodes that a layer's metadata name, each once; None where they name none.

    TensorRT's parser writes ``[ONNX Layer: NODE]``, and ``[ONNX Layer: INNER | NODE (OPERATOR)]`` for a node within a
    model-local function. A layer that was fused has those of all its parts: a unit separator lies between the nodes of
    one fusion, a record separator between fusions. A part that is no whole node (cut off, another parser's, a name with
    a separator in it) is ``""``: the layer computes something more, and nobody knows what.
    """
    prefix, suffix = "[ONNX Layer: ", "]"
    parts = [part.strip() for part in re.split("[\x1e\x1f\n]", metadata)]
    origins = [
        part[len(prefix) : -len(suffix)] if part.startswith(prefix) and part.endswith(suffix) else ""
        for part in parts
        if part
    ]
    return tuple(dict.fromkeys(origins)) if any(origins) else None


def read_log(path: str | os.PathLike[str]) -> Log:
    """Reads what a run of trtexec printed.

    Raises:
        InputError: the file is missing.
    """
    text = existing_file(path, "log").read_text(encoding="utf-8", errors="replace")
    device = re.search(r"Selected Device: (.+?)\s*$", text, re.MULTILINE)
    return Log(
        text=text,
        version=version_in(text),
        device=device.group(1) if device else None,
        bandwidth=_bandwidth(text),
        warnings=tuple(dict.fromkeys(re.findall(r"\[W\]\s*(.*?)\s*$", text, re.MULTILINE))),
        passed=re.search(r"^&&&& PASSED ", text, re.MULTILINE) is not None,
        failed=re.search(r"^&&&& FAILED ", text, re.MULTILINE) is not None,
    )


def version_in(text: str) -> str | None:
    """TensorRT's version, from what its executable prints; None where it does not say."""
    plain = re.search(r"TensorRT(?:[- ]RTX)? version: (\d+\.\d+\.\d+)", text)
    if plain:
        return plain.group(1)
    # The banner has one number, two digits each for minor and patch.
    banner = re.search(r"\[TensorRT(?:[- ]RTX)? v(\d{5,})\]", text)
    if not banner:
        return None
    number = int(banner.group(1))
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def first_error(text: str) -> str:
    """The line of a log that says why a run failed: our plugin's own, else TensorRT's first error, else the last."""
    # Its last line only says once more what was called.
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("&&&&")]
    ours = next((line for line in lines if line.startswith("[moetrt]")), None)
    theirs = next((line.partition("[E]")[2].strip() for line in lines if "[E]" in line), None)
    return ours or theirs or (lines[-1] if lines else "it printed nothing")


def _bandwidth(text: str) -> float | None:
    bus = re.search(r"Memory Bus Width: (\d+) bits", text)
    clock = re.search(r"Memory Clock Rate: ([\d.eE+-]+) GHz", text)
    if not bus or not clock or not float(clock.group(1)):
        return None
    return int(bus.group(1)) / 8 * 2 * float(clock.group(1)) * 1e9


def _read(path: str | os.PathLike[str], what: str) -> tuple[Path, Any]:
    file = existing_file(path, what)
    text = file.read_text(encoding="utf-8", errors="replace")
    # Line by line first: names are written without escapes, so that JSON would read another name, or none.
    entries = _profile_lines(text) if what == PROFILE else None
    if entries is not None:
        return file, entries
    finite = _NOT_FINITE.sub(lambda match: "NaN" if match[2] == "nan" else f"{match[1]}Infinity", text)
    try:
        # Not strict: the separators in a layer's metadata may come as they are.
        return file, json.loads(finite, strict=False)
    except ValueError as error:
        raise InputError(
            f"{what} '{file}' is cut off, or no file of trtexec's {_OPTION[what]}: {' '.join(str(error).split())}"
        ) from error


def _profile_lines(text: str) -> list[dict[str, Any]] | None:
    """A whole profile in trtexec's own lines; None where a line is something else."""
    # Not splitlines: a name may have what is a line end only in Unicode.
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(lines) < 2 or lines[0] != "[" or lines[-1] != "]":
        return None
    count = re.fullmatch(r'\{ "count" : (\d+) \}', lines[1])
    layers = [_PROFILE_LINE.fullmatch(line) for line in lines[2:-1]]
    if count is None or None in layers:
        return None
    return [
        {"count": int(count.group(1))},
        *(
            {"name": layer["name"], "averageMs": layer["average"], "medianMs": layer["median"]}
            for layer in layers
            if layer is not None
        ),
    ]
