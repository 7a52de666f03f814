"""The five model sizes that every table here is made for: how wide their tails are and which operands they have."""

from dataclasses import dataclass

import torch

from moetrt.errors import InputError


@dataclass(frozen=True)
class ModelSize:
    """One model's MoE tail in bf16.

    Attributes:
        name: as it is given on a command line.
        hidden: H.
        top_k: K.
        shared: whether a shared expert is added.
        gate: whether the shared expert has a sigmoid gate.
        float32_weights: whether the router's weights are float32; they are bf16 elsewhere.
        routed_scaling_factor: what the routed part is multiplied by.
    """

    name: str
    hidden: int
    top_k: int
    shared: bool = False
    gate: bool = False
    float32_weights: bool = False
    routed_scaling_factor: float = 1.0


MODELS = {
    model.name: model
    for model in (
        ModelSize("deepseek-v3", 7168, 8, shared=True, float32_weights=True, routed_scaling_factor=2.5),
        ModelSize("qwen3-235b", 4096, 8),
        ModelSize("gpt-oss", 2880, 4),
        ModelSize("mixtral", 4096, 2),
        ModelSize("qwen3-next", 2048, 10, shared=True, gate=True),
    )
}


def random_inputs(model: ModelSize, tokens: int, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The operator's inputs for one model size in bf16: normal numbers, weights that sum to 1, all routes on this rank.

    They come from the generator of ``device``: the same seed gives other numbers on another device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    routes = tokens * model.top_k
    weights = torch.softmax(normal(tokens, model.top_k).float(), -1)
    tensors = {
        "gemm2_permuted": normal(routes, model.hidden),
        "expert_weights": weights if model.float32_weights else weights.bfloat16(),
        "expanded_idx_to_permuted_idx": torch.randperm(routes, generator=generator, device=device)
        .view(tokens, model.top_k)
        .int(),
        "residual": normal(tokens, model.hidden),
        "gamma": 1 + 0.1 * normal(model.hidden),
    }
    if model.shared:
        tensors["shared_output"] = normal(tokens, model.hidden)
    if model.gate:
        tensors["shared_gate"] = normal(tokens, 1)
    return tensors


def attributes_of(model: ModelSize) -> dict[str, float | int]:
    """The operator's attributes; these models round the normalised value before gamma."""
    return {"routed_scaling_factor": model.routed_scaling_factor, "weight_before_cast": 0}


def check_number(name: str, value: float, least: float, most: float) -> None:
    """Checks an option of a command.

    Raises:
        InputError: it is below ``least``, above ``most`` or not a number.
    """
    if not least <= value <= most:
        raise InputError(f"{name} was {value:g}; {least:g} to {most:g} is taken")


def model_named(name: str) -> ModelSize:
    """The model of that name.

    Raises:
        InputError: there is none.
    """
    if name not in MODELS:
        raise InputError(f"model was {name!r}; one of {', '.join(MODELS)} is taken")
    return MODELS[name]
