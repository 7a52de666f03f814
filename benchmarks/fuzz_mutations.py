"""One change to an ONNX graph, drawn at random: what a model's author, an exporter or an optimiser may write instead.

A mutated graph may be nonsense; where ONNX Runtime runs it, it has numbers, and `map` must keep them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dim = int | str | None

_T = TypeVar("_T")

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)


class Unfit(Exception):
    """The graph has nothing that this mutation changes; another one is drawn."""


def _is_exponent(node: onnx.NodeProto, place: int) -> bool:
    """Of a computed exponent, one rounding decides whether it is whole, and the power of a negative number a number."""
    return node.op_type == "Pow" and place == 1


@dataclass
class Mutant:
    """A graph while it is changed, and the types of its values as they were inferred last.

    Attributes:
        proto: the model, its own copy.
        random: what all choices are drawn from.
        types: by value, its element type and dimensions, where inference knew both.
        done: the changes so far, in words.
        kinds: the changes so far, by name.
    """

    proto: onnx.ModelProto
    random: np.random.Generator
    types: dict[str, tuple[int, list[Dim]]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    _made: int = 0

    @property
    def nodes(self) -> Any:
        return self.proto.graph.node

    def infer(self) -> None:
        """Finds all types anew; a graph that inference refuses keeps what it finds without the refused node."""
        graph = self.proto.graph
        del graph.value_info[:]
        for output in graph.output:
            output.ClearField("type")
        self.proto.CopyFrom(onnx.shape_inference.infer_shapes(self.proto, data_prop=True))
        self.types, graph = {}, self.proto.graph
        for info in (*graph.input, *graph.value_info, *graph.output):
            tensor = info.type.tensor_type
            if tensor.elem_type and tensor.HasField("shape"):
                self.types[info.name] = (tensor.elem_type, [_size(dim) for dim in tensor.shape.dim])
        for constant in graph.initializer:
            self.types[constant.name] = (constant.data_type, list(constant.dims))

    def one(self, choices: Sequence[_T]) -> _T:
        if not choices:
            raise Unfit
        return choices[int(self.random.integers(len(choices)))]

    def edges(self, fits: Callable[[int, list[Dim]], bool]) -> list[tuple[int, int]]:
        """The inputs of nodes, by node and place, whose type ``fits``."""
        return [
            (number, place)
            for number, node in enumerate(self.nodes)
            for place, name in enumerate(node.input)
            if name in self.types and fits(*self.types[name]) and not _is_exponent(node, place)
        ]

    def insert(self, edge: tuple[int, int], *steps: tuple[str, Sequence[str], dict[str, Any]]) -> None:
        """Puts nodes, each of which reads the one before first (or where an input is ""), before what an edge reads."""
        number, place = edge
        value = source = self.nodes[number].input[place]
        added = []
        for op_type, others, attributes in steps:
            inputs = [name or value for name in others] if "" in others else [value, *others]
            value = self.name(op_type)
            added.append(helper.make_node(op_type, inputs, [value], name=f"node_{value}", **attributes))
        everywhere = bool(self.random.integers(2))
        nodes = list(self.nodes)
        for later in nodes[number:] if everywhere else [nodes[number]]:
            for index, name in enumerate(later.input):
                if name == source and (everywhere or index == place) and not _is_exponent(later, index):
                    later.input[index] = value
        self.put([*nodes[:number], *added, *nodes[number:]])

    def put(self, nodes: Sequence[onnx.NodeProto]) -> None:
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del self.nodes[:]
        self.nodes.extend(kept)

    def constant(self, value: Any, dtype: int = TensorProto.INT64) -> str:
        name = self.name("number")
        array = np.array(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        self.proto.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def name(self, text: str) -> str:
        self._made += 1
        return f"{text.lower()}_m{self._made}"

    def before(self, number: int) -> list[str]:
        """The values that the node ``number`` may read."""
        graph = self.proto.graph
        made = [name for node in self.nodes[:number] for name in node.output]
        names = [*(value.name for value in graph.input), *(value.name for value in graph.initializer), *made]
        return [name for name in names if name in self.types]

    def described(self, edge: tuple[int, int]) -> str:
        node = self.nodes[edge[0]]
        return f"'{node.input[edge[1]]}' into {node.op_type} '{node.name}'"


def _size(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


def rewire(m: Mutant) -> str:
    """An input reads another value of its element type, mostly of its rank."""
    edge = m.one(m.edges(lambda dtype, dims: True))
    number, place = edge
    text, name = m.described(edge), m.nodes[number].input[place]
    dtype, dims = m.types[name]
    others = [other for other in m.before(number) if other != name and m.types[other][0] == dtype]
    like = [other for other in others if len(m.types[other][1]) == len(dims)]
    other = m.one(like if like and m.random.random() < 0.8 else others)
    m.nodes[number].input[place] = other
    return f"{text} is '{other}'"


def axis(m: Mutant) -> str:
    """An axis, whether dimensions are kept, or the letters of an Einsum are others."""
    choices: list[Callable[[], str]] = []
    for node in m.nodes:
        for attribute in node.attribute:
            if attribute.name in ("axis", "keepdims", "batch_dims", "start", "end"):

                def change(node: Any = node, attribute: Any = attribute) -> str:
                    old = attribute.i
                    attribute.i = 1 - old if attribute.name == "keepdims" else int(m.random.integers(-3, 3))
                    return f"{attribute.name} of {node.op_type} '{node.name}' is {attribute.i}, not {old}"

                choices.append(change)
            elif attribute.name == "perm":

                def permute(node: Any = node, attribute: Any = attribute) -> str:
                    order = [int(i) for i in m.random.permutation(len(attribute.ints))]
                    del attribute.ints[:]
                    attribute.ints.extend(order)
                    return f"perm of '{node.name}' is {order}"

                choices.append(permute)
            elif attribute.name == "equation":

                def letters(node: Any = node, attribute: Any = attribute) -> str:
                    text = list(attribute.s.decode())
                    places = [index for index, letter in enumerate(text) if letter.isalpha()]
                    one, other = m.random.choice(places, 2, replace=False)
                    text[one], text[other] = text[other], text[one]
                    attribute.s = "".join(text).encode()
                    return f"equation of '{node.name}' is {''.join(text)}"

                choices.append(letters)
    stored = {tensor.name: tensor for tensor in m.proto.graph.initializer}
    for node in m.nodes:
        for name in node.input:
            tensor = stored.get(name)
            if tensor is None or tensor.data_type != TensorProto.INT64 or list(tensor.dims) != [1]:
                continue

            def move(node: Any = node, tensor: Any = tensor) -> str:
                new = int(m.random.integers(-3, 4))
                tensor.CopyFrom(numpy_helper.from_array(np.array([new], dtype=np.int64), tensor.name))
                return f"'{tensor.name}' of {node.op_type} '{node.name}' is [{new}]"

            choices.append(move)
    return m.one(choices)()


def cast(m: Mutant) -> str:
    """A value goes through another element type and back."""
    edge = m.one(m.edges(lambda dtype, dims: True))
    text = m.described(edge)
    dtype = m.types[m.nodes[edge[0]].input[edge[1]]][0]
    others = [*_FLOATS, *_INTEGERS, TensorProto.UINT8, TensorProto.INT16]
    # Of a sum in 16 bits, one rounding decides whether it is exactly 0.
    others += [] if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else [TensorProto.BOOL]
    to = m.one([other for other in others if other != dtype])
    m.insert(edge, ("Cast", [], {"to": to}), ("Cast", [], {"to": dtype}))
    return f"{text} goes through {TensorProto.DataType.Name(to)}"


def transpose(m: Mutant) -> str:
    """A value is transposed, or transposed and put back."""
    edge = m.one(m.edges(lambda dtype, dims: len(dims) >= 2))
    text = m.described(edge)
    ndim = len(m.types[m.nodes[edge[0]].input[edge[1]]][1])
    order = [int(i) for i in m.random.permutation(ndim)]
    back = [order.index(i) for i in range(ndim)]
    steps = [("Transpose", [], {"perm": order}), ("Transpose", [], {"perm": back})]
    m.insert(edge, *steps[: m.one((1, 1, 2))])
    return f"{text} is transposed by {order}"


def reader(m: Mutant) -> str:
    """A value inside the graph gets another reader, or is an output too."""
    graph = m.proto.graph
    outputs = {value.name for value in graph.output}
    names = [name for node in m.nodes for name in node.output if name in m.types and name not in outputs]
    value = m.one(names)
    text = value
    for op_type in m.one(((), ("Identity",), ("Shape",), ("Neg",), ("Cast",))):
        value = m.name("read")
        attributes = {"to": TensorProto.FLOAT} if op_type == "Cast" else {}
        m.nodes.append(helper.make_node(op_type, [text], [value], name=f"node_{value}", **attributes))
    graph.output.append(helper.make_empty_tensor_value_info(value))
    return f"'{text}' is read by output '{value}'"


def swap(m: Mutant) -> str:
    """A node's operands change places."""
    node = m.one([node for node in m.nodes if len(node.input) >= 2])
    one, other = (int(i) for i in m.random.choice(len(node.input), 2, replace=False))
    node.input[one], node.input[other] = node.input[other], node.input[one]
    return f"operands {one} and {other} of {node.op_type} '{node.name}' change places"


