"""The tails of an ONNX-GraphSurgeon graph, for Polygraphy's ``plugin`` tool: ``plugins/*/pattern.py`` call this.

The tool names a tail by tensors that the graph has. What `moetrt map` puts beside the plugin node, such as a Cast of an
input, is therefore looked up again when the tail is replaced: in a mapped copy of the graph.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs
import onnx_ir as ir
from polygraphy.logger import G_LOGGER

from moetrt.errors import MoetrtError
from moetrt.inlining import inline_functions, normalise_domains
from moetrt.mapping import map_model
from moetrt.onnx_files import proto_of
from moetrt.onnx_op import remove_functions
from moetrt.spec import DOMAIN, OPERATORS


@dataclass(frozen=True)
class _Tail:
    """One tail in a mapped copy of a graph.

    Attributes:
        plugin: its plugin node.
        nodes: what takes the tail's place, in order: what its inputs need, the plugin node, what its outputs need.
        inputs: the tensors that go in, by name, each once, in the order of the operator's inputs.
        outputs: the tensors that come out, by name, in the order of the operator's outputs.
    """

    plugin: gs.Node
    nodes: list[gs.Node]
    inputs: list[str]
    outputs: list[str]


@dataclass(frozen=True)
class _Copy:
    """A mapped copy of a graph: its tails, and the operators' functions as far as GraphSurgeon can hold them."""

    tails: list[_Tail]
    functions: list[gs.Function]


_latest: tuple["weakref.ref[gs.Graph]", _Copy] | None = None
"""The tool replaces one tail a call, all of the same graph: it is mapped once."""


def matching_subgraphs(graph: gs.Graph, operator: str) -> list[dict[str, Any]]:
    """The tails of ``graph`` that become a node of ``operator``, as ``get_matching_subgraphs`` is to give them.

    Args:
        graph: as Polygraphy loaded it; stays as it is.
        operator: ``MoEFinalizeAddRMSNorm`` or ``MoEFinalizeAdd``.

    Returns:
        for each tail the names of its ``inputs`` and ``outputs``, and the plugin node's ``attributes``.

    Raises:
        PolygraphyException: the graph is not taken.
    """
    return [
        {"inputs": tail.inputs, "outputs": tail.outputs, "attributes": dict(sorted(tail.plugin.attrs.items()))}
        for tail in _mapped_copy(graph).tails
        if tail.plugin.op == operator
    ]


def replace_tail(
    graph: gs.Graph,
    input_tensors: Sequence[gs.Tensor],
    output_tensors: Sequence[gs.Tensor],
    attrs: Mapping[str, Any] | None,
    op: str,
) -> gs.Node | None:
    """Puts the plugin node for one tail into ``graph``, as ``replace_with_plugin`` is to do.

    Args:
        graph: changed in place; stays sorted, and loses the nodes that only the tail needed.
        input_tensors, output_tensors: the tail's, as of `matching_subgraphs`.
        attrs: attributes of the plugin node that are to differ from those that mapping gives.
        op: the operator.

    Returns:
        the plugin node; None, with a warning, where ``graph`` has no such tail.

    Raises:
        PolygraphyException: the graph is not taken.
    """
    global _latest
    if _latest is None or _latest[0]() is not graph:
        _latest = (weakref.ref(graph), _mapped_copy(graph))
    copy = _latest[1]
    inputs, outputs = [tensor.name for tensor in input_tensors], [tensor.name for tensor in output_tensors]
    wanted = (op, inputs, outputs)
    tail = next((tail for tail in copy.tails if (tail.plugin.op, tail.inputs, tail.outputs) == wanted), None)
    if tail is None:
        G_LOGGER.warning(f"[moetrt] no tail for {op} leads from {inputs} to {outputs}; nothing was replaced")
        return None
    plugin = next(node for node in _put(graph, tail, output_tensors) if node.name == tail.plugin.name)
    plugin.attrs.update(attrs or {})
    graph.functions = [function for function in graph.functions if not _is_ours(function)] + copy.functions
    return plugin


def _mapped_copy(graph: gs.Graph) -> _Copy:
    try:
        model = ir.from_proto(gs.export_onnx(graph))
        # What the mapper does first, done before it: what is new afterwards is what it put in place of a tail.
        normalise_domains(model)
        remove_functions(model)
        inline_functions(model)
        before = set(model.graph)
        report = map_model(model)
    except MoetrtError as error:
        G_LOGGER.critical(f"[moetrt] {error}")
        raise  # critical has raised
    for site in report.unmatched:
        G_LOGGER.warning(f"[moetrt] {site.name}: {site.became}")
    copy = gs.import_onnx(proto_of(model))
    new = {id(theirs): theirs for theirs, ours in zip(copy.nodes, model.graph, strict=True) if ours not in before}
    top_level = {node.name for node in copy.nodes}
    for site in report.sites:
        if site.operator is not None and site.name not in top_level:
            G_LOGGER.warning(f"[moetrt] {site.name}: is in an inner graph, which this tool passes over")
    here = graph.tensors()
    # One that was a plugin node before is replaced by itself, with all attributes written.
    tails = [_tail(node, new, here) for node in copy.nodes if node.domain == DOMAIN and node.op in OPERATORS]
    # GraphSurgeon does not know overloads of a function.
    distinct = all(not overload for _, _, overload in model.functions)
    functions = [function for function in copy.functions if distinct and _is_ours(function)]
    return _Copy([tail for tail in tails if tail is not None], functions)


