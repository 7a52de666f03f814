"""From a sum over a token's routes back to the rows: what multiplies, masks and picks the rows on the way.

A route is (token, k). Values that hold one number a route are followed in either layout: [T, K] or [K, T], flat or not.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import permutations

import onnx_ir as ir

from moetrt.segments.bounds import lowest
from moetrt.segments.constants import axes, constant, ints, is_constant, scalar
from moetrt.segments.reading import (
    FLOAT_DTYPES,
    before_upcast,
    cast_source,
    dim,
    dims,
    dtype_name,
    input_of,
    is_op,
    keeps,
    named,
    rank,
    sole_reader,
)
from moetrt.segments.sizes import column_sizes, has_other_length, is_named, is_said, may_be_repeated, surely_equal
from moetrt.segments.tail import Operand, Seed, Write, expanded, written

_INT32 = ir.DataType.INT32
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)

_RESHAPES = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")


class NotThis(Exception):
    """The nodes are something else."""


def given(value: ir.Value | None) -> ir.Value:
    """``value``, which must be there.

    Raises:
        NotThis: it is None.
    """
    if value is None:
        raise NotThis
    return value


@dataclass(frozen=True)
class PerRoute:
    """A value with one number a route, and how its elements lie.

    Attributes:
        k_first: the elements lie as [K, T] rather than [T, K].
        column: the k that was selected on the way here, in a sum that the graph writes term by term.
        below: of a map that a mask is made from: whether the mask keeps the rows of entries below -1.
        of: where it has fewer numbers, what has one: "t" a token, "k" a place among a token's routes, "" all of them.
        over: the rows that these few multiply, [T, K, H] or in the layout that ``k_first`` says.
        condition: of a mask that a Where on rows has, its truth values, and whether they keep a row or drop it.
        factor: of a mask that multiplies, what it multiplies by.
        by_row: one number a row, in the rows' order: what picks the rows picks these.
    """

    value: ir.Value
    k_first: bool = False
    column: int | None = None
    below: bool = field(default=False, compare=False)
    of: str | None = None
    over: ir.Value | None = None
    condition: tuple["PerRoute", bool] | None = field(default=None, compare=False)
    factor: "PerRoute | None" = field(default=None, compare=False)
    by_row: bool = False


@dataclass
class Found:
    """What the walk back from the sum has met.

    Attributes:
        top_k: K; a symbol or None where it is no number.
        k_first: the layout of the value that the walk stands at.
        as_picked: whether rows that something picks are taken as it gives them, one a route.
        by_column: whether the walk goes back from one term, which holds one route of each token.
        masks: maps whose entries of 0 and more are kept.
        kept: other truth values for the rows, and whether they keep a row or drop it.
        counted: what has as many rows as a mask lets entries be, beside being 0 or more.
        at_most: the bounds from above that the entries of a map without its clamps lack; None is R - 1.
        unlike: which two values need not have one shape where they meet, so that one may be repeated, in words.
        other_tokens: the same of two whose tokens alone have other names, which the operator's own body says are one.
        same_tokens: whether weights and map are of the same shape, whatever their dimensions are named.
        none_beyond: whether an entry that names no row picks nothing, as in a one-hot matrix.
        nan_beyond: whether an entry that names no row gives NaN already, as in the operator's own body.
        padded: whether columns after the first H were cut off.
        casts: what Casts made of the products and rows on the way.
        placed: the rows with their tokens as B and S, where these were one dimension before.
    """

    top_k: int | str | None = None
    k_first: bool = False
    as_picked: bool = False
    by_column: bool = False
    casts: list[ir.Value] = field(default_factory=list)
    placed: ir.Value | None = None
    masks: list[PerRoute] = field(default_factory=list)
    kept: list[tuple[PerRoute, bool]] = field(default_factory=list)
    weights: list[PerRoute] = field(default_factory=list)
    counted: list[ir.Value] = field(default_factory=list)
    at_most: set[int | None] = field(default_factory=set)
    unlike: str | None = None
    other_tokens: str | None = None
    same_tokens: bool = False
    none_beyond: bool = False
    nan_beyond: bool = False
    padded: bool = False
    scale: float = 1.0

    @property
    def different(self) -> str | None:
        """What is wrong with values that meet, in words; None where nothing is."""
        return self.unlike or (None if self.nan_beyond else self.other_tokens)

    def here(self, value: ir.Value) -> PerRoute:
        return PerRoute(value, self.k_first)


@dataclass(frozen=True)
class Rows:
    """Where a walk back from the products ended.

    Attributes:
        value: the rows, [R, H]; [T, K, H] or [K, T, H] where nothing picks them; None for a one-hot matrix.
        index: the numbers of the rows; None where the rows lie in the routes' own order.
        k_first: the layout of rows that nothing picks.
        order: the numbers of the routes that the rows were put back to, a permutation.
        masked: whether an index that names no row (-1) gives zeros.
    """

    value: ir.Value | None
    index: PerRoute | None = None
    k_first: bool = False
    order: ir.Value | None = None
    masked: bool = False


def walk_back(value: ir.Value, found: Found) -> Rows:
    """From the products to the rows.

    Raises:
        NotThis: a node on the way is no part of a finalize.
    """
    unpicked: ir.Value | None = None
    casts_above = casts_of_products = 0
    while True:
        node = value.producer()
        source = node.inputs[0] if node is not None and node.inputs else None
        if node is None or source is None:
            break
        picked = None if found.as_picked else _picked(node, value, found)
        if picked is not None:
            if picked.value is None:
                # Every dtype has the 0 and 1 that a one-hot matrix is made of.
                del found.casts[casts_of_products:]
            return picked
        if is_op(node, "Cast"):
            found.casts.append(value)
            if before_upcast(value) is value and unpicked is None:
                # Rows that nothing picks are taken with the dtype that the products have.
                unpicked, casts_above = value, len(found.casts)
            value = source
            continue
        if _is_view(node, source, value):
            if found.placed is None and rank(value) == 4 != rank(source):
                found.placed = value
            value = source
        elif _cuts_columns(node, source, value):
            found.padded = True
            value = source
        elif is_op(node, "Mul") and (routes := _take_factor(node, value, found)) is not None:
            value, casts_of_products = routes, len(found.casts)
        elif is_op(node, "Where") and (kept := _take_mask(node, found)) is not None:
            value = kept
        elif is_op(node, "Transpose") and _swaps_t_and_k(node, source, found):
            found.k_first = not found.k_first
            value = source
        else:
            break
        unpicked = None
    if unpicked is not None:
        del found.casts[casts_above:]
    return Rows(unpicked or value, k_first=found.k_first)


def _is_view(node: ir.Node, source: ir.Value, value: ir.Value) -> bool:
    """Whether ``value`` has the rows of ``source`` in their order, each once."""
    if is_op(node, *_RESHAPES):
        return {rank(source), rank(value)} <= {2, 3, 4} and _same_width(source, value)
    if takes_the_only_one(node):
        return {rank(source), rank(value)} <= {2, 3, 4} and node.attributes.get_int("axis", 0) not in (0, -1)
    if is_op(node, "Slice"):
        # As long as what it is cut from, and in its order.
        steps = input_of(node, 4)
        return dims(source) == dims(value) and (steps is None or set(ints(steps) or [0]) == {1})
    # An Expand to the shape that its input has; one that repeats a single row has a 1 there.
    return is_op(node, "Expand") and rank(source) == rank(value) and _same_width(source, value) and dim(source, 0) != 1


def _cuts_columns(node: ir.Node, source: ir.Value, value: ir.Value) -> bool:
    """Whether ``value`` has the first columns of rows that were picked, ``source``, and each of them."""
    picked = source.producer()
    while picked is not None and is_op(picked, "Cast"):
        picked = given(picked.inputs[0]).producer()
    if not is_op(node, "Slice") or not is_op(picked, "Gather"):
        return False
    along, steps = ints(input_of(node, 3)), ints(input_of(node, 4))
    last = (rank(source) or 0) - 1
    return ints(node.inputs[1]) == [0] and along in ([-1], [last]) and steps in ([1], None)


def _swaps_t_and_k(node: ir.Node, source: ir.Value, found: Found) -> bool:
    if rank(source) != 3 or permutation_of(node) != [1, 0, 2]:
        return False
    return dim(source, 1 if found.k_first else 0) == found.top_k


def _same_width(one: ir.Value, other: ir.Value) -> bool:
    width = dim(one, -1)
    return width is not None and width == dim(other, -1)


def permutation_of(node: ir.Node) -> list[int] | None:
    """The order of the axes that a Transpose node gives; None where it reverses them."""
    attribute = node.attributes.get("perm")
    return [int(axis) for axis in attribute.as_ints()] if attribute is not None else None


def _picked(node: ir.Node, value: ir.Value, found: Found) -> Rows | None:
    """The rows and what picks them, where ``node`` does that."""
    if is_op(node, "Gather") and node.attributes.get_int("axis", 0) == 0:
        return Rows(given(node.inputs[0]), found.here(given(node.inputs[1])))
    if is_op(node, "GatherND"):
        index = given(node.inputs[1])
        if dim(index, -1) not in (1, None):
            # Numbers on several axes pick one row a route: what they pick is taken as it is.
            return None
        if node.attributes.get_int("batch_dims", 0) != 0 or dim(index, -1) != 1:
            raise NotThis
        return Rows(given(node.inputs[0]), found.here(index))
    if is_op(node, "GatherElements") and node.attributes.get_int("axis", 0) == 0:
        rows, index = given(node.inputs[0]), once_per_row(given(node.inputs[1]))
        if dim(index, -1) != 1 or rank(rows) != 2 or not _same_width(rows, value):
            raise NotThis
        return Rows(rows, found.here(index))
    if is_op(node, "ScatterND", "ScatterElements") and rank(value) == 2:
        index, rows = given(node.inputs[1]), given(node.inputs[2])
        if is_op(node, "ScatterElements"):
            index = once_per_row(index) if node.attributes.get_int("axis", 0) == 0 else index
        if dim(index, -1) != 1 or node.attributes.get_string("reduction", "none") != "none":
            raise NotThis
        expand = rows.producer()
        if expand is not None and is_op(expand, "Expand") and rank(given(expand.inputs[0])) == 2:
            rows = given(expand.inputs[0]) if _same_width(given(expand.inputs[0]), rows) else rows
        return Rows(rows, order=without_reshapes(index), k_first=found.k_first)
    if is_op(node, "OneHot"):
        if node.attributes.get_int("axis", -1) not in (-1, (rank(value) or 0) - 1) or not _zero_and_one(node.inputs[2]):
            raise NotThis
        found.none_beyond = True
        return Rows(None, found.here(given(node.inputs[0])))
    if is_op(node, "Equal"):
        return _equal_to_range(node, found)
    return None


def once_per_row(value: ir.Value) -> ir.Value:
    """``value`` before it was repeated along the columns."""
    node = value.producer()
    if node is None or not is_op(node, "Expand"):
        return value
    source = given(node.inputs[0])
    return source if rank(source) == rank(value) and dim(source, -1) == 1 else value


def _zero_and_one(value: ir.Value | None) -> bool:
    tensor = constant(value)
    return tensor is not None and tensor.size == 2 and [float(number) for number in tensor.numpy().ravel()] == [0, 1]


def _equal_to_range(node: ir.Node, found: Found) -> Rows:
    """``index[..., None] == arange(R)``: a one-hot matrix in which an entry of -1 has no one."""
    for position in (0, 1):
        index, counted = given(node.inputs[position]), given(node.inputs[1 - position])
        if dim(index, -1) == 1 and is_range(counted):
            found.none_beyond = True
            return Rows(None, found.here(index), masked=True)
    raise NotThis


def is_range(value: ir.Value) -> bool:
    """Whether ``value`` holds 0, 1, 2, ... along its last dimension, and has no other."""
    value = without_reshapes(value)
    if any(size != 1 for size in (dims(value) or [None])[:-1]):
        return False
    tensor = constant(value)
    if tensor is not None:
        return (
            tensor.dtype.is_integer()
            and tensor.size <= 65536
            and tensor.numpy().ravel().tolist() == list(range(tensor.size))
        )
    node = value.producer()
    if node is not None and is_op(node, "Cast") and value.dtype in INTEGERS:
        return is_range(given(node.inputs[0]))
    return node is not None and is_op(node, "Range") and scalar(node.inputs[0]) == 0 and scalar(node.inputs[2]) == 1


def _take_factor(node: ir.Node, product: ir.Value, found: Found) -> ir.Value | None:
    """Splits a product into its rows and what multiplies each row; None where it is another product."""
    for index in (0, 1):
        factor, routes = node.inputs[index], node.inputs[1 - index]
        if factor is None or routes is None or rank(routes) != rank(product) or not _same_width(routes, product):
            continue
        number = scalar(factor)
        if number and dims(routes) == dims(product):
            found.scale *= number
            return routes
        factor = once_per_row(factor)
        if _is_per_route(factor, product):
            _check_alike(factor, routes, found)
            take_weights(found.here(factor), found)
            return routes
        of = None if found.by_column else _few(factor, routes, found)
        if of is not None:
            found.weights.append(PerRoute(before_upcast(factor), found.k_first, of=of, over=routes))
            return routes
    return None


def _is_per_route(factor: ir.Value, product: ir.Value) -> bool:
    """Whether ``factor`` has one number a route: the shape of the product with a last dimension of 1."""
    shape, whole = dims(factor), dims(product)
    if shape is None or whole is None or len(shape) != len(whole) or shape[-1] != 1:
        return False
    return all(have != 1 or want == 1 for have, want in zip(shape[:-1], whole[:-1], strict=True))


def _few(factor: ir.Value, routes: ir.Value, found: Found) -> str | None:
    """What each number of ``factor`` is of, where it multiplies several ``routes``; see `PerRoute`."""
    known, whole = dims(factor), dims(routes)
    if known is None or whole is None or len(whole) not in (3, 4) or len(known) > len(whole):
        return None
    shape = [*[1] * (len(whole) - len(known)), *known]
    if shape[-1] != 1 or (found.k_first and len(whole) != 3):
        return None
    k = 0 if found.k_first else len(whole) - 2
    tokens = [axis for axis in range(len(whole) - 1) if axis != k]
    repeated = [shape[axis] == 1 for axis in tokens]
    if all(repeated):
        return "" if shape[k] == 1 else "k" if surely_equal(shape[k], found.top_k) else None
    if any(repeated) or shape[k] != 1 or may_be_repeated(whole[k], found.top_k):
        return None
    return None if any(may_be_repeated(shape[axis], whole[axis]) for axis in tokens) else "t"


def _check_alike(one: ir.Value, other: ir.Value, found: Found) -> None:
    """Puts down where one of two values with numbers for each route may be repeated along the other's tokens or k."""
    whole = dims(other) or []
    pairs = list(zip(column_sizes(one, whole)[:-1], whole[:-1], strict=False))
    repeated = [pair for pair in pairs if may_be_repeated(*pair)]
    if repeated and repeated == pairs[:1] and all(map(is_named, pairs[0])):
        found.other_tokens = found.other_tokens or unlike(one, other)
    elif repeated or has_other_length(one, whole[0]):
        found.unlike = found.unlike or unlike(one, other)
    elif has_other_length(other, dim(one, 0)):
        found.other_tokens = found.other_tokens or unlike(one, other)


