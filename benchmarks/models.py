"""The five model sizes that every table here is made for: how wide their tails are and which operands they have."""

from dataclasses import dataclass

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


def model_named(name: str) -> ModelSize:
    """The model of that name.

    Raises:
        InputError: there is none.
    """
    if name not in MODELS:
        raise InputError(f"model was {name!r}; {', '.join(MODELS)} is taken")
    return MODELS[name]
