"""Questions to an onnx_ir graph that the segments ask: stored values, readers, dtypes, shapes."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

HALF_DTYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOAT_DTYPES = (ir.DataType.FLOAT, *HALF_DTYPES)

SHAPE_OPS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")
"""What gives a value another shape, the elements and their order as they were."""

_ONNX_DOMAINS = ("", "ai.onnx")


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether ``node`` is one of these standard operators."""
    return node is not None and node.op_type in op_types and node.domain in _ONNX_DOMAINS


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """The input at ``index``, or None where it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other operand of a node of two; ``value`` itself where both are the same."""
    if len(node.inputs) != 2:
        return None
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read ``value``, each once, those of inner graphs too."""
    return list(dict.fromkeys(usage.node for usage in value.uses()))


def sole_reader(value: ir.Value) -> ir.Node | None:
    """The only thing that reads ``value``; None where it is a graph output, or is read elsewhere too or not at all."""
    found = readers(value)
    if len(found) != 1 or value.is_graph_output() or found[0].graph is not _graph_of(value):
        return None
    return found[0]


def _graph_of(value: ir.Value) -> object:
    producer = value.producer()
    return producer.graph if producer is not None else None


def named(node: ir.Node) -> str:
    """A node in words."""
    return f"{node.op_type} '{node.name or node.outputs[0].name}'"


def stored(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer that nobody can override, or of a Constant node; its data stays where it is."""
    node = value.producer()
    if value.is_graph_input() or (node is not None and not is_op(node, "Constant")):
        return None
    return ir.convenience.get_const_tensor(value)


def elements(tensor: ir.TensorProtocol) -> np.ndarray:
    """The elements; read directly where onnx_ir would refuse the file (caches of models are full of links)."""
    if isinstance(tensor, ir.ExternalTensor):
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset or 0)
            return np.frombuffer(file.read(tensor.nbytes), dtype=tensor.dtype.numpy())
    return tensor.numpy()


def dims(value: ir.Value) -> list[int | str | None] | None:
    """The dimensions: a number, a symbol, or None where nothing is known; None for an unknown rank."""
    if value.shape is None:
        tensor = stored(value)
        return list(tensor.shape.numpy()) if tensor is not None else None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def rank(value: ir.Value) -> int | None:
    """The number of dimensions, None where it is not known."""
    shape = dims(value)
    return None if shape is None else len(shape)


def dim(value: ir.Value, index: int) -> int | str | None:
    """One dimension; None where it, or the rank, is not known."""
    shape = dims(value)
    if shape is None or not -len(shape) <= index < len(shape):
        return None
    return shape[index]


def keeps_width(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node of `SHAPE_OPS` reshapes ``value`` and leaves its last dimension, a number, as it was."""
    width, after = dim(value, -1), node.outputs[0]
    return node.inputs[0] is value and isinstance(width, int) and dim(after, -1) == width and (rank(after) or 0) >= 2


def dtype_name(dtype: ir.DataType | None) -> str:
    """A dtype in words, in ONNX's spelling."""
    return dtype.name if dtype is not None else "of unknown dtype"


def may_be_equal(one: int | str | None, other: int | str | None) -> bool:
    """Whether two dimensions can be the same number; 1 against a symbol is taken for a broadcast."""
    if one is None or other is None or one == other:
        return True
    if isinstance(one, int) and isinstance(other, int):
        return False
    return 1 not in (one, other)


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Whether both have one rank and no dimension that is known to differ or to be broadcast."""
    first, second = dims(one), dims(other)
    if first is None or second is None or len(first) != len(second):
        return False
    return all(may_be_equal(a, b) for a, b in zip(first, second, strict=True))


def cast_source(value: ir.Value) -> ir.Value | None:
    """What a Cast node makes ``value`` from."""
    node = value.producer()
    return node.inputs[0] if is_op(node, "Cast") and node is not None else None


def before_upcast(value: ir.Value) -> ir.Value:
    """The half-precision value that ``value`` was widened from, else ``value``."""
    source = cast_source(value)
    if source is not None and value.dtype == ir.DataType.FLOAT and source.dtype in HALF_DTYPES:
        return source
    return value


_KEPT_BY = {
    ir.DataType.FLOAT16: (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.BFLOAT16: (ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.FLOAT: (ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.DOUBLE: (ir.DataType.DOUBLE,),
}


def keeps(dtype: ir.DataType | None, numbers: ir.DataType | None) -> bool:
    """Whether ``dtype`` has every number of the floating-point dtype ``numbers``: a Cast to it rounds nothing."""
    return numbers is not None and dtype in _KEPT_BY.get(numbers, ())
