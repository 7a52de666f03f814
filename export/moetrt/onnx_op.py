"""The operators in ONNX: the node, the model-local function with the operator's body, and torch.onnx's translations.

The node carries what TensorRT's parser needs to find the plugin; the function lets every other reader run the file.
Both come from the table (`moetrt.spec`) and the definition (`moetrt.definition`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from moetrt.definition import evaluate
from moetrt.errors import InputError, InputTypeError
from moetrt.graphs import nodes_of
from moetrt.spec import (
    DATA_DTYPES,
    DOMAIN,
    OPERATORS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    AttributeSpec,
    InputSpec,
    Operand,
    OperatorSpec,
    check_operands,
)

OPSET_VERSION = 1
"""Version of the ONNX domain ``moetrt``."""

_OVERLOADS_IR_VERSION = 10
_DTYPE_NAMES = {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT", "int32": "INT32"}


def operator_of(node: ir.Node) -> OperatorSpec | None:
    """The operator that ``node`` is, or None."""
    return OPERATORS.get(node.op_type) if node.domain == DOMAIN else None


def named_inputs(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs of an operator node by their names in the table, read off the node's ``has_*`` attributes.

    Raises:
        InputError: the node's inputs are not as many as its flags say, or one is empty.
    """
    spec = OPERATORS[node.op_type]
    names = [entry.name for entry in spec.inputs if not entry.optional or _flag(node, entry.flag, spec)]
    if len(names) != len(node.inputs) or any(value is None for value in node.inputs):
        given = [value.name if value is not None else "" for value in node.inputs]
        raise InputError(
            f"node '{node.name}' ({spec.name}): its inputs were {given}; its has_* attributes say {', '.join(names)}; "
            "to leave an input out, remove it from the list and set its has_* attribute to 0"
        )
    return {name: value for name, value in zip(names, node.inputs, strict=True) if value is not None}


def _flag(node: ir.Node, name: str, spec: OperatorSpec) -> bool:
    entry = next(entry for entry in spec.flags if entry.name == name)
    if name not in node.attributes:
        return bool(entry.default)
    return bool(entry.check(_value_of(node, entry), _where(node)))


_ATTRIBUTE_TYPES = {"FLAG": ir.AttributeType.INT, "FLOAT": ir.AttributeType.FLOAT}


def _value_of(node: ir.Node, entry: AttributeSpec) -> Any:
    """An attribute's value.

    Raises:
        InputTypeError: it is of another type than the plugin's field: TensorRT would not convert it.
    """
    attribute, wanted = node.attributes[entry.name], _ATTRIBUTE_TYPES[entry.kind]
    if attribute.type != wanted:
        raise InputTypeError(
            f"{_where(node)}: attribute {entry.name} was {attribute.value!r}, {attribute.type.name}; "
            f"{wanted.name} is taken"
        )
    return attribute.value


def _where(node: ir.Node) -> str:
    return f"node '{node.name}' ({node.op_type})"


def read_attributes(node: ir.Node) -> dict[str, float | int]:
    """The attributes of an operator node without the ``has_*`` flags, defaults filled in.

    Raises:
        InputError, InputTypeError: a value or a type that is not taken, or an attribute that the operator has not:
            TensorRT would pass over that in silence.
    """
    spec = OPERATORS[node.op_type]
    known = {entry.name for entry in spec.all_attributes} | {"plugin_version", "plugin_namespace"}
    values = {name: attribute.value for name, attribute in node.attributes.items() if name not in known}
    values |= {entry.name: _value_of(node, entry) for entry in spec.attributes if entry.name in node.attributes}
    return spec.complete(values, _where(node))


def make_node(
    spec: OperatorSpec,
    inputs: Mapping[str, ir.Value | None],
    attributes: Mapping[str, object],
    *,
    outputs: Sequence[ir.Value] | None = None,
    name: str | None = None,
) -> ir.Node:
    """Makes an operator node with every attribute written.

    Args:
        spec: the operator.
        inputs: by name; absent optional inputs are None or left out.
        attributes: by name, without ``has_*`` flags; the table's defaults where left out.
        outputs: values to take over as outputs; new ones by default, with dtype and shape where they are known.
        name: the node's name, which is the layer's name in TensorRT.

    Raises:
        InputError, InputTypeError: what is known of dtypes, shapes and attributes is not taken.
    """
    given = {entry.name: value for entry in spec.inputs if (value := inputs.get(entry.name)) is not None}
    complete = spec.complete(attributes)
    _check_values(spec, given, name)
    flags = {entry.flag: int(entry.name in given) for entry in spec.optional_inputs}
    node = ir.Node(
        DOMAIN,
        spec.name,
        list(given.values()),
        [_attribute(entry, (flags | complete)[entry.name]) for entry in spec.all_attributes]
        + [ir.AttrString("plugin_version", PLUGIN_VERSION), ir.AttrString("plugin_namespace", PLUGIN_NAMESPACE)],
        outputs=outputs,
        num_outputs=None if outputs is not None else len(spec.outputs),
        version=OPSET_VERSION,
        name=name,
    )
    like = given.get("residual", given.get("shared_output"))
    for output in node.outputs:
        dtype = given["gemm2_permuted"].dtype
        if output.dtype is None and dtype is not None:
            output.dtype = dtype
        if output.shape is None:
            output.shape = like.shape if like is not None else _flat_shape(given)
    return node


