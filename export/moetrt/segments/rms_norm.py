"""The RMSNorm that reads a hidden state, in every spelling that exporters write.

onnxscript has a rule for it (`RmsNormFusion`), which is not used here: over a model of 15,000 nodes its pattern matcher
takes seconds where this walk takes hundredths of one, it knows one order of the nodes, it wants the inner values to
have no other reader, and it says nothing of the norms that it does not take. The tests run it on every form that they
have: what it fuses, this walk finds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moetrt.segments.constants import axes, constant, is_constant, scalar
from moetrt.segments.reading import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    SHAPE_OPS,
    dim,
    dims,
    dtype_name,
    elements,
    input_of,
    is_op,
    keeps,
    keeps_width,
    named,
    other_input,
    rank,
    readers,
    same_shape,
    sole_reader,
    stored,
)
from moetrt.segments.tail import Operand


@dataclass(frozen=True)
class RmsNorm:
    """A norm that was found.

    Attributes:
        result: what the norm makes, in the rows' dtype.
        gamma: the weight, ``[H]``.
        views: the Reshapes through which the norm reads the hidden state, in order; ``result`` has the shape that the
            last one gives.
    """

    result: ir.Value
    gamma: Operand
    eps: float
    weight_bias: float
    weight_before_cast: int
    views: tuple[ir.Node, ...] = ()


class _No(Exception):
    """The chain of nodes is a norm of another kind; the text says which."""


@dataclass(frozen=True)
class _Source:
    """The hidden state as a norm reads it: ``value`` is ``hidden``, reshaped and widened to float32 or neither."""

    hidden: ir.Value
    value: ir.Value
    views: tuple[ir.Node, ...] = ()

    def is_copy(self, value: ir.Value | None) -> bool:
        """Whether ``value`` holds the same numbers in the same shape."""
        return value is not None and _before_widening(value, self.hidden) is _before_widening(self.value, self.hidden)


@dataclass(frozen=True)
class _Found:
    """A norm but for its gamma: ``multiplicand`` is what the gamma's Mul multiplies."""

    result: ir.Value
    gamma: ir.Value
    eps: float
    weight_before_cast: int
    multiplicand: ir.Value | None = None


_OTHER_NORMS = {
    "LayerNormalization": "LayerNorm, not RMSNorm; MoEFinalizeAddRMSNorm has no mean and no bias",
    "SkipLayerNormalization": "LayerNorm, not RMSNorm, with its residual add fused by ONNX Runtime",
    "SkipSimplifiedLayerNormalization": "ONNX Runtime's fused form; map the model before it is optimised",
    "GroupNormalization": "GroupNorm, not RMSNorm over the whole hidden state",
    "InstanceNormalization": "InstanceNorm, not RMSNorm over the whole hidden state",
    "MeanVarianceNormalization": "the mean is subtracted; it is no RMSNorm",
    "LpNormalization": "an Lp norm, which has no mean and no eps as RMSNorm has them",
    "ReduceL2": "an L2 norm, which has no mean and no eps as RMSNorm has them; x / sqrt(mean(x * x) + eps) is taken",
}


_NORM_OPS = ("RMSNormalization", "SimplifiedLayerNormalization", "ReduceMean", *_OTHER_NORMS)


def find_rms_norm(hidden: ir.Value) -> RmsNorm | str | None:
    """The RMSNorm that reads ``hidden``.

    Returns:
        the first one in the order of the readers; else, where a norm of another kind or form reads it, what is wrong
        with that one, in words; else None.
    """
    problem: str | None = None
    for source in _sources(_Source(hidden, hidden)):
        for node in readers(source.value):
            try:
                found = _fused(node, source) or _spelled_out(node, source)
                if found is None:
                    continue
                if _graph_of(found.result) is not _graph_of(hidden):
                    raise _No(f"the RMSNorm that gives '{found.result.name}' is in an inner graph")
                gamma, bias = _gamma(found.gamma, source)
                if found.multiplicand is not None:
                    _check_readers(found, source)
                return RmsNorm(found.result, gamma, found.eps, bias, found.weight_before_cast, source.views)
            except _No as no:
                problem = problem or str(no)
    return problem or _grouped(hidden)


def _graph_of(value: ir.Value) -> object:
    producer = value.producer()
    return producer.graph if producer is not None else None


