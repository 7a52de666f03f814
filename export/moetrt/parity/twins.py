"""Copies of an ONNX model for comparing: wider numbers, inner values shown, or cut at values that are given."""

from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass

from moetrt.errors import InputError
from moetrt.onnx_op import operator_of

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (ir.DataType.FLOAT, *HALVES)

TORCH_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.BOOL: torch.bool,
}


def half_dtype(model: ir.Model) -> ir.DataType | None:
    """The 16-bit floating-point type that a model computes in: its tails' rows', else any value's; None for float32."""
    rows = {
        node.inputs[0].dtype for node in model.graph if operator_of(node) is not None and node.inputs[0] is not None
    }
    found = rows or {value.dtype for graph in model.graphs() for value in values_of(graph)}
    return next((dtype for dtype in reversed(HALVES) if dtype in found), None)


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value that a graph makes or is given."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def float32_twin(model: ir.Model) -> ir.Model:
    """Turns ``model`` into the same graph with every 16-bit floating-point number in float32, in place.

    Returns:
        ``model``; its 16-bit weights are read into memory.
    """
    return widened(model, dict.fromkeys(HALVES, ir.DataType.FLOAT))


def widened(model: ir.Model, wider: Mapping[ir.DataType, ir.DataType]) -> ir.Model:
    """Turns ``model`` into the same graph with other floating-point types, in place.

    Functions go into the graphs that call them: what a body's attribute refers to is known at the call alone.

    Args:
        model: its weights of these types are read into memory.
        wider: what each type becomes: of values, constants and casts.

    Raises:
        InputError: a function cannot be put in its calls' places.
    """
    _inline(model)
    for graph in model.graphs():
        for value in values_of(graph):
            if isinstance(value.type, ir.TensorType) and value.type.dtype in wider:
                # Not changed in place: clones share the objects that say a value's type.
                value.type = ir.TensorType(wider[value.type.dtype])
            if value.const_value is not None and value.const_value.dtype in wider:
                value.const_value = _converted(value.const_value, wider)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in wider:
                    node.attributes[name] = ir.AttrTensor(name, _converted(attribute.value, wider))
                # Cast and the generators name the dtype that they give.
                if name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.value in wider:
                    node.attributes[name] = ir.AttrInt64(name, wider[ir.DataType(attribute.value)])
            if ir.DataType.FLOAT in wider:
                _write_float32_default(node, wider[ir.DataType.FLOAT])
    return model


def _inline(model: ir.Model) -> None:
    """Puts every function in its calls' places, and leaves out those that are not called."""
    try:
        InlinePass()(model)
    except (ir.passes.PreconditionError, ValueError) as error:
        raise InputError(
            f"a function of the model cannot be put where it is called: {' '.join(str(error).split())}"
        ) from error
    model.functions.clear()


def _write_float32_default(node: ir.Node, dtype: ir.DataType) -> None:
    """Says in an attribute what these two operators give as float32 otherwise."""
    if node.op_type == "Constant":
        for name in ("value_float", "value_floats"):
            if name in node.attributes:
                numbers = np.asarray(node.attributes.pop(name).value, np.float32)
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(numbers.astype(dtype.numpy())))
    elif node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, dtype.numpy())))


def _converted(tensor: ir.TensorProtocol, wider: Mapping[ir.DataType, ir.DataType]) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(wider[tensor.dtype].numpy()), name=tensor.name)


def expose(model: ir.Model, names: Iterable[str], where: str = "") -> None:
    """Makes values of the graph outputs of it, in place; those that it does not compute are passed over.

    Args:
        model: the graph.
        names: of the values.
        where: what to put before a message.

    Raises:
        InputError: the graph does not say a value's type, which an output must have.
    """
    wanted = set(names) - {value.name for value in model.graph.outputs}
    for node in model.graph:
        for value in node.outputs:
            if value.name in wanted:
                if value.type is None:
                    raise InputError(
                        f"{where}value '{value.name}' of node '{node.name}' ({node.op_type}) has no type, and onnx's "
                        "shape inference finds none; a file that has it in its value_info is taken"
                    )
                model.graph.outputs.append(value)


def computed(model: ir.Model) -> dict[str, ir.Value]:
    """The values that the main graph's nodes compute, by name."""
    return {value.name: value for node in model.graph for value in node.outputs if value.name}


def frontier(model: ir.Model, values: Iterable[ir.Value], known: Iterable[str]) -> set[str]:
    """The names of ``known`` that ``values`` are computed from without another name of ``known`` in between."""
    names, found, seen = set(known), set(), set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.name in names:
            found.add(value.name)
            continue
        producer = value.producer()
        if producer is not None:
            pending.extend(v for v in inputs_of(producer) if v is not None)
    return found


def inputs_of(node: ir.Node) -> Iterator[ir.Value | None]:
    """What a node reads, in the graphs inside it too."""
    yield from node.inputs
    for attribute in node.attributes.values():
        inner: list[ir.Graph] = []
        if attribute.type == ir.AttributeType.GRAPH:
            inner = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            inner = list(attribute.as_graphs())
        for graph in inner:
            for part in ir.traversal.RecursiveGraphIterator(graph):
                yield from part.inputs


def evaluate(
    model: ir.Model,
    names: Iterable[str],
    known: Mapping[str, torch.Tensor],
    *,
    wider: Mapping[ir.DataType, ir.DataType] | None = None,
) -> dict[str, torch.Tensor]:
    """Computes values of a graph from others of its values, by onnx's reference evaluator, operator by operator.

    Unlike ONNX Runtime on a CPU it has every operator in bfloat16 (each result is rounded to it), and in float64.

    Args:
        model: is not changed.
        names: what to compute; a name that is known or a weight is given as it is.
        known: values of the graph by name, in the graph's dtypes, or in those that ``wider`` makes of them.
        wider: as of `widened`.

    Raises:
        InputError: the evaluator does not take the part of the graph that is needed, or a value is not known.
    """
    values = {value.name: value for value in values_of(model.graph) if value.name}
    wanted = list(dict.fromkeys(names))
    found = {name: known[name] for name in wanted if name in known}
    for name in wanted:
        if name not in found and (tensor := values[name].const_value) is not None and values[name].is_initializer():
            kept = _converted(tensor, wider) if wider and tensor.dtype in wider else tensor
            found[name] = to_torch(kept.numpy())
    rest = [name for name in wanted if name not in found]
    if not rest:
        return found
    feeds = frontier(model, (values[name] for name in rest), known)
    try:
        part = ir.Model(
            ir.convenience.extract(model.graph, [values[name] for name in sorted(feeds)], [values[n] for n in rest]),
            ir_version=model.ir_version,
            # Clones: the inliner and `widened` change what they are given, and the model has these functions too.
            functions=[function.clone() for function in model.functions.values()],
        )
        if wider:
            widened(part, wider)
        else:
            _inline(part)
        evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(part))
        with np.errstate(all="ignore"):
            results = evaluator.run(None, {name: to_numpy(known[name]) for name in feeds})
    except Exception as error:  # what the evaluator's operators raise has no common type
        raise InputError(f"{', '.join(rest)} could not be computed: {' '.join(str(error).split())}") from error
    return found | {name: to_torch(np.asarray(result)) for name, result in zip(rest, results, strict=True)}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's numbers; bfloat16 as ml_dtypes has it."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The array's numbers; ml_dtypes' bfloat16 as torch has it."""
    array = np.array(array, order="C")  # a copy: the evaluator may give a view of a weight, which cannot be written
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