def clamp(m: Mutant) -> str:
    """A value is bounded by Clip, Min, Max, or a Where."""
    integers = m.edges(lambda dtype, dims: dtype in _INTEGERS)
    floats = m.edges(lambda dtype, dims: dtype in _FLOATS[:2] and len(dims) >= 1)
    edge = m.one(integers if integers and m.random.random() < 0.7 else floats)
    text = m.described(edge)
    dtype = m.types[m.nodes[edge[0]].input[edge[1]]][0]
    numbers = (-2, -1, 0, 0, 1, 2, 5, 23, 24) if dtype in _INTEGERS else (-1.0, 0.0, 0.5, 4.0)
    low, high = m.constant(m.one(numbers), dtype), m.constant(m.one(numbers), dtype)
    compare = m.one(("Less", "GreaterOrEqual", "Greater", "Equal"))
    how = m.one(("Min", "Max", "MinMax", "MaxMin", "Clip", "ClipMin", "ClipMax", "Where"))
    steps: dict[str, list[tuple[str, Sequence[str], dict[str, Any]]]] = {
        "Min": [("Min", [high], {})],
        "Max": [("Max", [low], {})],
        "MinMax": [("Max", [low], {}), ("Min", [high], {})],
        "MaxMin": [("Min", [high], {}), ("Max", [low], {})],
        "Clip": [("Clip", [low, high], {})],
        "ClipMin": [("Clip", [low], {})],
        "ClipMax": [("Max", [low], {}), ("Clip", [m.constant(-100, dtype), high], {})],
    }
    if how == "Where":
        source, number = m.nodes[edge[0]].input[edge[1]], edge[0]
        test = m.name(compare)
        nodes = list(m.nodes)
        made = helper.make_node(compare, [source, low], [test], name=f"node_{test}")
        m.put([*nodes[:number], made, *nodes[number:]])
        m.insert((number + 1, edge[1]), ("Where", m.one(([test, "", high], [test, high, ""])), {}))
    else:
        m.insert(edge, *steps[how])
    return f"{text} is bounded by {how} ({compare})"


