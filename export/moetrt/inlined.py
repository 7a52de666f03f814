"""The operators' own bodies where another tool has inlined them: what an attribute chose is taken, types are plain.

ONNX Runtime's offline optimisation, onnxscript's and onnx's inliner put a mapped file's functions into its graph.
"""

from collections.abc import Iterable

import onnx_ir as ir

from moetrt.graphs import graphs_of
from moetrt.removal import remove_dead
from moetrt.segments.constants import constant, ints, scalar
from moetrt.segments.reading import dim, dims, elements, is_op, rank
from moetrt.spec import OPERATORS

_INLINED = "_inlfunc_"
"""What ONNX Runtime puts before an operator's name and a name in its function, for all that it inlines."""


def plain_choices(model: ir.Model) -> bool:
    """Takes a Where with a constant condition, a CastLike, a sum with 0 and a known width for what they give.

    `moetrt.definition` chooses by attributes, which are constants once the function is inlined. The nodes are
    replaced only where the result has the shape and dtype of what was chosen. A K that is computed of known sizes
    becomes a number too, in any graph.

    Returns:
        whether shapes may now be known that were not.
    """
    shapes_changed = False
    prefixes = tuple(_INLINED + name for name in OPERATORS)
    for graph in graphs_of(model):
        _rename_values(list(graph.initializers.values()), prefixes)
        for node in list(graph):
            if node.graph is None:
                continue
            _rename(node, prefixes)
            if is_op(node, "Where"):
                shapes_changed |= _take_choice(node)
            elif is_op(node, "CastLike"):
                _plain_cast(node)
            elif is_op(node, "Add"):
                _take_sum_with_zero(node)
            elif is_op(node, "Slice"):
                shapes_changed |= _plain_width(node)
            elif is_op(node, "TopK"):
                shapes_changed |= _plain_count(node)
    return shapes_changed


def _rename(node: ir.Node, prefixes: tuple[str, ...]) -> None:
    """Leaves the names to ONNX Runtime, which takes the same again when it inlines the function that is mapped to."""
    if node.name and node.name.startswith(prefixes):
        node.name = node.name.removeprefix("_")
    _rename_values(node.outputs, prefixes)


def _rename_values(values: Iterable[ir.Value], prefixes: tuple[str, ...]) -> None:
    for value in values:
        if value.name and value.name.startswith(prefixes) and not value.is_graph_output():
            value.name = value.name.removeprefix("_")


def _take_choice(node: ir.Node) -> bool:
    # A flag is an integer, which a Cast makes a truth value.
    condition = constant(_before_casts(node.inputs[0])) if node.inputs[0] is not None else None
    output = node.outputs[0]
    if condition is None or condition.size != 1 or output.is_graph_output():
        return False
    chosen, other = node.inputs[1:] if bool(elements(condition).ravel()[0]) else node.inputs[:0:-1]
    if chosen is None or other is None or chosen.dtype != output.dtype:
        return False
    shape = dims(chosen)
    known = shape is not None and None not in shape and shape == dims(output)
    if not known and (condition.shape.numpy() or _before_casts(chosen) is not _before_casts(other)):
        return False
    output.replace_all_uses_with(chosen)
    remove_dead(node)
    return not known


def _take_sum_with_zero(node: ir.Node) -> None:
    """Takes the weight of a norm without a bias for the sum of both."""
    value, bias, output = node.inputs[0], node.inputs[1], node.outputs[0]
    if value is None or bias is None or rank(bias) != 0 or scalar(bias) != 0 or output.is_graph_output():
        return
    if dims(value) is not None and dims(value) == dims(output) and value.dtype == output.dtype:
        output.replace_all_uses_with(value)
        remove_dead(node)


def _before_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and is_op(node, "Cast") and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _plain_cast(node: ir.Node) -> None:
    like, output = node.inputs[1], node.outputs[0]
    if like is None or like.dtype is None or node.graph is None:
        return
    cast = ir.node("Cast", [node.inputs[0]], {"to": like.dtype}, name=node.name)
    made = cast.outputs[0]
    made.dtype, made.shape = like.dtype, output.shape
    node.graph.insert_before(node, cast)
    output.replace_all_uses_with(made, replace_graph_outputs=True)
    made.name, output.name = output.name, None
    remove_dead(node)


def _plain_width(node: ir.Node) -> bool:
    """Has a Slice end at another value's width, where that is a number; False where it is none."""
    ends = node.inputs[2]
    shape = ends.producer() if ends is not None else None
    if shape is None or not is_op(shape, "Shape") or shape.inputs[0] is None or node.graph is None:
        return False
    width = dim(shape.inputs[0], -1)
    if shape.attributes.get_int("start", 0) != -1 or "end" in shape.attributes or not isinstance(width, int):
        return False
    _have_number(node, 2, width, "end")
    return True


def _plain_count(node: ir.Node) -> bool:
    """Has a TopK choose as many as nodes compute of known sizes: TorchScript sorts by a TopK of all; False elsewhere.

    What follows has then known sizes too.
    """
    counts = ints(node.inputs[1])
    if isinstance(dim(node.outputs[0], node.attributes.get_int("axis", -1)), int) or counts is None or len(counts) != 1:
        return False
    _have_number(node, 1, counts[0], "count")
    return True


def _have_number(node: ir.Node, index: int, value: int, name: str) -> None:
    """Has ``node`` read a Constant of [1] in place of the input at ``index``, and takes out what only that needed."""
    before = node.inputs[index]
    maker = before.producer() if before is not None else None
    assert isinstance(node.graph, ir.Graph)
    name = f"{node.name or node.outputs[0].name}_{name}"
    number = ir.node("Constant", [], {"value": ir.tensor([value], dtype=ir.DataType.INT64)}, name=name)
    number.outputs[0].dtype, number.outputs[0].shape = ir.DataType.INT64, ir.Shape([1])
    number.outputs[0].name = name
    node.graph.insert_before(node, number)
    node.replace_input_with(index, number.outputs[0])
    if maker is not None:
        remove_dead(maker)
