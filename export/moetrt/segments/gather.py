"""A finalize that sums over an axis: rows that a map picks, one row a route in order, or every expert's rows."""

from dataclasses import replace

import onnx_ir as ir

from moetrt.segments.combine import Combine, combine_of, picked_by_einsum
from moetrt.segments.indices import is_permutation, may_have_length
from moetrt.segments.maps import dense_map, inverse_map, inverted, route_numbers
from moetrt.segments.reading import before_upcast, dim, dims, input_of, is_op, named, rank
from moetrt.segments.routers import by_chosen_experts, is_routed
from moetrt.segments.routes import (
    Found,
    NotThis,
    PerRoute,
    Rows,
    are_rows,
    given,
    index_of,
    is_repeated,
    never_negative,
    picked_seed,
    set_other_masks_apart,
    strip,
    unit_weights,
    unlike,
    walk_back,
    weighted_seed,
    without_reshapes,
)
from moetrt.segments.sizes import first_unequal, is_said
from moetrt.segments.sums import Sum, equation_of, sum_of
from moetrt.segments.tail import Operand, Seed, Term

FORM = "gather"
ROUTE_FORM = "rows by route"
ONE_HOT_FORM = "one-hot"
DENSE_FORM = "all experts"
CAPACITY_FORM = "capacity"

MOST_ROUTES = 64
"""K from which a sum is taken for something else than one over a token's experts."""


def seed_at(node: ir.Node) -> Seed | None:
    """The seed whose sum over k ``node`` is, or None."""
    if not is_op(node, "ReduceSum", "Einsum", "MatMul", "Gemm"):
        return None
    try:
        return _by_matrix(node) or _by_sum(node) or _by_one_hot(node) or _by_capacity(node)
    except NotThis:
        return None


def _by_sum(node: ir.Node) -> Seed | None:
    total = sum_of(node)
    if total is None:
        return None
    found = total.found
    rows = walk_back(total.routes, found)
    if rows.value is None:
        # A combine matrix is no sum of rows; the product that reads it is.
        return None
    data = before_upcast(rows.value)
    if dim(data, -1) != dim(total.end.outputs[0] if found.padded else total.routes, -1):
        return _padded(total, data, rows.index) if found.padded and rows.index is not None else None
    if rows.index is not None:
        return _picked(total, data, rows)
    if rows.order is not None:
        return _put_back(total, data, rows)
    return _in_order(total, data, rows)


def _picked(total: Sum, data: ir.Value, rows: Rows) -> Seed | None:
    found = total.found
    if not are_rows(data, 2) or rows.index is None:
        return None
    base, _ = index_of(rows.index, rows.value, found)
    order = inverted(base.value)
    if order is not None and not found.weights and not found.masks:
        unweighted = _weights_before(data, order, base.k_first, found)
        if unweighted is not None:
            data = unweighted
    weighted = bool(found.masks) or any(weights.over is None for weights in found.weights)
    if not weighted and not (isinstance(found.top_k, int) and found.top_k <= MOST_ROUTES):
        return None
    seed = picked_seed(FORM, total.end, data, rows.index, found, only_read=rows.value)
    if order is not None:
        # The map is its inverse.
        seed.known = (order,)
    # Rows without weights may be anything, unless they are put in the routes' order, or a router chose their experts.
    seed.may_be_pooling = not (weighted or order is not None or by_chosen_experts(data, int(found.top_k or 0)))
    return seed


def _padded(total: Sum, data: ir.Value, index: PerRoute) -> Seed:
    """The site of rows whose columns are cut after they were picked, as the operator's own body does."""
    seed = picked_seed(FORM, total.end, data, index, total.found)
    seed.problem = (
        f"the rows '{data.name}', {dims(data)}, are cut to the width of the sum of {named(total.end)}, "
        f"{dims(total.end.outputs[0])}, after they were picked: cut them before; where an optimiser inlined moetrt's "
        "own function, map the file before it is optimised"
    )
    return seed