def _check_lengths(index: PerRoute, found: Found) -> None:
    """Puts down where weights [T, K] meet a map that is made of a part of T tokens, or the other way round."""
    for weights in found.weights:
        places = [(place.value, int(place.k_first)) for place in (index, weights) if rank(place.value) == 2]
        for (one, axis), (other, along) in permutations(places, 2):
            if weights.of is None and has_other_length(one, dim(other, along), axis):
                found.unlike = found.unlike or unlike(weights.value, index.value)


def unlike(one: ir.Value, other: ir.Value) -> str:
    """What is wrong with two values that meet in one node."""
    return (
        f"'{one.name}' of shape {dims(one)} meets '{other.name}' of shape {dims(other)}: where the graph does not say "
        "that two dimensions are one, either may be 1, and would be repeated; give both the same name or number"
    )


def _take_mask(node: ir.Node, found: Found) -> ir.Value | None:
    condition, zeroed = given(node.inputs[0]), _split_where(node)
    kept = zeroed or _split_operators_where(node, found)
    if kept is None or rank(condition) != rank(kept) or dim(condition, -1) != 1:
        return None
    is_kept = kept is node.inputs[1]
    _check_alike(condition, kept, found)
    mask = _mask(found.here(condition), is_kept, found)
    sizes = zip(dims(condition) or [], (dims(kept) or [])[:-1], strict=False)
    truth: tuple[PerRoute, bool] | None = None
    if zeroed is not None and not found.by_column and not any(may_be_repeated(one, other) for one, other in sizes):
        truth = strip(found.here(condition), found), is_kept
    if mask is not None:
        found.masks.append(replace(mask, condition=truth))
    elif truth is not None:
        found.kept.append(truth)
    else:
        return None
    return kept


