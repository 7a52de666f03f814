"""Routers: the nodes that choose a token's experts, and which of them reach no tail that was found."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from moetrt.segments.constants import ints, is_constant
from moetrt.segments.reading import SHAPE_OPS, dim, dims, input_of, is_op, named, rank, readers

FORM = "router"

_MOST_EXPERTS = 2048
_MOST_ROUTES = 64
_MOST_NODES = 64
_MOST_READERS = 512

_SAME_NUMBERS = ("Cast", "Identity", "Transpose", *SHAPE_OPS)

_PRODUCTS = ("MatMul", "Gemm", "Conv", "Einsum", "MatMulInteger", "QLinearMatMul")
_ONNXRUNTIME = "com.microsoft"
_QUANTISED_PRODUCTS = ("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
_WHOLE_LAYERS = ("MoE", "QMoE")


def _is_product(node: ir.Node) -> bool:
    """Whether ``node`` is a product, ONNX Runtime's with quantised weights too."""
    return is_op(node, *_PRODUCTS) or (node.domain == _ONNXRUNTIME and node.op_type in _QUANTISED_PRODUCTS)


def is_routed(weights: ir.Value) -> bool:
    """Whether a TopK, or an ArgMax among experts, chose what ``weights`` holds."""
    seen: set[ir.Node] = set()
    pending = [weights]
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop().producer()
        if node is None or node in seen or _makes_scores(node):
            continue
        if is_op(node, "TopK") or _chosen(node) is not None:
            return True
        seen.add(node)
        pending += [value for value in node.inputs if value is not None]
    return False


def chosen_of(ids: ir.Value) -> int | None:
    """How many experts there are, where a TopK along them gave ``ids`` as it is."""
    node = ids.producer()
    if node is None or not is_op(node, "TopK") or ids is not node.outputs[1] or node.inputs[0] is None:
        return None
    ndim = rank(node.inputs[0])
    if ndim is None or node.attributes.get_int("axis", -1) not in (-1, ndim - 1):
        return None
    count = dim(node.inputs[0], ndim - 1)
    return count if isinstance(count, int) else None


def by_chosen_experts(rows: ir.Value, top_k: int) -> bool:
    """Whether experts that a router chose, K a token, made ``rows``: it picked the weights of their last product."""
    seen: set[ir.Node] = set()
    pending = [rows]
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        operands = [value for value in node.inputs if value is not None]
        if _is_product(node) and any(_picked_by_router(operand, top_k) for operand in operands):
            return True
        # A bias of each expert may be added to its product.
        if is_op(node, "Add", *_SAME_NUMBERS):
            pending += operands
    return False


def _picked_by_router(weight: ir.Value, top_k: int) -> bool:
    """Whether ``weight`` holds the weights of the experts that a router chose, out of all experts'."""
    node = weight.producer()
    while is_op(node, "DequantizeLinear", *_SAME_NUMBERS) and node is not None and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or not is_op(node, "Gather", "GatherND") or node.inputs[0] is None:
        return False
    # A table of words, [V, H], has one row each; an expert's weights are a matrix.
    if not _is_weight(node.inputs[0]) or (rank(node.inputs[0]) or 0) < 3:
        return False
    seen: set[ir.Node] = set()
    pending = [node.inputs[1]]
    while pending and len(seen) < _MOST_NODES:
        value = pending.pop()
        step = value.producer() if value is not None else None
        if step is None or step in seen or _makes_scores(step):
            continue
        chosen = _chosen(step)
        if chosen is not None:
            return (chosen.count, chosen.of) == (top_k, dim(node.inputs[0], 0))
        seen.add(step)
        pending += list(step.inputs)
    return False


def router_behind(rows: ir.Value, top_k: int | str | None) -> ir.Value | None:
    """What the nearest router that chooses K experts gives, of those that ``rows`` follow from; None if none does.

    A tail whose weights no router made (they are all 1, or lie in the rows already) has its router there.
    """
    seen: set[ir.Node] = set()
    pending = deque([rows])
    while pending and len(seen) < _MOST_READERS:
        node = pending.popleft().producer()
        if node is None or node in seen:
            continue
        chosen = _chosen(node)
        if chosen is not None:
            return node.outputs[0] if chosen.count in (top_k, None) else None
        seen.add(node)
        pending += [value for value in node.inputs if value is not None]
    return None


def unheard_routers(nodes: Iterable[ir.Node], heard: Iterable[ir.Value]) -> list[tuple[ir.Node, str]]:
    """The nodes that choose a token's experts and reach no tail, and what a user should know of each.

    Args:
        nodes: of the graph.
        heard: the weights and maps of the tails that were found, and what those that were not mapped read.
    """
    reached: set[ir.Node] = set()
    pending = list(heard)
    while pending:
        node = pending.pop().producer()
        if node is None or node in reached or _makes_scores(node):
            continue
        reached.add(node)
        pending += [value for value in node.inputs if value is not None]
    found = []
    for node in nodes:
        if node.domain == _ONNXRUNTIME and node.op_type in _WHOLE_LAYERS:
            found.append((node, _whole_layer(node)))
            continue
        chosen = _chosen(node)
        if chosen is not None and node not in reached and _is_router(node, chosen):
            found.append((node, _unheard(node, chosen)))
    return found


