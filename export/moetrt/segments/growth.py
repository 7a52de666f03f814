"""A seed grows forward over scales, casts, reshapes, the shared expert's and the residual's Add, up to the RMSNorm."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from moetrt.segments.constants import scalar
from moetrt.segments.reading import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    SHAPE_OPS,
    before_upcast,
    dim,
    dims,
    dtype_name,
    is_op,
    keeps,
    keeps_width,
    named,
    other_input,
    rank,
    readers,
    same_shape,
    sole_reader,
)
from moetrt.segments.rms_norm import RmsNorm, find_rms_norm, what_follows
from moetrt.segments.sizes import first_unequal, has_other_length, is_named, is_said, surely_equal
from moetrt.segments.tail import Operand, Seed, Term, Write, expanded, written
from moetrt.segments.untyped import unknown_of

_WIDENED = "InsertedPrecisionFreeCast_"
"""What ONNX Runtime calls values that it computes in float32 because the CPU has no operator for float16."""


@dataclass
class Tail:
    """As far as a seed has grown: ``value = scale * routed + sum of terms``, reshaped.

    Attributes:
        node: the node that makes ``value``.
        shape_nodes: the Reshapes between ``[T, H]`` and the shape of ``value``.
    """

    value: ir.Value
    node: ir.Node
    scale: float
    terms: list[Term] = field(default_factory=list)
    shape_nodes: list[ir.Node] = field(default_factory=list)

    def copy(self) -> "Tail":
        terms = [copy(term) for term in self.terms]
        for term in terms:
            term.shape_nodes = list(term.shape_nodes)
        return Tail(self.value, self.node, self.scale, terms, list(self.shape_nodes))


@dataclass(frozen=True)
class Grown:
    """What became of a seed.

    Attributes:
        tail: what one plugin node computes; None where none does.
        norm: the RMSNorm after it, or None.
        reason: why there is no norm; None where there is one, or where nothing follows at all.
        seed: the seed of ``tail``: the one that grew, or that with its rows in float32.
    """

    tail: Tail | None
    norm: RmsNorm | None
    reason: str | None
    seed: Seed


class _Stop(Exception):
    """The next node cannot be taken in; the text says why."""


class _OtherTokens(_Stop):
    """Neither can the sum: the graph does not show that its rows are the weights' T times K."""


def grow(seed: Seed) -> Grown:
    """Takes in the nodes after ``seed`` one by one until the norm, or until one does not fit.

    Without a norm the operator adds one term, and gives what it gives in the rows' dtype. Where the graph adds two in
    float32 before it rounds, the sum with the first one stays in float32, and so the second one's Add adds what it did.
    """
    tail = Tail(seed.value, seed.node, seed.scale, seed.terms).copy()
    without_norm: Tail | None = None
    unrounded: Tail | None = None
    rounded: ir.Value | None = None
    stopped: str | None = None
    while True:
        if len(tail.terms) <= 1:
            if tail.value.dtype == seed.data:
                without_norm = tail.copy()
            elif tail.value.dtype == ir.DataType.FLOAT:
                unrounded = tail.copy()
        elif tail.value.dtype == seed.data:
            rounded = rounded or tail.value
        try:
            norm = _norm_of(tail, seed)
            if norm is not None:
                return Grown(tail, norm, None, seed)
            if tail.value.is_graph_output() and not readers(tail.value):
                stopped = None if without_norm is not None and without_norm.value is tail.value else _ends(tail, seed)
                break
            _step(tail, seed)
        except _OtherTokens as stop:
            return Grown(None, None, str(stop), seed)
        except _Stop as stop:
            stopped = str(stop)
            break
    if without_norm is not None:
        return Grown(without_norm, None, stopped, seed)
    if rounded is None or unrounded is None:
        return Grown(None, None, stopped or _ends(tail, seed), seed)
    wide = _in_float32(seed)
    unrounded.terms = [_term_in_float32(term) for term in unrounded.terms]
    reason = (
        f"{stopped}; two terms are added in FLOAT before '{rounded.name}' is rounded, and only one is taken: the "
        "sum stays FLOAT, and the rows are widened"
    )
    return Grown(unrounded, None, reason, wide)


