"""Integer subgraphs are computed at a few sizes: exporters spell arange, repeat and floor division in too many ways."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from moetrt.segments.constants import constant, ints
from moetrt.segments.reading import dims, is_op

_MOST_NODES = 96
_MOST_ELEMENTS = 65536

_OPS = frozenset(
    {
        *("Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "GatherND"),
        *("Greater", "Identity", "Less", "Mod", "Mul", "Not", "OneHot", "Or", "Range", "ReduceProd", "Reshape", "Size"),
        *("Slice", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where", "Xor"),
    }
)
"""What numbers of tokens and rows are computed with. None of them depends on more than sizes and the permutation."""


TRIALS = range(4)
ALL_ONE, ALL_NONE = -1, -2

LARGEST_COMPARED = 32
"""K is no larger; a number above it, which a formula compares with, may make it another one beyond the trials."""

_COMPARING = ("Div", "Equal", "Greater", "Less", "Mod", "Slice")
_NARROW = (
    *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16),
    *(ir.DataType.FLOAT16, ir.DataType.BFLOAT16),
)


class Sizes:
    """Numbers for the symbols in a graph's shapes, the same for the same symbol."""

    def __init__(self, trial: int) -> None:
        self._trial = trial
        self._known: dict[str, int] = {}

    def of(self, size: int | str | None) -> int | None:
        """The number for one dimension; None where nothing is known of it."""
        if size is None or isinstance(size, int):
            return size
        symbolic = ir.SymbolicDim(size)
        try:
            symbols = symbolic.free_symbols()
            for symbol in symbols:
                self._known.setdefault(symbol, self._next())
            number = symbolic.evaluate({symbol: self._known[symbol] for symbol in symbols})
            return number if isinstance(number, int) else None
        except ValueError:  # a name that is no expression
            return self._known.setdefault(size, self._next())

    def _next(self) -> int:
        """The last of `TRIALS` is beyond what a formula compares with; `ALL_ONE` and `ALL_NONE` are of one number."""
        if self._trial in (ALL_ONE, ALL_NONE):
            return int(self._trial == ALL_ONE)
        small = 2 + (3 * len(self._known) + 5 * self._trial) % 7
        return small + (LARGEST_COMPARED if self._trial == TRIALS[-1] else 0)


@dataclass(frozen=True)
class Formula:
    """How a value follows from shapes, and from one permutation where it reads one."""

    value: ir.Value
    permutation: ir.Value | None
    evaluator: ReferenceEvaluator | None
    shapes: Mapping[str, ir.Node]

    def at(self, sizes: Sizes, permutation: np.ndarray | None = None) -> np.ndarray | None:
        """The value for these sizes; None where a size is not known, or the sizes do not fit each other."""
        if self.value is self.permutation:
            return permutation
        feeds: dict[str, np.ndarray] = {}
        for name, node in self.shapes.items():
            known = _shape(node, sizes)
            if known is None:
                return None
            feeds[name] = known
        if self.permutation is not None and permutation is not None:
            feeds[str(self.permutation.name)] = permutation
        if self.evaluator is None:
            return next(iter(feeds.values()), None)
        try:
            (result,) = self.evaluator.run(None, feeds)
            return np.asarray(result)
        except Exception:  # the evaluator's own errors have no common base; the graph would fail at these sizes too
            return None


def formula(value: ir.Value, permutation: ir.Value | None = None) -> Formula | None:
    """How ``value`` is computed from shapes and ``permutation``; None where it depends on anything else."""
    nodes: dict[ir.Node, None] = {}
    shapes: dict[str, ir.Node] = {}
    constants: dict[str, ir.TensorProtocol] = {}
    pending: list[tuple[ir.Value, bool]] = [(value, False)]
    while pending:
        current, inputs_done = pending.pop()
        node = current.producer()
        if inputs_done and node is not None:
            nodes.setdefault(node)
            continue
        if current is permutation or current.name is None or current.name in shapes or node in nodes:
            continue
        tensor = constant(current)
        if tensor is not None:
            if tensor.size > _MOST_ELEMENTS:
                return None
            constants[current.name] = tensor
        elif node is not None and is_op(node, "Shape"):
            shapes[current.name] = node
        elif node is not None and is_op(node, *_OPS) and len(nodes) < _MOST_NODES and not _may_differ_beyond(node):
            pending.append((current, True))
            pending += [(operand, False) for operand in node.inputs if operand is not None]
        else:
            return None
    return Formula(value, permutation, _evaluator(value, permutation, nodes, shapes, constants), shapes)


def _may_differ_beyond(node: ir.Node) -> bool:
    """Whether a node may be something else for larger numbers than those of the trials."""
    if is_op(node, "Cast"):
        return node.outputs[0].dtype in _NARROW
    if not is_op(node, *_COMPARING):
        return False
    operands = node.inputs[1:] if is_op(node, "Slice") else node.inputs
    numbers = [abs(number) for operand in operands for number in ints(operand) or ()]
    # A Slice that goes on to the end says so by the largest integer.
    return any(LARGEST_COMPARED < number < 2**31 - 1 for number in numbers)