def _weights_before(data: ir.Value, order: ir.Value, k_first: bool, found: Found) -> ir.Value | None:
    """The rows before they were multiplied by weights that lie in the rows' own order."""
    inner = Found(found.top_k)
    unweighted = walk_back(data, inner)
    if unweighted.value is None or unweighted.index is not None or unweighted.order is not None:
        return None
    if len(inner.weights) != 1 or inner.masks or inner.kept:
        return None
    weights = sorted_source(inner.weights[0].value, order)
    rows = before_upcast(unweighted.value)
    if weights is None or not are_rows(rows, 2, 3) or dim(rows, -1) != dim(data, -1):
        return None
    found.weights.append(strip(PerRoute(weights, k_first), found))
    found.scale *= inner.scale
    found.casts += inner.casts
    return rows


def sorted_source(value: ir.Value, order: ir.Value) -> ir.Value | None:
    """What ``value`` was before it was sorted by ``order``; None where it was not."""
    value = without_reshapes(value)
    node = value.producer()
    while node is not None and is_op(node, "Cast") and before_upcast(value) is not value:
        value = without_reshapes(given(node.inputs[0]))
        node = value.producer()
    if node is None or not is_op(node, "Gather", "GatherND", "GatherElements"):
        return None
    source = given(node.inputs[0])
    flat = [size for size in dims(source) or [] if size != 1]
    by = strip(PerRoute(given(node.inputs[1])), Found(top_k=-1)).value
    if by is not order or len(flat) != 1 or node.attributes.get_int("axis", 0) != 0:
        return None
    return source if may_have_length(without_reshapes(source), order) else None


def _put_back(total: Sum, data: ir.Value, rows: Rows) -> Seed | None:
    """Rows that were scattered back into the routes' order."""
    found, order = total.found, rows.order
    if order is None or not are_rows(data, 2):
        return None
    problem = None
    set_other_masks_apart(found, None)
    order = strip(PerRoute(order), Found(top_k=-1)).value
    if not is_permutation(order):
        if not found.weights:
            return None
        problem = (
            f"the rows are put in the routes' order by '{order.name}', and the graph does not show that this names "
            "each route once: make it by torch.argsort"
        )
    elif found.masks or rows.k_first or not isinstance(found.top_k, int):
        problem = f"the rows of {named(total.end)} are put in the routes' order and then masked or transposed"
    index = inverse_map(order, found.top_k) if isinstance(found.top_k, int) else None
    return weighted_seed(ROUTE_FORM, total.end, data, found, index, problem)


def _in_order(total: Sum, data: ir.Value, rows: Rows) -> Seed | None:
    """Rows that nothing picks: one a route, or one an expert and token."""
    found = total.found
    width = dim(data, -1)
    if not are_rows(data, 2, 3, 4) or not isinstance(width, int) or is_repeated(data):
        return None
    if not found.weights:
        return _unweighted(total, data, rows)
    if rank(data) == rank(total.routes) and not is_said(dim(data, 0 if rows.k_first else -2)):
        # The products may have their K from the weights, and one row a token is repeated.
        found.unlike = found.unlike or unlike(found.weights[0].value, data)
    weights = found.weights[0]
    if len(found.weights) == 1 and weights.over is None and not found.masks and not found.kept:
        matrix = strip(weights, found)
        combine = combine_of(matrix.value) if not matrix.k_first and rank(matrix.value) in (2, 3) else None
        if combine is not None:
            return chosen_experts(total.end, _in_routes_order(data), found, combine, tokens_last=rows.k_first)
    top_k = found.top_k
    routed = any(is_routed(factor.value) for factor in found.weights)
    if not isinstance(top_k, int) or top_k > MOST_ROUTES:
        return None
    problem = None
    set_other_masks_apart(found, None)
    if found.masks:
        problem = f"the rows of {named(total.end)} are masked by '{found.masks[0].value.name}', but not picked by it"
    index = route_numbers(weights, top_k) if rows.k_first else None
    form = DENSE_FORM if rows.k_first and rank(data) == 3 else ROUTE_FORM
    seed = weighted_seed(form, total.end, _in_routes_order(data), found, index, problem)
    # Rows of [T, K, H] may be anything that is pooled, unless a router chose the weights.
    seed.may_be_pooling = rank(data) != 2 and not routed
    return seed


