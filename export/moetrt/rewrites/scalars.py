"""Python numbers beside 16-bit tensors keep their value: PyTorch computes with 0.22, torch.onnx writes 0.2197 in bf16.

PyTorch multiplies in float32 by the number as it is, and rounds once. The same is written out here, for the numbers
that the tensor's dtype does not have; one of them is the scale of attention, by whose square root torch.onnx multiplies
the queries and the keys, each rounded.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_HALVES: Mapping[torch.dtype, type] = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
_NAMES = frozenset(("mul", "__mul__", "__rmul__", "div", "__truediv__"))
"""Products, and quotients by a number. In a sum PyTorch itself rounds the number to the tensor's dtype first."""


class _ScalarMode(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__name__", "") in _NAMES and len(args) == 2 and not kwargs:
            tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
            number = next((arg for arg in args if type(arg) is float), None)
            if tensor is not None and number is not None and tensor.dtype in _HALVES and not _has(tensor.dtype, number):
                return function(*(arg.float() if arg is tensor else arg for arg in args)).to(tensor.dtype)
        if getattr(function, "__name__", "") == "scaled_dot_product_attention":
            return _attention(function, *args, **kwargs or {})
        return function(*args, **kwargs or {})


def _attention(
    function: Callable[..., Any], query: torch.Tensor, *others: Any, scale: float | None = None, **options: Any
) -> Any:
    """Attention with its scale in the queries, where torch.onnx would round the scale's square root."""
    value = query.shape[-1] ** -0.5 if scale is None else scale
    if query.dtype in _HALVES and (value < 0 or not _has(query.dtype, math.sqrt(value))):
        query, scale = (query.float() * value).to(query.dtype), 1.0
    return function(query, *others, scale=scale, **options)


def _has(dtype: torch.dtype, number: float) -> bool:
    with np.errstate(over="ignore"):
        return math.isnan(number) or float(_HALVES[dtype](number)) == number


@contextmanager
def scalars_keep_their_value() -> Iterator[None]:
    """While the block runs, products and quotients of a 16-bit tensor by a number are written in float32."""
    with _ScalarMode():
        yield
