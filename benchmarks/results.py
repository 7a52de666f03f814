"""What a run on a GPU measured: rows, the table and verdicts made from them, the JSON file and the plot."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders import ADD_NORM, COMPILED, COPY, EAGER, OURS, SEPARATE
from benchmarks.models import ModelSize
from benchmarks.timing import Timing
from benchmarks.traffic import tail_of
from moetrt.console import Output
from moetrt.files import write_atomically
from moetrt.traffic import bytes_moved, ways

DECODE_TOKENS = 64
"""Up to here a tail is held against a plain add + RMSNorm."""
PREFILL_TOKENS = 1024
"""From here on it is held against a copy."""

PASSED = "passed"

COPY_SHARE = 0.92
NORM_FACTOR = 1.25
SEPARATE_FACTOR = 1.25


@dataclass(frozen=True)
class Row:
    """One contender with one setting in one cell.

    Attributes:
        model, tokens: the cell.
        contender, setting: as of `benchmarks.contenders.Contender`.
        moved: bytes that the way must move at least (the copy's: that it moves).
        timing: None where nothing was measured.
        default: whether it is what the library does by itself.
        note: why nothing was measured.
    """

    model: str
    tokens: int
    contender: str
    setting: str
    moved: int
    timing: Timing | None
    default: bool = False
    note: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes a second."""
        return None if self.timing is None else self.moved / self.timing.median


@dataclass
class Results:
    """A whole run: where and when, and its rows.

    Among the facts are ``tests``, "passed", "failed" or "skipped", and ``faults``, what was found wrong while timing.
    """

    facts: Mapping[str, Any]
    models: Sequence[ModelSize]
    rows: list[Row] = field(default_factory=list)

    @property
    def trusted(self) -> bool:
        """Whether the numbers of the kernel that was timed were found right: without that no ratio is given."""
        return self.facts.get("tests") == PASSED

    def tokens_of(self, model: ModelSize) -> list[int]:
        """The numbers of tokens that the model has rows for."""
        return list(dict.fromkeys(row.tokens for row in self.rows if row.model == model.name))

    def best(self, model: str, tokens: int, contender: str) -> Row | None:
        """The fastest setting of a contender in a cell; None where none was measured."""
        measured = [row for row in self._of(model, tokens, contender) if row.timing is not None]
        return min(measured, key=_seconds, default=None)

    def default(self, model: str, tokens: int) -> Row | None:
        """Our kernel as it runs by itself."""
        return next((row for row in self._of(model, tokens, OURS) if row.default and row.timing is not None), None)

    def _of(self, model: str, tokens: int, contender: str) -> Iterable[Row]:
        return (row for row in self.rows if (row.model, row.tokens, row.contender) == (model, tokens, contender))

    def write(self, path: Path) -> None:
        """Writes everything as JSON; seconds are null where nothing was measured."""
        lists = {name: [asdict(entry) for entry in getattr(self, name)] for name in ("models", "rows")}
        text = json.dumps({**self.facts, **lists}, indent=1)
        with write_atomically(path) as temporary:
            Path(temporary).write_text(text + "\n")


def read(path: Path) -> Results:
    """The results that `Results.write` wrote."""
    data = json.loads(path.read_text())
    rows = [
        Row(**{**row, "timing": None if row["timing"] is None else Timing(**row["timing"])}) for row in data.pop("rows")
    ]
    models = [ModelSize(**model) for model in data.pop("models")]
    return Results(data, models, rows)


def _seconds(row: Row) -> float:
    assert row.timing is not None
    return row.timing.median


COLUMNS = ("T", "ours", "best tactic", "copy", "sep.", "norm", "compile", "eager")


LEGEND = (
    "ours: as the library chooses; best tactic: the fastest of its own; copy: our rate of moving bytes in percent of",
    "a device-to-device copy's; sep. (finalize, shared add, add + RMSNorm as kernels of their own), norm (a plain",
    "add + RMSNorm), compile and eager: their times over ours. A dash was not measured.",
)


def print_table(results: Results, output: Output) -> None:
    """One table for each model, below what its columns mean."""
    for line in LEGEND:
        output.line(line)
    if not results.trusted:
        output.line(f"No ratios: tests/gpu {results.facts.get('tests', 'skipped')}; they are given where it passed.")
    for model in results.models:
        output.line()
        output.heading(f"{model.name}: H={model.hidden}, K={model.top_k}")
        output.table(COLUMNS, [_line(results, model.name, tokens) for tokens in results.tokens_of(model)])


def _line(results: Results, model: str, tokens: int) -> list[str]:
    mine, best = results.default(model, tokens), results.best(model, tokens, OURS)
    share = copy_share(results, model, tokens)
    ratios = [ratio(results, model, tokens, name) for name in (SEPARATE, ADD_NORM, COMPILED, EAGER)]
    return [
        str(tokens),
        "-" if mine is None else f"{_seconds(mine) * 1e6:.2f} us",
        "-" if best is None else f"{_seconds(best) * 1e6:.2f} us {best.setting}",
        "-" if share is None else f"{100 * share:.0f} %",
        *("-" if value is None else f"{value:.2f}" for value in ratios),
    ]


def ratio(results: Results, model: str, tokens: int, contender: str) -> float | None:
    """A contender's time over that of our kernel as it runs by itself; None where one was not measured, or not
    trusted."""
    if not results.trusted:
        return None
    mine, other = results.default(model, tokens), results.best(model, tokens, contender)
    return None if mine is None or other is None else _seconds(other) / _seconds(mine)


def copy_share(results: Results, model: str, tokens: int) -> float | None:
    """Our rate of moving bytes over that of a device-to-device copy; None as of `ratio`."""
    if not results.trusted:
        return None
    mine, copy = results.default(model, tokens), results.best(model, tokens, COPY)
    return None if mine is None or copy is None or not mine.rate or not copy.rate else mine.rate / copy.rate


@dataclass(frozen=True)
class Verdict:
    """One number to reach: ``reached`` is the worst cell's, None where nothing was measured, or not trusted."""

    wanted: str
    reached: float | None
    cell: str
    held: bool | None


def verdicts(results: Results) -> list[Verdict]:
    """The numbers that the kernel is to reach, each with the worst cell."""
    shares, norms, separates = {}, {}, {}
    for model in results.models:
        for tokens in results.tokens_of(model):
            cell = f"{model.name}, T={tokens}"
            if tokens >= PREFILL_TOKENS:
                shares[cell] = copy_share(results, model.name, tokens)
            inverse = ratio(results, model.name, tokens, ADD_NORM)
            if tokens <= DECODE_TOKENS:
                norms[cell] = None if inverse is None else 1 / inverse
            # Where the bytes allow it: K = 8 with a shared expert moves 4/3 as much in separate kernels.
            if model.top_k == 8 and model.shared:
                separates[cell] = ratio(results, model.name, tokens, SEPARATE)
    return [
        _verdict(f"T >= {PREFILL_TOKENS}: at least {COPY_SHARE:.0%} of a copy's rate", shares, COPY_SHARE),
        _verdict(f"T <= {DECODE_TOKENS}: at most {NORM_FACTOR}x an add + RMSNorm", norms, NORM_FACTOR, most=True),
        _verdict(f"K=8, shared: separate kernels take {SEPARATE_FACTOR}x or more", separates, SEPARATE_FACTOR),
    ]


def _verdict(wanted: str, reached: Mapping[str, float | None], bound: float, *, most: bool = False) -> Verdict:
    measured = {cell: value for cell, value in reached.items() if value is not None}
    if not measured:
        return Verdict(wanted, None, "", None)
    cell = (max if most else min)(measured, key=measured.__getitem__)
    held = measured[cell] <= bound if most else measured[cell] >= bound
    return Verdict(wanted, measured[cell], cell, held)


def print_verdicts(results: Results, output: Output) -> None:
    """The numbers to reach, beside what the worst cell reached."""
    lines = []
    unknown = "not measured" if results.trusted else "not judged"
    for verdict in verdicts(results):
        reached = "-" if verdict.reached is None else f"{verdict.reached:.2f} ({verdict.cell})"
        held = {True: "held", False: "NOT HELD", None: unknown}[verdict.held]
        lines.append([verdict.wanted, reached, held])
    output.line()
    output.table(["wanted", "worst", ""], lines)


def plot(results: Results, path: Path) -> str:
    """Draws time over T, a line for each contender and one for the floor at the copy's best rate.

    Returns:
        "" or why there is no plot.
    """
    if not any(row.timing is not None for row in results.rows):
        return "nothing was measured"
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(results.models)
    figure, axes = pyplot.subplots(1, count, figsize=(4.2 * count, 4.2), squeeze=False, sharey=True)
    for axis, model in zip(axes[0], results.models, strict=True):
        _draw(axis, results, model)
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(_title(results))
    figure.tight_layout()
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    pyplot.close(figure)
    return ""


def _title(results: Results) -> str:
    facts = results.facts
    state = f"tests/gpu {facts.get('tests', 'skipped')}"
    if facts.get("faults"):
        state += f", {len(facts['faults'])} faults"
    return f"MoE tail in bf16, {facts.get('card', '')}, {facts.get('date', '')}, {state}"


def _draw(axis: Any, results: Results, model: ModelSize) -> None:
    tokens = results.tokens_of(model)
    for contender in (OURS, SEPARATE, ADD_NORM, COMPILED, EAGER):
        rows = [results.best(model.name, count, contender) for count in tokens]
        points = [(row.tokens, _seconds(row) * 1e6) for row in rows if row is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=contender)
    rates = [row.rate for count in tokens if (row := results.best(model.name, count, COPY)) is not None and row.rate]
    if rates:
        floor = [bytes_moved(ways(tail_of(model, count))["fused"]) / max(rates) * 1e6 for count in tokens]
        axis.plot(tokens, floor, color="black", linestyle="--", linewidth=1, label="floor at the copy's rate")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_title(f"{model.name}, H={model.hidden}, K={model.top_k}", fontsize="medium")


def file_stem(facts: Mapping[str, Any]) -> str:
    """The name that a run's files begin with: card and time."""
    card = "".join(character if character.isalnum() else "-" for character in str(facts["card"])).strip("-").lower()
    return f"{card}-{str(facts['date']).replace(':', '').replace(' ', '-')}"