def _in_float32(seed: Seed) -> Seed:
    """``seed`` with its rows and weights widened to float32: its sum is not rounded."""
    operands = {
        name: operand if name == "expanded_idx_to_permuted_idx" else replace(operand, cast_to=ir.DataType.FLOAT)
        for name, operand in seed.operands.items()
    }
    return replace(seed, operands=operands)


def _term_in_float32(term: Term) -> Term:
    gate = None if term.gate is None else replace(term.gate, cast_to=ir.DataType.FLOAT)
    return replace(term, operand=replace(term.operand, cast_to=ir.DataType.FLOAT), gate=gate)


def _ends(tail: Tail, seed: Seed) -> str:
    if tail.value.dtype != seed.data:
        widened = (tail.value.name or "").startswith(_WIDENED)
        advice = (
            "ONNX Runtime widened this file when it optimised it for a CPU: map it before it is optimised"
            if widened
            else "cast it to the rows' dtype before it is stored or normalised"
        )
        return (
            f"the sum '{tail.value.name}' stays {dtype_name(tail.value.dtype)} while the rows are "
            f"{dtype_name(seed.data)}: {advice}"
        )
    return f"no RMSNorm follows the sum '{tail.value.name}', which is a graph output"


def _norm_of(tail: Tail, seed: Seed) -> RmsNorm | None:
    """The norm that reads the sum as it stands; an Exception where it is one that must not be taken."""
    value = tail.value
    if value.dtype != seed.data or dims(value) is None:
        return None
    found = find_rms_norm(value)
    if isinstance(found, str):
        raise _Stop(found)
    if found is None:
        return None
    private = not value.is_graph_output() and _reads_only_for_norm(value, found)
    follows = what_follows(found.result)
    if follows is not None and (private or follows.startswith("a bias")):
        raise _Stop(follows)
    return found


def _reads_only_for_norm(value: ir.Value, norm: RmsNorm) -> bool:
    """Whether everything that reads ``value`` does so on the way to the norm's result."""
    end = norm.result.producer()
    pending = readers(value)
    seen: set[ir.Node] = set()
    while pending:
        node = pending.pop()
        if node is end or node in seen:
            continue
        seen.add(node)
        # The longest spelling of a norm has fewer nodes than this.
        if len(seen) > 16 or any(output.is_graph_output() for output in node.outputs):
            return False
        after = [reader for output in node.outputs for reader in readers(output)]
        if not after:
            return False
        pending.extend(after)
    return True


def _step(tail: Tail, seed: Seed) -> None:
    """Takes in the one node that reads the sum."""
    value = tail.value
    node = sole_reader(value)
    if node is None:
        raise _Stop(_many_readers(value) if value.dtype == seed.data else _ends(tail, seed))
    if is_op(node, "Identity") or (is_op(node, "Dropout") and len(node.inputs) == 1):
        pass
    elif is_op(node, "Cast"):
        _cast(node, seed)
    elif is_op(node, *SHAPE_OPS):
        _reshape(tail, node)
    elif is_op(node, "Mul", "Div"):
        _scale(tail, node)
    elif is_op(node, "Add"):
        _add(tail, node, seed)
    elif is_op(node, "Expand", "Tile", "MatMul") and _is_spread(value, node):
        raise _Stop(_spreads(node))
    else:
        raise _Stop(
            f"{named(node)} follows, which is no part of a MoE tail; where the model has no norm after its experts, "
            "the sum alone is all there is to map"
        )
    tail.value, tail.node = node.outputs[0], node