def set_other_masks_apart(found: Found, base: PerRoute | None) -> None:
    """Has masks that are made from another value than the map ``base`` drop rows from it, or multiply the weights."""
    masks, found.masks = found.masks, []
    for mask in masks:
        if mask == base:
            found.masks.append(mask)
        elif mask.condition is not None:
            found.kept.append(mask.condition)
        elif mask.factor is not None:
            found.weights.append(mask.factor)
        else:
            found.masks.append(mask)


def _split_where(node: ir.Node) -> ir.Value | None:
    """What a Where keeps, if the other operand is 0."""
    for index in (1, 2):
        if scalar(node.inputs[index]) == 0:
            return node.inputs[3 - index]
    return None


def _split_operators_where(node: ir.Node, found: Found) -> ir.Value | None:
    """What a Where keeps, if the other operand is 0 where the map is -1, and NaN elsewhere: the operator's own body."""
    other = without_reshapes(given(node.inputs[2])).producer()
    if other is None or not is_op(other, "Where") or scalar(other.inputs[1]) != 0 or not _is_nan(other.inputs[2]):
        return None
    absent = _mask(found.here(given(other.inputs[0])), False, found)
    kept = _mask(found.here(given(node.inputs[0])), True, found)
    if absent is None or absent != kept:
        return None
    # The operator's weights have its map's shape.
    found.nan_beyond = found.same_tokens = True
    return node.inputs[1]


def _is_nan(value: ir.Value | None) -> bool:
    tensor = constant(value)
    return tensor is not None and tensor.size == 1 and math.isnan(float(tensor.numpy().ravel()[0]))


