"""What made a file: the command line that makes it again, and the versions that played a part."""

import importlib.metadata
import platform
import shlex
from collections.abc import Sequence

import click

_COMMAND = "moetrt.command"


def keep_command(context: click.Context, arguments: Sequence[str]) -> None:
    """Remembers the arguments of this run of the command line."""
    context.find_root().meta[_COMMAND] = shlex.join(["moetrt", *arguments])


def command() -> str | None:
    """The command line of this run, quoted for a shell; None where the package was called from Python."""
    context = click.get_current_context(silent=True)
    return context.find_root().meta.get(_COMMAND) if context is not None else None


def versions(*packages: str) -> dict[str, str]:
    """The versions of moetrt, Python and the distributions ``packages``, as far as they are installed."""
    found = {}
    for package in ("moetrt", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version()}
