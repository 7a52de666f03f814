"""A finalize that is written term by term: ``rows[map[:, 0]] * weights[:, 0] + rows[map[:, 1]] * weights[:, 1] + ...``.

The terms may also be experts, each with the rows that it made for every token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from moetrt.segments.bounds import lowest
from moetrt.segments.combine import Combine, combine_of
from moetrt.segments.constants import axes, scalar
from moetrt.segments.gather import DENSE_FORM, MOST_ROUTES, chosen_experts
from moetrt.segments.maps import clamped_map, route_numbers
from moetrt.segments.reading import before_upcast, cast_source, dim, dims, is_op, named, rank, sole_reader
from moetrt.segments.routers import chosen_of, is_routed
from moetrt.segments.routes import (
    Found,
    NotThis,
    PerRoute,
    Rows,
    are_rows,
    given,
    index_of,
    lowered,
    map_operand,
    selected_on,
    strip,
    summed_axis,
    walk_back,
    weighted_seed,
    without_reshapes,
)
from moetrt.segments.tail import Operand, Seed, Write, written

FORM = "loop"


@dataclass(frozen=True)
class _Term:
    """One term: the rows that are picked for it or that it has, and what multiplies them."""

    rows: Rows
    found: Found


@dataclass(frozen=True)
class _Columns:
    """The value of which each term has one k, and which k."""

    whole: PerRoute
    taken: list[int]


def seed_at(node: ir.Node) -> Seed | None:
    """The seed whose first addition, or whose sum of all terms, ``node`` is, or None."""
    # The shared expert's output may be a product too: the longest sum that is one over k is taken.
    try:
        sums = list(_sums(node))
    except NotThis:
        return None
    for end, added in sums:
        leaves = [leaf for leaf in added if scalar(leaf) != 0]
        if not 2 <= len(leaves) <= MOST_ROUTES:
            continue
        seed = _seed_of(end, leaves, as_picked=False) or _seed_of(end, leaves, as_picked=True)
        if seed is not None:
            return seed
    return None


def _seed_of(end: ir.Node, leaves: list[ir.Value], *, as_picked: bool) -> Seed | None:
    """The seed of these terms; ``as_picked``: each with its own rows, whatever picks them."""
    try:
        terms = [_term(leaf, len(leaves), as_picked) for leaf in leaves]
        if any(len(term.found.weights) != 1 or term.found.scale != terms[0].found.scale for term in terms):
            return None
        weights = _columns([term.found.weights[0] for term in terms], terms)
        if weights is None:
            return _of_compared_experts(end, terms)
        return _picked(end, terms, weights) or _of_experts(end, terms, weights)
    except NotThis:
        return None


def _sums(node: ir.Node) -> Iterator[tuple[ir.Node, list[ir.Value]]]:
    """The sums that begin at ``node``: the node that ends each, and what it adds; the longest first."""
    if is_op(node, "ReduceSum"):
        stacked = _stacked(node)
        if stacked is not None:
            yield stacked
    elif (
        not is_op(node, "Sum", "Add") or rank(node.outputs[0]) not in (2, 3) or not all(map(_may_be_term, node.inputs))
    ):
        return
    elif is_op(node, "Sum"):
        yield node, [given(value) for value in node.inputs]
    elif is_op(node, "Add"):
        for end in reversed(_ends(node)):
            if _first(end) is node:
                yield end, _leaves(end)


def _stacked(node: ir.Node) -> tuple[ir.Node, list[ir.Value]] | None:
    """``torch.stack(terms, axis).sum(axis)``, as Unsqueeze, Concat and ReduceSum."""
    # Terms of 16 bits may be widened before they are summed.
    concat = before_upcast(given(node.inputs[0])).producer()
    ndim = rank(given(node.inputs[0]))
    if concat is None or not is_op(concat, "Concat") or ndim not in (3, 4) or len(concat.inputs) > MOST_ROUTES:
        return None
    summed = summed_axis(node, ndim)
    if summed is None or concat.attributes.get_int("axis", 0) % ndim != summed[0]:
        return None
    terms = []
    for value in concat.inputs:
        step = given(value).producer()
        if step is None or not is_op(step, "Unsqueeze", "Reshape"):
            return None
        term, axis = given(step.inputs[0]), summed[0]
        before, after = dims(term), dims(given(value))
        if before is None or after is None or after != [*before[:axis], 1, *before[axis:]] or not _may_be_term(term):
            return None
        terms.append(term)
    return summed[1], terms


def _may_be_term(value: ir.Value | None) -> bool:
    """Whether ``value`` is a product, or one of which a mask keeps a part, behind Casts; or 0."""
    if scalar(value) == 0:
        return True
    node = value.producer() if value is not None else None
    while node is not None and is_op(node, "Cast"):
        node = given(node.inputs[0]).producer()
    return node is not None and is_op(node, "Mul", "Where")


def _ends(node: ir.Node) -> list[ir.Node]:
    """The additions that the sum may end in, the shortest sum first."""
    ends = [node]
    while (reader := sole_reader(node.outputs[0])) is not None and is_op(reader, "Add") and len(ends) <= MOST_ROUTES:
        if not all(map(_may_be_term, _leaves(reader))):
            break
        ends.append(node := reader)
    return ends


def _is_addition(value: ir.Value) -> bool:
    """Whether ``value`` is a sum that only another addition reads."""
    node = value.producer()
    return node is not None and is_op(node, "Add") and sole_reader(value) is not None and rank(value) in (2, 3)


def _leaves(end: ir.Node) -> list[ir.Value]:
    """What the additions up to ``end`` add, in order."""
    leaves: list[ir.Value] = []
    pending = list(end.inputs)[::-1]
    while pending and len(leaves) <= MOST_ROUTES:
        value = given(pending.pop())
        node = value.producer()
        if node is not None and _is_addition(value):
            pending += list(node.inputs)[::-1]
        else:
            leaves.append(value)
    return leaves


def _first(end: ir.Node) -> ir.Node:
    """The addition that adds two leaves, reached by the first operand that is a sum: one for each tree."""
    node = end
    while True:
        inner = next((given(value).producer() for value in node.inputs if _is_addition(given(value))), None)
        if inner is None:
            return node
        node = inner


def _term(leaf: ir.Value, count: int, as_picked: bool) -> _Term:
    found = Found(count, by_column=True, as_picked=as_picked)
    return _Term(walk_back(leaf, found), found)


def _columns(places: list[PerRoute], terms: list[_Term]) -> _Columns | None:
    """What the places of all terms are columns of; None where they are not."""
    taken = [place.column for place in places if place.column is not None]
    if len(taken) != len(terms) or len({replace(place, column=None) for place in places}) != 1:
        return None
    return _Columns(replace(places[0], column=None), taken)


def _casts(terms: list[_Term]) -> list[ir.Value]:
    return [value for term in terms for value in term.found.casts]


def _complaint(end: ir.Node, taken: list[int], others: list[int]) -> str | None:
    """What is wrong with the k that the terms' weights have, beside those of their rows."""
    if taken != others:
        return f"the terms of {named(end)} multiply the rows of some routes by the weights of others"
    if sorted(taken) != list(range(len(taken))):
        return f"the terms of {named(end)} do not take each of a token's {len(taken)} routes once"
    return None