def _unweighted(total: Sum, data: ir.Value, rows: Rows) -> Seed | None:
    """The seed of a plain sum of each token's rows: their weights were multiplied before the second product."""
    found, top_k = total.found, total.found.top_k
    if not isinstance(top_k, int) or top_k > MOST_ROUTES or not by_chosen_experts(data, top_k):
        return None
    problem = None
    set_other_masks_apart(found, None)
    if found.masks:
        problem = f"the rows of {named(total.end)} are masked by '{found.masks[0].value.name}', but not picked by it"
    elif rows.k_first or total.routes.shape is None or dim(total.routes, -2) != top_k:
        problem = f"{named(total.end)} sums rows without weights over their first dimension: sum [T, K, H] over K"
    seed = weighted_seed(ROUTE_FORM, total.end, _in_routes_order(data), found, None, problem)
    seed.operands["expert_weights"] = unit_weights(total.routes, top_k)
    return seed


def _in_routes_order(data: ir.Value) -> Operand:
    """Rows that lie in the routes' order, [T, K, H] or flat, as [R, H]."""
    return Operand(data, reshape_to=(-1, int(dim(data, -1) or 0)) if rank(data) != 2 else None)


def chosen_experts(end: ir.Node, rows: Operand, weighted: Found, combine: Combine, *, tokens_last: bool) -> Seed | None:
    """The seed of every expert's rows for every token and a combine matrix [T, E]: only the chosen rows are read.

    Args:
        end: the node that makes the sum.
        rows: [E*T, H] or, not ``tokens_last``, [T*E, H].
        weighted: what multiplies the rows; its K is E.
        combine: the matrix.
        tokens_last: whether the rows lie expert by expert.
    """
    experts = weighted.top_k
    if not isinstance(experts, int):
        return None
    casts = [*combine.found.casts, *weighted.casts]
    different = combine.found.different or weighted.different
    found = replace(
        combine.found,
        scale=combine.found.scale * weighted.scale,
        casts=casts,
        placed=weighted.placed,
        unlike=different,
    )
    base, clamped = index_of(combine.index, None, combine.found)
    problem = combine.problem
    if found.masks:
        problem = problem or f"the weights of {named(end)} are masked: an expert of every route is taken here"
    elif (combine.masked or clamped is None) and not never_negative(base.value):
        problem = problem or (
            f"entries of -1 in '{base.value.name}' would read another token's rows: clamp them (min=0), or let a TopK "
            "choose them"
        )
    index = dense_map(
        clamped or base, experts, found.top_k, tokens_last=tokens_last, none_beyond=combine.found.none_beyond
    )
    return weighted_seed(DENSE_FORM, end, rows, found, index, problem)


def _by_matrix(node: ir.Node) -> Seed | None:
    """A combine matrix [T, R] times the rows [R, H]."""
    gemm = is_op(node, "Gemm") and not {"transA", "transB"} & {
        name for name, attribute in node.attributes.items() if attribute.value
    }
    if is_op(node, "MatMul") or gemm:
        matrix, rows = given(node.inputs[0]), given(node.inputs[1])
    elif is_op(node, "Einsum"):
        read = equation_of(node)
        if read is None:
            return None
        terms, result = read
        if len(terms) != 2 or len(result) != 2 or any(len(term) != 2 for term in terms):
            return None
        first = 0 if terms[0][0] == result[0] else 1
        if terms[first] + terms[1 - first] != result[0] + terms[first][1] * 2 + result[1]:
            return None
        matrix, rows = given(node.inputs[first]), given(node.inputs[1 - first])
    else:
        return None
    rows = before_upcast(rows)
    if rank(matrix) != 2 or not are_rows(rows, 2):
        return None
    combine = combine_of(matrix)
    if combine is None:
        return None
    seed = picked_seed(ONE_HOT_FORM, node, rows, combine.index, combine.found, masked=combine.masked)
    seed.problem = combine.problem or seed.problem
    if gemm:
        _take_gemm(seed, node)
    return seed


