"""The seed that capture writes: a MoEFinalizeAdd node."""

import onnx_ir as ir

from moetrt.onnx_op import named_inputs, operator_of, read_attributes
from moetrt.segments.reading import named
from moetrt.segments.tail import Operand, Seed, Term
from moetrt.spec import FINALIZE_ADD

FORM = "finalize node"


def seed_at(node: ir.Node) -> Seed | None:
    """The seed that ``node`` is, or None.

    Raises:
        ValueError: the node's inputs or attributes are not what the operator takes.
    """
    if operator_of(node) is not FINALIZE_ADD:
        return None
    inputs = {name: Operand(value) for name, value in named_inputs(node).items()}
    attributes = read_attributes(node)
    combine = float(attributes["combine_scale"])
    shared, gate = inputs.pop("shared_output", None), inputs.pop("shared_gate", None)
    return Seed(
        form=FORM,
        node=node,
        value=node.outputs[0],
        operands=inputs,
        scale=combine * float(attributes["routed_scaling_factor"]),
        terms=[Term(shared, gate, combine, shared=True)] if shared is not None else [],
        apply_expert_weights=int(attributes["apply_expert_weights"]),
        # The routed part's own factor could not be told from the whole any more.
        problem=f"the combine_scale of {named(node)} is 0" if combine == 0 else None,
    )
