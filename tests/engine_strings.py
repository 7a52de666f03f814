"""What an engine's own bytes say of its layers' ONNX nodes: read by the nodes that the model has, not by separators.

An engine is loaded on a GPU alone, so that its inspector cannot be asked here; the texts that it would give lie in the
file as they are: ``layers="..."`` for each of a program's kernels, and one after the other what all of them compute.
"""

import re
from pathlib import Path

import onnx_ir as ir

from moetrt.bench.result import TailOfModel, attribute
from moetrt.bench.trtexec_files import Layer, onnx_origins
from moetrt.onnx_op import operator_of


def engine_strings(engine: Path) -> list[str]:
    """The metadata of ``engine``'s layers, each text as often as it is there."""
    content = engine.read_bytes()
    inner = re.findall(rb'layers="([^"]*)"', content)
    whole = re.findall(rb"[\x1e\x1f\x20-\x7e]{12,}", re.sub(rb'layers="[^"]*"', b"", content))
    texts = [text.decode() for text in (*inner, *whole) if b"[ONNX Layer: " in text]
    return [text[text.index("[ONNX Layer: ") :] for text in texts]


def check_every_layer(texts: list[str], mapped: Path, *, plugin: bool) -> set[str]:
    """Holds what `onnx_origins` and `attribute` make of each text against the node names of ``mapped``.

    Args:
        texts: the strings of an engine that TensorRT-RTX built of ``mapped``.
        mapped: the mapped file.
        plugin: whether with the plugin: then a tail is a node, else those of its function.

    Returns:
        the separators between two nodes that were seen.
    """
    model = ir.load(mapped)
    tails = [node for node in model.graph if operator_of(node) is not None]
    # The text of every node, as TensorRT's parser writes it, and the tail that it is of.
    owner: dict[str, str | None] = {node.name or "": None for node in model.graph}
    for tail in tails:
        owner[tail.name or ""] = tail.name if plugin else "wrong engine"
        if not plugin:
            function = model.functions[tail.op_identifier()]
            owner |= {f"{node.name} | {tail.name} ({tail.op_type})": tail.name for node in function}
    whole = "|".join(re.escape(f"[ONNX Layer: {text}]") for text in sorted(owner, key=len, reverse=True))
    seen: set[str] = set()
    found: set[str] = set()
    known = [TailOfModel(tail.name or "", tail.op_type, (None,)) for tail in tails]
    for text in texts:
        nodes = [part[len("[ONNX Layer: ") : -1] for part in re.findall(whole, text)]
        seen |= set(re.sub(whole, "", text))
        origins = onnx_origins(text)
        assert origins == tuple(dict.fromkeys(nodes)), text
        owners = {owner[node] for node in nodes}
        part = attribute(Layer("", origins), known)
        assert part.tails == owners - {None}, text
        assert part.shared == (len(owners) > 1), text
        found |= part.tails
    assert found == {tail.name for tail in tails}
    return seen
