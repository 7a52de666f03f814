"""Every tensor of a checkpoint held against what its model takes, by names, dtypes and shapes, before one is read."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from moetrt.checkpoint import Stored
from moetrt.errors import InputError
from moetrt.quantized import TAKEN, UNUSED, Dequantized

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class _Use:
    """Where a tensor goes.

    Attributes:
        target: the model's name for it, or for what it becomes a part of.
        pattern: of the conversion that joins it with others, None where it is taken as it is.
        stacked: whether that puts tensors beside each other along the target's first dimension.
    """

    target: str
    pattern: str | None
    stacked: bool


def check_tensors(
    skeleton: Any, tensors: Mapping[str, Stored | Dequantized], where: str, composite: Any = None
) -> None:
    """Checks that the model takes every tensor, or has no use for it that is known, and lacks none.

    Args:
        skeleton: the model on the meta device; its parameters are others afterwards.
        tensors: of the checkpoint, by its own names.
        where: what to call it in messages.
        composite: the whole model on the meta device where ``skeleton`` is its text model alone.

    Raises:
        InputError: a tensor that is missing or too many, one expert too few, a wrong size, or numbers of 8 bits or
            fewer, or whole numbers, that would become weights without a scale.
    """
    name = type(skeleton).__name__
    own = skeleton.state_dict()
    uses = _uses(skeleton, tensors)
    for key, tensor in tensors.items():
        wanted = own.get(uses[key].target)
        if isinstance(tensor, Stored) and not tensor.is_wide and wanted is not None and wanted.is_floating_point():
            raise InputError(
                f"{where}: its weights have {key} as {tensor.dtype} without a scale that is known, such as "
                f"{key}_scale; {TAKEN}"
            )
    _check_doubled(uses, own, where)
    groups = _groups(uses, own)
    for keys in groups.values():
        _check_sizes(keys, tensors, name, where)
    lost, extra = _misnumbered(groups, own, where)
    info = _rehearse(skeleton, tensors)
    unexpected = [key for key in tensors if uses[key].target in info.unexpected_keys]
    extra += _without_use(unexpected, skeleton, composite)
    if extra:
        raise InputError(
            f"{where}: its weights have {len(extra)} tensors that {name} by its config.json does not take, such as "
            f"{min(extra)}"
        )
    missing = sorted([*lost, *(info.missing_keys - info.conversion_errors.keys())])
    if missing:
        raise InputError(f"{where}: its weights lack {len(missing)} tensors of {name}, such as {missing[0]}")
    for key, text in sorted(info.conversion_errors.items()):
        said = text.rpartition("\nError")[0].rpartition("\n")[2]
        raise InputError(f"{where}: its weights that become {key} do not fit together: {said}")
    for key, stored, wanted in sorted(info.mismatched_keys):
        raise InputError(
            f"{where}: its weights have {key} as {list(stored)}, {name} by its config.json takes {list(wanted)}"
        )


def _uses(model: Any, tensors: Mapping[str, Any]) -> dict[str, _Use]:
    """By Transformers' own rules, as `convert_and_load_state_dict_in_model` follows them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    stacked = {
        pattern
        for entry in converters
        for pattern in entry.source_patterns
        if isinstance(entry.operations[0], MergeModulelist) and len(entry.target_patterns) == 1
    }
    own, prefix = model.state_dict(), model.base_model_prefix
    uses = {}
    for key in tensors:
        target, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if target not in own and key in own:
            target, pattern = rename_source_key(key, [], [], prefix, own)
        uses[key] = _Use(target, pattern, pattern in stacked)
    return uses