def mask(m: Mutant) -> str:
    """A value is kept where a truth value of the graph, or a comparison of another value, says so."""
    edge = m.one(m.edges(lambda dtype, dims: len(dims) >= 1))
    text, number = m.described(edge), edge[0]
    source = m.nodes[number].input[edge[1]]
    dtype, dims = m.types[source]
    before = m.before(number)
    truths = [name for name in before if m.types[name][0] == TensorProto.BOOL]
    other = m.constant(m.one((0, 0, 1, -1)), dtype)
    nodes = list(m.nodes)
    if truths and m.random.random() < 0.6:
        test, added = m.one(truths), []
    else:
        values = [name for name in before if m.types[name][0] in (*_INTEGERS, TensorProto.FLOAT)]
        like = [name for name in values if len(m.types[name][1]) == len(dims)]
        value, test = m.one(like or values), m.name("test")
        bound = m.constant(m.one((-1, 0, 1, 5)), m.types[value][0])
        op_type = m.one(("Less", "GreaterOrEqual", "Greater", "Equal"))
        added = [helper.make_node(op_type, [value, bound], [test], name=f"node_{test}")]
    if m.random.random() < 0.3 and len(dims) > 1:
        column = m.name("column")
        added.append(helper.make_node("Unsqueeze", [test, m.constant([-1])], [column], name=f"node_{column}"))
        test = column
    m.put([*nodes[:number], *added, *nodes[number:]])
    m.insert((number + len(added), edge[1]), ("Where", m.one(([test, "", other], [test, other, ""])), {}))
    return f"{text} is masked by '{test}'"


