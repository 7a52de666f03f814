"""What a run says: results and steps on stdout, plain when piped, with a spinner where somebody is watching."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress
from rich.status import Status
from rich.table import Table
from rich.text import Text

_UNLIMITED = 1_000_000
"""Columns of a pipe: who reads it, such as grep, wants a table's row on one line."""

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """``text`` with what would not be seen, or would move what follows it, escaped: names come from others' files.

    That is control characters, terminals' own sequences among them, and those that turn the direction of writing; line
    breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if char not in "\n\t" and unicodedata.category(char) in _UNSEEN else char
        for char in text
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command line: rich would end the process with an exit code of its own."""
        raise


@dataclass
class Step:
    """One step of a run, while it lasts.

    Attributes:
        result: what came out, one line; printed when the step ends.
        ok: False marks the step as fallen short.
        details: further lines, printed indented below the result.
    """

    name: str
    result: str = ""
    ok: bool = True
    details: list[str] = field(default_factory=list)
    _status: Status | None = None

    def progress(self, text: str) -> None:
        """Shows what the step is doing just now; says nothing where nobody is watching."""
        if self._status is not None:
            self._status.update(Text(f"{self.name}: {text}"))


class Output:
    """Prints a run. ``quiet`` leaves only errors (and the exit code); results go to stdout."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = _Console(file=sys.stdout, highlight=False, markup=False, quiet=quiet)
        if not self._console.is_terminal:
            self._console.width = _UNLIMITED

    def line(self, text: str = "") -> None:
        """Prints one line, never wrapped: paths and commands stay whole."""
        self._console.print(Text(visible(text)), soft_wrap=True)

    def heading(self, text: str) -> None:
        """Prints the title of a part."""
        self._console.print(Text(visible(text), style="bold"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Prints a table; in a terminal it fits the window, long cells folded, and in a pipe each row is one line."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(visible(str(cell))) for cell in row))
        self._console.print(table)

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Runs one step: a spinner while it lasts, then its name, result and time.

        What others print meanwhile, such as the code of a user's model, goes to stderr: stdout has our results alone.
        A step that raises prints nothing: the error line that follows names the trouble.
        """
        step = Step(name)
        started = time.monotonic()
        if self._console.is_terminal and not self.quiet:
            # As Text: a str would be read as markup, and a path may have brackets.
            with self._console.status(Text(name)) as status:
                step._status = status
                with redirect_stdout(sys.stderr):
                    yield step
                step._status = None
        else:
            with redirect_stdout(sys.stderr):
                yield step
        seconds = time.monotonic() - started
        mark, style = ("ok", "green") if step.ok else ("FAILED", "bold red")
        self._console.print(
            Text.assemble((f"{mark:<7}", style), f"{name:<8} {visible(step.result)}  ", (f"{seconds:.1f} s", "dim")),
            soft_wrap=True,
        )
        for detail in step.details:
            self.line(f"       {detail}")

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[str, bool], None]]:
        """Shows how much of a long run is done, where somebody is watching.

        Yields:
            A function that prints the result of one more part, and whether it is as it should be.
        """
        watched = self._console.is_terminal and not self.quiet
        with Progress(console=self._console, disable=not watched, transient=True) as progress:
            task = progress.add_task(name, total=total)

            def done(text: str, ok: bool) -> None:
                mark, style = ("ok", "green") if ok else ("FAILED", "bold red")
                self._console.print(Text.assemble((f"{mark:<7}", style), visible(text)), soft_wrap=True)
                progress.advance(task)

            with redirect_stdout(sys.stderr):
                yield done
