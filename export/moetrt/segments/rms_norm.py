"""The RMSNorm that reads a hidden state, in every spelling that exporters write."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from moetrt.segments.reading import (
    HALF_DTYPES,
    axes,
    constant,
    dim,
    dims,
    input_of,
    is_constant,
    is_op,
    named,
    other_input,
    rank,
    readers,
    scalar,
    sole_reader,
)


@dataclass(frozen=True)
class RmsNorm:
    """A norm that was found.

    Attributes:
        result: what the norm makes, in the rows' dtype.
        reader: the node through which the norm reads the hidden state.
        gamma: the weight as it is stored, ``[H]``.
    """

    result: ir.Value
    reader: ir.Node
    gamma: ir.Value
    eps: float
    weight_bias: float
    weight_before_cast: int


class _No(Exception):
    """The chain of nodes is a norm of another kind; the text says which."""


def find_rms_norm(hidden: ir.Value) -> RmsNorm | str | None:
    """The RMSNorm that reads ``hidden``.

    Returns:
        the first one in the order of the readers; else, where a norm of another kind or form reads it, what is wrong
        with that one, in words; else None.
    """
    problem: str | None = None
    for start, source in _sources(hidden):
        for node in readers(source):
            try:
                found = _fused(node, source, hidden) or _spelled_out(node, source, hidden)
            except _No as no:
                problem = problem or str(no)
                continue
            if found is not None:
                result, gamma, eps, before_cast = found
                weight, bias = _gamma(gamma, hidden)
                if isinstance(weight, str):
                    problem = problem or weight
                    continue
                return RmsNorm(result, start or node, weight, eps, bias, before_cast)
    return problem


_Found = tuple[ir.Value, ir.Value, float, int]
"""Result, gamma, eps, weight_before_cast."""


def _sources(hidden: ir.Value) -> Iterator[tuple[ir.Node | None, ir.Value]]:
    """``hidden`` and its widened copies."""
    yield None, hidden
    for node in readers(hidden):
        if is_op(node, "Cast") and node.outputs[0].dtype == ir.DataType.FLOAT:
            yield node, node.outputs[0]


def _fused(node: ir.Node, source: ir.Value, hidden: ir.Value) -> _Found | None:
    """RMSNormalization (opset 23) and ONNX Runtime's SimplifiedLayerNormalization."""
    if is_op(node, "LayerNormalization"):
        raise _No(f"{named(node)} follows: LayerNorm, not RMSNorm; MoEFinalizeAddRMSNorm has no mean and no bias")
    if node.op_type == "SkipSimplifiedLayerNormalization" and node.domain == "com.microsoft":
        raise _No(f"{named(node)} follows: ONNX Runtime's fused form; map the model before it is optimised")
    if not (is_op(node, "RMSNormalization", "SimplifiedLayerNormalization")) or node.inputs[0] is not source:
        return None
    gamma = input_of(node, 1)
    last = node.attributes.get_int("axis", -1)
    if last not in (-1, (rank(source) or 0) - 1):
        raise _No(f"{named(node)} normalises from axis {last} on, not over the last one alone")
    if node.op_type == "SimplifiedLayerNormalization":
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            raise _No(f"{named(node)} also gives its inverse deviation to a reader")
        before_cast = 1
    else:
        if node.attributes.get_int("stash_type", 1) != 1:
            raise _No(f"{named(node)} has stash_type {node.attributes.get_int('stash_type')}; 1 (float32) is taken")
        before_cast = 1 if source.dtype == ir.DataType.FLOAT else 0
    eps = node.attributes.get_float("epsilon", 1e-5)
    if gamma is None:
        raise _No(f"{named(node)} has no scale")
    return _rounded(node.outputs[0], hidden), gamma, eps, before_cast


def _rounded(value: ir.Value, hidden: ir.Value) -> ir.Value:
    """``value``, or the Cast of it, in the dtype of ``hidden``."""
    if value.dtype == hidden.dtype:
        return value
    for node in readers(value):
        if is_op(node, "Cast") and node.outputs[0].dtype == hidden.dtype:
            return node.outputs[0]
    raise _No(
        f"the RMSNorm's result '{value.name}' stays {_dtype(value)} while the rows are {_dtype(hidden)}; "
        "cast it to the rows' dtype"
    )


def _dtype(value: ir.Value) -> str:
    return value.dtype.name if value.dtype is not None else "of unknown dtype"


def _spelled_out(node: ir.Node, source: ir.Value, hidden: ir.Value) -> _Found | None:
    """Square, mean, eps, root, multiply, gamma."""
    if is_op(node, "ReduceMean") and node.inputs[0] is source:
        for reader in readers(node.outputs[0]):
            if is_op(reader, "Sub"):
                raise _No(f"{named(node)} follows: LayerNorm (the mean is subtracted), not RMSNorm")
        return None
    if not _squares(node, source):
        return None
    square = node.outputs[0]
    mean = _next(square, "ReduceMean")
    if mean is None:
        raise _No(f"{named(node)} squares the hidden state, but no ReduceMean follows: not an RMSNorm that is known")
    _check_mean(mean, square)
    deviation, eps = _plus_eps(mean.outputs[0])
    normalised = _normalised(deviation, source, hidden)
    narrow = {normalised.dtype} & set(HALF_DTYPES)
    while _next(normalised, "Mul") is None and (step := _next(normalised, "Cast", "Identity")) is not None:
        normalised = step.outputs[0]
        narrow |= {normalised.dtype} & set(HALF_DTYPES)
    if normalised.is_graph_output():
        raise _No(f"the normalised value '{normalised.name}' is a graph output: the RMSNorm has no gamma")
    multiply = _next(normalised, "Mul")
    if multiply is None:
        raise _No(f"no Mul by gamma follows the normalised value '{normalised.name}'")
    gamma = other_input(multiply, normalised)
    if gamma is None:
        raise _No(f"{named(multiply)} has no second operand")
    if narrow - {hidden.dtype}:
        names = " and ".join(sorted(dtype.name for dtype in narrow if dtype is not None))
        raise _No(f"the normalised value '{normalised.name}' is rounded to {names}; the rows are {_dtype(hidden)}")
    return _rounded(multiply.outputs[0], hidden), gamma, eps, 0 if narrow else 1


