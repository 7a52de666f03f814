"""Whether two dimensions are one number on every run: a dimension of 1 against another one is broadcast."""

import re
from collections.abc import Sequence

import onnx_ir as ir

from moetrt.segments.indices import ALL_NONE, ALL_ONE, TRIALS, Sizes
from moetrt.segments.reading import SHAPE_OPS, dim, dims, is_op, may_be_equal, rank

Size = int | str | None


def surely_equal(one: Size, other: Size) -> bool:
    """Whether both have one name, or are formulas ("B*S", "S*B") of the same names that give the same."""
    if one is None or other is None or isinstance(one, int) or isinstance(other, int):
        return one is not None and one == other
    if one == other:
        return True
    for trial in (*TRIALS, ALL_ONE, ALL_NONE):
        sizes = Sizes(trial)
        numbers = (sizes.of(one), sizes.of(other))
        # What divides by a size has no number where that is 0.
        if numbers[0] != numbers[1] or (None in numbers and trial != ALL_NONE):
            return False
    return True


def is_named(size: Size) -> bool:
    """Whether a dimension has a name; those that onnx's inference makes up for what it does not know are none."""
    return isinstance(size, str) and "unk__" not in size


def is_said(size: Size) -> bool:
    """Whether a dimension is a number or has a name."""
    return isinstance(size, int) or is_named(size)


def may_be_repeated(one: Size, other: Size) -> bool:
    """Whether the graph itself says that two dimensions need not be one number: K is none that a symbol stands for.

    Of those that it says nothing of, those that something is made of are taken for equal.
    """
    if is_said(one) and is_said(other):
        return not surely_equal(one, other)
    return not may_be_equal(one, other)


_SEVERAL = re.compile(r"([2-9]|[1-9]\d+)\*")
"""How ONNX Runtime's inference begins the name of several times a number, which is no 1."""


def column_sizes(value: ir.Value, other: Sequence[Size]) -> list[Size]:
    """The dimensions of ``value``; the length of a column that a Reshape made is the number of what was reshaped.

    Where that number ("3*T") has no symbol of ``other``, which says the same otherwise ("N"), it is taken for unknown.
    """
    sizes = list(dims(value) or [])
    long = [axis for axis, size in enumerate(sizes) if size != 1]
    if len(long) != 1:
        return sizes
    is_product = _SEVERAL.match(str(sizes[long[0]])) is not None
    source: ir.Value | None = value
    while source is not None and not is_said(sizes[long[0]]):
        node = source.producer()
        source = _of_same_length(node) if node is not None else None
        before = [size for size in (dims(source) or [None]) if size != 1] if source is not None else []
        if before and all(map(is_said, before)):
            is_product = len(before) > 1
            sizes[long[0]] = "*".join(f"({size})" for size in before) if is_product else before[0]
            break
    if is_product and not _symbols(sizes[long[0]]) & _symbols(other[long[0]]):
        sizes[long[0]] = None
    return sizes


_BY_ELEMENT = (
    *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Not", "Sigmoid", "Where", "Max", "Min", "Clip"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
)


def _of_same_length(node: ir.Node) -> ir.Value | None:
    """What has as many numbers as the column that ``node`` gives; None where that is not known."""
    if is_op(node, "Cast", *SHAPE_OPS):
        return node.inputs[0]
    if is_op(node, "Gather"):
        return node.inputs[1] if len(_sizes(node.inputs[0])) == 1 else None
    if is_op(node, "TopK"):
        # A sort takes as many as there are: the K of torch's is the Shape of what is sorted.
        counted = node.inputs[1].producer() if node.inputs[1] is not None else None
        while counted is not None and is_op(counted, "Cast", *SHAPE_OPS) and counted.inputs[0] is not None:
            counted = counted.inputs[0].producer()
        return counted.inputs[0] if counted is not None and is_op(counted, "Shape") else None
    columns = [value for value in node.inputs if any(size != 1 for size in _sizes(value))]
    return columns[0] if len(columns) == 1 and is_op(node, *_BY_ELEMENT) else None


def _sizes(value: ir.Value | None) -> Sequence[Size]:
    known = dims(value) if value is not None else []
    return [None] if known is None else known


def _symbols(size: Size) -> frozenset[str]:
    try:
        return frozenset(ir.SymbolicDim(size).free_symbols()) if isinstance(size, str) else frozenset()
    except ValueError:  # a name that is no expression
        return frozenset({size}) if isinstance(size, str) else frozenset()


_OTHER_LENGTH = ("Slice", "Concat", "Pad", "Tile", "Compress", "Split")
_MOST_STEPS = 16


def has_other_length(value: ir.Value, tokens: Size, axis: int = 0, *, names_agree: bool = False) -> bool:
    """Whether the unknown dimension ``axis`` of ``value`` is made of ``tokens`` and another one, or is a part of it.

    Args:
        value: what is asked about.
        tokens: the number of tokens.
        axis: the place of the dimension.
        names_agree: whether names other than that of ``tokens`` are of the same number.
    """
    if tokens is not None and dim(value, axis) == tokens:
        return False  # one name, also one that inference made up
    for _ in range(_MOST_STEPS):
        node = value.producer()
        if node is None or is_said(dim(value, axis)):
            return False
        if is_op(node, "Unsqueeze") and axis == 0 and node.inputs[0] is not None and (rank(node.inputs[0]) or 0) > 1:
            value = node.inputs[0]  # behind the first dimension, or that would be 1
            continue
        known = [source for source in node.inputs if source is not None and rank(source) == rank(value)]
        sizes = [column_sizes(source, [tokens] * (rank(source) or 0))[axis] for source in known]
        said = [size for size in sizes if is_said(size) and size != 1]
        alike = [surely_equal(size, tokens) or (names_agree and is_named(size)) for size in said]
        if any(alike) and is_op(node, *_OTHER_LENGTH):
            return True
        if is_op(node, *SHAPE_OPS) or not known:
            return False
        if not all(alike):
            return True
        value = next((source for source in known if not is_said(dim(source, axis))), known[0])
    return False


def first_unequal(one: Sequence[Size], other: Sequence[Size]) -> tuple[Size, Size] | None:
    """The first two dimensions that need not be equal, of as many each."""
    return next(((a, b) for a, b in zip(one, other, strict=True) if not surely_equal(a, b)), None)