def take_weights(place: PerRoute, found: Found) -> None:
    """Splits what multiplies the rows into weights and masks."""
    place = strip(place, found)
    node = place.value.producer()
    source = node.inputs[0] if node is not None and is_op(node, "Cast") else None
    if source is not None and source.dtype == ir.DataType.BOOL:
        mask = _mask(replace(place, value=source), True, found)
        if mask is None:
            found.weights.append(place)
        else:
            found.masks.append(replace(mask, factor=place))
    elif source is not None and before_upcast(place.value) is source:
        take_weights(replace(place, value=source), found)
    elif node is not None and not all(_has_shape_of(operand, place.value) for operand in node.inputs):
        # What is repeated has no number for each route: the product is the weights.
        found.weights.append(place)
    elif node is not None and is_op(node, "Where") and (kept := _split_where(node)) is not None:
        mask = _mask(replace(place, value=given(node.inputs[0])), kept is node.inputs[1], found)
        if mask is None:
            found.weights.append(place)
        else:
            found.masks.append(mask)
            take_weights(replace(place, value=kept), found)
    elif node is not None and is_op(node, "Mul") and any(_is_bool_cast(operand) for operand in node.inputs):
        factors = replace(found, masks=[], weights=[], counted=[])
        for operand in node.inputs:
            take_weights(replace(place, value=given(operand)), factors)
        if len(factors.weights) > 1:
            # Truth values that name no entries of a map are a factor as any other: the product is the weights.
            found.weights.append(place)
        else:
            found.weights += factors.weights
            found.masks += factors.masks
            found.counted += factors.counted
    else:
        found.weights.append(place)


def _has_shape_of(operand: ir.Value | None, value: ir.Value) -> bool:
    """Whether an operand is not repeated in ``value``; the 0 of a Where is."""
    if operand is None or scalar(operand) == 0:
        return True
    shape, whole = dims(operand) or [], dims(value) or []
    return len(shape) == len(whole) and not any(map(may_be_repeated, shape, whole))


def _is_bool_cast(value: ir.Value | None) -> bool:
    if value is None:
        return False
    node = without_reshapes(value).producer()
    return node is not None and is_op(node, "Cast") and given(node.inputs[0]).dtype == ir.DataType.BOOL


def takes_the_only_one(node: ir.Node) -> bool:
    """Whether ``node`` takes index 0 of an axis of size 1, which then is gone: ``value[:, 0]`` for a Squeeze."""
    source, index = input_of(node, 0), constant(input_of(node, 1))
    if not is_op(node, "Gather") or source is None or index is None or index.shape.rank() != 0:
        return False
    return dim(source, node.attributes.get_int("axis", 0)) == 1 and scalar(node.inputs[1]) in (0, -1)


def without_reshapes(value: ir.Value) -> ir.Value:
    """``value`` before it was given further dimensions of 1, or flattened."""
    while (node := value.producer()) is not None and (is_op(node, *_RESHAPES) or takes_the_only_one(node)):
        value = given(node.inputs[0])
    return value


def strip(place: PerRoute, found: Found) -> PerRoute:
    """The same numbers before they were reshaped, transposed, widened (integers) or, in a term, selected by k."""
    while True:
        value = place.value
        node = value.producer()
        source = node.inputs[0] if node is not None and node.inputs else None
        if node is None or source is None:
            return place
        reshaped = is_op(node, *_RESHAPES) or takes_the_only_one(node)
        if reshaped or (is_op(node, "Cast") and _keeps_numbers(source, value)):
            place = replace(place, value=source)
        elif is_op(node, "Transpose") and rank(source) == 2 and permutation_of(node) in ([1, 0], None):
            if dim(source, 1 if place.k_first else 0) != found.top_k:
                return place
            place = replace(place, value=source, k_first=not place.k_first)
        elif is_op(node, "Transpose") and (moved := _moves_k(node, source, place, found)) is not None:
            place = moved
        elif found.by_column and place.column is None and (selected := _selected(node, value, found)) is not None:
            place = selected
        else:
            return place


def _moves_k(node: ir.Node, source: ir.Value, place: PerRoute, found: Found) -> PerRoute | None:
    """The [B, S, K] that a Transpose makes [K, B, S] from, or the other way round; None where it does neither."""
    if permutation_of(node) != ([2, 0, 1] if place.k_first else [1, 2, 0]):
        return None
    if dim(source, 2 if place.k_first else 0) != found.top_k:
        return None
    return replace(place, value=source, k_first=not place.k_first)


def _keeps_numbers(source: ir.Value, value: ir.Value) -> bool:
    """Whether a Cast changes no number: between integers, or from truth values to such."""
    return {source.dtype, value.dtype} <= set(INTEGERS) or source.dtype == value.dtype == ir.DataType.BOOL


def _selected(node: ir.Node, value: ir.Value, found: Found) -> PerRoute | None:
    """The [T, K], [B, S, K] or [K, T] of which ``value`` is one k."""
    source = given(node.inputs[0])
    if rank(source) == 3 and dim(source, 2) == found.top_k:
        column = selected_on(node, value, 2)
        return None if column is None else PerRoute(source, False, column)
    if rank(source) != 2:
        return None
    for axis, k_first in ((1, False), (0, True)):
        if dim(source, axis) != found.top_k or dim(source, 1 - axis) == found.top_k:
            continue
        column = selected_on(node, value, axis)
        if column is not None:
            return PerRoute(source, k_first, column)
    return None


def selected_on(node: ir.Node, value: ir.Value, axis: int) -> int | None:
    """The one index on ``axis`` that a Gather, Slice or Split selects; None where it selects something else."""
    source = given(node.inputs[0])
    count, ndim = dim(source, axis), rank(source)
    if not isinstance(count, int) or ndim is None:
        return None
    if is_op(node, "Gather") and node.attributes.get_int("axis", 0) in (axis, axis - ndim):
        tensor = constant(node.inputs[1])
        index = ints(node.inputs[1]) if tensor is not None and tensor.size == 1 else None
        start = index[0] if index else None
    elif is_op(node, "Slice"):
        along, steps = ints(input_of(node, 3)), ints(input_of(node, 4))
        starts, ends = ints(node.inputs[1]), ints(node.inputs[2])
        if not starts or not ends or along not in ([axis], [axis - ndim]) or steps not in ([1], None):
            return None
        end = min(ends[0] + count if ends[0] < 0 else ends[0], count)
        start = starts[0] if end - (starts[0] + count if starts[0] < 0 else starts[0]) == 1 else None
    elif is_op(node, "Split") and node.attributes.get_int("axis", 0) in (axis, axis - ndim):
        # One output for each index, or they would not all be selections of one.
        start = list(node.outputs).index(value) if len(node.outputs) == count else None
    else:
        return None
    if start is None or not -count <= start < count:
        return None
    return start + count if start < 0 else start


