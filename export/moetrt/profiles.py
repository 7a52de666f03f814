"""Optimization profiles: the range of shapes of every input, as the command line gives it and as TensorRT takes it."""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import SupportsIndex

import onnx_ir as ir

from moetrt.bounds import Bound, bounds_of
from moetrt.errors import InputError, InputTypeError
from moetrt.onnx_op import named_inputs, operator_of
from moetrt.registry import our_nodes
from moetrt.segments.reading import SHAPE_OPS, is_op

_MAX_SIZE = 2**31 - 1
"""The largest size of a profile that TensorRT takes."""

Shape = tuple[int, ...]
Profile = tuple[Shape, Shape, Shape]

_PROFILE = "(min, opt, max), each a shape or None,"

ENDS = ("min", "opt", "max")
"""The names of a range's three sizes."""

DEFAULT_RANGE = (1, 32, 256)
"""(min, opt, max) of a dynamic dimension for which no shape is given."""

_Dimension = str | tuple[str, int]
"""A dynamic dimension: its symbol, or the input and the axis of one that has none."""


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
        for which, kept, shape in zip(ENDS, bounds, shapes, strict=True):
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

    Each dynamic dimension has three ends, and a named one has the same in every input. An end that no shape gives takes
    its default, of `DEFAULT_RANGE`: the smallest and the largest make way for those that are given, and the optimum is
    moved between them; all lie within the bounds that the model carries. The rows of a tail, where they are an input
    and so is its map, or what it is made from, are as many as the routes: K times the tokens.

    Args:
        model: its graph inputs say the names, ranks and static dimensions.
        minimum, optimum, maximum: input name -> sizes.

    Returns:
        Input name -> (min, opt, max), in the order of the model's inputs.

    Raises:
        InputError: a name that is no input, another rank, another size than a static dimension's, min > opt or
            opt > max, a max of 0, one named dimension with two sizes at one end, a size beyond a bound, or a tail's H
            that is dynamic and not given.
    """
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    given: dict[str, dict[str, Sequence[int]]] = {}
    for end, shapes in zip(ENDS, (minimum, optimum, maximum), strict=True):
        for name, sizes in (shapes or {}).items():
            if name not in inputs:
                raise InputError(f"shape of '{name}': the model has no such input; its inputs are {', '.join(inputs)}")
            given.setdefault(name, {})[end] = sizes

    # By dimension and end: the size, and the input that gives it.
    told: dict[_Dimension, dict[str, tuple[int, str]]] = {}
    for name, bounds in given.items():
        for axis, dimension in enumerate(_checked_dims(inputs[name], bounds)):
            for end, sizes in bounds.items():
                if end == "max" and not sizes[axis] and not isinstance(dimension, int):
                    raise InputError(
                        f"max shape of '{name}' is {_dims(sizes)}, of no element; expected sizes of 1 or more, for an "
                        "engine has to run something"
                    )
                ends = told.setdefault(_key(name, axis, dimension), {})
                known, where = ends.setdefault(end, (sizes[axis], name))
                if known != sizes[axis]:
                    raise InputError(
                        f"{end} of dimension {dimension} was {known} in {where} and {sizes[axis]} in {name}; one "
                        "dimension has one range"
                    )
    limits: dict[_Dimension, Bound] = dict(bounds_of(model).items())
    ranges = {key: _range(key, told.get(key, {}), limits.get(key)) for key in {**told, **limits}}
    _check_widths(model, inputs, ranges)
    for rows, routes in rows_of_routes(model, inputs).items():
        if rows not in ranges:
            # At the least there is one route for each token: the others may be on other ranks.
            spans = [(1, size, size) if isinstance(size, int) else ranges.get(size, DEFAULT_RANGE) for size in routes]
            low, best, high = (min(math.prod(sizes), _MAX_SIZE) for sizes in zip(*spans, strict=True))
            ranges[rows] = (low, best, high)

    profile = {}
    for name, value in inputs.items():
        sizes_of = [
            (dimension,) * 3 if isinstance(dimension, int) else ranges.get(_key(name, axis, dimension), DEFAULT_RANGE)
            for axis, dimension in enumerate(_dims_of(value))
        ]
        low_shape, best_shape, high_shape = (tuple(sizes[end] for sizes in sizes_of) for end in range(len(ENDS)))
        profile[name] = (low_shape, best_shape, high_shape)
    return profile


def profile_text(bounds: Profile) -> str:
    """The three shapes for people, the smallest first."""
    return " / ".join(map(_dims, bounds))


def _key(name: str, axis: int, dimension: int | ir.SymbolicDim) -> _Dimension:
    symbol = dimension.value if isinstance(dimension, ir.SymbolicDim) else None
    return symbol or (name, axis)


def _range(key: _Dimension, told: Mapping[str, tuple[int, str]], limit: Bound | None) -> tuple[int, int, int]:
    """(min, opt, max) of a dimension from the ends that are given, each with the input that gives it."""
    for (lower, (below, one)), (upper, (above, other)) in pairwise((end, told[end]) for end in ENDS if end in told):
        if below > above:
            # Within one input the shapes were held against each other before.
            raise InputError(f"dimension {key} has the {lower} {below} in {one}, above its {upper}, {above} in {other}")
    sizes = {end: size for end, (size, _) in told.items()}
    for end, (size, name) in told.items():
        if limit is not None and size not in limit:
            raise InputError(f"{end} of dimension {key} was {size} in {name}; {limit.sizes} is taken: {limit.reason}")
    low, best, high = DEFAULT_RANGE
    if limit is not None:
        low = max(low, limit.minimum)
        high = max(low, high) if limit.maximum is None else min(max(low, high), limit.maximum)
    low = sizes.get("min", min([low, *sizes.values()]))
    high = sizes.get("max", max([high, *sizes.values()]))
    return low, sizes.get("opt", max(low, min(best, high))), high


def rows_of_routes(model: ir.Model, inputs: Mapping[str, ir.Value]) -> dict[_Dimension, list[int | _Dimension]]:
    """The dimension R of tails whose rows are an input of the model, and the sizes whose product is their routes.

    These are T and K, B, S and K, or T*K itself: those of the input that the map is made from, whether as it is or
    clamped, masked and cast first; else of the input that the weights are made from.
    """
    found: dict[_Dimension, list[int | _Dimension]] = {}
    for node in our_nodes(model):
        if operator_of(node) is None:
            continue
        given = named_inputs(node)
        rows = _input_behind(given.get("gemm2_permuted"), inputs, ("Cast", "Identity"))
        routes = _input_behind(given.get("expanded_idx_to_permuted_idx"), inputs, _KEEPS_COUNT)
        routes = routes or _input_behind(given.get("expert_weights"), inputs, _KEEPS_COUNT)
        if rows is None or routes is None:
            continue
        count, sizes = _dims_of(rows)[0], _dims_of(routes)
        name = routes.name or ""
        named_sizes = [size if isinstance(size, int) else _key(name, axis, size) for axis, size in enumerate(sizes)]
        key = count if isinstance(count, int) else _key(rows.name or "", 0, count)
        if (
            not isinstance(key, int)
            and key not in named_sizes
            and not all(isinstance(size, int) for size in named_sizes)
        ):
            found[key] = named_sizes
    return found


def _check_widths(model: ir.Model, inputs: Mapping[str, ir.Value], ranges: Mapping[_Dimension, object]) -> None:
    """A tail's H has one size: its default range would be of hidden states that no weight of the model fits."""
    for node in our_nodes(model):
        if operator_of(node) is None:
            continue
        rows = _input_behind(named_inputs(node).get("gemm2_permuted"), inputs, ("Cast", "Identity"))
        width = _dims_of(rows)[-1] if rows is not None else 0
        if rows is None or isinstance(width, int):
            continue
        name = rows.name or ""
        if _key(name, len(_dims_of(rows)) - 1, width) not in ranges:
            raise InputError(
                f"the last dimension of input '{name}', '{width.value or '?'}', is the H of tail '{node.name}', and no "
                "shape gives it; give it one size by --min, --opt and --max, or export it as a number"
            )


