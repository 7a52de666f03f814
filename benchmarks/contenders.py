"""The ways to compute a tail that are timed against each other, and the buffers that they work on."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.eager import EPS, eager_tail
from benchmarks.models import ModelSize, attributes_of, random_inputs
from benchmarks.timing import Call, Hook
from benchmarks.traffic import tail_of
from moetrt.cuda_op import kernel_params
from moetrt.library import PluginLibrary
from moetrt.reference import reference
from moetrt.spec import FINALIZE_ADD_RMS_NORM
from moetrt.traffic import bytes_moved, ways

OURS = "ours"
NO_PDL = "ours, no dependent launch"
EAGER = "eager PyTorch"
COMPILED = "torch.compile"
SEPARATE = "separate kernels"
ADD_NORM = "add + RMSNorm alone"
COPY = "copy"

FLASHINFER = "FlashInfer"

MOST_SETS = 4096
LARGEST_COPY = 1 << 30
"""Bytes that one copy reads: enough for the full rate, and no more memory than that twice."""

CHECKED_TOKENS = 64
TOLERANCE = 1e-2
"""Root mean square against float64 over that of the result; two roundings to bf16 have 3e-3, eager PyTorch's 4e-3."""

ALIGNMENT = 256
"""Bytes."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""``(norm_out, residual_out)``."""


class WrongResultError(Exception):
    """A timed way left wrong numbers."""


@dataclass(frozen=True)
class Buffers:
    """One set of operands and outputs. All sets of a cell name rows of one ``gemm2_permuted``, each its own."""

    tensors: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    routed: torch.Tensor


class Cell:
    """One model size at one number of tokens: sets of buffers that together are larger than twice the L2 cache."""

    def __init__(self, model: ModelSize, tokens: int, device: torch.device, l2_bytes: int, seed: int) -> None:
        self.model = model
        self.tokens = tokens
        self.device = device
        self.bytes = bytes_moved(ways(tail_of(model, tokens))["fused"])
        count = min(max(2, math.ceil(2 * l2_bytes / self.bytes)), MOST_SETS)
        inputs = random_inputs(model, tokens * count, seed, str(device))
        # What nobody writes must not look like a result.
        empty = torch.full_like(inputs["residual"], math.nan)
        written = {name: _apart(empty, count) for name in (*FINALIZE_ADD_RMS_NORM.outputs, "routed")}
        read = {name: _apart(inputs[name], count) for name in inputs if name not in ("gemm2_permuted", "gamma")}
        whole = {name: inputs[name] for name in ("gemm2_permuted", "gamma")}
        self.written = written
        self.sets = [
            Buffers(
                {name: whole[name] if name in whole else read[name][i] for name in inputs},
                {name: written[name][i] for name in FINALIZE_ADD_RMS_NORM.outputs},
                written["routed"][i],
            )
            for i in range(count)
        ]

    def poison(self, result: Pair | None = None) -> None:
        """Fills every set's outputs with NaN, and the tensors that a way returned of its own."""
        for tensor in (*self.written.values(), *(result or ())):
            tensor.fill_(math.nan)

    def accept(self, result: Pair, *, outputs: bool) -> None:
        """Looks at what replays left: at the last set's numbers and, where a way writes to the sets' ``outputs``, at
        whether every number in them is finite.

        Raises:
            WrongResultError: they are wrong.
        """
        if outputs:
            self.accept_finite()
        fault = self.compare(result, self.sets[-1])
        if fault:
            raise WrongResultError(f"after the replays {fault}")

    def accept_finite(self, result: object = None) -> None:
        """As `accept`, but for a way that works in place and has other numbers after each call."""
        for name in FINALIZE_ADD_RMS_NORM.outputs:
            if not bool(self.written[name].isfinite().all()):
                raise WrongResultError(f"after the replays {name} is not finite everywhere")

    def fault(self, call: Callable[[Buffers], Pair], buffers: Buffers) -> str:
        """What is wrong with a call's outputs on one set, "" where nothing is; looks at some of the tokens."""
        for tensor in (*buffers.outputs.values(), buffers.routed):
            tensor.fill_(math.nan)
        return self.compare(call(buffers), buffers)

    def compare(self, found: Pair, buffers: Buffers) -> str:
        """As `fault`, of outputs that are there already."""
        some = torch.linspace(0, self.tokens - 1, min(self.tokens, CHECKED_TOKENS), device=self.device).long()
        tensors = {name: tensor[some] for name, tensor in buffers.tensors.items() if name not in _WHOLE}
        index = buffers.tensors["expanded_idx_to_permuted_idx"][some].long().flatten()
        tensors["gemm2_permuted"] = buffers.tensors["gemm2_permuted"][index].double()
        tensors["gamma"] = buffers.tensors["gamma"]
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        exact = reference(FINALIZE_ADD_RMS_NORM, wide, attributes_of(self.model))
        return _difference(tuple(output[some] for output in found), exact)


