"""moetrt: Mixture-of-Experts models with their tails in one TensorRT plugin."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetrt.contract import MoEOutput, UnfinalizedMoEOutput, convert_flashinfer_moe_output
    from moetrt.errors import InputError, InputTypeError, MoetrtError
    from moetrt.functional import finalize_add, finalize_add_rms_norm

_HOME = {
    "InputError": "errors",
    "InputTypeError": "errors",
    "MoEOutput": "contract",
    "MoetrtError": "errors",
    "UnfinalizedMoEOutput": "contract",
    "convert_flashinfer_moe_output": "contract",
    "finalize_add": "functional",
    "finalize_add_rms_norm": "functional",
}

__all__ = [
    "InputError",
    "InputTypeError",
    "MoEOutput",
    "MoetrtError",
    "UnfinalizedMoEOutput",
    "convert_flashinfer_moe_output",
    "finalize_add",
    "finalize_add_rms_norm",
]


def __getattr__(name: str) -> object:
    # Importing torch takes over a second, which `moetrt --help` need not wait for.
    if name not in _HOME:
        raise AttributeError(f"module 'moetrt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moetrt.{_HOME[name]}"), name)