def _evaluator(
    value: ir.Value,
    permutation: ir.Value | None,
    nodes: Mapping[ir.Node, None],
    shapes: Mapping[str, ir.Node],
    constants: Mapping[str, ir.TensorProtocol],
) -> ReferenceEvaluator | None:
    if not nodes and value.name in shapes:
        return None
    inputs = [*shapes, *([str(permutation.name)] if permutation is not None else [])]
    graph = helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "indices",
        [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in inputs],
        [helper.make_empty_tensor_value_info(str(value.name))],
        [_named(tensor, name) for name, tensor in constants.items()],
    )
    producer = value.producer()
    graph_of = producer.graph if producer is not None else None
    opset = graph_of.opset_imports.get("", 17) if isinstance(graph_of, ir.Graph) else 17
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ReferenceEvaluator(model)


def _named(tensor: ir.TensorProtocol, name: str) -> TensorProto:
    proto = ir.to_proto(tensor)
    copy = TensorProto()
    copy.CopyFrom(proto)
    copy.name = name
    return copy


def _shape(node: ir.Node, sizes: Sizes) -> np.ndarray | None:
    """What a Shape node gives."""
    source = node.inputs[0]
    known = dims(source) if source is not None else None
    if known is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(known))
    numbers = [sizes.of(size) for size in known[start:end]]
    return None if any(number is None for number in numbers) else np.array(numbers, dtype=np.int64)


def is_permutation(order: ir.Value) -> bool:
    """Whether ``order`` is an argsort: the indices of a TopK over all of its only dimension."""
    node = order.producer()
    if node is None or not is_op(node, "TopK") or order is not node.outputs[1]:
        return False
    sorted_values, count = node.inputs[0], node.inputs[1]
    known = dims(sorted_values) if sorted_values is not None else None
    if known is None or len(known) != 1 or count is None:
        return False
    counted = constant(count)
    if counted is not None:
        return counted.size == 1 and isinstance(known[0], int) and int(counted.numpy().ravel()[0]) == known[0]
    how = formula(count)
    if how is None:
        return False
    for trial in TRIALS:
        sizes = Sizes(trial)
        number, wanted = how.at(sizes), sizes.of(known[0])
        if number is None or wanted is None or number.ravel().tolist() != [wanted]:
            return False
    return True


def permutation_behind(value: ir.Value) -> ir.Value | None:
    """The argsort that ``value`` is computed from; None where there is none."""
    seen: set[ir.Value] = set()
    pending = [value]
    while pending and len(seen) < _MOST_NODES:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is None:
            continue
        if is_op(node, "TopK"):
            return current if is_permutation(current) else None
        if is_op(node, *_OPS):
            pending += [operand for operand in node.inputs if operand is not None]
    return None


def _before_flattened(permutation: ir.Value) -> ir.Value | None:
    """What an argsort sorts, before it was flattened."""
    node = permutation.producer()
    sorted_values = node.inputs[0] if node is not None else None
    while sorted_values is not None and (made := sorted_values.producer()) is not None and is_op(made, "Reshape"):
        sorted_values = made.inputs[0]
    return sorted_values


def _count(permutation: ir.Value, sizes: Sizes) -> int | None:
    """How many elements an argsort has: as many as what it sorts had before it was flattened."""
    sorted_values = _before_flattened(permutation)
    known = dims(sorted_values) if sorted_values is not None else None
    numbers = [sizes.of(size) for size in known or [None]]
    return None if None in numbers else math.prod(number for number in numbers if number is not None)


def may_have_length(value: ir.Value, permutation: ir.Value) -> bool:
    """Whether ``value`` can have as many elements as an argsort: not where the graph says other numbers of both.

    A name that inference made up may stand for any number: where both have one symbol each, the numbers beside it are
    compared. Two names that the graph gives are two numbers.
    """
    sorted_values = _before_flattened(permutation)
    here, there = (dims(each) if each is not None else None for each in (value, sorted_values))
    if here is None or there is None or None in (*here, *there):
        return True
    if all(isinstance(size, int) for size in here) and not all(isinstance(size, int) for size in there):
        return False  # of one length, whatever T is
    if min(len(here), len(there)) < 2:
        return True
    symbols = [[size for size in sizes if isinstance(size, str)] for sizes in (here, there)]
    numbers = [math.prod(size for size in sizes if isinstance(size, int)) for sizes in (here, there)]
    if [len(names) for names in symbols] != [1, 1]:
        return True
    is_one = symbols[0] == symbols[1] or any("unk__" in names[0] for names in symbols)
    return is_one and numbers[0] == numbers[1]


def tokens_of_routes(token: ir.Value, permutation: ir.Value | None, tokens: int | str | None) -> int | None:
    """K, where ``token`` names each route's token and the routes lie token by token before the permutation.

    Args:
        token: the token of each row.
        permutation: the route of each row; None where the rows lie in the routes' order.
        tokens: T.
    """
    how = formula(token, permutation)
    if how is None:
        return None
    found: set[int] = set()
    for trial in TRIALS:
        sizes = Sizes(trial)
        wanted = sizes.of(tokens)
        number = _count(permutation, sizes) if permutation is not None else None
        order = None if number is None else np.random.default_rng(trial).permutation(number)
        if wanted is None or (permutation is not None and order is None):
            return None
        got = how.at(sizes, order)
        if got is None or got.size == 0 or got.size % wanted:
            return None
        got, top_k = got.ravel(), got.size // wanted
        expected = (np.arange(got.size) if order is None else order) // top_k
        if len(expected) != len(got) or not np.array_equal(got, expected):
            return None
        found.add(top_k)
    return found.pop() if len(found) == 1 else None
