"""A seed grows forward over scales, casts, reshapes, the shared expert's and the residual's Add, up to the RMSNorm."""

from copy import copy
from dataclasses import dataclass, field

import onnx_ir as ir

from moetrt.segments.reading import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    before_upcast,
    cast_source,
    dim,
    dims,
    is_op,
    named,
    other_input,
    rank,
    readers,
    same_shape,
    scalar,
    sole_reader,
)
from moetrt.segments.rms_norm import RmsNorm, find_rms_norm, what_follows
from moetrt.segments.tail import Operand, Seed, Term

_SHAPE_OPS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")


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
        tail: what the plugin node computes.
        norm: the RMSNorm after it, or None.
        reason: why there is no norm; None where there is one, or where nothing follows at all.
    """

    tail: Tail
    norm: RmsNorm | None
    reason: str | None


class _Stop(Exception):
    """The next node cannot be taken in; the text says why."""


def grow(seed: Seed) -> Grown:
    """Takes in the nodes after ``seed`` one by one until the norm, or until one does not fit."""
    tail = Tail(seed.value, seed.node, seed.scale, seed.terms).copy()
    without_norm: Tail | None = None
    while True:
        if tail.value.dtype == seed.data and len(tail.terms) <= 1:
            without_norm = tail.copy()
        try:
            norm = _norm_of(tail, seed)
            if norm is not None:
                return Grown(tail, norm, None)
            if tail.value.is_graph_output() and not readers(tail.value):
                stopped = None if without_norm is not None and without_norm.value is tail.value else _ends(tail, seed)
                break
            _step(tail, seed)
        except _Stop as stop:
            stopped = str(stop)
            break
    if without_norm is None:
        return Grown(tail, None, stopped or _ends(tail, seed))
    return Grown(without_norm, None, stopped)


def _ends(tail: Tail, seed: Seed) -> str:
    if tail.value.dtype != seed.data:
        return (
            f"the sum '{tail.value.name}' stays {_name(tail.value.dtype)} while the rows are {_name(seed.data)}: "
            "cast it to the rows' dtype before it is stored or normalised"
        )
    return f"no RMSNorm follows the sum '{tail.value.name}', which is a graph output"


def _name(dtype: ir.DataType | None) -> str:
    return dtype.name if dtype is not None else "of unknown dtype"


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
    elif is_op(node, *_SHAPE_OPS):
        _reshape(tail, node)
    elif is_op(node, "Mul", "Div"):
        _scale(tail, node)
    elif is_op(node, "Add"):
        _add(tail, node, seed)
    elif is_op(node, "LayerNormalization"):
        raise _Stop(f"{named(node)} follows: LayerNorm, not RMSNorm")
    else:
        raise _Stop(f"{named(node)} follows, which is no part of a MoE tail")
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
    return f"'{value.name}' is read by {shown}, none of which is an RMSNorm: it must stay as it is"


def _cast(node: ir.Node, seed: Seed) -> None:
    to = node.outputs[0].dtype
    if to == seed.data or (to == ir.DataType.FLOAT and seed.data in HALF_DTYPES):
        return
    raise _Stop(f"{named(node)} makes it {_name(to)} while the rows are {_name(seed.data)}: mixed dtypes")


def _reshape(tail: Tail, node: ir.Node) -> None:
    before, after = tail.value, node.outputs[0]
    width = dim(before, -1)
    if node.inputs[0] is not before:
        raise _Stop(f"{named(node)} takes its shape from the sum")
    if not isinstance(width, int) or dim(after, -1) != width or (rank(after) or 0) < 2:
        raise _Stop(f"{named(node)} makes {dims(after)} of {dims(before)}: the last dimension must stay H, a number")
    tail.shape_nodes.append(node)
    for term in tail.terms:
        term.shape_nodes.append(node)


def _scale(tail: Tail, node: ir.Node) -> None:
    other = other_input(node, tail.value)
    factor = scalar(other)
    if is_op(node, "Div") and (node.inputs[0] is not tail.value or factor == 0):
        raise _Stop(f"{named(node)} divides by the sum, or by 0")
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


def _add(tail: Tail, node: ir.Node, seed: Seed) -> None:
    value = tail.value
    other = other_input(node, value)
    if other is None or other is value:
        raise _Stop(f"{named(node)} adds the sum to itself")
    if len(tail.terms) == 2:
        raise _Stop(
            f"{named(node)} is a third addition after the experts' sum; a shared expert and a residual are taken"
        )
    if not same_shape(value, other):
        raise _Stop(f"{named(node)} adds '{other.name}' of shape {dims(other)} to {dims(value)}: not the same shape")
    term = _term(other, seed)
    if term.gate is not None and any(existing.gate is not None for existing in tail.terms):
        raise _Stop(f"{named(node)} adds a second gated output")
    tail.terms.append(term)


def _term(added: ir.Value, seed: Seed) -> Term:
    """``added`` as a scale, a gate and what they multiply."""
    gated = _gated(added, seed)
    if gated is not None:
        return gated
    value, scale = added, 1.0
    node = value.producer()
    if node is not None and is_op(node, "Mul") and sole_reader(value) is not None:
        for index in (0, 1):
            factor, scaled = scalar(node.inputs[index]), node.inputs[1 - index]
            if factor and scaled is not None and same_shape(scaled, value):
                value, scale = scaled, factor
                break
    value = _in_data(value, seed)
    return Term(Operand(value), scale=scale)


def _in_data(value: ir.Value, seed: Seed) -> ir.Value:
    narrow = before_upcast(value)
    if narrow.dtype == seed.data:
        return narrow
    raise _Stop(
        f"'{value.name}' that is added is {_name(value.dtype)} while the rows are {_name(seed.data)}: "
        "mixed dtypes; keep the rows and the residual in one dtype"
    )


def _gated(added: ir.Value, seed: Seed) -> Term | None:
    """``sigmoid(gate) * shared``, in either order, with Casts and Reshapes around."""
    value = added
    shape_nodes: list[ir.Node] = []
    node = value.producer()
    while node is not None and is_op(node, "Cast", *_SHAPE_OPS):
        before = node.inputs[0]
        if before is None or sole_reader(value) is None or dim(before, -1) != dim(value, -1):
            return None
        if not is_op(node, "Cast"):
            shape_nodes.insert(0, node)
        value, node = before, before.producer()
    if node is None or not is_op(node, "Mul"):
        return None
    for index in (0, 1):
        sigmoid, shared = node.inputs[index], node.inputs[1 - index]
        if sigmoid is None or shared is None:
            continue
        while (source := cast_source(sigmoid)) is not None:
            sigmoid = source
        producer = sigmoid.producer()
        if producer is None or not is_op(producer, "Sigmoid"):
            continue
        logits = before_upcast(producer.inputs[0]) if producer.inputs[0] is not None else None
        if logits is None or dim(logits, -1) != 1 or not same_shape(shared, value):
            continue
        if rank(logits) != rank(shared) or logits.dtype not in (seed.data, ir.DataType.FLOAT):
            continue
        if shared.dtype not in FLOAT_DTYPES:
            continue
        gate = Operand(logits, reshape_to=None if rank(logits) == 2 else (-1, 1))
        return Term(Operand(_in_data(shared, seed)), gate, shape_nodes=shape_nodes)
    return None
