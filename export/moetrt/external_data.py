"""Tensors whose data lies outside of the model's file: in files of the model's own folder that were written with it.

A model and its data are two files, and each can be replaced without the other. So a data file that is written here ends
in a mark of its own, and each tensor of the model says, in the field that ONNX has for a checksum, which mark it is of.
A file without a mark is taken for what its name says, as those of other tools are.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from moetrt.errors import InputError
from moetrt.files import existing_file, way_out

MARK_BYTES = len("moetrt:") + 32
"""How long a mark is."""


def new_mark(sources: Iterable[object] = ()) -> str:
    """A mark that no other data file has.

    Args:
        sources: where all that the file gets comes from, in order, if that has marks itself: then the mark follows from
            them, so that mapping a file twice gives the same file. Empty otherwise.
    """
    text = repr(list(sources))
    return "moetrt:" + (hashlib.sha256(text.encode()).hexdigest()[:32] if text != "[]" else uuid.uuid4().hex)


def mark_of(file: str | os.PathLike[str] | int) -> str | None:
    """The mark at the end of a data file, or of an open one; None where it has none.

    Raises:
        OSError: it cannot be read.
    """
    if not isinstance(file, int):
        with open(file, "rb") as opened:
            return mark_of(opened.fileno())
    end = os.pread(file, MARK_BYTES, max(0, os.fstat(file).st_size - MARK_BYTES))
    return end.decode() if re.fullmatch(rb"moetrt:[0-9a-f]{32}", end) else None


def claim_marks(proto: onnx.ModelProto, marks: Mapping[str, str | None]) -> None:
    """Has each external tensor of ``proto`` say which mark its data file has, by ``marks`` of the locations."""
    for tensor, _ in external_tensors(proto):
        mark = marks.get(_locations(tensor)[-1])
        if mark is not None:
            # Other keys than ONNX's own are refused by ONNX Runtime and TensorRT.
            tensor.external_data.add(key="checksum", value=mark)


def check_marks(proto: onnx.ModelProto, source: Path) -> dict[str, str | None]:
    """Checks that the data files that are there are those which the model was written with.

    Args:
        proto: the model, read without its external data.
        source: its file.

    Returns:
        The mark of each data file that is there, by its location.

    Raises:
        InputError: one was replaced.
    """
    marks: dict[str, str | None] = {}
    for tensor, _ in external_tensors(proto):
        claimed = next((field.value for field in tensor.external_data if field.key == "checksum"), "")
        for location in _locations(tensor):
            data = source.parent / location
            if location not in marks and way_out(source.parent, location) is None and data.is_file():
                marks[location] = mark_of(data)
            if claimed.startswith("moetrt:") and marks.get(location, claimed) != claimed:
                raise InputError(
                    f"ONNX model '{source}': its data file '{location}' was replaced, and holds other weights; "
                    "expected the one that it was written with: make the model again"
                )
    return marks


def check_external_data(proto: onnx.ModelProto, source: Path) -> dict[str, str | None]:
    """Checks where a model says that its tensors lie; none of them is read.

    Args:
        proto: the model, read without its external data.
        source: its file. The data is looked for beside it: where that is a link, beside the link.

    Returns:
        As of `check_marks`.

    Raises:
        InputError: a data file is missing, was replaced, or lies outside the folder of ``source``, also where only a
            link leads there; an offset or a length is no number; or a tensor is one of those whose data must lie in the
            model.
    """
    seen: set[str] = set()
    for tensor, way in external_tensors(proto):
        within = next((_WITHIN[field] for field in way if field in _WITHIN), None)
        if within is not None:
            raise InputError(
                f"ONNX model '{source}': '{tensor.name}' is {within} and lies in a data file; expected in the model "
                "itself"
            )
        for field in tensor.external_data:
            # int() would take "+1", "1_0" and other alphabets' digits, which other readers do not.
            if field.key in ("offset", "length") and not (field.value.isascii() and field.value.isdecimal()):
                raise InputError(
                    f"ONNX model '{source}': {field.key} of '{tensor.name}' in its data file was '{field.value}'; "
                    "a number of bytes is taken"
                )
        # Once for each file: a model has many tensors, and each look-up asks the file system.
        for location in _locations(tensor):
            if location not in seen:
                _check_file(source, tensor.name, location)
                seen.add(location)
    return check_marks(proto, source)


def _locations(tensor: onnx.TensorProto) -> list[str]:
    """What ``tensor`` says of its data's file: once, where the model is as it should be."""
    return [field.value for field in tensor.external_data if field.key == "location"] or [""]


def _check_file(source: Path, tensor: str, location: str) -> None:
    out = way_out(source.parent, location)
    if out is not None:
        raise InputError(
            f"ONNX model '{source}': data of '{tensor}' is in '{location}', {out}; a path inside the model's folder is "
            "taken"
        )
    try:
        existing_file(os.path.abspath(source.parent / location), "the file")
    except InputError as error:
        raise InputError(f"ONNX model '{source}' needs its data file '{location}' beside it: {error}") from error


_WITHOUT_TENSORS = ("value_info", "metadata_props", "input", "output", "opset_import")
"""Fields of ONNX's messages that hold no tensor, and most of what a deep model's graph has."""

_WITHIN = {
    "functions": "a tensor of a function",
    "sparse_initializer": "a part of a sparse tensor",
    "sparse_tensor": "a part of a sparse tensor",
    "sparse_tensors": "a part of a sparse tensor",
    "tensors": "one of a list of tensors",
    "training_info": "a tensor of the training",
}
"""Fields whose tensors onnx_ir does not hand out, so that they are neither copied nor named anew."""


def external_tensors(message: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[onnx.TensorProto, tuple[str, ...]]]:
    """Every tensor anywhere in a protobuf message whose data is in another file, and the fields on the way to it."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message, way
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE and field.name not in _WITHOUT_TENSORS:
            for inner in value if isinstance(value, Sequence) else [value]:
                yield from external_tensors(inner, (*way, field.name))
