"""What a graph says once for all: values that are the same on every run, stored or computed from stored ones.

onnxscript's constant folding is not used here: it rewrites a whole graph, and inlines its functions on the way. One
node's result comes from the same place as there, onnx's reference implementation, in the node's own dtypes.
"""

import math

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from moetrt.segments.reading import HALF_DTYPES, dims, elements, input_of, is_op, stored

_MOST_ELEMENTS = 4096
"""Of every value on the way to a number: a gamma of [H] is never read, nor is an expert's weight."""

_MOST_NODES = 64
"""Between a constant and what is stored. In a graph of static shapes a value may have thousands of nodes before it."""

_MOVES = ("Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Gather", "Slice", "Concat")
"""What moves elements: of the sizes of a value, those that are numbers stay numbers beside those that are not."""

_COMPUTED = (
    *_MOVES,
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Pow", "Exp", "Log", "Max", "Min", "Sum"),
    *("Cast", "CastLike", "DequantizeLinear", "Transpose", "Expand", "Tile", "ConstantOfShape", "Range", "Where"),
)
"""Operators that are the same in every opset that is taken, and in the reference implementation as in its text."""

_RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    "Dropout",
)

_UNKNOWN = np.iinfo(np.int64).min
"""Stands for a size that is no number."""


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of what is the same on every run: stored, its data left where it is, or computed from few numbers.

    What is larger, or takes more nodes than a few dozen, is not computed; `is_constant` knows it all the same.
    """
    if value is None:
        return None
    tensor = stored(value)
    return _computed(value) if tensor is None else tensor


def is_constant(value: ir.Value | None) -> bool:
    """Whether ``value`` is the same on every run."""
    return value is not None and (stored(value) is not None or makers(value) is not None)


def ints(value: ir.Value | None) -> list[int] | None:
    """The elements of a small constant of integers."""
    tensor = constant(value)
    if tensor is None or tensor.size > 16 or not tensor.dtype.is_integer():
        return None
    return [int(element) for element in elements(tensor).ravel()]


def scalar(value: ir.Value | None) -> float | None:
    """The finite number that a constant of one element holds, or that Expand or ConstantOfShape repeats."""
    filled = _filled(value)
    if filled is not None:
        return filled if math.isfinite(filled) else None
    tensor = constant(value)
    if tensor is None or tensor.size != 1:
        return None
    element = elements(tensor).ravel()[0]
    # The shortest text that is this float32: 1e-06 rather than 9.999999974752427e-07.
    number = float(str(element)) if tensor.dtype == ir.DataType.FLOAT else float(element)
    return number if math.isfinite(number) else None


def _filled(value: ir.Value | None) -> float | None:
    node = value.producer() if value is not None else None
    if node is None:
        return None
    if is_op(node, "Expand"):
        return scalar(node.inputs[0])
    if is_op(node, "Cast") and value is not None and value.dtype == ir.DataType.FLOAT:
        # What widens a half-precision number keeps it: ONNX Runtime puts such Casts into files that it optimises.
        source = node.inputs[0]
        return _filled(source) if source is not None and source.dtype in HALF_DTYPES else None
    if is_op(node, "ConstantOfShape"):
        fill = node.attributes.get("value")
        return float(elements(fill.as_tensor()).ravel()[0]) if fill is not None else 0.0
    return None


def axes(node: ir.Node, default: list[int]) -> list[int] | None:
    """The axes of a Reduce, Squeeze or Unsqueeze node, an input or an attribute; None where they are not constant."""
    attribute = node.attributes.get("axes")
    if attribute is not None:
        return [int(axis) for axis in attribute.as_ints()]
    value = input_of(node, 1)
    return default if value is None else ints(value)


def makers(value: ir.Value) -> list[ir.Node] | None:
    """The nodes that make ``value`` from stored values alone, Constant nodes among them, in an order that runs.

    Returns:
        None where something that it is made from may differ from run to run: an input of a graph, whether it has a
        default or not; a random number; or the result of an operator that is not a standard one.
    """
    return _walk(value, small=False)


def _walk(value: ir.Value, *, small: bool) -> list[ir.Node] | None:
    """The nodes that make ``value``, in order, up to what is stored; up to Shape nodes too where it is to be small."""
    made: dict[ir.Node, None] = {}
    seen: set[ir.Node] = set()

    def visit(current: ir.Value) -> bool:
        node, tensor = current.producer(), stored(current)
        if node in made:
            return True
        if tensor is not None:
            if small and tensor.size > _MOST_ELEMENTS:
                return False
        elif node is None or node in seen or len(seen) == _MOST_NODES or not (_is_small if small else _is_fixed)(node):
            return False
        else:
            seen.add(node)
            before = [] if small and is_op(node, "Shape") else [value for value in node.inputs if value is not None]
            if not all(map(visit, before)):
                return False
        if node is not None:
            made[node] = None
        return True

    return list(made) if visit(value) else None


def _is_fixed(node: ir.Node) -> bool:
    """Whether ``node`` makes of the same inputs the same values of the same sizes."""
    if node.domain != "" or node.op_type in _RANDOM or any(map(_has_graph, node.attributes.values())):
        return False
    return all(_size(output) is not None for output in node.outputs)


def _has_graph(attribute: ir.Attr) -> bool:
    return attribute.is_ref() or attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _is_small(node: ir.Node) -> bool:
    """Whether `_result` or `_sizes` can say what ``node`` makes, as far as its size and operator go."""
    if not is_op(node, "Shape", *_COMPUTED) or any(attribute.is_ref() for attribute in node.attributes.values()):
        return False
    size = _size(node.outputs[0])
    return size is not None and size <= _MOST_ELEMENTS


def _size(value: ir.Value) -> int | None:
    """The number of elements, None where it is not known."""
    sizes = dims(value)
    numbers = [size for size in sizes if isinstance(size, int)] if sizes is not None else []
    return math.prod(numbers) if sizes is not None and len(numbers) == len(sizes) else None


def _computed(value: ir.Value) -> ir.TensorProtocol | None:
    """What a few nodes make of a few stored numbers, and of the sizes of whatever has sizes that are numbers."""
    nodes = _walk(value, small=True)
    if nodes is None:
        return None
    known: dict[ir.Value, np.ndarray] = {}
    for node in nodes:
        if is_op(node, "Constant"):
            continue
        result = _sizes(node) if is_op(node, "Shape") else _result(node, known)
        if result is None:
            return None
        known[node.outputs[0]] = result
    found = known[value]
    return None if _is_partial(found) else ir.tensor(found, dtype=value.dtype)


def _sizes(node: ir.Node) -> np.ndarray | None:
    """What a Shape node gives, `_UNKNOWN` for each size that is no number."""
    source = node.inputs[0]
    sizes = dims(source) if source is not None else None
    if sizes is None:
        return None
    end = node.attributes.get("end")
    part = sizes[slice(node.attributes.get_int("start", 0), end.as_int() if end is not None else None)]
    return np.array([size if isinstance(size, int) else _UNKNOWN for size in part], dtype=np.int64)


def _is_partial(array: np.ndarray) -> bool:
    return array.dtype == np.int64 and bool((array == _UNKNOWN).any())


def _result(node: ir.Node, known: dict[ir.Value, np.ndarray]) -> np.ndarray | None:
    """What ``node`` makes, in its output's dtype and shape; None where it depends on a size that is not known."""
    given = [None if value is None else _array(value, known) for value in node.inputs]
    moved = len(given) if is_op(node, "Concat") else 1 if is_op(node, *_MOVES) else 0
    if any(array is not None and _is_partial(array) for array in given[moved:]):
        return None
    names = [f"input_{index}" if array is not None else "" for index, array in enumerate(given)]
    proto = onnx.helper.make_node(node.op_type, names, ["output"])
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    feeds = {name: array for name, array in zip(names, given, strict=True) if name}
    try:
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(proto).run(None, feeds)
    except Exception:  # whatever its operators run into: then the number stays unknown
        return None
    return result if isinstance(result, np.ndarray) and _fits(result, node.outputs[0]) else None


def _array(value: ir.Value, known: dict[ir.Value, np.ndarray]) -> np.ndarray:
    tensor = stored(value)
    return known[value] if tensor is None else elements(tensor).reshape(tensor.shape.numpy())


def _fits(result: np.ndarray, output: ir.Value) -> bool:
    """Whether the graph says the same of a value as its computed numbers."""
    return output.dtype is not None and result.dtype == output.dtype.numpy() and list(result.shape) == dims(output)