def _many_readers(value: ir.Value) -> str:
    found = [named(node) for node in readers(value)]
    if value.is_graph_output():
        found.append("the graph's outputs")
    if not found:
        return f"nothing reads '{value.name}'"
    if len(found) == 1:
        return f"'{value.name}' is read by {found[0]} in an inner graph"
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (
        f"'{value.name}' is read by {shown}, none of which is an RMSNorm: it must stay as it is; where the model has "
        "no norm after its experts, the sum alone is all there is to map"
    )


def _cast(node: ir.Node, seed: Seed) -> None:
    to, summed = node.outputs[0].dtype, node.inputs[0].dtype if node.inputs[0] is not None else None
    if not keeps(summed, seed.data):
        raise _Stop(
            f"the sum that {named(node)} reads is {dtype_name(summed)} while the rows are {dtype_name(seed.data)}: "
            "mixed dtypes"
        )
    if to == seed.data or (to == ir.DataType.FLOAT and seed.data in HALF_DTYPES):
        return
    raise _Stop(f"{named(node)} makes it {dtype_name(to)} while the rows are {dtype_name(seed.data)}: mixed dtypes")


def _reshape(tail: Tail, node: ir.Node) -> None:
    before, after = tail.value, node.outputs[0]
    if node.inputs[0] is not before:
        raise _Stop(f"{named(node)} takes its shape from the sum")
    if not keeps_width(node, before):
        raise _Stop(f"{named(node)} makes {dims(after)} of {dims(before)}: the last dimension must stay H, a number")
    tail.shape_nodes.append(node)
    for term in tail.terms:
        term.shape_nodes.append(node)


def _scale(tail: Tail, node: ir.Node) -> None:
    other = other_input(node, tail.value)
    factor = scalar(other)
    if is_op(node, "Div") and (node.inputs[0] is not tail.value or factor == 0):
        raise _Stop(f"{named(node)} divides by the sum, or by 0")
    if factor is None and _is_spread(tail.value, node):
        raise _Stop(_spreads(node))
    if factor is None or other is None:
        raise _Stop(f"{named(node)} multiplies by '{other.name if other else ''}', which is not a constant number")
    if not same_shape(tail.value, node.outputs[0]):
        raise _Stop(f"{named(node)} changes the shape from {dims(tail.value)} to {dims(node.outputs[0])}")
    factor = 1.0 / factor if is_op(node, "Div") else factor
    if factor == 0:
        raise _Stop(f"{named(node)} multiplies by 0")
    tail.scale *= factor
    for term in tail.terms:
        term.scale *= factor


def _is_spread(value: ir.Value, node: ir.Node) -> bool:
    """Whether ``node`` repeats ``[..., 1, H]`` along the dimension of 1, each time with another factor or none."""
    after = node.outputs[0]
    return dim(value, -2) == 1 and dim(after, -2) not in (1, None) and dim(after, -1) == dim(value, -1)


def _spreads(node: ir.Node) -> str:
    return (
        f"hyper-connections: {named(node)} spreads the MoE output over {dim(node.outputs[0], -2)} residual streams; "
        "one residual of the MoE output's own shape is taken"
    )


def _add(tail: Tail, node: ir.Node, seed: Seed) -> None:
    value = tail.value
    other = other_input(node, value)
    if other is None or other is value:
        raise _Stop(f"{named(node)} adds the sum to itself")
    if len(tail.terms) == 2:
        raise _Stop(
            f"{named(node)} is a third addition after the experts' sum; a shared expert and a residual are taken"
        )
    if other.dtype is None or dims(other) is None:
        raise _Stop(f"{named(node)} adds a value, but {unknown_of(other)}")
    if not same_shape(value, other):
        raise _Stop(f"{named(node)} adds '{other.name}' of shape {dims(other)} to {dims(value)}: not the same shape")
    sizes = _sizes(tail, seed)
    unequal = first_unequal(sizes, dims(other) or [])
    is_of_width = bool(sizes) and surely_equal(sizes[-1], dim(other, -1))
    if unequal is not None and (
        tail.shape_nodes
        or len(sizes) != 2
        or not is_of_width
        or _may_differ(unequal, seed)
        or has_other_length(other, sizes[0], names_agree=seed.own_body)
    ):
        in_order = "expanded_idx_to_permuted_idx" not in seed.operands and sizes != dims(value)
        raise (_OtherTokens if in_order else _Stop)(_may_be_broadcast(node, other, unequal))
    term = _term(other, seed) if unequal is None else _spread(_term(other, seed), seed, sizes)
    if term.gate is not None and any(existing.gate is not None for existing in tail.terms):
        raise _Stop(f"{named(node)} adds a second gated output")
    tail.terms.append(term)


