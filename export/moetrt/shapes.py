"""Values of a graph get the dtypes and shapes that onnx infers: what the mapper compares."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from moetrt.graphs import graphs_of, nodes_of
from moetrt.inference import hide_changed_numbers, prepare
from moetrt.onnx_files import without_external_data
from moetrt.onnx_op import attach_functions, remove_functions
from moetrt.quiet import quiet
from moetrt.segments.constants import ints
from moetrt.segments.reading import FLOAT_DTYPES, dim, input_of, is_op, rank


def name_dimensions(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    """Names the dimensions of the graph's inputs that have no name, so that inference says where it finds them again.

    Returns:
        the inputs' shapes as they were.
    """
    before: dict[ir.Value, ir.Shape] = {}
    for value in model.graph.inputs:
        if value.shape is None or all(isinstance(size, int) or size.value is not None for size in value.shape):
            continue
        before[value] = value.shape
        value.shape = ir.Shape(
            size if isinstance(size, int) or size.value is not None else f"{value.name}_dim_{axis}"
            for axis, size in enumerate(value.shape)
        )
    return before


_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where")


def unify_formulas(model: ir.Model) -> None:
    """Gives two sizes one name where the file says one as a product or a quotient ("B*S") and a node joins both.

    Who writes such names has traced the graph with sizes above 1: what is joined there is of one length, or the trace
    would have failed. Two plain names may be of different lengths, one of which is 1 on some runs.
    """
    values = [value for node in nodes_of(model) for value in node.outputs]
    if not any(
        map(_is_formula, {size.value for value in values for size in value.shape or () if not isinstance(size, int)})
    ):
        return
    names: dict[str, str] = {}

    def name_of(size: str) -> str:
        while size in names:
            size = names[size]
        return size

    for node in nodes_of(model):
        shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
        for one, other in combinations(shapes, 2) if is_op(node, *_ELEMENTWISE) else ():
            # Aligned at their last dimensions, as they are broadcast.
            for first, second in zip(reversed(one), reversed(other), strict=False):
                if isinstance(first, int) or isinstance(second, int) or not first.value or not second.value:
                    continue
                pair = sorted((name_of(first.value), name_of(second.value)), key=_is_formula)
                if pair[0] != pair[1] and _is_formula(pair[1]):
                    names[pair[1]] = pair[0]
    for value in values if names else ():
        if value.shape is not None and any(not isinstance(size, int) and size.value in names for size in value.shape):
            sizes = [
                size if isinstance(size, int) or size.value is None else name_of(size.value) for size in value.shape
            ]
            value.shape = ir.Shape(sizes)


def _is_formula(size: str | None) -> bool:
    """Whether a dimension is a product or a quotient of others; a name may have other signs in it."""
    return size is not None and ("*" in size or "//" in size)


def fill_in_shapes(model: ir.Model) -> None:
    """Gives values without a dtype or shape what onnx infers, in inner graphs too; others stay as they are.

    Where inference stops, nothing is changed: who needs a shape then says that it is not known.
    """
    values = [value for node in nodes_of(model) for value in node.outputs]
    if any(value.dtype is None or value.shape is None for value in values):
        _fill_by_onnx(model)
        _fill_bodies(model)
    if _lacks_widths(model):
        # Others' optimisers leave the names ("unk__1") that onnx made up before it knew what it knows now.
        with _forgotten(filter(_has_unknown, values)):
            _fill_by_onnx(model)
        if _lacks_widths(model):
            _fill_symbols(model)
    _fill_updates(model)
    if _name_own_sizes(model):
        with _forgotten(filter(_has_unknown, values)):
            _fill_by_onnx(model)


def _name_own_sizes(model: ir.Model) -> bool:
    """Gives a name to each unknown size that is surely another one than those that it is made of.

    A part of a dimension is such, a larger or smaller one of two sizes, and what two of other names are spread to. The
    names that onnx makes up stand for any size.

    Returns:
        whether there are such.
    """
    found = False
    for node in nodes_of(model):
        output = node.outputs[0] if node.outputs else None
        if output is None or output.shape is None or not any(map(_is_unknown, output.shape)):
            continue
        own = {axis for axis in _own_sizes(node) if _is_unknown(output.shape[axis])}
        if own:
            sizes = [f"{output.name}_dim_{axis}" if axis in own else size for axis, size in enumerate(output.shape)]
            output.shape, found = ir.Shape(sizes), True
    return found


def _own_sizes(node: ir.Node) -> set[int]:
    """The axes of a node's output along which it has another size than what it is made of."""
    output = node.outputs[0]
    ndim = rank(output) or 0
    if is_op(node, "Slice"):
        starts, ends, axes, steps = (ints(input_of(node, place)) for place in (1, 2, 3, 4))
        if starts is None or ends is None:
            return set()
        along = axes if axes is not None else list(range(len(starts)))
        whole = zip(along, starts, ends, steps or [1] * len(starts), strict=False)
        return {axis % ndim for axis, start, end, step in whole if (start, step) != (0, 1) or end < 2**31 - 1}
    if is_op(node, "Expand", "ConstantOfShape", "Reshape"):
        sizes = node.inputs[-1]
        return set(range(ndim)) if sizes is not None and is_op(sizes.producer(), "Max", "Min", "Clip") else set()
    if not is_op(node, *_ELEMENTWISE):
        return set()
    own = set()
    shapes = [[*reversed(value.shape)] for value in node.inputs if value is not None and value.shape is not None]
    for back in range(1, ndim + 1):
        met = {str(shape[back - 1]) for shape in shapes if len(shape) >= back and not isinstance(shape[back - 1], int)}
        if len(met) > 1 and all(size.isidentifier() and not size.startswith("unk__") for size in met):
            own.add(ndim - back)
    return own