def _spared(end: ir.Node, index: PerRoute) -> str | None:
    """What is wrong with masks that spare entries below -1, which then name rows from the end."""
    if lowest(index.value) >= -1:
        return None
    return (
        f"the terms of {named(end)} are masked where the map '{index.value.name}' is -1, so one of -2 reads a row; "
        "mask where it is below 0 (map >= 0)"
    )


def _picked(end: ir.Node, terms: list[_Term], weights: _Columns) -> Seed | None:
    """Rows that a column of the map picks, in each term."""
    rows = terms[0].rows.value
    if rows is None or any(term.rows.value is not rows or term.rows.index is None for term in terms):
        return None
    data = before_upcast(rows)
    if not are_rows(data, 2) or dim(data, -1) != dim(end.outputs[0], -1):
        return None
    indices = [index_of(term.rows.index, rows, term.found) for term in terms if term.rows.index is not None]
    bases = _columns([base for base, _ in indices], terms)
    if bases is None:
        return None
    problem = _complaint(end, weights.taken, bases.taken)
    if any(mask != base for term, (base, _) in zip(terms, indices, strict=True) for mask in term.found.masks):
        problem = problem or f"a term of {named(end)} is masked by another value than its column of the map"
    masked = [bool(term.found.masks) for term in terms]
    clamped = [clamp is not None for _, clamp in indices]
    if len(set(masked)) != 1 or (not all(masked) and len(set(clamped)) != 1):
        problem = problem or f"some terms of {named(end)} are masked or clamped and others are not"
    found = Found(len(terms), casts=_casts(terms), scale=terms[0].found.scale, weights=[weights.whole])
    found.at_most, found.counted = terms[0].found.at_most, [value for term in terms for value in term.found.counted]
    if any(term.found.at_most != found.at_most or bool(term.found.counted) != bool(found.counted) for term in terms):
        problem = problem or f"the terms of {named(end)} bound the map's entries from above by different numbers"
    first_clamp = indices[0][1]
    before_selection = replace(first_clamp, column=None) if first_clamp and first_clamp.column is not None else None
    entries = before_selection or (bases.whole if first_clamp is not None else None)
    if all(masked) and any(all(mask.below for mask in term.found.masks) for term in terms):
        complaint = _spared(end, bases.whole)
        problem = problem or complaint
    index, complaint = map_operand(end, bases.whole, entries, found, masked=all(masked), rows=data)
    if first_clamp is not None and before_selection is None:
        index = lowered(index, found, data)
        index = index if all(masked) else clamped_map(index)
    return weighted_seed(FORM, end, data, found, index, problem or complaint)


