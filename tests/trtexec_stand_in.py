"""A stand-in for trtexec: takes the options that its version takes, and writes the files that it writes.

The options are those of trtexec's option parsers, 10.8 to 11.1; the layout of the files is its reporting code's. What
a run costs is planted: the variable TRTEXEC_STAND_IN names a JSON file with the version, and for each way ("plugin" or
"native", after the engine that is loaded) the time of a query and the layers with their times.

    {"version": [11, 1, 0], "drift": 0.0, "inputs": {"x": bytes}, "static": false,
     "failure": "" or "build", "run", "silent", "hang", "half" (a profile), "no profile", "nan",
     "plugin": {"compute_ms": 1.0, "layers": [{"Name": "...", "Metadata": "...", "ms": 0.5}]}, "native": ...}
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "TRTEXEC_STAND_IN"
DEVICE = "NVIDIA Test 9000"

Version = tuple[int, int]

FLAG = "flag"
VALUE = "value"
MANY = "value, more than once"


@dataclass(frozen=True)
class Option:
    """An option: the first version looked at that has it, whether it takes a value, and its end."""

    first: Version
    kind: str
    deprecated: Version = (99, 0)
    gone: Version = (99, 0)


OPTIONS = {
    "--allocationStrategy": Option((10, 8), VALUE),
    "--avgRuns": Option((10, 8), VALUE),
    "--best": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--bf16": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--builderOptimizationLevel": Option((10, 8), VALUE),
    "--cpuOnly": Option((10, 15), FLAG),
    "--device": Option((10, 8), VALUE),
    "--directIO": Option((10, 8), FLAG, deprecated=(10, 8)),
    "--dryRun": Option((11, 1), FLAG),
    "--dumpLayerInfo": Option((10, 8), FLAG),
    "--dumpOptimizationProfile": Option((10, 8), FLAG),
    "--dumpOutput": Option((10, 8), FLAG),
    "--dumpProfile": Option((10, 8), FLAG),
    "--dumpRawBindingsToFile": Option((10, 8), FLAG),
    "--duration": Option((10, 8), VALUE),
    "--dynamicPlugins": Option((10, 8), MANY),
    "--enablePluginOverride": Option((10, 15), FLAG),
    "--exportLayerInfo": Option((10, 8), VALUE),
    "--exportOutput": Option((10, 8), VALUE),
    "--exportProfile": Option((10, 8), VALUE),
    "--exportTimes": Option((10, 8), VALUE),
    "--exposeDMA": Option((10, 8), FLAG),
    "--fp16": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--fp8": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--idleTime": Option((10, 8), VALUE),
    "--ignoreParsedPluginLibs": Option((10, 8), FLAG),
    "--includeDataTransfers": Option((11, 0), FLAG),
    "--infStreams": Option((10, 8), VALUE),
    "--inputIOFormats": Option((10, 8), VALUE),
    "--int4": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--int8": Option((10, 8), FLAG, deprecated=(10, 14), gone=(11, 0)),
    "--iterations": Option((10, 8), VALUE),
    "--layerOutputTypes": Option((10, 8), VALUE, gone=(11, 0)),
    "--layerPrecisions": Option((10, 8), VALUE, gone=(11, 0)),
    "--loadEngine": Option((10, 8), VALUE),
    "--loadInputs": Option((10, 8), VALUE),
    "--loadRefOutputs": Option((11, 1), VALUE),
    "--maxAuxStreams": Option((10, 8), VALUE),
    "--maxShapes": Option((10, 8), VALUE),
    "--memPoolSize": Option((10, 8), VALUE),
    "--minShapes": Option((10, 8), VALUE),
    "--noBuilderCache": Option((10, 8), FLAG),
    "--noCompilationCache": Option((10, 8), FLAG),
    "--noCudaGraph": Option((11, 0), FLAG),
    "--noDataTransfers": Option((10, 8), FLAG, deprecated=(11, 0)),
    "--noSpinWait": Option((11, 0), FLAG),
    "--noTF32": Option((10, 8), FLAG),
    "--onnx": Option((10, 8), VALUE),
    "--optShapes": Option((10, 8), VALUE),
    "--outputIOFormats": Option((10, 8), VALUE),
    "--percentile": Option((10, 8), VALUE),
    "--persistentCacheRatio": Option((10, 8), VALUE),
    "--plugins": Option((10, 8), MANY, deprecated=(10, 8)),
    "--precisionConstraints": Option((10, 8), VALUE, gone=(11, 0)),
    "--profile": Option((10, 8), MANY),
    "--profilingVerbosity": Option((10, 8), VALUE),
    "--saveEngine": Option((10, 8), VALUE),
    "--separateProfileRun": Option((10, 8), FLAG, deprecated=(11, 0)),
    "--setPluginsToSerialize": Option((10, 8), MANY),
    "--shapes": Option((10, 8), VALUE),
    "--skipInference": Option((10, 8), FLAG),
    "--sleepTime": Option((10, 8), VALUE),
    "--staticPlugins": Option((10, 8), MANY),
    "--streams": Option((10, 8), VALUE, deprecated=(10, 8)),
    "--stronglyTyped": Option((10, 8), FLAG),
    "--threads": Option((10, 8), FLAG),
    "--timeDeserialize": Option((10, 8), FLAG),
    "--timingCacheFile": Option((10, 8), VALUE),
    "--useCudaGraph": Option((10, 8), FLAG, deprecated=(11, 0)),
    "--useManagedMemory": Option((10, 8), FLAG),
    "--useProfile": Option((10, 8), VALUE),
    "--useRuntime": Option((10, 8), VALUE),
    "--useSpinWait": Option((10, 8), FLAG, deprecated=(11, 0)),
    "--vc": Option((10, 8), FLAG),
    "--verbose": Option((10, 8), FLAG),
    "--versionCompatible": Option((10, 8), FLAG),
    "--warmUp": Option((10, 8), VALUE),
}


class Refused(Exception):
    """What trtexec prints as an error before it ends with code 1."""


def parse(words: Sequence[str], version: Version) -> tuple[dict[str, str], list[str], list[str]]:
    """The options with their values, the libraries of --dynamicPlugins, and warnings.

    Raises:
        Refused: an option that this version has not, twice, or with a value where it takes none or the reverse; a value
            that it does not take; or neither a model nor an engine, or both an engine to load and one to save.
    """
    found: dict[str, str] = {}
    libraries: list[str] = []
    warnings: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name)
        if option is None or not option.first <= version < option.gone:
            raise Refused(f"Unknown option: {name} {value}")
        if bool(equals) != (option.kind != FLAG):
            raise Refused(f"Option {name} was '{word}'; it takes {option.kind}")
        if name in found and option.kind != MANY:
            raise Refused(f"Unknown option: {name} {value}")
        if version >= option.deprecated:
            warnings.append(f"{name} is deprecated.")
        if name == "--dynamicPlugins":
            libraries.append(value)
        found[name] = value
        for spelled, check in _VALUES.items():
            if name in spelled:
                check(value)
    if "--loadEngine" in found and "--saveEngine" in found:
        raise Refused("Incompatible load and save engine options selected")
    if "--loadEngine" not in found and "--onnx" not in found:
        raise Refused("Model missing or format not recognized")
    return found, libraries, warnings


def pairs(text: str) -> dict[str, str]:
    """Names with values, a comma between two: a name ends at its quotes, else at the last colon.

    Raises:
        Refused: one that begins a quote and does not end it, or the like.
    """
    found: dict[str, str] = {}
    for part in text.split(",") if text else []:
        quotes = part.split("'")
        if len(quotes) not in (1, 3):
            raise Refused(f"Found invalid number of 's when parsing {part}. Expected: 2, received: {len(quotes) - 1}.")
        name, _, value = part.rpartition(":") if len(quotes) == 1 else (quotes[0] + quotes[1], "", quotes[2][1:])
        found[name] = value
    return found


def shapes(text: str) -> dict[str, list[int]]:
    """Names with sizes; "scalar" has none.

    Raises:
        Refused: as of `pairs`, or a size is no number.
    """
    return {
        name: [int(_number(size)) for size in sizes.split("x")] if sizes != "scalar" else []
        for name, sizes in pairs(text).items()
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refused("stof") from None


def _verbosity(text: str) -> None:
    if text not in ("layer_names_only", "none", "detailed"):
        raise Refused(f"Unknown profilingVerbosity: {text}")


_VALUES: dict[tuple[str, ...], Callable[[str], object]] = {
    ("--minShapes", "--optShapes", "--maxShapes", "--shapes"): shapes,
    ("--loadInputs", "--loadRefOutputs"): pairs,
    ("--avgRuns", "--duration", "--infStreams", "--iterations", "--streams", "--warmUp"): _number,
    ("--profilingVerbosity",): _verbosity,
}


def number(value: float) -> str:
    """A float as a C++ stream prints it: six digits, nan and inf as they are."""
    return f"{value:g}"


def write_times(path: Path, compute_ms: Sequence[float]) -> None:
    """A file as --exportTimes writes it: one line a query, no transfers."""
    lines = []
    start = 200.0
    for value in compute_ms:
        end = start + value
        fields = {
            "startEnqMs": start - 0.01,
            "endEnqMs": start - 0.005,
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
        text = ", ".join(f'"{name}" : {number(field)}' for name, field in fields.items())
        lines.append(f"{', ' if lines else '  '}{{ {text} }}")
        start = end
    path.write_text("\n".join(["[", *lines, "]"]) + "\n")


def write_profile(path: Path, layers: Sequence[tuple[str, float]], *, count: int = 100) -> None:
    """A file as --exportProfile writes it: names without escapes, a percentage that is nan where no time was spent."""
    total = sum(ms for _, ms in layers) * count
    lines = ["[", f'  {{ "count" : {count} }}']
    for name, ms in layers:
        share = number(ms * count / total * 100) if total else "-nan"
        lines.append(
            f', {{ "name" : "{name}", "timeMs" : {number(ms * count)}, "averageMs" : {number(ms)}, '
            f'"medianMs" : {number(ms)}, "percentage" : {share} }}'
        )
    path.write_text("\n".join([*lines, "]"]) + "\n", encoding="utf-8")


def write_layers(path: Path, layers: Sequence[dict[str, Any]], *, detailed: bool) -> None:
    """A file as --exportLayerInfo writes it: TensorRT's own JSON, names alone where nothing more was kept."""
    entries: list[Any] = [
        {"Name": layer["Name"], "LayerType": "kgen", "Inputs": [], "Outputs": [], "Metadata": layer["Metadata"]}
        if detailed
        else layer["Name"]
        for layer in layers
    ]
    path.write_text(json.dumps({"Layers": entries, "Bindings": [], "engine_metadata": ""}))