def _fill_updates(model: ir.Model) -> None:
    """What a ScatterElements puts at its indices has their shape; TorchScript slices it to that, onnx cannot tell."""
    for node in (node for node in nodes_of(model) if is_op(node, "ScatterElements")):
        _, index, updates = node.inputs
        if index is None or index.shape is None or updates is None or rank(updates) != rank(index):
            continue
        if updates.shape is not None and any(map(_is_unknown, updates.shape)):
            updates.shape = ir.Shape(
                [new if _is_unknown(old) else old for old, new in zip(updates.shape, index.shape, strict=True)]
            )


def fill_in_unknown(model: ir.Model) -> None:
    """Gives values with an unknown dimension what can be inferred now that the graph is another one."""
    values = [value for node in nodes_of(model) for value in node.outputs if _has_unknown(value)]
    with _forgotten(values):
        fill_in_shapes(model)


@contextmanager
def _forgotten(values: Iterable[ir.Value]) -> Iterator[None]:
    """The block finds the shapes of ``values`` anew; one that it does not find stays what it was, as numbers do."""
    before = {value: value.shape for value in values}
    for value in before:
        value.shape = None
    yield
    for value, shape in before.items():
        value.shape = shape if value.shape is None else _with_numbers(shape, value.shape)


def fill_in_types(model: ir.Model) -> None:
    """Gives values without a dtype or shape what onnx infers through the file's own functions, which stay as they are.

    A file of a graph editor may say nothing of its inner values. Where inference stops, nothing is changed.
    """
    values = [value for node in nodes_of(model) for value in node.outputs]
    if any(value.dtype is None or value.shape is None for value in values):
        _infer(model)


def _fixed(model: ir.Model) -> onnx.ModelProto:
    """``model`` with what is the same on every run: inference would take a default that can be overridden for that."""
    proto = without_external_data(ir.to_proto(model))
    inputs = {value.name for value in proto.graph.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in inputs]
    if len(kept) < len(proto.graph.initializer):
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
    hide_changed_numbers(proto.graph)
    return proto