def _sources(source: _Source) -> Iterator[_Source]:
    """``source``, and its copies that are widened or reshaped."""
    yield source
    for node in readers(source.value):
        after = node.outputs[0]
        if is_op(node, "Identity") or (
            is_op(node, "Cast") and after.dtype == ir.DataType.FLOAT and source.value.dtype in FLOAT_DTYPES
        ):
            yield from _sources(_Source(source.hidden, after, source.views))
        elif is_op(node, *SHAPE_OPS) and keeps_width(node, source.value):
            yield from _sources(_Source(source.hidden, after, (*source.views, node)))


def _before_widening(value: ir.Value, hidden: ir.Value) -> ir.Value:
    while value is not hidden:
        node = value.producer()
        before = node.inputs[0] if node is not None and is_op(node, "Cast", "Identity") else None
        if before is None or (value.dtype != ir.DataType.FLOAT and value.dtype != before.dtype):
            break
        value = before
    return value


def _grouped(hidden: ir.Value) -> str | None:
    """In words, that a norm follows whose mean is over a part of the hidden state."""
    for node in readers(hidden):
        if not is_op(node, *SHAPE_OPS) or node.inputs[0] is not hidden or keeps_width(node, hidden):
            continue
        for part in _copies(node.outputs[0], _Source(hidden, hidden)):
            if any(_squares(reader, part) or is_op(reader, *_NORM_OPS) for reader in readers(part)):
                return (
                    f"{named(node)} splits the hidden state into {dims(part)} before it is normalised: GroupNorm, not "
                    "RMSNorm over the whole hidden state"
                )
    return None


def _fused(node: ir.Node, source: _Source) -> _Found | None:
    """RMSNormalization (opset 23) and ONNX Runtime's SimplifiedLayerNormalization."""
    if node.op_type in _OTHER_NORMS and node.domain in ("", "com.microsoft"):
        raise _No(f"{named(node)} follows: {_OTHER_NORMS[node.op_type]}")
    if not (is_op(node, "RMSNormalization", "SimplifiedLayerNormalization")) or node.inputs[0] is not source.value:
        return None
    gamma = input_of(node, 1)
    last = node.attributes.get_int("axis", -1)
    if last not in (-1, (rank(source.value) or 0) - 1):
        raise _No(f"{named(node)} normalises from axis {last} on, not over the last one alone")
    if node.op_type == "SimplifiedLayerNormalization":
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            raise _No(f"{named(node)} also gives its inverse deviation to a reader")
        before_cast = 1
    else:
        if node.attributes.get_int("stash_type", 1) != 1:
            raise _No(f"{named(node)} has stash_type {node.attributes.get_int('stash_type')}; 1 (float32) is taken")
        before_cast = 1 if source.value.dtype == ir.DataType.FLOAT else 0
    if gamma is None:
        raise _No(f"{named(node)} has no scale")
    eps = node.attributes.get_float("epsilon", 1e-5)
    return _Found(_rounded(node.outputs[0], source.hidden), gamma, eps, before_cast)


def _rounded(value: ir.Value, hidden: ir.Value) -> ir.Value:
    """``value``, or the Cast of it, in the dtype of ``hidden``."""
    if value.dtype == hidden.dtype:
        return value
    for node in readers(value):
        if is_op(node, "Cast") and node.outputs[0].dtype == hidden.dtype:
            return node.outputs[0]
    raise _No(
        f"the RMSNorm's result '{value.name}' stays {dtype_name(value.dtype)} while the rows are "
        f"{dtype_name(hidden.dtype)}; cast it to the rows' dtype"
    )


def _spelled_out(node: ir.Node, source: _Source) -> _Found | None:
    """Square, mean, eps, root, and the products of the hidden state, the root's inverse and gamma."""
    if is_op(node, "ReduceMean") and node.inputs[0] is source.value:
        if _next(node.outputs[0], "Sub", source=source) is not None:
            raise _No(f"{named(node)} follows: LayerNorm (the mean is subtracted), not RMSNorm")
        return None
    mean = _mean_square(node, source)
    if mean is None:
        return None
    deviation, eps = _plus_eps(mean, source)
    products = _products(deviation, source)
    for product, factor in products:
        if source.is_copy(factor):
            return _gamma_last(product.outputs[0], eps, source)
    for product, factor in products:
        found = _gamma_times_hidden(product, factor, eps, source) or _gamma_times_inverse(product, factor, eps, source)
        if found is not None:
            return found
    if rank(mean) != rank(source.value):
        raise _No(f"the mean of the squares '{mean.name}' does not keep the last axis (keepdims=0)")
    raise _No(
        f"the root of '{deviation.name}' does not divide the hidden state in a form that is known: "
        "x / sqrt(mean(x * x) + eps) is taken"
    )


