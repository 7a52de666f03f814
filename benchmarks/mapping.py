"""How long `moetrt map` takes for models as deep as the real ones, and how much memory with their weights beside it.

    make mapping-benchmark          or    python -m benchmarks.mapping --repeats 5 --gigabytes 20

Two models, Qwen3-235B (94 layers) and DeepSeek-V3 (61), each as `moetrt export` writes it and as torch.onnx alone does.
The nodes are those of Transformers' own classes in bf16, exported with three MoE layers, of which the last is repeated
(benchmarks/mapping_graphs.py); widths are chosen so that the weights are as many bytes as asked for. The data file is
all hole: its length is real, its disk space is not.

    load, map, check, save    processor seconds of each step, the fastest of the repeats; check: shape inference of the
                              result. One thread does it all, and what else the machine does changes these less than
                              the clock's
    clock                     seconds of all four by the clock
    deep                      how many layers, dense ones too
    ratio                     of map and check with all MoE layers to those with half as many
    peak                      the largest resident memory of the command `moetrt map`, a process of its own

Held are: every tail is mapped; map and check together take at most 2 s; the ratio is at most 2.2; the peak is under
1 GB; in the data's own folder nothing is copied; in another the copy is as sparse as the original.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.mapping_graphs import CAPTURED, FOREIGN, MODELS, DeepModel, Widths, deepened, exported, write
from benchmarks.models import check_number
from moetrt.console import Output
from moetrt.errors import MoetrtError
from moetrt.mapping import inference_problem, map_model
from moetrt.onnx_files import data_path_of, load_model, save_model

MOST_SECONDS = 2.0
MOST_RATIO = 2.2
MOST_BYTES = 10**9
MOST_OF_DATA = 0.01
"""A copy of a hole may take this share of its length on the disk: tensors that lay in the model's file go there too."""

_HIDDEN = 512
# The command is a grandchild: a process starts with the peak of the one that made it, and this one has torch in it.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "moetrt", "map", "--quiet", "--allow-unmatched", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""


@dataclass(frozen=True)
class Seconds:
    """How long each step took."""

    load: float
    map: float
    check: float
    save: float

    def fastest(self, other: "Seconds") -> "Seconds":
        """Step by step the smaller."""
        return Seconds(*(min(getattr(self, step), getattr(other, step)) for step in STEPS))

    @property
    def total(self) -> float:
        """All steps."""
        return sum(getattr(self, step) for step in STEPS)

    @property
    def mapping(self) -> float:
        """What is not reading or writing files."""
        return self.map + self.check


STEPS = tuple(step.name for step in fields(Seconds))


@dataclass(frozen=True)
class Timed:
    """A graph that was mapped: its nodes before, its tails, and how long that took by the clock and on a processor."""

    nodes: int
    mapped: int
    wall: Seconds
    processor: Seconds


@dataclass(frozen=True)
class Command:
    """One run of the command `moetrt map`.

    Attributes:
        seconds: of the whole process.
        peak: bytes.
        data: length of the data file that it wrote, in bytes; 0 where it wrote none.
        disk: how many bytes of that are on the disk.
    """

    seconds: float
    peak: int
    data: int
    disk: int


