"""The JSON files that moetrt's commands left in a folder: found by their format, and all of one model."""

import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from moetrt.errors import InputError
from moetrt.files import as_path, existing_file, file_sha256

MAPPING = "moetrt.mapping"
PARITY = "moetrt.parity"
BENCH = "moetrt.bench"
ENGINE = "moetrt.engine"

VERSION = 1
"""The version of each format that is read."""

COMMANDS = {MAPPING: "moetrt map --report", PARITY: "moetrt compare", BENCH: "moetrt bench", ENGINE: "moetrt build"}
"""Who writes which."""

_Built = TypeVar("_Built")


@dataclass(frozen=True)
class ReportFile:
    """One JSON file of ours.

    Attributes:
        path: of the file.
        kind: MAPPING, PARITY, BENCH or ENGINE.
        content: what it holds.
    """

    path: Path
    kind: str
    content: dict[str, Any]

    @property
    def model(self) -> "NamedModel | None":
        """The mapped model that it is of; None where it names none."""
        with self.reading():
            if self.kind == ENGINE:
                file, sha256 = self.content["onnx_path"], self.content["onnx_sha256"]
            elif self.content["model"] is None:
                return None
            else:
                file, sha256 = self.content["model"]["file"], self.content["model"]["sha256"]
            return NamedModel(self.path, Path(os.path.normpath(self.path.parent / file)), str(sha256))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the block reads ``content``: what is missing or of another type is one clear line.

        Raises:
            InputError: as said.
        """
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f"'{self.path}' is no whole {self.kind}/{VERSION} file ({what}); write it again with "
                f"{COMMANDS[self.kind]}"
            ) from error

    def built(self, build: Callable[["ReportFile"], _Built]) -> _Built:
        """What ``build`` makes of the file; see `reading`."""
        with self.reading():
            facts = build(self)
            check_types(facts)
            return facts


def check_types(facts: object) -> None:
    """Checks that the fields of a dataclass, and of those in it, hold what their annotations say.

    Raises:
        TypeError: one holds something else; the message names it.
    """
    for name, kind in typing.get_type_hints(type(facts)).items():
        value = getattr(facts, name)
        if not _is_of(value, kind):
            wanted = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
            raise TypeError(f"{name} was {value!r}; {wanted} is taken")


def _is_of(value: object, kind: Any) -> bool:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(value, one) for one in of)
    if origin is tuple:
        entries = of[:1] * len(value) if isinstance(value, tuple) and of[1:] == (...,) else of
        return isinstance(value, tuple) and len(value) == len(entries) and all(map(_is_of, value, entries))
    if origin is not None:
        return isinstance(value, Mapping) and all(
            _is_of(key, of[0]) and _is_of(entry, of[1]) for key, entry in value.items()
        )
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if is_dataclass(value):
        check_types(value)
    return isinstance(value, kind)


@dataclass(frozen=True)
class NamedModel:
    """A mapped model as one of the files names it: by whom, where it should lie, and the SHA-256 sum it had."""

    by: Path
    path: Path
    sha256: str


def find_files(folder: str | os.PathLike[str]) -> list[ReportFile]:
    """Our JSON files directly in ``folder``, by name. Others, and reports that were made of these, are passed over.

    Raises:
        InputError: ``folder`` is no folder, it holds no such file, or one of them is cut off or of another version.
        InputTypeError: ``folder`` is no path.
    """
    place = as_path(folder, "folder to report on")
    if not place.is_dir():
        raise InputError(f"folder to report on '{place}' {'is not a folder' if place.exists() else 'does not exist'}")
    found = [file for path in sorted(place.glob("*.json")) if (file := _read(path)) is not None]
    if not found:
        raise InputError(
            f"'{place}' holds nothing to report on: no JSON file of {', '.join(COMMANDS.values())} lies in it"
        )
    return found


def _read(path: Path) -> ReportFile | None:
    try:
        text = existing_file(path, "JSON file").read_text(encoding="utf-8")
        content = json.loads(text)
    except UnicodeDecodeError:
        return None
    except (ValueError, RecursionError) as error:
        # A file of another tool need not be valid JSON (trtexec's may not be); one of ours says so at its head.
        if not text.strip() or '"moetrt.' in text[:200]:
            raise InputError(f"'{path}' is cut off, or was changed: it is no JSON ({error})") from error
        return None
    name = content.get("format") if isinstance(content, dict) else None
    if not isinstance(name, str):
        return None
    kind, _, version = name.partition("/")
    if kind not in COMMANDS:
        return None
    if version != str(VERSION):
        raise InputError(
            f"'{path}': its format was {name}; this version of moetrt reads {kind}/{VERSION}: write it again with "
            f"{COMMANDS[kind]}"
        )
    return ReportFile(path, kind, content)


def only_model(files: list[ReportFile]) -> NamedModel | None:
    """The one mapped model that all files are of; None where none of them names one.

    Raises:
        InputError: they are of different models, or the model's file is another than when they were written.
    """
    named = [model for file in files if (model := file.model) is not None]
    for model in named[1:]:
        if model.sha256 != named[0].sha256:
            raise InputError(
                f"'{named[0].by}' and '{model.by}' are of different models ({_short(named[0])}, {_short(model)}); a "
                "report is of one: make them again from one file, or keep them in folders of their own"
            )
    if not named:
        return None
    present = next((model for model in named if model.path.is_file()), named[0])
    if present.path.is_file() and (found := file_sha256(existing_file(present.path, "mapped model"))) != present.sha256:
        raise InputError(
            f"'{present.path}' is another file than when '{present.by}' was written: its SHA-256 is {found[:12]}..., "
            f"it was {present.sha256[:12]}...; make the figures again"
        )
    return present


def _short(model: NamedModel) -> str:
    return f"{model.path.name} with SHA-256 {model.sha256[:12]}..."
