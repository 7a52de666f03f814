"""How many bytes a MoE tail must move, and how many its unfused forms move.

Device memory is counted, no cache: every operand of every kernel is read once and every result written once. The time
at a given bandwidth is thus a floor for each way; a chain whose intermediates stay in L2 can be faster than its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moetrt.errors import InputError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT32 = 4
INT32 = 4


@dataclass(frozen=True)
class Tail:
    """One call of the operator, as far as its bytes go.

    Attributes:
        tokens, top_k, hidden: T, K, H.
        dtype: of rows, shared_output, residual and outputs: "bf16", "fp16" or "fp32".
        weights_dtype, gate_dtype, gamma_dtype: of these operands; the rows' dtype or "fp32".
        mapped, shared, gate, residual, norm: which operands there are; without norm it is MoEFinalizeAdd.
        scaled: whether routed_scaling_factor is a step of its own in eager PyTorch.
        routes: how many of the T*K map entries are not -1; None is all.
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: str = "bf16"
    weights_dtype: str = "bf16"
    gate_dtype: str = "bf16"
    gamma_dtype: str = "bf16"
    mapped: bool = True
    shared: bool = False
    gate: bool = False
    residual: bool = True
    norm: bool = True
    scaled: bool = False
    routes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "hidden"):
            least = 0 if name == "tokens" else 1
            if getattr(self, name) < least:
                raise InputError(f"{name} was {getattr(self, name)}; {least} or more is taken")
        for name in ("dtype", "weights_dtype", "gate_dtype", "gamma_dtype"):
            taken = tuple(DTYPE_BYTES) if name == "dtype" else tuple(dict.fromkeys((self.dtype, "fp32")))
            if getattr(self, name) not in taken:
                raise InputError(f"{name} was {getattr(self, name)!r}; {' or '.join(taken)} is taken")
        if self.gate and not self.shared:
            raise InputError("gate was given without shared, which it gates")
        if self.residual and not self.norm:
            raise InputError("residual was given without norm; MoEFinalizeAdd has no residual")
        if self.routes is not None and not 0 <= self.routes <= self.tokens * self.top_k:
            raise InputError(f"routes was {self.routes}; 0 to T*K = {self.tokens * self.top_k} is taken")


@dataclass(frozen=True)
class Kernel:
    """One kernel of a way to compute the tail: the bytes it reads and writes."""

    name: str
    read: int
    written: int

    @property
    def moved(self) -> int:
        return self.read + self.written


Way = tuple[Kernel, ...]


def ways(tail: Tail) -> Mapping[str, Way]:
    """Every way to compute the tail, by name, as the kernels that it starts.

    Returns:
        "fused": one kernel, the least that can be moved.
        "separate": finalize; the shared expert added; residual add and RMSNorm in one kernel: what serving stacks do
            without a fused tail.
        "gathered": rows brought into the order of the tokens, [T, K, H], then one kernel for all the rest.
        "eager": PyTorch op by op, in the rows' dtype, the norm in float32 inside.
    """
    return {"fused": _fused(tail), "separate": _separate(tail), "gathered": _gathered(tail), "eager": _eager(tail)}


def bytes_moved(way: Way) -> int:
    """The sum over a way's kernels."""
    return sum(kernel.moved for kernel in way)


def floor_seconds(way: Way, bytes_per_second: float) -> float:
    """The time that its bytes take at that bandwidth, in seconds."""
    if not 0 < bytes_per_second < math.inf:
        raise InputError(f"bandwidth was {bytes_per_second:g} bytes a second; a finite number above 0 is taken")
    return bytes_moved(way) / bytes_per_second


class _Sizes:
    """Bytes of the operands: of one [T, H] array, of the rows that are loaded, of what the router gives."""

    def __init__(self, tail: Tail) -> None:
        element = DTYPE_BYTES[tail.dtype]
        expanded = tail.tokens * tail.top_k
        routes = expanded if tail.routes is None else tail.routes
        self.hidden = tail.tokens * tail.hidden * element
        self.hidden32 = tail.tokens * tail.hidden * FLOAT32
        self.rows = routes * tail.hidden * element
        self.expanded = expanded * tail.hidden * element
        self.map = expanded * INT32 if tail.mapped else 0
        self.weights = expanded * DTYPE_BYTES[tail.weights_dtype]
        self.gate = tail.tokens * DTYPE_BYTES[tail.gate_dtype] if tail.gate else 0
        self.gamma = tail.hidden * DTYPE_BYTES[tail.gamma_dtype] if tail.norm and tail.tokens else 0
        self.token_scalar32 = tail.tokens * FLOAT32
        self.shared = self.hidden if tail.shared else 0
        self.residual = self.hidden if tail.residual else 0
        self.outputs = self.hidden * (2 if tail.norm else 1)


def _fused(tail: Tail) -> Way:
    size = _Sizes(tail)
    read = size.rows + size.map + size.weights + size.gate + size.shared + size.residual + size.gamma
    return (Kernel("finalize + add + RMSNorm", read, size.outputs),)


def _separate(tail: Tail) -> Way:
    size = _Sizes(tail)
    kernels = [Kernel("finalize", size.rows + size.map + size.weights, size.hidden)]
    if tail.shared:
        kernels.append(Kernel("shared add", size.hidden + size.shared + size.gate, size.hidden))
    return (*kernels, *_add_rms_norm(tail, size))


def _add_rms_norm(tail: Tail, size: _Sizes) -> Way:
    if not tail.norm:
        return ()
    return (Kernel("add + RMSNorm", size.hidden + size.residual + size.gamma, size.outputs),)


def _gathered(tail: Tail) -> Way:
    size = _Sizes(tail)
    rest = size.expanded + size.weights + size.gate + size.shared + size.residual + size.gamma
    return (
        Kernel("gather to [T, K, H]", size.rows + size.map, size.expanded),
        Kernel("sum + add + RMSNorm", rest, size.outputs),
    )


def _eager(tail: Tail) -> Way:
    size = _Sizes(tail)
    hidden, wide = size.hidden, size.hidden32
    kernels = [
        Kernel("gather", size.rows + size.map, size.expanded),
        Kernel("times weights", size.expanded + size.weights, size.expanded),
        Kernel("sum over k", size.expanded, hidden),
    ]
    if tail.scaled:
        kernels.append(Kernel("times factor", hidden, hidden))
    if tail.gate:
        kernels += [Kernel("sigmoid", size.gate, size.gate), Kernel("times gate", hidden + size.gate, hidden)]
    if tail.shared:
        kernels.append(Kernel("shared add", 2 * hidden, hidden))
    if tail.residual:
        kernels.append(Kernel("residual add", 2 * hidden, hidden))
    if tail.norm:
        # A conversion to float32 is nothing where the rows are float32.
        narrow = tail.dtype != "fp32"
        kernels += [
            *([Kernel("to float32", hidden, wide)] if narrow else []),
            Kernel("square", wide, wide),
            Kernel("mean", wide, size.token_scalar32),
            Kernel("add eps", size.token_scalar32, size.token_scalar32),
            Kernel("rsqrt", size.token_scalar32, size.token_scalar32),
            Kernel("times rsqrt", wide + size.token_scalar32, wide),
            *([Kernel("from float32", wide, hidden)] if narrow else []),
            Kernel("times gamma", hidden + size.gamma, hidden),
        ]
    return tuple(kernels)
