"""Transformers models as sources: a folder or a model in memory, token ids going in and logits coming out."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from moetrt.accounting import check_tensors
from moetrt.checkpoint import Stored, read_checkpoint
from moetrt.checkpoint_files import check_in_folder
from moetrt.errors import InputError, MoetrtError
from moetrt.experts import experts_modules
from moetrt.quantized import dequantize, read_declared
from moetrt.quiet import quiet
from moetrt.rewrites.known_forms import known_modules
from moetrt.source import DTYPES, Source, first_sentence


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

    Every tensor is accounted for by the files' headers, before one is read: the model takes it, as it is or with its
    scales, or is known to have no use for it. Weights of 8 bits and fewer become ``dtype`` by their scales.

    Raises:
        InputError: one line that says what is wrong with the folder.
    """
    import transformers  # noqa: F401 - first, for `quiet` silences what is loaded

    if not (folder / "config.json").is_file():
        raise InputError(f"source folder '{folder}' has no config.json; a Hugging Face model folder is taken")
    where = f"source folder '{folder}'"
    check_in_folder(folder)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{where} has an adapter of its weights, adapter_config.json; a model that it is merged into is taken"
        )
    try:
        with quiet():
            config = _config(folder, where)
            stated = _stated_dtype(config, where)
            declared = read_declared(folder, where)
            skeleton = _skeleton(config, where)
            _check_moe(skeleton, where)
            stored = read_checkpoint(folder, where)
            tensors = dequantize(stored, declared, where)
            check_tensors(skeleton, tensors, where, _composite(config, skeleton))
            model = type(skeleton).from_pretrained(
                None,
                config=skeleton.config,
                state_dict=tensors,
                dtype=dtype or stated or _usual_dtype(stored),
            )
    except MoetrtError:
        raise
    except Exception as error:  # what the parts of Transformers raise for a broken folder has no common type
        raise InputError(f"source folder '{folder}' was not loaded: {first_sentence(error)}") from error
    return causal_lm(model.eval(), where)


def _config(folder: Path, where: str) -> Any:
    """The configuration without its quantisation: weights are dequantised before Transformers sees them."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        _refuse_type(folder, where)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        # Transformers would ask for leave to run it also where its own code is what is taken.
        if hasattr(part, "auto_map"):
            del part.auto_map
    return config


def _refuse_type(folder: Path, where: str) -> NoReturn:
    """Refuses a model type that only the folder's own code has."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = next(iter(config.get("architectures") or ()), None)
    known = next((kind for kind, name in NAMES.items() if name == architecture), None)
    same = f"; its architecture {architecture} is that of Transformers' model_type '{known}'" if known else ""
    raise InputError(
        f"{where}: Transformers {transformers.__version__} has no model of type '{config.get('model_type')}', and the "
        "folder brings model code of its own, which is not run; load the model in a factory and name that: "
        f"'package.module:factory'{same}"
    )


def _skeleton(config: Any, where: str) -> Any:
    """The model without memory for its weights: its text model where it has one of its own, else the whole."""
    import transformers

    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    for kind in kinds:
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config)
    raise InputError(
        f"{where}: Transformers {transformers.__version__} has no causal language model of type '{config.model_type}'"
    )


def _composite(config: Any, skeleton: Any) -> Any:
    """The whole model without memory for its weights where ``skeleton`` is its text model alone, else None."""
    from transformers import AutoModelForImageTextToText as Whole

    if type(skeleton.config) is type(config) or type(config) not in Whole._model_mapping:
        return None
    with torch.device("meta"):
        return Whole.from_config(config)


def _stated_dtype(config: Any, where: str) -> torch.dtype | None:
    """The data type that the configuration states."""
    dtype = config.dtype or config.get_text_config().dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise InputError(f"{where}: the dtype of its config.json was {dtype}; one of {', '.join(DTYPES)} is taken")
    return dtype


def _usual_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """The data type of most numbers of 16 bits or more."""
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    counts: Counter[str] = Counter()
    for tensor in stored.values():
        if tensor.is_wide:
            counts[tensor.dtype] += math.prod(tensor.shape)
    return dtypes[counts.most_common(1)[0][0]] if counts else torch.bfloat16
