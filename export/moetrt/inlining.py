"""Model-local functions go into the graphs that call them: a tail may begin in one and end in another."""

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from moetrt.errors import InputError


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
    whose readers look for the node; functions that are given a graph as an attribute; and those written for another
    version of an operator than the model's (onnx.checker takes no such file).

    Returns:
        what the user should know, one line each; empty where there was nothing to inline.

    Raises:
        InputError: functions call each other in a circle.
    """
    if not model.functions:
        return []
    kept = _called_as_plugins(model)
    notes: list[str] = []
    imports = dict(model.graph.opset_imports)
    for identifier, function in model.functions.items():
        problem = None if identifier in kept else _adopt_versions(function, imports)
        if problem is not None:
            kept.add(identifier)
            notes.append(f"function '{function.name}' was not looked into: {problem}; export both with one opset")
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


def _adopt_versions(function: ir.Function, imports: dict[str, int]) -> str | None:
    """Lets the function import what the model imports, as the inliner wants it; in words, why that changes it."""
    for domain, mine in function.opset_imports.items():
        wanted = imports.setdefault(domain, mine)
        if mine == wanted:
            continue
        changed = next((op for op in _operators(function, domain) if _differs(op, domain, mine, wanted)), None)
        if changed is not None:
            return f"its {changed} is that of opset {mine}, the model's of {wanted}"
        function.opset_imports[domain] = wanted
    return None


def _operators(function: ir.Function, domain: str) -> Iterator[str]:
    return (node.op_type for node in ir.traversal.RecursiveGraphIterator(function) if node.domain == domain)


def _differs(op_type: str, domain: str, one: int, other: int) -> bool:
    """Whether an operator is another one in another version of its domain, as far as onnx knows it."""
    try:
        first, second = (onnx.defs.get_schema(op_type, version, domain).since_version for version in (one, other))
    except onnx.defs.SchemaError:
        return True
    return bool(first != second)
