"""Whether TensorRT will run the plugin for our nodes: what its registry has, against what the file asks for."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from moetrt.errors import InputError
from moetrt.spec import DOMAIN, OPERATORS, PLUGIN_NAMESPACE

PluginId = tuple[str, str, str]
"""Name, version and namespace: what TensorRT's registry looks a plugin up by."""


def plugin_ids(creators: Iterable[Any]) -> list[PluginId]:
    """The creators of a registry."""
    # Creators of interfaces that the Python module does not know have none of these.
    fields = ("name", "plugin_version", "plugin_namespace")
    return [tuple(getattr(creator, field, "") for field in fields) for creator in creators]  # type: ignore[misc]


def has_ours(creators: Iterable[PluginId]) -> bool:
    """Whether a plugin of ours is among them."""
    return any(namespace == PLUGIN_NAMESPACE for _, _, namespace in creators)


def our_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes that mean one of our operators: by op_type, by domain, or by the plugin namespace they name.

    A node of our domain that only calls a function of the file under another name is none of them.
    """
    functions = {(function.domain, function.name) for function in model.functions.values()}
    for graph in model.graphs():
        for node in graph:
            known = node.op_type in OPERATORS
            asks = node.domain == DOMAIN or _string(node, "plugin_namespace") == PLUGIN_NAMESPACE
            calls = (node.domain, node.op_type) in functions and "plugin_version" not in node.attributes
            if known or (asks and not calls):
                yield node


def _string(node: ir.Node, name: str) -> str | None:
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, str) else None


def _has_function(model: ir.Model, node: ir.Node) -> bool:
    # TensorRT finds functions by op_type alone.
    return any(function.name == node.op_type for function in model.functions.values())


def _title(node: ir.Node) -> str:
    return f"node '{node.name or (node.outputs[0].name if node.outputs else node.op_type)}'"


def check_registry(model: ir.Model, creators: Iterable[PluginId]) -> None:
    """Checks that each node of ours finds its plugin, before TensorRT parses the file.

    TensorRT says the same sentence whether the op, the version or the namespace is wrong; this says which. A node that
    names no namespace and has a function in the file is passed over: TensorRT runs the function.

    Args:
        model: the mapped model.
        creators: (name, version, namespace) of each plugin that the registry has.

    Raises:
        InputError: a node's op, domain, ``plugin_version`` or ``plugin_namespace`` is not that of a plugin of ours.
    """
    ours = [creator for creator in creators if creator[0] in OPERATORS or creator[2] == PLUGIN_NAMESPACE]
    for node in our_nodes(model):
        version, namespace = _string(node, "plugin_version"), _string(node, "plugin_namespace")
        if namespace is None and _has_function(model, node):
            continue
        # What TensorRT's parser looks up: it takes the domain for the namespace where no attribute names one.
        asked = (node.op_type, version or "1", node.domain if namespace is None else namespace)
        if asked in ours and node.domain == DOMAIN:
            continue
        if not ours:
            raise InputError(f"{_title(node)} needs the plugin {node.op_type}; the registry has none of moetrt's")
        wrong = []
        names = sorted({name for name, _, _ in ours})
        if node.op_type not in names:
            wrong.append(f"op was '{node.op_type}'; {' or '.join(names)} is taken")
        versions = sorted({v for name, v, _ in ours if name == node.op_type or node.op_type not in names})
        if asked[1] not in versions:
            wrong.append(f"plugin_version was '{version}'; '{' or '.join(versions)}' is taken")
        spaces = sorted({space for _, _, space in ours})
        if namespace is not None and namespace not in spaces:
            wrong.append(f"plugin_namespace was '{namespace}'; '{' or '.join(spaces)}' is taken")
        if node.domain != DOMAIN:
            wrong.append(f"domain was '{node.domain}'; '{DOMAIN}' is taken")
        raise InputError(f"{_title(node)} finds no plugin: {'; '.join(wrong)}")


def run_as_functions(model: ir.Model, plugin_layers: Sequence[str]) -> list[str]:
    """Warns of the nodes for which TensorRT runs the function in the file although the plugin is there.

    Args:
        model: the mapped model.
        plugin_layers: the plugin layers of TensorRT's network, which bear the nodes' names.
    """
    warnings = []
    for node in our_nodes(model):
        lacking = [name for name in ("plugin_version", "plugin_namespace") if name not in node.attributes]
        if node.name not in plugin_layers and _has_function(model, node) and (node.name or lacking):
            why = f" has no attribute {' and no attribute '.join(lacking)}:" if lacking else ":"
            warnings.append(
                f"{_title(node)}{why} TensorRT runs the function {node.op_type} of the file, not the plugin"
            )
    return warnings


def check_functions(model: ir.Model, *, with_plugin: bool) -> None:
    """Checks that TensorRT can run the functions of the nodes that the plugin does not serve.

    Raises:
        InputError: a node has no function, or nodes of one op differ in their optional inputs: TensorRT finds a
            function by op_type alone, so it would run one node's function for the other.
    """
    input_lists: dict[str, dict[str, str]] = {}
    for node in our_nodes(model):
        if with_plugin and ("plugin_namespace" in node.attributes or not _has_function(model, node)):
            continue
        if not _has_function(model, node):
            raise InputError(
                f"{_title(node)} is {node.op_type} and the file has no function of that name: "
                "it can be built with the plugin library only"
            )
        input_lists.setdefault(node.op_type, {}).setdefault(node.overload, _title(node))
    for op_type, overloads in input_lists.items():
        if len(overloads) > 1:
            raise InputError(
                f"{' and '.join(list(overloads.values())[:2])} are {op_type} with different optional inputs, and "
                "TensorRT cannot tell their functions apart: such a file needs the plugin"
            )