def _by_one_hot(node: ir.Node) -> Seed | None:
    """A one-hot matrix, weights and rows in one Einsum."""
    picked = picked_by_einsum(node) if is_op(node, "Einsum") else None
    if picked is None:
        return None
    rows, combine = before_upcast(picked.rows), picked.combine
    if not are_rows(rows, 2, 3, 4) or not isinstance(dim(rows, -1), int):
        return None
    if picked.experts is None:
        seed = picked_seed(ONE_HOT_FORM, node, rows, combine.index, combine.found, masked=combine.masked)
        seed.problem = combine.problem or seed.problem
        return seed
    return chosen_experts(node, _in_routes_order(rows), Found(picked.experts), combine, tokens_last=picked.tokens_last)


def _by_capacity(node: ir.Node) -> Seed | None:
    """The site of GShard's combine, ``tec,ech->th``: rows by expert and place, some of which were dropped."""
    if not is_op(node, "Einsum", "MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    combine, rows = (given(value) for value in node.inputs[:2])
    if is_op(node, "Einsum"):
        read = equation_of(node)
        if read is None or len(read[0]) != 2:
            return None
        terms, result = read
        if result[-1] in terms[0]:
            combine, rows, terms = rows, combine, terms[::-1]
        summed = [letter for letter in terms[0] if letter in terms[1] and letter not in result]
        if len(summed) != 2 or not terms[1].endswith(result[-1]) or result[-1] in terms[0]:
            return None
    else:
        # The exporters' own spelling of that product: both are flattened to a matrix first.
        inner = [without_reshapes(value) for value in (combine, rows)]
        places, wide = (dims(value) or [] for value in inner)
        if min(len(places), len(wide)) < 3 or rank(rows) != 2:
            return None
        if places[-2:] != wide[-3:-1] or dim(rows, -1) != wide[-1] or rank(combine) != 2:
            return None
        combine = inner[0]
    if not are_rows(before_upcast(rows), 2, 3, 4) or not is_routed(combine):
        return None
    return Seed(
        form=CAPACITY_FORM,
        node=node,
        value=node.outputs[0],
        operands={"gemm2_permuted": Operand(before_upcast(rows)), "expert_weights": Operand(combine)},
        problem=(
            f"'{combine.name}' has a place for each token of each expert ({dims(combine)}), and tokens beyond an "
            "expert's capacity are dropped: no map of K rows a token is in the graph; gather the K rows of each token "
            "by their expert and place, with -1 in the map where a token was dropped"
        ),
    )


def _take_gemm(seed: Seed, node: ir.Node) -> None:
    """What a Gemm, into which ONNX Runtime puts the addition that follows a MatMul, does beside the product."""
    seed.scale *= node.attributes.get_float("alpha", 1.0)
    added, scale = input_of(node, 2), node.attributes.get_float("beta", 1.0)
    if added is None or scale == 0:
        return
    here, whole = dims(added) or [], dims(node.outputs[0]) or []
    if len(here) != len(whole) or first_unequal(here, whole) is not None or added.dtype != seed.data or seed.scale == 0:
        seed.problem = seed.problem or f"{named(node)} adds '{added.name}' of shape {dims(added)} to the sum"
    seed.terms.append(Term(Operand(added), scale=scale))
