"""The contract's own form in plain ONNX: Gather rows by the map, mask -1, multiply by the weights, sum over k."""

from dataclasses import dataclass, field

import onnx_ir as ir

from moetrt.segments.reading import (
    FLOAT_DTYPES,
    axes,
    before_upcast,
    cast_source,
    dim,
    dims,
    input_of,
    is_constant,
    is_op,
    named,
    rank,
    scalar,
    sole_reader,
)
from moetrt.segments.tail import Operand, Seed

FORM = "gather"

_RESHAPES = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass
class _Found:
    """What the walk back from the sum has met."""

    masks: list[ir.Value] = field(default_factory=list)
    weights: list[ir.Value] = field(default_factory=list)
    scale: float = 1.0


class _NotThis(Exception):
    """The nodes are something else."""


def seed_at(node: ir.Node) -> Seed | None:
    """The seed whose sum over k ``node`` is, or None."""
    try:
        return _seed(node)
    except _NotThis:
        return None


def _seed(node: ir.Node) -> Seed | None:
    found = _Found()
    if is_op(node, "ReduceSum"):
        if axes(node, []) not in ([1], [-2]) or node.attributes.get_int("keepdims", 1) != 0:
            return None
        routes, end = _given(node.inputs[0]), node
    elif is_op(node, "Einsum"):
        routes, end = _einsum(node, found), node
    elif is_op(node, "MatMul"):
        routes, end = _matmul(node, found)
    else:
        return None
    if rank(routes) != 3:
        return None
    top_k, width = dim(routes, 1), dim(routes, 2)
    rows, index = _walk_back(routes, found)
    if not found.weights and not found.masks:
        return None
    return _assemble(end, rows, index, found, top_k, width)


def _given(value: ir.Value | None) -> ir.Value:
    if value is None:
        raise _NotThis
    return value


def _einsum(node: ir.Node, found: _Found) -> ir.Value:
    """``tk,tkh->th``, in any letters and either order."""
    left, _, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(result) != 2:
        raise _NotThis
    wide = 0 if len(terms[0]) == 3 else 1
    routes, factor = terms[wide], terms[1 - wide]
    if len(set(routes)) != 3 or factor != routes[:2] or result != routes[0] + routes[2]:
        raise _NotThis
    _factor(_given(node.inputs[1 - wide]), found)
    return _given(node.inputs[wide])


def _matmul(node: ir.Node, found: _Found) -> tuple[ir.Value, ir.Node]:
    """``[T, 1, K] @ [T, K, H]``, then a Squeeze of the 1."""
    weights, routes = _given(node.inputs[0]), _given(node.inputs[1])
    squeeze = sole_reader(node.outputs[0])
    if rank(weights) != 3 or rank(routes) != 3 or dim(weights, 1) != 1 or squeeze is None:
        raise _NotThis
    if not is_op(squeeze, "Squeeze", "Reshape") or rank(squeeze.outputs[0]) != 2:
        raise _NotThis
    if dim(squeeze.outputs[0], -1) != dim(routes, -1):
        raise _NotThis
    _factor(weights, found)
    return routes, squeeze


def _walk_back(value: ir.Value, found: _Found) -> tuple[ir.Value, ir.Value]:
    """From the products to the Gather: its rows and its indices."""
    while True:
        node = value.producer()
        if node is None:
            raise _NotThis
        if is_op(node, "Gather"):
            if node.attributes.get_int("axis", 0) != 0:
                raise _NotThis
            return _given(node.inputs[0]), _given(node.inputs[1])
        if is_op(node, "GatherND"):
            index = _given(node.inputs[1])
            if node.attributes.get_int("batch_dims", 0) != 0 or dim(index, -1) != 1:
                raise _NotThis
            return _given(node.inputs[0]), index
        if is_op(node, "Cast", "Identity"):
            value = _given(node.inputs[0])
        elif is_op(node, "Reshape"):
            before = _given(node.inputs[0])
            if rank(before) != 2 or rank(value) != 3 or dim(before, -1) != dim(value, -1):
                raise _NotThis
            value = before
        elif is_op(node, "Mul"):
            value = _take_factor(node, value, found)
        elif is_op(node, "Where"):
            value = _take_mask(node, found)
        else:
            raise _NotThis