def constant(m: Mutant) -> str:
    """A stored number is another one: an eps, a scale, a bound, a weight, a size."""
    stored = [tensor for tensor in m.proto.graph.initializer if 0 < np.prod(list(tensor.dims), initial=1) <= 64]
    tensor = m.one(stored)
    array = numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    place = int(m.random.integers(flat.size))
    if array.dtype.kind in "iu":
        flat[place] += m.one((-2, -1, 1, 2))
    elif array.dtype != bool:
        how = m.one(("zero", "negative", "half", "more", "many", "nearly"))
        number = float(flat[place])
        new = {"zero": 0.0, "negative": -number, "half": number / 2, "more": number + 1.0, "many": number * 1000}
        changed = np.asarray(new.get(how, number * 1.001)).astype(array.dtype)
        if how in ("zero", "nearly") and flat.size > 1:
            flat[place] = changed
        else:
            flat[:] = changed if flat.size == 1 else (flat * np.asarray(0.5).astype(array.dtype))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"'{tensor.name}' is {array.reshape(-1)[:4].tolist()}"


def dtype(m: Mutant) -> str:
    """An input or a stored value is of another element type, and cast to the one it had."""
    graph = m.proto.graph
    names = [value.name for value in graph.input] + [value.name for value in graph.initializer]
    name = m.one([name for name in names if m.types.get(name, (0, []))[0] in (*_FLOATS, *_INTEGERS)])
    old = m.types[name][0]
    new = m.one([other for other in (_FLOATS if old in _FLOATS else _INTEGERS) if other != old])
    for value in graph.input:
        if value.name == name:
            value.type.tensor_type.elem_type = new
    for tensor in graph.initializer:
        if tensor.name == name:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(new))
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    back = m.name("cast")
    for node in m.nodes:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = back
    m.put([helper.make_node("Cast", [name], [back], name=f"node_{back}", to=old), *m.nodes])
    return f"'{name}' is {TensorProto.DataType.Name(new)}"


def delete(m: Mutant) -> str:
    """A node goes; what read it reads one of its inputs of the same element type."""
    pairs = [
        (number, name)
        for number, node in enumerate(m.nodes)
        for name in node.input
        if name in m.types and m.types.get(node.output[0], (0, []))[0] == m.types[name][0]
    ]
    number, instead = m.one(pairs)
    gone = m.nodes[number]
    text = f"{gone.op_type} '{gone.name}' goes, for '{instead}'"
    outputs = {value.name for value in m.proto.graph.output}
    if gone.output[0] in outputs:
        m.put([helper.make_node("Identity", [instead], [gone.output[0]]) if node is gone else node for node in m.nodes])
        return text
    for node in m.nodes:
        for index, read in enumerate(node.input):
            if read == gone.output[0]:
                node.input[index] = instead
    del m.nodes[number]
    return text


_LIKE = (
    ("Add", "Sub", "Mul", "Div"),
    ("Max", "Min"),
    ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"),
    ("Sqrt", "Reciprocal", "Abs", "Neg", "Sigmoid", "Exp", "Identity"),
    ("Pow", "Mul"),
)


def operator(m: Mutant) -> str:
    """A node is another operator of the same operands, or has another attribute."""
    attributes = [
        (node, attribute)
        for node in m.nodes
        for attribute in node.attribute
        if attribute.name in ("largest", "sorted", "reduction", "routed_scaling_factor", "stash_type")
    ]
    if attributes and m.random.random() < 0.3:
        node, attribute = m.one(attributes)
        if attribute.type == onnx.AttributeProto.STRING:
            attribute.s = m.one((b"none", b"max", b"mul"))
        elif attribute.type == onnx.AttributeProto.FLOAT:
            attribute.f = m.one((0.0, 1.0, -3.0))
        else:
            attribute.i = 1 - attribute.i
        return f"{attribute.name} of '{node.name}' is another"
    choices = [(node, other) for node in m.nodes for group in _LIKE if node.op_type in group for other in group]
    stored = {tensor.name for tensor in m.proto.graph.initializer}
    # Of a computed exponent, one rounding decides whether it is whole, and the power of a negative number a number.
    fits = [(node, other) for node, other in choices if other != "Pow" or node.input[1] in stored]
    node, other = m.one([(node, other) for node, other in fits if node.op_type != other])
    text = f"{node.op_type} '{node.name}' is {other}"
    node.op_type = other
    return text