def _is_ours(function: gs.Function) -> bool:
    return function.domain == DOMAIN and function.name in OPERATORS


def _tail(plugin: gs.Node, new: Mapping[int, gs.Node], here: Mapping[str, gs.Tensor]) -> _Tail | None:
    before: dict[int, gs.Node] = {}
    inputs = [tensor.name for entry in plugin.inputs for tensor in _sources(entry, new, here, before)]
    after: dict[int, gs.Node] = {}
    outputs = [_result(entry, new, here, after).name for entry in plugin.outputs]
    outside = [name for name in (*inputs, *outputs) if name not in here]
    if outside:
        G_LOGGER.warning(
            f"[moetrt] {plugin.name}: '{outside[0]}' is in a model-local function; `moetrt map` inlines it"
        )
        return None
    return _Tail(plugin, [*before.values(), plugin, *after.values()], list(dict.fromkeys(inputs)), outputs)


def _sources(
    tensor: gs.Tensor, new: Mapping[int, gs.Node], here: Mapping[str, gs.Tensor], nodes: dict[int, gs.Node]
) -> Iterator[gs.Tensor]:
    """The tensors that ``tensor`` is made from by new nodes, which go into ``nodes`` in order; else itself."""
    maker = None if tensor.name in here or not tensor.inputs else new.get(id(tensor.inputs[0]))
    if maker is None:
        # A constant that is new comes with the node that reads it.
        if not isinstance(tensor, gs.Constant) or tensor.name in here:
            yield tensor
        return
    for entry in maker.inputs:
        yield from _sources(entry, new, here, nodes)
    nodes[id(maker)] = maker


def _result(
    tensor: gs.Tensor, new: Mapping[int, gs.Node], here: Mapping[str, gs.Tensor], nodes: dict[int, gs.Node]
) -> gs.Tensor:
    """The tensor that the graph had, after the new nodes that lead there from ``tensor``."""
    while tensor.name not in here:
        reader = next((new[id(node)] for node in tensor.outputs if id(node) in new), None)
        if reader is None:
            break
        nodes[id(reader)] = reader
        tensor = reader.outputs[0]
    return tensor


def _put(graph: gs.Graph, tail: _Tail, outputs: Sequence[gs.Tensor]) -> list[gs.Node]:
    """Puts copies of the tail's nodes where the first of ``outputs`` was made, and takes out what made these before.

    What the new nodes read is made before that place, and all that reads them comes after, so the graph stays sorted.
    """
    known = graph.tensors()

    def here(tensors: Iterable[gs.Tensor]) -> list[gs.Tensor]:
        return [known.setdefault(tensor.name, tensor.copy()) for tensor in tensors]

    makers = [node for tensor in outputs for node in tensor.inputs]
    for tensor in outputs:
        tensor.inputs.clear()
    nodes = [
        gs.Node(node.op, node.name, dict(node.attrs), here(node.inputs), here(node.outputs), node.domain)
        for node in tail.nodes
    ]
    # By identity: GraphSurgeon's nodes are equal where their contents are.
    position = {id(node): index for index, node in enumerate(graph.nodes)}
    place = min(position[id(node)] for node in makers)
    read = [maker for node in nodes for tensor in node.inputs for maker in tensor.inputs]
    # A Constant may stand later; it depends on nothing.
    late = {id(node): node for node in read if node.op == "Constant" and position.get(id(node), 0) > place}
    dead = _dead(graph, makers)
    order = [
        *late.values(),
        *graph.nodes[:place],
        *nodes,
        *(node for node in graph.nodes[place:] if id(node) not in late),
    ]
    graph.nodes = [node for node in order if id(node) not in dead]
    return nodes


def _dead(graph: gs.Graph, makers: Iterable[gs.Node]) -> set[int]:
    """Those of ``makers``, and of what only they needed, that nothing reads any more; disconnected, by identity."""
    kept = {tensor.name for tensor in graph.outputs}
    dead: set[int] = set()
    pending = list(makers)
    while pending:
        node = pending.pop()
        if id(node) in dead or any(tensor.outputs or tensor.name in kept for tensor in node.outputs):
            continue
        dead.add(id(node))
        pending += [maker for tensor in node.inputs for maker in tensor.inputs]
        node.inputs.clear()
    return dead
