"""Holds our trtexec command lines and readers against the option parser and the writers of NVIDIA's own sources.

python -m benchmarks.trtexec_sources --tensorrt-source TensorRT --include /usr/local/cuda/include --include json/include

The first is a checkout of github.com/NVIDIA/TensorRT, 10.8 or later, with its submodules up to 10.13. The others have
the headers that its samples include and it lacks. No GPU and no TensorRT: only parsing and writing is run.
"""

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moetrt.bench import trtexec
from moetrt.bench.trtexec_files import first_error, read_log, read_profile, read_times
from moetrt.console import Output
from moetrt.errors import InputError, MoetrtError
from moetrt.files import existing_file
from moetrt.parity.replay import save_raw

_SOURCES = ("sampleOptions", "sampleUtils", "sampleReporting", "logger")
_VERSION = re.compile(r"^#define (?:NV_TENSORRT|TRT)_(MAJOR|MINOR|PATCH)(?:_ENTERPRISE)? (\d+)", re.MULTILINE)

_NAMES = {"input_ids": (4, 8), "scope/x.1": (4, 64), "x:0": (4,), "a b=c": (), "größe": (1, 1, 1)}
"""Inputs by name, as exporters name them, and shapes."""

_LAYERS = (
    "{ForeignNode[/a/MatMul.../b/Add]}",
    "PWN(\"quoted\", 'twice')",
    "back\\slash, comma",
    "größe \u2028 \x1e separators",
    'tail", "timeMs" : 1, "averageMs" : 1, "medianMs" : 1, "percentage" : nan }',
    "not run",
)


@dataclass(frozen=True)
class Check:
    """One thing that was held against the sources.

    Attributes:
        what: was done.
        ours, theirs: what differed; both empty where nothing did.
    """

    what: str
    ours: str = ""
    theirs: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        source = Path(options.tensorrt_source)
        version = version_of(source)
        key = trtexec.key_of_version(version)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            program = compiled(source, [Path(path) for path in options.include], folder)
            checks = [*commands(program, key), *times(program, folder), profile(program, folder), *raw(program, folder)]
            checks += logs(program, folder, version)
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    output = Output()
    output.line(f"TensorRT {version}, {key}")
    output.table(
        ("", "ours", "NVIDIA's"), [(check.what, check.ours or "the same", check.theirs or "-") for check in checks]
    )
    return 1 if any(check.ours or check.theirs for check in checks) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trtexec_sources", description="Our trtexec lines and readers against its sources."
    )
    parser.add_argument("--tensorrt-source", metavar="DIR", required=True, help="a checkout of NVIDIA/TensorRT")
    parser.add_argument(
        "--include",
        metavar="DIR",
        action="append",
        default=[],
        help="headers that it lacks: CUDA's; from 11.1 on, the folder with nlohmann/json.hpp",
    )
    return parser


def version_of(source: Path) -> str:
    """The version of TensorRT that a checkout is of.

    Raises:
        InputError: it is none.
    """
    header = existing_file(source / "include" / "NvInferVersion.h", "header of the TensorRT sources")
    found = dict(_VERSION.findall(header.read_text(encoding="utf-8")))
    if set(found) != {"MAJOR", "MINOR", "PATCH"}:
        raise InputError(f"'{header}' names no version of TensorRT")
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}"


def compiled(source: Path, include: Sequence[Path], folder: Path) -> Path:
    """Compiles NVIDIA's parser and writers with our driver, into ``folder``.

    Raises:
        InputError: a file or a header is missing, or the sources are of another make than is known.
    """
    common = source / "samples" / "common"
    files = [existing_file(common / f"{name}.cpp", "file of the TensorRT sources") for name in _SOURCES]
    folders = [source / "include", common, source / "samples", source / "shared", source, source / "parsers" / "onnx"]
    compiler = shutil.which("c++")
    if compiler is None:
        raise InputError("c++ is not on PATH; a compiler of C++17 is needed")
    program = folder / "trtexec_sources"
    command = [compiler, "-std=c++17", "-w", "-o", str(program), str(Path(__file__).with_suffix(".cpp"))]
    command += [*map(str, files), *(f"-I{path}" for path in (*folders, *include))]
    # Most of those files calls TensorRT and CUDA; what is never called is left out, so that nothing is linked.
    command += ["-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line or "undefined" in line), "")
        raise InputError(f"TensorRT sources '{source}' do not compile: {said.strip()}")
    return program


def _run(program: Path, words: Sequence[object], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *map(str, words)], input=given, capture_output=True, check=False)


