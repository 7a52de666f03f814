"""Nested arguments and results, taken apart into tensors and put together again."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Leaves = list[tuple[tuple[str, ...], torch.Tensor]]
"""Tensors with the words that lead to each: field names, keys, positions."""


def flatten(value: Any) -> tuple[Leaves, Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors in nested containers with their paths, and what puts others in their places.

    Dataclasses count as containers whether torch knows them or not: another library's MoE output is one of them.
    """
    leaves: Leaves = []

    def walk(part: Any, path: tuple[str, ...]) -> Callable[[Iterator[torch.Tensor]], Any]:
        if isinstance(part, torch.Tensor):
            leaves.append((path, part))
            return next
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = [entry.name for entry in dataclasses.fields(part) if entry.init]
            builders = {name: walk(getattr(part, name), (*path, name)) for name in fields}
            return lambda tensors: type(part)(**{name: build(tensors) for name, build in builders.items()})
        if isinstance(part, Mapping):
            by_key = {key: walk(entry, (*path, str(key))) for key, entry in part.items()}
            return lambda tensors: {key: build(tensors) for key, build in by_key.items()}
        if isinstance(part, tuple | list):
            in_order = [walk(entry, (*path, str(place))) for place, entry in enumerate(part)]
            made = type(part)._make if hasattr(part, "_make") else type(part)
            return lambda tensors: made([build(tensors) for build in in_order])
        return lambda tensors: part

    build = walk(value, ())
    return leaves, lambda tensors: build(iter(tensors))


def names_of(paths: Sequence[tuple[str, ...]], single: str = "input") -> tuple[str, ...]:
    """A name for each path: its last word where no other ends in it, else all its words."""
    if len(paths) == 1 and not any(part.isidentifier() for part in paths[0]):
        return (single,)
    last = [path[-1] for path in paths]
    names = [path[-1] if last.count(path[-1]) == 1 and path[-1].isidentifier() else "_".join(path) for path in paths]
    return tuple(name if name.isidentifier() else f"{single}_{name}" for name in names)
