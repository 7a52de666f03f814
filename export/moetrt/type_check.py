"""What an operator takes to be of one dtype must be: ONNX Runtime refuses a file where it is not.

onnx's checker looks at that only where it infers shapes, of a whole model.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import onnx
import onnx_ir as ir

from moetrt.errors import InputError
from moetrt.segments.reading import dtype_name, named

_Formals = tuple[tuple[str, ...], bool]
"""The types of a schema's inputs or outputs, names of what must be alike among them, and whether the last repeats."""

_DISPUTED = "RMSNormalization"
"""Its output has its scale's dtype by onnx's schema, its input's by onnx's inference: neither is held against it."""


def check_types(nodes: Iterable[ir.Node], opset: int) -> None:
    """Checks the standard operators among ``nodes``, as far as the graph says dtypes.

    Args:
        nodes: any; those of other domains are passed over.
        opset: the version of the standard operators.

    Raises:
        InputError: two inputs or outputs of a node, which must have one dtype, have two.
    """
    for node in nodes:
        formals = _formals(node.op_type, opset) if node.domain == "" else None
        if formals is None:
            continue
        if len({value.dtype for value in (*node.inputs, *node.outputs) if value is not None}) == 1:
            # Of most nodes, and then all of them are alike.
            continue
        first: dict[str, ir.Value] = {}
        for values, (names, repeats) in zip((node.inputs, node.outputs), formals, strict=True):
            for name, value in _bound(values, names, repeats):
                other = first.setdefault(name, value)
                if other.dtype != value.dtype:
                    raise InputError(
                        f"{named(node)} has '{other.name}' of {dtype_name(other.dtype)} and '{value.name}' of "
                        f"{dtype_name(value.dtype)}; one dtype is taken for both"
                    )


def _bound(values: Sequence[ir.Value | None], names: Sequence[str], repeats: bool) -> Iterator[tuple[str, ir.Value]]:
    """The values whose dtype is known, each with the name of its type."""
    for index, value in enumerate(values):
        name = names[index] if index < len(names) else names[-1] if repeats and names else ""
        if name and value is not None and isinstance(value.type, ir.TensorType) and value.dtype:
            yield name, value


@cache
def _formals(op_type: str, opset: int) -> tuple[_Formals, _Formals] | None:
    """What the operator's schema says of its inputs and of its outputs; None where there is none."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    named_types = {constraint.type_param_str for constraint in schema.type_constraints}

    def read(formals: Sequence[onnx.defs.OpSchema.FormalParameter]) -> _Formals:
        alike = tuple(
            # The inputs of a Loop may be of any types, and so may those of an optional or a sequence.
            formal.type_str if formal.type_str in named_types and formal.is_homogeneous else ""
            for formal in formals
        )
        repeats = bool(formals) and formals[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        return alike, repeats

    return read(schema.inputs), read([] if op_type == _DISPUTED else schema.outputs)
