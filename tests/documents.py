"""Markdown pages as sessions: commands and Python snippets run in order, and what they print is compared.

A fenced block says in its info string what it is:

    sh [exit=N]          commands, run in the page's folder; the block's last one ends with code N, 0 by default
    python [raises=NAME] a snippet; the snippets of a page share their names
    python file=NAME     saved in the page's folder under that name, and run where a command or a factory names it
    python from=PATH     an excerpt of that file of the repository, word for word
    text                 after one of the first two: all that it printed, on both streams. A line "..." stands for any
                         lines, and … for any text within a line

A `moetrt` or `python` command runs in this process, which has torch already; any other in bash. Where a block says
"# needs a GPU and trtexec", tests/trtexec_stand_in.py is the trtexec on its PATH.
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetrt import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEEDS_TRTEXEC = "# needs a GPU and trtexec"

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOR_THE_SHELL = re.compile(r"[|<>&;*]|\$[A-Za-z({]")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *options = match[1].split() or [""]
        pairs = dict(option.split("=", 1) for option in options)
        found.append(Block(page.name, text[: match.start()].count("\n") + 1, language, pairs, match[2]))
    return found


def commands(text: str) -> list[str]:
    """The command lines of a block, each on one line, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


@dataclass
class Session:
    """A folder in which blocks run one after another.

    Attributes:
        folder: where they run.
        trtexec: the folder of the stand-in, and its environment.
        names: what the Python snippets have defined.
        code: the exit code of the last command.
    """

    folder: Path
    trtexec: tuple[Path, dict[str, str]] | None = None
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    code: int = 0

    def run(self, block: Block) -> str:
        """Runs a block of commands or a snippet and returns what it printed."""
        if "file" in block.options:
            (self.folder / block.options["file"]).write_text(block.text, encoding="utf-8")
            return ""
        if block.language == "python":
            return self._snippet(block)
        said = ""
        lines = commands(block.text)
        for number, line in enumerate(lines, 1):
            said += self.command(line, with_trtexec=NEEDS_TRTEXEC in block.text)
            wanted = int(block.options.get("exit", 0)) if number == len(lines) else 0
            assert self.code == wanted, f"{block.where}: {line}\nended with code {self.code}:\n{said}"
        return said

    def command(self, line: str, *, with_trtexec: bool = False) -> str:
        """Runs one command line and returns what it printed; `code` is its exit code."""
        words = shlex.split(line, comments=True)
        if words[0] in ("moetrt", "python") and not _FOR_THE_SHELL.search(line):
            with self._inside() as said:
                if words[0] == "moetrt":
                    self.code = cli.run(words[1:])
                else:
                    self.code = 0
                    runpy.run_path(words[1], run_name="__main__")
            return said.getvalue()
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        if with_trtexec:
            assert self.trtexec is not None
            environment |= self.trtexec[1] | {"PATH": f"{self.trtexec[0]}:{environment['PATH']}"}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        self.code = done.returncode
        return done.stdout

    def _snippet(self, block: Block) -> str:
        code = compile("\n" * block.line + block.text, block.page, "exec")
        wanted = block.options.get("raises")
        with self._inside() as said:
            try:
                exec(code, self.names)
            except Exception as error:
                if wanted != type(error).__name__:
                    raise
                print(f"{wanted}: {error}")
            else:
                assert wanted is None, f"{block.where}: nothing was raised"
        return said.getvalue()

    @contextlib.contextmanager
    def _inside(self) -> Any:
        """In the folder, both streams into one text; modules of the folder are forgotten afterwards."""
        said = io.StringIO()
        importlib.invalidate_caches()
        before = set(sys.modules)
        path = sys.path[:]
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            sys.path.insert(0, str(self.folder))
            try:
                yield said
            finally:
                sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(self.folder):
                del sys.modules[name]


def pattern(expected: str) -> re.Pattern[str]:
    """What a "text" block takes, as a regular expression over the lines without their trailing spaces."""
    parts = []
    for line in expected.rstrip("\n").split("\n"):
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(r".*?".join(map(re.escape, line.rstrip().split("…"))) + r"\n")
    return re.compile("".join(parts))


def check_printed(block: Block, expected: Block, said: str) -> None:
    """Fails where ``said`` is not what the page shows."""
    lines = "".join(f"{line.rstrip()}\n" for line in said.splitlines())
    assert pattern(expected.text).fullmatch(lines), (
        f"{expected.where}: the page shows\n{expected.text}\nbut got\n{lines}"
    )


def run_page(page: Path, session: Session) -> None:
    """Runs a page from its first block to its last."""
    found = blocks(page)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language not in ("sh", "python") or "from" in block.options:
            continue
        said = session.run(block)
        if after is not None and after.language == "text":
            check_printed(block, after, said)