_KEEPS = {
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
}
"""By comparison and its constant operands: whether it is true of a map's entries of 0 and more."""


def _mask(condition: PerRoute, keeps: bool, found: Found) -> PerRoute | None:
    """The map whose entries of 0 and more ``condition`` keeps; ``keeps`` False: whose -1 it names."""
    place = strip(condition, found)
    node = place.value.producer()
    if node is None:
        return None
    if is_op(node, "Not"):
        return _mask(replace(place, value=given(node.inputs[0])), not keeps, found)
    if len(node.inputs) != 2:
        return None
    if is_op(node, "And") and keeps:
        return _mask_with_bound(replace(place, value=given(node.inputs[0])), given(node.inputs[1]), found)
    first, second = scalar(node.inputs[0]), scalar(node.inputs[1])
    if _KEEPS.get((node.op_type, first, second)) is not keeps:
        return None
    place = strip(replace(place, value=given(node.inputs[0] if first is None else node.inputs[1])), found)
    return replace(place, below=node.op_type == "Equal")


def _mask_with_bound(place: PerRoute, bound: ir.Value, found: Found) -> PerRoute | None:
    """The map in ``(map >= 0) & (map < R)``."""
    mask = _mask(place, True, found)
    less = strip(replace(place, value=bound), found).value.producer()
    if mask is None or less is None or not is_op(less, "Less"):
        return None
    if strip(replace(place, value=given(less.inputs[0])), found) != mask:
        return None
    counted = _counted(given(less.inputs[1]))
    if counted is None:
        return None
    found.counted.append(counted)
    return mask


def index_of(place: PerRoute, rows: ir.Value | None, found: Found) -> tuple[PerRoute, PerRoute | None]:
    """The map behind the indices of a Gather, and the indices, where these are the map clamped to 0 and more.

    What a mask is made from is the map, also where it was clamped before both. Bounds of R - 1 or more that the indices
    have and the map has not are put down in ``found``.
    """
    outermost: PerRoute | None = None
    is_raised = False
    while True:
        place = strip(place, found)
        node = place.value.producer()
        if node is None or place in found.masks:
            break
        operands = [operand for operand in node.inputs if operand is not None]
        kept: ir.Value | None = None
        bound: tuple[int | None] | None = None
        if is_op(node, "Clip"):
            low, upper = input_of(node, 1), input_of(node, 2)
            bound = _last_row(upper, rows)
            if (low is None or scalar(low) == 0) and (upper is None or bound is not None):
                kept, is_raised = operands[0], is_raised or low is not None
        elif is_op(node, "Max") and len(operands) == 2:
            kept = next((operands[1 - i] for i in (0, 1) if scalar(operands[i]) == 0), None)
            is_raised = is_raised or kept is not None
        elif is_op(node, "Where"):
            kept = _masked_index(place, node, found)
            is_raised = is_raised or kept is not None
        elif is_op(node, "Min") and len(operands) == 2:
            position = next((i for i in (0, 1) if _last_row(operands[i], rows) is not None), None)
            if position is not None:
                kept, bound = operands[1 - position], _last_row(operands[position], rows)
        if kept is None:
            break
        found.at_most |= set(bound or ())
        outermost = outermost or place
        place = replace(place, value=kept)
    return place, outermost if is_raised else None


def _last_row(bound: ir.Value | None, rows: ir.Value | None) -> tuple[int | None] | None:
    """``bound`` where it is R - 1 or more: the number, or None for what the graph computes as R - 1."""
    if rows is None or bound is None:
        return None
    number, count = scalar(bound), dim(rows, 0)
    if number is not None:
        return (int(number),) if isinstance(count, int) and number >= count - 1 else None
    less = _integer(bound).producer()
    if less is None or not is_op(less, "Sub") or scalar(less.inputs[1]) != 1:
        return None
    counted = _counted(given(less.inputs[0]))
    return (None,) if counted is not None and before_upcast(counted) is before_upcast(rows) else None


def _counted(count: ir.Value) -> ir.Value | None:
    """What has ``count`` rows, where the graph takes that number off its shape."""
    source = _integer(count).producer()
    if source is not None and is_op(source, "Gather"):
        if scalar(source.inputs[1]) != 0:
            return None
        source = given(source.inputs[0]).producer()
    if source is None or not is_op(source, "Shape") or source.attributes.get_int("start", 0) != 0:
        return None
    return source.inputs[0]


def _integer(value: ir.Value) -> ir.Value:
    """An integer before it was widened or reshaped."""
    return strip(PerRoute(value), Found(top_k=-1)).value


def _masked_index(place: PerRoute, node: ir.Node, found: Found) -> ir.Value | None:
    """The map in ``where(map >= 0, map, a row)``."""
    for index in (1, 2):
        fill = scalar(node.inputs[index])
        if fill is not None and fill >= 0:
            kept = given(node.inputs[3 - index])
            mask = _mask(replace(place, value=given(node.inputs[0])), index == 2, found)
            return kept if mask is not None and mask == strip(replace(place, value=kept), found) else None
    return None


def never_negative(value: ir.Value) -> bool:
    """Whether the graph shows that a map without a mask holds no -1: sorting gives it, or a clamp, or a range."""
    return lowest(value) >= 0


def are_rows(value: ir.Value, *ranks: int) -> bool:
    """Whether ``value`` can be the experts' rows: floats that the model computes; a table of embeddings is constant."""
    return not is_constant(value) and rank(value) in ranks and value.dtype in FLOAT_DTYPES


def is_repeated(rows: ir.Value) -> bool:
    """Whether what nothing picks may be one row, which is repeated for all routes: it is, or it is a part of others."""
    # The name that `moetrt.shapes` gives a part.
    is_part = is_op(rows.producer(), "Slice") and dim(rows, 0) == f"{rows.name}_dim_0"
    return rank(rows) == 2 and (is_part or dim(rows, 0) == 1)