def _may_differ(unequal: tuple[int | str | None, int | str | None], seed: Seed) -> bool:
    """Whether the graph says both of two dimensions, not as one, and no operator's body says that they are one."""
    return all(map(is_said, unequal)) and not seed.own_body


def _sizes(tail: Tail, seed: Seed) -> list[int | str | None]:
    """The dimensions of the sum; T is that of the weights where the sum's own is not known."""
    sizes = dims(tail.value) or []
    weights = seed.operands["expert_weights"]
    if sizes and not is_said(sizes[0]) and len(sizes) == 2 and not tail.shape_nodes and _is_plain(weights):
        sizes[0] = dim(weights.value, 0)
    return sizes


def _is_plain(weights: Operand) -> bool:
    """Whether the operator reads the weights as the graph has them, [T, K]."""
    return rank(weights.value) == 2 and weights.make is None and weights.reshape_to is None


def _may_be_broadcast(node: ir.Node, added: ir.Value, unequal: tuple[int | str | None, int | str | None]) -> str:
    mine, theirs = (
        f"'{size}'" if is_named(size) else str(size) if isinstance(size, int) else "unknown" for size in unequal
    )
    return (
        f"{named(node)} adds '{added.name}', one of whose dimensions is {theirs} where the sum has {mine}: either may "
        "be 1, and would be repeated; give both the same name or number"
    )


def _spread(term: Term, seed: Seed, sizes: Sequence[int | str | None]) -> Term:
    """``term``, of [U, H], repeated where it has one row for all of the T tokens; where U is T, it is as it was."""
    operand, gate = term.operand, term.gate
    here = dims(operand.value) or []
    if len(here) != 2 or first_unequal(here, sizes) is not None:
        operand = _over_tokens(operand, seed)
    if gate is not None and gate.make is None:
        gate = _over_tokens(gate, seed)
    return replace(term, operand=operand, gate=gate, shape_nodes=[])


def _over_tokens(operand: Operand, seed: Seed) -> Operand:
    """``operand`` as [T, its last dimension]."""
    weights, width = seed.operands["expert_weights"], dim(operand.value, -1)
    int64 = ir.DataType.INT64

    def numbers(write: Write, *elements: int) -> ir.Value:
        return write("Constant", [], {"value": ir.tensor(list(elements), dtype=int64)}, int64, [len(elements)])

    def make(write: Write) -> ir.Value:
        value = written(operand, write)
        if rank(value) != 2 and isinstance(width, int):
            value = write("Reshape", [value, numbers(write, -1, width)], {}, value.dtype, [None, width])
        tokens = write("Shape", [written(replace(weights, cast_to=None), write)], {"start": 0, "end": 1}, int64, [1])
        shape = write("Concat", [tokens, numbers(write, 1)], {"axis": 0}, int64, [2])
        count = dim(weights.value, 0) if _is_plain(weights) else None
        return expanded(write, value, shape, [count, width])

    return Operand(operand.value, make=make)


