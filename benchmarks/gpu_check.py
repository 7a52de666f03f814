"""Everything that a GPU is needed for, in one command: first the numbers, then the time.

    make gpu-check                                    on a machine with an NVIDIA GPU, SM80 or later
    python -m benchmarks.gpu_check --dry-run          on any machine: tiny sizes, the kernel's host build, no times

1. tests/gpu: the operator through the plugin's own enqueue, through PyTorch and, where TensorRT is installed, through
   an engine; compute-sanitizer where it is installed.
2. Times of our kernel (each tactic), separate kernels, a plain add + RMSNorm, torch.compile, eager PyTorch and a
   device-to-device copy, in CUDA graph replays over buffers that are larger together than the L2 cache.

A table with the ratios is printed, and written with every figure to benchmarks/results/ as JSON, text and a plot; there
is no ratio where tests/gpu did not pass. The tests get 150 s, and 180 s after them no further cell is begun.
Nothing is estimated: what was not measured is a dash, and has a reason in the JSON.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.contenders import Cell, Contender
from benchmarks.models import MODELS, ModelSize, check_number, model_named
from benchmarks.results import PASSED, Results, Row, file_stem, plot, print_table, print_verdicts
from benchmarks.timing import DryTimer, GraphTimer
from benchmarks.traffic import tail_of
from moetrt.console import Output
from moetrt.errors import InputError, MoetrtError
from moetrt.files import existing_file, output_directory, write_atomically
from moetrt.library import LIBRARY_VARIABLE, PluginLibrary, load_plugin_library
from moetrt.traffic import bytes_moved, ways

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
MOST_TOKENS = 2**20
OLDEST_GPU = (8, 0)

TEST_SECONDS = 150
MEASURING_SECONDS = 180
"""Both together, and what lies between, are to fit into six minutes of a rented machine."""

DRY_TOKENS = (1, 5)
DRY_HIDDEN = 512
DRY_L2_BYTES = 16384


class Run:
    """The measurements of one run."""

    def __init__(
        self,
        library: PluginLibrary,
        device: torch.device,
        timer: GraphTimer | DryTimer,
        *,
        l2_bytes: int,
        backend: str,
        seed: int,
        deadline: float,
    ) -> None:
        self.library = library
        self.device = device
        self.timer = timer
        self.l2_bytes = l2_bytes
        self.backend = backend
        self.seed = seed
        self.deadline = deadline
        self.faults: list[str] = []
        self.broken = ""

    def measure(self, model: ModelSize, token_counts: Sequence[int]) -> Iterator[list[Row]]:
        """Every contender at every number of tokens, a list for each; a contender that cannot run is a row with the
        reason."""
        compiled = contenders.Compiled(model, self.backend)
        for tokens in token_counts:
            if time.monotonic() > self.deadline:
                note = "the time for this run was over"
            elif self.broken:
                note = f"the device no longer worked: {self.broken}"
            else:
                yield self._cell_rows(model, tokens, compiled)
                continue
            yield [Row(model.name, tokens, contenders.OURS, "", 0, None, note=note)]

    def _cell_rows(self, model: ModelSize, tokens: int, compiled: contenders.Compiled) -> list[Row]:
        rows = []
        try:
            cell = Cell(model, tokens, self.device, self.l2_bytes, self.seed)
            # One by one: an error keeps the figures before it.
            for row in self._measure_cell(cell, compiled):
                rows.append(row)
                if self.broken:
                    break
            del cell
            if self.device.type == "cuda" and not self.broken:
                torch.cuda.empty_cache()
        except Exception as error:
            # One cell that this machine cannot run must not cost all the others' figures.
            note = _reason(error)
            rows.append(Row(model.name, tokens, contenders.OURS, "", 0, None, note=note))
            self._look_whether_broken()
            if not isinstance(error, torch.OutOfMemoryError):
                self.faults.append(f"{model.name}, T={tokens}: {note}")
        return rows

    def _look_whether_broken(self) -> None:
        """After some errors a process's CUDA context answers every further call with the same error."""
        if self.device.type != "cuda" or self.broken:
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            self.broken = _reason(error)
            self.faults.append(f"the device no longer worked: {self.broken}")

    def _measure_cell(self, cell: Cell, compiled: contenders.Compiled) -> Iterator[Row]:
        found = ways(tail_of(cell.model, cell.tokens))
        moved = {name: bytes_moved(way) for name, way in found.items()}
        alone = found["separate"][-1].moved
        for position, row in enumerate(self._rows(cell, contenders.ours(cell, self.library), moved["fused"])):
            yield dataclasses.replace(row, default=position == 0)
        without = contenders.ours(cell, self.library, dependent_launch=False)
        yield from self._rows(cell, without, moved["fused"])
        norms = list(self._rows(cell, contenders.add_norm_alone(cell), alone))
        yield from norms
        if not norms:
            for name in (contenders.ADD_NORM, contenders.SEPARATE):
                yield Row(cell.model.name, cell.tokens, name, "", 0, None, note="Triton is not installed")
        else:
            # With the add + RMSNorm kernel that was the fastest; any where nothing is timed.
            fastest = min(norms, key=lambda row: math.inf if row.timing is None else row.timing.median)
            yield from self._rows(cell, contenders.separate(cell, fastest.setting), moved["separate"])
        yield from self._rows(cell, [compiled(cell)], moved["fused"])
        yield from self._rows(cell, [contenders.eager(cell)], moved["eager"])
        yield from self._copy_rows(cell)

    def _copy_rows(self, cell: Cell) -> Iterator[Row]:
        try:
            contender, moved = contenders.copy(cell)
        except torch.OutOfMemoryError as error:
            yield Row(cell.model.name, cell.tokens, contenders.COPY, "", 0, None, note=_reason(error))
            return
        yield from self._rows(cell, [contender], moved)

    def _rows(self, cell: Cell, found: Iterable[Contender], moved: int) -> Iterator[Row]:
        for contender in found:
            timing, note = None, ""
            try:
                note = "" if contender.check is None else cell.fault(contender.check, cell.sets[-1])
                timing = None if note else self.timer.time(contender.calls, contender.prepare, contender.accept)
            except Exception as error:
                # One contender that this machine cannot run must not cost all the others' figures.
                note = _reason(error)
                self._look_whether_broken()
            if note and contender.name == contenders.OURS:
                self.faults.append(f"{cell.model.name}, T={cell.tokens}, {contender.setting}: {note}")
            yield Row(cell.model.name, cell.tokens, contender.name, contender.setting, moved, timing, note=note)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def facts_of(device: torch.device, library: PluginLibrary, *, dry: bool) -> dict[str, Any]:
    """Where, when and with what a run was made."""
    facts: dict[str, Any] = {
        "dry_run": dry,
        "card": "none (host build)",
        "driver": "",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]),
        "library": library.path.name,
        "library_sha256": hashlib.sha256(library.path.read_bytes()).hexdigest(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
        facts |= {
            "card": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "driver": _output_of(query),
            "cuda": torch.version.cuda,
        }
    return facts


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def check_numbers(output: Output) -> str:
    """Runs tests/gpu in a process of its own; returns "passed", "failed", or "skipped" where not one was run."""
    with output.step("tests/gpu") as step:
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q", "-rs", "-p", "no:cacheprovider"]
        code, said = _run_for(command, TEST_SECONDS)
        lines = said.strip().splitlines() or ["nothing was said"]
        step.ok = code == 0
        step.result = lines[-1].strip("= ")
        if code is None:
            step.result = f"not at their end after {TEST_SECONDS} s"
        step.details = [line for line in lines if line.startswith("SKIPPED")] if step.ok else lines[-40:]
    if not step.ok:
        return "failed"
    return PASSED if re.search(r"\b\d+ passed\b", lines[-1]) else "skipped"


def _run_for(command: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where it took longer, and what was said; ends what the command itself had started, too."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a number is wrong or a bound is not held, 2 where it cannot run."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, Output())
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="The checks that need a GPU.")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, tiny, with the host build; measures nothing"
    )
    parser.add_argument("--library", help="the plugin library; the installed one when left out")
    parser.add_argument("--output", type=Path, help="the folder for the results (benchmarks/results)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="some of the model sizes (all)")
    parser.add_argument("--tokens", nargs="+", type=int, help=f"numbers of tokens ({' '.join(map(str, TOKENS))})")
    parser.add_argument("--skip-tests", action="store_true", help="only the times")
    parser.add_argument("--skip-times", action="store_true", help="only tests/gpu")
    parser.add_argument(
        "--seconds",
        type=float,
        default=MEASURING_SECONDS,
        help=f"so long after the tests no further cell is begun ({MEASURING_SECONDS})",
    )
    return parser


def _run(options: argparse.Namespace, output: Output) -> int:
    models = [model_named(name) for name in options.models]
    for tokens in options.tokens or ():
        check_number("--tokens", tokens, 1, MOST_TOKENS)
    check_number("--seconds", options.seconds, 1, 3600)
    dry = options.dry_run
    if dry and options.library is not None:
        raise InputError("--library was given with --dry-run, which runs the kernel's host build")
    if dry:
        output.line("DRY RUN on the CPU: the script's steps are tried with tiny sizes, nothing is measured")
    else:
        _check_gpu()
    folder = options.output or (ROOT / "build" / "gpu-check" if dry else RESULTS)
    if not options.skip_times:
        output_directory(folder)
    if options.library is not None:
        # For tests/gpu too.
        os.environ[LIBRARY_VARIABLE] = str(existing_file(options.library, "plugin library").absolute())
    # Wrong numbers end the run as a failure, but do not cost the times of a machine that may be rented by the minute.
    tests = "skipped" if dry or options.skip_tests else check_numbers(output)
    right = tests == PASSED or dry or options.skip_tests
    if options.skip_times:
        return 0 if right else 1
    seed = time.time_ns() % 2**31
    run = _prepare(dry, seed, time.monotonic() + options.seconds)
    if dry:
        models = [dataclasses.replace(model, hidden=DRY_HIDDEN) for model in models]
    facts = {**facts_of(run.device, run.library, dry=dry), "seed": seed, "tests": tests, "faults": run.faults}
    results = Results(facts, models)
    stem = folder / file_stem(results.facts)
    try:
        for model in models:
            with output.step(f"times, {model.name}") as step:
                rows = []
                for cell_rows in run.measure(model, options.tokens or (DRY_TOKENS if dry else TOKENS)):
                    rows += cell_rows
                    results.rows += cell_rows
                    # After each cell: a machine that hangs in the next one loses nothing.
                    results.write(stem.with_suffix(".json"))
                step.result = f"{len(rows)} rows, {sum(row.timing is not None for row in rows)} measured"
                step.details = sorted({f"{row.contender}: {row.note}" for row in rows if row.note})
    finally:
        _report(results, stem, output)
    return 0 if right and not run.faults else 1


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise InputError("this needs an NVIDIA GPU that PyTorch sees; --dry-run tries the script without one")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_GPU:
        raise InputError(f"the GPU is SM{capability[0]}{capability[1]}; SM80 or later is taken")


def _prepare(dry: bool, seed: int, deadline: float) -> Run:
    if dry:
        from benchmarks.host import host_library

        return Run(
            host_library(),
            torch.device("cpu"),
            DryTimer(),
            l2_bytes=DRY_L2_BYTES,
            backend="eager",
            seed=seed,
            deadline=deadline,
        )
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    library = load_plugin_library()
    # The device is described to the library before any graph is captured.
    torch.zeros(1, device=device)
    library.current_device()
    timer = GraphTimer(device)
    return Run(library, device, timer, l2_bytes=l2_bytes, backend="inductor", seed=seed, deadline=deadline)


def _report(results: Results, stem: Path, output: Output) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        printed = Output()
        printed.line(f"tests/gpu: {results.facts['tests']}")
        for fault in results.facts["faults"]:
            printed.line(f"WRONG: {fault}")
        shown = {name: value for name, value in results.facts.items() if name not in ("tests", "faults")}
        printed.line(", ".join(f"{name} {value}" for name, value in shown.items() if value not in ("", None)))
        print_table(results, printed)
        print_verdicts(results, printed)
    output.line()
    output.line(text.getvalue().rstrip())
    results.write(stem.with_suffix(".json"))
    with write_atomically(stem.with_suffix(".txt")) as temporary:
        Path(temporary).write_text(text.getvalue())
    missing = plot(results, stem.with_suffix(".png"))
    output.line()
    output.line(f"written: {stem}.json, .txt{'' if missing else ', .png'}{f' (no plot: {missing})' if missing else ''}")


if __name__ == "__main__":
    sys.exit(main())
