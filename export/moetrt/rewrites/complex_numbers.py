"""Complex numbers as pairs of real tensors: ONNX has none, and rotary embeddings are written with them.

The operations that make complex tensors (``torch.polar``, ``torch.view_as_complex``, ``torch.complex``) give a `Pair`
while the block runs, whatever model calls them, and ``torch.view_as_real`` takes it back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moetrt.errors import InputError


class Pair:
    """A complex tensor as its real and imaginary part, of the same shape and dtype.

    What treats every element alike by its place (``unsqueeze``, ``__getitem__``, ``to(device)`` ...) is done to both
    parts; there is multiplication and addition beside. Any other use raises an error with its name.
    """

    _BY_PLACE = ("unsqueeze", "squeeze", "transpose", "permute", "expand", "repeat", "reshape", "view", "flatten")

    def __init__(self, real: torch.Tensor, imag: torch.Tensor) -> None:
        self.real, self.imag = real, imag

    @property
    def shape(self) -> torch.Size:
        return self.real.shape

    @property
    def device(self) -> torch.device:
        return self.real.device

    @property
    def ndim(self) -> int:
        return self.real.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.real.size() if dim is None else self.real.size(dim)

    def dim(self) -> int:
        return self.real.dim()

    def __getitem__(self, place: Any) -> "Pair":
        return Pair(self.real[place], self.imag[place])

    def to(self, device: torch.device | str) -> "Pair":
        """To another device; another dtype is refused, for it would be a complex one."""
        if isinstance(device, torch.dtype):
            raise InputError(_refusal(f"to({device})"))
        return Pair(self.real.to(device), self.imag.to(device))

    def conj(self) -> "Pair":
        return Pair(self.real, -self.imag)

    def __mul__(self, other: Any) -> "Pair":
        if isinstance(other, complex):
            other = Pair(other.real, other.imag)  # type: ignore[arg-type]
        if isinstance(other, Pair):
            # As PyTorch rounds a complex product: each part two products and one addition.
            return Pair(
                self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real
            )
        return Pair(self.real * other, self.imag * other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "Pair":
        if isinstance(other, Pair):
            return Pair(self.real + other.real, self.imag + other.imag)
        return Pair(self.real + other, self.imag)

    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        if name not in self._BY_PLACE:
            raise AttributeError(_refusal(name))

        def call(*args: Any, **kwargs: Any) -> "Pair":
            return Pair(*(getattr(part, name)(*args, **kwargs) for part in (self.real, self.imag)))

        return call

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``torch.view_as_real(pair)``, ``torch.mul(pair, ...)`` and their like, also ``tensor * pair``."""
        name = getattr(function, "__name__", str(function))
        first, *rest = args
        if function is torch.view_as_real:
            return torch.stack((first.real, first.imag), dim=-1)
        if function in (torch.real, torch.imag):
            return getattr(first, name)
        if name in ("mul", "__mul__", "__rmul__", "add", "__add__", "__radd__") and not kwargs:
            pair, other = (first, rest[0]) if isinstance(first, Pair) else (rest[0], first)
            return pair * other if "mul" in name else pair + other
        if isinstance(first, Pair):
            return getattr(first, name)(*rest, **kwargs or {})
        raise InputError(_refusal(name))


def _refusal(name: str) -> str:
    return f"complex numbers were used in '{name}'; ONNX has none, and moetrt does not write that with real ones"


class _PairMode(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.polar:
            return _polar(*args, **kwargs)
        if function is torch.complex:
            return Pair(*args, **kwargs)
        if function is torch.view_as_complex:
            return _pair_of(*args, **kwargs)
        return function(*args, **kwargs)


def _polar(abs: torch.Tensor, angle: torch.Tensor) -> Pair:
    return Pair(abs * angle.cos(), abs * angle.sin())


def _pair_of(input: torch.Tensor) -> Pair:
    real, imag = input.unbind(-1)
    return Pair(real, imag)


@contextmanager
def real_pairs() -> Iterator[None]:
    """While the block runs, complex tensors that PyTorch code makes are `Pair` objects."""
    with _PairMode():
        yield