def _gamma_last(normalised: ir.Value, eps: float, source: _Source) -> _Found:
    """``(hidden * inverse) * gamma``; the first product may be rounded to the rows' dtype."""
    hidden = source.hidden
    narrow = {normalised.dtype} & set(HALF_DTYPES)
    while _next(normalised, "Mul", source=None) is None:
        step = _next(normalised, "Cast", "Identity", source=None)
        if step is None:
            break
        if step.outputs[0].dtype not in FLOAT_DTYPES:
            raise _No(f"{named(step)} makes the normalised value {dtype_name(step.outputs[0].dtype)}")
        normalised = step.outputs[0]
        narrow |= {normalised.dtype} & set(HALF_DTYPES)
    if normalised.is_graph_output():
        raise _No(f"the normalised value '{normalised.name}' is a graph output: the RMSNorm has no gamma")
    multiply = _next(normalised, "Mul", source=None)
    if multiply is None:
        raise _No(f"no Mul by gamma follows the normalised value '{normalised.name}'")
    gamma = other_input(multiply, normalised)
    if gamma is None:
        raise _No(f"{named(multiply)} has no second operand")
    if narrow - {hidden.dtype}:
        names = " and ".join(sorted(dtype.name for dtype in narrow if dtype is not None))
        raise _No(
            f"the normalised value '{normalised.name}' is rounded to {names}; the rows are {dtype_name(hidden.dtype)}"
        )
    return _Found(_rounded(multiply.outputs[0], hidden), gamma, eps, 0 if narrow else 1, normalised)


def _gamma_times_hidden(product: ir.Node, factor: ir.Value, eps: float, source: _Source) -> _Found | None:
    """``(gamma * hidden) * inverse``."""
    steps: list[ir.Node] = []
    while (node := factor.producer()) is not None and is_op(node, "Cast", "Identity", "Mul"):
        steps.append(node)
        if is_op(node, "Mul") or node.inputs[0] is None:
            break
        factor = node.inputs[0]
    if not steps or not is_op(steps[-1], "Mul"):
        return None
    for copy, gamma in (steps[-1].inputs, steps[-1].inputs[::-1]):
        if copy is not None and gamma is not None and source.is_copy(copy):
            _check_float32(*steps)
            return _Found(_rounded(product.outputs[0], source.hidden), gamma, eps, 1, copy)
    return None


def _gamma_times_inverse(product: ir.Node, gamma: ir.Value, eps: float, source: _Source) -> _Found | None:
    """``(gamma * inverse) * hidden``."""
    if not is_constant(gamma) or dim(gamma, -1) != dim(source.value, -1):
        return None
    inverse = other_input(product, gamma)
    for scaled in _copies(product.outputs[0], source):
        for node in readers(scaled):
            if is_op(node, "Mul") and source.is_copy(other_input(node, scaled)):
                _check_float32(node, product)
                return _Found(_rounded(node.outputs[0], source.hidden), gamma, eps, 1, inverse)
    return None


def _check_float32(*nodes: ir.Node) -> None:
    """The operator rounds after gamma, or between the normalised value and gamma, not where ``nodes`` do."""
    for node in nodes:
        if node.outputs[0].dtype != ir.DataType.FLOAT:
            raise _No(
                f"{named(node)} rounds to {dtype_name(node.outputs[0].dtype)} what gamma multiplies before the norm is "
                "complete: multiply the normalised value by gamma, or normalise in float32"
            )


def _squares(node: ir.Node, source: ir.Value) -> bool:
    if is_op(node, "Pow"):
        return node.inputs[0] is source and scalar(node.inputs[1]) == 2.0
    return is_op(node, "Mul") and node.inputs[0] is source and node.inputs[1] is source


def _next(value: ir.Value, *op_types: str, source: _Source | None) -> ir.Node | None:
    """The first of these operators that reads ``value``, or a copy of it that is no narrower than ``source``."""
    copies = [value] if source is None else _copies(value, source)
    return next((node for copy in copies for node in readers(copy) if is_op(node, *op_types)), None)


