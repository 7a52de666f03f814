"""Routers: the TopK nodes that choose a token's experts, and which of them reach a tail that was found."""

from collections.abc import Iterable

import onnx_ir as ir

from moetrt.segments.reading import dims, is_op, named

_MOST_EXPERTS = 2048
_MOST_ROUTES = 64
_MOST_NODES = 64

_ENDS = ("MatMul", "Gemm", "Conv", "Einsum")
"""Where scores are made: what lies before them belongs to the hidden states."""


def is_routed(weights: ir.Value) -> bool:
    """Whether a TopK chose what ``weights`` holds."""
    seen: set[ir.Node] = set()
    pending = [weights]
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop().producer()
        if node is None or node in seen or is_op(node, *_ENDS):
            continue
        if is_op(node, "TopK"):
            return True
        seen.add(node)
        pending += [value for value in node.inputs if value is not None]
    return False


def unheard_routers(nodes: Iterable[ir.Node], heard: Iterable[ir.Value]) -> list[str]:
    """What a user should know of the TopK nodes that look like routers and reach no tail.

    Args:
        nodes: of the graph.
        heard: the weights and maps of the tails that were found.
    """
    reached: set[ir.Node] = set()
    pending = list(heard)
    while pending:
        node = pending.pop().producer()
        if node is None or node in reached or is_op(node, *_ENDS):
            continue
        reached.add(node)
        pending += [value for value in node.inputs if value is not None]
    notes = []
    for node in nodes:
        chosen = _chosen(node)
        if chosen is not None and node not in reached and _is_read(node):
            notes.append(
                f"{named(node)} chooses {chosen[0]} of {chosen[1]} and reaches no tail that was found: if these are "
                "experts, the sum over them is written in a way that is not known"
            )
    return notes


def _chosen(node: ir.Node) -> tuple[int, int] | None:
    """How many of how many a TopK chooses for each token; None where it is no router's."""
    if not is_op(node, "TopK") or node.inputs[0] is None:
        return None
    scores, values = dims(node.inputs[0]), dims(node.outputs[0])
    if (
        scores is None
        or values is None
        or len(scores) < 2
        or not node.inputs[0].dtype
        or not node.inputs[0].dtype.is_floating_point()
    ):
        return None
    if node.attributes.get_int("axis", -1) not in (-1, len(scores) - 1):
        return None
    chosen, of = values[-1], scores[-1]
    if not isinstance(chosen, int) or not isinstance(of, int):
        return None
    return (chosen, of) if chosen <= _MOST_ROUTES and chosen < of <= _MOST_EXPERTS else None


def _is_read(node: ir.Node) -> bool:
    """Whether a node of the graph reads what was chosen: a TopK that ends the graph samples."""
    return any(output.uses() for output in node.outputs)
