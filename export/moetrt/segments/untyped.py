"""What looks like a tail, or like its router, but for a value whose dtype or rank nobody says."""

from collections import deque
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from moetrt.segments.constants import axes, ints, is_constant
from moetrt.segments.reading import SHAPE_OPS, dim, input_of, is_op, named, rank, readers
from moetrt.segments.routers import is_routed

FORM = "untyped"

_MOST_ROUTES = 64
_MOST_STEPS = 64

_KEEPS = ("Cast", "Identity", "Where", "Mul", "Div", *SHAPE_OPS)
"""What may lie between the sum over k and the residual's Add, or between the map's Gather and the weights' Mul."""


def untyped_sum(node: ir.Node) -> str | None:
    """Why ``node``, which may sum each token's K rows, cannot be told to do so; None where it is none, or is known.

    A sum over the second dimension of what weights of [T, K, 1] multiply, or a product with weights of [T, 1, K].
    """
    operands = _summed(node)
    unknown = next((value for value in operands if _lacks(value)), None)
    if unknown is None:
        return None
    return unknown_of(unknown)


def unknown_of(value: ir.Value) -> str:
    """That ``value``, or what it is first made from, has no known dtype or rank, in words, and what to do."""
    what = _lacks(value)
    seen: set[ir.Value] = set()
    while value not in seen:
        seen.add(value)
        node = value.producer()
        before = None if node is None else next((v for v in node.inputs if v is not None and _lacks(v)), None)
        if before is not None:
            value, what = before, _lacks(before)
    node = value.producer()
    made = "" if node is None else f" (from {named(node)})"
    return (
        f"'{value.name}'{made} has no known {what}: give it a value_info, or run a shape inference on the file that "
        "knows its operator"
    )


def untyped_routers(nodes: Iterable[ir.Node], heard: Iterable[ir.Value]) -> Iterator[tuple[ir.Node, str]]:
    """The TopK nodes that pick experts' weights, by scores of unknown dtype or rank, for no tail that was found.

    Args:
        nodes: of the graph.
        heard: what the tails that were found, mapped or not, read.
    """
    found = [node for node in nodes if is_op(node, "TopK") and node.inputs[0] is not None and _lacks(node.inputs[0])]
    reached = set(_before(heard)) if found else set()
    for node in found:
        if node not in reached and _picks_matrices(node.outputs[1]):
            scores = node.inputs[0]
            assert scores is not None
            yield node, f"{named(node)} chooses among experts, but {unknown_of(scores)}"


def _lacks(value: ir.Value) -> str | None:
    if value.dtype is None and not is_constant(value):
        return "dtype"
    return "rank" if rank(value) is None else None


def _summed(node: ir.Node) -> list[ir.Value]:
    """The operands of what ``node`` may sum over a token's routes; none where it does not look so."""
    if is_op(node, "ReduceSum") and axes(node, []) in ([1], [-2]) and node.inputs[0] is not None:
        product = node.inputs[0].producer()
        while is_op(product, "Cast", "Identity") and product is not None and product.inputs[0] is not None:
            product = product.inputs[0].producer()
        operands = _given(product) if product is not None and is_op(product, "Mul") else []
        if any(map(_is_per_route, operands)) and (any(map(_is_picked, operands)) or _meets_add(node)):
            return operands
    if is_op(node, "MatMul", "Einsum"):
        operands = _given(node)
        if any(map(_is_weights_row if is_op(node, "MatMul") else _is_weights, operands)):
            return operands
    return []


def _given(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _is_per_route(value: ir.Value) -> bool:
    """Whether ``value`` may be weights of [T, K, 1]."""
    if rank(value) is not None:
        return rank(value) == 3 and dim(value, -1) == 1 and _may_be_routes(value, -2)
    node = value.producer()
    while is_op(node, "Cast", "Identity") and node is not None and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or not is_op(node, "Unsqueeze", "Reshape"):
        return False
    if is_op(node, "Unsqueeze"):
        return axes(node, []) in ([-1], [2])
    sizes = ints(input_of(node, 1))
    return sizes is not None and len(sizes) == 3 and sizes[-1] == 1


def _may_be_routes(value: ir.Value, index: int) -> bool:
    routes = dim(value, index)
    return isinstance(routes, int) and 1 < routes <= _MOST_ROUTES


def _is_weights_row(value: ir.Value) -> bool:
    return rank(value) == 3 and dim(value, -2) == 1 and _may_be_routes(value, -1) and is_routed(value)


def _is_weights(value: ir.Value) -> bool:
    return rank(value) == 2 and _may_be_routes(value, -1) and is_routed(value)


def _is_picked(value: ir.Value) -> bool:
    """Whether ``value`` was picked, row by row, from what is made on each run."""
    for _ in range(_MOST_STEPS):
        node = value.producer()
        if node is None:
            return False
        if is_op(node, "Gather"):
            return node.attributes.get_int("axis", 0) == 0 and not is_constant(node.inputs[0])
        following = node.inputs[1 if is_op(node, "Where") else 0] if is_op(node, *_KEEPS) else None
        if following is None:
            return False
        value = following
    return False


def _meets_add(node: ir.Node) -> bool:
    """Whether something is added to the sum: of what is pooled, the mean is taken."""
    for _ in range(_MOST_STEPS):
        after = readers(node.outputs[0])
        if any(is_op(reader, "Add") for reader in after):
            return True
        following = next((reader for reader in after if is_op(reader, "Cast", "Identity", *SHAPE_OPS)), None)
        if following is None:
            return False
        node = following
    return False


def _picks_matrices(chosen: ir.Value) -> bool:
    """Whether ``chosen`` picks from stored matrices, as experts' weights are; a table of words holds vectors."""
    seen: set[ir.Node] = set()
    pending = deque([chosen])
    while pending and len(seen) < _MOST_STEPS:
        value = pending.popleft()
        for node in readers(value):
            if is_op(node, "Gather") and node.inputs[0] is not value and is_constant(node.inputs[0]):
                if node.inputs[0] is not None and (rank(node.inputs[0]) or 0) >= 3:
                    return True
            elif node not in seen and is_op(node, *_KEEPS):
                seen.add(node)
                pending += node.outputs
    return False


def _before(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that ``values`` are made from, up to a TopK."""
    seen: set[ir.Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_op(node, "TopK"):
            pending += _given(node)
