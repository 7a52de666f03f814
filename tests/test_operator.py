"""The PyTorch reference, the torch.library op and the functional front against an independent float64 loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import moetrt
import moetrt.torch_op
from moetrt.reference import reference
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OPERATORS
from tests.operator_cases import Case, gold, make_case, random_cases

# Half a unit in the last place of one rounding to the dtype, times the few roundings that norm_out goes through.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def check(case: Case, tolerance: float | None = None) -> tuple[torch.Tensor, ...]:
    """Runs the reference, compares it with the gold, and returns what it gave."""
    got = reference(case.spec, case.tensors, case.attributes)
    dtype = case.tensors["gemm2_permuted"].dtype
    for output, wanted in zip(got, gold(case), strict=True):
        assert output.dtype == dtype
        assert tuple(output.shape) == wanted.shape
        actual = output.double().numpy()
        assert (np.isnan(actual) == np.isnan(wanted)).all()
        scale = np.nanmax(np.abs(wanted), initial=1e-3)
        assert np.nanmax(np.abs(actual - wanted), initial=0.0) <= (tolerance or TOLERANCE[dtype]) * scale
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", ["data", "float32"])
@pytest.mark.parametrize("norm", [True, False])
def test_case03_weights_of_the_rows_dtype_or_float32(dtype: torch.dtype, weights_dtype: str, norm: bool) -> None:
    check(make_case(dtype=dtype, weights_dtype=dtype if weights_dtype == "data" else torch.float32, norm=norm))


def test_case01_sums_in_float32() -> None:
    case = make_case(tokens=64, top_k=8, hidden=512, dtype=torch.bfloat16, absent=0, norm=False, shared=False)
    wanted = gold(case)[0]
    ours = reference(case.spec, case.tensors, {})[0].double().numpy()
    routes = case.tensors["gemm2_permuted"][case.tensors["expanded_idx_to_permuted_idx"].long()]
    running = torch.zeros(64, 512, dtype=torch.bfloat16)
    for k in range(8):
        running += routes[:, k] * case.tensors["expert_weights"][:, k, None].to(torch.bfloat16)
    error, running_error = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (ours, running.double().numpy()))
    assert error < running_error / 2


@pytest.mark.parametrize("shared", [True, False])
def test_case04_scaling_factor_multiplies_the_routed_part_once(shared: bool) -> None:
    check(make_case(shared=shared, norm=False, routed_scaling_factor=2.5))
    plain = make_case(shared=shared, norm=False, absent=0)
    scaled = Case(plain.spec, plain.tensors, {"routed_scaling_factor": 2.5})
    shared_output = plain.tensors["shared_output"] if shared else 0
    one, more = (reference(case.spec, case.tensors, case.attributes)[0] for case in (plain, scaled))
    torch.testing.assert_close(more - shared_output, 2.5 * (one - shared_output), atol=1e-5, rtol=1e-5)


def test_case05_weights_applied_on_the_input_are_ignored() -> None:
    case = make_case(apply_expert_weights=False)
    case.tensors["expert_weights"][:] = float("nan")
    outputs = check(case)
    assert not torch.isnan(outputs[0]).any()


@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
def test_case06_rows_that_no_route_names_are_never_read(absent: float) -> None:
    case = make_case(rows=40, stride=12, absent=absent)
    # A weight of a route that is not here may be anything.
    case.tensors["expert_weights"][case.tensors["expanded_idx_to_permuted_idx"] == -1] = float("nan")
    outputs = check(case)
    assert not torch.isnan(outputs[0]).any()
    if absent == 1.0:
        torch.testing.assert_close(outputs[1], case.tensors["shared_output"] + case.tensors["residual"])


@pytest.mark.parametrize("entry", ["R", "R+1", "2^31-1", "-2", "-2^31"])
def test_case08_map_entries_outside_make_that_token_nan(entry: str) -> None:
    case = make_case(rows=20)
    value = {"R": 20, "R+1": 21, "2^31-1": 2**31 - 1, "-2": -2, "-2^31": -(2**31)}[entry]
    case.tensors["expanded_idx_to_permuted_idx"][2, 1] = value
    for output in check(case):
        assert torch.isnan(output[2]).all()
        assert not torch.isnan(output[[0, 1, 3, 4, 5]]).any()


def test_case09_two_routes_of_one_row_count_twice() -> None:
    case = make_case(tokens=2, top_k=2, norm=False, shared=False, absent=0)
    case.tensors["expanded_idx_to_permuted_idx"][:] = torch.tensor([[1, 1], [0, 1]])
    case.tensors["gemm2_permuted"][:2] = torch.tensor([[1.0], [10.0]])
    case.tensors["expert_weights"][:] = 0.5
    hidden = check(case)[0]
    assert hidden[:, 0].tolist() == [10.0, 5.5]


@pytest.mark.parametrize(
    ("tokens", "top_k", "rows"), [(0, 3, 0), (1, 3, 3), (5, 1, 5), (2, 32, 64), (3, 2, 50), (30, 4, 7), (4, 2, 0)]
)
def test_case10_sizes(tokens: int, top_k: int, rows: int) -> None:
    check(make_case(tokens=tokens, top_k=top_k, rows=rows))


@pytest.mark.parametrize("hidden", [1, 7, 66, 1000, 2688, 2880, 16384])
def test_case11_hidden_sizes(hidden: int) -> None:
    check(make_case(hidden=hidden, tokens=3))


def test_case12_rows_longer_than_hidden() -> None:
    check(make_case(hidden=2688, stride=2816, tokens=3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case13_gamma_in_float32(dtype: torch.dtype) -> None:
    check(make_case(dtype=dtype, gamma_dtype=torch.float32))


@pytest.mark.parametrize("weight_before_cast", [True, False])
def test_case14_gamma_near_zero_with_bias_one(weight_before_cast: bool) -> None:
    case = make_case(tokens=64, dtype=torch.bfloat16, weight_bias=1.0, weight_before_cast=weight_before_cast)
    case.tensors["gamma"][:] = 0.0059  # 1.0059 lies between two bfloat16 values
    norm = check(case)[0]
    added_in_bfloat16 = case.tensors | {"gamma": 1 + case.tensors["gamma"]}
    lost = reference(case.spec, added_in_bfloat16, case.attributes | {"weight_bias": 0.0})[0]
    assert not torch.equal(norm, lost)


def test_case15_both_orders_of_gamma_and_cast() -> None:
    base = make_case(dtype=torch.bfloat16, tokens=32, hidden=64)
    first, second = (reference(base.spec, base.tensors, {"weight_before_cast": flag})[0] for flag in (True, False))
    x = reference(base.spec, base.tensors, {})[1].float()
    normalised = x * (1 / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6))
    gamma = base.tensors["gamma"]
    assert torch.equal(first, (normalised * gamma.float()).bfloat16())
    assert torch.equal(second, normalised.bfloat16() * gamma)
    assert not torch.equal(first, second)


def test_case16_the_norm_reads_the_rounded_sum() -> None:
    case = make_case(dtype=torch.bfloat16, tokens=32, hidden=64)
    norm, stored = reference(case.spec, case.tensors, {})
    x = stored.float()
    wanted = x * (1 / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)) * case.tensors["gamma"].float()
    assert torch.equal(norm, wanted.bfloat16())


@pytest.mark.parametrize("size", [300.0, 6000.0, 60000.0])
def test_case17_large_float16_values_have_a_finite_norm(size: float) -> None:
    case = make_case(dtype=torch.float16, hidden=4096, tokens=2, absent=1.0, shared=False)
    case.tensors["residual"][:] = size
    norm, _ = check(case)
    torch.testing.assert_close(norm, case.tensors["gamma"].expand(2, -1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_case18_the_gate_multiplies_the_shared_part_only(gate_dtype: torch.dtype) -> None:
    case = make_case(dtype=torch.bfloat16, gate=True, gate_dtype=gate_dtype, norm=False)
    check(case)
    case.tensors["shared_gate"][:] = -200.0
    without = {name: t for name, t in case.tensors.items() if not name.startswith("shared")}
    assert torch.equal(reference(case.spec, case.tensors, {})[0], reference(case.spec, without, {})[0])


@pytest.mark.parametrize("leading", [(6,), (2, 3), (1, 6), (3, 2, 1)])
def test_case20_outputs_have_the_shape_of_the_residual(leading: tuple[int, ...]) -> None:
    for output in check(make_case(leading=leading)):
        assert tuple(output.shape) == (*leading, 8)


@settings(deadline=None, max_examples=80)
@given(case=random_cases())
def test_random_cases(case: Case) -> None:
    # A token whose sum cancels to nearly nothing has a norm that amplifies the rounding of the sum.
    dtype = case.tensors["gemm2_permuted"].dtype
    outputs = reference(case.spec, case.tensors, case.attributes)
    wanted = gold(case)
    sums = outputs[-1].double().numpy()
    scale = np.abs(wanted[-1]).max(initial=1e-3)
    assert np.abs(sums - wanted[-1]).max(initial=0.0) <= TOLERANCE[dtype] * scale * 4
    x = torch.from_numpy(sums)
    if case.spec is FINALIZE_ADD_RMS_NORM and x.numel():
        eps = np.float64(np.float32(case.attributes["eps"]))
        inverse = 1 / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        from_stored = x * inverse * (case.tensors["gamma"].double() + case.attributes["weight_bias"])
        torch.testing.assert_close(
            outputs[0].double(), from_stored, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2
        )


def test_float64_rows_are_computed_in_float64() -> None:
    case = make_case(dtype=torch.float64, weights_dtype=torch.float64)
    check(case, tolerance=1e-12)


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)
def test_the_op_is_a_sound_torch_library_op(spec: object) -> None:
    case = make_case(norm=spec is FINALIZE_ADD_RMS_NORM, gate=True, leading=(2, 3), absent=0)
    # Rows that nobody names hold NaN, which opcheck would compare.
    case.tensors["gemm2_permuted"].nan_to_num_(0.0)
    arguments = tuple(case.tensors.get(entry.name) for entry in case.spec.inputs)
    op = getattr(torch.ops.moetrt, case.spec.torch_name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_fake_shapes_and_dtypes() -> None:
    with torch.device("meta"):
        rows = torch.empty(20, 12, dtype=torch.bfloat16)
        weights, index = torch.empty(6, 3), torch.empty(6, 3, dtype=torch.int32)
        gamma = torch.empty(8)
        norm, stored = torch.ops.moetrt.moe_finalize_add_rms_norm(rows, weights, index, None, None, None, gamma)
        hidden = torch.ops.moetrt.moe_finalize_add(rows, weights, index, None, None)
    assert norm.shape == stored.shape == (6, 8)
    assert norm.dtype == hidden.dtype == torch.bfloat16
    assert hidden.shape == (6, 12)


BAD = {
    "map of int64": ({"expanded_idx_to_permuted_idx": torch.zeros(6, 3, dtype=torch.int64)}, "int64; int32 is taken"),
    "case02 flat map": (
        {"expanded_idx_to_permuted_idx": torch.zeros(18, dtype=torch.int32)},
        r"expanded_idx_to_permuted_idx was \[18\]; rank 2, \[T, K\], is taken",
    ),
    "map of another shape": (
        {"expanded_idx_to_permuted_idx": torch.zeros(6, 2, dtype=torch.int32)},
        r"was \[6, 2\]; \[T, K\] = \[6, 3\]",
    ),
    "rows of rank 3": ({"gemm2_permuted": torch.zeros(2, 9, 8)}, r"gemm2_permuted was \[2, 9, 8\]; rank 2"),
    "rows of int8": ({"gemm2_permuted": torch.zeros(18, 8, dtype=torch.int8)}, "gemm2_permuted was int8; bfloat16 or"),
    "rows narrower than H": ({"gemm2_permuted": torch.zeros(18, 7)}, r"was \[18, 7\]; Hp >= H = 8"),
    "weights of float16": (
        {"expert_weights": torch.zeros(6, 3).half()},
        "expert_weights was float16; float32 is taken",
    ),
    "no routes": ({"expert_weights": torch.zeros(6, 0)}, r"expert_weights was \[6, 0\]; K >= 1"),
    "shared of another dtype": ({"shared_output": torch.zeros(6, 8).half()}, "shared_output was float16; float32"),
    "shared of another width": ({"shared_output": torch.zeros(6, 9)}, r"shared_output was \[6, 9\]; a last dimension"),
    "residual of another length": ({"residual": torch.zeros(2, 4, 8)}, r"residual was \[2, 4, 8\].*multiply to T = 6"),
    "residual of rank 1": ({"residual": torch.zeros(8)}, r"residual was \[8\]; rank 2 or more"),
    "gamma of rank 2": ({"gamma": torch.zeros(1, 8)}, r"gamma was \[1, 8\]; rank 1"),
    "gate of rank 1": ({"shared_gate": torch.zeros(6)}, r"shared_gate was \[6\]; rank 2"),
    "gate of another width": ({"shared_gate": torch.zeros(6, 2)}, r"shared_gate was \[6, 2\]; \[T, 1\] = \[6, 1\]"),
    "gate without shared": ({"shared_gate": torch.zeros(6, 1), "shared_output": None}, "without shared_output"),
    "no map, too many rows": (
        {"expanded_idx_to_permuted_idx": None, "gemm2_permuted": torch.zeros(20, 8)},
        r"gemm2_permuted was \[20, 8\]; R = T\*K = 18 rows",
    ),
    "gamma missing": ({"gamma": None}, "gamma is missing"),
    "unknown input": ({"bias": torch.zeros(8)}, "input bias is unknown; taken are gemm2_permuted"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_is_not_taken_is_named(changes: dict[str, torch.Tensor | None], message: str) -> None:
    case = make_case()
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        reference(case.spec, case.tensors | changes, {})
    assert isinstance(raised.value, moetrt.MoetrtError)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("eps", -1e-6, "eps was -1e-06; a finite float of at least 0 is taken"),
        ("eps", float("nan"), "eps was nan"),
        ("eps", "1e-6", "eps was '1e-6'; a float is taken"),
        ("eps", True, "eps was True"),
        ("weight_bias", 0.5, "weight_bias was 0.5; 0 or 1 is taken"),
        ("weight_before_cast", 2, "weight_before_cast was 2; 0 or 1 is taken"),
        ("apply_expert_weights", 1.0, "apply_expert_weights was 1.0; 0 or 1 is taken"),
        ("routed_scaling_factor", float("inf"), "routed_scaling_factor was inf; a finite float is taken"),
        ("residual_scale", 1e39, r"residual_scale was 1e\+39; a finite float is taken"),
        pytest.param("eps", 10**400, "eps was 1000", id="eps-10**400"),
        ("epsilon", 1e-6, "attribute epsilon is unknown; taken are apply_expert_weights"),
    ],
)
def test_attributes_that_are_not_taken_are_named(name: str, value: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        reference(FINALIZE_ADD_RMS_NORM, make_case().tensors, {name: value})


def test_the_front_is_the_op() -> None:
    case = make_case(gate=True)
    tensors = case.tensors
    routed = moetrt.UnfinalizedMoEOutput(
        tensors["gemm2_permuted"], tensors["expert_weights"], tensors["expanded_idx_to_permuted_idx"]
    )
    moe_output = moetrt.MoEOutput(routed, tensors["shared_output"], 2.5)
    norm = moetrt.finalize_add_rms_norm(
        moe_output, tensors["residual"], tensors["gamma"], 1e-5, shared_gate=tensors["shared_gate"], weight_bias=1.0
    )
    wanted = reference(case.spec, tensors, {"eps": 1e-5, "routed_scaling_factor": 2.5, "weight_bias": 1.0})
    for a, b in zip(norm, wanted, strict=True):
        assert torch.equal(a, b)
    hidden = moetrt.finalize_add(moe_output, shared_gate=tensors["shared_gate"], combine_scale=0.5)
    names = [entry.name for entry in FINALIZE_ADD.inputs]
    given_ = {name: tensors[name] for name in names}
    wanted = reference(FINALIZE_ADD, given_, {"combine_scale": 0.5, "routed_scaling_factor": 2.5})
    assert torch.equal(hidden, wanted[0])


def test_case19_tensor_parallel_ranks_add_the_shared_part_once() -> None:
    """Two ranks with half of the routes each; one of them is given the shared expert, and the all-reduce is a sum."""
    whole = make_case(absent=0, norm=False)
    index = whole.tensors["expanded_idx_to_permuted_idx"]
    mine = torch.arange(index.numel()).view(index.shape) % 2 == 0
    total = torch.zeros_like(whole.tensors["shared_output"])
    for rank in (0, 1):
        here = torch.where(mine if rank == 0 else ~mine, index, torch.tensor(-1, dtype=torch.int32))
        tensors = whole.tensors | {"expanded_idx_to_permuted_idx": here}
        if rank == 1:
            del tensors["shared_output"]
        total += reference(FINALIZE_ADD, tensors, {})[0]
    torch.testing.assert_close(total, reference(FINALIZE_ADD, whole.tensors, {})[0])
