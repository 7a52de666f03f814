"""Weights of 8 bits and fewer, each with its scales: the numbers that they stand for, computed when they are read."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetrt.checkpoint import Stored
from moetrt.errors import InputError

TAKEN = "FP8, MXFP4 and int8 with their scales, and weights of 16 or 32 bits, are taken"

_METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "compressed-tensors", "modelopt")
_COMPRESSED_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized")
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_FLOATS_OF_8_BITS = ("F8_E4M3", "F8_E5M2")

UNUSED = re.compile(r"\.(input|activation|output|q|k|v)_scale$")
"""Scales of activations and caches: the weights' own numbers do not depend on them."""


@dataclass(frozen=True)
class Dequantized:
    """A weight that is stored with scales.

    Attributes:
        shape: of what it stands for.
        read: gives its numbers, in float32 or, where that is exact, bfloat16.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers, a tensor of ``shape`` for ``[...]``."""
        return self.read()[index]


@dataclass(frozen=True)
class Declared:
    """What a folder says of its quantisation.

    Attributes:
        block: rows and columns that share a scale; None where it says none.
        fp4: whether int8 tensors hold two numbers of 4 bits a byte.
    """

    block: tuple[int, int] | None
    fp4: bool


def read_declared(folder: Path, where: str) -> Declared:
    """Reads what ``config.json`` and ModelOpt's ``hf_quant_config.json`` say of the quantisation.

    Raises:
        InputError: a way to quantise that is not taken, by its name.
    """
    config = _read_json(folder / "config.json", where)
    parts = [*_find(config, "quantization_config"), *_find(config, "compression_config")]
    of_modelopt = _read_json(folder / "hf_quant_config.json", where).get("quantization")
    if isinstance(of_modelopt, dict):
        parts.append({"quant_method": "modelopt", **of_modelopt})
    block = None
    for part in parts:
        name = _not_taken(part)
        if name:
            raise InputError(f"{where}: its weights are quantised as {name}; {TAKEN}")
        stated = part.get("weight_block_size")
        sizes = stated or next(_find(part, "block_structure"), None)
        if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
            block = (sizes[0], sizes[1])
        elif stated is not None:
            raise InputError(f"{where}: its weight_block_size was {stated!r}; two numbers of 1 or more are taken")
    return Declared(block, fp4="fp4" in _find(config, "expert_dtype"))


def _read_json(path: Path, where: str) -> dict[str, Any]:
    """An object of JSON; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: {path.name} cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _find(value: Any, key: str) -> Iterator[Any]:
    """What has ``key`` in a JSON value, at any depth, but for null and empty objects."""
    if isinstance(value, dict):
        if value.get(key):
            yield value[key]
        for name, part in value.items():
            if name != key:
                yield from _find(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _find(part, key)


def _not_taken(part: Any) -> str | None:
    """The name of a way to quantise, if it is none that is taken."""
    if not isinstance(part, dict):
        return repr(part)
    method = str(part.get("quant_method", "a method without a name"))
    if method not in _METHODS:
        return method
    if method == "compressed-tensors":
        return next((name for name in _find(part, "format") if name not in _COMPRESSED_FORMATS), None)
    if method == "modelopt":
        algorithm = part.get("quant_algo")
        return None if algorithm is None or algorithm in _MODELOPT_ALGORITHMS else f"ModelOpt's {algorithm}"
    return None


def dequantize(stored: Mapping[str, Stored], declared: Declared, where: str) -> dict[str, Stored | Dequantized]:
    """Joins weights with their scales.

    Args:
        stored: every tensor of a checkpoint by its name.
        declared: what the folder says of its quantisation.
        where: what to call it in messages.

    Returns:
        The tensors by the names that the model knows: a weight with scales is one `Dequantized`, without its scales.
        What is neither stays as it is.

    Raises:
        InputError: scales do not fit their weight, or would be of a format that is not taken.
    """
    joined: dict[str, Stored | Dequantized] = dict(stored)
    for name, blocks in stored.items():
        base = name.removesuffix("_blocks")
        scales = stored.get(f"{base}_scales")
        if base != name and scales is not None and blocks.dtype == scales.dtype == "U8":
            if base in stored:
                raise InputError(f"{where}: its weights have both {base} and {name} for {base}; one spelling is taken")
            del joined[name], joined[f"{base}_scales"]
            joined[base] = _mxfp4(base, blocks, scales, where)
    for name, weight in stored.items():
        scale_name = _scale_of(name, stored)
        if weight.is_wide or scale_name is None:
            continue
        del joined[scale_name]
        joined[name] = _scaled(name, weight, scale_name, stored[scale_name], declared, where)
    return joined


def _scale_of(name: str, stored: Mapping[str, Stored]) -> str | None:
    """DeepSeek's ``weight_scale_inv``, DeepSeek-V4's ``scale``, everyone else's ``weight_scale``: all are factors."""
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if name.endswith(".weight"):
        names.append(f"{name.removesuffix('weight')}scale")
    return next((other for other in names if other in stored), None)


