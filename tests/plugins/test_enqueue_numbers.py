"""The plugin's own enqueue down to the numbers, without a GPU: the plugin around the kernel's host build.

The simulator plays a chip of SM90, so that the plugin offers every tactic. tests/gpu runs the same cases on a GPU.
"""

from pathlib import Path

import pytest
import torch

from moetrt.cuda_op import launch
from moetrt.library import load_plugin_library
from tests.operator_cases import make_case
from tests.plugins.driver import Driver
from tests.plugins.operator_runs import CASES, Prepared, case_named, check, wrong_entries


@pytest.mark.parametrize("name", CASES)
def test_every_case_with_every_tactic(hosted: Driver, name: str) -> None:
    check(hosted, case_named(name, torch.bfloat16, seed=1), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["all operands", "finalize and add", "case11 H=1000", "case11 H=2880"])
def test_every_dtype(hosted: Driver, name: str, dtype: torch.dtype) -> None:
    check(hosted, case_named(name, dtype, seed=2), device="cpu")


def test_several_tactics_are_offered_and_run(hosted: Driver) -> None:
    prepared = Prepared(hosted, case_named("case10 one token", torch.bfloat16, seed=3), device="cpu")
    assert len(prepared.tactics) >= 4


def test_case08_a_wrong_map_entry_makes_its_token_nan_and_no_other(hosted: Driver) -> None:
    for outputs in check(hosted, wrong_entries(torch.bfloat16, seed=4), device="cpu"):
        for output in outputs:
            assert output.isnan().all(-1).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("shift", [1, 4])
def test_pointers_that_are_not_aligned_to_16_bytes(hosted: Driver, shift: int) -> None:
    # Tactics are chosen before there are pointers; one that does not run these gives way to one that does.
    case = make_case(hidden=512, gate=True, dtype=torch.bfloat16, weights_dtype=torch.bfloat16, seed=5)
    check(hosted, case, device="cpu", shift=shift)


def test_pytorchs_operator_and_an_engine_run_the_same_kernel(hosted: Driver, driver_build: Path) -> None:
    case = case_named("DeepSeek-V3", torch.bfloat16, seed=6)
    library = load_plugin_library(driver_build / "libmoetrt_hosted.so")
    through_torch = launch(case.spec, case.tensors, case.attributes, library, 0)
    for got, wanted in zip(through_torch, Prepared(hosted, case, device="cpu").results(), strict=True):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