def _term(added: ir.Value, seed: Seed) -> Term:
    """``added`` as a scale, a gate and what they multiply, from behind Casts and Reshapes that only it goes through."""
    value, scale, is_product = added, 1.0, False
    shape_nodes: list[ir.Node] = []
    scaled: Term | None = None
    while True:
        gated = _gated(value, seed)
        if gated is not None:
            shared, gate = gated
            return Term(Operand(_in_data(shared, seed)), gate, scale, shape_nodes)
        node = value.producer()
        if node is None or sole_reader(value) is None:
            break
        factor, before = _unscaled(node)
        if factor:
            scale, is_product = scale * factor, True
        elif is_op(node, *SHAPE_OPS) and (before := node.inputs[0]) is not None and keeps_width(node, before):
            shape_nodes = [node, *shape_nodes]
        elif is_op(node, "Cast", "Identity") and node.inputs[0] is not None:
            before = node.inputs[0]
        else:
            break
        if before is None or {value.dtype, before.dtype} - {seed.data, ir.DataType.FLOAT}:
            break
        value = before
        narrow = _narrowed(value, seed)
        if is_product and narrow.dtype == seed.data:
            scaled = Term(Operand(narrow), None, scale, shape_nodes)
    return scaled or Term(Operand(_in_data(added, seed)))


def _unscaled(node: ir.Node) -> tuple[float | None, ir.Value | None]:
    """The number that a Mul or Div by a constant multiplies by, not 0, and what it multiplies."""
    if not is_op(node, "Mul", "Div"):
        return None, None
    for index in (1, 0) if is_op(node, "Mul") else (1,):
        factor, before = scalar(node.inputs[index]), node.inputs[1 - index]
        if factor and before is not None and same_shape(before, node.outputs[0]):
            return (1.0 / factor if is_op(node, "Div") else factor), before
    return None, None


def _narrowed(value: ir.Value, seed: Seed) -> ir.Value:
    """What ``value`` was widened from, where that has the rows' dtype."""
    narrow = before_upcast(value)
    return narrow if narrow.dtype == seed.data else value


def _in_data(value: ir.Value, seed: Seed) -> ir.Value:
    narrow = _narrowed(value, seed)
    if narrow.dtype == seed.data:
        return narrow
    name, data = dtype_name(value.dtype), dtype_name(seed.data)
    raise _Stop(
        f"'{value.name}' that is added is {name} while the rows are {data}: mixed dtypes; keep both the residual "
        f"stream and the rows in {name}, or both in {data}"
    )


def _gated(value: ir.Value, seed: Seed) -> tuple[ir.Value, Operand] | None:
    """The shared output and its gate, where ``value`` is ``sigmoid(gate) * shared`` in either order."""
    node = value.producer()
    if node is None or not is_op(node, "Mul"):
        return None
    for index in (0, 1):
        sigmoid, shared = node.inputs[index], node.inputs[1 - index]
        if sigmoid is None or shared is None:
            continue
        factors = sigmoid
        while (step := factors.producer()) is not None and is_op(step, "Cast", *SHAPE_OPS):
            before = step.inputs[0]
            if before is None or dim(factors, -1) != 1 or dim(before, -1) != 1:
                break
            if is_op(step, "Cast") and not keeps(factors.dtype, seed.data):
                break  # the operator does not round its gate: the product is added as it is
            factors = before
        producer = factors.producer()
        if producer is None or not is_op(producer, "Sigmoid") or producer.inputs[0] is None:
            continue
        logits = _narrowed(producer.inputs[0], seed)
        if dim(logits, -1) != 1 or not same_shape(shared, value) or rank(sigmoid) != rank(shared):
            continue
        if logits.dtype not in (seed.data, ir.DataType.FLOAT) or shared.dtype not in FLOAT_DTYPES:
            continue
        gate = Operand(logits, reshape_to=None if rank(logits) == 2 else (-1, 1))
        unequal = first_unequal((dims(sigmoid) or [])[:-1], (dims(shared) or [])[:-1])
        if unequal is not None:
            if len(dims(shared) or []) != 2 or _may_differ(unequal, seed):
                continue
            gate = _over_tokens(gate, seed)
        return shared, gate
    return None