@dataclass(frozen=True)
class Row:
    """One model by one exporter."""

    model: DeepModel
    exporter: str
    weights: int
    whole: Timed
    half: Timed
    beside: Command
    elsewhere: Command

    @property
    def ratio(self) -> float:
        return self.whole.processor.mapping / self.half.processor.mapping

    def faults(self) -> list[str]:
        """Which of the rules do not hold, one line each."""
        where = f"{self.model.name} by {self.exporter}"
        found = []
        for timed, tails in ((self.whole, self.model.tails), (self.half, self.model.tails // 2)):
            if timed.mapped != tails:
                found.append(f"{where}: {timed.mapped} of {tails} tails were mapped")
        # Written so that NaN is a fault.
        if not self.whole.processor.mapping <= MOST_SECONDS:
            found.append(f"{where}: mapping took {self.whole.processor.mapping:.2f} s, more than {MOST_SECONDS} s")
        if not self.ratio <= MOST_RATIO:
            found.append(f"{where}: twice the layers took {self.ratio:.2f} times as long, more than {MOST_RATIO}")
        for run in (self.beside, self.elsewhere):
            if not run.peak < MOST_BYTES:
                found.append(f"{where}: the peak was {run.peak / 1e9:.2f} GB, not under {MOST_BYTES / 1e9:.0f} GB")
        if self.beside.data:
            found.append(f"{where}: beside its data, {self.beside.data} bytes were copied")
        if not self.elsewhere.data >= self.weights or not self.elsewhere.disk <= MOST_OF_DATA * self.elsewhere.data:
            copy = f"{self.elsewhere.data} bytes of which {self.elsewhere.disk} are on the disk"
            found.append(f"{where}: the copy of {self.weights} bytes of holes is {copy}")
        return found


def time_mapping(sources: Sequence[Path], repeats: int) -> list[Timed]:
    """Maps each file ``repeats`` times, in turns, so that what else the machine does meets all of them."""
    fastest: dict[Path, Timed] = {}
    for _ in range(repeats):
        for source in sources:
            run, best = _time_once(source), fastest.get(source)
            if best is not None:
                run = replace(run, wall=run.wall.fastest(best.wall), processor=run.processor.fastest(best.processor))
            fastest[source] = run
    return list(fastest.values())


def _time_once(source: Path) -> Timed:
    # A full collection looks at every object there is: torch's, which the command does not have, would take half a
    # second in whichever step it falls.
    gc.collect()
    gc.freeze()
    at = [_now()]
    model = load_model(source)
    at.append(_now())
    nodes = len(model.graph)
    report = map_model(model)
    at.append(_now())
    inference_problem(model)
    at.append(_now())
    save_model(model, source.with_name("timed.onnx"))
    at.append(_now())
    wall, processor = (
        Seconds(*(after - before for before, after in pairwise(clock))) for clock in zip(*at, strict=True)
    )
    return Timed(nodes, report.mapped, wall, processor)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def run_command(source: Path, output: Path) -> Command:
    """Runs `moetrt map` in a process of its own; what it complains of goes to stderr.

    Raises:
        MoetrtError: it failed.
    """
    started = time.perf_counter()
    command = [sys.executable, "-c", _MEASURE, str(source), "-o", str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise MoetrtError(f"moetrt map '{source}' ended with exit code {done.returncode}")
    data = data_path_of(output)
    stat = data.stat() if data.exists() else None
    return Command(seconds, int(done.stdout), stat.st_size if stat else 0, stat.st_blocks * 512 if stat else 0)


def widths_of(model: DeepModel, weights: float) -> Widths:
    """Sizes by which the routed experts of ``model`` have ``weights`` bytes, or a little more."""
    unit = Widths(_HIDDEN, 8, model.experts).layer_bytes * model.tails
    return Widths(_HIDDEN, 8 * max(1, -int(-weights // unit)), model.experts)


def measure(model: DeepModel, exporter: str, *, weights: float, repeats: int, output: Output) -> Row:
    """Exports, repeats layers and maps one row; ``weights`` in bytes."""
    name = f"{model.name} by {exporter}"
    with output.step("export") as step:
        few = exported(model, exporter, widths_of(model, weights))
        step.result = f"{name}: {len(few.graph.node)} nodes"
    with output.step("map") as step, tempfile.TemporaryDirectory(prefix="moetrt-") as temporary:
        folder = Path(temporary)
        whole, half = folder / "whole" / "model.onnx", folder / "half" / "model.onnx"
        length = write(deepened(few, model.layers), whole)
        write(deepened(few, model.dense + model.tails // 2), half)
        timed = time_mapping([whole, half], repeats)
        beside = run_command(whole, whole.with_name("mapped.onnx"))
        elsewhere = run_command(whole, folder / "elsewhere" / "mapped.onnx")
        row = Row(model, exporter, length, *timed, beside, elsewhere)
        step.result = f"{name}: {row.whole.mapped} of {model.tails} tails, {length / 1e9:.1f} GB of weights"
        step.ok = not row.faults()
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a rule does not hold, 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mapping", description="Time and memory of moetrt map.")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing, of which the fastest counts (5)")
    parser.add_argument("--gigabytes", type=float, default=20, help="of sparse weights of each model (20)")
    options = parser.parse_args(arguments)
    output = Output()
    try:
        check_number("--repeats", options.repeats, 1, 100)
        check_number("--gigabytes", options.gigabytes, 0.001, 1000)
        rows = [
            measure(model, exporter, weights=options.gigabytes * 1e9, repeats=options.repeats, output=output)
            for model in MODELS
            for exporter in (CAPTURED, FOREIGN)
        ]
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    _print(rows, output)
    faults = [fault for row in rows for fault in row.faults()]
    output.line()
    for fault in faults or ["every rule holds: see the head of benchmarks/mapping.py"]:
        output.line(fault)
    return 1 if faults else 0


def _print(rows: Sequence[Row], output: Output) -> None:
    output.line()
    output.heading("Seconds on a processor, and by the clock; the fastest of the repeats")
    lines = []
    for row in rows:
        for timed, tails, ratio in (
            (row.whole, row.model.tails, f"{row.ratio:.2f}"),
            (row.half, row.model.tails // 2, ""),
        ):
            seconds = [f"{getattr(timed.processor, step):.2f}" for step in STEPS]
            seconds.append(f"{timed.wall.total:.2f}")
            name = (row.model.name, row.exporter) if timed is row.whole else ("", "")
            lines.append([*name, row.model.dense + tails, timed.nodes, f"{timed.mapped}/{tails}", *seconds, ratio])
    output.table(["model", "by", "deep", "nodes", "tails", *STEPS, "clock", "ratio"], lines)
    output.line()
    output.heading("The command, with its output in the folder of the weights and in another")
    lines = []
    for row in rows:
        for folder, run in (("the same", row.beside), ("another", row.elsewhere)):
            name = (row.model.name, row.exporter) if run is row.beside else ("", "")
            copied = (f"{run.data / 1e9:.1f} GB", f"{run.disk / 1e6:.1f} MB") if run.data else ("nothing", "")
            lines.append([*name, folder, f"{run.peak / 1e6:.0f} MB", f"{run.seconds:.1f} s", *copied])
    output.table(["model", "by", "folder", "peak", "whole run", "copied", "on the disk"], lines)


if __name__ == "__main__":
    sys.exit(main())
