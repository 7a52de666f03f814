"""How far bf16 tails are from float64: eager PyTorch, a bf16 running sum, and the kernel of this library.

    make accuracy          or    python -m benchmarks.accuracy --tokens 64 --seed 0

The kernel is its own source compiled for the host, so no GPU is needed. Three outputs are measured for each model size:

    routed         the weighted sum over a token's routes alone (MoEFinalizeAdd with no shared expert)
    residual_out   that with the shared expert and the residual added: what the next layer's residual reads
    norm_out       its RMSNorm

"relative" is the mean over the elements of |x - exact| / |exact|, exact being the float64 result: what assert_allclose
and Polygraphy call the relative difference. Rounding the exact result to bf16 gives 1.4e-3.

"error" is the root mean square of x - exact over that of exact. Rounding the exact result gives 1.7e-3, and nobody who
returns bf16 can be below it: it hides what the arithmetic before it did, the more the fewer terms are summed and the
larger the residual is. "excess" therefore is the same against the float64 result rounded to bf16: what was lost before
the last rounding. It is given for the two outputs that are sums. norm_out has none: it is the norm of residual_out as
it was rounded, by definition, in all three.

Held are, everywhere: the relative error is at most eager PyTorch's and at most half of the bf16 running sum's; the
error is at most eager PyTorch's; the excess is at most half of the bf16 running sum's. And the error of the routed sum
is at most half of the bf16 running sum's for K of 8 and more; for smaller K that cannot be: with K roundings of
products and K-1 of sums before it, of which the early ones are of small numbers, the last rounding alone is more than
half of the whole (0.55 for K=4, 0.71 for K=2).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.eager import eager_routed, eager_tail
from benchmarks.models import MODELS, ModelSize, attributes_of, check_number, random_inputs
from moetrt.console import Output
from moetrt.errors import MoetrtError
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM
from tests.operator_cases import Case, gold
from tests.plugins.host.host_build import build_library
from tests.plugins.host.host_kernel import load, run

BF16 = torch.bfloat16
MOST_TOKENS = 1024
"""The kernel's host build takes about a second for 64 tokens of all models."""
ENOUGH_ROUTES = 8
"""From this K on the routed sum's error, its last rounding included, can be half of a bf16 running sum's."""


@dataclass(frozen=True)
class Errors:
    """One measured number for each contender."""

    eager: float
    running: float
    ours: float


@dataclass(frozen=True)
class Row:
    """One output of one model size. ``excess`` is None for norm_out."""

    model: ModelSize
    output: str
    relative: Errors
    error: Errors
    excess: Errors | None

    def faults(self) -> list[str]:
        """Which of the rules do not hold, one line each."""
        where = f"{self.model.name} {self.output}"
        found = []
        # Written so that NaN is a fault.
        if not self.relative.ours <= self.relative.eager:
            found.append(
                f"{where}: relative error {self.relative.ours:.3e} is above eager PyTorch's {self.relative.eager:.3e}"
            )
        if not self.relative.ours <= self.relative.running / 2:
            found.append(
                f"{where}: relative error {self.relative.ours:.3e} is above half of a bf16 sum's "
                f"{self.relative.running:.3e}"
            )
        if not self.error.ours <= self.error.eager:
            found.append(f"{where}: error {self.error.ours:.3e} is above eager PyTorch's {self.error.eager:.3e}")
        if self.excess is not None and not self.excess.ours <= self.excess.running / 2:
            found.append(
                f"{where}: excess {self.excess.ours:.3e} is above half of a bf16 sum's {self.excess.running:.3e}"
            )
        halved = self.output == "routed" and self.model.top_k >= ENOUGH_ROUTES
        if halved and not self.error.ours <= self.error.running / 2:
            found.append(f"{where}: error {self.error.ours:.3e} is above half of a bf16 sum's {self.error.running:.3e}")
        return found


def measure(model: ModelSize, *, tokens: int = 64, seed: int = 0) -> list[Row]:
    """The errors for one model size, on normal random rows and weights that sum to 1."""
    ours = load(build_library())
    whole = Case(FINALIZE_ADD_RMS_NORM, random_inputs(model, tokens, seed), attributes_of(model))
    parts = {name: whole.tensors[name] for name in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")}
    routed = Case(FINALIZE_ADD, parts, {"routed_scaling_factor": model.routed_scaling_factor})
    rows = []
    for case, names in ((routed, ("routed",)), (whole, ("residual_out", "norm_out"))):
        order = {name: position for position, name in enumerate(case.spec.outputs)} | {"routed": 0}
        found = (_eager(case, running=False), _eager(case, running=True), run(ours, case))
        exact = gold(case)
        for name in names:
            wanted = exact[order[name]]
            outputs = [outputs[order[name]].double().numpy() for outputs in found]
            rounded = torch.from_numpy(wanted).to(BF16).double().numpy()
            relative = Errors(*(_mean_relative(output, wanted) for output in outputs))
            error = Errors(*(_root_mean_square(output - wanted, wanted) for output in outputs))
            excess = Errors(*(_root_mean_square(output - rounded, wanted) for output in outputs))
            rows.append(Row(model, name, relative, error, None if name == "norm_out" else excess))
    return rows


def _eager(case: Case, *, running: bool) -> tuple[torch.Tensor, ...]:
    factor = case.attributes["routed_scaling_factor"]
    if case.spec is FINALIZE_ADD:
        return (eager_routed(case.tensors, factor, running=running),)
    return eager_tail(case.tensors, factor, running=running)


def _mean_relative(output: np.ndarray, wanted: np.ndarray) -> float:
    """Over the elements that are not 0 in float64: two equal rows with opposite weights give such."""
    other = wanted != 0
    return float((np.abs(output - wanted)[other] / np.abs(wanted[other])).mean())


def _root_mean_square(difference: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt((difference**2).mean() / (wanted**2).mean()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a rule does not hold, 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description="Errors of bf16 MoE tails.")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each model size (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    options = parser.parse_args(arguments)
    try:
        check_number("--tokens", options.tokens, 1, MOST_TOKENS)
        check_number("--seed", options.seed, 0, 2**31 - 1)
        rows = [row for model in MODELS.values() for row in measure(model, tokens=options.tokens, seed=options.seed)]
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    output = Output()
    output.line("In 1e-3. relative: mean of the elements' relative errors against float64; error: root mean square of")
    output.line("the differences over the result's; excess: the same against float64 rounded to bf16")
    for model in MODELS.values():
        output.line()
        output.heading(f"{model.name}: H={model.hidden}, K={model.top_k}")
        columns = ["", "eager", "bf16 sum", "ours", "to eager", "to bf16 sum"]
        lines = []
        for row in rows:
            if row.model is model:
                lines.append([f"{row.output} relative", *_cells(row.relative)])
                lines.append([f"{row.output} error", *_cells(row.error)])
                if row.excess is not None:
                    lines.append([f"{row.output} excess", *_cells(row.excess)])
        output.table(columns, lines)
    faults = [fault for row in rows for fault in row.faults()]
    output.line()
    for fault in faults or ["every rule holds: see the head of benchmarks/accuracy.py"]:
        output.line(fault)
    return 1 if faults else 0


def _cells(errors: Errors) -> list[str]:
    numbers = [f"{1e3 * value:.3f}" for value in (errors.eager, errors.running, errors.ours)]
    return [*numbers, f"{errors.ours / errors.eager:.2f}", f"{errors.ours / errors.running:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