def picked_seed(
    form: str,
    end: ir.Node,
    rows: ir.Value,
    index: PerRoute,
    found: Found,
    *,
    masked: bool = False,
    only_read: ir.Value | None = None,
) -> Seed:
    """The seed of rows that a map picks.

    Args:
        form: how the graph spells it.
        end: the node that makes the sum.
        rows: [R, H].
        index: the numbers of the rows, as the graph has them.
        found: what multiplies and masks the picked rows.
        masked: whether an index of -1 picks nothing in any case.
        only_read: where ``rows`` is what a clamp's bound is made from, another name of it.
    """
    base, clamped = index_of(index, only_read or rows, found)
    _check_lengths(base, found)
    # What is clamped has no -1 left that picks nothing.
    masked = masked and clamped is None
    operand, problem = map_operand(end, base, clamped, found, masked=masked, rows=rows, only_read=only_read)
    return weighted_seed(form, end, rows, found, operand, problem)


def map_operand(
    end: ir.Node,
    base: PerRoute,
    clamped: PerRoute | None,
    found: Found,
    *,
    masked: bool,
    rows: ir.Value,
    only_read: ir.Value | None = None,
) -> tuple[Operand, str | None]:
    """The map as an operand, and what is wrong with it.

    Args:
        end: the node that makes the sum.
        base: the map.
        clamped: the map clamped to 0 and more, where it is.
        found: what masks the rows.
        masked: whether an entry of -1 picks nothing in any case.
        rows: [R, H].
        only_read: as of `picked_seed`.
    """
    problem = _other_count(base, found, only_read or rows)
    set_other_masks_apart(found, base)
    if any(mask != base for mask in found.masks):
        problem = f"the mask of {named(end)} is made from another value than the map '{base.value.name}'"
    elif not found.masks and not masked and found.kept:
        read, complaint = per_route_operand(clamped or base, found.top_k)
        read = _from_end(read, rows)
        read = read if clamped else lowered(read, found, rows)
        return _only_rows(read, rows) if found.none_beyond else read, problem or complaint
    elif not found.masks and not masked and clamped is None and not never_negative(base.value):
        problem = (
            f"entries of -1 in the map '{base.value.name}' would read the last row: mask them "
            "(torch.where(map >= 0, rows, 0)), or clamp the map"
        )
    # Where nothing masks, the clamp decides which row an entry of -1 reads.
    entries = base if found.masks or masked or clamped is None else clamped
    operand, complaint = per_route_operand(entries, found.top_k)
    unlike = (found.masks or masked) and not found.nan_beyond
    if unlike and not problem and not complaint and lowest(base.value) < -1:
        # The operator takes -1 for a route without a row; a mask may take every number below 0 for one.
        if masked or not all(mask.below for mask in found.masks):
            operand = raised(operand, -1)
        else:
            read, complaint = per_route_operand(clamped or base, found.top_k)
            operand = _but_minus_one(operand, read, rows)
    if found.counted and not found.nan_beyond:
        operand = _only_rows(operand, rows)
    if entries is not clamped:
        operand = lowered(operand, found, rows)
    return _only_rows(operand, rows) if found.none_beyond else operand, problem or complaint


def _other_count(base: PerRoute, found: Found, rows: ir.Value) -> str | None:
    """What is wrong with a mask that drops entries which are not below a number of rows."""
    for counted in found.counted:
        if before_upcast(counted) is not before_upcast(rows):
            return (
                f"the map '{base.value.name}' is masked where it is not below the number of rows of '{counted.name}', "
                f"which is not what it picks, '{rows.name}'"
            )
    return None


def _row_count(write: Write, rows: ir.Value) -> ir.Value:
    """R as [1], int32."""
    return written(Operand(write("Shape", [rows], {"end": 1}, ir.DataType.INT64, [1]), _INT32), write)


def _only_rows(index: Operand, rows: ir.Value) -> Operand:
    """``index`` with -1 for entries that are not below R: what the graph's own mask drops."""

    def make(write: Write) -> ir.Value:
        entries = written(replace(index, cast_to=_INT32), write)
        below = write("Less", [entries, _row_count(write, rows)], {}, ir.DataType.BOOL, [])
        below.shape = entries.shape
        return _choose(write, below, entries, _number(write, -1), entries)

    return Operand(index.value, _INT32, make=make)


def lowered(index: Operand, found: Found, rows: ir.Value) -> Operand:
    """``index`` with its entries bounded from above as the graph does it: the operator makes NaN of those beyond."""
    if not found.at_most:
        return index

    def make(write: Write) -> ir.Value:
        entries = written(replace(index, cast_to=_INT32), write)
        bounds = [
            write("Sub", [_row_count(write, rows), _number(write, 1)], {}, _INT32, [1])
            if number is None
            else _number(write, number)
            for number in found.at_most
        ]
        made = write("Min", [entries, *bounds], {}, _INT32, [])
        made.shape = entries.shape
        return made

    return Operand(index.value, _INT32, make=make)


def raised(index: Operand, least: int) -> Operand:
    """``index`` with its entries below ``least`` made ``least``."""

    def make(write: Write) -> ir.Value:
        entries = written(replace(index, cast_to=None), write)
        bound = write("Constant", [], {"value": ir.tensor(least, dtype=entries.dtype)}, entries.dtype, [])
        made = write("Max", [entries, bound], {}, entries.dtype, [])
        made.shape = entries.shape
        return made

    return Operand(index.value, index.cast_to, make=make)


def _number(write: Write, value: int) -> ir.Value:
    return write("Constant", [], {"value": ir.tensor(value, dtype=_INT32)}, _INT32, [])


def _choose(write: Write, where: ir.Value, yes: ir.Value, no: ir.Value, like: ir.Value) -> ir.Value:
    chosen = write("Where", [where, yes, no], {}, _INT32, [])
    chosen.shape = like.shape
    return chosen


def _compared(write: Write, how: str, entries: ir.Value, than: int) -> ir.Value:
    where = write(how, [entries, _number(write, than)], {}, ir.DataType.BOOL, [])
    where.shape = entries.shape
    return where


def _from_end(read: Operand, rows: ir.Value) -> Operand:
    """The numbers of the rows that a Gather reads: entries below 0 count from the end."""
    if lowest(read.value) >= 0:
        return read

    def make(write: Write) -> ir.Value:
        places = written(replace(read, cast_to=_INT32), write)
        from_end = write("Add", [places, _row_count(write, rows)], {}, _INT32, [])
        from_end.shape = places.shape
        return _choose(write, _compared(write, "Less", places, 0), from_end, places, places)

    return Operand(read.value, _INT32, make=make)


