"""Files are read with one clear error and written beside their place, then renamed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moetrt.errors import InputError


def existing_file(path: str | os.PathLike[str], what: str) -> Path:
    """Returns ``path`` when it is a readable file.

    Args:
        path: the file.
        what: what the file is to the user, such as "ONNX model"; used in the message.

    Raises:
        InputError: it does not exist, is not a file, or cannot be read.
    """
    found = Path(path)
    if not found.exists():
        raise InputError(f"{what} '{found}' does not exist")
    if not found.is_file():
        raise InputError(f"{what} '{found}' is not a file")
    if not os.access(found, os.R_OK):
        raise InputError(f"{what} '{found}' cannot be read: permission denied")
    return found


def output_directory(path: str | os.PathLike[str]) -> Path:
    """Makes the folder ``path`` (and its parents) and returns it.

    Raises:
        InputError: it cannot be made, is not a folder, or nothing can be written into it.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"output folder '{folder}' cannot be written: {error.strerror or error}") from error
    return folder


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what is written there becomes ``path`` when the block ends well.

    The folder of ``path`` is made when it is missing. When the block raises, the temporary file is removed and an
    older ``path`` stays as it was.

    Raises:
        InputError: the folder cannot be made or written, or ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"output file '{target}' is a folder")
    folder = output_directory(target.parent)
    # A folder of its own keeps the final name, which some writers put into the file or its siblings.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder) as beside:
        temporary = Path(beside) / target.name
        yield temporary
        os.replace(temporary, target)