def _squares(node: ir.Node, source: ir.Value) -> bool:
    if is_op(node, "Pow"):
        return node.inputs[0] is source and scalar(node.inputs[1]) == 2.0
    return is_op(node, "Mul") and node.inputs[0] is source and node.inputs[1] is source


def _next(value: ir.Value, *op_types: str) -> ir.Node | None:
    return next((node for node in readers(value) if is_op(node, *op_types)), None)


def _check_mean(mean: ir.Node, square: ir.Value) -> None:
    found = axes(mean, [])
    if found is None:
        raise _No(f"the axes of {named(mean)} are not constant")
    size = rank(square)
    if [axis - size if size is not None and axis >= 0 else axis for axis in found] != [-1]:
        raise _No(f"{named(mean)} is over axes {found}, not over the last one alone")
    if mean.attributes.get_int("keepdims", 1) != 1:
        raise _No(f"{named(mean)} does not keep the last axis (keepdims=0)")


def _plus_eps(mean: ir.Value) -> tuple[ir.Value, float]:
    add = _next(mean, "Add")
    if add is None:
        return mean, 0.0
    other = other_input(add, mean)
    eps = scalar(other)
    if eps is None:
        raise _No(f"eps of the RMSNorm ({named(add)}) is not a constant number")
    if eps < 0:
        raise _No(f"eps of the RMSNorm ({named(add)}) is {eps:g}; 0 or more is taken")
    return add.outputs[0], eps


def _normalised(deviation: ir.Value, source: ir.Value, hidden: ir.Value) -> ir.Value:
    """``source / sqrt(deviation)``: by Sqrt, or Pow with 0.5 or -0.5; by Reciprocal, or Div."""
    root: ir.Value | None = None
    inverse: ir.Value | None = None
    for node in readers(deviation):
        power = scalar(node.inputs[1]) if is_op(node, "Pow") and node.inputs[0] is deviation else None
        if is_op(node, "Sqrt") or power == 0.5:
            root = node.outputs[0]
        elif power == -0.5:
            inverse = node.outputs[0]
    for node in readers(root) if root is not None else ():
        if is_op(node, "Reciprocal"):
            inverse = node.outputs[0]
        elif is_op(node, "Div") and node.inputs[1] is root:
            if scalar(node.inputs[0]) == 1.0:
                inverse = node.outputs[0]
            elif _is_copy(node.inputs[0], source, hidden):
                return node.outputs[0]
    if inverse is not None:
        for copy in (inverse, *(n.outputs[0] for n in readers(inverse) if is_op(n, "Cast"))):
            for node in readers(copy):
                if is_op(node, "Mul") and _is_copy(other_input(node, copy), source, hidden):
                    return node.outputs[0]
    raise _No(f"the root of '{deviation.name}' does not divide the hidden state in a form that is known")


def _is_copy(value: ir.Value | None, source: ir.Value, hidden: ir.Value) -> bool:
    """Whether ``value`` is the hidden state or a Cast of it."""
    if value is None:
        return False
    if value is source or value is hidden:
        return True
    node = value.producer()
    return node is not None and is_op(node, "Cast") and node.inputs[0] is hidden


def _gamma(value: ir.Value, hidden: ir.Value) -> tuple[ir.Value | str, float]:
    """The stored weight behind ``value``, with the 1 that Gemma adds to it; or, in words, why it is not taken."""
    bias = 0.0
    while not is_constant(value):
        node = value.producer()
        if node is None:
            return f"gamma '{value.name}' is an input of the graph, not a constant", 0.0
        if is_op(node, "Cast", "Identity"):
            value = _given(node.inputs[0])
            continue
        one = next((index for index in (0, 1) if is_op(node, "Add") and scalar(node.inputs[index]) == 1.0), None)
        if one is None or bias:
            return f"gamma comes from {named(node)}, not from a constant", 0.0
        bias = 1.0
        value = _given(node.inputs[1 - one])
    tensor = constant(value)
    if value.dtype is None and tensor is not None:
        value.dtype = tensor.dtype
    shape, width = dims(value), dim(hidden, -1)
    if shape is None or len(shape) != 1 or (width is not None and shape != [width]):
        return f"gamma '{value.name}' has shape {shape}; [H] = [{width}] is taken", 0.0
    if value.dtype not in (ir.DataType.FLOAT, hidden.dtype):
        return f"gamma '{value.name}' is {_dtype(value)}; the rows' dtype or FLOAT is taken", 0.0
    return value, bias


def _given(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def what_follows(result: ir.Value) -> str | None:
    """In words, what makes a norm another one than it seems: a bias after it, or a residual that is added after it."""
    node = sole_reader(result)
    while node is not None and is_op(node, "Cast", "Reshape", "Identity") and node.inputs[0] is result:
        result = node.outputs[0]
        node = sole_reader(result)
    if node is None or not is_op(node, "Add"):
        return None
    added = other_input(node, result)
    if added is None or added is result:
        return None
    if is_constant(added):
        return f"a bias is added after the RMSNorm ({named(node)})"
    return (
        f"sandwich norm: the MoE output is normalised first, and {named(node)} adds the residual afterwards; "
        "MoEFinalizeAddRMSNorm adds it before the norm"
    )
