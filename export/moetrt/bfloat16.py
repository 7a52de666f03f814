"""Operators that ONNX does not define for bfloat16 get float32, between Casts: torch.onnx writes them as they come."""

from collections.abc import Sequence
from functools import cache

import onnx
import onnx_ir as ir

_BF16, _FLOAT = "tensor(bfloat16)", "tensor(float)"


def widen_undefined(model: ir.Model) -> int:
    """Puts Casts around each standard operator that has no bfloat16 in the model's opset: TopK before 24, Einsum.

    float32 has every number of bfloat16, so nothing is chosen otherwise, and what is computed is rounded once.

    Args:
        model: changed in place, its inner graphs too.

    Returns:
        how many nodes got Casts.
    """
    opset = model.graph.opset_imports.get("", 0)
    changed = 0
    for graph in model.graphs():
        for node in list(graph):
            undefined = _undefined(node.op_type, opset) if node.domain == "" else None
            if undefined is not None and _widen(node, *undefined):
                changed += 1
    return changed


def _widen(node: ir.Node, inputs: Sequence[bool], outputs: Sequence[bool]) -> bool:
    wide = [
        (index, value)
        for index, value in enumerate(node.inputs)
        if value is not None and inputs[min(index, len(inputs) - 1)] and value.dtype == ir.DataType.BFLOAT16
    ]
    graph = node.graph
    if not wide or graph is None:
        return False
    for index, value in wide:
        cast = _cast(node, value, ir.DataType.FLOAT, f"input_{index}")
        graph.insert_before(node, cast)
        node.replace_input_with(index, cast.outputs[0])
    for index, output in enumerate(node.outputs):
        if not outputs[min(index, len(outputs) - 1)]:
            continue
        cast = _cast(node, output, ir.DataType.BFLOAT16, f"output_{index}")
        made = cast.outputs[0]
        output.replace_all_uses_with(made, replace_graph_outputs=True)
        cast.replace_input_with(0, output)
        graph.insert_after(node, cast)
        output.name, made.name = made.name, output.name
        output.dtype = ir.DataType.FLOAT
    return True


def _cast(node: ir.Node, value: ir.Value, to: ir.DataType, place: str) -> ir.Node:
    """A Cast of ``value``, named after ``node`` and of its module."""
    cast = ir.node("Cast", [value], {"to": to}, name=f"{node.name or node.outputs[0].name}_{place}")
    cast.metadata_props.update(node.metadata_props)
    made = cast.outputs[0]
    made.name, made.dtype, made.shape = f"{node.outputs[0].name}_{place}", to, value.shape
    return cast


@cache
def _undefined(op_type: str, opset: int) -> tuple[tuple[bool, ...], tuple[bool, ...]] | None:
    """Which inputs and outputs of an operator can be float32 but not bfloat16; None where there are none."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    if any(not kind.startswith("tensor(") for kinds in allowed.values() for kind in kinds):
        # A sequence would change its own type.
        return None
    narrow = {name for name, kinds in allowed.items() if _FLOAT in kinds and _BF16 not in kinds}
    inputs, outputs = (
        tuple(formal.type_str in narrow for formal in formals) for formals in (schema.inputs, schema.outputs)
    )
    return (inputs, outputs) if any(inputs) else None