def _but_minus_one(index: Operand, read: Operand, rows: ir.Value) -> Operand:
    """The map where a mask spares all entries of ``index`` but -1: what ``read`` names, from the end below 0."""

    def make(write: Write) -> ir.Value:
        entries, places = (
            written(replace(operand, cast_to=_INT32), write) for operand in (index, _from_end(read, rows))
        )
        return _choose(write, _compared(write, "Equal", entries, -1), _number(write, -1), places, entries)

    return Operand(index.value, _INT32, make=make)


def _dropping(index: Operand | None, found: Found) -> tuple[Operand, str | None]:
    """The map, or the routes' own numbers where there is none, with -1 for the rows that are not kept."""
    conditions = [(per_route_operand(place, found.top_k), is_kept) for place, is_kept in found.kept]
    first = conditions[0][0][0]

    def make(write: Write) -> ir.Value:
        truths = [(written(operand, write), is_kept) for (operand, _), is_kept in conditions]
        if index is not None:
            entries = written(replace(index, cast_to=_INT32), write)
        else:
            entries = written(Operand(_numbered(write, truths[0][0]), _INT32), write)
        for truth, is_kept in truths:
            absent = _number(write, -1)
            entries = _choose(write, truth, *((entries, absent) if is_kept else (absent, entries)), truth)
        return entries

    complaint = next((complaint for (_, complaint), _ in conditions if complaint is not None), None)
    return Operand(first.value if index is None else index.value, _INT32, make=make), complaint


def _numbered(write: Write, like: ir.Value) -> ir.Value:
    """0, 1, 2, ... in the shape of ``like``, int64."""
    int64 = ir.DataType.INT64
    zero, one = (write("Constant", [], {"value": ir.tensor(n, dtype=int64)}, int64, []) for n in (0, 1))
    numbers = write("Range", [zero, write("Size", [like], {}, int64, []), one], {}, int64, [None])
    numbers = write("Reshape", [numbers, write("Shape", [like], {}, int64, [rank(like)])], {}, int64, [])
    numbers.shape = like.shape
    return numbers


def weighted_seed(
    form: str,
    end: ir.Node,
    rows: ir.Value | Operand,
    found: Found,
    index: Operand | None,
    problem: str | None = None,
) -> Seed:
    """The seed of these rows, what multiplies them, and their map; ``index`` None: they lie in the routes' order."""
    if found.kept:
        index, complaint = _dropping(index, found)
        problem = problem or complaint
    data = rows if isinstance(rows, Operand) else _flat(before_upcast(rows))
    operands: dict[str, Operand] = {"gemm2_permuted": data}
    rounded = next((value for value in found.casts if not keeps(value.dtype, data.value.dtype)), None)
    if rounded is not None:
        problem = problem or (
            f"'{rounded.name}' is rounded to {dtype_name(rounded.dtype)} on the way from the rows, which are "
            f"{dtype_name(data.value.dtype)}, to their sum; the operator does not round there: leave out this Cast"
        )
    if found.weights:
        factors = []
        for weights in found.weights:
            factor, complaint = per_route_operand(weights, found.top_k, index)
            factors.append(factor)
            problem = problem or complaint
            if weights.value.dtype not in (data.value.dtype, ir.DataType.FLOAT):
                problem = problem or (
                    f"the weights '{weights.value.name}' are {weights.value.dtype}; the rows are {data.value.dtype}"
                )
        operands["expert_weights"] = factors[0] if len(factors) == 1 else _product(factors)
    elif index is not None:
        # Not read where the attribute is 0, but it gives T and K.
        operands["expert_weights"] = replace(index, cast_to=ir.DataType.FLOAT)
    if index is not None:
        operands["expanded_idx_to_permuted_idx"] = index
        if not found.same_tokens:
            problem = problem or _other_tokens(operands["expert_weights"], index)
    problem = problem or found.different
    return Seed(
        form=form,
        node=end,
        value=end.outputs[0],
        operands=operands,
        scale=found.scale,
        apply_expert_weights=int(bool(found.weights)),
        problem=problem,
        own_body=found.nan_beyond,
        placed=found.placed,
    )


def _flat(rows: ir.Value) -> Operand:
    """Rows as an operand of shape [R, H]."""
    width = dim(rows, -1)
    return Operand(rows, reshape_to=(-1, width) if rank(rows) != 2 and isinstance(width, int) else None)


def _product(factors: list[Operand]) -> Operand:
    """Weights that several factors make, each of shape [T, K] or a 1 in place of either: float32."""

    def make(write: Write) -> ir.Value:
        product, *others = (written(replace(factor, cast_to=ir.DataType.FLOAT), write) for factor in factors)
        for other in others:
            product = write("Mul", [product, other], {}, ir.DataType.FLOAT, dims(product) or [])
        return product

    return Operand(factors[0].value, make=make)


def _other_tokens(weights: Operand, index: Operand) -> str | None:
    """What is wrong with weights [U, K] and a map [T, K]: one of them may be repeated."""
    values = (weights.value, index.value)
    if any(rank(value) != 2 for value in values) or weights.make is not None or weights.reshape_to is not None:
        return None
    one, other = (dim(value, 0) for value in values)
    if dim(weights.value, 1) != dim(index.value, 1):
        return None
    if not (is_said(one) and is_said(other)) or surely_equal(one, other):
        return None
    return (
        f"the weights '{weights.value.name}' have '{one}' rows and the map '{index.value.name}' has '{other}': either "
        "may be 1, and would be repeated; give both the same name"
    )


