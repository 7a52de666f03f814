"""Optimization profiles: the range of shapes of every input, as the command line gives it and as TensorRT takes it."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import SupportsIndex

import onnx_ir as ir

from moetrt.errors import InputError, InputTypeError

_MAX_SIZE = 2**31 - 1
"""The largest size of a profile that TensorRT takes."""

Shape = tuple[int, ...]
Profile = tuple[Shape, Shape, Shape]

_PROFILE = "(min, opt, max), each a shape or None,"

DEFAULT_RANGE = (1, 32, 256)
"""(min, opt, max) of a dynamic dimension for which no shape is given."""


def parse_shapes(texts: Iterable[str]) -> dict[str, Shape]:
    """Reads shapes as the command line takes them.

    Args:
        texts: each "NAME:DIMS", DIMS being sizes with "x" or "," between them, as in "hidden:4x2048". A name may hold
            colons: the last one counts.

    Raises:
        InputError: a text is not of this form, a size is no whole number of at least 0 or is far too large, or a name
            comes twice.
    """
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, colon, sizes = text.rpartition(":")
        if not colon or not name or not re.fullmatch(r"\d+([x,]\d+)*", sizes):
            raise InputError(f"shape was '{text}'; NAME:DIMS is taken, such as hidden:4x2048")
        if name in shapes:
            raise InputError(f"shape of {name} is given twice: {_dims(shapes[name])} and {sizes}")
        digits = re.split("[x,]", sizes)
        # Python itself refuses thousands of digits.
        if max(map(len, digits)) > len(str(_MAX_SIZE)):
            raise InputError(f"shape of {name} has the size {max(digits, key=len)[:40]}; at most {_MAX_SIZE} is taken")
        shapes[name] = tuple(map(int, digits))
    return shapes


def split_profiles(
    profiles: Mapping[str, Sequence[Sequence[int] | None]] | None,
) -> tuple[dict[str, Shape], dict[str, Shape], dict[str, Shape]]:
    """The smallest, the optimal and the largest shapes by input, as `make_profile` takes them.

    Args:
        profiles: input name -> (min, opt, max) shapes, each None where left out.

    Raises:
        InputTypeError: not a dict, or a shape is no sequence of whole numbers.
        InputError: an input does not have three shapes.
    """
    bounds: tuple[dict[str, Shape], dict[str, Shape], dict[str, Shape]] = ({}, {}, {})
    if not isinstance(profiles, Mapping | None):
        raise InputTypeError(f"the profiles were of type {type(profiles).__name__}; a dict of {_PROFILE} is taken")
    for name, shapes in (profiles or {}).items():
        if not isinstance(shapes, tuple | list):
            raise InputTypeError(f"the profile of '{name}' was of type {type(shapes).__name__}; {_PROFILE} is taken")
        if len(shapes) != len(bounds):
            raise InputError(f"the profile of '{name}' has {len(shapes)} entries; {_PROFILE} is taken")
        for which, kept, shape in zip(("min", "opt", "max"), bounds, shapes, strict=True):
            if shape is not None:
                kept[name] = _checked_shape(name, which, shape)
    return bounds


def _checked_shape(name: str, which: str, shape: Sequence[int]) -> Shape:
    if isinstance(shape, str | bytes) or not isinstance(shape, Iterable):
        raise InputTypeError(
            f"{which} shape of '{name}' was of type {type(shape).__name__}; a tuple of whole numbers is taken"
        )
    sizes = tuple(shape)
    for size in sizes:
        if not isinstance(size, SupportsIndex):
            raise InputTypeError(f"{which} shape of '{name}' has the size {size!r}; whole numbers are taken")
        if not 0 <= operator.index(size) <= _MAX_SIZE:
            raise InputError(f"{which} shape of '{name}' has the size {size}; 0 to {_MAX_SIZE} is taken")
    return tuple(map(operator.index, sizes))


def make_profile(
    model: ir.Model,
    minimum: Mapping[str, Sequence[int]] | None = None,
    optimum: Mapping[str, Sequence[int]] | None = None,
    maximum: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Profile]:
    """The range of shapes of every input of ``model``.

    A bound that is left out for an input takes the nearest one that is given: the smallest and the largest take the
    optimum, the optimum takes the largest, else the smallest. An input with none takes what the others say of its named
    dimensions, and `DEFAULT_RANGE` for the rest.

    Args:
        model: its graph inputs say the names, ranks and static dimensions.
        minimum, optimum, maximum: input name -> sizes.

    Returns:
        Input name -> (min, opt, max), in the order of the model's inputs.

    Raises:
        InputError: a name that is no input, another rank, another size than a static dimension's, min > opt or
            opt > max, or one named dimension with two ranges.
    """
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    given: dict[str, list[Sequence[int] | None]] = {}
    for position, shapes in enumerate((minimum, optimum, maximum)):
        for name, sizes in (shapes or {}).items():
            if name not in inputs:
                raise InputError(f"shape of '{name}': the model has no such input; its inputs are {', '.join(inputs)}")
            given.setdefault(name, [None, None, None])[position] = sizes

    profile: dict[str, Profile] = {}
    named: dict[str, tuple[tuple[int, int, int], str]] = {}
    for name, (low, best, high) in given.items():
        dimensions = _checked_dims(inputs[name], {"min": low, "opt": best, "max": high})
        nearest = next(sizes for sizes in (best, high, low) if sizes is not None)
        low, high = nearest if low is None else low, nearest if high is None else high
        profile[name] = bounds = (tuple(low), tuple(nearest), tuple(high))
        for axis, dimension in enumerate(dimensions):
            symbol = dimension.value if isinstance(dimension, ir.SymbolicDim) else None
            if symbol is not None:
                sizes_of_axis = (bounds[0][axis], bounds[1][axis], bounds[2][axis])
                known, where = named.setdefault(symbol, (sizes_of_axis, name))
                if known != sizes_of_axis:
                    raise InputError(
                        f"dimension {symbol} is {_range(known)} in {where} and {_range(sizes_of_axis)} in {name}; "
                        "one dimension has one range"
                    )
    for name, value in inputs.items():
        if name not in profile:
            ranges = [
                (dimension,) * 3
                if isinstance(dimension, int)
                else named.get(dimension.value or "", (DEFAULT_RANGE, ""))[0]
                for dimension in _dims_of(value)
            ]
            profile[name] = (
                tuple(low for low, _, _ in ranges),
                tuple(best for _, best, _ in ranges),
                tuple(high for _, _, high in ranges),
            )
    return {name: profile[name] for name in inputs}


def _dims_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
    if value.shape is None:
        raise InputError(f"input '{value.name}' of the model has no rank; TensorRT takes inputs of known rank")
    return list(value.shape)


def _checked_dims(value: ir.Value, bounds: Mapping[str, Sequence[int] | None]) -> list[int | ir.SymbolicDim]:
    dimensions = _dims_of(value)
    taken = "x".join(str(dim) if isinstance(dim, int) else (dim.value or "?") for dim in dimensions)
    given = [(which, shape) for which, shape in bounds.items() if shape is not None]
    for which, shape in given:
        if len(shape) != len(dimensions):
            raise InputError(
                f"{which} shape of '{value.name}' was {_dims(shape)}, rank {len(shape)}; "
                f"rank {len(dimensions)}, [{taken}], is taken"
            )
        for size, dimension in zip(shape, dimensions, strict=True):
            if isinstance(dimension, int) and dimension != size:
                raise InputError(
                    f"{which} shape of '{value.name}' was {_dims(shape)}; [{taken}] is taken: "
                    f"the model fixes {dimension} where {size} was given"
                )
    for (lower, below), (upper, above) in pairwise(given):
        if any(a > b for a, b in zip(below, above, strict=True)):
            raise InputError(
                f"{lower} shape of '{value.name}', {_dims(below)}, is above its {upper} shape, {_dims(above)}"
            )
    return dimensions


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _range(sizes: Sequence[int]) -> str:
    return "/".join(map(str, sizes))
