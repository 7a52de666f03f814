"""Checkpoint folders written by hand: the hub's quantised layouts, each with the weights that it stands for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

WEIGHTS = "model.safetensors"
E4M3 = torch.float8_e4m3fn


def read(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)


def write(folder: Path, tensors: Tensors, name: str = WEIGHTS) -> None:
    save_file(
        {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()},
        folder / name,
        metadata={"format": "pt"},
    )


def change(folder: Path, function: Callable[[Tensors], object]) -> None:
    """Lets ``function`` change the tensors of a folder in place."""
    tensors = read(folder)
    function(tensors)
    write(folder, tensors)


def configure(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | changes))


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """What the hub's FP8 checkpoints quantise: projections, not routers, norms, embeddings or the head."""
    return name.endswith("_proj.weight") and tensor.dim() == 2


def to_fp8(
    tensors: Tensors, scale_name: str, scale_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Tensors, Tensors]:
    """Quantised tensors, and those that they stand for.

    Args:
        tensors: in bfloat16.
        scale_name: in place of ``weight``.
        scale_of: gives the scale of a float32 weight, which broadcasts over it or is [rows].
    """
    quantised, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if is_quantised(name, tensor):
            weight = tensor.float()
            scale = scale_of(weight)
            factor = scale[:, None] if scale.shape == weight.shape[:1] else scale
            quantised[name] = (weight / factor.float()).to(E4M3)
            quantised[name.removesuffix("weight") + scale_name] = scale
            meant[name] = (quantised[name].float() * factor.float()).to(torch.bfloat16)
    return quantised, meant


def to_blocks(weight: torch.Tensor, high: int, wide: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in e4m3, a scale for each block, and what they stand for, in float32: block by block."""
    rows, columns = weight.shape
    codes, meant = torch.empty_like(weight), torch.empty_like(weight)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = weight[part] / scales[i, j]
            meant[part] = codes[part].to(E4M3).float() * scales[i, j]
    return codes.to(E4M3), scales, meant
