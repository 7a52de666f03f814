"""What a segment is while it is found and grown: operands, scales, and the nodes between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

Write = Callable[
    [str, Sequence[ir.Value], Mapping[str, Any], ir.DataType | None, Sequence[int | str | None]],
    ir.Value,
]
"""Puts a node before the plugin node: its op type, inputs, attributes, and its output's dtype and dimensions."""


@dataclass(frozen=True)
class Operand:
    """An input of the plugin node: a value of the graph, and what must be done to it first.

    Attributes:
        value: of the graph; what the operand is made from, where it is made.
        cast_to: the dtype that the plugin node gets.
        reshape_to: the shape that it gets, before the cast.
        make: writes the nodes that make the operand, before the reshape.
    """

    value: ir.Value
    cast_to: ir.DataType | None = None
    reshape_to: tuple[int, ...] | None = None
    make: Callable[[Write], ir.Value] | None = field(default=None, compare=False)


def written(operand: Operand, write: Write) -> ir.Value:
    """The operand's value, after the nodes that give it the dtype and shape that the operator takes."""
    value = operand.value if operand.make is None else operand.make(write)
    if operand.reshape_to is not None:
        sizes = ir.tensor(list(operand.reshape_to), dtype=ir.DataType.INT64)
        shape = write("Constant", [], {"value": sizes}, ir.DataType.INT64, [len(operand.reshape_to)])
        known = [None if size == -1 else size for size in operand.reshape_to]
        value = write("Reshape", [value, shape], {}, value.dtype, known)
    if operand.cast_to is not None and value.dtype != operand.cast_to:
        cast = write("Cast", [value], {"to": operand.cast_to}, operand.cast_to, [])
        cast.shape = value.shape
        value = cast
    return value


def expanded(write: Write, value: ir.Value, shape: ir.Value, known: Sequence[int | str | None]) -> ir.Value:
    """``value`` in the shape that ``shape`` holds, ``known`` so far."""
    if value.dtype != ir.DataType.BFLOAT16:
        return write("Expand", [value, shape], {}, value.dtype, known)
    # ONNX Runtime has no Expand of bfloat16; float32 keeps its numbers.
    wide = write("Cast", [value], {"to": ir.DataType.FLOAT}, ir.DataType.FLOAT, [])
    wide.shape = value.shape
    wide = write("Expand", [wide, shape], {}, ir.DataType.FLOAT, known)
    return write("Cast", [wide], {"to": ir.DataType.BFLOAT16}, ir.DataType.BFLOAT16, known)


@dataclass
class Term:
    """One thing added to the routed part: ``scale * sigmoid(gate) * operand``.

    Attributes:
        shape_nodes: the Reshapes that lie between the operand's shape and that of the sum.
        shared: whether the graph itself says that this is the shared expert's output.
    """

    operand: Operand
    gate: Operand | None = None
    scale: float = 1.0
    shape_nodes: list[ir.Node] = field(default_factory=list)
    shared: bool = False


@dataclass
class Seed:
    """Where a tail begins: the node that makes the finalized value.

    Attributes:
        form: how the graph spelled it.
        node: the node that makes ``value``.
        value: the routed part, with what the seed had added already.
        operands: the operator's routed inputs by name.
        scale: what multiplies the routed part in all.
        terms: what the seed had added already.
        apply_expert_weights: the operator's attribute.
        problem: why it cannot be mapped, although it looks like a MoE tail.
        may_be_pooling: whether only a residual and a norm after it would show that it is a MoE tail.
        own_body: whether it is the operator's own body, inlined: what it adds has one row a token.
        placed: the rows with the B and S of ``value``, where the operands have T.
        known: what the form has shown to follow from its operands, and is read by none of them.
    """

    form: str
    node: ir.Node
    value: ir.Value
    operands: dict[str, Operand]
    scale: float = 1.0
    terms: list[Term] = field(default_factory=list)
    apply_expert_weights: int = 1
    problem: str | None = None
    may_be_pooling: bool = False
    own_body: bool = False
    placed: ir.Value | None = None
    known: tuple[ir.Value, ...] = ()

    @property
    def data(self) -> ir.DataType | None:
        """The rows' dtype, as the operator gets them."""
        rows = self.operands["gemm2_permuted"]
        return rows.cast_to or rows.value.dtype