def _flat_shape(given: Mapping[str, ir.Value]) -> ir.Shape | None:
    """``[T, H]``, the outputs' shape where neither residual nor shared_output gives one."""
    weights, wide = given["expert_weights"].shape, given.get("gamma", given["gemm2_permuted"]).shape
    return None if weights is None or wide is None else ir.Shape([weights[0], wide[-1]])


def check_node(node: ir.Node) -> None:
    """Checks as much of an operator node as the graph says: its inputs' dtypes and shapes.

    Raises:
        InputError, InputTypeError: an input, a dtype or a shape that is not taken.
    """
    _check_values(OPERATORS[node.op_type], named_inputs(node), node.name)


def _check_values(spec: OperatorSpec, given: Mapping[str, ir.Value], name: str | None) -> None:
    """Checks as much as the graph says: a value without a dtype or a shape is passed over."""
    if all(value.dtype is not None and value.shape is not None for value in given.values()):
        operands = {
            key: Operand(
                _dtype_name(value.dtype),
                [dim if isinstance(dim, int) else None for dim in value.shape or ()],
            )
            for key, value in given.items()
        }
        check_operands(spec, operands, where=f"node '{name}' ({spec.name})" if name else spec.name)


def _dtype_name(dtype: ir.DataType | None) -> str:
    assert dtype is not None
    return next((ours for ours, theirs in _DTYPE_NAMES.items() if theirs == dtype.name), dtype.name.lower())


def _attribute(entry: AttributeSpec, value: float | int) -> ir.Attr:
    return ir.AttrInt64(entry.name, int(value)) if entry.kind == "FLAG" else ir.AttrFloat32(entry.name, float(value))


def attach_functions(model: ir.Model) -> None:
    """Gives ``model`` the function of every operator node in it, and names each node's overload.

    Existing functions of the operators are replaced. One input list an operator needs no overload; several get one
    each, and then TensorRT without the plugin cannot tell them apart. To be called last: inlining and opset conversion
    would take the functions away again.
    """
    remove_functions(model)
    nodes = [node for node in nodes_of(model) if operator_of(node)]
    if not nodes:
        return
    opset = model.graph.opset_imports[""]
    for spec in OPERATORS.values():
        mine = [(node, tuple(named_inputs(node))) for node in nodes if node.op_type == spec.name]
        lists = list(dict.fromkeys(names for _, names in mine))
        for names in lists:
            overload = "" if len(lists) == 1 else "-".join(names)
            function = make_function(spec, names, opset=opset, overload=overload)
            model.functions[function.identifier()] = function
        for node, names in mine:
            node.overload = "" if len(lists) == 1 else "-".join(names)
        if len(lists) > 1:
            model.ir_version = max(model.ir_version, _OVERLOADS_IR_VERSION)
    model.graph.opset_imports[DOMAIN] = OPSET_VERSION


