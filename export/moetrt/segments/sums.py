"""Sums over a token's routes that are one node: ReduceSum, Einsum, or a MatMul by the weights."""

from dataclasses import dataclass
from string import ascii_letters

import onnx_ir as ir

from moetrt.segments.reading import before_upcast, dim, dims, is_op, may_be_equal, rank
from moetrt.segments.routes import Found, PerRoute, given, permutation_of, squeezed, summed_axis, take_weights, unlike
from moetrt.segments.sizes import is_said, may_be_repeated


@dataclass(frozen=True)
class Sum:
    """A sum over k.

    Attributes:
        routes: what is summed, [T, K, H] or [K, T, H]; [B, S, K, H] or [K, B, S, H] where the graph never flattens its
            tokens, or has them back in their shape already.
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
    ndim = rank(routes)
    if ndim not in (3, 4):
        return None
    summed = summed_axis(node, ndim)
    if summed is None:
        return None
    axis, end = summed
    if axis == ndim - 1:
        return _columns_summed(routes, end)
    k_first = axis == 0
    if axis != ndim - 2 and not k_first:
        return None
    if k_first and not isinstance(dim(routes, 0), int):
        # Tokens are summed: the number of a token's experts is known.
        return None
    return Sum(routes, end, Found(dim(routes, axis), k_first=k_first))


def _columns_summed(product: ir.Value, end: ir.Node) -> Sum | None:
    """``(rows.transpose(1, 2) * weights[:, None]).sum(-1)``: k lies after H."""
    node = before_upcast(product).producer()
    if node is None or not is_op(node, "Mul"):
        return None
    for position in (0, 1):
        routes, weights = _rows_behind(given(node.inputs[position])), given(node.inputs[1 - position])
        if routes is not None and rank(weights) == rank(routes) and dim(weights, -2) == 1:
            top_k = _first_number(dim(routes, -2), dim(weights, -1))
            found = Found(top_k)
            if top_k is None or dim(weights, -1) not in (top_k, dim(routes, -2)):
                return None
            if any(map(may_be_repeated, (dims(weights) or [])[:-2], (dims(routes) or [])[:-2])):
                found.unlike = unlike(weights, routes)
            take_weights(found.here(weights), found)
            return Sum(routes, end, found)
    return None


def _rows_behind(value: ir.Value) -> ir.Value | None:
    """The rows [..., K, H] that a Transpose makes ``value``, [..., H, K], from."""
    node, ndim = value.producer(), rank(value)
    if node is None or ndim is None or not is_op(node, "Transpose"):
        return None
    return node.inputs[0] if permutation_of(node) == [*range(ndim - 2), ndim - 1, ndim - 2] else None


def _first_number(*sizes: int | str | None) -> int | str | None:
    """What is known best of dimensions that are the same."""
    known = [size for size in sizes if size is not None]
    return next((size for size in known if isinstance(size, int)), known[0] if known else None)


@dataclass(frozen=True)
class Lettered:
    """An operand of an Einsum and the letters of its dimensions."""

    value: ir.Value
    letters: str


def equation_of(node: ir.Node) -> tuple[list[str], str] | None:
    """The letters of an Einsum's operands and of its result, letters in place of an ellipsis too.

    Returns:
        None for a result that is not written out, and for an ellipsis whose dimensions are not known or that repeats
        an operand.
    """
    left, _, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs) or not result:
        return None
    if "." not in left:
        return terms, result
    free = "".join(letter for letter in ascii_letters if letter not in left)
    hidden: list[list[int | str | None]] = []
    for number, (term, value) in enumerate(zip(terms, node.inputs, strict=True)):
        if "..." not in term:
            continue
        before, after = term.split("...")
        sizes = dims(value) if value is not None else None
        if sizes is None or len(sizes) < len(before + after):
            return None
        hidden.append(sizes[len(before) : len(sizes) - len(after)])
        terms[number] = before + free[: len(hidden[-1])] + after
    if any(len(sizes) != len(hidden[0]) or not all(map(may_be_equal, sizes, hidden[0])) for sizes in hidden):
        return None
    return terms, result.replace("...", free[: len(hidden[0])])


def einsum_of(node: ir.Node) -> tuple[list[Lettered], str] | None:
    """The operands of an Einsum, before they were transposed, and the letters of its result; None as `equation_of`."""
    read = equation_of(node)
    if read is None or len(set(read[1])) != len(read[1]):
        return None
    terms, result = read
    return [_before_transpose(given(value), term) for value, term in zip(node.inputs, terms, strict=True)], result


def _before_transpose(value: ir.Value, letters: str) -> Lettered:
    node = value.producer()
    order = permutation_of(node) if node is not None and is_op(node, "Transpose") else None
    if node is None or order is None or len(order) != len(letters):
        return Lettered(value, letters)
    return _before_transpose(given(node.inputs[0]), "".join(letters[order.index(axis)] for axis in range(len(order))))


def _einsum(node: ir.Node) -> Sum | None:
    """``tk,tkh->th``, in any letters, orders and layouts of t and k, which may be b and s; and with further factors."""
    read = einsum_of(node)
    if read is None or len(read[1]) not in (2, 3):
        return None
    operands, result = read
    tokens, column = result[:-1], result[-1]
    wide = [operand for operand in operands if column in operand.letters]
    if len(wide) != 1:
        return None
    routes, value = wide[0].letters, wide[0].value
    if len(operands) == 1:
        return _plain_einsum(node, wide[0], result)
    if len(set(routes)) != len(result) + 1 or len(routes) != len(result) + 1 or routes[-1] != column:
        return None
    k_first = routes[1:-1] == tokens
    if not k_first and routes[:-2] != tokens:
        return None
    found = Found(dim(value, 0 if k_first else len(tokens)), k_first)
    k = (set(routes) - set(result)).pop()
    for factor in operands:
        if factor is wide[0]:
            continue
        check_letters(factor, wide[0], found, tokens)
        if factor.letters in (tokens, k, ""):
            of = {tokens: "t", k: "k", "": ""}[factor.letters]
            found.weights.append(PerRoute(before_upcast(factor.value), k_first, of=of, over=value))
            continue
        if factor.letters not in (tokens + k, k + tokens):
            return None
        take_weights(PerRoute(factor.value, k_first=factor.letters == k + tokens), found)
    return Sum(value, node, found)


def check_letters(one: Lettered, other: Lettered, found: Found, tokens: str) -> None:
    """Puts down where a letter's dimension may be 1 in one of two operands of an Einsum, which then is repeated.

    Args:
        one: an operand.
        other: another one.
        found: where it is put down.
        tokens: the letters of the tokens, whose number both must say, or neither.
    """
    mine, theirs = (dict(zip(operand.letters, dims(operand.value) or [], strict=False)) for operand in (one, other))
    for letter in mine.keys() & theirs.keys():
        sizes = mine[letter], theirs[letter]
        if may_be_repeated(*sizes) or (letter in tokens and is_said(sizes[0]) != is_said(sizes[1])):
            found.unlike = found.unlike or unlike(one.value, other.value)


def _plain_einsum(node: ir.Node, rows: Lettered, result: str) -> Sum | None:
    """``tkh->th``, ``kth->th`` or ``bskh->bsh``: rows without weights."""
    routes, value = rows.letters, rows.value
    summed = [axis for axis, letter in enumerate(routes) if letter not in result]
    if len(summed) != 1 or routes.replace(routes[summed[0]], "") != result:
        return None
    axis = summed[0]
    if axis == len(routes) - 2:
        return Sum(value, node, Found(dim(value, axis)))
    return Sum(value, node, Found(dim(value, 0), k_first=True)) if axis == 0 and len(routes) == 3 else None


def _matmul(node: ir.Node) -> Sum | None:
    """``[T, 1, K] @ [T, K, H]`` or ``[T, H, K] @ [T, K, 1]``, then without the 1; T may be B and S."""
    left, right = given(node.inputs[0]), given(node.inputs[1])
    ndim = rank(left)
    if ndim not in (3, 4) or rank(right) != ndim:
        return None
    if dim(left, -2) == 1:
        weights, routes, axis = left, right, ndim - 2
    elif dim(right, -1) == 1:
        behind = _rows_behind(left)
        if behind is None:
            return None
        weights, routes, axis = right, behind, ndim - 1
    else:
        return None
    end = squeezed(node.outputs[0], axis)
    if end is None:
        return None
    found = Found(_first_number(dim(routes, -2), dim(weights, -1 if weights is left else -2)))
    tokens = [(dims(value) or [])[:-2] for value in (left, right)]
    if any(map(may_be_repeated, *tokens)):
        found.unlike = unlike(left, right)
    take_weights(found.here(weights), found)
    return Sum(routes, end, found)
