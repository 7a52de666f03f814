"""Graphs with random changes, mapped and not, side by side: `map` must keep every number of what it is given.

    python -m benchmarks.fuzz --count 2000 --seed 0

Each of the small graphs of `benchmarks.fuzz_graphs`, in turn, gets one to three of the changes of
`benchmarks.fuzz_mutations` and is mapped as `moetrt map --allow-unmatched` does it. Both run in ONNX Runtime at 0, 1, 3
and 17 tokens, with map entries of -1 and beyond the rows, NaN and Inf (`benchmarks.fuzz_compare` says what is wrong).
What the graph does not run on is not compared. A number is called wrong where it is so for another draw of the inputs
too: a comparison that one rounding decides is no fault.

The same seed and number give the same graph: `--start N --count 1 --save DIR` writes one that was found.
"""

import argparse
import multiprocessing
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console
from rich.progress import Progress

from benchmarks.fuzz_compare import Comparison, Refused, Session, Wrong, feeds_of
from benchmarks.fuzz_graphs import GRAPHS, graph
from benchmarks.fuzz_mutations import MUTATIONS, Mutant, Unfit
from benchmarks.models import check_number
from moetrt.console import Output
from moetrt.errors import MoetrtError
from moetrt.mapping import inference_problem, map_model
from moetrt.onnx_op import attach_functions, operator_of

MAPPED, KEPT, NOT_RUN, REFUSED, WRONG, CRASHED = "mapped", "not mapped", "does not run", "refused", "wrong", "crashed"


@dataclass(frozen=True)
class Result:
    """What became of one mutated graph.

    Attributes:
        number: gives the same graph again, with the same seed.
        kinds: the changes by name.
        changes: the graph's name and its changes, in words.
        outcome: one of the columns of the table.
        detail: of what is wrong or crashed, in words.
    """

    number: int
    kinds: tuple[str, ...]
    changes: tuple[str, ...]
    outcome: str
    detail: str = ""

    @property
    def found(self) -> bool:
        """Whether `map` has a fault."""
        return self.outcome in (WRONG, CRASHED)

    def __str__(self) -> str:
        return f"{self.number} {self.outcome}: {'; '.join(self.changes)}: {self.detail}"


@dataclass
class Summary:
    """How many mutated graphs became what, by the kind of change, and what was found."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    found: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.total[result.outcome] += 1
        for kind in set(result.kinds):
            self.outcomes[kind, result.outcome] += 1
        if result.found:
            self.found.append(result)

    @property
    def compared(self) -> int:
        """How many were run before and after."""
        return sum(self.total[outcome] for outcome in (MAPPED, KEPT, WRONG, CRASHED))

    def rows(self) -> list[list[object]]:
        """The table: each kind of change, then all graphs; one of several changes counts for each of them."""
        columns = (MAPPED, KEPT, NOT_RUN, REFUSED, WRONG, CRASHED)
        counts = [(kind, {column: self.outcomes[kind, column] for column in columns}) for kind in MUTATIONS]
        counts.append(("all", {column: self.total[column] for column in columns}))
        return [
            [name, sum(of[c] for c in (MAPPED, KEPT, WRONG, CRASHED)), *(of[c] for c in columns)] for name, of in counts
        ]


def mutated(seed: int, number: int, kinds: Sequence[str] = tuple(MUTATIONS)) -> Mutant:
    """The graph of this number: one to three changes, mostly one."""
    random = np.random.default_rng([seed, number])
    which = number % len(GRAPHS)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph(which))
    mutant = Mutant(proto, random)
    mutant.infer()
    mutant.done = [GRAPHS[which].__name__]
    for _ in range(int(random.choice([1, 2, 3], p=[0.5, 0.3, 0.2]))):
        for _ in range(8):
            kind = kinds[int(random.integers(len(kinds)))]
            try:
                text = MUTATIONS[kind](mutant)
            except Unfit:
                continue
            mutant.kinds.append(kind)
            mutant.done.append(f"{kind}: {text}")
            break
        mutant.infer()
    return mutant


def runnable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the functions of moetrt's own nodes."""
    if not any(node.domain == "moetrt" for node in proto.graph.node):
        return proto
    model = ir.from_proto(proto)
    attach_functions(model)
    return ir.to_proto(model)


