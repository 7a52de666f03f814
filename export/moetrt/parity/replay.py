"""The inputs that a comparison ran on: drawn from a seed, kept in files, and read back by other tools.

Polygraphy's own file (a list of feeds as JSON) is read by ``polygraphy run --load-inputs`` and by `load_inputs`; one
raw file an input is what trtexec's ``--loadInputs`` reads.
"""

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from moetrt.bench.trtexec import inputs_text
from moetrt.errors import InputError
from moetrt.files import as_path, existing_file, output_directory, output_file, write_atomically
from moetrt.onnx_op import named_inputs, operator_of
from moetrt.source import Source

_MAP = "expanded_idx_to_permuted_idx"
_ABSENT = 0.125
"""The share of routes that a drawn map leaves to other ranks."""


def draw_inputs(
    model: ir.Model, source: Source, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Inputs for a comparison: the source's own, in range.

    Where the source draws them like its examples (it has no random_inputs), the contract's own inputs are drawn as the
    contract has them: a graph input that is a tail's map names rows there are, some of them twice, and has -1 for
    routes of other ranks; rows of a graph input that no map names, the padding, hold NaN where only tails read them.

    Args:
        model: the mapped graph.
        source: makes the inputs.
        seed, sizes: as of `Source.make_inputs`.

    Raises:
        InputError, InputTypeError: as of `Source.make_inputs`.
    """
    feed = dict(source.make_inputs(seed, **(sizes or {})))
    if source.random_inputs is not None:
        return feed
    generator = torch.Generator().manual_seed(seed)
    given = {value.name or "": value for value in model.graph.inputs}
    tails = [named_inputs(node) for node in model.graph if operator_of(node) is not None]
    drawn: dict[str, set[str]] = {}
    for inputs in tails:
        index, rows = inputs.get(_MAP), inputs["gemm2_permuted"]
        if index is None or index.name not in given or index.name not in feed:
            continue
        name, from_outside = index.name, rows.name in given and rows.name in feed
        if name not in drawn:
            shape = feed[name].shape
            count = len(feed[rows.name or ""]) if from_outside else int(np.prod(shape))
            feed[name] = _map(shape, count, generator).to(feed[name].dtype)
            drawn[name] = set()
        if from_outside and all(operator_of(use.node) is not None for use in given[rows.name or ""].uses()):
            drawn[name].add(rows.name or "")
    padded = [name for names in drawn.values() for name in names]
    for index_name, names in drawn.items():
        for name in names:
            # Rows that two maps read are left as they are: padding of one may be a route of the other.
            if padded.count(name) == 1 and feed[name].is_floating_point():
                feed[name] = _padded(feed[name], feed[index_name])
    return feed


def _map(shape: torch.Size, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Entries in [-1, rows): mostly a permutation's, with repeats and -1."""
    if rows == 0:
        return torch.full(shape, -1, dtype=torch.int32)
    count = int(np.prod(shape))
    order = torch.randperm(max(rows, count), generator=generator)[:count] % rows
    anywhere = torch.randint(0, rows, (count,), generator=generator)
    entries = torch.where(torch.rand(count, generator=generator) < _ABSENT, anywhere, order)
    entries[torch.rand(count, generator=generator) < _ABSENT] = -1
    return entries.view(shape).int()


def _padded(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    named = torch.zeros(len(rows), dtype=torch.bool)
    named[index[index >= 0].long()] = True
    return rows.masked_fill(~named.view(-1, *[1] * (rows.dim() - 1)), float("nan"))


def save_inputs(feed: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> Path:
    """Writes inputs in Polygraphy's format.

    bfloat16 is written as a torch tensor, which Polygraphy reads as such; its ONNX Runtime runner takes none, its
    TensorRT runner does. Everything else is written as numpy arrays.

    Raises:
        InputError: the file cannot be written.
    """
    from polygraphy.json import save_json

    target = output_file(path, "inputs file")
    arrays = {name: tensor if tensor.dtype == torch.bfloat16 else tensor.numpy() for name, tensor in feed.items()}
    with write_atomically(target) as temporary:
        save_json([arrays], str(temporary))
    return target


def load_inputs(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Reads inputs in Polygraphy's format; of several feeds, the first.

    Raises:
        InputError: as of `load_feeds`.
    """
    return load_feeds(path)[0]


def load_feeds(path: str | os.PathLike[str]) -> list[dict[str, torch.Tensor]]:
    """Reads every feed of a file in Polygraphy's format; there is at least one.

    Raises:
        InputError: the file is missing, or holds no inputs in that format.
    """
    from polygraphy.json import load_json

    file = existing_file(path, "inputs file")
    try:
        feeds = load_json(str(file))
    except Exception as error:  # Polygraphy's decoders raise what numpy, torch and json do
        raise InputError(f"inputs file '{file}' is not in Polygraphy's format: {_line(error)}") from error
    if not isinstance(feeds, list) or not feeds or not all(isinstance(feed, Mapping) for feed in feeds):
        raise InputError(
            f"inputs file '{file}' holds no list of inputs by name, as Polygraphy's --save-inputs writes it"
        )
    for name, value in (item for feed in feeds for item in feed.items()):
        if not isinstance(value, np.ndarray | torch.Tensor):
            raise InputError(
                f"inputs file '{file}': input '{name}' is of type {type(value).__name__}; arrays are taken"
            )
    return [{name: torch.as_tensor(value) for name, value in feed.items()} for feed in feeds]


def raw_paths(names: Iterable[str], directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Where `save_raw` writes inputs of these names; names that are no file names are spelled with "_".

    Raises:
        InputError: the folder is something else, two inputs would have the same file, or trtexec does not take a name
            or path.
    """
    folder = as_path(directory, "output folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output folder '{folder}' cannot be written: '{folder}' is not a folder")
    paths: dict[str, Path] = {}
    for name in names:
        place = folder / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in name)}.bin"
        if place in paths.values():
            raise InputError(f"inputs '{name}' and another would both be written to '{place}'")
        paths[name] = place
    inputs_text(paths)
    return paths


def save_raw(feed: Mapping[str, torch.Tensor], directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes one file an input, its numbers one after the other as they lie in memory, and no header.

    Returns:
        The files by input, as of `raw_paths`.

    Raises:
        InputError: the folder cannot be written, or as of `raw_paths`.
    """
    paths = raw_paths(feed, directory)
    output_directory(directory)
    for name, place in paths.items():
        with write_atomically(place) as temporary:
            temporary.write_bytes(feed[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return paths


def trtexec_argument(paths: Mapping[str, Path]) -> str:
    """The option with which trtexec reads what `save_raw` wrote, as a shell takes it."""
    return shlex.quote(f"--loadInputs={inputs_text(paths)}")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
