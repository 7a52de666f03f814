"""One output of one runner against PyTorch: the error of each from a float64 run, and whether that passes."""

import math
from dataclasses import dataclass
from typing import Any

import torch

PYTORCH, GOLD, ORT, UNMAPPED = "pytorch", "pytorch-float64", "onnxruntime", "onnxruntime-unmapped"
KERNEL, TENSORRT, NATIVE = "kernel-host", "tensorrt", "tensorrt-without-plugin"
"""The runners' names: PyTorch as it is and in float64, ONNX Runtime on the mapped file and on the file before mapping,
the kernel compiled for the CPU, TensorRT with and without the plugin."""

WORST_FACTOR = 4.0
RMS_FACTOR = 2.0
"""How much larger than PyTorch's an error may be, at the worst element and in the mean square.

Two correct float32 runs differ from float64 by rounding in another order alone. Over DeepSeek-V3 and Qwen3-MoE models
of 3 and 4 layers, three seeds and 1 to 99 tokens, ONNX Runtime's error was 0.75 to 2.5 times PyTorch's at the worst
element and 0.9 to 1.9 times in the mean square.
"""

SENSITIVE = 0.01
"""Where PyTorch's own error is above this, relative to the output's RMS, the inputs decide nothing."""

LOUD_RATIO = 10.0
"""An error that passes by the unit in the last place alone and is more than this many times PyTorch's is told of."""

_TF32_STEP = 2.0**-10


@dataclass(frozen=True)
class Errors:
    """How far a runner is from float64: absolute differences over the output's root mean square.

    Attributes:
        runner: whose they are.
        worst: the largest.
        rms: the root mean square.
    """

    runner: str
    worst: float
    rms: float


