"""The plugin's own enqueue on a GPU: every case with every tactic, poisoned outputs, guards, graphs and streams."""

import itertools
import math

import pytest
import torch

from moetrt.library import PluginLibrary
from tests.operator_cases import Case, make_case
from tests.plugins.driver import Driver
from tests.plugins.host.host_kernel import Judge
from tests.plugins.operator_runs import CASES, DTYPES, MAP, Prepared, case_named, check, wrong_entries

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


class Chain:
    """Steps each of which reads what the step before it wrote: its norm_out as rows, which the map takes from all over
    it, and its residual_out as residual. All outputs are there before the first step.

    Args:
        prepared: the first step; its operands are read anew each time the chain runs.
        buffers: the pairs of outputs that the steps write to in turn; with 2, a step writes what the last one read.
    """

    FED = ("gemm2_permuted", "residual")

    def __init__(self, prepared: Prepared, case: Case, *, buffers: int, tactic: int | None) -> None:
        self.plugin, self.device = prepared.plugin, prepared.device
        self.shapes, self.types = prepared.shapes, prepared.types
        self.tactic = tactic
        self.outputs = [[torch.full_like(output, math.nan) for output in prepared.outputs] for _ in range(buffers)]
        names = [entry.name for entry in case.spec.inputs if entry.name in case.tensors]
        self.inputs = []
        for step in range(STEPS):
            last = dict(zip(self.FED, self.outputs[(step - 1) % buffers], strict=True)) if step else {}
            given = dict(zip(names, prepared.inputs, strict=True)) | last
            self.inputs.append([given[name] for name in names])

    def run(self, *, one_by_one: bool = False) -> None:
        """Starts all steps on PyTorch's current stream, back to back or each when the last one is at its end."""
        if self.tactic is not None:
            self.plugin.set_tactic(self.tactic)
        assert self.plugin.on_shape_change(self.shapes, self.types)
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        pointers = [
            ([tensor.data_ptr() for tensor in inputs], [tensor.data_ptr() for tensor in self.outputs_of(step)])
            for step, inputs in enumerate(self.inputs)
        ]
        for inputs, outputs in pointers:
            assert self.plugin.enqueue(self.shapes, self.types, inputs, outputs, stream)
            if one_by_one and self.device == "cuda":
                torch.cuda.synchronize()

    def outputs_of(self, step: int) -> list[torch.Tensor]:
        return self.outputs[step % len(self.outputs)]

    def poison(self) -> None:
        for output in itertools.chain(*self.outputs):
            output.fill_(math.nan)

    def differs_from(self, reference: "Chain") -> list[int]:
        """The steps whose outputs, where they are still there, have other bits than the reference's."""
        return [
            step
            for step in range(STEPS - len(self.outputs), STEPS)
            for got, wanted in zip(self.outputs_of(step), reference.outputs_of(step), strict=True)
            if not torch.equal(got.view(torch.int16), wanted.view(torch.int16))
        ]


STEPS = 30
DELAY_CYCLES = 30_000_000
"""So long the GPU is kept busy while a chain is enqueued, so that its steps are all there when the first one begins."""


def chain_case(tokens: int, seed: int) -> Case:
    """As many rows as tokens, so that norm_out can be the next step's rows."""
    hidden, top_k = (1024, 2) if tokens > 1000 else (7168, 8)
    return make_case(tokens=tokens, top_k=top_k, rows=tokens, hidden=hidden, dtype=torch.bfloat16, seed=seed)


def reference_chain(prepared: Prepared, case: Case, tactic: int | None) -> Chain:
    """One step at a time; the first and the last step of the default tactic are held against float64."""
    chain = Chain(prepared, case, buffers=STEPS, tactic=tactic)
    chain.run(one_by_one=True)
    names = [entry.name for entry in case.spec.inputs if entry.name in case.tensors]
    for step in (0, STEPS - 1) if tactic is None else ():
        tensors = {name: tensor.cpu() for name, tensor in zip(names, chain.inputs[step], strict=True)}
        found = tuple(output.cpu() for output in chain.outputs_of(step))
        assert Judge(Case(case.spec, tensors, case.attributes)).faults(found) == []
    # A step that read what another one wrote would be seen.
    for step in range(1, STEPS):
        assert not torch.equal(chain.outputs_of(step)[1], chain.outputs_of(step - 1)[1])
    return chain


# More than can be resident at once, 32 blocks on each of 132 multiprocessors; and what clusters are for.
EACH_CHAIN = pytest.mark.parametrize("tokens", [5000, 16, 8, 4, 2, 1])


@EACH_CHAIN
@pytest.mark.parametrize("dependent", [1, 0])
def test_a_chain_of_launches_reads_what_the_last_one_wrote(
    driver: Driver, on_gpu: PluginLibrary, tokens: int, dependent: int, seed: int
) -> None:
    case = chain_case(tokens, seed)
    prepared = Prepared(driver, case, programmatic_dependent_launch=dependent)
    for tactic in (None, *prepared.tactics):
        reference = reference_chain(prepared, case, tactic)
        for buffers in (STEPS, 2):
            chain = Chain(prepared, case, buffers=buffers, tactic=tactic)
            torch.cuda.synchronize()
            torch.cuda._sleep(DELAY_CYCLES)
            chain.run()
            torch.cuda.synchronize()
            assert chain.differs_from(reference) == [], f"tactic {tactic}, {buffers} buffers"


@pytest.mark.parametrize("tokens", [5000, 16, 1])
def test_dependent_launch_changes_no_bit(driver: Driver, on_gpu: PluginLibrary, tokens: int, seed: int) -> None:
    case = chain_case(tokens, seed)
    chains = []
    for dependent in (1, 0):
        prepared = Prepared(driver, case, programmatic_dependent_launch=dependent)
        chains.append(Chain(prepared, case, buffers=STEPS, tactic=None))
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        chains[-1].run()
        torch.cuda.synchronize()
    assert chains[0].differs_from(chains[1]) == []


@EACH_CHAIN
@pytest.mark.parametrize("buffers", [STEPS, 2])
def test_a_chain_in_a_cuda_graph_with_new_inputs_at_each_replay(
    driver: Driver, on_gpu: PluginLibrary, tokens: int, buffers: int, seed: int
) -> None:
    case = chain_case(tokens, seed)
    prepared = Prepared(driver, case)
    names = [entry.name for entry in case.spec.inputs if entry.name in case.tensors]
    replayed = [chain_case(tokens, seed + replay) for replay in range(2)]
    for tactic in (None, *prepared.tactics):
        chain = Chain(prepared, case, buffers=buffers, tactic=tactic)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain.run()
        for case in replayed:
            for name, tensor in zip(names, prepared.inputs, strict=True):
                tensor.copy_(case.tensors[name])
            chain.poison()
            reference = reference_chain(prepared, case, tactic)
            # Once over poison; then twice, so that a first step comes right after the last step of another replay.
            for replays in (1, 2):
                for _ in range(replays):
                    graph.replay()
                torch.cuda.synchronize()
                assert chain.differs_from(reference) == [], f"tactic {tactic}, {replays} replays"


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
