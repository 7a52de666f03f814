"""Gives cases to the kernel's host build and judges its numbers.

A result is judged against float64. residual_out may differ from the exact sum by one rounding to the rows' dtype and a
few roundings in float32; norm_out is judged against the float64 norm of the residual_out that the kernel itself wrote,
which is what it must have read.
"""

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moetrt.library import MoEFinalizeParams
from moetrt.spec import FINALIZE_ADD_RMS_NORM
from tests.operator_cases import Case, gold

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Half the distance from 1 to the next number, and half the distance between subnormals.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}

ARRAYS = tuple(name for name, kind in MoEFinalizeParams._fields_ if kind is ctypes.c_void_p)
ROWS_DTYPE_ARRAYS = ("gemm2_permuted", "shared_output", "residual", "norm_out", "residual_out")


def load(path: Path) -> ctypes.CDLL:
    """The library, its functions declared."""
    library = ctypes.CDLL(str(path))
    library.moetrt_last_error.restype = ctypes.c_char_p
    params = ctypes.POINTER(MoEFinalizeParams)
    library.moetrt_moe_finalize.argtypes = (params, ctypes.c_void_p)
    library.moetrt_moe_finalize_with_tactic.argtypes = (params, ctypes.c_int32, ctypes.c_void_p)
    library.moetrt_host_set_device.argtypes = (ctypes.c_int32,)
    library.moetrt_host_runs.argtypes = (params, ctypes.c_int32)
    library.moetrt_host_threads.argtypes = (ctypes.c_int32, ctypes.c_int64)
    library.moetrt_host_threads.restype = ctypes.c_int64
    library.moetrt_host_resident.argtypes = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    library.moetrt_host_resident.restype = ctypes.c_int64
    return library


def parameters(case: Case) -> MoEFinalizeParams:
    """The struct for a case, its pointers still null."""
    tensors = case.tensors
    tokens, top_k = tensors["expert_weights"].shape
    rows, stride = tensors["gemm2_permuted"].shape
    dtype = tensors["gemm2_permuted"].dtype
    values = case.spec.complete(case.attributes)
    wide = next((tensors[name] for name in ("gamma", "residual", "shared_output") if name in tensors), None)
    return MoEFinalizeParams(
        num_tokens=tokens,
        top_k=top_k,
        num_rows=rows,
        row_stride=stride,
        hidden_size=stride if wide is None else wide.shape[-1],
        dtype=DTYPES[dtype],
        weights_dtype=DTYPES[tensors["expert_weights"].dtype],
        gate_dtype=DTYPES[tensors["shared_gate"].dtype if "shared_gate" in tensors else dtype],
        gamma_dtype=DTYPES[tensors["gamma"].dtype if "gamma" in tensors else dtype],
        eps=values.get("eps", 0.0),
        residual_scale=values.get("residual_scale", 1.0),
        combine_scale=values["combine_scale"],
        routed_scaling_factor=values["routed_scaling_factor"],
        weight_bias=values.get("weight_bias", 0.0),
        weight_before_cast=values.get("weight_before_cast", 1),
        apply_expert_weights=values["apply_expert_weights"],
        programmatic_dependent_launch=values["programmatic_dependent_launch"],
    )


def output_names(case: Case) -> tuple[str, ...]:
    return ("norm_out", "residual_out") if case.spec is FINALIZE_ADD_RMS_NORM else ("residual_out",)


class Guarded:
    """A tensor's memory between two guards, its start moved by ``shift`` elements from a 16-byte boundary."""

    GUARD = 64

    def __init__(self, like: torch.Tensor, shift: int) -> None:
        self.first = self.GUARD + shift
        self.last = self.first + like.numel()
        self.memory = torch.full((self.last + self.GUARD,), 77.0, dtype=like.dtype)
        assert self.memory.data_ptr() % 16 == 0
        self.tensor = self.memory[self.first : self.last].view(like.shape)
        self.tensor.copy_(like)

    def untouched(self) -> bool:
        return bool((self.memory[: self.first] == 77).all() and (self.memory[self.last :] == 77).all())


#: The simulator's devices (simulator.h): a whole chip; chips of SM90 and SM80 that hold so few CTAs at a time that each
#: goes on with another token; and of these, SM90 with code that the driver compiled from SM80's PTX, and without
#: clusters.
WHOLE_CHIP, ONE_CTA, TWO_CTAS, SM80, SM90_WITH_SM80_CODE, SM90_WITHOUT_CLUSTERS = range(6)
DEFAULT = 0
TACTICS = {1: "cta_8", 2: "cta_16", 3: "cta_32", 4: "cluster_2", 5: "cluster_4", 6: "cluster_8", 7: "scalar"}
SCALAR = 7


def run(
    library: ctypes.CDLL, case: Case, *, shift: int = 0, tactic: int = DEFAULT, device: int = WHOLE_CHIP
) -> tuple[torch.Tensor, ...]:
    """Runs a case; ``shift`` moves every tensor of the rows' dtype by that many elements.

    Returns:
        The outputs, in the order of the operator's; nothing where the tactic does not run the case.
    """
    params = parameters(case)
    like = torch.zeros(params.num_tokens, params.hidden_size, dtype=case.tensors["gemm2_permuted"].dtype)
    inputs = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    if shift:
        inputs |= {name: Guarded(inputs[name], shift).tensor for name in ROWS_DTYPE_ARRAYS if name in inputs}
    outputs = {name: Guarded(like, shift) for name in output_names(case)}
    for name, tensor in inputs.items():
        setattr(params, name, tensor.data_ptr())
    for name, output in outputs.items():
        setattr(params, name, output.tensor.data_ptr())
    library.moetrt_host_set_device(device)
    if tactic != DEFAULT and not library.moetrt_host_runs(ctypes.byref(params), tactic):
        return ()
    code = library.moetrt_moe_finalize_with_tactic(ctypes.byref(params), tactic, None)
    assert code == 0, library.moetrt_last_error().decode()
    assert all(output.untouched() for output in outputs.values()), "written beside an output"
    return tuple(output.tensor for output in outputs.values())