@dataclass(frozen=True)
class OutputParity:
    """One output of one runner against PyTorch.

    Errors are absolute differences from the float64 run over that output's root mean square, so that they mean the same
    for every model; ``worst`` is the largest, ``rms`` the root mean square.

    Attributes:
        name: the output; "<node>.<output>" where one tail was compared by itself.
        runner: one of the names above.
        shape, dtype: of the output.
        worst_index: the element where the runner's error is largest; empty where there is none to compare.
        worst_values: that element as (runner, PyTorch, float64).
        relative_error: the runner's error there over the magnitude of the float64 value; inf where that is 0.
        worst, rms: the runner's errors.
        pytorch_worst, pytorch_rms: PyTorch's.
        worst_tolerance, rms_tolerance: what ``worst`` and ``rms`` may be.
        reason: where the tolerances come from; or why there is nothing to compare.
        nan, inf: how many elements the runner has.
        pytorch_nan, pytorch_inf: how many PyTorch has.
        passed: the verdict.
        tail: the name of the tail that was compared by itself; empty for an output of the model.
        tokens: for logits, how many tokens have one; None for other outputs.
        argmax_changed: of these, those whose top-1 is none of PyTorch's; where several logits are largest, each counts.
        pytorch_argmax_changed: likewise PyTorch's against float64.
        unfused: the errors of the unfused path in ONNX Runtime, where the file before mapping was run.
        undecided: whether it did not pass only because no element is finite, in PyTorch and float64 either.
        unmeasured: how many elements have no error, since the runner, PyTorch or float64 has NaN or Inf there.
    """

    name: str
    runner: str
    shape: tuple[int, ...]
    dtype: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float, float]
    relative_error: float
    worst: float
    rms: float
    pytorch_worst: float
    pytorch_rms: float
    worst_tolerance: float
    rms_tolerance: float
    reason: str
    nan: int
    inf: int
    pytorch_nan: int
    pytorch_inf: int
    passed: bool
    tail: str = ""
    tokens: int | None = None
    argmax_changed: int | None = None
    pytorch_argmax_changed: int | None = None
    unfused: Errors | None = None
    undecided: bool = False
    unmeasured: int = 0

    @property
    def gap(self) -> str:
        """Of an output that passed: how much of it was not measured, in words; empty where all was."""
        if not self.passed or not self.unmeasured:
            return ""
        kinds = [kind for kind, count in (("NaN", self.pytorch_nan), ("Inf", self.pytorch_inf)) if count]
        be = "is" if self.unmeasured == 1 else "are"
        if self.pytorch_nan + self.pytorch_inf == self.unmeasured:
            what = f"{' or '.join(kinds)} in PyTorch too"
        else:
            what = "NaN or Inf in PyTorch's float64 run" + (f", some {' or '.join(kinds)} in both" if kinds else "")
        return f"{self.unmeasured} of {math.prod(self.shape)} elements {be} {what}"

    @property
    def excess(self) -> str:
        """Of an output that passes by the unit in the last place alone, `LOUD_RATIO` times PyTorch's error or more.

        In words, empty otherwise. An engine's TF32 is no such case: it rounds to what the tolerance names.
        """
        within = self.worst <= WORST_FACTOR * self.pytorch_worst and self.rms <= RMS_FACTOR * self.pytorch_rms
        tf32 = self.runner in (TENSORRT, NATIVE) and self.dtype == "float32"
        if not self.passed or within or tf32 or self.ratio <= LOUD_RATIO:
            return ""
        before = ""
        if self.unfused is not None and self.pytorch_rms:
            before = f"; {self.unfused.runner} has {_ratio(self.unfused.rms, self.pytorch_rms):.0f} x"
        times = f"{self.ratio:.0f} x PyTorch's own" if self.pytorch_rms else "not 0 as PyTorch's own is"
        return (
            f"{self.runner}'s error is {times} ({self.rms:.1e} against {self.pytorch_rms:.1e} in the mean square), "
            f"more than rounding in another order makes: it passes by the unit in the last place alone{before}"
        )

    @property
    def ratio(self) -> float:
        """The runner's error over PyTorch's, in the mean square; 1 where neither has one."""
        return _ratio(self.rms, self.pytorch_rms)

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON: what is not finite is null."""
        unfused = None
        if self.unfused is not None:
            ratio = _ratio(self.rms, self.unfused.rms)
            unfused = {
                "runner": self.unfused.runner,
                "worst": number(self.unfused.worst),
                "rms": number(self.unfused.rms),
                "ratio": number(ratio),
            }
        return {
            "name": self.name,
            "tail": self.tail or None,
            "runner": self.runner,
            "passed": self.passed,
            "undecided": self.undecided,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "worst": number(self.worst),
            "rms": number(self.rms),
            "pytorch": {"worst": number(self.pytorch_worst), "rms": number(self.pytorch_rms)},
            "unfused": unfused,
            "ratio": number(self.ratio),
            "tolerance": {"worst": number(self.worst_tolerance), "rms": number(self.rms_tolerance)},
            "worst_element": {
                "index": list(self.worst_index),
                "runner": number(self.worst_values[0]),
                "pytorch": number(self.worst_values[1]),
                "float64": number(self.worst_values[2]),
                "relative_error": number(self.relative_error),
            },
            "nan": self.nan,
            "inf": self.inf,
            "pytorch_nan": self.pytorch_nan,
            "pytorch_inf": self.pytorch_inf,
            "tokens": self.tokens,
            "argmax_changed": self.argmax_changed,
            "pytorch_argmax_changed": self.pytorch_argmax_changed,
            "reason": self.reason,
        }

    def lines(self) -> list[str]:
        """The figures for people, the verdict first."""
        if self.undecided:
            return [f"{self.headline()}: {self.reason}"]
        found = [self.headline()]
        if self.worst_index:
            theirs, ours, gold = self.worst_values
            where = ", ".join(map(str, self.worst_index))
            unfused = "" if self.unfused is None else f", {self.unfused.runner} {self.unfused.rms:.2e}"
            found += [
                f"  worst element [{where}]: {self.runner} {theirs:.9g}, pytorch {ours:.9g}, float64 {gold:.9g}; "
                f"relative error {self.relative_error:.2e}",
                f"  error against float64: worst {self.worst:.2e} (pytorch {self.pytorch_worst:.2e}, "
                f"at most {self.worst_tolerance:.2e}), rms {self.rms:.2e} (pytorch {self.pytorch_rms:.2e}{unfused}, "
                f"at most {self.rms_tolerance:.2e}); {self.ratio:.2f} x pytorch's",
            ]
        if self.tokens is not None:
            found.append(
                f"  argmax changed for {self.argmax_changed} of {self.tokens} tokens "
                f"(pytorch against float64: {self.pytorch_argmax_changed})"
            )
        found.append(f"  tolerance: {self.reason}")
        found.append(f"  NaN {self.nan} (pytorch {self.pytorch_nan}), Inf {self.inf} (pytorch {self.pytorch_inf})")
        return found

    def headline(self) -> str:
        """The verdict in one line."""
        verdict = "ok" if self.passed else "UNDECIDED" if self.undecided else "DIFFERS"
        sizes = "x".join(map(str, self.shape)) or "scalar"
        gap = f"; {self.gap}" if self.gap else ""
        return f"{verdict}: {self.name} [{sizes}] {self.dtype}, {self.runner} against pytorch{gap}"


def number(value: float) -> float | None:
    """``value`` as JSON has it: NaN and the infinities are null."""
    return value if math.isfinite(value) else None


def _ratio(ours: float, theirs: float) -> float:
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


def judge(
    value: torch.Tensor,
    pytorch: torch.Tensor,
    gold: torch.Tensor,
    *,
    name: str,
    runner: str = ORT,
    step: float | None = None,
    tail: str = "",
) -> OutputParity:
    """The verdict over one output.

    Args:
        value: the runner's output.
        pytorch: PyTorch's, of the same dtype and shape.
        gold: the float64 run's; where it is not floating-point, equality is asked for.
        name, runner, tail: for the report.
        step: what the runner rounds to, relative to 1; the output dtype's unit in the last place where None, and
            2**-10, TF32's, for float32 in TensorRT.
    """
    exact = not gold.is_floating_point()
    dtype = str(value.dtype).removeprefix("torch.")
    ours, theirs, want = (t.to(torch.float64) for t in (pytorch, value, gold))
    same_shape = value.shape == pytorch.shape == gold.shape
    finite = torch.isfinite(theirs) & torch.isfinite(ours) & torch.isfinite(want) if same_shape else torch.zeros(0)
    measured = same_shape and bool(finite.any())
    scale, peak = 1.0, 1.0
    worst, rms, pytorch_worst, pytorch_rms, relative = math.inf, math.inf, math.inf, math.inf, math.inf
    index: tuple[int, ...] = ()
    values = (math.nan, math.nan, math.nan)
    if measured:
        reference_values = want[finite]
        scale = float(reference_values.square().mean().sqrt()) or 1.0
        peak = float(reference_values.abs().max()) / scale
        error, pytorch_error = ((side - want).abs().where(finite, 0.0) for side in (theirs, ours))
        worst, pytorch_worst = float(error.max()) / scale, float(pytorch_error.max()) / scale
        rms, pytorch_rms = (float(e[finite].square().mean().sqrt()) / scale for e in (error, pytorch_error))
        index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        values = (float(theirs[index]), float(ours[index]), float(want[index]))
        relative = float(error[index]) / abs(values[2]) if values[2] else (math.inf if error[index] else 0.0)

    if exact:
        worst_tolerance = rms_tolerance = 0.0
        reason = f"{dtype} must be equal"
    else:
        tf32 = step is None and runner in (TENSORRT, NATIVE) and value.dtype == torch.float32
        what = "one unit in the last place" if step is None else f"{step:.1e}, one unit in the last place of 16 bits,"
        if tf32:
            what, step = "2^-10, which TF32 rounds to,", _TF32_STEP
        step = step_of(value.dtype) if step is None else step
        worst_tolerance = WORST_FACTOR * pytorch_worst + step * peak
        rms_tolerance = RMS_FACTOR * pytorch_rms + step
        reason = (
            f"{WORST_FACTOR:g} x (worst) and {RMS_FACTOR:g} x (rms) PyTorch's own distance from float64, "
            f"for rounding in another order, plus {what} of the largest element"
        )
    undecided = False
    passed = measured and worst <= worst_tolerance and rms <= rms_tolerance
    if not same_shape:
        reason = f"shapes differ: pytorch has {list(pytorch.shape)}"
    elif value.numel() == 0:
        passed, reason = True, "there is no element"
    elif not measured and _same_specials(theirs, ours) and _same_specials(want, ours):
        undecided = True
        special = "NaN" if ours.isnan().all() else "NaN or Inf"
        reason = f"every element is {special} in PyTorch too: nothing can be compared"
    elif not measured:
        reason = "no element is finite on every side: there is nothing to compare"
    elif not exact and pytorch_worst > SENSITIVE and value.dtype in (torch.float32, torch.float64):
        passed = False
        reason = (
            f"PyTorch's own error, {pytorch_worst:.1e}, is above {SENSITIVE:g}: these inputs decide nothing "
            "(a router near a tie?); take another seed"
        )
    elif not _same_specials(theirs, ours):
        passed, reason = False, "NaN or Inf is where PyTorch has none, or the other way round"
    logits = same_shape and is_logits(name, value)
    return OutputParity(
        name=name,
        runner=runner,
        shape=tuple(value.shape),
        dtype=dtype,
        worst_index=index,
        worst_values=values,
        relative_error=relative,
        worst=worst,
        rms=rms,
        pytorch_worst=pytorch_worst,
        pytorch_rms=pytorch_rms,
        worst_tolerance=worst_tolerance if measured else 0.0,
        rms_tolerance=rms_tolerance if measured else 0.0,
        reason=reason,
        nan=int(theirs.isnan().sum()),
        inf=int(theirs.isinf().sum()),
        pytorch_nan=int(ours.isnan().sum()),
        pytorch_inf=int(ours.isinf().sum()),
        passed=passed,
        tail=tail,
        tokens=math.prod(value.shape[:-1]) if logits else None,
        argmax_changed=argmax_changed(theirs, ours) if logits else None,
        pytorch_argmax_changed=argmax_changed(ours, want) if logits else None,
        undecided=undecided,
        unmeasured=int((~finite).sum()) if same_shape else 0,
    )


def step_of(dtype: torch.dtype) -> float:
    """One unit in the last place at 1."""
    return torch.finfo(dtype).eps


def errors_of(value: torch.Tensor, gold: torch.Tensor, runner: str) -> Errors:
    """The errors of a runner that has no verdict of its own; inf where nothing is finite, or the shapes differ."""
    theirs, want = value.to(torch.float64), gold.to(torch.float64)
    finite = torch.isfinite(theirs) & torch.isfinite(want) if theirs.shape == want.shape else torch.zeros(0).bool()
    if not finite.any():
        return Errors(runner, math.inf, math.inf)
    scale = float(want[finite].square().mean().sqrt()) or 1.0
    error = (theirs - want)[finite].abs()
    return Errors(runner, float(error.max()) / scale, float(error.square().mean().sqrt()) / scale)


def is_logits(name: str, value: torch.Tensor) -> bool:
    """Whether an output is one that a token is chosen by; a tensor does not say so, its name does."""
    return name.rpartition(".")[2].endswith("logits") and value.is_floating_point() and value.dim() > 1


def argmax_changed(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens of ``[..., V]`` have another largest element: none that is largest in both.

    In 16 bits several elements are often equally large, and which of them an argmax names says nothing. A token with
    NaN counts as changed unless both have NaN.
    """
    if one.numel() == 0:
        return 0
    tops = [x == x.amax(-1, keepdim=True) for x in (one, other)]
    same = (tops[0] & tops[1]).any(-1) | (one.isnan().any(-1) & other.isnan().any(-1))
    return int((~same).sum())


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan, inf = a.isnan(), a.isinf()
    return bool((nan == b.isnan()).all() and (inf == b.isinf()).all() and (a[inf] == b[inf]).all())
