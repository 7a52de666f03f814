"""Transformers models as sources: a folder or a model in memory, token ids going in and logits coming out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moetrt.checkpoint_files import check_in_folder
from moetrt.errors import InputError, MoetrtError
from moetrt.experts import experts_modules
from moetrt.quiet import quiet
from moetrt.rewrites.known_forms import known_modules
from moetrt.source import Source, first_sentence


class CausalLM(torch.nn.Module):
    """A Transformers model from token ids ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``, without a cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model
        self.training = model.training

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(input_ids=input_ids, use_cache=False, return_dict=True).logits
        return logits


def causal_lm(model: Any, where: str) -> Source:
    """The source that a Transformers causal language model is; batch and sequence are dynamic.

    Args:
        model: the model.
        where: what to call it in messages.

    Raises:
        InputError: it gives no logits, has no MoE, or its experts take no implementation from outside.
    """
    tails = _check_moe(model, where)
    if not model.can_generate():
        raise InputError(
            f"{where}: {type(model).__name__} gives no logits; a causal language model or (module, example_inputs) is "
            "taken"
        )
    vocabulary = model.config.get_text_config().vocab_size

    def draw(seed: int, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (sizes["batch"], sizes["seq"])
        return {"input_ids": torch.randint(0, vocabulary, shape, generator=generator)}

    return Source(
        module=CausalLM(model),
        example_inputs=draw(0, {"batch": 2, "seq": 8}),
        dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}},
        output_names=("logits",),
        tails_expected=tails,
        description=type(model).__name__,
        random_inputs=draw,
    )


def _check_moe(model: Any, where: str) -> int:
    """How many MoE layers the model has."""
    found = len(experts_modules(model)) + sum(form.moe for form in known_modules(model).values())
    if not found:
        name = type(model).__name__
        config = model.config.get_text_config()
        counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        if any(getattr(config, count, None) for count in counts):
            raise InputError(
                f"{where}: the experts of {name} take no experts implementation and their code is none that moetrt "
                "knows, so its tails cannot be captured"
            )
        raise InputError(f"{where}: {name} is a model without MoE; a model with experts is taken")
    return found


def from_folder(folder: Path, dtype: torch.dtype | None) -> Source:
    """Loads ``config.json`` and ``*.safetensors``, and nothing else: no network, no code from the folder.

    Raises:
        InputError: one line that says what is wrong with the folder.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise InputError(f"source folder '{folder}' has no config.json; a Hugging Face model folder is taken")
    where = f"source folder '{folder}'"
    check_in_folder(folder)
    try:
        with quiet():
            config = _config(folder)
            # Whether there is a MoE is known before gigabytes are read.
            _check_moe(_skeleton(folder, config), where)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                # Reported below: Transformers would print a table and raise a reference to it.
                ignore_mismatched_sizes=True,
            )
    except MoetrtError:
        raise
    except Exception as error:  # what the parts of Transformers raise for a broken folder has no common type
        raise InputError(f"source folder '{folder}' was not loaded: {first_sentence(error)}") from error
    name = type(model).__name__
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise InputError(
            f"source folder '{folder}': its weights have {key} as {list(stored)}, {name} by its config.json "
            f"takes {list(wanted)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"source folder '{folder}': its weights lack {len(missing)} tensors of {name}, such as {missing[0]}"
        )
    return causal_lm(model.eval(), where)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            f"source folder '{folder}' brings model code of its own, which is not run; load the model in a factory "
            "and name that: 'package.module:factory'"
        ) from error


def _skeleton(folder: Path, config: Any) -> Any:
    """The model without memory for its weights."""
    import transformers

    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise InputError(
            f"source folder '{folder}': Transformers {transformers.__version__} has no causal language model of type "
            f"'{config.model_type}'"
        ) from error