def _rehearse(skeleton: Any, tensors: Mapping[str, Stored | Dequantized]) -> Any:
    """What Transformers says of the names and shapes: the load itself, of tensors without memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    meta = torch.device("meta")
    info, _ = convert_and_load_state_dict_in_model(
        skeleton,
        {key: torch.empty(tensor.shape, device=meta) for key, tensor in tensors.items()},
        LoadStateDictConfig(device_map={"": meta}, weight_mapping=get_model_conversion_mapping(skeleton)),
    )
    skeleton.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    skeleton._adjust_missing_and_unexpected_keys(info)
    return info


def _check_doubled(uses: Mapping[str, _Use], own: Mapping[str, torch.Tensor], where: str) -> None:
    """Of two names for one tensor Transformers takes the first in the alphabet."""
    found: dict[str, tuple[str, _Use]] = {}
    for key, use in uses.items():
        other, before = found.setdefault(use.target, (key, use))
        if other != key and use.target in own and None in (use.pattern, before.pattern):
            _refuse_doubled(other, key, use.target, where)


def _refuse_doubled(one: str, other: str, target: str, where: str) -> NoReturn:
    raise InputError(f"{where}: its weights have both {one} and {other} for {target}; one spelling is taken")


def _groups(uses: Mapping[str, _Use], own: Mapping[str, torch.Tensor]) -> dict[_Use, list[str]]:
    """The tensors that are stacked into one, such as an expert's each."""
    groups = defaultdict(list)
    for key, use in uses.items():
        if use.pattern is not None and "*" in use.pattern and use.target in own:
            groups[use].append(key)
    return groups


def _check_sizes(keys: list[str], tensors: Mapping[str, Stored | Dequantized], name: str, where: str) -> None:
    """Names the one that is not as the others are."""
    most, _ = Counter(tensors[key].shape for key in keys).most_common(1)[0]
    for key in keys:
        if tensors[key].shape != most:
            raise InputError(
                f"{where}: its weights have {key} as {list(tensors[key].shape)}, {name} by its config.json takes "
                f"{list(most)}"
            )


def _misnumbered(
    groups: Mapping[_Use, list[str]], own: Mapping[str, torch.Tensor], where: str
) -> tuple[list[str], list[str]]:
    """The names that a stack lacks, and those that it has no place for: Transformers looks at their count alone."""
    lost, extra = [], []
    for use, keys in groups.items():
        if not use.stacked or len(keys) < 2:
            continue
        parts = [key.split(".") for key in keys]
        differing = [place for place, words in enumerate(zip(*parts, strict=False)) if len(set(words)) > 1]
        at = differing[0]
        if len(differing) > 1 or len({len(words) for words in parts}) > 1 or not all(w[at].isdecimal() for w in parts):
            # In which order they would be stacked, their spelling would decide.
            _refuse_doubled(keys[0], next(key for key in keys if key != keys[0]), use.target, where)
        numbers = {int(words[at]) for words in parts}
        wanted = set(range(own[use.target].shape[0]))
        before, after = parts[0][:at], parts[0][at + 1 :]
        lost += [".".join([*before, str(number), *after]) for number in wanted - numbers]
        extra += [".".join([*before, str(number), *after]) for number in numbers - wanted]
    return lost, extra


def _without_use(unexpected: Sequence[str], skeleton: Any, composite: Any) -> list[str]:
    """Of the tensors that the model does not take, those of which it is not known why."""
    text = skeleton.config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    predicted = range(layers, layers + (getattr(text, "num_nextn_predict_layers", 0) or 0))
    left = []
    towers = _towers(composite, unexpected) if composite is not None and unexpected else set()
    for key in unexpected:
        layer = _LAYER.search(key)
        of_prediction = layer is not None and int(layer[1]) in predicted
        if not (UNUSED.search(key) or of_prediction or key in towers):
            left.append(key)
    return left


def _towers(composite: Any, keys: Sequence[str]) -> set[str]:
    """Those of ``keys`` that the whole model takes outside its text model, such as an image encoder's."""
    from transformers import PreTrainedModel

    text = composite.config.get_text_config()
    inside = [
        f"{name}."
        for name, module in composite.named_modules()
        if name and isinstance(module, PreTrainedModel) and type(module.config) is type(text)
    ]
    own = composite.state_dict()
    return {
        key
        for key, use in _uses(composite, dict.fromkeys(keys)).items()
        if use.target in own and not use.target.startswith(tuple(inside))
    }