def install(folder: Path, name: str = "trtexec") -> Path:
    """Puts an executable of that name into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).read_text())
    path.chmod(0o755)
    return path


def say(kind: str, text: str) -> None:
    print(f"[11/30/2026-05:55:49] [{kind}] {text}", flush=True)


def main(words: Sequence[str]) -> int:
    """The program."""
    planted = json.loads(Path(os.environ[VARIABLE]).read_text())
    major, minor, patch = planted["version"]
    banner = f"TensorRT.trtexec [TensorRT v{major * 10000 + minor * 100 + patch}] [b1] # {' '.join(words)}"
    print(f"&&&& RUNNING {banner}", flush=True)
    if "--help" in words:
        print("=== Model Options ===")
        return 0
    try:
        options, libraries, warnings = parse(words, (major, minor))
        for warning in warnings:
            say("W", warning)
        say("I", f"Selected Device: {DEVICE}")
        say("I", "Memory Bus Width: 5120 bits (ECC enabled)")
        say("I", "Application Memory Clock Rate: 2.5 GHz")
        say("I", f"TensorRT version: {major}.{minor}.{patch}")
        for library in libraries:
            if "/" not in library or not Path(library).is_file():
                raise Refused(f"{library}: cannot open shared object file: No such file or directory")
        (_build if "--onnx" in options else _run)(planted, (major, minor), options, libraries)
    except Refused as refused:
        say("E", str(refused))
        print(f"&&&& FAILED {banner}")
        return 1
    print(f"&&&& PASSED {banner}")
    return 0


def _build(planted: dict[str, Any], version: Version, options: dict[str, str], libraries: list[str]) -> None:
    if not Path(options["--onnx"]).is_file():
        raise Refused(f"Could not open file {options['--onnx']}")
    if planted["failure"] == "build":
        print("[moetrt] node 'tail': gamma was of 63; 64 is taken", flush=True)
        raise Refused("Error Code 4: Internal Error (Could not create the plugin)")
    bounds = [shapes(options.get(name, "")) for name in ("--minShapes", "--optShapes", "--maxShapes")]
    if planted.get("static", False) == bool(bounds[0]):
        raise Refused("Static model does not take explicit shapes, or a dynamic one was given none")
    if len({tuple(bound) for bound in bounds}) > 1:
        raise Refused("Found invalid or missing shape spec at profile index 0.")
    if version < (11, 0) and "--stronglyTyped" not in options:
        raise Refused("stand-in: the types of the file would not be kept")
    content = {
        "way": "plugin" if libraries else "native",
        "dynamic": list(bounds[0]),
        "detailed": options.get("--profilingVerbosity") == "detailed",
        "version": list(version),
    }
    Path(options["--saveEngine"]).write_text(json.dumps(content))
    if "--skipInference" not in options:
        raise Refused("stand-in: the build would have been timed too")


def _run(planted: dict[str, Any], version: Version, options: dict[str, str], libraries: list[str]) -> None:
    engine = json.loads(Path(options["--loadEngine"]).read_text())
    if engine["version"] != list(version):
        raise Refused("The engine plan file is not compatible with this version of TensorRT")
    if (engine["way"] == "plugin") != bool(libraries):
        raise Refused("IPluginV3 creator MoEFinalizeAddRMSNorm was not found, or was loaded for nothing")
    if sorted(shapes(options.get("--shapes", ""))) != sorted(engine["dynamic"]):
        raise Refused("stand-in: --shapes are not those of the dynamic inputs")
    for name, file in pairs(options.get("--loadInputs", "")).items():
        if name not in planted["inputs"]:
            raise Refused("Invalid tensor names found in --loadInputs flag.")
        if Path(file).stat().st_size != planted["inputs"][name]:
            raise Refused(f"Unexpected file size for input file: {file}.")
    failure, way = planted["failure"], engine["way"]
    if failure == "run":
        raise Refused("Error Code 1: Cuda Runtime (out of memory)")
    if failure == "silent":
        sys.exit(139)
    if failure == "hang":
        time.sleep(60)
    # A clock that drifts: each run is slower than the one before by this part.
    counter = Path(os.environ[VARIABLE] + ".runs")
    runs = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(runs + 1))
    slower = (1 + planted["drift"]) ** runs
    layers = planted[way]["layers"]
    # Without --separateProfileRun, trtexec 10 profiles the timed run and gives no times of it.
    timed = version >= (11, 0) or "--separateProfileRun" in options or "--exportProfile" not in options
    graph = version >= (11, 0) or "--useCudaGraph" in options
    transfers = version < (11, 0) and "--noDataTransfers" not in options
    compute = planted[way]["compute_ms"] * slower * (1 if graph else 3) + (5 if transfers else 0)
    if "--exportTimes" in options and timed:
        # An outlier, as a first query often is; the median does not see it.
        write_times(
            Path(options["--exportTimes"]), [compute * 9, *[compute] * 9] if failure != "nan" else [float("nan")]
        )
    if "--exportProfile" in options and failure != "no profile":
        write_profile(Path(options["--exportProfile"]), [(layer["Name"], layer["ms"] * slower) for layer in layers])
        if failure == "half":
            text = Path(options["--exportProfile"]).read_text()
            Path(options["--exportProfile"]).write_text(text[: len(text) // 2])
    if "--exportLayerInfo" in options:
        write_layers(Path(options["--exportLayerInfo"]), layers, detailed=engine["detailed"])
    if planted.get("warning"):
        say("W", planted["warning"].format(run=runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
