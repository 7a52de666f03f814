"""The torch.library op on CUDA: what it hands to the library, and what it does without one.

There is no GPU here. The function behind the op is given CPU tensors, and instead of the plugin library the recording
one, which keeps what it was given, or the one around the kernel's host build, which computes.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetrt import cuda_op
from moetrt.cuda_op import launch, run_on_cuda
from moetrt.errors import InputError, InputTypeError
from moetrt.library import LIBRARY_VARIABLE, MoEFinalizeParams, PluginLibrary, load_plugin_library
from moetrt.reference import reference
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OPERATORS, OperatorSpec
from tests.operator_cases import Case, make_case
from tests.plugins.host.host_kernel import faults

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@pytest.fixture(scope="session")
def host(driver_build: Path) -> PluginLibrary:
    return load_plugin_library(driver_build / "libmoetrt_hosted.so")


@pytest.fixture(scope="session")
def recording_library(driver_build: Path) -> PluginLibrary:
    return load_plugin_library(driver_build / "libmoetrt_recording.so")


@pytest.fixture(autouse=True)
def forget_the_library() -> Iterator[None]:
    cuda_op._library.cache_clear()
    yield
    cuda_op._library.cache_clear()


def recorded(library: PluginLibrary) -> tuple[MoEFinalizeParams, int | None]:
    params, stream, tactic = MoEFinalizeParams(), ctypes.c_void_p(), ctypes.c_int32()
    library.functions.moetrt_recorded(ctypes.byref(params), ctypes.byref(stream), ctypes.byref(tactic))
    return params, stream.value


CASES: dict[str, dict[str, Any]] = {
    "all": {"gate": True},
    "without a map": {"mapped": False},
    "rows alone": {"shared": False, "residual": False},
    "leading dimensions": {"leading": (2, 3), "hidden": 16, "stride": 24},
    "finalize and add": {"norm": False},
    "finalize": {"norm": False, "shared": False},
    "attributes": {
        "gate": True, "eps": 0.25, "residual_scale": 0.5, "combine_scale": 0.75, "routed_scaling_factor": 2.5,
        "weight_bias": 1.0, "weight_before_cast": 0, "apply_expert_weights": 0,
    },
    "no tokens": {"tokens": 0},
    "no rows": {"rows": 0},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_kernel_gets_the_operands_and_its_numbers_come_back(
    host: PluginLibrary, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    case = make_case(**{"dtype": dtype, **changes})
    outputs = launch(case.spec, case.tensors, case.attributes, host, 0)
    expected = reference(case.spec, case.tensors, case.attributes)
    assert [output.shape for output in outputs] == [tensor.shape for tensor in expected]
    assert [output.dtype for output in outputs] == [dtype] * len(expected)
    assert faults(case, outputs) == []


@pytest.mark.parametrize("side", DTYPES, ids=str)
def test_every_pointer_size_dtype_and_the_stream_is_passed_on(
    recording_library: PluginLibrary, side: torch.dtype
) -> None:
    dtypes = {"dtype": side, "weights_dtype": torch.float32, "gate_dtype": side, "gamma_dtype": torch.float32}
    case = make_case(tokens=6, top_k=3, rows=20, hidden=16, stride=24, gate=True, **dtypes)  # type: ignore[arg-type]
    norm_out, residual_out = launch(case.spec, case.tensors, {"eps": 0.5}, recording_library, 0x5EED0)
    params, stream = recorded(recording_library)
    assert stream == 0x5EED0
    sizes = (params.num_tokens, params.top_k, params.num_rows, params.row_stride, params.hidden_size)
    assert sizes == (6, 3, 20, 24, 16)
    for name, tensor in case.tensors.items():
        assert getattr(params, name) == tensor.data_ptr(), name
    assert (params.norm_out, params.residual_out) == (norm_out.data_ptr(), residual_out.data_ptr())
    assert (params.dtype, params.weights_dtype, params.gate_dtype, params.gamma_dtype) == (
        DTYPES[side],
        0,
        DTYPES[side],
        0,
    )
    assert params.eps == 0.5
    defaults = {entry.name: entry.default for entry in FINALIZE_ADD_RMS_NORM.attributes if entry.name != "eps"}
    assert {name: getattr(params, name) for name in defaults} == defaults


def test_absent_operands_are_null(recording_library: PluginLibrary) -> None:
    case = make_case(norm=False, shared=False, mapped=False)
    (hidden,) = launch(FINALIZE_ADD, case.tensors, {}, recording_library, 0)
    params, stream = recorded(recording_library)
    assert stream is None
    absent = ("expanded_idx_to_permuted_idx", "shared_output", "shared_gate", "residual", "gamma", "norm_out")
    assert [getattr(params, name) for name in absent] == [None] * len(absent)
    assert params.residual_out == hidden.data_ptr()


def test_rows_that_lie_apart_are_not_copied_and_all_else_becomes_dense(recording_library: PluginLibrary) -> None:
    case = make_case(tokens=4, top_k=2, rows=10, hidden=16)
    whole = torch.zeros(10, 40)
    tensors = case.tensors | {
        "gemm2_permuted": whole[:, :16],
        "residual": case.tensors["residual"].t().contiguous().t(),
    }
    launch(case.spec, tensors, {}, recording_library, 0)
    params, _ = recorded(recording_library)
    assert (params.gemm2_permuted, params.row_stride) == (whole.data_ptr(), 40)
    assert params.residual != tensors["residual"].data_ptr()
    for columns in (whole[:, ::2], torch.zeros(40, 10).t(), torch.zeros(1, 40).expand(10, 40)):
        launch(case.spec, tensors | {"gemm2_permuted": columns}, {}, recording_library, 0)
        params, _ = recorded(recording_library)
        assert params.gemm2_permuted != columns.data_ptr()
        assert params.row_stride == columns.shape[1]


def test_dense_copies_hold_the_numbers(host: PluginLibrary) -> None:
    case = make_case(tokens=5, hidden=8, gate=True)
    expected = reference(case.spec, case.tensors, case.attributes)
    spread = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in case.tensors.items()}
    assert not any(tensor.is_contiguous() for tensor in spread.values())
    for got, wanted in zip(launch(case.spec, spread, {}, host, 0), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)
def test_the_op_on_cuda_is_this_one(spec: OperatorSpec) -> None:
    name = f"moetrt::{spec.torch_name}"
    import moetrt.torch_op  # noqa: F401  registers the ops

    for key in ("CUDA", "CompositeExplicitAutograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_without_the_library_the_reference_computes_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    case = make_case()
    expected = reference(case.spec, case.tensors, case.attributes)
    with pytest.warns(UserWarning, match="run as PyTorch code, not as one kernel: .*none.so") as warned:
        outputs = run_on_cuda(case.spec, case.tensors, case.attributes)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run_on_cuda(case.spec, case.tensors, case.attributes)
    for got in (outputs, again):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_float64_rows_are_the_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    case = make_case(dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_on_cuda(case.spec, case.tensors, case.attributes)[0].dtype == torch.float64


def test_tensors_on_several_devices_are_refused(host: PluginLibrary) -> None:
    case = make_case()
    tensors = case.tensors | {"gamma": case.tensors["gamma"].to("meta")}
    with pytest.raises(InputError) as refused:
        cuda_op.launch(case.spec, tensors, {}, host, 0)
    wanted = "MoEFinalizeAddRMSNorm: input gamma was on meta; cpu, where gemm2_permuted is, is taken"
    assert str(refused.value) == wanted


def _returns(library: PluginLibrary) -> Callable[[], PluginLibrary]:
    def get() -> PluginLibrary:
        return library

    get.cache_clear = lambda: None  # type: ignore[attr-defined]
    return get


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": torch.zeros(9)}, InputError, "last dimension of H = 9"),
        ({"expanded_idx_to_permuted_idx": torch.zeros(6, 3, dtype=torch.int64)}, InputTypeError, "int32 is taken"),
        ({"gemm2_permuted": torch.zeros(18, 8, dtype=torch.float64)}, InputTypeError, "was float64"),
    ],
    ids=["shape", "dtype", "float64"],
)
def test_what_the_operator_does_not_take_is_refused(
    recording_library: PluginLibrary, change: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    case: Case = make_case()
    with pytest.raises(error, match=message):
        launch(case.spec, case.tensors | change, {}, recording_library, 0)


def test_a_kernel_that_cannot_start_is_an_error_and_shown_once(
    library: PluginLibrary, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu runs the op on it")
    case = make_case()
    with pytest.raises(InputError, match="the kernel was not started: cudaError"):
        launch(case.spec, case.tensors, case.attributes, library, 0)
    assert capfd.readouterr().err == ""
