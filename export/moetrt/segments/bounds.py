"""The least number that an integer value of a graph may be: entries of a map that cannot be -1, or not below it."""

import math

import onnx_ir as ir

from moetrt.segments.constants import constant
from moetrt.segments.reading import SHAPE_OPS, elements, input_of, is_op

_MOST_ELEMENTS = 65536
_MOST_STEPS = 64

_SAME_ELEMENTS = (
    *SHAPE_OPS,
    *("Identity", "Expand", "Transpose", "Slice", "Split", "Tile", "Gather", "GatherElements", "GatherND"),
)
"""What gives elements of its first input and no others."""

_NOT_NEGATIVE = ("ArgMax", "ArgMin", "NonZero", "Shape", "Size")


def lowest(value: ir.Value) -> float:
    """What no element of the integers ``value`` is below, as far as the graph shows it; -inf where it does not."""
    return _lowest(value, {}, _MOST_STEPS)


def _lowest(value: ir.Value | None, known: dict[ir.Value, float], steps: int) -> float:
    if value is None or steps == 0:
        return -math.inf
    if value not in known:
        numbers = _numbers(value)
        known[value] = _made(value, known, steps - 1) if numbers is None else min(numbers, default=math.inf)
    return known[value]


def _numbers(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant of integers."""
    tensor = constant(value)
    if tensor is None or tensor.size > _MOST_ELEMENTS or not tensor.dtype.is_integer():
        return None
    return [int(element) for element in elements(tensor).ravel()]


def _greatest(value: ir.Value | None) -> float:
    numbers = _numbers(value)
    return math.inf if numbers is None else max(numbers, default=-math.inf)


_BITS = {ir.DataType.INT8: 8, ir.DataType.INT16: 16, ir.DataType.INT32: 32, ir.DataType.INT64: 64}


def _cast(node: ir.Node, before: float) -> float:
    """A Cast to fewer bits may wrap; maps and sizes in 64 bits fit in 32."""
    source, made = node.inputs[0], node.outputs[0].dtype
    if source is None or source.dtype is None or made is None:
        return -math.inf
    if source.dtype == ir.DataType.BOOL or made in (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32):
        return 0
    if source.dtype in (ir.DataType.UINT8, ir.DataType.UINT16) and _BITS.get(made, 0) >= 32:
        return 0
    fits = min(_BITS.get(source.dtype, 65), 32) <= _BITS.get(made, 0)
    return before if fits else -math.inf


def _made(value: ir.Value, known: dict[ir.Value, float], steps: int) -> float:
    node = value.producer()
    if node is None:
        return -math.inf

    def of(index: int) -> float:
        return _lowest(input_of(node, index), known, steps)

    every = range(len(node.inputs))
    if is_op(node, *_SAME_ELEMENTS):
        return of(0)
    if is_op(node, *_NOT_NEGATIVE):
        return 0
    if is_op(node, "TopK"):
        return 0 if value is node.outputs[1] else of(0)
    if is_op(node, "Range"):
        return of(0) if of(2) >= 0 else -math.inf
    if is_op(node, "Concat", "Min"):
        return min(map(of, every))
    if is_op(node, "Max"):
        return max(map(of, every))
    if is_op(node, "Where"):
        return min(of(1), of(2))
    if is_op(node, "ScatterElements", "ScatterND"):
        return min(of(0), of(2)) if node.attributes.get_string("reduction", "none") == "none" else -math.inf
    if is_op(node, "Clip"):
        raised = max(of(0), of(1))
        return raised if input_of(node, 2) is None else min(raised, of(2))
    if is_op(node, "Cast"):
        return _cast(node, of(0))
    if is_op(node, "Add"):
        return of(0) + of(1)
    if is_op(node, "Sub"):
        return of(0) - _greatest(input_of(node, 1))
    if is_op(node, "Mul", "CumSum", "ReduceSum"):
        factors = (of(0), of(1)) if is_op(node, "Mul") else (of(0),)
        return 0 if min(factors) >= 0 else -math.inf
    if is_op(node, "Div", "Mod"):
        floors = is_op(node, "Mod") and node.attributes.get_int("fmod", 0) == 0
        return 0 if of(1) > 0 and (of(0) >= 0 or floors) else -math.inf
    return -math.inf