def remove_functions(model: ir.Model) -> None:
    """Removes the operators' functions; the nodes stay."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN and key[1] in OPERATORS]:
        del model.functions[identifier]


def make_function(spec: OperatorSpec, names: Sequence[str], *, opset: int, overload: str = "") -> ir.Function:
    """The operator's body in standard ONNX ops, for one list of inputs.

    Args:
        spec: the operator.
        names: the inputs that are given, in order.
        opset: the model's version of the standard ops, at least 17.
        overload: the function's overload.
    """
    inputs = {name: ir.Value(name=name) for name in names}
    ops = _OnnxOps(inputs["gemm2_permuted"], opset)
    outputs = evaluate(spec, ops, inputs)
    for value, name in zip(outputs, spec.outputs, strict=True):
        value.name = name
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=ops.nodes, opset_imports={"": opset}, name=f"{spec.name}_body"
    )
    attributes = [_attribute(entry, entry.default) for entry in spec.all_attributes] + [
        ir.AttrString("plugin_version", PLUGIN_VERSION),
        ir.AttrString("plugin_namespace", PLUGIN_NAMESPACE),
    ]
    return ir.Function(DOMAIN, spec.name, overload, graph=graph, attributes=attributes)


@dataclass
class _OnnxOps:
    """The definition's primitives, recorded as nodes.

    All arithmetic is in float32: ONNX Runtime's CPU provider has Gather, Cast, CastLike and Reshape in bfloat16, and
    little else.
    """

    rows: ir.Value
    opset: int
    nodes: list[ir.Node] = field(default_factory=list)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, value: float | list[int], dtype: ir.DataType) -> ir.Value:
        return self.op("Constant", value=ir.tensor(value, dtype=dtype))

    def ints(self, *values: int) -> ir.Value:
        return self.constant(list(values), ir.DataType.INT64)

    def of_node(self, kind: ir.AttributeType, constant_attribute: str, name: str) -> ir.Value:
        """The value of the calling node's attribute ``name``."""
        return self.op("Constant", **{constant_attribute: ir.RefAttr(constant_attribute, name, kind)})

    def attribute(self, name: str) -> ir.Value:
        return self.of_node(ir.AttributeType.FLOAT, "value_float", name)

    def choose(self, flag: str, when_set: ir.Value, when_clear: ir.Value) -> ir.Value:
        value = self.of_node(ir.AttributeType.INT, "value_int", flag)
        return self.op("Where", self.op("Cast", value, to=ir.DataType.BOOL), when_set, when_clear)

    def compute(self, x: ir.Value) -> ir.Value:
        return self.op("Cast", x, to=ir.DataType.FLOAT)

    def data(self, x: ir.Value) -> ir.Value:
        return self.op("CastLike", x, self.rows)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("Mul", a, b)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("Add", a, b)

    def sigmoid(self, x: ir.Value) -> ir.Value:
        return self.op("Sigmoid", x)

    def ones_like(self, x: ir.Value) -> ir.Value:
        return self.op("ConstantOfShape", self.op("Shape", x), value=ir.tensor([1.0], dtype=ir.DataType.FLOAT))

    def inverse_rms(self, x: ir.Value, eps: ir.Value) -> ir.Value:
        square = self.op("Mul", x, x)
        if self.opset >= 18:
            mean = self.op("ReduceMean", square, self.ints(-1), keepdims=1)
        else:
            mean = self.op("ReduceMean", square, axes=[-1], keepdims=1)
        return self.op("Reciprocal", self.op("Sqrt", self.op("Add", mean, eps)))

    def rows_in_order(self, rows: ir.Value, expert_weights: ir.Value) -> ir.Value:
        width = self.op("Shape", rows, start=1)
        shape = self.op("Concat", self.op("Shape", expert_weights), width, axis=0)
        return self.op("Reshape", rows, shape, allowzero=1)

    def is_row(self, index: ir.Value, rows: ir.Value) -> ir.Value:
        count = self.op("Cast", self.op("Shape", rows, start=0, end=1), to=ir.DataType.INT32)
        at_least_0 = self.op("GreaterOrEqual", index, self.constant(0, ir.DataType.INT32))
        return self.op("And", at_least_0, self.op("Less", index, count))

    def rows_by_map(self, rows: ir.Value, index: ir.Value, is_row: ir.Value) -> ir.Value:
        first = self.constant(0, ir.DataType.INT32)
        return self.op("Gather", rows, self.op("Where", is_row, index, first), axis=0)

    def keep_mapped(self, routes: ir.Value, index: ir.Value, is_row: ir.Value) -> ir.Value:
        absent = self.op("Equal", index, self.constant(-1, ir.DataType.INT32))
        zero, nan = self.constant(0.0, ir.DataType.FLOAT), self.constant(float("nan"), ir.DataType.FLOAT)
        filler = self.per_route(self.op("Where", absent, zero, nan))
        return self.op("Where", self.per_route(is_row), routes, filler)

    def first_columns(self, x: ir.Value, like: ir.Value) -> ir.Value:
        end = self.op("Shape", like, start=-1)
        return self.op("Slice", x, self.ints(0), end, self.ints(-1))

    def per_route(self, x: ir.Value) -> ir.Value:
        return self.op("Unsqueeze", x, self.ints(-1))

    def sum_routes(self, x: ir.Value) -> ir.Value:
        return self.op("ReduceSum", x, self.ints(1), keepdims=0)

    def per_token(self, x: ir.Value) -> ir.Value:
        return self.op("Flatten", x, axis=-1)

    def shaped_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        return self.op("Reshape", x, self.op("Shape", like), allowzero=1)


