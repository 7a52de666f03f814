"""Combine matrices, [T, N] or [B, S, N]: one row a token, its weights at the columns of its routes, 0 elsewhere."""

from dataclasses import dataclass

import onnx_ir as ir

from moetrt.segments.constants import scalar
from moetrt.segments.reading import dim, dims, is_op, named, rank
from moetrt.segments.routes import Found, NotThis, PerRoute, given, strip, take_weights, walk_back
from moetrt.segments.sizes import has_other_length, is_said, may_be_repeated
from moetrt.segments.sums import check_letters, einsum_of, sum_of


@dataclass(frozen=True)
class Combine:
    """A combine matrix taken apart.

    Attributes:
        index: the column of each route.
        found: the weights and masks of the routes.
        masked: whether an entry of -1 has no column.
        problem: why it is not the sum of its routes.
    """

    index: PerRoute
    found: Found
    masked: bool
    problem: str | None = None


def combine_of(matrix: ir.Value) -> Combine | None:
    """The routes that ``matrix`` is made from; None where it is made in another way."""
    try:
        return _scattered(matrix) or _one_hot(matrix)
    except NotThis:
        return None


def _scattered(matrix: ir.Value) -> Combine | None:
    """``zeros(T, N).scatter(1, index, weights)``."""
    matrix, casts = _before_casts(matrix)
    node = matrix.producer()
    if node is None or not is_op(node, "ScatterElements") or rank(matrix) not in (2, 3):
        return None
    index, weights = given(node.inputs[1]), given(node.inputs[2])
    last = (rank(matrix) or 0) - 1
    if node.attributes.get_int("axis", 0) not in (last, -1) or scalar(node.inputs[0]) != 0:
        return None
    if rank(index) != rank(matrix):
        return None
    reduction = node.attributes.get_string("reduction", "none")
    found = Found(top_k=dim(index, -1), casts=casts)
    place = found.here(index)
    take_weights(found.here(weights), found)
    # ScatterElements takes updates of its indices' shape, and repeats neither.
    found.same_tokens = len(found.weights) == 1 and not found.masks
    problem = None
    tokens = zip((dims(index) or [])[:-1], (dims(matrix) or [])[:-1], strict=True)
    unlike = any(may_be_repeated(mine, whole) or (is_said(mine) and not is_said(whole)) for mine, whole in tokens)
    if unlike or has_other_length(index, dim(matrix, 0)):
        problem = f"'{index.name}' of shape {dims(index)} may have fewer rows than '{matrix.name}', {dims(matrix)}"
    if reduction not in ("add", "none"):
        problem = f"'{matrix.name}' is scattered with reduction '{reduction}'; a sum of routes takes 'add'"
    elif reduction == "none" and not _distinct(place, found):
        problem = (
            f"'{matrix.name}' is scattered by '{index.name}', whose entries may be equal for one token, and only the "
            "last of these would count: use scatter_add"
        )
    return Combine(place, found, False, problem)


def _before_casts(matrix: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """What ``matrix`` was before Casts, and what each of them made."""
    casts: list[ir.Value] = []
    while (node := matrix.producer()) is not None and is_op(node, "Cast", "Identity"):
        casts += [matrix] if is_op(node, "Cast") else []
        matrix = given(node.inputs[0])
    return matrix, casts


def _distinct(place: PerRoute, found: Found) -> bool:
    """Whether a token's entries differ from each other: a TopK along the experts chose them."""
    value = strip(place, found).value
    node = value.producer()
    if node is None or not is_op(node, "TopK") or value is not node.outputs[1] or rank(value) not in (2, 3):
        return False
    return node.attributes.get_int("axis", -1) in ((rank(value) or 0) - 1, -1) and strip(place, found).k_first is False


def _one_hot(matrix: ir.Value) -> Combine | None:
    """The sum over k of ``one_hot(index) * weights``."""
    matrix, casts = _before_casts(matrix)
    node = matrix.producer()
    if node is not None and is_op(node, "Squeeze", "Reshape"):
        node = given(node.inputs[0]).producer()
    total = sum_of(node) if node is not None else None
    if total is None or total.end.outputs[0] is not matrix:
        return None
    found = total.found
    found.casts += casts
    rows = walk_back(total.routes, found)
    if rows.value is not None or rows.index is None:
        return None
    return Combine(rows.index, found, rows.masked)


@dataclass(frozen=True)
class Picked:
    """Rows of which an Einsum takes those that a one-hot matrix names.

    Attributes:
        rows: [N, H]; [T, E, H] or [E, T, H].
        experts: E; None for [N, H], which have no tokens.
        tokens_last: whether they lie as [E, T, H].
        combine: what picks and weighs them.
    """

    rows: ir.Value
    experts: int | str | None
    tokens_last: bool
    combine: Combine


def picked_by_einsum(node: ir.Node) -> Picked | None:
    """``tke,tk,teh->th``: a one-hot matrix, weights and rows in one Einsum, in any letters and orders.

    The rows may be ``eth`` or ``eh``, of no token; weights may be none, or several; t may be two dimensions.

    Raises:
        NotThis: a node on the way to the one-hot matrix is no part of a finalize.
    """
    read = einsum_of(node)
    if read is None or len(read[1]) not in (2, 3):
        return None
    operands, result = read
    tokens, column = result[:-1], result[-1]
    wide = [operand for operand in operands if column in operand.letters]
    summed = {letter for operand in operands for letter in operand.letters} - set(result)
    if len(wide) != 1 or len(summed) != 2 or len(summed & set(wide[0].letters)) != 1:
        return None
    rows, (expert,) = wide[0], summed & set(wide[0].letters)
    (k,) = summed - {expert}
    pickers = [operand for operand in operands if {k, expert} <= set(operand.letters)]
    if len(pickers) != 1 or rows.letters not in (tokens + expert + column, expert + tokens + column, expert + column):
        return None
    matrix, k_first = pickers[0], pickers[0].letters == k + tokens + expert
    if matrix.letters != tokens + k + expert and not (k_first and len(tokens) == 1):
        return None
    found = Found(dim(matrix.value, matrix.letters.index(k)), k_first)
    problem = None
    for factor in operands:
        if factor is not matrix:
            check_letters(factor, matrix, found, tokens)
        if factor is not rows:
            check_letters(factor, rows, found, tokens)
        if factor in (rows, matrix):
            continue
        if sorted(factor.letters) == sorted(tokens + expert):
            problem = (
                f"{named(node)} weighs by '{factor.value.name}', which has a number for every expert of a token: "
                "gather those of its K experts (torch.gather), and multiply by these"
            )
        elif factor.letters != tokens + k and not (len(tokens) == 1 and factor.letters == k + tokens):
            return None
        else:
            take_weights(PerRoute(factor.value, k_first=factor.letters[-1] == tokens), found)
    picked = walk_back(matrix.value, found)
    if picked.value is not None or picked.index is None:
        return None
    experts = None if rows.letters == expert + column else dim(rows.value, rows.letters.index(expert))
    combine = Combine(picked.index, found, picked.masked, problem)
    return Picked(rows.value, experts, rows.letters[0] == expert, combine)