def _take_factor(node: ir.Node, product: ir.Value, found: _Found) -> ir.Value:
    """Splits a product into its rows and what multiplies each row."""
    for index in (0, 1):
        factor, routes = node.inputs[index], node.inputs[1 - index]
        if factor is None or routes is None or rank(routes) != rank(product):
            continue
        if dim(routes, -1) != dim(product, -1):
            continue
        number = scalar(factor)
        if number and dims(routes) == dims(product):
            found.scale *= number
            return routes
        factor = _once_per_route(factor)
        if _is_per_route(factor, product):
            _factor(factor, found)
            return routes
    raise _NotThis


def _once_per_route(factor: ir.Value) -> ir.Value:
    """``factor`` before it was repeated along the columns."""
    node = factor.producer()
    if node is None or not is_op(node, "Expand"):
        return factor
    source = _given(node.inputs[0])
    return source if rank(source) == rank(factor) and dim(source, -1) == 1 else factor


def _is_per_route(factor: ir.Value, product: ir.Value) -> bool:
    """Whether ``factor`` has one number a route: the shape of the product with a last dimension of 1."""
    shape, whole = dims(factor), dims(product)
    if shape is None or whole is None or len(shape) != len(whole) or shape[-1] != 1:
        return False
    return all(have != 1 or want == 1 for have, want in zip(shape[:-1], whole[:-1], strict=True))


def _take_mask(node: ir.Node, found: _Found) -> ir.Value:
    condition, kept = _given(node.inputs[0]), _split_where(node)
    if rank(condition) != rank(kept) or dim(condition, -1) != 1:
        raise _NotThis
    found.masks.append(_mask(condition, kept is node.inputs[1]))
    return kept


def _split_where(node: ir.Node) -> ir.Value:
    """What a Where keeps; the other operand is 0."""
    for index in (1, 2):
        if scalar(node.inputs[index]) == 0:
            return _given(node.inputs[3 - index])
    raise _NotThis


def _factor(value: ir.Value, found: _Found) -> None:
    """Splits what multiplies the rows into weights and masks."""
    value = _without_reshapes(value)
    node = value.producer()
    source = node.inputs[0] if node is not None and is_op(node, "Cast") else None
    if source is not None and source.dtype == ir.DataType.BOOL:
        found.masks.append(_mask(source, True))
    elif source is not None and before_upcast(value) is source:
        _factor(source, found)
    elif node is not None and is_op(node, "Where") and _is_masking(node):
        kept = _split_where(node)
        found.masks.append(_mask(_given(node.inputs[0]), kept is node.inputs[1]))
        _factor(kept, found)
    elif node is not None and is_op(node, "Mul") and any(_is_bool_cast(operand) for operand in node.inputs):
        for operand in node.inputs:
            _factor(_given(operand), found)
    else:
        found.weights.append(value)


def _is_masking(node: ir.Node) -> bool:
    try:
        _mask(_given(node.inputs[0]), _split_where(node) is node.inputs[1])
    except _NotThis:
        return False
    return True


def _is_bool_cast(value: ir.Value | None) -> bool:
    if value is None:
        return False
    node = _without_reshapes(value).producer()
    return node is not None and is_op(node, "Cast") and _given(node.inputs[0]).dtype == ir.DataType.BOOL


def _without_reshapes(value: ir.Value) -> ir.Value:
    """``value`` before it was given further dimensions of 1, or flattened."""
    while (source := _before_reshape(value)) is not None:
        value = source
    return value


