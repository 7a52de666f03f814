"""The JSON files that moetrt writes, read back: a field that is not as it was written is one line that names it."""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moetrt.errors import InputError
from moetrt.files import existing_file, is_text

_Kind = TypeVar("_Kind", str, bool, int, float)

_TAKEN: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    list: "a list",
    dict: "an object",
}

_MISSING = object()
_LARGEST = sys.float_info.max
_LONGEST = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Field:
    """A value in a JSON file, or the whole of it: what it should be is said when it is read.

    Attributes:
        path: the file.
        format: its format, such as "moetrt.mapping/1".
        writer: the command that writes it.
        place: the field in the file, such as "sites[0].name"; empty for the whole.
        value: as JSON has it.
    """

    path: Path
    format: str
    writer: str
    place: str
    value: Any

    def refuse(self, what: str) -> NoReturn:
        """Refuses the file.

        Raises:
            InputError: ``what`` of which file, and who writes it.
        """
        raise InputError(f"'{self.path}' is no whole {self.format} file ({what}); write it again with {self.writer}")

    def take(self, taken: str) -> NoReturn:
        """Refuses the field, since ``taken`` is taken."""
        place = self.place or "its content"
        if self.value is _MISSING:
            self.refuse(f"{place} is missing; {taken} is taken")
        self.refuse(f"{place} was {shown(self.value)}; {taken} is taken")

    def agree(self, derived: object, parts: str) -> None:
        """Refuses the field unless it is what follows from ``parts`` of the file, a number but for its last digits."""
        if self.value is _MISSING:
            self.take(shown(derived))
        near = isinstance(derived, float) and math.isclose(self.of(float), derived, rel_tol=1e-9, abs_tol=1e-12)
        if not near and (type(self.value) is not type(derived) or self.value != derived):
            self.refuse(f"{self.place} was {shown(self.value)}; {parts} make it {shown(derived)}")

    def __getitem__(self, name: str) -> "Field":
        """A field of an object; that it is missing is said when it is read."""
        fields = self._of(dict)
        return self._part(f"{self.place}.{name}" if self.place else name, fields.get(name, _MISSING))

    def entries(self) -> list["Field"]:
        """The entries of a list."""
        return [self._part(f"{self.place}[{index}]", value) for index, value in enumerate(self._of(list))]

    def items(self) -> dict[str, "Field"]:
        """The fields of an object whose names are not known."""
        names: dict[str, Field] = {}
        for name, value in self._of(dict).items():
            # A name is text like any other.
            self._part(f"a name in {self.place}", name).of(str)
            names[name] = self._part(f"{self.place}.{name}", value)
        return names

    def of(self, kind: type[_Kind]) -> _Kind:
        """The value, which must be of that kind; whole numbers are numbers too."""
        value = self._of(int if kind is float and type(self.value) is int else kind)
        if kind is float and not abs(value) < _LARGEST:
            self.take(_TAKEN[kind])
        if kind is str and not is_text(value):
            self.take("text of whole characters")
        return kind(value)

    def or_none(self, kind: type[_Kind]) -> _Kind | None:
        """The value, which must be of that kind or null."""
        return None if self.value is None else self.of(kind)

    def count(self) -> int:
        """A whole number of at least 0."""
        if self.of(int) < 0:
            self.take("a whole number of at least 0")
        return self.of(int)

    def sizes(self) -> tuple[int, ...]:
        """The sizes of a shape."""
        return tuple(entry.count() for entry in self.entries())

    def sha256(self) -> str:
        """A SHA-256 sum in hex."""
        if not isinstance(self.value, str) or not re.fullmatch("[0-9a-f]{64}", self.value):
            self.take("a SHA-256 sum of 64 hex digits")
        return self.of(str)

    def file(self) -> str:
        """The path of a file."""
        if not self.of(str) or "\0" in self.of(str):
            self.take("a path")
        return self.of(str)

    def _part(self, place: str, value: Any) -> "Field":
        return Field(self.path, self.format, self.writer, place, value)

    def _of(self, kind: type) -> Any:
        if type(self.value) is not kind:
            self.take(_TAKEN[kind])
        return self.value


def shown(value: object) -> str:
    """A value as JSON has it, in a few words."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def parsed(path: Path, text: str) -> Any:
    """What a JSON file of ours holds.

    Raises:
        InputError: its text is no JSON; NaN and Infinity are none.
    """
    try:
        return json.loads(text, parse_constant=_refused_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is cut off, or was changed: it is no JSON ({error})") from error


def read_json(path: Path, what: str, format_name: str, writer: str) -> Field:
    """A JSON file of a format that is known.

    Args:
        path: the file.
        what: what it is to the user.
        format_name: what its "format" must be.
        writer: the command that writes it.

    Raises:
        InputError: there is none, it is no JSON, or of another format.
    """
    found = existing_file(path, what)
    try:
        text = found.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is cut off, or was changed: it is no JSON ({error})") from error
    content = Field(found, format_name, writer, "", parsed(found, text))
    if content["format"].value != format_name:
        content["format"].take(json.dumps(format_name))
    return content


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