def _copies(value: ir.Value, source: _Source) -> Iterator[ir.Value]:
    """``value`` and its Casts to float32 or to the hidden state's dtype; of one number a row, its Reshapes too."""
    yield value
    for node in readers(value):
        if (
            is_op(node, "Identity")
            or (is_op(node, "Cast") and node.outputs[0].dtype in (ir.DataType.FLOAT, source.hidden.dtype))
            or (is_op(node, *SHAPE_OPS) and node.inputs[0] is value and _is_per_row(node.outputs[0], source))
        ):
            yield from _copies(node.outputs[0], source)


def _is_per_row(value: ir.Value, source: _Source) -> bool:
    """Whether a Reshape to ``value`` keeps one number for each row, the rows as they lie, with a last axis or none."""
    here, rows = dims(value), (dims(source.value) or [])[:-1]
    if here is None or not 0 <= len(here) - len(rows) <= 1:
        return False
    wanted = rows if len(here) == len(rows) else [*rows, 1]
    # A Reshape keeps the number of elements: where all dimensions but one are the same, so is the last.
    return sum(one is None or one != other for one, other in zip(here, wanted, strict=True)) <= 1


def _mean_square(node: ir.Node, source: _Source) -> ir.Value | None:
    """The mean of the squares that ``node`` begins: reduced by whatever sums or averages, and divided by H."""
    width, share, tolerance = dim(source.value, -1), 1.0, 2.0**-50
    summed = node if _sums_squares(node, source) else None
    if summed is None and not _squares(node, source.value):
        return None
    value = node.outputs[0]
    while True:
        if summed is not None and isinstance(width, int) and math.isclose(share * width, 1.0, rel_tol=tolerance):
            return value
        step = None if summed is not None else _next(value, "ReduceMean", "ReduceSum", "MatMul", source=source)
        reduces = step is not None
        step = step or _next(value, "Div", "Mul", source=source)
        factor, rounding = (None, 0.0) if step is None else _reduced(step, width) if reduces else _scaled(step)
        if step is None or factor is None:
            break
        summed = step if reduces else summed
        share, tolerance, value = share * factor, tolerance + rounding, step.outputs[0]
    if summed is None:
        raise _No(f"{named(node)} squares the hidden state, but no ReduceMean follows: not an RMSNorm that is known")
    if not isinstance(width, int):
        raise _No(
            f"{named(summed)} may be the mean of an RMSNorm, but the last dimension of '{source.hidden.name}', H, is "
            f"{'unknown' if width is None else repr(width)}: export with H as a number, and only tokens dynamic"
        )
    if value is not summed.outputs[0]:
        maker = value.producer()
        assert maker is not None
        by = 1 / share if is_op(maker, "Div") else share
        raise _No(f"{named(maker)} makes no mean of the squares: by {by:g}, while H is {width}")
    if step is None:
        raise _No(f"{named(summed)} sums the squares, but no division by H follows: not an RMSNorm that is known")
    raise _No(f"{named(step)} after the sum of squares has no constant number for H")


def _sums_squares(node: ir.Node, source: _Source) -> bool:
    """Whether ``node`` sums the hidden state's squares over the last axis by itself."""
    if any(value is not source.value for value in node.inputs[: 2 if is_op(node, "Einsum") else 1]):
        return False
    if is_op(node, "ReduceSumSquare"):
        _check_axis(node)
        return True
    if not is_op(node, "Einsum"):
        return False
    read, _, made = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    one, _, other = read.partition(",")
    return one == other and made == one[:-1] and len(set(one.replace("...", ""))) == len(one.replace("...", ""))


def _reduced(reduce: ir.Node, width: int | str | None) -> tuple[float | None, float]:
    """What a sum or mean over the last axis multiplies the sum by, and how far rounded; None where it is another."""
    if is_op(reduce, "MatMul"):
        return _products_sum(reduce, width)
    _check_axis(reduce)
    return (1.0 / width if is_op(reduce, "ReduceMean") and isinstance(width, int) else 1.0), 0.0


def _products_sum(product: ir.Node, width: int | str | None) -> tuple[float | None, float]:
    """The number that a product with a column of H equal numbers sums by."""
    column = product.inputs[1]
    tensor = constant(column)
    if column is None or tensor is None or dims(column) not in ([width, 1], [width]):
        return None, 0.0
    numbers = elements(tensor).ravel()
    if not np.isfinite(numbers[0]) or (numbers != numbers[0]).any():
        return None, 0.0
    return float(numbers[0]), _rounding(column)


