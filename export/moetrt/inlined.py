"""The operators' own bodies where another tool has inlined them: what an attribute chose is taken, types are plain.

ONNX Runtime's offline optimisation, onnxscript's and onnx's inliner put a mapped file's functions into its graph.
"""

from collections.abc import Iterable

import onnx_ir as ir

from moetrt.segments.constants import constant
from moetrt.segments.reading import dims, is_op
from moetrt.spec import OPERATORS

_INLINED = "_inlfunc_"
"""What ONNX Runtime puts before an operator's name and a name in its function, for all that it inlines."""


def plain_choices(model: ir.Model) -> None:
    """Takes Where nodes with a constant condition, and CastLike nodes, for what they give.

    `moetrt.definition` chooses by attributes, which are constants once the function is inlined. The nodes are
    replaced only where the result has the shape and dtype of what was chosen.
    """
    prefixes = tuple(_INLINED + name for name in OPERATORS)
    for graph in model.graphs():
        _rename_values(list(graph.initializers.values()), prefixes)
        for node in list(graph):
            if node.graph is None:
                continue
            _rename(node, prefixes)
            if is_op(node, "Where"):
                _take_choice(node)
            elif is_op(node, "CastLike"):
                _plain_cast(node)


def _rename(node: ir.Node, prefixes: tuple[str, ...]) -> None:
    """Leaves the names to ONNX Runtime, which takes the same again when it inlines the function that is mapped to."""
    if node.name and node.name.startswith(prefixes):
        node.name = node.name.removeprefix("_")
    _rename_values(node.outputs, prefixes)


def _rename_values(values: Iterable[ir.Value], prefixes: tuple[str, ...]) -> None:
    for value in values:
        if value.name and value.name.startswith(prefixes) and not value.is_graph_output():
            value.name = value.name.removeprefix("_")


def _take_choice(node: ir.Node) -> None:
    condition, output = constant(node.inputs[0]), node.outputs[0]
    if condition is None or condition.size != 1 or output.is_graph_output():
        return
    chosen, other = node.inputs[1:] if bool(condition.numpy().ravel()[0]) else node.inputs[:0:-1]
    if chosen is None or other is None or chosen.dtype != output.dtype:
        return
    shape = dims(chosen)
    known = shape is not None and None not in shape and shape == dims(output)
    if not known and (condition.shape.numpy() or _before_casts(chosen) is not _before_casts(other)):
        return
    output.replace_all_uses_with(chosen)
    _remove(node)


def _before_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and is_op(node, "Cast") and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _plain_cast(node: ir.Node) -> None:
    like, output = node.inputs[1], node.outputs[0]
    if like is None or like.dtype is None or output.is_graph_output() or node.graph is None:
        return
    cast = ir.node("Cast", [node.inputs[0]], {"to": like.dtype}, name=node.name)
    cast.outputs[0].dtype, cast.outputs[0].shape, cast.outputs[0].name = like.dtype, output.shape, output.name
    node.graph.insert_before(node, cast)
    output.replace_all_uses_with(cast.outputs[0])
    _remove(node)


def _remove(node: ir.Node) -> None:
    """Removes ``node``, which nobody reads, and what only it needed."""
    pending = [node]
    while pending:
        unread = pending.pop()
        if unread.graph is None or any(value.uses() or value.is_graph_output() for value in unread.outputs):
            continue
        makers = [value.producer() for value in unread.inputs if value is not None]
        unread.graph.remove(unread, safe=True)
        pending += [maker for maker in makers if maker is not None]