def _apart(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A copy cut along its first axis into ``count`` sets, [count, ...], each of which begins at a boundary of
    `ALIGNMENT` bytes: no set may be slower than another, or compiled for anew, for where it lies."""
    sets = tensor.view(count, -1)
    step = -(-sets.shape[1] * tensor.itemsize // ALIGNMENT) * ALIGNMENT // tensor.itemsize
    memory = tensor.new_empty(count, step)
    memory[:, : sets.shape[1]] = sets
    return memory[:, : sets.shape[1]].unflatten(1, (-1, *tensor.shape[1:]))


def _difference(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> str:
    for name, output, wanted in zip(FINALIZE_ADD_RMS_NORM.outputs, found, exact, strict=True):
        error = float((output.double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())
        if not error <= TOLERANCE:
            return f"{name} is wrong: its error against float64 is {error:.1e}, {TOLERANCE:.0e} is taken"
    return ""


_WHOLE = ("gemm2_permuted", "gamma", "expanded_idx_to_permuted_idx")


@dataclass(frozen=True)
class Contender:
    """One way, ready for a cell.

    Attributes:
        name: what it is reported as; contenders of one name are settings of one way, the fastest of which counts.
        setting: what tells it from others of its name.
        calls: one for each set of buffers.
        prepare, accept: as of `benchmarks.timing.GraphTimer.time`.
        check: runs it on one set and returns ``(norm_out, residual_out)``; None where it computes no tail.
    """

    name: str
    setting: str
    calls: Sequence[Call]
    prepare: Hook
    accept: Hook
    check: Callable[[Buffers], Pair] | None = None


def ours(cell: Cell, library: PluginLibrary, *, dependent_launch: bool = True) -> Iterator[Contender]:
    """The library's kernel: every tactic worth timing, the one that it takes by itself first."""
    attributes = {**attributes_of(cell.model), "programmatic_dependent_launch": int(dependent_launch)}
    complete = FINALIZE_ADD_RMS_NORM.complete(attributes)

    def params_of(buffers: Buffers) -> Any:
        return kernel_params(FINALIZE_ADD_RMS_NORM, buffers.tensors, complete, buffers.outputs)

    def run(params: Any, buffers: Buffers, tactic: int) -> Pair:
        library.moe_finalize(params, _stream(cell.device), tactic=tactic)
        return _outputs(buffers)

    def check(buffers: Buffers, tactic: int) -> Pair:
        return run(params_of(buffers), buffers, tactic)

    params = [params_of(buffers) for buffers in cell.sets]
    name = OURS if dependent_launch else NO_PDL
    accept = partial(cell.accept, outputs=True)
    tactics = library.tactics(params[0], library.current_device())
    for tactic, setting in tactics.items() if dependent_launch else list(tactics.items())[:1]:
        calls = [partial(run, each, buffers, tactic) for each, buffers in zip(params, cell.sets, strict=True)]
        yield Contender(name, setting, calls, cell.poison, accept, partial(check, tactic=tactic))


def _outputs(buffers: Buffers) -> Pair:
    return buffers.outputs["norm_out"], buffers.outputs["residual_out"]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _returning(cell: Cell, name: str, run: Callable[[Buffers], Pair]) -> Contender:
    """A way that returns tensors of its own."""
    calls = [partial(run, buffers) for buffers in cell.sets]
    return Contender(name, "", calls, cell.poison, partial(cell.accept, outputs=False), run)


def eager(cell: Cell) -> Contender:
    """PyTorch, operation after operation."""
    factor = cell.model.routed_scaling_factor

    def run(buffers: Buffers) -> Pair:
        return eager_tail(buffers.tensors, factor)

    return _returning(cell, EAGER, run)


class Compiled:
    """The same through torch.compile: one for a model, which is compiled once for T = 1 and once for any other T."""

    def __init__(self, model: ModelSize, backend: str) -> None:
        torch._dynamo.reset()
        factor = model.routed_scaling_factor
        self._run = torch.compile(lambda tensors: eager_tail(tensors, factor), backend=backend, fullgraph=True)

    def __call__(self, cell: Cell) -> Contender:
        def run(buffers: Buffers) -> Pair:
            tensors = dict(buffers.tensors)
            for name, tensor in tensors.items():
                if name != "gamma" and tensor.shape[0] > 1:
                    torch._dynamo.mark_dynamic(tensor, 0)
            found: Pair = self._run(tensors)
            return found

        return _returning(cell, COMPILED, run)


def add_norms() -> dict[str, Callable[..., None]]:
    """The residual add + RMSNorm kernels to be had, by name: FlashInfer's where it is installed, and Triton's.

    Each takes ``x``, the buffers and the model's gamma, and leaves its results in the set's outputs. FlashInfer's works
    in place: there the residual must lie in ``residual_out``, and ``x`` in ``norm_out``.
    """
    found: dict[str, Callable[..., None]] = {}
    if find_spec("triton") is not None:
        from benchmarks import triton_kernels

        def in_triton(x: torch.Tensor, buffers: Buffers, *, warps: int) -> None:
            triton_kernels.add_rms_norm(
                x,
                buffers.tensors["residual"],
                buffers.tensors["gamma"],
                buffers.outputs["norm_out"],
                buffers.outputs["residual_out"],
                EPS,
                warps=warps,
            )

        for warps in triton_kernels.NORM_WARPS:
            found[f"Triton, {warps} warps"] = partial(in_triton, warps=warps)
    if find_spec("flashinfer") is not None:
        # A FlashInfer that does not fit this PyTorch or CUDA fails in its own ways, and is then no contender.
        with contextlib.suppress(Exception):
            from flashinfer.norm import fused_add_rmsnorm

            def in_flashinfer(x: torch.Tensor, buffers: Buffers) -> None:
                fused_add_rmsnorm(x, buffers.outputs["residual_out"], buffers.tensors["gamma"], EPS)

            found[FLASHINFER] = in_flashinfer
    return found


def add_norm_alone(cell: Cell) -> Iterator[Contender]:
    """The tail's end on its own: what a model without experts has there."""

    def accept(result: object) -> None:
        cell.accept_finite()
        fault = _difference(_outputs(cell.sets[-1]), _add_norm_in_float64(cell.sets[-1]))
        if fault:
            raise WrongResultError(f"after the replays {fault}")

    for name, kernel in add_norms().items():

        def prepare(result: object, name: str = name) -> None:
            cell.poison()
            if name == FLASHINFER:
                _lay_residuals(cell)
            cell.written["norm_out" if name == FLASHINFER else "routed"].normal_()

        # In place for FlashInfer; for the others a hidden state of its own, as the tail's is.
        calls = [partial(kernel, _norm_input(name, buffers), buffers) for buffers in cell.sets]
        yield Contender(ADD_NORM, name, calls, prepare, cell.accept_finite if name == FLASHINFER else accept)


def _add_norm_in_float64(buffers: Buffers) -> Pair:
    hidden = buffers.routed.double() + buffers.tensors["residual"].double()
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)
    return normed * buffers.tensors["gamma"].double(), hidden