def _of_experts(end: ir.Node, terms: list[_Term], weights: _Columns) -> Seed | None:
    """Rows that each term has for every token: one k of [T, K, H], or an expert's output."""
    if any(term.found.masks for term in terms):
        return None
    found = Found(len(terms), casts=_casts(terms), scale=terms[0].found.scale, weights=[weights.whole])
    whole = weights.whole
    combine = combine_of(whole.value) if not whole.k_first and rank(whole.value) in (2, 3) else None
    if combine is None and not is_routed(whole.value):
        return None
    slices = [_slice(term.rows) for term in terms]
    known = [entry for entry in slices if entry is not None]
    if len(known) == len(terms) and len({(source, axis) for source, axis, _ in known}) == 1:
        source, axis, _ = known[0]
        problem = _complaint(end, weights.taken, [column for _, _, column in known])
        return _seed(end, source, source, found, combine, axis == 0, problem)
    problem = _complaint(end, weights.taken, weights.taken)
    return _together(end, terms, weights.taken, found, combine, problem)


@dataclass(frozen=True)
class _Chosen:
    """``(weights * (ids == expert)).sum(-1)``: the weight that each token gives to an expert, 0 where it chose others.

    Attributes:
        weights: [T, K].
        ids: of the chosen experts, [T, K].
        expert: a number.
    """

    weights: ir.Value
    ids: ir.Value
    expert: int


def _chosen(value: ir.Value) -> _Chosen | None:
    """What ``value``, one number a token, is made from."""
    value = without_reshapes(value)
    total = cast_source(value) or value
    node = total.producer()
    if node is not None and is_op(node, "ReduceSum"):
        kept = before_upcast(given(node.inputs[0]))
        # A sum of 16 bits may be made in float32: one addend is not 0, so nothing is rounded.
        if axes(node, []) not in ([(rank(kept) or 0) - 1], [-1]) or kept.dtype != value.dtype:
            return None
        node = kept.producer()
    elif total is not value or dim(value, -1) != 1:
        return None
    if node is None or rank(node.outputs[0]) not in (2, 3):
        return None
    if is_op(node, "Where") and scalar(node.inputs[2]) == 0:
        compared, weights = given(node.inputs[0]), given(node.inputs[1])
    elif is_op(node, "Mul"):
        first, second = (given(operand) for operand in node.inputs)
        compared, weights = (first, second) if _truth(first) is not None else (second, first)
        compared = given(_truth(compared))
    else:
        return None
    equal = compared.producer()
    if equal is None or not is_op(equal, "Equal"):
        return None
    for position in (0, 1):
        ids, expert = given(equal.inputs[position]), scalar(equal.inputs[1 - position])
        if expert is not None and dims(ids) == dims(weights) == dims(node.outputs[0]):
            return _Chosen(before_upcast(weights), strip(PerRoute(ids), Found(top_k=-1)).value, int(expert))
    return None