def _before_reshape(value: ir.Value) -> ir.Value | None:
    """What a node makes ``value`` from in another shape, the elements and their order as they were."""
    node = value.producer()
    return node.inputs[0] if node is not None and is_op(node, *_RESHAPES) else None


def _mask(condition: ir.Value, keeps: bool) -> ir.Value:
    """The map whose entries of 0 and more ``condition`` keeps; ``keeps`` False: whose -1 it names."""
    condition = _without_reshapes(condition)
    node = condition.producer()
    if node is None:
        raise _NotThis
    if is_op(node, "Not"):
        return _mask(_given(node.inputs[0]), not keeps)
    if len(node.inputs) != 2:
        raise _NotThis
    first, second = scalar(node.inputs[0]), scalar(node.inputs[1])
    kept = {
        ("GreaterOrEqual", None, 0.0): True,
        ("Greater", None, -1.0): True,
        ("LessOrEqual", 0.0, None): True,
        ("Less", -1.0, None): True,
        ("Less", None, 0.0): False,
        ("LessOrEqual", None, -1.0): False,
        ("Greater", 0.0, None): False,
        ("GreaterOrEqual", -1.0, None): False,
        ("Equal", None, -1.0): False,
        ("Equal", -1.0, None): False,
    }.get((node.op_type, first, second))
    if kept is None or kept is not keeps:
        raise _NotThis
    return _map_base(_given(node.inputs[0] if first is None else node.inputs[1]))


def _map_base(value: ir.Value) -> ir.Value:
    """The map before it was widened or reshaped."""
    while (source := cast_source(value) or _before_reshape(value)) is not None and source.dtype in _INTEGERS:
        value = source
    return value


