"""The tensors of a checkpoint folder, by the headers of its safetensors files: names, dtypes and shapes, no numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetrt.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

_TAKEN = f"{WEIGHTS} is taken, or {INDEX} with the files that it names"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its numbers are read when it is indexed.

    Attributes:
        file: the name of its file in the folder.
        dtype: as safetensors names it, such as "BF16", "F8_E4M3" or "U8".
        shape: its sizes.
        slice: of safetensors.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    slice: Any

    @property
    def is_wide(self) -> bool:
        """Whether it holds floating-point numbers of 16 bits or more, which need no scale."""
        return self.dtype in ("BF16", "F16", "F32", "F64")

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers, a tensor of ``shape`` for ``[...]``."""
        tensor: torch.Tensor = self.slice[index]
        return tensor


def read_checkpoint(folder: Path, where: str) -> dict[str, Stored]:
    """Reads the headers of a folder's weights.

    Args:
        folder: with ``model.safetensors``, or an index and the files that it names.
        where: what to call it in messages.

    Returns:
        Every tensor of these files by its name.

    Raises:
        InputError: there are none, a file is no safetensors file or cut short, the index names a file that is not there
            or that lacks a tensor, or two files have a tensor of one name.
    """
    places = None if (folder / WEIGHTS).is_file() else _read_index(folder, where)
    files = [WEIGHTS] if places is None else sorted(set(places.values()))
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _read_header(folder / file, where).items():
            if name in found:
                raise InputError(f"{where}: both {found[name].file} and {file} have {name}; one of them is taken")
            found[name] = stored
    for name, file in (places or {}).items():
        if name not in found or found[name].file != file:
            raise InputError(f"{where}: {INDEX} places {name} in {file}, which lacks it; a whole checkpoint is taken")
    return found


def _read_index(folder: Path, where: str) -> dict[str, str]:
    """The file of each tensor."""
    path = folder / INDEX
    if not path.is_file():
        others = sorted(
            other.name
            for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
            for other in folder.glob(pattern)
        )
        if not others:
            raise InputError(f"{where} has no weights; {_TAKEN}")
        raise InputError(f"{where} has its weights as {others[0]} alone; {_TAKEN}")
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(text, str) for pair in places.items() for text in pair):
            raise TypeError("a name is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: {INDEX} has no weight_map of files by tensor ({type(error).__name__})") from error
    for name, file in places.items():
        if not (folder / file).is_file():
            raise InputError(f"{where}: {INDEX} places {name} in {file}, which does not exist")
    return dict(places)


def _read_header(path: Path, where: str) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, framework="pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise InputError(f"{where}: {path.name} is not a safetensors file, or was cut short: {error}") from error
    return {name: Stored(path.name, part.get_dtype(), tuple(part.get_shape()), part) for name, part in slices.items()}
