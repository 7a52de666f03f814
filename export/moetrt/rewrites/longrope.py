"""Phi-3.5-MoE's rotary embedding, whose scale is chosen by a Python ``if`` over the largest position."""

from typing import Any

import torch

SOURCES = {"": "b97390a5d477f6a1"}


def forward(rotary: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[..., S]`` go in; cosines and sines ``[..., S, D]`` of ``x``'s dtype come out."""
    frequencies, scale = rotary.rope_init_fn(rotary.config)
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "default":
        is_long = position_ids.max() + 1 > parameters["original_max_position_embeddings"]
        scale = torch.where(is_long, parameters["long_mscale"], parameters["short_mscale"])
    angles = position_ids[..., None].float() * frequencies.to(device=x.device, dtype=torch.float)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