def examine(
    seed: int, number: int, kinds: Sequence[str] = tuple(MUTATIONS), ran: Callable[[Result], None] = lambda result: None
) -> Result:
    """Mutates, maps and compares one graph; ``ran`` is called once the graph itself has run."""
    mutant = mutated(seed, number, kinds)

    def result(outcome: str, detail: str = "") -> Result:
        return Result(number, tuple(mutant.kinds), tuple(mutant.done), outcome, detail)

    try:
        original = runnable(mutant.proto)
        session = Session(original)
    except (MoetrtError, Refused, ValueError) as error:
        return result(NOT_RUN, str(error))
    runs = [(feeds, outputs) for feeds in feeds_of(original, number) if (outputs := session.run(feeds.values))]
    if not runs:
        return result(NOT_RUN)
    ran(result(CRASHED, "the process ended while the graph was mapped, or the mapped one ran"))
    model = ir.from_proto(mutant.proto)
    try:
        map_model(model)
        mapped = ir.to_proto(model)
        problem = inference_problem(model)
    except MoetrtError as error:
        return result(REFUSED, str(error))
    except Exception as error:
        return result(CRASHED, f"map: {type(error).__name__}: {error}")
    if problem is not None and inference_problem(ir.from_proto(mutant.proto)) is None:
        return result(CRASHED, f"strict inference: {problem}")
    try:
        comparison = Comparison(original, mapped, session)
    except Refused as refused:
        return result(CRASHED, f"the mapped graph is not loaded: {refused}")
    for feeds, outputs in runs:
        wrong = comparison.wrong(feeds, outputs)
        if wrong is not None and _again(comparison, original, session, feeds.what, number, wrong):
            return result(WRONG, str(wrong))
    return result(MAPPED if any(map(operator_of, model.graph)) else KEPT)


def _again(
    comparison: Comparison, original: onnx.ModelProto, session: Session, what: str, number: int, wrong: Wrong
) -> bool:
    """Whether other numbers in the inputs give a wrong one in the same output too: twice of three times."""
    times = 0
    for seed in (number + 1_000_003, number + 2_000_003, number + 3_000_017):
        for feeds in feeds_of(original, seed):
            if feeds.what == what and (outputs := session.run(feeds.values)):
                found = comparison.wrong(feeds, outputs)
                times += found is not None and found.output == wrong.output
    return times >= 2


def fuzz(
    seed: int,
    start: int,
    count: int,
    kinds: Sequence[str] = tuple(MUTATIONS),
    done: Callable[[Result], None] = lambda result: None,
) -> Summary:
    """Examines ``count`` graphs, from number ``start`` on, in processes of their own: some end ONNX Runtime's."""
    summary, number = Summary(), start
    while number < start + count:
        for result in _in_process(seed, number, start + count, kinds):
            summary.add(result)
            done(result)
            number = result.number + 1
    return summary


def _in_process(seed: int, start: int, end: int, kinds: Sequence[str]) -> Iterator[Result]:
    """The results up to the last, or up to that of the graph which ended the process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(sender, seed, start, end, kinds), daemon=True)
    worker.start()
    sender.close()
    number, begun = start, None
    try:
        while number < end:
            is_result, result = receiver.recv()
            begun = None if is_result else result
            if is_result:
                number = result.number + 1
                yield result
    except EOFError:
        yield begun or Result(number, (), (), NOT_RUN, "the process ended, or had not enough memory")
    finally:
        worker.terminate()
        worker.join()
        receiver.close()


_MOST_MEMORY = 3 * 2**30
"""Of a process beside what it begins with: onnx's inference wants 2**31 numbers for a shape of [2**31]."""


def _work(sender: Connection, seed: int, start: int, end: int, kinds: Sequence[str]) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(MemoryError):
        for number in range(start, end):
            sender.send((True, examine(seed, number, kinds, lambda result: sender.send((False, result)))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was found and the table; 1 where something was, 2 for options that are not taken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="Random graphs, mapped and not.")
    parser.add_argument("--count", type=int, default=1000, help="graphs (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (0)")
    parser.add_argument("--start", type=int, default=0, help="the first graph's number (0)")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write each graph that is found, as ONNX")
    options = parser.parse_args(arguments)
    try:
        check_number("--count", options.count, 1, 10**7)
        check_number("--seed", options.seed, 0, 2**31 - 1)
        check_number("--start", options.start, 0, 10**7)
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    output = Output()
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("graphs", total=options.count)

        def done(result: Result) -> None:
            progress.advance(task)
            if result.found:
                output.line(str(result))
                if options.save is not None:
                    path = options.save / f"{options.seed}-{result.number}.onnx"
                    path.write_bytes(runnable(mutated(options.seed, result.number).proto).SerializeToString())

        summary = fuzz(options.seed, options.start, options.count, done=done)
    output.line()
    output.table(["change", "compared", MAPPED, KEPT, NOT_RUN, REFUSED, WRONG, CRASHED], summary.rows())
    output.line()
    output.line(f"{summary.compared} compared, {len(summary.found)} found (seed {options.seed})")
    return 1 if summary.found else 0


if __name__ == "__main__":
    sys.exit(main())
