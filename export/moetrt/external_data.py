"""Tensors whose data lies outside of the model's file: in files of the model's own folder, at places that are known."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from moetrt.errors import InputError
from moetrt.files import existing_file, way_out


def check_external_data(proto: onnx.ModelProto, source: Path) -> None:
    """Checks where a model says that its tensors lie; none of them is read.

    Args:
        proto: the model, read without its external data.
        source: its file. The data is looked for beside it: where that is a link, beside the link.

    Raises:
        InputError: a data file is missing, or lies outside the folder of ``source``, also where only a link leads
            there; an offset or a length is no number; or a tensor is one of those whose data must lie in the model.
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
        for location in {field.value for field in tensor.external_data if field.key == "location"} or {""}:
            if location not in seen:
                _check_file(source, tensor.name, location)
                seen.add(location)


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


_WITHOUT_TENSORS = ("value_info", "metadata_props")
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