def translation_table() -> dict[Callable[..., object], Callable[..., object]]:
    """The operators' translations for ``torch.onnx.export(..., custom_translation_table=...)``.

    They write the bare nodes; `attach_functions` adds the functions to the finished model.
    """
    import torch

    import moetrt.torch_op  # noqa: F401  registers torch.ops.moetrt

    return {getattr(torch.ops.moetrt, spec.torch_name).default: _translation(spec) for spec in OPERATORS.values()}


def _translation(spec: OperatorSpec) -> Callable[..., object]:
    import onnxscript.values

    opset = onnxscript.values.Opset(DOMAIN, OPSET_VERSION)

    def translate(*inputs: object, **attributes: object) -> object:
        given = {entry.name: value for entry, value in zip(spec.inputs, inputs, strict=False) if value is not None}
        complete = spec.complete(attributes)
        flags = {entry.flag: int(entry.name in given) for entry in spec.optional_inputs}
        op = onnxscript.values.Op(opset, spec.name, _op_schema(spec, tuple(given)))
        return op(
            *given.values(), **flags, **complete, plugin_version=PLUGIN_VERSION, plugin_namespace=PLUGIN_NAMESPACE
        )

    return translate


def _op_schema(spec: OperatorSpec, names: tuple[str, ...]) -> onnx.defs.OpSchema:
    """The node's signature for one list of inputs: torch.onnx reads it, nothing registers it."""
    by_name = {entry.name: entry for entry in spec.inputs}
    variables = {name: _type_variable(by_name[name].name, by_name[name].dtype) for name in names}
    floats = [f"tensor({dtype.replace('float32', 'float')})" for dtype in DATA_DTYPES]
    constraints = [("T", floats, "the rows' dtype")]
    constraints += [
        (variable, floats, "the rows' dtype or float32") for variable in variables.values() if variable.startswith("T_")
    ]
    kinds = {"FLAG": onnx.defs.OpSchema.AttrType.INT, "FLOAT": onnx.defs.OpSchema.AttrType.FLOAT}
    return onnx.defs.OpSchema(
        spec.name,
        DOMAIN,
        OPSET_VERSION,
        spec.doc,
        inputs=[onnx.defs.OpSchema.FormalParameter(name, variables[name], by_name[name].doc) for name in names],
        outputs=[onnx.defs.OpSchema.FormalParameter(name, "T") for name in spec.outputs],
        type_constraints=constraints,
        attributes=[
            onnx.defs.OpSchema.Attribute(entry.name, kinds[entry.kind], entry.doc, required=False)
            for entry in spec.all_attributes
        ]
        + [
            onnx.defs.OpSchema.Attribute(name, onnx.defs.OpSchema.AttrType.STRING, "read by TensorRT", required=False)
            for name in ("plugin_version", "plugin_namespace")
        ],
    )


def _type_variable(name: str, dtype: str) -> str:
    return {"data": "T", "int32": "tensor(int32)"}.get(dtype, f"T_{name}")


def make_model(
    spec: OperatorSpec, operands: Mapping[str, Operand], attributes: Mapping[str, object], *, opset: int = 22
) -> ir.Model:
    """Makes a model of one operator node with its function: graph inputs and outputs bear the operator's names.

    Args:
        spec: the operator.
        operands: dtype and dimensions of the inputs that are given; None makes a dimension dynamic.
        attributes: by name; defaults where left out.
        opset: the version of the standard ops.

    Raises:
        InputError, InputTypeError: what the operator does not take.
    """
    check_operands(spec, operands)
    inputs = {
        entry.name: ir.Value(
            name=entry.name,
            type=ir.TensorType(ir.DataType[_DTYPE_NAMES[operands[entry.name].dtype]]),
            shape=ir.Shape(_named_sizes(entry, operands[entry.name].shape)),
        )
        for entry in spec.inputs
        if entry.name in operands
    }
    node = make_node(spec, inputs, attributes, name=spec.name)
    for output, name in zip(node.outputs, spec.outputs, strict=True):
        output.name = name
    graph = ir.Graph(
        list(inputs.values()),
        node.outputs,
        nodes=[node],
        opset_imports={"": opset, DOMAIN: OPSET_VERSION},
        name=spec.name,
    )
    model = ir.Model(graph, ir_version=_OVERLOADS_IR_VERSION)
    attach_functions(model)
    return model


def _named_sizes(entry: InputSpec, shape: Sequence[int | None]) -> list[int | str]:
    """``shape`` with the table's letters for what is dynamic: T is one size, whichever input has it."""
    letters = entry.shape.partition("]")[0].strip("[").replace("...", "T").split(", ")
    if len(letters) != len(shape):
        letters = [*(f"{entry.name}_{axis}" for axis in range(len(shape) - 1)), letters[-1]]
    return [letter if size is None else size for letter, size in zip(letters, shape, strict=True)]