_KEEPS_COUNT = (
    *("Cast", "Identity", "Where", "Max", "Min", "Clip", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "Mod"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Softmax", "Sigmoid"),
    *("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose"),
)
"""What gives one number for each of one of its inputs, as routes are masked, clamped and brought to [T, K]."""

_MOST_STEPS = 64


def _input_behind(value: ir.Value | None, inputs: Mapping[str, ir.Value], operators: Sequence[str]) -> ir.Value | None:
    """The input with the most dimensions that ``value`` is made from by ``operators`` alone; None where none is."""
    pending, seen, found = [value], set[ir.Value](), list[ir.Value]()
    while pending and len(seen) < _MOST_STEPS:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if current.name in inputs and node is None:
            # A single number is a bound, or a scale.
            found += [current] if current.shape is None or len(current.shape) > 0 else []
        elif node is not None and is_op(node, *operators):
            # The second input of a Reshape is a shape.
            pending += node.inputs[: 1 if is_op(node, *SHAPE_OPS) else None]
    return max(found, key=lambda value: len(value.shape or ()), default=None)


def _dims_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
    if value.shape is None:
        raise InputError(f"input '{value.name}' of the model has no rank; TensorRT takes inputs of known rank")
    return list(value.shape)


def _checked_dims(value: ir.Value, bounds: Mapping[str, Sequence[int]]) -> list[int | ir.SymbolicDim]:
    dimensions = _dims_of(value)
    taken = "x".join(str(dim) if isinstance(dim, int) else (dim.value or "?") for dim in dimensions)
    for which, shape in bounds.items():
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
    for (lower, below), (upper, above) in pairwise(bounds.items()):
        if any(a > b for a, b in zip(below, above, strict=True)):
            raise InputError(
                f"{lower} shape of '{value.name}', {_dims(below)}, is above its {upper} shape, {_dims(above)}"
            )
    return dimensions


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