def _infer(model: ir.Model) -> None:
    try:
        given = _fixed(model)
        _compute_sizes(model.graph, given.graph)
        proto = onnx.shape_inference.infer_shapes(prepare(given), data_prop=True)
    except Exception:  # onnx raises its own InferenceError, and ValueError from its parts
        return
    _fill(model.graph, proto.graph)


def _fill_bodies(model: ir.Model) -> None:
    """Gives unknown dimensions in bodies what is inferred once the dtypes of the numbers that they come from are known.

    A TopK's K may be computed by a few nodes; of the outer graph's own, `_fill_symbols` knows them.
    """
    bodies = [graph for graph in graphs_of(model) if graph is not model.graph]
    values = [value for graph in bodies for node in graph for value in node.outputs]
    unknown = [value for value in values if _has_unknown(value)]
    while unknown:
        with _forgotten(unknown):
            _fill_by_onnx(model)
        still = [value for value in unknown if _has_unknown(value)]
        if len(still) == len(unknown):
            return
        unknown = still


def _compute_sizes(graph: ir.Graph, proto: onnx.GraphProto, *, inner: bool = False) -> None:
    """Nodes of a body that compute the same small integers on every run become Constant nodes, in ``proto`` alone."""
    # Most models have no node with a body.
    nodes = [node for node in proto.node if inner or any(a.HasField("g") for a in node.attribute)]
    own = {node.outputs[0].name or "": node for node in graph} if nodes else {}
    for node in nodes:
        ours = own.get(node.output[0])
        if ours is None:
            continue
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _compute_sizes(ours.attributes[attribute.name].as_graph(), attribute.g, inner=True)
        value = ours.outputs[0]
        if not inner or value.dtype != ir.DataType.INT64 or is_op(ours, "Constant"):
            continue
        numbers = ints(value)
        if numbers is not None:
            array = np.array(numbers, dtype=np.int64).reshape(value.shape.numpy() if value.shape is not None else -1)
            node.CopyFrom(onnx.helper.make_node("Constant", [], [node.output[0]], value=numpy_helper.from_array(array)))


def _fill_by_onnx(model: ir.Model) -> None:
    """Gives values without a dtype or shape what onnx infers."""
    # Inference looks into functions, so that it passes the operators' nodes.
    attach_functions(model)
    try:
        _infer(model)
    finally:
        remove_functions(model)


def _fill_symbols(model: ir.Model) -> None:
    """Gives unknown dimensions what ONNX Runtime's symbolic inference finds.

    onnx's own inference knows no "2*T", which a view of [T*K, H] as [T, K, H] takes where TorchScript computed its
    sizes from other shapes.
    """
    _infer_symbols(model, {})
    # One size that is several times another ("2*T") is no 1, and where rows are weighed by a column of as many, their
    # own number is the same; but one that is given with each run may be a 1.
    given = any(value.is_graph_input() for value in model.graph.initializers.values())
    several = {} if given else dict(filter(None, map(_meets_several, model.graph)))
    if several:
        _infer_symbols(model, several)
    if _lacks_widths(model):
        # It ends where sizes meet of which it does not know that they are one.
        _infer_symbols(model, {}, merge=True)


_MOST_PASSES = 64
"""Of ONNX Runtime's inference, one after each size that it merges with another."""


