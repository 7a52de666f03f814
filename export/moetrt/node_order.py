"""The nodes of an ONNX file go into an order in which each comes after what it reads, as most readers take them."""

from collections.abc import Iterable, Iterator
from typing import Any

import onnx

from moetrt.errors import InputError


def sort_nodes(proto: onnx.ModelProto) -> None:
    """Sorts the nodes of every graph and function of ``proto`` in place; those that are in order stay as they are.

    ONNX wants them in order. ONNX Runtime and TensorRT take them in any, and ONNX Runtime's float16 converter puts its
    Casts at the end.

    Raises:
        InputError: nodes read each other in a circle.
    """
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _sort(nodes)


def _sort(nodes: Any) -> set[str]:
    """Sorts ``nodes`` and those of their bodies; returns the names that they read."""
    reads = []
    for node in nodes:
        read = set(node.input)
        for body in _bodies(node):
            own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            read |= _sort(body.node) - own - {name for inner in body.node for name in inner.output}
        reads.append(read)
    makers = {name: index for index, node in reversed(list(enumerate(nodes))) for name in node.output if name}
    before = [[makers[name] for name in read if name in makers] for read in reads]
    if any(index <= max(needed, default=-1) for index, needed in enumerate(before)):
        places = iter(_places(nodes, before))
        # The keys are asked for in the nodes' present order.
        nodes.sort(key=lambda _: next(places))
    return {name for read in reads for name in read}


def _places(nodes: Any, before: list[list[int]]) -> list[int]:
    """The place of each node, given those that come before it: as it is, and what it needs just before it."""
    places: dict[int, int] = {}
    for first in range(len(nodes)):
        # The nodes that wait for each other, each with those that it still has to look at.
        waiting: dict[int, Iterator[int]] = {} if first in places else {first: iter(sorted(before[first]))}
        while waiting:
            index, needed = next(reversed(waiting.items()))
            missing = next((other for other in needed if other not in places), None)
            if missing is None:
                del waiting[index]
                places[index] = len(places)
            elif missing in waiting:
                circle = list(waiting)[list(waiting).index(missing) :]
                raise InputError(f"nodes read each other in a circle: {_names(nodes[place] for place in circle)}")
            else:
                waiting[missing] = iter(sorted(before[missing]))
    return [places[index] for index in range(len(nodes))]


def _names(nodes: Iterable[onnx.NodeProto]) -> str:
    names = [f"'{node.name or node.output[0]}'" for node in nodes]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
