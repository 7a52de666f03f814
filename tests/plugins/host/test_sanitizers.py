"""The kernel's source under AddressSanitizer with UBSan and under ThreadSanitizer; each check is shown to fail."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.operator_cases import Case, make_case
from tests.plugins.host.host_build import ADDRESS, PLAIN, THREAD, Variant, build_runner, changed_kernel
from tests.plugins.host.host_kernel import (
    DEFAULT,
    ONE_CTA,
    SM80,
    TACTICS,
    TWO_CTAS,
    WHOLE_CHIP,
    Call,
    faults,
    run_file,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAP = "expanded_idx_to_permuted_idx"


def wrong_entries() -> Case:
    """cases.md 8: every kind of map entry that names no row."""
    case = make_case(tokens=6, top_k=2, hidden=24, dtype=BF16, seed=1)
    rows = len(case.tensors["gemm2_permuted"])
    case.tensors[MAP][:5, 1] = torch.tensor([rows, rows + 1, 2**31 - 1, -2, -(2**31)])
    return case


def compact_calls() -> list[Call]:
    """Every instantiation of the kernel, every barrier of it used twice, every operand absent once.

    On the small devices a CTA, or a cluster, goes from token to token.
    """
    cta_8, cta_16, cta_32, cluster_2, cluster_4, cluster_8, scalar = TACTICS
    return [
        Call(wrong_entries(), 0, cta_8, TWO_CTAS),
        Call(make_case(hidden=72, stride=96, dtype=BF16, gate=True, weights_dtype=BF16, gamma_dtype=FP32, seed=2),
             0, cta_16, ONE_CTA),
        Call(make_case(top_k=8, hidden=1032, stride=1064, dtype=BF16, gate=True, seed=16), 0, cta_32, SM80),
        Call(make_case(hidden=66, stride=96, dtype=BF16, gate=True, gate_dtype=BF16, seed=3), 0, scalar, TWO_CTAS),
        Call(make_case(hidden=64, stride=96, dtype=FP16, seed=4, weight_before_cast=0, weight_bias=1.0),
             0, cta_8, ONE_CTA),
        Call(make_case(top_k=11, hidden=520, stride=544, dtype=FP16, seed=17), 0, cta_16, WHOLE_CHIP),
        Call(make_case(hidden=1032, stride=1064, dtype=FP16, seed=18), 0, cta_32, ONE_CTA),
        Call(make_case(hidden=72, stride=96, dtype=FP16, seed=5, apply_expert_weights=0), 1, scalar, ONE_CTA),
        Call(make_case(top_k=5, hidden=260, stride=288, dtype=FP32, seed=6), 0, cta_8, SM80),
        Call(make_case(top_k=1, hidden=516, stride=544, dtype=FP32, seed=19), 0, cta_16, TWO_CTAS),
        Call(make_case(hidden=1028, stride=1064, dtype=FP32, seed=20), 0, cta_32, TWO_CTAS),
        Call(make_case(hidden=515, stride=544, dtype=FP32, shared=False, seed=7), 0, scalar, ONE_CTA),
        Call(make_case(hidden=8, dtype=BF16, mapped=False, residual=False, shared=False, seed=8), 0, DEFAULT, ONE_CTA),
        Call(make_case(hidden=1030, dtype=BF16, norm=False, seed=9), 0, scalar, ONE_CTA),
        Call(make_case(hidden=40, dtype=FP16, norm=False, shared=False, mapped=False, seed=10), 0, cta_8, ONE_CTA),
        Call(make_case(tokens=2, top_k=66, rows=40, hidden=520, dtype=BF16, seed=11), 0, cta_8, ONE_CTA),
        Call(make_case(tokens=2, top_k=34, rows=40, hidden=520, dtype=BF16, seed=11), 0, cluster_2, ONE_CTA),
        Call(make_case(hidden=520, stride=544, dtype=BF16, seed=21), 0, cluster_2, ONE_CTA),
        Call(make_case(hidden=1032, stride=1064, dtype=FP16, gate=True, seed=22), 0, cluster_4, ONE_CTA),
        Call(make_case(hidden=1540, dtype=FP32, seed=23), 0, cluster_8, ONE_CTA),
        Call(make_case(tokens=2, hidden=2056, dtype=BF16, seed=23), 0, cluster_2, WHOLE_CHIP),
        Call(make_case(tokens=3, hidden=520, dtype=BF16, norm=False, seed=24), 0, cluster_2, ONE_CTA),
        Call(make_case(tokens=2, top_k=3, hidden=16648, stride=16664, dtype=BF16, seed=12), 0, cta_32, ONE_CTA),
        Call(make_case(tokens=1, top_k=3, hidden=8197, stride=8204, dtype=FP32, seed=13), 0, scalar, ONE_CTA),
        Call(make_case(tokens=3, rows=0, hidden=8, seed=14)),
        Call(make_case(tokens=0, hidden=8, seed=15)),
    ]  # fmt: skip


@pytest.mark.parametrize("variant", [ADDRESS, THREAD], ids=["address_undefined", "thread"])
def test_case06_case08_case11_case12_run_clean(variant: Variant, tmp_path: Path) -> None:
    calls = compact_calls()
    done, outputs = run_file(build_runner(variant), calls, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [faults(call.case, output) for call, output in zip(calls, outputs, strict=True)] == [[]] * len(calls)


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
ENDED = r"SUMMARY: AddressSanitizer: use-after-poison .*moe_finalize\.cuh.* in float moetrt::sumOverToken<true>"
BARRIER = "    __syncthreads();\n"
WAIT = "    waitForUpstream();\n"
FIRST_BARRIER = BARRIER + "\n    bool isLast"
SUM_BARRIER = "        __syncthreads();\n    }\n    constexpr int kMostCtas"
CLUSTER_WAIT = "        TokenCtas<kCluster>::wait();\n"
NORMAL_SUM = "float sum = routed.values[n] *"
ADD = "fmaf(weight, row.values[n], sums[i].values[n])"
RESTAGED = "toRoute(p, readRoute<A>(p, token, first + threadOfCta));\n                        }\n"

CHANGES = [
    Change("routes read unstaged", FIRST_BARRIER, "\n    bool isLast", THREAD, RACE),
    Change("a chunk read unstaged", RESTAGED + "                        __syncthreads();", RESTAGED, THREAD, RACE),
    Change("a chunk staged while read", "__syncthreads();  // the routes staged before", "//", THREAD, RACE),
    Change("sums read unwritten", SUM_BARRIER, SUM_BARRIER[len(BARRIER) + 4:], THREAD, RACE),
    Change("sums in one place", "warpSums + turn * kMaxWarps", "warpSums", THREAD, RACE),
    Change("routes in one place", "stagedTokens[turn ^ 1].routes", "stagedTokens[turn].routes", THREAD, RACE),
    Change("next routes without the norm's barrier", "            __syncthreads();\n            token = next;",
           "            token = next;", THREAD, RACE),
    Change("a cluster's sums read unwritten", CLUSTER_WAIT, "", PLAIN, "arrives at its cluster's barrier again"),
    Change("a CTA's barrier for its cluster", "        TokenCtas<kCluster>::arrive();\n" + CLUSTER_WAIT,
           "        __syncthreads();\n", THREAD, RACE),
    Change("the last cluster barrier left out", "        Ctas::wait();  // until", "        //", ADDRESS, ENDED),
    Change("nothing waits for the kernel before", WAIT, "", THREAD, RACE),
    Change("routes read before the wait", WAIT, "    [[maybe_unused]] const volatile float early = "
           "loadScalar<A>(p.expert_weights, p.weights_dtype, token);\n" + WAIT, THREAD, RACE),
    Change("outputs written before the wait", WAIT, "    static_cast<A*>(p.residual_out)[token * p.hidden_size] = "
           "roundTo<A>(0.0F);\n    __syncthreads();\n" + WAIT, THREAD, RACE),
    Change("a neighbour's row", "(p.norm_out, index, span, normalise",
           "(p.norm_out, index % p.hidden_size, span, normalise", THREAD, RACE),
    Change("barrier skipped", SUM_BARRIER, "        if (warp > 0) __syncthreads();\n    }\n    constexpr int kMostCtas",
           PLAIN, r"deadlock in block 0: 32 threads ended .*, \d+ threads in __syncthreads at moe_finalize\.cuh:\d+"),
    Change("two barriers", SUM_BARRIER,
           f"    if (warp > 0) {{\n{BARRIER}}} else {{\n{BARRIER}}}\n    }}\n    constexpr int kMostCtas", PLAIN,
           r"comes to __syncthreads at moe_finalize\.cuh:\d+ while others wait at moe_finalize\.cuh:\d+"),
    Change("next row", "inputs.row * p.row_stride", "(inputs.row + 1) * p.row_stride", ADDRESS, OUTSIDE),
    Change("element too many", "offset >= 0 ? span.room", "offset >= 0 ? 1 + span.room", ADDRESS, OUTSIDE),
    Change("row R is a row", "inputs.row < p.num_rows", "inputs.row <= p.num_rows", ADDRESS, OUTSIDE),
    Change("-1 loads a row", "return {-1, inputs.row == -1", "return {0, inputs.row == -1", ADDRESS, OUTSIDE),
    Change("token T", "isLast = next >= p.num_tokens", "isLast = next > p.num_tokens", ADDRESS, OUTSIDE),
    Change("shared past its end", "(warpSums, rank)[lane]", "(warpSums, rank)[lane + 64]", ADDRESS, OUTSIDE),
    Change("-1 is an error", "inputs.row == -1 ? 0.0F : ", "", PLAIN, ""),
    Change("-2 is -1", "inputs.row == -1 ? 0.0F", "inputs.row < 0 ? 0.0F", PLAIN, ""),
    Change("gate on all", NORMAL_SUM, "float sum = sharedScale * routed.values[n] *", PLAIN, ""),
    Change("last route left out", "if (k >= p.top_k) {", "if (k + 1 >= p.top_k) {", PLAIN, ""),
    Change("pads are hidden", "own.room ? toFloat(sum.values[n]) : 0.0F",
           "own.room ? toFloat(sum.values[n]) : 1.0F", PLAIN, ""),
    Change("one CTA's sum", "hasWarp && rank < ctas", "hasWarp && rank < ctas / ctas", PLAIN, ""),
    Change("rows' dtype sums", ADD, f"toFloat(roundTo<A>({ADD}))", PLAIN, ""),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.name for change in CHANGES])
def test_a_fault_in_the_kernel_is_found(change: Change, tmp_path: Path) -> None:
    calls = compact_calls()
    runner = build_runner(change.variant, changed_kernel(change.old, change.new))
    done, outputs = run_file(runner, calls, tmp_path)
    if change.says:
        assert done.returncode != 0
        assert re.search(change.says, done.stderr), done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert any(faults(call.case, output) for call, output in zip(calls, outputs, strict=True))
