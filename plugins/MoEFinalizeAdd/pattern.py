"""Tails that become MoEFinalizeAdd, for `polygraphy plugin match|list|replace --plugin-dir plugins/`."""

from typing import Any

import onnx_graphsurgeon as gs

from moetrt.graphsurgeon import matching_subgraphs
from moetrt.graphsurgeon import replace_tail as replace_with_plugin  # noqa: F401  (the tool looks for this name)


def get_plugin_metadata() -> dict[str, str]:
    """The plugin's name, which is this folder's, and the node's op_type."""
    return {"name": "MoEFinalizeAdd", "op": "MoEFinalizeAdd"}


def get_matching_subgraphs(graph: gs.Graph) -> list[dict[str, Any]]:
    """Inputs, outputs and attributes of each tail in ``graph``."""
    return matching_subgraphs(graph, "MoEFinalizeAdd")
