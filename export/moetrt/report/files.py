"""The JSON files that moetrt's commands left in a folder: found by their format, and all of one model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrt.errors import InputError
from moetrt.files import as_path, existing_file, file_sha256
from moetrt.json_files import Field, parsed, shown

EXPORT = "moetrt.export"
MAPPING = "moetrt.mapping"
PARITY = "moetrt.parity"
BENCH = "moetrt.bench"
ENGINE = "moetrt.engine"

VERSION = 1
"""The version of each format that is read."""

OTHERS = ("moetrt.report", "moetrt.bench-manifest")
"""Formats of ours that a report is not made of."""

COMMANDS = {
    EXPORT: "moetrt export",
    MAPPING: "moetrt map --report",
    PARITY: "moetrt compare",
    BENCH: "moetrt bench",
    ENGINE: "moetrt build",
}
"""Who writes which."""


@dataclass(frozen=True)
class ReportFile:
    """One JSON file of ours.

    Attributes:
        path: of the file.
        kind: EXPORT, MAPPING, PARITY, BENCH or ENGINE.
        content: what it holds.
    """

    path: Path
    kind: str
    content: Field

    @property
    def model(self) -> "NamedModel | None":
        """The mapped model that it is of; None where it names none, as what `moetrt export` leaves.

        Raises:
            InputError: as it is named, no file can be.
        """
        if self.kind == ENGINE:
            file, sha256 = self.content["onnx_path"], self.content["onnx_sha256"]
        elif self.kind == EXPORT or (self.kind == MAPPING and self.content["model"].value is None):
            return None
        else:
            file, sha256 = self.content["model"]["file"], self.content["model"]["sha256"]
        return self._named(file, sha256)

    @property
    def unmapped(self) -> "NamedModel | None":
        """The model before mapping, of EXPORT and MAPPING; None where the latter names none.

        Raises:
            InputError: as it is named, no file can be.
        """
        named = self.content["model" if self.kind == EXPORT else "source_model"]
        return None if named.value is None else self._named(named["file"], named["sha256"])

    def _named(self, file: Field, sha256: Field) -> "NamedModel":
        return NamedModel(self.path, Path(os.path.normpath(self.path.parent / file.file())), sha256.sha256())


@dataclass(frozen=True)
class NamedModel:
    """A model as one of the files names it: by whom, where it should lie, and the SHA-256 sum it had."""

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
    # A folder may be called so too. A link that leads nowhere is refused: it may have been one of ours.
    paths = [path for path in sorted(place.glob("*.json")) if path.is_file() or not path.exists()]
    found = [file for path in paths if (file := _read(path)) is not None]
    if all(file.kind == EXPORT for file in found):
        writers = ", ".join(command for kind, command in COMMANDS.items() if kind != EXPORT)
        raise InputError(f"'{place}' holds nothing to report on: no JSON file of {writers} lies in it")
    return found


def _read(path: Path) -> ReportFile | None:
    try:
        text = existing_file(path, "JSON file").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    # A file of another tool need not be valid JSON (trtexec's may not be); one of ours says so at its head.
    ours = not text.strip() or '"moetrt.' in text[:200]
    try:
        content = parsed(path, text)
    except InputError:
        if ours:
            raise
        return None
    if isinstance(content, list) and ours:
        raise InputError(f"'{path}': its content was a list; an object is taken: write it again with what made it")
    if not isinstance(content, dict):
        return None
    name = content.get("format")
    kind, _, version = name.partition("/") if isinstance(name, str) else ("", "", "")
    if kind not in COMMANDS:
        if kind in OTHERS or not (kind.startswith("moetrt.") or _is_signed(content)):
            return None
        raise InputError(
            f"'{path}': its format was {shown(name)}; {', '.join(f'{kind}/{VERSION}' for kind in COMMANDS)} are taken"
        )
    if version != str(VERSION):
        raise InputError(
            f"'{path}': its format was {name}; this version of moetrt reads {kind}/{VERSION}: write it again with "
            f"{COMMANDS[kind]}"
        )
    return ReportFile(path, kind, Field(path, f"{kind}/{VERSION}", COMMANDS[kind], "", content))


def _is_signed(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object says, apart from its format, that moetrt made it: from Python, the command is null."""
    made = content.get("command", "")
    return "versions" in content and (made is None or str(made).startswith("moetrt "))


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