@dataclass(frozen=True)
class Call:
    """A case, and how a case runner runs it."""

    case: Case
    shift: int = 0
    tactic: int = DEFAULT
    device: int = WHOLE_CHIP


def run_file(
    runner: Path, calls: list[Call], folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[tuple[torch.Tensor, ...]]]:
    """Runs cases through a case runner.

    Returns:
        The finished process, and the outputs of each case where it succeeded.
    """
    source, result = folder / "cases.bin", folder / "outputs.bin"
    with source.open("wb") as file:
        for call in calls:
            case = call.case
            params = parameters(case)
            dtype = case.tensors["gemm2_permuted"].dtype
            for name, tensor in case.tensors.items():
                setattr(params, name, tensor.nbytes)
            for name in output_names(case):
                setattr(params, name, params.num_tokens * params.hidden_size * dtype.itemsize)
            file.write((ctypes.c_int64 * 3)(call.shift * dtype.itemsize, call.tactic, call.device))
            file.write(params)
            for name in ARRAYS:
                if name in case.tensors:
                    file.write(case.tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    environment = os.environ | {
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    command = [str(runner), str(source), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if "unexpected memory mapping" in done.stderr:
        # A kernel that randomises more address bits than this ThreadSanitizer knows.
        command = ["setarch", "--addr-no-randomize", *command]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    outputs = []
    if done.returncode == 0:
        data = result.read_bytes()
        for case in (call.case for call in calls):
            params = parameters(case)
            tensors = []
            for _ in output_names(case):
                output = torch.empty(params.num_tokens, params.hidden_size, dtype=case.tensors["gemm2_permuted"].dtype)
                flat = output.view(torch.uint8).numpy()
                flat[:] = np.frombuffer(data[: output.nbytes], np.uint8).reshape(flat.shape)
                tensors.append(output)
                data = data[output.nbytes :]
            outputs.append(tuple(tensors))
        assert not data
    return done, outputs


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1, tensor.shape[-1]).to(torch.float64).numpy()


class Judge:
    """What is right for a case, and how far from it an output may be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = case.tensors["gemm2_permuted"].dtype
        unit = UNIT[self.dtype]
        with np.errstate(invalid="ignore", over="ignore"):
            exact = gold(case)[-1]
            self.exact = exact.reshape(-1, exact.shape[-1])
            size = gold(_magnitudes(case))[-1].reshape(self.exact.shape)
            top_k = case.tensors["expert_weights"].shape[1]
            # One rounding of the sum; in fp32 each of the K adds, the sigmoid (3), and the four steps after it.
            self.tolerance = unit * np.abs(self.exact) + (top_k + 8) * 2.0**-24 * (1 + unit) * size
            self.tolerance += HALF_SUBNORMAL[self.dtype]

    def faults(self, outputs: tuple[torch.Tensor, ...]) -> list[str]:
        """What is wrong with the outputs, a line for each that is out of tolerance; empty where all is right."""
        unit, half_subnormal = UNIT[self.dtype], HALF_SUBNORMAL[self.dtype]
        hidden = as_float64(outputs[-1])
        with np.errstate(invalid="ignore", over="ignore"):
            found = _compare("residual_out", hidden, self.exact, self.tolerance)
            if self.case.spec is FINALIZE_ADD_RMS_NORM:
                values = self.case.spec.complete(self.case.attributes)
                eps = np.float64(np.float32(values["eps"]))
                normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + eps)
                gamma = self.case.tensors["gamma"].to(torch.float64).numpy() + values["weight_bias"]
                exact = normed * gamma
                # Squares: at most 32 adds a thread and 16384 elements, 5 in a warp, 8 over a cluster and 5 in a warp
                # again, halved by the root; then the root and two products.
                steps = (32 * (1 + hidden.shape[1] // 16384) + 18) / 2 + 6
                relative = steps * 2.0**-24 + unit + (0 if values["weight_before_cast"] else unit * (1 + unit))
                subnormal = half_subnormal * (1 + (0 if values["weight_before_cast"] else np.abs(gamma)))
                found += _compare("norm_out", as_float64(outputs[0]), exact, relative * np.abs(exact) + subnormal)
        return found


def faults(case: Case, outputs: tuple[torch.Tensor, ...]) -> list[str]:
    """`Judge.faults` of a case that is judged once."""
    return Judge(case).faults(outputs)


def _magnitudes(case: Case) -> Case:
    """The case with every term of the sum positive: its result bounds what fp32 rounding can cost."""
    tensors = {
        name: tensor if name in ("shared_gate", "expanded_idx_to_permuted_idx") else tensor.abs()
        for name, tensor in case.tensors.items()
    }
    attributes = {name: abs(value) for name, value in case.attributes.items()}
    return Case(case.spec, tensors, attributes)


def _compare(name: str, value: np.ndarray, exact: np.ndarray, tolerance: np.ndarray) -> list[str]:
    wrong = np.isnan(value) != np.isnan(exact)
    wrong |= np.abs(value - exact) > tolerance
    if not wrong.any():
        return []
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return [
        f"{name}: {int(wrong.sum())} of {wrong.size} elements, first {where}: "
        f"{value[where]!r} for {exact[where]!r} +- {tolerance[where]!r}"
    ]