def _mxfp4(name: str, blocks: Stored, scales: Stored, where: str) -> Dequantized:
    """gpt-oss: [experts, rows, groups, 16] bytes of two numbers and [experts, rows, groups] exponents."""
    if blocks.shape[:-1] != scales.shape or len(blocks.shape) != 4:
        raise InputError(
            f"{where}: its weights have {name}_scales as {list(scales.shape)} and {name}_blocks as "
            f"{list(blocks.shape)}; an exponent for each block is taken"
        )

    def read() -> torch.Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        # Two significant bits times a power of two: bfloat16 holds it exactly, at half the memory.
        exponents = scales[...]
        if (exponents == _NAN_EXPONENT).any():
            raise _not_finite(f"{name}_scales", where)
        numbers: torch.Tensor = convert_moe_packed_tensors(blocks[...], exponents, dtype=torch.bfloat16)
        return numbers

    experts, rows, groups, size = blocks.shape
    return Dequantized((experts, groups * size * 2, rows), read)


def _scaled(name: str, weight: Stored, scale_name: str, scale: Stored, declared: Declared, where: str) -> Dequantized:
    fp4 = weight.dtype == "I8" and scale.dtype == "F8_E8M0" and declared.fp4
    exponents = scale.dtype == "U8"
    if weight.dtype in _FLOATS_OF_8_BITS:
        plain = scale.is_wide or scale.dtype in ("F8_E8M0", "U8")
    else:
        plain = weight.dtype == "I8" and (scale.is_wide or fp4)
    if not plain:
        raise InputError(
            f"{where}: its weights have {name} as {weight.dtype} with {scale_name} as {scale.dtype}, a format that is "
            f"not known; {TAKEN}"
        )
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if fp4 else weight.shape
    block = (1, 32) if fp4 else declared.block
    spread = _spread(shape, scale.shape, block)
    if spread is None:
        blocks = f"block of {block[0]}x{block[1]}" if block else "block (of which the config gives no size)"
        raise InputError(
            f"{where}: its weights have {name} as {list(shape)} with {scale_name} as {list(scale.shape)}; one scale, "
            f"one for each row, or one for each {blocks} is taken"
        )

    def read() -> torch.Tensor:
        factor = scale[...].float()
        if exponents:
            factor = torch.where(factor == _NAN_EXPONENT, torch.nan, torch.exp2(factor - 127))
        if not factor.isfinite().all():
            raise _not_finite(scale_name, where)
        return (_unpacked(weight[...]) if fp4 else weight[...].float()) * spread(factor)

    return Dequantized(shape, read)


_NAN_EXPONENT = 255
"""Of E8M0, the format of exponents in the OCP Microscaling specification."""


def _not_finite(scale_name: str, where: str) -> InputError:
    return InputError(f"{where}: its weights have NaN or Inf in {scale_name}; finite scales are taken")


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Two numbers of 4 bits (e2m1) a byte, the low one first."""
    from transformers.integrations.mxfp4 import FP4_VALUES

    codes = packed.view(torch.uint8)
    pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    return torch.tensor(FP4_VALUES)[pairs.long()]


def _spread(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes scales broadcast over a weight of ``shape``; None where they do not fit."""
    if scales in ((), (1,)):
        return lambda factor: factor.reshape(())
    if scales == shape[:-1]:
        return lambda factor: factor[..., None]
    if len(scales) != len(shape):
        return None
    if scales[-1] == 1 and all(ours in (1, theirs) for ours, theirs in zip(scales, shape, strict=True)):
        return lambda factor: factor
    if block is None or len(shape) < 2:
        return None
    (rows, columns), (high, wide) = shape[-2:], block
    if scales != (*shape[:-2], -(-rows // high), -(-columns // wide)):
        return None

    def repeat(factor: torch.Tensor) -> torch.Tensor:
        return factor.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :columns]

    return repeat
