"""A finalize that adds weighted rows into the tokens: ``zeros.index_add(0, token, rows * weights)``."""

from dataclasses import dataclass, replace

import onnx_ir as ir

from moetrt.segments.constants import ints, scalar
from moetrt.segments.gather import sorted_source
from moetrt.segments.indices import permutation_behind, tokens_of_routes
from moetrt.segments.maps import inverse_map
from moetrt.segments.reading import before_upcast, dim, input_of, is_op, named, other_input, rank, readers, sole_reader
from moetrt.segments.routers import by_chosen_experts
from moetrt.segments.routes import (
    Found,
    NotThis,
    PerRoute,
    Rows,
    are_rows,
    given,
    is_repeated,
    strip,
    unit_weights,
    walk_back,
    weighted_seed,
    without_reshapes,
)
from moetrt.segments.sizes import surely_equal
from moetrt.segments.tail import Operand, Seed, Term

FORM = "index_add"


@dataclass(frozen=True)
class _Added:
    """One node that adds rows into tokens.

    Attributes:
        into: what they are added to.
        token: the token of each row.
        rows: the weighted rows.
        overwrites: whether a later row of a token takes the place of an earlier one.
    """

    into: ir.Value
    token: ir.Value
    rows: ir.Value
    overwrites: bool


def seed_at(node: ir.Node) -> Seed | None:
    """The seed that a ScatterElements or ScatterND makes, or None."""
    if not is_op(node, "ScatterElements", "ScatterND"):
        return None
    try:
        return _seed(node)
    except NotThis:
        return None


def _seed(node: ir.Node) -> Seed | None:
    added = _added(node)
    if added is None:
        return None
    if _by_expert(added):
        return _loop_over_experts(node, added)
    if added.overwrites:
        return _overwritten(node, added)
    found = Found()
    rows = walk_back(added.rows, found)
    data = before_upcast(rows.value) if rows.value is not None else None
    if data is None or not are_rows(data, 2, 3) or dim(data, -1) != dim(node.outputs[0], -1):
        return None
    if not isinstance(dim(data, -1), int):
        return None
    return _of_routes(node, added, rows, data, found)


def _added(node: ir.Node) -> _Added | None:
    into, index, rows = (given(node.inputs[position]) for position in range(3))
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("add", "none") or rank(into) != 2 or rank(rows) != 2:
        return None
    # What only puts values at places (an image's embeddings among a text's) is no sum.
    if reduction == "none" and (scalar(into) != 0 or not _is_weighted(rows)):
        return None
    if is_op(node, "ScatterElements"):
        if node.attributes.get_int("axis", 0) not in (0, -2):
            return None
        rows = _before_cut(rows, index)
        index = _repeated_along_columns(index)
    if rank(index) != 2 or dim(index, -1) != 1:
        return None
    return _Added(into, index, rows, reduction == "none")


def _is_weighted(rows: ir.Value) -> bool:
    found = Found()
    walk_back(rows, found)
    return bool(found.weights)


def _overwritten(node: ir.Node, added: _Added) -> Seed | None:
    """The site of a sum that is none, because each row takes the place of the token's row before; None otherwise."""
    order = permutation_behind(added.token)
    top_k = tokens_of_routes(added.token, order, dim(added.into, 0))
    if top_k is None or top_k == 1:
        return None
    return Seed(
        form=FORM,
        node=node,
        value=node.outputs[0],
        operands={"gemm2_permuted": Operand(without_reshapes(added.rows))},
        problem=(
            f"{named(node)} overwrites a token's rows one by one instead of adding them (reduction 'none'), so the "
            "file gives other numbers than the model: TorchScript's exporter writes index_add and index_put so; use "
            "scatter_add, or torch.onnx.export(dynamo=True)"
        ),
    )


def _before_cut(rows: ir.Value, index: ir.Value) -> ir.Value:
    """The rows before TorchScript cut them to as many as there are indices, the first ones: no other is read."""
    node = rows.producer()
    if node is None or not is_op(node, "Slice") or set(ints(node.inputs[1]) or [1]) != {0}:
        return rows
    ends = given(node.inputs[2]).producer()
    source, axes, steps = given(node.inputs[0]), ints(input_of(node, 3)), ints(input_of(node, 4))
    is_cut = ends is not None and is_op(ends, "Shape") and not ends.attributes and ends.inputs[0] is index
    is_whole = axes in (None, [0, 1]) and set(steps or [1]) == {1} and rank(source) == 2
    has_columns = isinstance(dim(source, -1), int) and dim(source, -1) == dim(index, -1)
    return source if is_cut and is_whole and has_columns else rows


