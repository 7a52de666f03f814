"""The plugin's own enqueue on a GPU: every case with every tactic, poisoned outputs, guards, graphs and streams."""

import math

import pytest
import torch

from moetrt.library import PluginLibrary
from tests.operator_cases import make_case
from tests.plugins.driver import Driver
from tests.plugins.host.host_kernel import Judge
from tests.plugins.operator_runs import CASES, DTYPES, MAP, Guarded, Prepared, case_named, check, wrong_entries

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])


@EACH_DTYPE
@pytest.mark.parametrize("name", CASES)
def test_every_case_with_every_tactic(
    driver: Driver, on_gpu: PluginLibrary, name: str, dtype: torch.dtype, seed: int
) -> None:
    check(driver, case_named(name, dtype, seed))


@EACH_DTYPE
def test_case08_a_wrong_map_entry_makes_its_token_nan_and_no_other(
    driver: Driver, on_gpu: PluginLibrary, dtype: torch.dtype, seed: int
) -> None:
    for outputs in check(driver, wrong_entries(dtype, seed)):
        for output in outputs:
            assert output.isnan().all(-1).tolist() == [True] * 5 + [False] * 2


@EACH_DTYPE
@pytest.mark.parametrize("shift", [1, 4])
def test_pointers_that_are_not_aligned_to_16_bytes(
    driver: Driver, on_gpu: PluginLibrary, dtype: torch.dtype, shift: int, seed: int
) -> None:
    # The tactics of the plugin's configuration may not run these pointers: the plugin takes another then.
    check(driver, make_case(hidden=512, gate=True, dtype=dtype, weights_dtype=dtype, seed=seed), shift=shift)


def test_case07_rows_beyond_2_to_the_31_elements(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    hidden, near = 7168, make_case(tokens=3, top_k=2, hidden=7168, dtype=torch.bfloat16, absent=0.0, seed=seed)
    rows = 2**31 // hidden + 10
    needed = rows * hidden * 2
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30 + 1:.0f} GiB of free memory on the GPU")
    prepared = Prepared(driver, near)
    whole = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([rows - 1, rows - 2, 0, rows - 3, 1, rows - 4])
    positions = [entry.name for entry in near.spec.inputs if entry.name in near.tensors]
    index = near.tensors[MAP].flatten()
    whole[places.cuda()] = prepared.inputs[0][index.long().cuda()]
    prepared.inputs[0] = whole
    prepared.shapes[0] = (rows, hidden)
    prepared.inputs[positions.index(MAP)].copy_(places.view(3, 2).int())
    assert Judge(near).faults(prepared.results()) == []


def test_dependent_launch_changes_no_bit(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    case = case_named("DeepSeek-V3", torch.bfloat16, seed)
    found = []
    for dependent in (1, 0):
        prepared = Prepared(driver, case, programmatic_dependent_launch=dependent)
        for _ in range(20):
            prepared.enqueue()
        torch.cuda.synchronize()
        found.append([output.cpu().view(torch.int16) for output in prepared.outputs])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_chain_of_dependent_launches_reads_what_the_last_one_wrote(
    driver: Driver, on_gpu: PluginLibrary, seed: int
) -> None:
    case = make_case(tokens=64, top_k=4, hidden=2048, dtype=torch.float32, absent=0.0, seed=seed)
    chained, alone = Prepared(driver, case), Prepared(driver, case)
    position = [entry.name for entry in case.spec.inputs if entry.name in case.tensors].index("residual")
    steps = 30
    for step in range(steps):
        if step:
            # Each launch's residual is what the one before it writes, and its outputs lie elsewhere.
            chained.inputs[position] = chained.outputs[1]
            chained.guarded[1] = Guarded(chained.outputs[1], 0, "cuda", math.nan)
        chained.enqueue()
    for step in range(steps):
        if step:
            alone.inputs[position].copy_(alone.outputs[1])
            torch.cuda.synchronize()
        alone.enqueue()
        torch.cuda.synchronize()
    for got, wanted in zip(chained.outputs, alone.outputs, strict=True):
        assert torch.equal(got, wanted)


def test_in_a_cuda_graph_with_new_inputs_at_each_replay(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    first = case_named("DeepSeek-V3", torch.bfloat16, seed)
    prepared = Prepared(driver, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.enqueue()
    for replay in range(3):
        case = case_named("DeepSeek-V3", torch.bfloat16, seed + replay)
        names = [entry.name for entry in case.spec.inputs if entry.name in case.tensors]
        for name, tensor in zip(names, prepared.inputs, strict=True):
            tensor.copy_(case.tensors[name])
        for output in prepared.outputs:
            output.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert Judge(case).faults(tuple(output.cpu() for output in prepared.outputs)) == []


def test_on_two_streams_at_once(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    cases = [case_named("DeepSeek-V3", torch.bfloat16, seed + number) for number in range(2)]
    prepared = [Prepared(driver, case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        for each, stream in zip(prepared, streams, strict=True):
            with torch.cuda.stream(stream):
                each.enqueue()
    torch.cuda.synchronize()
    for case, each in zip(cases, prepared, strict=True):
        assert Judge(case).faults(tuple(output.cpu() for output in each.outputs)) == []


def test_enqueue_allocates_nothing(driver: Driver, on_gpu: PluginLibrary, seed: int) -> None:
    prepared = Prepared(driver, case_named("DeepSeek-V3", torch.bfloat16, seed))
    prepared.results()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(200):
        prepared.enqueue()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before