def commands(program: Path, key: str) -> list[Check]:
    """The lines that `moetrt bench` writes, parsed: each option accepted, without a warning, and as it was meant."""
    model, engine, library = "../my model/~a=b,c:d.onnx", "bench/plugin.engine", "bench/lib moetrt,x.so"
    bounds = {name: (shape, tuple(2 * size for size in shape), (64,) * len(shape)) for name, shape in _NAMES.items()}
    inputs = {name: f"bench/1/input.{place}.bin" for place, name in enumerate(_NAMES)} | {"input_ids": "c:/d e.bin"}
    build = {
        "model": model,
        "engine": engine,
        "load": "0",
        "save": "1",
        "skip inference": "1",
        "strongly typed": "1",
        "detailed": "1",
    }
    run = {
        "engine": engine,
        "load": "1",
        "save": "0",
        "skip inference": "0",
        "iterations": "10",
        "seconds": "3",
        "warm-up": "200",
        "streams": "1",
        "transfers": "0",
        "spin": "1",
        "graph": "1",
        "times file": "",
        "profile file": "",
        "layers file": "",
    }
    profiles = {f"profile of {name}": " ".join(map(_sizes, shapes)) for name, shapes in bounds.items()}
    shapes = {f"shape of {name}": _sizes(shape) for name, shape in _NAMES.items()}
    files = {f"file of {name}": file for name, file in inputs.items()}
    exported = {f"{what} file": f"bench/1/plugin.1.{what}.json" for what in ("times", "profile", "layers")}
    cases = {
        "build, plugin, profile": (
            trtexec.build_command(model, engine, tool_key=key, plugin_library=library, profile=bounds),
            build | profiles | {"plugin": library},
        ),
        "build, native, static": (trtexec.build_command(model, engine, tool_key=key, plugin_library=None), build),
        "run, plugin, all options": (
            trtexec.run_command(
                engine,
                tool_key=key,
                plugin_library=library,
                shapes=_NAMES,
                export_prefix="bench/1/plugin.1",
                per_layer=True,
                inputs=inputs,
                seconds=0.25,
            ),
            run
            | shapes
            | files
            | exported
            | {"plugin": library, "seconds": "0.25", "detailed": "1", "profile apart": "1"},
        ),
        "run, native, defaults": (trtexec.run_command(engine, tool_key=key, plugin_library=None), run),
    }
    return [_compared(program, what, command, wanted) for what, (command, wanted) in cases.items()]


