"""A checkpoint's files lie in its folder: what Transformers would read elsewhere, by a name or a link, is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from moetrt.errors import InputError
from moetrt.files import way_out

_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", "hf_quant_config.json")


def check_in_folder(folder: Path) -> None:
    """Checks that no file that is read of a checkpoint leads out of its folder; the weights are not read.

    Those are the config files, every ``*.safetensors`` and index of such, and what ``config.json`` and an index name.
    Tokenizers are not read. A link from a snapshot in a Hugging Face cache to that cache's blobs is taken, as of
    `moetrt.files.way_out`, and so is a ``folder`` that is a link.

    Raises:
        InputError: one does; the line names it.
    """
    for path in sorted(folder.iterdir()):
        if path.name in _CONFIGS or path.name.endswith((".safetensors", ".safetensors.index.json")):
            _check(folder, path.name)
    indexes = [path.name for path in sorted(folder.glob("*.safetensors.index.json"))]
    weights = _content(folder / "config.json").get("transformers_weights")
    if isinstance(weights, str):
        _check(folder, weights, "config.json")
        indexes.append(weights)
    for index in indexes:
        shards = _content(folder / index).get("weight_map") if index.endswith(".json") else None
        for shard in set(shards.values()) if isinstance(shards, dict) else ():
            if isinstance(shard, str):
                _check(folder, shard, index)


def _check(folder: Path, name: str, by: str | None = None) -> None:
    out = way_out(folder, name)
    if out is not None:
        named = f", which '{by}' names," if by else ""
        raise InputError(f"source folder '{folder}': '{name}'{named} is {out}; expected a file inside the folder")


def _content(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is none, which Transformers says better."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
