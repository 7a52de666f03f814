"""A graph is written for onnx's shape inference alone, so that it passes what it would stop at.

Inference looks up no outer values' data in the body of an If, a Loop or a Scan, and knows no operator of ONNX Runtime.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_MOST_ELEMENTS = 64
"""Of a K, of axes, of a shape: what an operator takes sizes from."""

_LIKE_FIRST_INPUT = (
    *("BiasAdd", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "QuickGelu"),
    *("GroupNorm", "RotaryEmbedding", "SkipGroupNorm", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)
"""ONNX Runtime's operators whose first output, and the sum that may be their last, is of the first input's type."""

_PRODUCTS = ("DynamicQuantizeMatMul", "FusedMatMul", "GemmFastGelu")


def prepare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Changes ``proto`` so that inference finds more: what it says of a value then is true of the model it was.

    Small constants are copied into the bodies that read them, and ONNX Runtime's products and activations become
    standard operators of the same dtypes and shapes, whatever their numbers.
    """
    _copy_constants(proto.graph, {})
    _replace_operators(proto.graph, proto.graph, {})
    return proto


_NARROW = {
    TensorProto.BOOL: "Not",
    TensorProto.INT8: "Abs",
    TensorProto.INT16: "Abs",
    TensorProto.UINT8: "Abs",
    TensorProto.UINT16: "Abs",
}
"""Dtypes that do not hold every length, and an elementwise operator that inference reads no numbers through."""

_LARGEST = {
    TensorProto.INT32: 2**31 - 1,
    TensorProto.DOUBLE: 2**53,
    TensorProto.FLOAT: 2**24,
    TensorProto.FLOAT16: 2**11,
    TensorProto.BFLOAT16: 2**8,
}
"""Up to what number each dtype keeps every integer."""


def hide_changed_numbers(graph: onnx.GraphProto) -> None:
    """Writes ``graph`` so that inference reads no number through a Cast that changes it.

    onnx and ONNX Runtime take what is cast for the same number, also as BOOL. After the Cast comes an operator that
    they read no numbers through.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    changed: list[tuple[int, onnx.NodeProto, str]] = []
    for place, node in enumerate(graph.node):
        for body in _bodies(node):
            hide_changed_numbers(body)
        if node.op_type == "Constant" and (made := _tensor_of(node)) is not None:
            tensors[node.output[0]] = made
        elif node.op_type == "Cast":
            kind = next((a.i for a in node.attribute if a.name == "to"), TensorProto.UNDEFINED)
            if kind in _NARROW or _is_beyond(tensors.get(node.input[0]), _LARGEST.get(kind)):
                changed.append((place, node, _NARROW.get(kind, "Abs")))
    for place, node, op_type in reversed(changed):
        name = node.output[0]
        node.output[0] = f"{name}/cast"
        graph.node.insert(place + 1, helper.make_node(op_type, [node.output[0]], [name]))


def _is_beyond(tensor: onnx.TensorProto | None, largest: int | None) -> bool:
    if tensor is None or largest is None or not _is_small(tensor):
        return False
    numbers = numpy_helper.to_array(tensor)
    return numbers.dtype.kind in "iu" and any(abs(int(number)) > largest for number in numbers.ravel())


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _copy_constants(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    # A default can be overridden: it is no constant.
    given = {value.name for value in graph.input}
    known = dict(outer)
    known |= {tensor.name: tensor for tensor in graph.initializer if tensor.name not in given and _is_small(tensor)}
    for node in graph.node:
        tensor = _tensor_of(node) if node.op_type == "Constant" and node.domain == "" else None
        if tensor is not None and _is_small(tensor):
            known[node.output[0]] = tensor
    for node in graph.node:
        for body in _bodies(node):
            own = {tensor.name for tensor in body.initializer} | {value.name for value in body.input}
            own |= {name for inner in body.node for name in inner.output}
            read = {name for inner in body.node for name in inner.input}
            _copy_constants(body, {name: tensor for name, tensor in known.items() if name not in own})
            for name in sorted((read & set(known)) - own):
                body.initializer.add().CopyFrom(known[name])
                body.initializer[-1].name = name


def _tensor_of(constant: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a Constant node holds, where that is a tensor or integers."""
    for attribute in constant.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name in ("value_int", "value_ints"):
            value = helper.get_attribute_value(attribute)
            return numpy_helper.from_array(np.array(value, dtype=np.int64), constant.output[0])
    return None


def _is_small(tensor: onnx.TensorProto) -> bool:
    return math.prod(tensor.dims) <= _MOST_ELEMENTS


def _replace_operators(graph: onnx.GraphProto, outermost: onnx.GraphProto, outer: Mapping[str, int]) -> None:
    ranks = dict(outer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for body in _bodies(node):
            _replace_operators(body, outermost, ranks)
        nodes += (_standard(node, outermost, ranks) if node.domain == "com.microsoft" else None) or [node]
    if any(node.domain == "com.microsoft" for node in graph.node):
        replaced = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(replaced)


def _standard(
    node: onnx.NodeProto, outermost: onnx.GraphProto, ranks: Mapping[str, int]
) -> list[onnx.NodeProto] | None:
    """Nodes that give what is named as ``node``'s outputs their types; None where these are not known."""
    numbers = {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}
    output = node.output[0]
    if node.op_type in _LIKE_FIRST_INPUT:
        # Mean and deviation, between the first output and the sum, are of other shapes.
        outputs = [output] + ([node.output[3]] if len(node.output) > 3 and node.output[3] else [])
        return [helper.make_node("Identity", [node.input[0]], [name]) for name in outputs]
    if node.op_type == "FusedGemm":
        transposed = {name: numbers.get(name, 0) for name in ("transA", "transB")}
        return [helper.make_node("Gemm", list(node.input[:3]), [output], **transposed)]
    if node.op_type == "MatMulNBits":
        weight = f"{output}/weight"
        sizes = [numbers.get("K"), numbers.get("N")]
        outermost.input.append(helper.make_tensor_value_info(weight, TensorProto.FLOAT, sizes))
        return [helper.make_node("MatMul", [node.input[0], weight], [output])]
    if node.op_type not in _PRODUCTS or numbers.get("transBatchA") or numbers.get("transBatchB"):
        return None
    nodes, operands = [], list(node.input[:2])
    for place, flag in enumerate(("transA", "transB")):
        if not numbers.get(flag):
            continue
        ndim = ranks.get(operands[place], 0)
        if ndim < 2:
            return None
        axes = [*range(ndim - 2), ndim - 1, ndim - 2]
        nodes.append(helper.make_node("Transpose", [operands[place]], [f"{output}/{flag}"], perm=axes))
        operands[place] = f"{output}/{flag}"
    return [*nodes, helper.make_node("MatMul", operands, [output])]