def _lay_residuals(cell: Cell) -> None:
    """To where FlashInfer's kernel adds in place."""
    for buffers in cell.sets:
        buffers.outputs["residual_out"].copy_(buffers.tensors["residual"])


def _norm_input(name: str, buffers: Buffers) -> torch.Tensor:
    return buffers.outputs["norm_out"] if name == FLASHINFER else buffers.routed


def separate(cell: Cell, name: str) -> Iterator[Contender]:
    """Finalize in Triton, the shared add in Triton where there is a shared expert, then the add + RMSNorm kernel of
    that name."""
    if find_spec("triton") is None:
        return
    from benchmarks import triton_kernels

    factor, norm = cell.model.routed_scaling_factor, add_norms()[name]
    for block in triton_kernels.FINALIZE_BLOCKS:

        def run(buffers: Buffers, *, block: int = block) -> Pair:
            tensors, hidden = buffers.tensors, _norm_input(name, buffers)
            triton_kernels.finalize(
                tensors["gemm2_permuted"],
                tensors["expert_weights"],
                tensors["expanded_idx_to_permuted_idx"],
                factor,
                hidden,
                block=block,
            )
            if "shared_output" in tensors:
                # An element is read before it is written, by the thread that writes it.
                triton_kernels.shared_add(hidden, tensors["shared_output"], tensors.get("shared_gate"), hidden)
            norm(hidden, buffers)
            return _outputs(buffers)

        def check(buffers: Buffers, run: Callable[[Buffers], Pair] = run) -> Pair:
            # What FlashInfer's kernel adds to in place.
            buffers.outputs["residual_out"].copy_(buffers.tensors["residual"])
            return run(buffers)

        def prepare(result: Pair) -> None:
            cell.poison()
            if name == FLASHINFER:
                _lay_residuals(cell)

        setting = f"finalize {block}; {name}"
        # FlashInfer's adds to the same residual in each replay: its numbers are compared before, by check.
        accept = cell.accept_finite if name == FLASHINFER else partial(cell.accept, outputs=True)
        yield Contender(SEPARATE, setting, [partial(run, buffers) for buffers in cell.sets], prepare, accept, check)


def copy(cell: Cell) -> tuple[Contender, int]:
    """A device-to-device copy that moves as many bytes as the fused tail; with the bytes it moves, read and written."""
    size = min(cell.bytes // 2, LARGEST_COPY)
    count = min(len(cell.sets), max(2, 2 * LARGEST_COPY // size))
    # Whole cache lines, each set's own.
    stride = -(-size // ALIGNMENT) * ALIGNMENT
    source = torch.empty(count, stride, dtype=torch.uint8, device=cell.device).random_()
    target = torch.empty_like(source)
    calls = [partial(target[i, :size].copy_, source[i, :size]) for i in range(count)]

    def prepare(result: object) -> None:
        torch.bitwise_not(source, out=target)

    def accept(result: object) -> None:
        if not torch.equal(target[:, :size], source[:, :size]):
            raise WrongResultError("after the replays the copy differs from its source")

    return Contender(COPY, "", calls, prepare, accept), 2 * size