def _is_router(node: ir.Node, chosen: "_Choice") -> bool:
    """Whether what is chosen are experts, by the scores of a layer."""
    takes = _takes_experts(node, chosen.of)
    if not takes and (chosen.doubtful or not _reaches_experts(node, chosen.of)):
        return False
    return _scores_experts(node, chosen.of, may_be_given=takes)


def _unheard(node: ir.Node, chosen: "_Choice") -> str:
    if chosen.count is None:
        names = " and ".join(f"'{value.name}'" for value in _inputs_of_counts(node))
        why = f"{names} can be given with each run" if names else "the graph has no number"
        return (
            f"{named(node)} chooses among {chosen.of} experts, and how many of them is not known ({why}): store K as a "
            "constant that is no input of the graph"
        )
    return (
        f"{named(node)} chooses {chosen.count} of {chosen.of} experts, and the sum over them is written in a "
        "way that is not known: gather each token's rows by a map and sum them over k (see README, Limits)"
        ", or export with moetrt export"
    )


def _inputs_of_counts(node: ir.Node) -> list[ir.Value]:
    """The graph's inputs that say how many a TopK chooses, or how many of those are then taken."""
    slices = [reader for value in node.outputs for reader in readers(value) if is_op(reader, "Slice", "Split")]
    found: dict[ir.Value, None] = {}
    seen: set[ir.Node] = set()
    pending = [*node.inputs[1:2], *(value for step in slices for value in step.inputs[1:])]
    while pending and len(seen) < _MOST_NODES:
        value = pending.pop()
        step = value.producer() if value is not None else None
        if value is not None and step is None and value.is_graph_input():
            found.setdefault(value)
        if step is not None and step not in seen and not is_op(step, "Shape"):
            seen.add(step)
            pending += list(step.inputs)
    return list(found)


def _whole_layer(node: ir.Node) -> str:
    return (
        f"{named(node)} is ONNX Runtime's own operator for a whole MoE layer: the rows before their weighted sum are "
        "not in the graph; export without it (for instance with moetrt export)"
    )


def _makes_scores(node: ir.Node) -> bool:
    """Whether ``node`` makes a router's scores, or rows: what lies before it belongs to the hidden states.

    An einsum of two computed values puts weights into places, as GShard's does.
    """
    return _is_product(node) and not (is_op(node, "Einsum") and not any(map(_is_weight, node.inputs)))


def _is_weight(value: ir.Value | None) -> bool:
    """Whether ``value`` is a weight of the model, behind what gives it another dtype or shape."""
    return is_constant(_as_stored(value))


def _is_given_matrix(value: ir.Value | None) -> bool:
    """Whether ``value`` is an input of the graph that may be a layer's weight: a matrix of known sizes."""
    source = _as_stored(value)
    sizes = dims(source) if source is not None and source.is_graph_input() else None
    return sizes is not None and len(sizes) == 2 and all(isinstance(size, int) for size in sizes)


def _as_stored(value: ir.Value | None) -> ir.Value | None:
    """``value`` before what gives it another dtype or shape."""
    while value is not None and not is_constant(value):
        node = value.producer()
        if node is None or not is_op(node, "Cast", "Transpose", "Reshape", "Identity", "DequantizeLinear"):
            break
        value = node.inputs[0]
    return value


@dataclass(frozen=True)
class _Choice:
    """What a TopK or an ArgMax chooses.

    Attributes:
        count: how many; None where the graph has no number.
        of: of how many scores.
        doubtful: whether only what is done with them can show that they are experts.
    """

    count: int | None
    of: int
    doubtful: bool = False


def _chosen(node: ir.Node) -> _Choice | None:
    """How many of how many scores a node chooses; None where it is no router's.

    A TopK of some, one of all (a sort) of which some are taken, or an ArgMax.
    """
    if not is_op(node, "TopK", "ArgMax") or node.inputs[0] is None:
        return None
    scores, dtype = dims(node.inputs[0]), node.inputs[0].dtype
    if scores is None or len(scores) < 2 or not dtype or not dtype.is_floating_point():
        return None
    is_argmax = is_op(node, "ArgMax")
    axis = node.attributes.get_int("axis", 0 if is_argmax else -1) % len(scores)
    of, is_last = scores[axis], axis == len(scores) - 1
    if not isinstance(of, int) or not 1 < of <= _MOST_EXPERTS:
        return None
    if is_argmax:
        return _Choice(1, of, doubtful=True) if is_last else None
    count = dim(node.outputs[0], axis)
    if count == of or not isinstance(count, int):
        count = _some_taken(node, axis)
    if count is None or not is_last:
        return _Choice(count, of, doubtful=True)
    return _Choice(count, of) if count <= _MOST_ROUTES and count < of else None