def factor(m: Mutant) -> str:
    """A value is multiplied by, or has added, a number, a vector, or another value of the graph."""
    edge = m.one(m.edges(lambda dtype, dims: dtype in _FLOATS[:2]))
    text = m.described(edge)
    kind, dims = m.types[m.nodes[edge[0]].input[edge[1]]]
    numbers = m.one(([], [1], [dims[-1]] if dims and isinstance(dims[-1], int) and dims[-1] > 0 else [1]))
    values = [m.constant(m.random.uniform(0.5, 1.5, numbers), kind), m.constant(m.one((0.0, 1.0, -1.0, 0.25)), kind)]
    values += [name for name in m.before(edge[0]) if m.types[name][0] == kind and len(m.types[name][1]) == len(dims)]
    other = m.one(values)
    op_type = m.one(("Mul", "Mul", "Add", "Div", "Sub"))
    if op_type == "Div" and any(other in node.output and node.op_type == "Cast" for node in m.nodes):
        raise Unfit  # a mask, and the weights that it drops would be NaN
    m.insert(edge, (op_type, m.one(([other], [other, ""])), {}))
    return f"{text}: {op_type} with '{other}'"


def shape(m: Mutant) -> str:
    """An input's dimension has another name or number, or two of its dimensions change places.

    Not the number of the rows: that rows in the routes' order are T * K no graph can say of an input.
    """
    value = m.one([value for value in m.proto.graph.input if value.type.tensor_type.shape.dim])
    sizes = value.type.tensor_type.shape.dim
    place = int(m.random.integers(len(sizes)))
    if value.name == "rows" and place == 0:
        raise Unfit
    how = m.one(("name", "one", "swap", "unknown", "other"))
    if how == "swap" and len(sizes) > 1:
        order = [int(i) for i in m.random.permutation(len(sizes))]
        copies = [onnx.TensorShapeProto.Dimension.FromString(sizes[i].SerializeToString()) for i in order]
        for size, other in zip(sizes, copies, strict=True):
            size.CopyFrom(other)
    elif how == "one":
        sizes[place].dim_value = 1
    elif how == "unknown":
        sizes[place].Clear()
    else:
        sizes[place].dim_param = "U" if how == "name" else m.one(("T", "K", "R", "B", "S"))
    return f"'{value.name}' is {[_size(size) for size in sizes]}"


def view(m: Mutant) -> str:
    """A value gets another shape, or a part of it is taken."""
    edge = m.one(m.edges(lambda dtype, dims: len(dims) >= 1))
    text = m.described(edge)
    dims = m.types[m.nodes[edge[0]].input[edge[1]]][1]
    last = dims[-1] if isinstance(dims[-1], int) else -1
    axis = int(m.random.integers(len(dims)))
    at = m.constant([axis])
    source = m.nodes[edge[0]].input[edge[1]]
    choices: dict[str, list[tuple[str, Sequence[str], dict[str, Any]]]] = {
        "Identity": [("Identity", [], {})],
        "Unsqueeze": [("Unsqueeze", [at], {})],
        "Unsqueeze and Squeeze": [("Unsqueeze", [at], {}), ("Squeeze", [at], {})],
        "flat": [("Reshape", [m.constant([-1, last])], {})],
        "all": [("Slice", [m.constant([0]), m.constant([2**31]), at], {})],
        "reversed": [("Slice", [m.constant([-1]), m.constant([-(2**31)]), at, m.constant([-1])], {})],
        "from 1": [("Slice", [m.constant([1]), m.constant([2**31]), at], {})],
        "first repeated": [("Slice", [m.constant([0]), m.constant([1]), at], {}), ("Expand", [m.constant([1])], {})],
        "Expand": [("Expand", [m.constant([1] * len(dims))], {})],
        "mean": [("ReduceMean", [at], {"keepdims": 1})],
        "sum": [("ReduceSum", [at], {"keepdims": 1})],
        "CumSum": [("CumSum", [m.constant(axis)], {})],
    }
    how = m.one(list(choices))
    if how == "flat" and m.random.random() < 0.7:
        sizes = m.name("shape")
        nodes = list(m.nodes)
        made = helper.make_node("Shape", [source], [sizes], name=f"node_{sizes}")
        m.put([*nodes[: edge[0]], made, *nodes[edge[0] :]])
        edge = (edge[0] + 1, edge[1])
        choices[how].append(("Reshape", [sizes], {}))
    m.insert(edge, *choices[how])
    return f"{text}: {how}"


MUTATIONS: dict[str, Callable[[Mutant], str]] = {
    function.__name__: function
    for function in (
        rewire,
        axis,
        cast,
        transpose,
        reader,
        swap,
        clamp,
        mask,
        constant,
        dtype,
        delete,
        operator,
        factor,
        shape,
        view,
    )
}
"""By the name that the table has."""
