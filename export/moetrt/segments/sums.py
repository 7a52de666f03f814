"""Sums over a token's routes that are one node: ReduceSum, Einsum, or a MatMul by the weights."""

from dataclasses import dataclass

import onnx_ir as ir

from moetrt.segments.reading import dim, is_op, rank
from moetrt.segments.routes import Found, PerRoute, given, permutation_of, squeezed, summed_axis, take_weights


@dataclass(frozen=True)
class Sum:
    """A sum over k.

    Attributes:
        routes: what is summed, [T, K, H] or [K, T, H].
        end: the node whose output is the sum.
        found: K, the layout, and the weights where the summing node applied them.
    """

    routes: ir.Value
    end: ir.Node
    found: Found


def sum_of(node: ir.Node) -> Sum | None:
    """The sum that ``node`` makes, if it is one over the routes of a token.

    Raises:
        NotThis: it is one of another kind.
    """
    if is_op(node, "ReduceSum"):
        return _reduced(node)
    if is_op(node, "Einsum"):
        return _einsum(node)
    if is_op(node, "MatMul"):
        return _matmul(node)
    return None


def _reduced(node: ir.Node) -> Sum | None:
    routes = given(node.inputs[0])
    if rank(routes) != 3:
        return None
    summed = summed_axis(node, 3)
    if summed is None or summed[0] == 2:
        return None
    axis, end = summed
    if axis == 0 and not isinstance(dim(routes, 0), int):
        # Tokens are summed: the number of a token's experts is known.
        return None
    return Sum(routes, end, Found(dim(routes, axis), k_first=axis == 0))


def _einsum(node: ir.Node) -> Sum | None:
    """``tk,tkh->th``, in any letters, orders and layouts of t and k."""
    left, _, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(result) != 2 or len(set(result)) != 2:
        return None
    wide = 0 if len(terms[0]) == 3 else 1
    routes, factor = terms[wide], terms[1 - wide]
    token, column = result[0], result[1]
    if len(set(routes)) != 3 or routes[2] != column or token not in routes or sorted(factor) != sorted(routes[:2]):
        return None
    value, weights = given(node.inputs[wide]), given(node.inputs[1 - wide])
    k_first = routes[1] == token
    found = Found(dim(value, 0 if k_first else 1), k_first)
    take_weights(PerRoute(weights, k_first=factor[1] == token), found)
    return Sum(value, node, found)


def _matmul(node: ir.Node) -> Sum | None:
    """``[T, 1, K] @ [T, K, H]`` or ``[T, H, K] @ [T, K, 1]``, then without the 1."""
    left, right = given(node.inputs[0]), given(node.inputs[1])
    if rank(left) != 3 or rank(right) != 3:
        return None
    if dim(left, 1) == 1:
        weights, routes, axis = left, right, 1
    elif dim(right, 2) == 1:
        producer = left.producer()
        if producer is None or not is_op(producer, "Transpose") or permutation_of(producer) != [0, 2, 1]:
            return None
        weights, routes, axis = right, given(producer.inputs[0]), 2
    else:
        return None
    end = squeezed(node.outputs[0], axis)
    if end is None:
        return None
    found = Found(dim(routes, 1))
    take_weights(found.here(weights), found)
    return Sum(routes, end, found)
