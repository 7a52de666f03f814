"""Nodes that nobody reads any more go out of their graph."""

import onnx_ir as ir


def remove_dead(node: ir.Node) -> list[str]:
    """Removes ``node`` and what only it needed, as far as nothing else reads them; returns their names, last first."""
    removed: list[str] = []
    pending = [node]
    while pending:
        current = pending.pop()
        if current.graph is None or any(value.uses() or value.is_graph_output() for value in current.outputs):
            continue
        producers = [value.producer() for value in current.inputs if value is not None]
        removed.append(current.name or current.outputs[0].name or current.op_type)
        detach(current)
        pending.extend(producer for producer in producers if producer is not None)
    return removed


def detach(node: ir.Node) -> None:
    """Takes ``node`` out of its graph, and its readings with it."""
    if node.graph is not None:
        node.graph.remove(node)
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
