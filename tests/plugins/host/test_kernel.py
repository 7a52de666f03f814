"""The kernel's numbers, from its own source on the host, against float64, the PyTorch reference and eager PyTorch."""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrt.library import MoEFinalizeParams
from moetrt.reference import reference
from tests.operator_cases import Case, gold, make_case
from tests.plugins.host.host_build import build_library, changed_kernel
from tests.plugins.host.host_kernel import (
    DEFAULT,
    ONE_CTA,
    SM80,
    SM90_WITH_SM80_CODE,
    SM90_WITHOUT_CLUSTERS,
    TACTICS,
    TWO_CTAS,
    UNIT,
    WHOLE_CHIP,
    Call,
    Judge,
    as_float64,
    load,
    parameters,
    run,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EACH_DTYPE = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
MAP = "expanded_idx_to_permuted_idx"


def check(library: ctypes.CDLL, case: Case, *, shift: int = 0) -> tuple[torch.Tensor, ...]:
    """Runs the case with every tactic that takes it; fails unless float64 and the project's reference agree.

    Returns:
        The outputs of the default tactic.
    """
    judge = Judge(case)
    outputs = run(library, case, shift=shift)
    assert judge.faults(outputs) == []
    for tactic in TACTICS:
        # In turns the CTAs or clusters of one and of two tokens at a time: the other tokens are their next ones.
        found = run(library, case, shift=shift, tactic=tactic, device=(ONE_CTA, TWO_CTAS)[tactic % 2])
        if found:
            assert judge.faults(found) == [], TACTICS[tactic]
            # An element's sum has the same order in every tactic; only the norm's has not.
            assert torch.equal(found[-1].nan_to_num(1e9), outputs[-1].nan_to_num(1e9)), TACTICS[tactic]
    check_reference(judge, outputs)
    return outputs


def check_reference(judge: Judge, outputs: tuple[torch.Tensor, ...]) -> None:
    """Fails unless the project's reference is right and nearly always the same as ``outputs``."""
    case = judge.case
    expected = reference(case.spec, case.tensors, case.attributes)
    # Both keep to float64. Where their sums fall on two sides of a tie, residual_out is one number apart and norm_out
    # follows, so that equality is asked of most elements only.
    assert judge.faults(tuple(tensor.reshape(outputs[0].shape) for tensor in expected)) == []
    same = [
        (as_float64(a) == as_float64(b)) | (np.isnan(as_float64(a)) & np.isnan(as_float64(b)))
        for a, b in zip(outputs, expected, strict=True)
    ]
    if case.tensors["gemm2_permuted"].dtype != FP32 and same[0].size >= 1000:
        assert min(part.mean() for part in same) > 0.97


def root_mean_square(found: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.sqrt(((as_float64(found) - exact.reshape(-1, exact.shape[-1])) ** 2).mean()))


def running_sum(case: Case) -> torch.Tensor:
    """The tail's hidden with an accumulator in the rows' dtype, as kernels that lost accuracy had it."""
    rows, weights, index = (case.tensors[name] for name in ("gemm2_permuted", "expert_weights", MAP))
    total = torch.zeros(len(weights), rows.shape[1], dtype=rows.dtype)
    for k in range(weights.shape[1]):
        total = total + weights[:, k, None].to(rows.dtype) * rows[index[:, k].long()]
    return total + case.tensors["shared_output"] + case.tensors["residual"]


def eager(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The tail as PyTorch models write it, in the rows' dtype; the norm in fp32 inside, as theirs."""
    rows, weights, index = (case.tensors[name] for name in ("gemm2_permuted", "expert_weights", MAP))
    routed = (rows[index.long()] * weights.to(rows.dtype).unsqueeze(-1)).sum(1)
    hidden = (
        routed * case.attributes["routed_scaling_factor"] + case.tensors["shared_output"] + case.tensors["residual"]
    )
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    if case.attributes["weight_before_cast"]:
        return (normed * case.tensors["gamma"].float()).to(rows.dtype), hidden
    return case.tensors["gamma"] * normed.to(rows.dtype), hidden


@pytest.mark.parametrize("before_cast", [0, 1])
@EACH_DTYPE
def test_case01_error_is_no_larger_than_eager_pytorchs(
    host_library: ctypes.CDLL, dtype: torch.dtype, before_cast: int
) -> None:
    case = make_case(
        tokens=16, top_k=8, hidden=1024, dtype=dtype, weights_dtype=dtype, absent=0.0, seed=1,
        routed_scaling_factor=2.5, weight_before_cast=before_cast,
    )  # fmt: skip
    exact = gold(case)
    ours, theirs = check(host_library, case), eager(case)
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert root_mean_square(mine, truth) <= root_mean_square(other, truth)


def test_case01_error_is_at_most_half_of_a_bf16_running_sums(host_library: ctypes.CDLL) -> None:
    case = make_case(tokens=16, top_k=8, hidden=1024, dtype=BF16, weights_dtype=BF16, absent=0.0, seed=2)
    exact = gold(case)[1]
    mine = check(host_library, case)[1]
    assert root_mean_square(mine, exact) <= 0.5 * root_mean_square(running_sum(case), exact)


@EACH_DTYPE
@pytest.mark.parametrize("weights", ["rows", "fp32"])
@pytest.mark.parametrize("gate", ["rows", "fp32"])
@pytest.mark.parametrize("gamma", ["rows", "fp32"])
def test_case03_case13_case18_every_dtype_combination(
    host_library: ctypes.CDLL, dtype: torch.dtype, weights: str, gate: str, gamma: str
) -> None:
    chosen = {
        f"{name}_dtype": dtype if side == "rows" else FP32
        for name, side in (("weights", weights), ("gate", gate), ("gamma", gamma))
    }
    for hidden in (72, 66):  # 16-byte accesses, and not
        check(host_library, make_case(hidden=hidden, dtype=dtype, gate=True, seed=3, **chosen))


@pytest.mark.parametrize("shared", [True, False])
def test_case04_routed_scale_is_applied_to_the_routed_part_once(host_library: ctypes.CDLL, shared: bool) -> None:
    case = make_case(hidden=64, shared=shared, seed=4, routed_scaling_factor=2.5)
    hidden = check(host_library, case)[1]
    folded = make_case(hidden=64, shared=shared, seed=4)
    folded.tensors["expert_weights"] = folded.tensors["expert_weights"] * 2.5
    assert torch.allclose(check(host_library, folded)[1], hidden, rtol=1e-6, atol=1e-6)
    plain = check(host_library, make_case(hidden=64, shared=shared, seed=4))[1]
    assert not torch.allclose(plain, hidden, atol=0.1)


def test_both_scales(host_library: ctypes.CDLL) -> None:
    check(host_library, make_case(hidden=64, gate=True, seed=5, residual_scale=0.22, combine_scale=-1.75))


@EACH_DTYPE
def test_case05_weights_applied_before_are_ignored(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case(hidden=64, dtype=dtype, seed=6, apply_expert_weights=0)
    hidden = check(host_library, case)[1]
    case.tensors["expert_weights"].fill_(float("nan"))
    assert torch.equal(run(host_library, case)[1], hidden)


@EACH_DTYPE
def test_case06_absent_routes_are_never_loaded(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case(tokens=8, top_k=4, hidden=64, dtype=dtype, absent=0.5, seed=7)
    index = case.tensors[MAP]
    index[0] = torch.tensor([-1, -1, -1, -1])
    index[1] = torch.tensor([0, 1, 2, 3])
    rows = case.tensors["gemm2_permuted"]
    rows[:4] = 1.0
    named = set(index.flatten().tolist())
    for row in range(len(rows)):
        if row not in named:
            rows[row] = float("nan") if row % 2 else float("inf")
    hidden = check(host_library, case)[1]
    assert torch.isfinite(hidden).all()
    alone = case.tensors["shared_output"][0].float() + case.tensors["residual"][0].float()
    assert torch.equal(hidden[0], alone.to(dtype))


def test_case06_weight_of_an_absent_route_is_not_used(host_library: ctypes.CDLL) -> None:
    case = make_case(hidden=64, absent=0.5, seed=8)
    case.tensors["expert_weights"][case.tensors[MAP] == -1] = float("nan")
    assert torch.isfinite(check(host_library, case)[1]).all()


def far_rows(library: ctypes.CDLL, folder: Path, shift: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each output for rows at element 2^31 and after it (a file of 5 GiB, nearly all hole), and for near ones."""
    stride, rows, hidden = 1 << 28, 10, 64
    with (folder / "rows").open("w+b") as file:
        file.truncate((rows * stride + hidden) * 2)
        memory = mmap.mmap(file.fileno(), 0)
    (folder / "rows").unlink()
    far = torch.frombuffer(memory, dtype=BF16)[shift : shift + rows * stride].view(rows, stride)
    near = make_case(tokens=3, top_k=2, rows=rows, hidden=hidden, dtype=BF16, absent=0.0, seed=9)
    near.tensors[MAP] = torch.tensor([[0, 7], [8, 7], [9, 8]], dtype=torch.int32)
    near.tensors["gemm2_permuted"] = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(9)).to(BF16)
    far[:, :hidden] = near.tensors["gemm2_permuted"]
    params = parameters(near)
    params.row_stride = stride
    outputs = [torch.empty(3, hidden, dtype=BF16) for _ in range(2)]
    operands = near.tensors | {"gemm2_permuted": far, "norm_out": outputs[0], "residual_out": outputs[1]}
    for name, tensor in operands.items():
        setattr(params, name, tensor.data_ptr())
    assert library.moetrt_moe_finalize(ctypes.byref(params), None) == 0
    return list(zip(outputs, check(library, near), strict=True))


@pytest.mark.parametrize("shift", [0, 1])
def test_case07_row_offsets_pass_2_to_the_31(host_library: ctypes.CDLL, tmp_path: Path, shift: int) -> None:
    assert all(torch.equal(far, near) for far, near in far_rows(host_library, tmp_path, shift))


def test_case07_an_int32_row_offset_is_found(tmp_path: Path) -> None:
    """2^31 and after are negative in int32, which this kernel takes for "no row": wrong, but nothing astray is read."""
    changed = changed_kernel("{inputs.row * p.row_stride, ", "{static_cast<int32_t>(inputs.row * p.row_stride), ")
    far, near = far_rows(load(build_library(changed)), tmp_path, 0)[1]
    assert torch.equal(far[0], near[0])
    assert not torch.equal(far[1], near[1])


@EACH_DTYPE
@pytest.mark.parametrize("wrong", ["R", "R+1", "2^31-1", "-2", "-2^31"])
@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_case08_a_map_entry_that_names_no_row_gives_nan_for_its_token(
    host_library: ctypes.CDLL, dtype: torch.dtype, wrong: str, factor: float
) -> None:
    case = make_case(tokens=5, top_k=4, hidden=72, dtype=dtype, seed=10, gate=True, routed_scaling_factor=factor)
    unharmed = run(host_library, case)
    rows = len(case.tensors["gemm2_permuted"])
    entry = {"R": rows, "R+1": rows + 1, "2^31-1": 2**31 - 1, "-2": -2, "-2^31": -(2**31)}[wrong]
    case.tensors[MAP][2, 3] = entry
    for output, before in zip(check(host_library, case), unharmed, strict=True):
        assert torch.isnan(output[2]).all()
        others = [0, 1, 3, 4]
        assert torch.equal(output[others], before[others])


def test_case09_a_row_named_twice_counts_twice(host_library: ctypes.CDLL) -> None:
    case = make_case(tokens=1, top_k=2, hidden=16, absent=0.0, shared=False, residual=False, seed=11)
    case.tensors[MAP][:] = 1
    case.tensors["gemm2_permuted"][1] = torch.arange(16.0)
    case.tensors["expert_weights"][:] = torch.tensor([[0.5, 0.25]])
    assert torch.equal(check(host_library, case)[1][0], 0.75 * torch.arange(16.0))


@pytest.mark.parametrize(
    ("tokens", "top_k", "rows"),
    [
        (0, 2, 0),
        (0, 2, 5),
        (1, 1, None),
        (1, 8, None),
        (3, 32, None),
        (4, 2, 20),
        (4, 2, 3),
        (4, 2, 0),
        (2, 33, None),
        (3, 64, None),
        (3, 70, 7),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_case10_numbers_of_tokens_routes_and_rows(
    host_library: ctypes.CDLL, tokens: int, top_k: int, rows: int | None, mapped: bool
) -> None:
    check(host_library, make_case(tokens=tokens, top_k=top_k, rows=rows, hidden=40, mapped=mapped, seed=12))


@EACH_DTYPE
@pytest.mark.parametrize("hidden", [1, 7, 8, 66, 1000, 1025, 2048, 2688, 2880, 3584, 5120, 7168, 8192, 16384])
def test_case11_hidden_sizes(host_library: ctypes.CDLL, dtype: torch.dtype, hidden: int) -> None:
    check(host_library, make_case(tokens=3, top_k=2, hidden=hidden, dtype=dtype, seed=13))


@EACH_DTYPE
@pytest.mark.parametrize("hidden", [16392, 33001])
def test_hidden_sizes_wider_than_a_ctas_registers(host_library: ctypes.CDLL, dtype: torch.dtype, hidden: int) -> None:
    check(host_library, make_case(tokens=2, top_k=3, hidden=hidden, dtype=dtype, seed=14))
    check(host_library, make_case(tokens=2, top_k=3, hidden=hidden, dtype=dtype, norm=False, seed=14))


def test_a_wide_hidden_with_more_routes_than_one_chunk(host_library: ctypes.CDLL) -> None:
    check(host_library, make_case(tokens=2, top_k=70, rows=9, hidden=16400, dtype=BF16, seed=15))


@EACH_DTYPE
@pytest.mark.parametrize(("hidden", "stride"), [(2688, 2816), (64, 67), (66, 72), (7, 8)])
def test_case12_padded_rows(host_library: ctypes.CDLL, dtype: torch.dtype, hidden: int, stride: int) -> None:
    check(host_library, make_case(tokens=3, hidden=hidden, stride=stride, dtype=dtype, seed=16))


@EACH_DTYPE
def test_pointers_that_are_not_aligned_to_16_bytes(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case(hidden=256, dtype=dtype, gate=True, seed=17)
    aligned = check(host_library, case)
    moved = check(host_library, case, shift=1)
    assert torch.equal(aligned[1], moved[1])  # an element's sum has the same order in every tactic


def test_case14_one_plus_gamma_in_fp32(host_library: ctypes.CDLL) -> None:
    case = make_case(hidden=512, dtype=BF16, gamma_dtype=BF16, seed=18, weight_bias=1.0)
    case.tensors["gamma"] = (torch.randn(512, generator=torch.Generator().manual_seed(18)) * 2**-9).to(BF16)
    norm = check(host_library, case)[0]
    case.tensors["gamma"] = case.tensors["gamma"] + 1  # in bf16: most of gamma is lost
    case.attributes["weight_bias"] = 0.0
    assert not torch.equal(run(host_library, case)[0], norm)


@EACH_DTYPE
def test_case15_both_orders_of_gamma_and_cast(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    results = []
    for before_cast in (1, 0):
        case = make_case(hidden=1024, dtype=dtype, seed=19, weight_before_cast=before_cast)
        norm, hidden = check(host_library, case)
        wide = hidden.double()
        normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        gamma = case.tensors["gamma"].double()
        expected = normed * gamma if before_cast else normed.to(dtype).double() * gamma
        assert (norm.double() - expected).abs().max() <= 2 * UNIT[dtype] * expected.abs().max()
        results.append(norm)
    assert torch.equal(results[0], results[1]) == (dtype == FP32)


def test_case16_the_norm_reads_the_rounded_value(host_library: ctypes.CDLL) -> None:
    """256 + 0.99 is 256 in bf16; the unrounded sums would give 0.9961 of the norm beside it, which is 0.9922."""
    case = make_case(tokens=1, top_k=1, hidden=8, dtype=BF16, shared=False, absent=0.0, eps=0.0, seed=20)
    case.tensors["residual"][:] = 256
    case.tensors["gemm2_permuted"][:] = torch.tensor([0.99, 0, 0, 0, 0, 0, 0, 0]).to(BF16)
    case.tensors["expert_weights"][:] = 1.0
    case.tensors["gamma"][:] = torch.tensor([1.0] * 8)
    norm, hidden = check(host_library, case)
    assert torch.equal(hidden, torch.full((1, 8), 256.0, dtype=BF16))
    assert torch.equal(norm, torch.ones(1, 8, dtype=BF16))


@pytest.mark.parametrize("size", [300.0, 5000.0, 60000.0])
def test_case17_large_fp16_hidden_stays_finite(host_library: ctypes.CDLL, size: float) -> None:
    case = make_case(tokens=2, hidden=4096, dtype=FP16, shared=False, absent=1.0, seed=21)
    case.tensors["residual"] = (case.tensors["residual"].sign() * size).to(FP16)
    assert all(torch.isfinite(output).all() for output in check(host_library, case))


@EACH_DTYPE
def test_case18_gate_multiplies_shared_alone(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case(tokens=5, hidden=64, dtype=dtype, gate=True, seed=22)
    case.tensors["shared_gate"] = torch.tensor([[-200.0], [-3.0], [0.0], [3.0], [200.0]])
    hidden = check(host_library, case)[1]
    closed = make_case(tokens=5, hidden=64, dtype=dtype, shared=False, seed=22)
    closed.tensors |= {name: case.tensors[name] for name in ("gemm2_permuted", "expert_weights", MAP, "residual")}
    assert torch.equal(run(host_library, closed)[1][0], hidden[0])
    opened = Case(case.spec, {name: tensor for name, tensor in case.tensors.items() if name != "shared_gate"})
    assert torch.equal(run(host_library, opened)[1][4], hidden[4])


def test_case35_512_experts_top_22(host_library: ctypes.CDLL) -> None:
    case = make_case(tokens=4, top_k=22, rows=512 * 8, hidden=2688, stride=2816, dtype=BF16, seed=23)
    check(host_library, case)


@EACH_DTYPE
@pytest.mark.parametrize("options", [{}, {"gate": True}, {"shared": False}], ids=["shared", "gate", "routed"])
def test_finalize_add_writes_hidden_alone(
    host_library: ctypes.CDLL, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = make_case(hidden=64, dtype=dtype, norm=False, seed=24, combine_scale=0.5, **options)
    assert len(check(host_library, case)) == 1


def test_every_leading_shape_is_a_list_of_tokens(host_library: ctypes.CDLL) -> None:
    check(host_library, make_case(tokens=6, hidden=24, leading=(2, 3), seed=25))


@st.composite
def calls(draw: Callable[[Any], Any]) -> Call:
    dtype = draw(st.sampled_from([BF16, FP16, FP32]))
    side = st.sampled_from([dtype, FP32])
    hidden = draw(st.integers(1, 80) | st.sampled_from([128, 504, 520, 1032]))
    norm = draw(st.booleans())
    shared = draw(st.booleans())
    options: dict[str, Any] = {
        "combine_scale": draw(st.sampled_from([1.0, 0.22, -3.0])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 0.0])),
        "apply_expert_weights": draw(st.integers(0, 1)),
    }
    if norm:
        options |= {
            "eps": draw(st.sampled_from([0.0, 1e-6, 1e-5])),
            "residual_scale": draw(st.sampled_from([1.0, 0.5])),
            "weight_bias": draw(st.sampled_from([0.0, 1.0])),
            "weight_before_cast": draw(st.integers(0, 1)),
        }
    case = make_case(
        tokens=draw(st.integers(0, 5)),
        top_k=draw(st.integers(1, 12) | st.sampled_from([16, 22, 31, 32, 33, 65])),
        rows=draw(st.none() | st.integers(0, 30)),
        hidden=hidden,
        stride=hidden + draw(st.sampled_from([0, 0, 1, 8])) * (norm or shared),
        dtype=dtype,
        weights_dtype=draw(side),
        gate_dtype=draw(side),
        gamma_dtype=draw(side),
        mapped=draw(st.booleans()),
        absent=draw(st.sampled_from([0.0, 0.3, 1.0])),
        shared=shared,
        gate=draw(st.booleans()),
        residual=draw(st.booleans()),
        norm=norm,
        seed=draw(st.integers(0, 2**31 - 1)),
        **options,
    )
    return Call(
        case,
        shift=draw(st.sampled_from([0, 0, 0, 1])),
        tactic=draw(st.sampled_from([DEFAULT, *TACTICS])),
        device=draw(st.sampled_from([WHOLE_CHIP, ONE_CTA, TWO_CTAS, SM80, SM90_WITH_SM80_CODE])),
    )


@given(calls())
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_any_case(host_library: ctypes.CDLL, call: Call) -> None:
    outputs = run(host_library, call.case, shift=call.shift, tactic=call.tactic, device=call.device)
    if not outputs:  # the tactic does not run this
        outputs = run(host_library, call.case, shift=call.shift, device=call.device)
    judge = Judge(call.case)
    assert judge.faults(outputs) == []
    check_reference(judge, outputs)


@pytest.mark.parametrize(
    ("threads", "registers", "ctas"),
    [
        (32, 32, 32),  # no more than there may be
        (512, 32, 4),  # by threads
        (512, 64, 2),
        (512, 65, 1),  # 72 registers a thread: 28 warps
        (224, 96, 2),  # 20 warps
        (224, 128, 2),  # 16 warps
        (160, 96, 4),
        (512, 255, 1),  # never none
    ],
)
def test_ctas_that_a_multiprocessor_holds(host_library: ctypes.CDLL, threads: int, registers: int, ctas: int) -> None:
    assert host_library.moetrt_host_resident(2048, 32, threads, registers) == ctas


@pytest.mark.parametrize(
    ("device", "capability"), [(WHOLE_CHIP, 90), (SM80, 80), (SM90_WITH_SM80_CODE, 80), (SM90_WITHOUT_CLUSTERS, 89)]
)
def test_features_are_those_of_the_code_and_the_device(host_library: ctypes.CDLL, device: int, capability: int) -> None:
    host_library.moetrt_host_set_device(device)
    mode = ctypes.c_int32(-1)
    assert host_library.moetrt_host_capability(ctypes.byref(mode)) == capability
    assert mode.value == 0, "the thread's capture mode was not given back"
    # The simulator refuses clusters and early starts that the code cannot have.
    case = make_case(tokens=5, hidden=1024, dtype=BF16, programmatic_dependent_launch=1, seed=51)
    cluster_2 = next(tactic for tactic, name in TACTICS.items() if name == "cluster_2")
    assert bool(run(host_library, case, tactic=cluster_2, device=device)) == (capability >= 90)
    assert Judge(case).faults(run(host_library, case, device=device)) == []


@pytest.mark.parametrize("tactic", TACTICS)
def test_a_cta_has_no_more_warps_than_hold_the_hidden_state(host_library: ctypes.CDLL, tactic: int) -> None:
    name = TACTICS[tactic]
    ctas = int(name.removeprefix("cluster_")) if name.startswith("cluster") else 1
    held = {"cta_16": 16, "cta_32": 32, "scalar": 16}.get(name, 8) * ctas
    for hidden in (1, 8, 256, 264, 2048, 2880, 7168, 16384, 100_000):
        threads = host_library.moetrt_host_threads(tactic, hidden)
        assert threads % 32 == 0
        assert threads == 512 or (threads - 32) * held < hidden <= threads * held


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_tokens": -1}, "num_tokens is -1, taken is 0 to 2147483647"),
    ({"top_k": 0}, "top_k is 0, taken is 1 to 2147483647"),
    ({"num_rows": -1}, "num_rows is -1, taken is 0 or more"),
    ({"hidden_size": 0}, "hidden_size is 0, taken is 1 or more"),
    ({"row_stride": 63}, "row_stride is 63, taken is hidden_size (64) or more"),
    ({MAP: None, "num_rows": 17}, f"num_rows is 17, taken is num_tokens * top_k (18) without {MAP}"),
    ({"row_stride": 2**60, "num_rows": 16}, "give arrays of 2^63 bytes or more"),
    ({"num_tokens": 2**31 - 1, "top_k": 2**31 - 1}, "top_k 2147483647 and hidden_size 64 give arrays of 2^63 bytes"),
    ({"dtype": 3}, "dtype is 3, taken is 0 (float32), 1 (float16) or 2 (bfloat16)"),
    ({"weights_dtype": 1}, "weights_dtype is float16, taken is bfloat16 (as dtype) or float32"),
    ({"gate_dtype": 9}, "gate_dtype is 9, taken is bfloat16 (as dtype) or float32"),
    ({"gamma_dtype": 1}, "gamma_dtype is float16, taken is bfloat16 (as dtype) or float32"),
    ({"dtype": 0}, "gamma_dtype is bfloat16, taken is float32"),
    ({"weight_before_cast": 2}, "weight_before_cast is 2, taken is 0 or 1"),
    ({"apply_expert_weights": -1}, "apply_expert_weights is -1, taken is 0 or 1"),
    ({"programmatic_dependent_launch": 2}, "programmatic_dependent_launch is 2, taken is 0 or 1"),
    ({"eps": -1.0}, "eps is -1.000000, taken is a finite number, 0 or more"),
    ({"eps": float("nan")}, "eps is nan, taken is a finite number, 0 or more"),
    ({"weight_bias": 0.5}, "weight_bias is 0.500000, taken is 0 or 1"),
    ({"residual_scale": float("inf")}, "residual_scale is inf, taken is a finite number"),
    ({"combine_scale": float("nan")}, "combine_scale is nan, taken is a finite number"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf, taken is a finite number"),
    ({"shared_output": None}, "shared_gate is given without shared_output"),
    ({"norm_out": None}, "norm_out is null, taken is an array where gamma is given"),
    ({"gamma": None}, "gamma is null, taken is an array where norm_out is given"),
    ({"residual_out": None}, "residual_out is null, taken is an array"),
    ({"gemm2_permuted": None}, "gemm2_permuted is null, taken is an array where num_rows is not 0"),
    ({"expert_weights": None}, "expert_weights is null, taken is an array unless apply_expert_weights is 0"),
    (
        {"residual": 3},
        "residual is at an address that is no multiple of its element size, taken is one that is a multiple of 2",
    ),
    ({"norm_out": "residual"}, "norm_out overlaps residual, taken are outputs that lie apart"),
    ({"residual_out": "norm_out"}, "residual_out overlaps norm_out, taken are outputs that lie apart"),
]


def complete(tokens: int = 6) -> tuple[MoEFinalizeParams, list[torch.Tensor]]:
    """Parameters with every operand given, and the tensors that they point to."""
    case = make_case(tokens=tokens, hidden=64, dtype=BF16, gate=True, seed=26)
    params = parameters(case)
    operands = case.tensors | {name: torch.zeros(tokens, 64, dtype=BF16) for name in ("norm_out", "residual_out")}
    for name, tensor in operands.items():
        setattr(params, name, tensor.data_ptr())
    return params, list(operands.values())


@pytest.mark.parametrize(("change", "line"), REFUSALS, ids=[next(iter(change)) for change, _ in REFUSALS])
def test_what_is_not_taken_is_refused_by_name(host_library: ctypes.CDLL, change: dict[str, Any], line: str) -> None:
    params, tensors = complete()
    for name, value in change.items():
        setattr(params, name, getattr(params, value) if isinstance(value, str) else value)
    assert host_library.moetrt_moe_finalize(ctypes.byref(params), None) != 0
    said = host_library.moetrt_last_error().decode()
    assert line in said
    assert "\n" not in said
    params, tensors = complete()
    assert host_library.moetrt_moe_finalize(ctypes.byref(params), None) == 0
    assert host_library.moetrt_last_error() == b""
    del tensors


def test_null_pointers_are_taken_where_there_is_nothing_to_read(host_library: ctypes.CDLL) -> None:
    params, tensors = complete()
    params.expert_weights, params.apply_expert_weights = None, 0
    assert host_library.moetrt_moe_finalize(ctypes.byref(params), None) == 0
    nothing = MoEFinalizeParams(num_tokens=0, top_k=2, row_stride=8, hidden_size=8, apply_expert_weights=1)
    assert host_library.moetrt_moe_finalize(ctypes.byref(nothing), None) == 0
    del tensors


def test_an_array_of_no_rows_may_point_into_an_output(host_library: ctypes.CDLL) -> None:
    params, tensors = complete()
    tensors[2].fill_(-1)  # the map
    params.num_rows, params.gemm2_permuted = 0, params.residual_out + 16
    assert host_library.moetrt_moe_finalize(ctypes.byref(params), None) == 0, host_library.moetrt_last_error()
    params.num_rows = 1
    assert host_library.moetrt_moe_finalize(ctypes.byref(params), None) != 0
    assert b"residual_out overlaps gemm2_permuted" in host_library.moetrt_last_error()