def _index(value: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """The map behind the indices of a Gather, and the clamped map, where it is clamped to 0 and more."""
    clamped: ir.Value | None = None
    while True:
        value = _map_base(value)
        node = value.producer()
        if node is None:
            return value, clamped
        operands = [operand for operand in node.inputs if operand is not None]
        kept: ir.Value | None = None
        if is_op(node, "Clip") and scalar(input_of(node, 1)) == 0:
            upper = input_of(node, 2)
            kept = operands[0] if upper is None or _is_last_row(upper, rows) else None
        elif is_op(node, "Max") and len(operands) == 2:
            kept = next((operands[1 - i] for i in (0, 1) if scalar(operands[i]) == 0), None)
        elif is_op(node, "Where"):
            kept = _masked_index(node)
        elif is_op(node, "Min") and len(operands) == 2:
            # An upper bound of R - 1 changes only entries that the contract does not allow.
            below = next((operands[1 - i] for i in (0, 1) if _is_last_row(operands[i], rows)), None)
            if below is None:
                return value, clamped
            value = below
            continue
        if kept is None:
            return value, clamped
        clamped = clamped or value
        value = kept


def _is_last_row(bound: ir.Value, rows: ir.Value) -> bool:
    """Whether ``bound`` is R - 1 or more."""
    number, count = scalar(bound), dim(rows, 0)
    if number is not None:
        return isinstance(count, int) and number >= count - 1
    less = _map_base(bound).producer()
    if not is_op(less, "Sub") or less is None or scalar(less.inputs[1]) != 1:
        return False
    source = _map_base(_given(less.inputs[0])).producer()
    if source is None or not is_op(source, "Shape", "Gather"):
        return False
    if is_op(source, "Gather"):
        if scalar(source.inputs[1]) != 0:
            return False
        source = _given(source.inputs[0]).producer()
    if source is None or not is_op(source, "Shape") or source.attributes.get_int("start", 0) != 0:
        return False
    return before_upcast(_given(source.inputs[0])) is before_upcast(rows)


def _masked_index(node: ir.Node) -> ir.Value | None:
    """The map in ``where(map >= 0, map, a row)``."""
    for index in (1, 2):
        fill = scalar(node.inputs[index])
        if fill is not None and fill >= 0:
            kept = _given(node.inputs[3 - index])
            try:
                base = _mask(_given(node.inputs[0]), index == 2)
            except _NotThis:
                return None
            return kept if base is _map_base(kept) else None
    return None


def _never_negative(value: ir.Value) -> bool:
    """Whether the graph shows that a map without a mask holds no -1: sorting gives it, or scattering of a range."""
    value = _map_base(value)
    number = scalar(value)
    node = value.producer()
    if number is not None or node is None:
        return number is not None and number >= 0
    if is_op(node, "TopK"):
        return value is node.outputs[1]
    if is_op(node, "Range"):
        start, step = scalar(node.inputs[0]), scalar(node.inputs[2])
        return start is not None and step is not None and start >= 0 and step > 0
    if is_op(node, "Gather", "GatherElements", "GatherND", "Expand"):
        return _never_negative(_given(node.inputs[0]))
    if is_op(node, "ScatterElements", "ScatterND"):
        return all(_never_negative(_given(node.inputs[index])) for index in (0, 2))
    return False


def _assemble(
    end: ir.Node,
    rows: ir.Value,
    index: ir.Value,
    found: _Found,
    top_k: int | str | None,
    width: int | str | None,
) -> Seed | None:
    narrow = before_upcast(rows)
    if is_constant(narrow) or rank(narrow) != 2 or narrow.dtype not in FLOAT_DTYPES or dim(narrow, -1) != width:
        # A table of embeddings, or no rows at all.
        return None
    base, clamped = _index(index, rows)
    problem: str | None = None
    if any(mask is not base for mask in found.masks):
        problem = f"the mask of {named(end)} is made from another value than the map '{base.name}'"
    elif not found.masks and clamped is None and not _never_negative(base):
        problem = (
            f"entries of -1 in the map '{base.name}' would read the last row: mask them "
            "(torch.where(map >= 0, rows, 0)), or clamp the map"
        )
    elif len(found.weights) > 1:
        names = ", ".join(f"'{weight.name}'" for weight in found.weights)
        problem = f"the rows are multiplied by more than one factor ({names}): multiply these first"
    # Where nothing masks, the clamp decides which row an entry of -1 reads.
    entries = base if found.masks or clamped is None else clamped
    operands: dict[str, Operand] = {"gemm2_permuted": Operand(narrow)}
    weights = found.weights[0] if found.weights else None
    for name, value in (("expert_weights", weights), ("expanded_idx_to_permuted_idx", entries)):
        if value is None:
            continue
        operand, complaint = _per_route_operand(value, top_k)
        problem = problem or complaint
        operands[name] = operand
    if weights is None:
        # Not read where the attribute is 0, but it gives T and K.
        like = operands["expanded_idx_to_permuted_idx"]
        operands["expert_weights"] = Operand(like.value, ir.DataType.FLOAT, like.reshape_to)
    elif weights.dtype not in (narrow.dtype, ir.DataType.FLOAT):
        problem = problem or f"the weights '{weights.name}' are {weights.dtype}; the rows are {narrow.dtype}"
    ordered = {name: operands[name] for name in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")}
    return Seed(
        form=FORM,
        node=end,
        value=end.outputs[0],
        operands=ordered,
        scale=found.scale,
        apply_expert_weights=int(weights is not None),
        problem=problem,
    )


def _per_route_operand(value: ir.Value, top_k: int | str | None) -> tuple[Operand, str | None]:
    """``value``, one number a route in the routes' order, as an operand of shape [T, K]; and what is wrong with it."""
    cast = ir.DataType.INT32 if value.dtype == ir.DataType.INT64 else None
    if rank(value) == 2 and dim(value, 1) == top_k:
        return Operand(value, cast), None
    if isinstance(top_k, int):
        return Operand(value, cast, (-1, top_k)), None
    return Operand(value, cast), f"'{value.name}' has shape {dims(value)}; [T, K] is taken where K is no number"