def _truth(value: ir.Value) -> ir.Value | None:
    """The truth values that a Cast makes numbers of."""
    source = cast_source(value)
    return source if source is not None and source.dtype == ir.DataType.BOOL else None


def _of_compared_experts(end: ir.Node, terms: list[_Term]) -> Seed | None:
    """Every expert's rows for every token, each times the weight of the routes whose expert it is."""
    if any(term.found.masks for term in terms):
        return None
    chosen = [_chosen(term.found.weights[0].value) for term in terms]
    known = [entry for entry in chosen if entry is not None]
    if len(known) != len(terms) or len({(entry.weights, entry.ids) for entry in known}) != 1:
        return None
    weights, ids = known[0].weights, known[0].ids
    experts = [entry.expert for entry in known]
    problem = None
    if sorted(experts) != list(range(len(experts))) or chosen_of(ids) != len(experts):
        problem = (
            f"the graph does not show that '{ids.name}' names the {len(experts)} experts whose rows {named(end)} adds, "
            "each once, and no others"
        )
    combine = Combine(PerRoute(ids), Found(dim(ids, -1), weights=[PerRoute(weights)]), masked=False)
    found = Found(len(terms), scale=terms[0].found.scale)
    return _together(end, terms, experts, found, combine, problem)


def _together(
    end: ir.Node, terms: list[_Term], places: list[int], found: Found, combine: Combine | None, problem: str | None
) -> Seed | None:
    """The seed of the rows that each term has for every token; ``places``: the place of each term's rows."""
    rows = [term.rows.value for term in terms if term.rows.index is None and term.rows.order is None]
    values = [before_upcast(value) for value in rows if value is not None]
    if len(values) != len(terms) or not all(are_rows(value, 2, 3) for value in values):
        return None
    # The terms may come in any order.
    ordered = [value for _, value in sorted(zip(places, values, strict=True), key=lambda pair: pair[0])]

    def make(write: Write) -> ir.Value:
        width = int(dim(ordered[0], -1) or 0)
        shapes = [None if rank(value) == 2 else (-1, width) for value in ordered]
        flat = [written(Operand(value, reshape_to=to), write) for value, to in zip(ordered, shapes, strict=True)]
        return write("Concat", flat, {"axis": 0}, ordered[0].dtype, [None, width])

    return _seed(end, ordered[0], Operand(ordered[0], make=make), found, combine, True, problem)


def _slice(rows: Rows) -> tuple[ir.Value, int, int] | None:
    """The [T, K, H] or [E, T, H] of which ``rows`` is one slice, on which axis, and which."""
    value = rows.value
    if value is None:
        return None
    if rows.index is not None:
        number = scalar(rows.index.value)
        return None if number is None or rank(value) != 3 else (before_upcast(value), 0, int(number))
    value = without_reshapes(value)
    node = value.producer()
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or source is None or rank(source) != 3:
        return None
    for axis in (0, 1):
        number = selected_on(node, value, axis)
        if number is not None:
            return before_upcast(source), axis, number
    return None


def _seed(
    end: ir.Node,
    data: ir.Value,
    rows: ir.Value | Operand,
    found: Found,
    combine: Combine | None,
    tokens_last: bool,
    problem: str | None,
) -> Seed | None:
    width = dim(data, -1)
    if not are_rows(data, 2, 3) or not isinstance(width, int) or width != dim(end.outputs[0], -1):
        return None
    operand = rows if isinstance(rows, Operand) else Operand(data, reshape_to=(-1, width))
    if combine is not None:
        seed = chosen_experts(end, operand, found, combine, tokens_last=tokens_last)
        return replace(seed, problem=problem) if seed is not None and problem is not None else seed
    index = route_numbers(found.weights[0], int(found.top_k or 0)) if tokens_last else None
    return weighted_seed(DENSE_FORM if tokens_last else FORM, end, operand, found, index, problem)
