"""Model-local functions go into the graphs that call them: a tail may begin in one and end in another."""

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from moetrt.errors import InputError

_FIRST_STABLE_OPSET = 18
"""From here on onnxscript's converter knows what changed; before it, axes became inputs one operator after another."""


def normalise_domains(model: ir.Model) -> None:
    """Spells the domain of the standard operators "" where the model or a function imports it as "ai.onnx".

    Raises:
        InputError: both spellings are imported, with different versions.
    """
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        version = holder.opset_imports.pop("ai.onnx", None)
        if version is None:
            continue
        if holder.opset_imports.setdefault("", version) != version:
            raise InputError(
                f"the standard operators are imported twice, as opset {holder.opset_imports['']} and, by the name "
                f"'ai.onnx', as {version}; one is taken"
            )


def inline_functions(model: ir.Model) -> list[str]:
    """Inlines the model-local functions, nested ones too.

    Functions that stay: the bodies of other plugins' nodes (those with ``plugin_version`` or ``plugin_namespace``),
    whose readers look for the node; functions that are given a graph as an attribute; and those written for a version
    of the standard operators that cannot be converted to the model's.

    Returns:
        what the user should know, one line each; empty where there was nothing to inline.

    Raises:
        InputError: functions call each other in a circle.
    """
    if not model.functions:
        return []
    kept = _called_as_plugins(model)
    notes: list[str] = []
    for identifier, function in model.functions.items():
        if identifier not in kept and (problem := _convert(function, model)) is not None:
            kept.add(identifier)
            notes.append(f"function '{function.name}' was not looked into: {problem}")
    before = len(model.functions)
    try:
        InlinePass(criteria=lambda function: function.identifier() not in kept)(model)
    except ir.passes.PreconditionError as error:
        raise InputError(f"functions call each other in a circle: {error}") from error
    if len(model.functions) < before:
        notes.append(f"{before - len(model.functions)} model-local functions were inlined")
    return notes


def _called_as_plugins(model: ir.Model) -> set[ir.OperatorIdentifier]:
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return {
        node.op_identifier()
        for node in _all_nodes(model)
        if node.op_identifier() in model.functions
        and (
            {"plugin_version", "plugin_namespace"} & set(node.attributes)
            or any(attribute.type in graphs for attribute in node.attributes.values())
        )
    }


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        yield from ir.traversal.RecursiveGraphIterator(holder)


def _convert(function: ir.Function, model: ir.Model) -> str | None:
    """Brings the function to the model's version of the standard operators; in words, why that cannot be done."""
    mine, wanted = function.opset_imports.get(""), model.graph.opset_imports.get("")
    if mine is None or wanted is None or mine == wanted:
        return None
    said = f"it is written for opset {mine}, the model for {wanted}"
    if mine < _FIRST_STABLE_OPSET or mine > wanted:
        return f"{said}; export both with one opset"
    from onnxscript.version_converter import convert_version

    try:
        # The converter takes models; it changes the function's own graph.
        convert_version(ir.Model(function.graph, ir_version=model.ir_version), wanted)
    except Exception as error:  # the converter's own errors have no common base
        return f"{said}, and cannot be converted ({' '.join(str(error).split())}); export both with one opset"
    function.opset_imports[""] = wanted
    return None
