"""Maps that the graph does not have as such, made by a few nodes before the plugin node: int32 [T, K]."""

import onnx_ir as ir

from moetrt.segments.indices import is_permutation
from moetrt.segments.reading import is_op
from moetrt.segments.routes import Found, PerRoute, given, is_range, per_route_operand, raised, strip
from moetrt.segments.tail import Operand, Write, written

_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64


def _numbers(write: Write, *numbers: int) -> ir.Value:
    return write("Constant", [], {"value": ir.tensor(list(numbers), dtype=_INT64)}, _INT64, [len(numbers)])


def _counted(write: Write, count: ir.Value) -> ir.Value:
    """0, 1, 2, ... up to a [1] count, int64."""
    number = write("Squeeze", [count], {}, _INT64, [])
    zero, one = (write("Constant", [], {"value": ir.tensor(n, dtype=_INT64)}, _INT64, []) for n in (0, 1))
    return write("Range", [zero, number, one], {}, _INT64, [None])


def _tokens(write: Write, per_route: ir.Value) -> tuple[ir.Value, ir.Value]:
    """T as [1], and 0, 1, ... T-1 as [T, 1], of a [T, K]."""
    count = write("Shape", [per_route], {"start": 0, "end": 1}, _INT64, [1])
    return count, write("Unsqueeze", [_counted(write, count), _numbers(write, 1)], {}, _INT64, [None, 1])


def inverse_map(order: ir.Value, top_k: int) -> Operand:
    """The map of rows that lie in the order ``order`` of the routes, a permutation of their numbers."""

    def make(write: Write) -> ir.Value:
        count = write("Shape", [order], {}, _INT64, [1])
        rows = _counted(write, count)
        places = write("ScatterElements", [rows, order, rows], {"axis": 0}, _INT64, [None])
        return write("Reshape", [places, _numbers(write, -1, top_k)], {}, _INT64, [None, top_k])

    return Operand(order, _INT32, make=make)


def inverted(index: ir.Value) -> ir.Value | None:
    """The permutation whose inverse ``index`` is, as far as the graph shows it: by a second sort, or by scattering."""
    node = index.producer()
    if node is None:
        return None
    if is_op(node, "TopK") and is_permutation(index) and node.attributes.get_int("largest", 1) == 0:
        order = node.inputs[0]
    elif is_op(node, "ScatterElements", "ScatterND"):
        numbers = node.inputs[2]
        if node.attributes.get_string("reduction", "none") != "none" or numbers is None or not is_range(numbers):
            return None
        order = node.inputs[1]
    else:
        return None
    found = strip(PerRoute(given(order)), Found(top_k=-1)).value
    return found if is_permutation(found) else None


def dense_map(
    index: PerRoute, experts: int, top_k: int | str | None, *, tokens_last: bool, none_beyond: bool
) -> Operand:
    """The map of every expert's row for every token, [E, T, H] or, not ``tokens_last``, [T, E, H].

    Args:
        index: the chosen experts' numbers.
        experts: E.
        top_k: K.
        tokens_last: whether the rows lie as [E, T, H].
        none_beyond: whether a number that no expert has picks nothing.
    """
    chosen, _ = per_route_operand(index, top_k)

    def make(write: Write) -> ir.Value:
        experts_of = written(Operand(chosen.value, _INT64, chosen.reshape_to, chosen.make), write)
        count, token = _tokens(write, experts_of)
        per_step, steps, rest = (
            (count, experts_of, token) if tokens_last else (_numbers(write, experts), token, experts_of)
        )
        begin = write("Mul", [steps, per_step], {}, _INT64, [None, None])
        row = write("Add", [begin, rest], {}, _INT64, [None, top_k])
        if not none_beyond:
            return row
        is_expert = write("Less", [experts_of, _numbers(write, experts)], {}, ir.DataType.BOOL, [None, top_k])
        return write("Where", [is_expert, row, _numbers(write, -1)], {}, _INT64, [None, top_k])

    return Operand(index.value, _INT32, make=make)


def route_numbers(weights: PerRoute, top_k: int) -> Operand:
    """The map of rows that lie as [K, T, H]."""
    like, _ = per_route_operand(weights, top_k)

    def make(write: Write) -> ir.Value:
        count, token = _tokens(write, written(Operand(like.value, None, like.reshape_to, like.make), write))
        begin = write("Mul", [_numbers(write, *range(top_k)), count], {}, _INT64, [top_k])
        return write("Add", [begin, token], {}, _INT64, [None, top_k])

    return Operand(weights.value, _INT32, make=make)


def clamped_map(index: Operand) -> Operand:
    """``index`` with its entries below 0 made 0."""
    return raised(index, 0)
