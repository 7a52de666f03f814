"""Files are read with one clear error and written beside their place, then renamed."""

import errno
import fcntl
import hashlib
import ntpath
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moetrt.errors import InputError, InputTypeError

Named = tuple[str, str | os.PathLike[str]]
"""What a file is to the user, such as "report", and its path."""

_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def as_path(path: str | os.PathLike[str], what: str) -> Path:
    """Returns ``path`` as a `Path`, once it is something that can name a file.

    Args:
        path: what the caller was given, of whatever type.
        what: what it is to the user; used in the message.

    Raises:
        InputError: it is empty, holds a NUL character, or has bytes that are no UTF-8: neither JSON, a script nor
            TensorRT could name it.
        InputTypeError: it is no str and no `os.PathLike` of one.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise InputTypeError(f"{what} was {path!r}, of type {type(path).__name__}; a path is taken: a str or a Path")
    if not text or "\0" in text:
        raise InputError(f"{what} was {text!r}; a path is taken")
    if not is_text(text):
        raise InputError(f"{what} was {text!r}; a path in UTF-8 is taken")
    return Path(text)


def is_text(text: str) -> bool:
    """Whether a text can be written: bytes that are no UTF-8 are read as halves of surrogate pairs."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def existing_file(path: str | os.PathLike[str], what: str) -> Path:
    """Returns ``path`` when it is a readable file.

    Args:
        path: the file.
        what: what the file is to the user, such as "ONNX model"; used in the message.

    Raises:
        InputError: it does not exist, is not a file, or cannot be read.
        InputTypeError: as of `as_path`.
    """
    found = as_path(path, what)
    try:
        mode = found.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{what} '{found}' does not exist") from error
    except OSError as error:
        raise InputError(f"{what} '{found}' cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise InputError(f"{what} '{found}' is not a file")
    if not os.access(found, os.R_OK):
        raise InputError(f"{what} '{found}' cannot be read: permission denied")
    return found


def way_out(folder: str | os.PathLike[str], name: str) -> str | None:
    """How ``name``, which a file in ``folder`` gives as one beside it, leads out of ``folder``; None where it does not.

    Whoever made the folder chose its names and links, so a reader that follows them reads what that person asks for,
    and a writer copies it. The way to ``folder`` itself is the user's own word, links included. A link from a snapshot
    in a Hugging Face cache to that cache's own blobs leads nowhere else. What a hard link shares cannot be told.

    Args:
        folder: where the names are looked up.
        name: as it is written, such as "model.onnx.data".

    Returns:
        A few words for a message: "no path that stays in it", or "a link to '/elsewhere/model.onnx.data'".
    """
    # As Windows reads it too, where a backslash is a slash: the folder may go there.
    parts = ntpath.normpath(name).split("\\")
    if not name or "\0" in name or ntpath.splitdrive(name)[0] or parts[0] in ("", ".", ".."):
        return "no path that stays in it"
    root = Path(os.path.realpath(folder))
    # Not of a path made shorter before: the system goes through "link/.." by the link.
    real = Path(os.path.realpath(root / name))
    caches = [place.parent.parent for place in (root, *root.parents) if place.parent.name == "snapshots"]
    if root in real.parents or any(real.parent == cache / "blobs" for cache in caches):
        return None
    return f"a link to '{real}'"


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 sum of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def output_file(path: str | os.PathLike[str], what: str = "output file") -> Path:
    """Returns ``path`` when nothing is there that writing must not replace.

    Args:
        path: the file, or a link to one.
        what: what the file is to the user; used in the message.

    Raises:
        InputError: it is a folder, a device or the like, or a file that may not be written.
        InputTypeError: as of `as_path`.
    """
    target = as_path(path, what)
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:
        raise InputError(f"{what} '{target}' cannot be written: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{what} '{target}' is a folder")
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
        raise InputError(f"{what} '{target}' is {kind}; a regular file is taken")
    # Renaming asks the folder alone; and root may write everything, also what somebody protected.
    if not mode & 0o222 or not os.access(target, os.W_OK):
        raise InputError(f"{what} '{target}' cannot be written: the file there is read-only")
    return target


def output_directory(path: str | os.PathLike[str]) -> Path:
    """Makes the folder ``path`` (and its parents) and returns it.

    Raises:
        InputError: it cannot be made, is not a folder, or nothing can be written into it.
        InputTypeError: as of `as_path`.
    """
    folder = as_path(path, "output folder")
    missing = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = _why_not(folder, error)
        _remove(missing)
        raise InputError(f"output folder '{folder}' cannot be written: {why}") from error
    return folder


def _missing(folder: Path) -> list[Path]:
    """The folders that making ``folder`` will make, the innermost first."""
    return [place for place in (folder, *folder.parents) if not os.path.lexists(place)]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _why_not(folder: Path, error: OSError) -> str:
    nearest = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    if not nearest.is_dir():
        return f"'{nearest}' is not a folder"
    if error.errno == errno.ENOENT:
        # A file system of the kernel's, such as /proc.
        return f"'{nearest}' takes no new files"
    return error.strerror or str(error)


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what is written there becomes ``path`` when the block ends well.

    The folder of ``path`` is made when it is missing. A link stays, and the file that it leads to is replaced. When the
    block raises, the temporary file and the folders that were made are removed and an older ``path`` stays as it was.

    Raises:
        InputError: the folder cannot be made or written, or as of `output_file`.
        InputTypeError: as of `as_path`.
    """
    given = output_file(path)
    target = Path(os.path.realpath(given))
    missing = _missing(target.parent)
    folder = _output_folder(given)
    try:
        # A folder of its own keeps the final name, which some writers put into the file or its siblings.
        with tempfile.TemporaryDirectory(prefix=".moetrt-", dir=folder) as beside:
            temporary = Path(beside) / given.name
            yield temporary
            try:
                os.replace(temporary, target)
            except OSError as error:
                raise InputError(f"output file '{given}' cannot be written: {error.strerror}") from error
    except BaseException:
        _remove(missing)
        raise


def _output_folder(path: Path) -> Path:
    """The folder that ``path`` is written into, made where it is missing."""
    # Where no link is on the way, the message names the folder as it was given.
    return output_directory(Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent)


@contextmanager
def sole_writer(path: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keeps other writers out of the folder of ``path`` while files that belong together are written there.

    Another process, or thread, that comes here for that folder waits. The kernel ends the lock with the process,
    however that ends, and nothing of it lies in the folder.

    Args:
        path: one of the files. Its folder is made where it is missing, and removed if nothing comes of it.
        progress: told where it has to wait.

    Raises:
        InputError, InputTypeError: as of `write_atomically`.
    """
    given = output_file(path)
    missing = _missing(Path(os.path.realpath(given)).parent)
    folder = os.open(_output_folder(given), os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A network's file system may lock no folders: then a mixture is seen by whoever reads it.
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    progress("waiting for another process that writes here")
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except BaseException:
        _remove(missing)
        raise
    finally:
        os.close(folder)


def check_distinct(inputs: Sequence[Named], outputs: Sequence[Named]) -> None:
    """Checks that writing ``outputs`` overwrites no input, and none of them another.

    Two paths are the same file when they lead to one, through links too, or would once both are written.

    Raises:
        InputError: an output is the same file as an input or as another output; the message names both.
        InputTypeError: as of `as_path`.
    """
    seen = [(what, as_path(path, what)) for what, path in inputs]
    for what, path in outputs:
        target = as_path(path, what)
        for other_what, other in seen:
            if _same(target, other):
                also = "" if str(other) == str(target) else f", '{other}'"
                raise InputError(f"{what} '{target}' is the {other_what} itself{also}; another name is taken")
        seen.append((what, target))


def _same(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:
        # One of them is not there.
        return False
