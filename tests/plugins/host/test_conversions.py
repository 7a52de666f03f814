"""The stand-ins' fp16 and bf16 conversions are exact: all 65536 patterns, all ties and their neighbours."""

import ctypes

import numpy as np
import pytest
import torch

from tests.plugins.host.host_kernel import DTYPES

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
PATTERNS = np.arange(65536, dtype=np.uint16)


def widen(library: ctypes.CDLL, dtype: torch.dtype, patterns: np.ndarray) -> np.ndarray:
    result = np.empty(patterns.size, np.float32)
    library.moetrt_host_widen(
        DTYPES[dtype], patterns.ctypes.data_as(ctypes.c_void_p), result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(patterns.size),
    )  # fmt: skip
    return result


def narrow(library: ctypes.CDLL, dtype: torch.dtype, values: np.ndarray) -> np.ndarray:
    result = np.empty(values.size, np.uint16)
    library.moetrt_host_narrow(
        DTYPES[dtype], values.ctypes.data_as(ctypes.c_void_p), result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(values.size),
    )  # fmt: skip
    return result


@BOTH
def test_every_pattern_widens_as_torch_does(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    expected = torch.from_numpy(PATTERNS.view(np.int16)).view(dtype).float().numpy()
    found = widen(host_library, dtype, PATTERNS)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@BOTH
def test_values_narrow_as_torch_does(host_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    each = widen(host_library, dtype, PATTERNS)
    each = np.sort(each[np.isfinite(each)])
    with np.errstate(over="ignore"):
        ties = ((each[:-1].astype(np.float64) + each[1:]) / 2).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    edges = np.array([65504, 65519.996, 65520, 65536, 3.4e38, np.inf, -np.inf, np.nan, 1e-45, -0.0], np.float32)
    base = np.concatenate([each, ties, random, edges])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        up, down = np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))
    values = np.concatenate([base, up, down])
    expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    found = narrow(host_library, dtype, values)
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], expected[~nan])
    assert (found[nan] == 0x7FFF).all()
