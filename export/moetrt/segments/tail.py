"""What a segment is while it is found and grown: operands, scales, and the nodes between."""

from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass(frozen=True)
class Operand:
    """An input of the plugin node: a value of the graph, and what must be done to it first."""

    value: ir.Value
    cast_to: ir.DataType | None = None
    reshape_to: tuple[int, ...] | None = None


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
    """

    form: str
    node: ir.Node
    value: ir.Value
    operands: dict[str, Operand]
    scale: float = 1.0
    terms: list[Term] = field(default_factory=list)
    apply_expert_weights: int = 1
    problem: str | None = None

    @property
    def data(self) -> ir.DataType | None:
        """The rows' dtype."""
        return self.operands["gemm2_permuted"].value.dtype