def _infer_symbols(model: ir.Model, same: Mapping[str, str], *, merge: bool = False) -> None:
    """As `_fill_symbols`; each key of ``same`` names the size that its value is.

    With ``merge`` it takes whatever meets for the same, also what is repeated on some runs; of what it finds then, only
    sizes that are no 1 are taken ("16", "2*T"): what meets such a one is as large, or repeated to be.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    values = {value.name: value for node in model.graph for value in node.outputs}

    # Not its `infer_shapes`, which writes a file into the working folder where it cannot infer everything.
    class Inference(SymbolicShapeInference):
        def _add_suggested_merge(self, symbols: list[Any], apply: bool = False) -> None:
            # What meets a number may be 1.
            if not any(isinstance(size, int) for size in symbols):
                super()._add_suggested_merge(symbols, apply)

        def _infer_Slice(self, node: onnx.NodeProto) -> None:
            # It takes the first of any number for one; of none there is none.
            super()._infer_Slice(node)
            source, part = (self.known_vi_[name].type.tensor_type.shape for name in (node.input[0], node.output[0]))
            for axis, (size, taken) in enumerate(zip(source.dim, part.dim, strict=False)):
                if taken.HasField("dim_value") and not size.HasField("dim_value"):
                    taken.dim_param = str(self._new_symbolic_dim_from_output(node, 0, axis))

    inference = Inference(int_max=2**31 - 1, auto_merge=merge, guess_output_rank=False, verbose=0)
    try:
        with quiet():
            inference._preprocess(_fixed(model))
            # As an expression: the name alone would not say that [2*T, 16] as [T, 2, -1] has 16 columns.
            inference.symbolic_dims_ = _Kept({several: _expression(several) for several in same.values()})
            for given in inference.out_mp_.graph.input:
                for size in given.type.tensor_type.shape.dim:
                    if size.dim_param in same:
                        size.dim_param = same[size.dim_param]
            for _ in range(_MOST_PASSES):
                inference._infer_impl()
                if not inference.run_:
                    break
    except Exception:  # it raises plain Exceptions, and whatever its handlers run into: the shapes stay unknown
        return
    for info in inference.out_mp_.graph.value_info:
        value = values.get(info.name)
        if value is None:
            continue
        known = ir.from_proto(info)
        _set_dtype(value, known)
        if _has_unknown(value) and known.shape is not None:
            shape = _with_numbers(value.shape, known.shape)
            value.shape = _never_one(value.shape, shape) if merge else shape


class _Kept(dict[str, Any]):
    """What the sizes are that others name; inference takes each name of an input for a number of its own."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._known = known

    def __setitem__(self, name: str, size: Any) -> None:
        super().__setitem__(name, self._known.get(name, size))


def _expression(several: str) -> Any:
    """A size ("2*T") as ONNX Runtime's inference has it."""
    import sympy

    names = {name: sympy.Symbol(name, integer=True, positive=True) for name in re.findall(r"[A-Za-z_]\w*", several)}
    return sympy.sympify(several, locals=names)


def _with_numbers(shape: ir.Shape | None, found: ir.Shape) -> ir.Shape:
    """``found``, with the numbers of ``shape``: one inference makes up names for what another one knows."""
    if shape is None:
        return found
    if len(shape) != len(found):
        return shape  # ONNX Runtime's counts a size that went through [1, 1] twice
    return ir.Shape([old if isinstance(old, int) else new for old, new in zip(shape, found, strict=True)])


def _never_one(shape: ir.Shape | None, found: ir.Shape) -> ir.Shape:
    """``shape``, and for what it does not know the sizes of ``found`` that are no 1."""
    before = list(shape) if shape is not None and len(shape) == len(found) else [ir.SymbolicDim(None)] * len(found)
    return ir.Shape(
        [
            new if _is_unknown(old) and (re.match(r"\d+\*", str(new)) or (isinstance(new, int) and new > 1)) else old
            for old, new in zip(before, found, strict=True)
        ]
    )


def _meets_several(node: ir.Node) -> tuple[str, str] | None:
    """The name of the number of rows that ``node`` weighs, and the "2*T" of the column that it weighs them by."""
    if not is_op(node, "Mul") or any(value is None or rank(value) != 2 for value in node.inputs):
        return None
    counts = [dim(value, 0) for value in node.inputs if value is not None]
    names = [size for size in counts if isinstance(size, str)]
    several = [size for size in names if re.match(r"\d+\*", size)]
    if len(names) != 2 or len(several) != 1:
        return None
    return next(size for size in names if size not in several), several[0]


