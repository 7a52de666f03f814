"""How far bf16 tails are from float64: eager PyTorch, a bf16 running sum, and the kernel of this library.

    make accuracy          or    python -m benchmarks.accuracy --tokens 64 --seed 0

The kernel is its own source compiled for the host, so no GPU is needed. Three outputs are measured for each model size:

    routed         the weighted sum over a token's routes alone (MoEFinalizeAdd with no shared expert)
    residual_out   that with the shared expert and the residual added: what the next layer's residual reads
    norm_out       its RMSNorm

"error" is the root mean square of what differs from the float64 result, over that result's root mean square. The exact
result rounded to bf16 has such an error too, about 1.7e-3, and nobody who returns bf16 can be below it: it hides what
the arithmetic before it did, the more the fewer terms are summed and the larger the residual is. "excess" therefore is
the same against the float64 result rounded to bf16: what was lost before the last rounding. It is given for the two
outputs that are sums. norm_out has none: it is the norm of residual_out as it was rounded, by definition, in all three.

Held are: the error is at most eager PyTorch's, everywhere; the excess is at most half of the bf16 running sum's,
everywhere; the error of the routed sum is at most half of the bf16 running sum's for K of 8 and more. For smaller K
it cannot be: with K roundings of products and K-1 of sums before it, of which the early ones are of small numbers, the
last rounding alone is more than half of the whole (0.55 for K=4, 0.71 for K=2).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.models import MODELS, ModelSize
from moetrt.console import Output
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM
from tests.operator_cases import Case, gold
from tests.plugins.host.host_build import build_library
from tests.plugins.host.host_kernel import load, run

BF16 = torch.bfloat16
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
    error: Errors
    excess: Errors | None

    def faults(self) -> list[str]:
        """Which of the rules do not hold, one line each."""
        where = f"{self.model.name} {self.output}"
        found = []
        if self.error.ours > self.error.eager:
            found.append(f"{where}: error {self.error.ours:.3e} is above eager PyTorch's {self.error.eager:.3e}")
        if self.excess is not None and self.excess.ours > self.excess.running / 2:
            found.append(
                f"{where}: excess {self.excess.ours:.3e} is above half of a bf16 sum's {self.excess.running:.3e}"
            )
        halved = self.output == "routed" and self.model.top_k >= ENOUGH_ROUTES
        if halved and self.error.ours > self.error.running / 2:
            found.append(f"{where}: error {self.error.ours:.3e} is above half of a bf16 sum's {self.error.running:.3e}")
        return found


def measure(model: ModelSize, *, tokens: int = 64, seed: int = 0) -> list[Row]:
    """The errors for one model size, on normal random rows and weights that sum to 1."""
    ours = load(build_library())
    whole = _case(model, tokens, seed)
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
            error = Errors(*(_relative(output - wanted, wanted) for output in outputs))
            excess = Errors(*(_relative(output - rounded, wanted) for output in outputs))
            rows.append(Row(model, name, error, None if name == "norm_out" else excess))
    return rows


def _case(model: ModelSize, tokens: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    routes = tokens * model.top_k
    weights = torch.softmax(normal(tokens, model.top_k), -1)
    tensors = {
        "gemm2_permuted": normal(routes, model.hidden).to(BF16),
        "expert_weights": weights if model.float32_weights else weights.to(BF16),
        "expanded_idx_to_permuted_idx": torch.randperm(routes, generator=generator).view(tokens, -1).int(),
        "residual": normal(tokens, model.hidden).to(BF16),
        "gamma": (1 + 0.1 * normal(model.hidden)).to(BF16),
    }
    if model.shared:
        tensors["shared_output"] = normal(tokens, model.hidden).to(BF16)
    if model.gate:
        tensors["shared_gate"] = normal(tokens, 1).to(BF16)
    # These models round the normalised value before gamma, as the kernel is asked to.
    attributes = {"routed_scaling_factor": model.routed_scaling_factor, "weight_before_cast": 0}
    return Case(FINALIZE_ADD_RMS_NORM, tensors, attributes)


def _eager(case: Case, *, running: bool) -> tuple[torch.Tensor, ...]:
    """The tail as PyTorch models write it in bf16; ``running``: the sum over k in a bf16 accumulator."""
    tensors = case.tensors
    routes = tensors["gemm2_permuted"][tensors["expanded_idx_to_permuted_idx"].long()]
    routes = routes * tensors["expert_weights"].to(BF16).unsqueeze(-1)
    if running:
        hidden = routes[:, 0]
        for k in range(1, routes.shape[1]):
            hidden = hidden + routes[:, k]
    else:
        hidden = routes.sum(1)
    if case.attributes["routed_scaling_factor"] != 1:
        hidden = hidden * case.attributes["routed_scaling_factor"]
    if "shared_output" in tensors:
        shared = tensors["shared_output"]
        hidden = hidden + (torch.sigmoid(tensors["shared_gate"]) * shared if "shared_gate" in tensors else shared)
    if case.spec is FINALIZE_ADD:
        return (hidden,)
    hidden = tensors["residual"] + hidden
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return tensors["gamma"] * normed.to(BF16), hidden


def _relative(difference: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt((difference**2).mean() / (wanted**2).mean()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 where a rule does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description="Errors of bf16 MoE tails.")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each model size (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    options = parser.parse_args(arguments)
    rows = [row for model in MODELS.values() for row in measure(model, tokens=options.tokens, seed=options.seed)]
    output = Output()
    output.line("Root mean square against float64, in 1e-3 of the result's; excess: against float64 rounded to bf16")
    for model in MODELS.values():
        output.line()
        output.heading(f"{model.name}: H={model.hidden}, K={model.top_k}")
        columns = ["", "eager", "bf16 sum", "ours", "to eager", "to bf16 sum"]
        lines = []
        for row in rows:
            if row.model is model:
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
