"""What a report needs of the ONNX files: the model's facts, its layers, and the nodes that a tail was."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.numpy_helper

_LAYER = re.compile(r"(?:^|(?<=[./_]))(layers?|blocks?|h)[./_](\d+)(?=[./_]|$)")

LayerKey = tuple[str, int]
"""The module list that a layer is in, such as "model.layers", and its index there."""


def layer_of(name: str) -> LayerKey | None:
    """The layer that a module's or node's name lies in; None where the name does not say.

    >>> layer_of("/model/layers.3/mlp/experts.7/MatMul")
    ('model.layers', 3)
    """
    found = _LAYER.search(name)
    if found is None:
        return None
    prefix = f"{name[: found.start()]}{found[1]}".replace("/", ".").strip(".")
    return prefix, int(found[2])


def layers_of(model: onnx.ModelProto) -> list[LayerKey]:
    """The layers of a model, in order: from its nodes' module metadata, else their names, else its weights' names."""
    graph = model.graph
    sources: tuple[Iterable[str], ...] = (
        (entry.value for node in graph.node for entry in node.metadata_props if entry.key == "module"),
        (node.name for node in graph.node),
        (tensor.name for tensor in graph.initializer),
    )
    for names in sources:
        found = dict.fromkeys(key for name in names if (key := layer_of(name)) is not None)
        if found:
            stacks = list(dict.fromkeys(stack for stack, _ in found))
            return sorted(found, key=lambda key: (stacks.index(key[0]), key[1]))
    return []


@dataclass(frozen=True)
class Operand:
    """An input or output.

    Attributes:
        name: the model's or the operator's name for it.
        value: the graph's name for it.
        dtype: in ONNX's spelling; "?" where the file does not say.
        shape: numbers and symbols, as text, such as "[batch, seq, 256]".
    """

    name: str
    value: str
    dtype: str
    shape: str

    @property
    def described(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph: its name, op_type, and the names of the values that it reads and writes."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class GraphFacts:
    """What the page says of an ONNX file."""

    size: int
    opset: int
    ir_version: int
    producer: str
    nodes: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    external_data: tuple[str, ...]


def graph_facts(model: onnx.ModelProto, path: Path) -> GraphFacts:
    """The facts of ``model``, read from ``path``."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    data = dict.fromkeys(
        entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"
    )
    return GraphFacts(
        size=path.stat().st_size,
        opset=next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        nodes=len(graph.node),
        inputs=tuple(_operand(info) for info in graph.input if info.name not in weights),
        outputs=tuple(_operand(info) for info in graph.output),
        external_data=tuple(data),
    )


def layer_label(name: str) -> str:
    """A tail's name in a few words: "layer 3", where its name says so."""
    key = layer_of(name)
    return name if key is None else f"layer {key[1]}"


def shape_text(dims: Iterable[int | str | None] | None) -> str:
    """A shape for people; "?" is what is not known."""
    return "[?]" if dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _operand(info: onnx.ValueInfoProto) -> Operand:
    kind = info.type.tensor_type
    dims = (
        [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim]
        if kind.HasField("shape")
        else None
    )
    return Operand(info.name, info.name, onnx.TensorProto.DataType.Name(kind.elem_type), shape_text(dims))


def replaced_nodes(source: onnx.ModelProto, mapped: onnx.ModelProto, outputs: Iterable[str]) -> tuple[GraphNode, ...]:
    """The nodes that one tail was before mapping, in the order of the graph.

    They are those that ``outputs``, values that a plugin node writes now, were computed with and that the mapped file
    no longer has; what it still has, such as the residual of the tail before, is not looked behind. Empty where the
    source spells the tail within a function of its own.
    """
    producers = {value: node for node in source.graph.node for value in node.output if value}
    before = {_key(node) for node in source.graph.node}
    kept = before & {_key(node) for node in mapped.graph.node}
    added: dict[str, list[str]] = {}
    for node in mapped.graph.node:
        if _key(node) not in before:
            for value in node.input:
                added.setdefault(value, []).extend(node.output)
    still_there = {value for node in mapped.graph.node for value in node.output}
    own, pending = set(outputs), list(outputs)
    found: set[_Key] = set()
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = producers.get(value)
        if producer is None:
            # The plugin node's output may be reshaped or cast before it is the value that was there.
            own.update(added.get(value, []))
            pending += added.get(value, [])
        elif value in still_there and value not in own:
            continue
        elif _key(producer) not in kept:
            found.add(_key(producer))
            pending += producer.input
    return tuple(_node(node) for node in source.graph.node if _key(node) in found)


_Key = tuple[str, tuple[str, ...], tuple[str, ...]]


def _key(node: onnx.NodeProto) -> _Key:
    """Names need not be there, nor be unique; what a node does, reads and writes is."""
    return node.op_type, tuple(node.input), tuple(node.output)


def _node(node: onnx.NodeProto) -> GraphNode:
    return GraphNode(node.name or node.output[0], node.op_type, tuple(filter(None, node.input)), tuple(node.output))


def externals(nodes: Iterable[GraphNode]) -> Iterator[str]:
    """The values that ``nodes`` read and none of them writes, each once, in order."""
    nodes = tuple(nodes)
    made = {value for node in nodes for value in node.outputs}
    yield from dict.fromkeys(value for node in nodes for value in node.inputs if value not in made)


_WRITTEN_OUT = 4


def constants(model: onnx.ModelProto, names: Iterable[str]) -> dict[str, str]:
    """By name, those of ``names`` that are the graph's weights: the value where it is short, else the shape."""
    wanted = set(names)
    found = {}
    for tensor in model.graph.initializer:
        if tensor.name not in wanted:
            continue
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external or math.prod(tensor.dims) > _WRITTEN_OUT:
            found[tensor.name] = shape_text(tensor.dims)
        else:
            numbers = onnx.numpy_helper.to_array(tensor).ravel().tolist()
            text = ", ".join(f"{number:g}" for number in numbers)
            found[tensor.name] = text if not tensor.dims else f"[{text}]"
    return found