def _scaled(node: ir.Node) -> tuple[float | None, float]:
    """What a Mul or Div by a constant number multiplies by, and how far that may be rounded; None where it has none."""
    other, factor = _number_in(node)
    if other is None or not factor:
        return None, 0.0
    return (1.0 / factor if is_op(node, "Div") else factor), _rounding(other)


def _number_in(node: ir.Node) -> tuple[ir.Value | None, float | None]:
    """The constant number that ``node`` adds to, or multiplies or divides, a value whose shape it keeps."""
    for index in (1,) if is_op(node, "Div") else (0, 1):
        number, value = scalar(node.inputs[index]), node.inputs[1 - index]
        if number is not None and value is not None and same_shape(value, node.outputs[0]):
            return node.inputs[index], number
    return None, None


def _check_axis(reduce: ir.Node) -> None:
    found = axes(reduce, [])
    if found is None:
        raise _No(f"the axes of {named(reduce)} are not constant")
    before = reduce.inputs[0]
    size = rank(before) if before is not None else None
    if [axis - size if size is not None and axis >= 0 else axis for axis in found] != [-1]:
        raise _No(f"{named(reduce)} is over axes {found}, not over the last one alone")


_ROUNDING = {ir.DataType.FLOAT: 2.0**-24, ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
"""How far the nearest number of a dtype may be from 1/H, as a part of it."""


def _rounding(value: ir.Value) -> float:
    dtype = _dtype_of(value)
    return _ROUNDING.get(dtype, 2.0**-52) if dtype is not None else 0.0


def _plus_eps(mean: ir.Value, source: _Source) -> tuple[ir.Value, float]:
    add = _next(mean, "Add", source=source)
    if add is None:
        return mean, 0.0
    _, eps = _number_in(add)
    if eps is None:
        stored = next((value for value in add.inputs if value is not None and is_constant(value)), None)
        shape = dims(stored) if stored is not None else None
        if any(size != 1 for size in shape or ()):
            raise _No(f"eps of the RMSNorm ({named(add)}) has shape {shape}; one number is taken")
        raise _No(f"eps of the RMSNorm ({named(add)}) is not a constant number")
    if eps < 0:
        raise _No(f"eps of the RMSNorm ({named(add)}) is {eps:g}; 0 or more is taken")
    return add.outputs[0], eps


def _products(deviation: ir.Value, source: _Source) -> list[tuple[ir.Node, ir.Value]]:
    """What multiplies by ``1 / sqrt(deviation)``, or divides by the root, and what it multiplies or divides."""
    found: list[tuple[ir.Node, ir.Value]] = []
    for value, power in _powers(deviation, 1.0, source):
        here = dims(value)
        if here is None or len(here) != rank(source.value) or here[-1] != 1:
            continue  # it would meet the rows along another axis
        for node in readers(value):
            if power == 0.5 and is_op(node, "Div") and node.inputs[1] is value:
                factor = node.inputs[0]
            else:
                factor = other_input(node, value) if power == -0.5 and is_op(node, "Mul") else None
            if factor is not None:
                found.append((node, factor))
    return found


def _powers(value: ir.Value, power: float, source: _Source) -> Iterator[tuple[ir.Value, float]]:
    """``value``, which is that power of the deviation, and what roots and inverses make of it, each with its power."""
    for copy in _copies(value, source):
        yield copy, power
        for node in readers(copy):
            if is_op(node, "Sqrt"):
                after = power / 2
            elif is_op(node, "Reciprocal") or (
                is_op(node, "Div") and node.inputs[1] is copy and scalar(node.inputs[0]) == 1.0
            ):
                after = -power
            elif is_op(node, "Pow") and node.inputs[0] is copy and (exponent := scalar(node.inputs[1])):
                after = power * exponent
            else:
                continue
            if same_shape(copy, node.outputs[0]):
                yield from _powers(node.outputs[0], after, source)


def _check_readers(found: _Found, source: _Source) -> None:
    """Sees to it that nothing but the norm reads what the norm computes on the way.

    A second gamma on the normalised value is another norm of the same hidden state: it keeps the nodes that it needs.
    """
    normalised = found.multiplicand
    assert normalised is not None
    inner = _nodes_between(source, found)
    end = found.result.producer()
    for node in inner:
        if node is end:
            continue
        for value in node.outputs:
            if value.is_graph_output():
                raise _No(f"'{value.name}', a value inside the RMSNorm, is a graph output: it must stay")
            for reader in readers(value):
                if reader in inner or (value is normalised and _is_second_gamma(reader, value)):
                    continue
                raise _No(f"'{value.name}', a value inside the RMSNorm, is also read by {named(reader)}: it must stay")


def _nodes_between(source: _Source, found: _Found) -> set[ir.Node]:
    """The nodes that make the norm's result from ``source`` and from gamma, which are not among them."""
    inner: set[ir.Node] = set()
    pending = [found.result]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or node in inner or value is found.gamma or source.is_copy(value) or is_constant(value):
            continue
        inner.add(node)
        pending += [before for before in node.inputs if before is not None]
    return inner


def _is_second_gamma(node: ir.Node, normalised: ir.Value) -> bool:
    other = other_input(node, normalised) if is_op(node, "Mul") else None
    return is_constant(other) and other is not None and dim(other, -1) == dim(normalised, -1)


_SAME_NUMBERS = ("Cast", "Identity", *SHAPE_OPS)


def _gamma(value: ir.Value, source: _Source) -> tuple[Operand, float]:
    """The constant that the norm multiplies by, with the 1 that Gemma adds to it.

    It is the stored weight where the nodes after it keep its numbers; else what they make, and they stay.
    """
    width, here = dim(source.value, -1), dims(value)
    if here is not None and (
        not here or any(size != 1 for size in here[:-1]) or here[-1] != width or len(here) > (rank(source.value) or 0)
    ):
        raise _No(f"gamma '{value.name}' has shape {here}; [H] = [{width}] is taken")
    if not is_constant(value):
        raise _No(_of_no_constant(value))
    for operand, bias in (_stored_gamma(value), (value, 0.0)):
        if operand is None:
            continue
        dtype, shape = _dtype_of(operand), dims(operand) or []
        if not isinstance(width, int) or _count(shape) != width or dtype is None:
            continue
        if dtype in (ir.DataType.FLOAT, source.hidden.dtype):
            operand.dtype = dtype
            return Operand(operand, reshape_to=None if shape == [width] else (width,)), bias
    raise _No(f"gamma '{value.name}' is {dtype_name(_dtype_of(value))}; the rows' dtype or FLOAT is taken")


def _stored_gamma(value: ir.Value) -> tuple[ir.Value | None, float]:
    """The stored weight whose numbers ``value`` has, or has with 1 added in float32; None where it has other ones."""
    bias = 0.0
    while stored(value) is None:
        node = value.producer()
        assert node is not None
        plain = _plus_one(node) if value.dtype == ir.DataType.FLOAT and not bias else None
        before = _same_numbers(node) if plain is None else plain
        if before is None:
            return None, 0.0
        value, bias = before, bias if plain is None else 1.0
    return value, bias


def _of_no_constant(value: ir.Value) -> str:
    """In words, where a gamma comes from that is not the same on every run."""
    while (node := value.producer()) is not None:
        before = _plus_one(node) or (node.inputs[0] if is_op(node, *_SAME_NUMBERS) else None)
        if before is None:
            return f"gamma comes from {named(node)}, not from a constant"
        value = before
    return f"gamma '{value.name}' is an input of the graph, not a constant: store it as an initializer"


def _plus_one(node: ir.Node) -> ir.Value | None:
    """What ``node`` adds 1 to."""
    one = next((index for index in (0, 1) if is_op(node, "Add") and scalar(node.inputs[index]) == 1.0), None)
    return node.inputs[1 - one] if one is not None else None


def _same_numbers(node: ir.Node) -> ir.Value | None:
    """What has the numbers of the result of ``node``, in their order."""
    before = node.inputs[0] if is_op(node, *_SAME_NUMBERS) else None
    if before is not None and is_op(node, "Cast") and not keeps(node.outputs[0].dtype, _dtype_of(before)):
        return None
    return before


def _count(shape: Sequence[int | str | None]) -> int:
    return math.prod(size if isinstance(size, int) else 0 for size in shape)


def _dtype_of(value: ir.Value) -> ir.DataType | None:
    tensor = stored(value) if value.dtype is None else None
    return value.dtype if tensor is None else tensor.dtype


def what_follows(result: ir.Value) -> str | None:
    """In words, what makes a norm another one than it seems: a bias after it, or a residual that is added after it."""
    node = sole_reader(result)
    while node is not None and (
        (is_op(node, "Cast", "Identity", *SHAPE_OPS) and node.inputs[0] is result)
        or (is_op(node, "Mul", "Div") and scalar(other_input(node, result)) is not None)
    ):
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
