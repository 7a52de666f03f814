"""Where the nodes between the tails of a mapped graph are not those of the graph before mapping: the first of them."""

import onnx_ir as ir

from moetrt.onnx_op import operator_of
from moetrt.parity.tails import Tail, tails_of
from moetrt.parity.twins import inputs_of

ALIKE = 0.75
"""The share of nodes that are the same in a mapped graph that was edited and in what mapping its graph gives now: over
0.9 where a few nodes were, and about 0.5 between two exports of a model in other forms."""


def alike(mapped: ir.Model, again: ir.Model) -> bool:
    """Whether two mapped graphs are the same but for a few nodes, going by the nodes whose values both have by name."""
    producers = {value.name: node for node in again.graph for value in node.outputs}
    both = [(node, producers[v.name]) for node in mapped.graph for v in node.outputs if v.name in producers]
    same = [_reads(one) == _reads(other) for one, other in both]
    return sum(same) >= ALIKE * len(same) > 0


def _reads(node: ir.Node) -> tuple[str, list[str | None]]:
    return node.op_type, [None if value is None else value.name for value in node.inputs]


def first_difference(mapped: ir.Model, again: ir.Model, value: ir.Value) -> str:
    """In words, the first node before ``value`` that is another than in the graph before mapping; empty without one.

    Of graphs that are not `alike`, two exports in other forms, nothing is said.

    Args:
        mapped: the mapped graph.
        again: what mapping the graph before it gives now: it has the same nodes beside the tails.
        value: a value of the mapped graph. What lies before the tails that it is computed from is not looked at.
    """
    if not alike(mapped, again):
        return ""
    named = {node.name: node for node in again.graph if node.name}
    producers = {output.name: node for node in again.graph for output in node.outputs if output.name}
    claimed = {named[node.name] for node in mapped.graph if node.name in named}
    nodes = _before(value)
    for node in mapped.graph:
        if node not in nodes or operator_of(node) is not None:
            continue
        other = named.get(node.name or "")
        if other is None:
            # A node that took over another's output has not become that node.
            other = next((producers[v.name] for v in node.outputs if v.name in producers), None)
            other = None if other in claimed else other
        if text := _added(node, tails_of(mapped)) if other is None or operator_of(other) else _changed(node, other):
            return text
    return ""


def _before(value: ir.Value) -> set[ir.Node]:
    """The nodes that a value is computed by, back to the tails."""
    found: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found and operator_of(node) is None:
            found.add(node)
            pending.extend(v for v in inputs_of(node) if v is not None)
    return found


def _label(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name or node.outputs[0].name}'"


def _added(node: ir.Node, tails: list[Tail]) -> str:
    if not node.inputs:
        return ""  # a constant changes nothing by itself: who reads it is named
    text = f"{_label(node)} (not in the graph before mapping)"
    for tail in tails:
        for output, name in zip(tail.node.outputs, tail.spec.outputs, strict=True):
            if output in node.inputs:
                return f"after tail {tail.index + 1} of {len(tails)} ({tail.name}), {text} changes {name}"
    read = next((value.name for value in node.inputs if value is not None), None)
    return text if read is None else f"{text} changes '{read}'"


def _changed(node: ir.Node, other: ir.Node) -> str:
    """How ``node`` differs from what it is in the graph before mapping, ``other``; empty where it does not."""
    if (node.domain, node.op_type) != (other.domain, other.op_type):
        return f"{_label(node)} is {other.op_type} in the graph before mapping"
    for name in {**node.attributes, **other.attributes}:
        mine, theirs = _plain(node, name), _plain(other, name)
        if mine != theirs:
            return f"{name} of {_label(node)} is {mine}, in the graph before mapping {theirs}"
    if len(node.inputs) != len(other.inputs):
        return f"{_label(node)} reads {len(node.inputs)} values, in the graph before mapping {len(other.inputs)}"
    for one, another in zip(node.inputs, other.inputs, strict=True):
        if one is None or another is None:
            if one is not another:
                return f"{_label(node)} has another list of inputs than in the graph before mapping"
        elif one.is_initializer() and another.is_initializer():
            if not _equal(one, another):
                return f"weight '{one.name}' of {_label(node)} is not the weight of the graph before mapping"
        elif _origin(one) != _origin(another) and one.name != another.name:
            return f"{_label(node)} reads '{one.name}', in the graph before mapping '{another.name}'"
    return ""


def _plain(node: ir.Node, name: str) -> object:
    """An attribute as a value that can be compared and printed; inner graphs are left out."""
    attribute = node.attributes.get(name)
    if attribute is None or attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return None
    value = attribute.value
    return value.numpy().tolist() if attribute.type == ir.AttributeType.TENSOR else value


def _equal(one: ir.Value, other: ir.Value) -> bool:
    mine, theirs = one.const_value, other.const_value
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()


def _origin(value: ir.Value) -> tuple[str, int] | None:
    """Which output of which node a value is, whatever its name."""
    node = value.producer()
    return None if node is None or not node.name else (node.name, value.index() or 0)