def _repeated_along_columns(index: ir.Value) -> ir.Value:
    """The token of each row, [N, 1], before it was given to each of the row's columns."""
    node = index.producer()
    while node is not None and is_op(node, "Expand"):
        source = given(node.inputs[0])
        if rank(source) != rank(index) or dim(source, -1) not in (1, dim(index, -1)):
            break
        index, node = source, source.producer()
    return index


def _of_routes(node: ir.Node, added: _Added, rows: Rows, data: ir.Value, found: Found) -> Seed | None:
    order = permutation_behind(added.token)
    top_k = tokens_of_routes(added.token, order, dim(added.into, 0))
    in_order = order is None and not found.weights
    if is_repeated(data):
        return None
    if not found.weights and (top_k is None or (in_order and not by_chosen_experts(data, top_k))):
        # Rows without weights are a MoE's where they lie as the routes were sorted, or where a router chose experts.
        return None
    problem: str | None = None
    if top_k is None:
        problem = (
            f"the graph does not show that '{added.token.name}', the token of each row, names each token K times in "
            "the order of the routes or of their argsort: gather the rows by a map instead"
        )
    elif rows.index is not None or rows.order is not None or found.masks or found.kept:
        problem = f"the rows that {named(node)} adds are picked or masked before: gather them by a map instead"
    elif order is not None:
        for number, weights in enumerate(found.weights):
            source = sorted_source(weights.value, order)
            if source is not None:
                found.weights[number] = strip(PerRoute(source), found)
            elif weights.over is None and surely_equal(dim(weights.value, 0), dim(order, 0)):
                found.weights[number] = replace(weights, by_row=True)
            else:
                problem = f"the weights '{weights.value.name}' are not sorted as the rows are, by '{order.name}'"
    found.top_k = top_k
    index = inverse_map(order, top_k) if order is not None and top_k is not None else None
    end = _with_zeros(node)
    seed = weighted_seed(FORM, end, data, found, index, problem)
    if in_order and top_k is not None:
        seed.operands["expert_weights"] = unit_weights(added.rows, top_k)
    if scalar(added.into) != 0:
        if added.into.dtype != data.dtype and problem is None:
            seed.problem = (
                f"the rows are {data.dtype}; what they are added to, '{added.into.name}', is {added.into.dtype}"
            )
        seed.terms.append(Term(Operand(added.into)))
    return seed


def _with_zeros(node: ir.Node) -> ir.Node:
    """``node``, or the addition of zeros that follows it, as TorchScript writes index_add."""
    value = node.outputs[0]
    reader = sole_reader(value)
    if reader is not None and is_op(reader, "Add") and scalar(other_input(reader, value)) == 0:
        return reader
    return node


def _by_expert(added: _Added) -> bool:
    """Whether the rows are those of one expert: its tokens are searched for."""
    pending, seen = [added.token], 0
    while pending and seen < 32:
        seen += 1
        node = pending.pop().producer()
        if node is None:
            continue
        if is_op(node, "NonZero"):
            return True
        if not is_op(node, "TopK"):
            pending += [value for value in node.inputs if value is not None]
    return False


def _adds_an_expert(node: ir.Node) -> bool:
    added = _added(node) if is_op(node, "ScatterElements", "ScatterND") else None
    return added is not None and _by_expert(added)


def _another_follows(node: ir.Node) -> bool:
    """Whether the rows of another expert are added to what ``node`` made, in it or by an Add after it."""
    pending, hops = readers(node.outputs[0]), 0
    while pending and hops < 8:
        hops += 1
        reader = pending.pop(0)
        if is_op(reader, "ScatterElements", "ScatterND") and _adds_an_expert(reader):
            return True
        if is_op(reader, "Add", "Cast", "Identity"):
            made = [value.producer() for value in reader.inputs if value is not None]
            if any(other is not None and other is not node and _adds_an_expert(other) for other in made):
                return True
            pending += readers(reader.outputs[0])
    return False


def _loop_over_experts(node: ir.Node, added: _Added) -> Seed | None:
    """The site of a loop over experts, at its last addition; None at the others."""
    if _another_follows(node):
        return None
    rows = without_reshapes(added.rows)
    return Seed(
        form=FORM,
        node=node,
        value=node.outputs[0],
        operands={"gemm2_permuted": Operand(rows)},
        problem=(
            "each expert's tokens are searched for (NonZero) and its rows are added one expert after another, so no "
            "map says which rows belong to a token: export the experts batched, for instance with "
            'model.set_experts_implementation("batched_mm") in Transformers, or with moetrt export'
        ),
    )