def _compared(program: Path, what: str, command: Sequence[str], wanted: Mapping[str, str]) -> Check:
    done = _run(program, ["parse", *command[1:]])
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 or said:
        return Check(what, " ".join(command[1:]), said or f"ended with code {done.returncode}")
    words = done.stdout.decode().split("\0")[:-1]
    found = list(zip(words[::2], words[1::2], strict=True))
    # Of inputs and libraries there must be none but the meant; the parser carries shapes from build to run and back.
    listed = ("profile of ", "shape of ", "file of ", "plugin", "static plugin")
    shaped = [name.partition(" of ")[2] for name in wanted if name.startswith(listed[:2])]
    carried = {f"{kind} of {name}" for name in shaped for kind in ("profile", "shape")}
    meant = sorted(wanted.items())
    parsed = sorted(
        (name, value) for name, value in found if name in wanted or (name.startswith(listed) and name not in carried)
    )
    if parsed == meant:
        return Check(what)
    ours, theirs = set(meant) - set(parsed), set(parsed) - set(meant)
    return Check(
        what, *("; ".join(f"{name}: {value}" for name, value in sorted(pairs)) or "-" for pairs in (ours, theirs))
    )


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def times(program: Path, folder: Path) -> list[Check]:
    """Times that NVIDIA's code writes, against what it prints of the same queries."""
    draw = random.Random(0)
    checks = []
    for milliseconds, count in ((0.02, 1001), (1.5, 500), (2500.0, 12)):
        start, lines = 0.0, []
        for _ in range(count + int(200 / milliseconds) + 1):
            end = start + milliseconds * draw.uniform(0.9, 1.2)
            lines.append(f"{start:.9g} {end:.9g}")
            # The next query is enqueued early, and waits, or leaves a gap.
            start = end + draw.choice((0.0, 0.001, 0.01))
        file = folder / "t.json"
        done = _run(program, ["times", file, 200], "\n".join(lines).encode())
        told = re.search(r"^GPU Compute Time: .*median = (\S+) ms", done.stdout.decode(), re.MULTILINE)
        queries = re.search(r"^Timing trace has (\d+) queries", done.stdout.decode(), re.MULTILINE)
        read = read_times(file)
        ours = f"{len(read.compute_ms)} queries, {statistics.median(read.compute_ms):.5g} ms"
        theirs = f"{queries[1]} queries, {float(told[1]):.5g} ms" if queries and told else done.stderr.decode()
        what = f"median of queries of {milliseconds:g} ms"
        checks.append(Check(what) if ours == theirs else Check(what, ours, theirs))
    return checks


def profile(program: Path, folder: Path) -> Check:
    """A profile that NVIDIA's code writes, against what it prints of the same layers."""
    draw = random.Random(1)
    iterations = 25
    given = b"".join(
        f"{0.0 if name == 'not run' else draw.uniform(0.001, 0.5):.9g} {name}".encode() + b"\0"
        for _ in range(iterations)
        for name in _LAYERS
    )
    done = _run(program, ["profile", folder / "p.json"], given)
    read = read_profile(folder / "p.json")
    ours = [f"{layer.median_ms:.4f} {layer.name}" for layer in read.layers if layer.median_ms]
    # Total, average, median and share, then the name, which may have line ends of other alphabets.
    rows = re.findall(r"^ +[\d.]+ +[\d.]+ +([\d.]+) +[\d.]+   (.*)$", done.stdout.decode(), re.MULTILINE)
    theirs = [f"{median} {name}" for median, name in rows if name != "Total"]
    what = f"{len(_LAYERS)} layers over {iterations} iterations"
    if (ours, read.iterations, len(read.layers)) == (theirs, iterations, len(_LAYERS)):
        return Check(what)
    return Check(what, f"{read.iterations}: {'; '.join(ours)}", "; ".join(theirs))


def raw(program: Path, folder: Path) -> list[Check]:
    """Files of inputs as `compare --save-inputs-raw` writes them, read into a binding of that size."""
    # Of which the rows do not lie one after the other.
    numbers = torch.arange(-6, 6).view(4, 3).t()
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
    feed = {str(kind).removeprefix("torch."): numbers.to(kind) for kind in kinds}
    checks = []
    for name, path in save_raw(feed, folder / "raw").items():
        tensor = feed[name]
        done = _run(program, ["load", path, tensor.numel() * tensor.element_size()])
        read = torch.frombuffer(bytearray(done.stdout), dtype=tensor.dtype).tolist() if done.stdout else []
        same = read == tensor.flatten().tolist()
        what = f"input of {name}"
        checks.append(Check(what) if same else Check(what, str(path), done.stderr.decode() or "other numbers"))
    return checks


def logs(program: Path, folder: Path, version: str) -> list[Check]:
    """What NVIDIA's logger prints around a run."""
    checks = []
    for passed in (True, False):
        done = _run(program, ["log", int(passed)])
        file = folder / "run.log"
        file.write_bytes(done.stdout + done.stderr)
        log = read_log(file)
        read = (log.version, log.passed, log.failed, log.warnings, first_error(log.text))
        same = read == (version, passed, not passed, ("a warning",), "an error")
        what = f"log of a run that {'passed' if passed else 'failed'}"
        checks.append(Check(what) if same else Check(what, str(read), log.text))
    return checks


if __name__ == "__main__":
    sys.exit(main())