def _some_taken(sort: ir.Node, axis: int) -> int | None:
    """How many of each row are taken of what was sorted."""
    ndim = rank(sort.outputs[0]) or 0
    for value in sort.outputs:
        for node in readers(value):
            along = ints(input_of(node, 3)) if is_op(node, "Slice") else [node.attributes.get_int("axis", 0)]
            if node.inputs[0] is not value or along not in ([axis], [axis - ndim]):
                continue
            if is_op(node, "Slice", "Split", "Gather"):
                count = dim(node.outputs[0], axis) if rank(node.outputs[0]) == ndim else 1
                return count if isinstance(count, int) else _first_of(node)
    return None


def _first_of(step: ir.Node) -> int | None:
    """How many a Slice takes that begins at the first, of as many as the graph does not say."""
    ends = ints(step.inputs[2]) if is_op(step, "Slice") and ints(step.inputs[1]) == [0] else None
    return ends[0] if ends and ends[0] > 0 else None


def _takes_experts(choice: ir.Node, experts: int) -> bool:
    """Whether some of the experts' weights, or of their rows, are taken by what was chosen.

    The best word of a vocabulary, and a code of a codebook, take a row of a matrix.
    """
    seen: set[ir.Node] = set()
    pending = deque(choice.outputs)
    while pending and len(seen) < _MOST_READERS:
        value = pending.popleft()
        for node in readers(value):
            if node in seen or _looks_up_words(node, value) or _chosen(node) is not None:
                continue
            seen.add(node)
            others = [other for other in node.inputs if other is not None and other is not value]
            picks = is_op(node, "Gather", "GatherND", "GatherElements", "Mul", "Where") or _is_product(node)
            if picks and any(
                (rank(other) or 0) >= 3 and experts in (dims(other) or []) and dim(other, -1) != 1 for other in others
            ):
                return True
            if not _is_product(node):
                pending += node.outputs
    return False


def _scores_experts(topk: ir.Node, experts: int, *, may_be_given: bool) -> bool:
    """Whether a layer gives one score for each expert: a product with a weight, or what the graph is given.

    The weight may be an input of the graph where ``may_be_given``.

    Scores of tokens (Mixture-of-Depths), of beams times words, of a query's keys and of boxes are none of these.
    """
    seen: set[ir.Node] = set()
    pending = [topk.inputs[0]]
    while pending and len(seen) < _MOST_NODES:
        value = pending.pop()
        node = value.producer() if value is not None else None
        if value is None or node in seen:
            continue
        if node is None:
            if not is_constant(value) and (rank(value) or 0) >= 2 and dim(value, -1) == experts:
                return True
            continue
        seen.add(node)
        if not _is_product(node):
            pending += list(node.inputs)
        elif dim(node.outputs[0], 1 if is_op(node, "Conv") else -1) != experts:
            continue
        elif any(map(_is_weight, node.inputs)) or (may_be_given and any(map(_is_given_matrix, node.inputs))):
            return True
    return False


def _reaches_experts(topk: ir.Node, experts: int) -> bool:
    """Whether what was chosen meets a product or hidden states: sampling from a vocabulary does not.

    A choice among groups of experts meets the TopK that chooses among their experts first, and chosen words go
    through a table of embeddings: what multiplies rows of such a table weighs words.
    """
    small = {1, experts, *(dim(value, -1) for value in (*topk.inputs[:1], *topk.outputs) if value is not None)}
    seen: set[ir.Node] = set()
    meets = False
    pending = deque(value for value in topk.outputs)
    while pending and len(seen) < _MOST_READERS:
        value = pending.popleft()
        for node in readers(value):
            if node in seen or _chosen(node) is not None:
                continue
            seen.add(node)
            if _weighs_words(node, value, experts):
                return False
            if _looks_up_words(node, value):
                continue
            if _is_product(node) or (is_op(node, "Mul", "Where") and _is_wide(node.outputs[0], small)):
                meets = True
                continue
            pending += node.outputs
    return meets


def _looks_up_words(node: ir.Node, index: ir.Value) -> bool:
    table = node.inputs[0] if is_op(node, "Gather", "GatherND") else None
    if table is None or table is index or rank(table) != 2 or not _is_weight(table):
        return False
    return is_op(node, "Gather") or (dim(index, -1) == 1 and node.attributes.get_int("batch_dims", 0) == 0)


def _weighs_words(node: ir.Node, value: ir.Value, experts: int) -> bool:
    """Whether ``node`` takes or weighs vectors of a table that has one for each of what is chosen among.

    Matrices of experts may be stored as vectors, and get their shape afterwards.
    """
    if is_op(node, "MatMul") and node.inputs[0] is value and dim(value, -1) == experts:
        table = node.inputs[1]
    else:
        table = node.inputs[0] if _looks_up_words(node, value) else None
    if table is None or rank(table) != 2 or dim(table, 0) != experts or not _is_weight(table):
        return False
    made = node.outputs[0]
    return all(not is_op(step, *SHAPE_OPS) or dim(step.outputs[0], -1) == dim(made, -1) for step in readers(made))


def _is_wide(value: ir.Value, small: set[int | str | None]) -> bool:
    width = dim(value, -1)
    return isinstance(width, int) and width not in small and value.dtype is not None and value.dtype.is_floating_point()
