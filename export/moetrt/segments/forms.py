"""The forms in which a graph may spell the finalize, in the order in which they are tried at a node."""

import onnx_ir as ir

from moetrt.segments import captured, gather, loop, scatter
from moetrt.segments.tail import Seed


def seed_at(node: ir.Node) -> Seed | None:
    """The seed of the tail that begins at ``node``, or None.

    Raises:
        ValueError: the node is one of moetrt's own, and its inputs or attributes are not what the operator takes.
    """
    for form in (captured, gather, loop, scatter):
        seed = form.seed_at(node)
        if seed is not None:
            return seed
    return None
