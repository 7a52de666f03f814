"""Whether nodes that are to be replaced read nothing but what replaces them reads: nothing is dropped in silence."""

from collections.abc import Iterable

import onnx_ir as ir

from moetrt.segments.constants import is_constant
from moetrt.segments.reading import is_op

_MOST_NODES = 4096
"""Of one tail. A walk that gets past an input of the replaced nodes ends in the model's own inputs, or here."""

_SIZES_ONLY = {"Shape": (0,), "Size": (0,), "CastLike": (1,)}
"""The inputs of which an operator reads the size or the dtype alone, which the forms compare by themselves."""


def unaccounted(replaced: Iterable[ir.Value], added: Iterable[ir.Node], known: Iterable[ir.Value]) -> str | None:
    """What the nodes that make ``replaced`` read, and ``added`` do not, in words; None where there is nothing.

    From ``replaced`` back, each way must end in a value that an added node reads, in a constant, or in ``known``.

    Args:
        replaced: the values that the added nodes will give instead.
        added: the nodes that replace those that make them.
        known: what a form has shown to follow from the values that the added nodes read.
    """
    nodes = list(added)
    made = {output for node in nodes for output in node.outputs}
    ends = {value for node in nodes for value in node.inputs if value is not None} - made | set(known)
    readers: dict[ir.Value, ir.Node] = {}
    pending = list(replaced)
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in seen or value in ends or is_constant(value):
            continue
        seen.add(value)
        node = value.producer()
        if node is None or len(seen) > _MOST_NODES:
            reader = readers.get(value)
            return f"'{value.name}'" + (
                f", which {reader.op_type} '{reader.name}' reads," if reader is not None else ""
            )
        unread = _SIZES_ONLY.get(node.op_type, ()) if is_op(node, *_SIZES_ONLY) else ()
        for position, source in enumerate(node.inputs):
            if source is not None and position not in unread:
                readers.setdefault(source, node)
                pending.append(source)
    return None