def _lacks_widths(model: ir.Model) -> bool:
    return any(map(_lacks_width, nodes_of(model)))


def _lacks_width(node: ir.Node) -> bool:
    """Whether ``node`` adds or reshapes what may be hidden states of unknown width; masks and angles are no matter."""
    if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
        # onnx knows nothing of it, nor of what follows.
        return node.outputs[0].shape is None
    if is_op(node, "Reshape"):
        source = node.inputs[0]
        # Attention reshapes its heads, of more dimensions, in ways that no tail depends on.
        if source is None or source.shape is None or len(source.shape) not in (2, 3) or _is_unknown(source.shape[-1]):
            return False
    elif is_op(node, "MatMul"):
        # A product with one vector a token sums a token's rows.
        left, right = node.inputs
        if left is None or right is None or (dim(left, -2) != 1 and dim(right, -1) != 1):
            return False
        return any(
            (rank(value) or 0) >= 3 and any(map(_is_unknown, list(value.shape or ())[1:])) for value in (left, right)
        )
    elif not is_op(node, "Add", "ReduceSum", "Einsum", "ScatterElements", "ScatterND"):
        return False
    elif is_op(node, "ReduceSum") and rank(node.outputs[0]) == 3 and any(map(_is_unknown, node.outputs[0].shape or ())):
        # Of [E, B, S, H], experts are summed: whether a residual has as many tokens is known by B and S alone.
        return node.outputs[0].dtype in FLOAT_DTYPES
    # What is scattered along another axis marks groups of experts.
    along = node.attributes.get_int("axis", 0) if is_op(node, "ScatterElements") else 0
    read = node.inputs[:1] if along != 0 else node.inputs
    values = [value for value in (*read, *node.outputs) if value is not None and value.dtype in FLOAT_DTYPES]
    return any(value.shape is None or (len(value.shape) in (2, 3) and _is_unknown(value.shape[-1])) for value in values)


def _is_unknown(size: int | ir.SymbolicDim) -> bool:
    return not isinstance(size, int) and (size.value is None or size.value.startswith("unk__"))


def _has_unknown(value: ir.Value) -> bool:
    return value.shape is None or any(_is_unknown(size) for size in value.shape)


def _set_dtype(value: ir.Value, found: ir.Value) -> None:
    """Gives ``value`` the dtype of ``found``, which is UNDEFINED where only a shape was inferred."""
    if value.dtype is None and found.dtype not in (None, ir.DataType.UNDEFINED):
        value.dtype = found.dtype


def _fill(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Names are unique in one graph, not across the branches of an If: graphs are walked side by side."""
    inferred = {info.name: info for info in (*proto.value_info, *proto.output)}
    # Most values of a graph are of a few types, and reading one takes long.
    types: dict[bytes, ir.Value] = {}
    inner = {node.output[0]: node for node in proto.node if any(a.HasField("g") or a.graphs for a in node.attribute)}
    for node in graph:
        for value in node.outputs:
            info = inferred.get(value.name or "")
            if info is None:
                continue
            key = info.type.SerializeToString()
            found = types[key] = types.get(key) or ir.from_proto(info)
            _set_dtype(value, found)
            if value.shape is None:
                value.shape = found.shape.copy() if found.shape is not None else None
            elif found.shape is not None and len(found.shape) == len(value.shape):
                # TorchScript gives each dimension of an output that it does not know a name of its own.
                sizes = [
                    new if isinstance(new, int) else old for old, new in zip(value.shape, found.shape, strict=True)
                ]
                value.shape = value.shape if sizes == list(value.shape) else ir.Shape(sizes)
        for attribute in inner[node.outputs[0].name or ""].attribute if node.outputs[0].name in inner else ():
            if attribute.HasField("g"):
                _fill(node.attributes[attribute.name].as_graph(), attribute.g)
            for own, theirs in zip(
                node.attributes[attribute.name].as_graphs() if attribute.graphs else (), attribute.graphs, strict=True
            ):
                _fill(own, theirs)