def per_route_operand(
    place: PerRoute, top_k: int | str | None, like: Operand | None = None
) -> tuple[Operand, str | None]:
    """One number a route, as an operand of shape [T, K]; and what is wrong with it.

    Args:
        place: the numbers.
        top_k: K.
        like: something of shape [T, K], where the graph has it.
    """
    value = place.value
    if place.by_row and like is not None:
        return Operand(value, make=lambda write: _picked_by_row(write, value, like)), None
    if place.over is not None:
        if not isinstance(top_k, int):
            return Operand(value), _unknown_k(value)
        return Operand(value, make=lambda write: _spread(write, place, top_k, like)), None
    cast = ir.DataType.INT32 if value.dtype == ir.DataType.INT64 else None
    if place.k_first:
        if rank(value) != 2 and not isinstance(top_k, int):
            return Operand(value, cast), _unknown_k(value)
        if rank(value) == 2 and not isinstance(dim(value, 0), int) and dim(value, 0) != top_k:
            return Operand(value, cast), _may_be_for_all(value, dim(value, 0), top_k)
        return Operand(value, cast, make=lambda write: _transposed(write, value, top_k)), None
    if rank(value) == 2 and dim(value, 1) == top_k:
        return Operand(value, cast), None
    if rank(value) == 2 and is_named(dim(value, 1)) and not isinstance(dim(value, 0), int):
        return Operand(value, cast), _may_be_for_all(value, dim(value, 1), top_k)
    if isinstance(top_k, int):
        known = dims(value) or []
        is_unclear = sum(size != 1 for size in known) > 1 and not isinstance(known[-1], int) and top_k not in known
        return Operand(value, cast, (-1, top_k)), _may_be_for_all(value, known[-1], top_k) if is_unclear else None
    return Operand(value, cast), _unknown_k(value)


def unit_weights(routes: ir.Value, top_k: int) -> Operand:
    """Weights of 1 for rows [..., H] that lie in the routes' order: float32 [T, K].

    Their operator does not read them where its attribute is 0, but they give it T and K.
    """
    leading = (dims(routes) or [])[:-1]

    def make(write: Write) -> ir.Value:
        sizes = write("Shape", [routes], {"start": 0, "end": -1}, ir.DataType.INT64, [len(leading)])
        one = ir.tensor([1.0], dtype=ir.DataType.FLOAT)
        return write("ConstantOfShape", [sizes], {"value": one}, ir.DataType.FLOAT, leading)

    return Operand(routes, reshape_to=None if len(leading) == 2 else (-1, top_k), make=make)


def _may_be_for_all(value: ir.Value, columns: int | str | None, top_k: int | str | None) -> str:
    return (
        f"'{value.name}' has '{columns}' columns, which may be one for all of a token's {top_k} routes: "
        "give it the number of routes"
    )


def _unknown_k(value: ir.Value) -> str:
    return f"'{value.name}' has shape {dims(value)}; [T, K] is taken where K is no number"


def _spread(write: Write, place: PerRoute, top_k: int, like: Operand | None) -> ir.Value:
    """[T, K] out of one number a token, one a place among its routes, or one for all."""
    int64 = ir.DataType.INT64
    sizes = {"t": [-1, 1], "k": [1, -1], "": [1, 1]}[str(place.of)]
    numbers = write("Constant", [], {"value": ir.tensor(sizes, dtype=int64)}, int64, [2])
    few = write("Reshape", [place.value, numbers], {}, place.value.dtype, [None if size == -1 else 1 for size in sizes])
    if like is not None:
        whole = written(replace(like, cast_to=None), write)
    else:
        assert place.over is not None
        whole = written(unit_weights(place.over, top_k), write)
        if place.k_first:
            whole = write("Transpose", [whole], {"perm": [1, 0]}, whole.dtype, [None, top_k])
    shape = write("Shape", [whole], {}, int64, [2])
    return expanded(write, few, shape, [dim(whole, 0), top_k])


def _picked_by_row(write: Write, value: ir.Value, index: Operand) -> ir.Value:
    """[T, K] out of one number a row."""
    int64 = ir.DataType.INT64
    flat = write("Constant", [], {"value": ir.tensor([-1], dtype=int64)}, int64, [1])
    numbers = write("Reshape", [value, flat], {}, value.dtype, [None])
    places = written(replace(index, cast_to=None), write)
    picked = write("Gather", [numbers, places], {"axis": 0}, value.dtype, [])
    picked.shape = places.shape
    return picked


def _transposed(write: Write, value: ir.Value, top_k: int | str | None) -> ir.Value:
    """[T, K] out of [K, T]."""
    if rank(value) != 2 or dim(value, 0) != top_k:
        sizes = write(
            "Constant", [], {"value": ir.tensor([int(top_k or 0), -1], dtype=ir.DataType.INT64)}, ir.DataType.INT64, [2]
        )
        value = write("Reshape", [value, sizes], {}, value.dtype, [top_k, None])
    return write("Transpose", [value], {"perm": [1, 0]}, value.dtype, [dim(value, 1), dim(value, 0)])


def summed_axis(node: ir.Node, ndim: int) -> tuple[int, ir.Node] | None:
    """The one axis that a ReduceSum takes away, and the node after which it is gone; a Squeeze may follow."""
    found = axes(node, [])
    if found is None or len(found) != 1:
        return None
    axis = found[0] % ndim
    if node.attributes.get_int("keepdims", 1) == 0:
        return axis, node
    end = squeezed(node.outputs[0], axis)
    return None if end is None else (axis, end)


def squeezed(value: ir.Value, axis: int) -> ir.Node | None:
    """The node after which ``axis`` of ``value``, of size 1, is gone and nothing else changed; Casts may come first."""
    node = sole_reader(value)
    while node is not None and _keeps_floats(node, value):
        source = cast_source(value)
        if is_op(node, "Cast") and source is not None and not keeps(value.dtype, source.dtype):
            return None  # rounded, and then cast again
        value = node.outputs[0]
        node = sole_reader(value)
    if node is None or node.inputs[0] is not value:
        return None
    before, after = dims(value), dims(node.outputs[0])
    if takes_the_only_one(node):
        return node if node.attributes.get_int("axis", 0) in (axis, axis - len(before or [])) else None
    if is_op(node, "Squeeze"):
        taken = axes(node, [])
        return node if taken is not None and [a % len(before or [0]) for a in taken] == [axis] else None
    if not is_op(node, "Reshape") or before is None or after is None or len(after) != len(before) - 1:
        return None
    return node if before[axis] == 1 and after[-1] == [*before[:axis], *before[axis + 1 :]][-1] else None


def _keeps_floats(node: ir.Node, value: ir.Value) -> bool:
    """Whether ``node`` gives ``value`` another dtype, or slices all of it."""
    if is_op(node, "Slice"):
        return node.inputs[0] is value and _is_view(node, value, node.outputs[0])
    return is_op(node, "Cast") and node.outputs[0].dtype in FLOAT_DTYPES
