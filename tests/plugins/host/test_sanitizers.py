"""The kernel's source under AddressSanitizer with UBSan and under ThreadSanitizer; each check is shown to fail."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.operator_cases import Case, make_case
from tests.plugins.host.host_build import ADDRESS, PLAIN, THREAD, Variant, build_runner, changed_kernel
from tests.plugins.host.host_kernel import faults, run_file

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAP = "expanded_idx_to_permuted_idx"


def wrong_entries() -> Case:
    """cases.md 8: every kind of map entry that names no row."""
    case = make_case(tokens=6, top_k=2, hidden=24, dtype=BF16, seed=1)
    rows = len(case.tensors["gemm2_permuted"])
    case.tensors[MAP][:5, 1] = torch.tensor([rows, rows + 1, 2**31 - 1, -2, -(2**31)])
    return case


def compact_cases() -> list[tuple[Case, int]]:
    """All six instantiations of the kernel, every barrier of it used twice, every operand absent once."""
    return [
        (wrong_entries(), 0),
        (make_case(hidden=72, stride=96, dtype=BF16, gate=True, weights_dtype=BF16, gamma_dtype=FP32, seed=2), 0),
        (make_case(hidden=66, stride=96, dtype=BF16, gate=True, gate_dtype=BF16, seed=3), 0),
        (make_case(hidden=64, stride=96, dtype=FP16, seed=4, weight_before_cast=0, weight_bias=1.0), 0),
        (make_case(hidden=72, stride=96, dtype=FP16, seed=5, apply_expert_weights=0), 1),
        (make_case(hidden=516, stride=544, dtype=FP32, seed=6), 0),
        (make_case(hidden=515, stride=544, dtype=FP32, shared=False, seed=7), 0),
        (make_case(hidden=8, dtype=BF16, mapped=False, residual=False, shared=False, seed=8), 0),
        (make_case(hidden=1030, dtype=BF16, norm=False, seed=9), 0),
        (make_case(hidden=40, dtype=FP16, norm=False, shared=False, mapped=False, seed=10), 0),
        (make_case(tokens=2, top_k=130, rows=40, hidden=520, dtype=BF16, seed=11), 0),
        (make_case(tokens=1, top_k=3, hidden=16648, stride=16664, dtype=BF16, seed=12), 0),
        (make_case(tokens=1, top_k=3, hidden=16645, stride=16664, dtype=FP32, seed=13), 0),
        (make_case(tokens=3, rows=0, hidden=8, seed=14), 0),
        (make_case(tokens=0, hidden=8, seed=15), 0),
    ]


@pytest.mark.parametrize("variant", [ADDRESS, THREAD], ids=["address_undefined", "thread"])
def test_case06_case08_case11_case12_run_clean(variant: Variant, tmp_path: Path) -> None:
    cases = compact_cases()
    done, outputs = run_file(build_runner(variant), cases, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [faults(case, output) for (case, _), output in zip(cases, outputs, strict=True)] == [[]] * len(cases)


@dataclass(frozen=True)
class Change:
    """A fault put into moe_finalize.cuh, and a pattern of what must then be said; "": only the numbers are wrong."""

    name: str
    old: str
    new: str
    variant: Variant
    says: str


RACE = r"SUMMARY: ThreadSanitizer: data race .*(moe_finalize\.cuh|moeFinalizeKernel|__stwb)"
OUTSIDE = r"SUMMARY: AddressSanitizer: .*(moe_finalize\.cuh|moeFinalizeKernel)"
LAST_READ = "    value = lane <"
BARRIER = "    __syncthreads();\n"
LAST_BARRIER = BARRIER + LAST_READ
NORMAL_SUM = "float sum = hidden[v].values[n] *"
ADD = "fmaf(weight, row.values[n], hidden[v].values[n])"

CHANGES = [
    Change("routes read unstaged", "Weights);\n            __syncthreads();", "Weights);", THREAD, RACE),
    Change("routes staged while read", "__syncthreads();  // the routes staged before", "//", THREAD, RACE),
    Change("sums read unwritten", LAST_BARRIER, LAST_READ, THREAD, RACE),
    Change("a neighbour's row", "(p.norm_out, index, count", "(p.norm_out, base + column, count", THREAD, RACE),
    Change("barrier skipped", LAST_BARRIER, "if (warp > 0) __syncthreads();\n" + LAST_READ, PLAIN,
           r"deadlock in block 0: 32 threads ended .*, 480 threads in __syncthreads at moe_finalize\.cuh:\d+"),
    Change("two barriers", LAST_BARRIER, f"if (warp > 0) {{\n{BARRIER}}} else {{\n{BARRIER}}}\n" + LAST_READ, PLAIN,
           r"comes to __syncthreads at moe_finalize\.cuh:\d+ while others wait at moe_finalize\.cuh:\d+"),
    Change("next row", "row * p.row_stride", "(row + 1) * p.row_stride", ADDRESS, OUTSIDE),
    Change("element too many", "? width - column : 0", "? width - column + 1 : 0", ADDRESS, OUTSIDE),
    Change("row R is a row", "row < p.num_rows", "row <= p.num_rows", ADDRESS, OUTSIDE),
    Change("-1 loads a row", "int64_t offset = -1;", "int64_t offset = 0;", ADDRESS, OUTSIDE),
    Change("shared past its end", "? warpSums[lane]", "? warpSums[lane + 32]", ADDRESS, OUTSIDE),
    Change("-1 is an error", "else if (row != -1)", "else", PLAIN, ""),
    Change("-2 is -1", "else if (row != -1)", "else if (row >= 0)", PLAIN, ""),
    Change("gate on all", NORMAL_SUM, "float sum = scaleOfShared * hidden[v].values[n] *", PLAIN, ""),
    Change("last route left out", "first + i < p.top_k)", "first + i + 1 < p.top_k)", PLAIN, ""),
    Change("pads are hidden", "n < count ? hidden[v].values[n] : 0.0F", "hidden[v].values[n] + 1.0F", PLAIN, ""),
    Change("rows' dtype sums", ADD, f"toFloat(roundTo<A>({ADD}))", PLAIN, ""),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.name for change in CHANGES])
def test_a_fault_in_the_kernel_is_found(change: Change, tmp_path: Path) -> None:
    cases = compact_cases()
    runner = build_runner(change.variant, changed_kernel(change.old, change.new))
    done, outputs = run_file(runner, cases, tmp_path)
    if change.says:
        assert done.returncode != 0
        assert re.search(change.says, done.stderr), done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert any(faults(case, output) for (case, _), output in zip(cases, outputs, strict=True))
