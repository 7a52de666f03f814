"""The GPU check, as far as it goes without one: a dry run, and its table, verdicts, files and plot from made-up times.

Made-up times stay in this file and its temporary folder.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import contenders, gpu_check, timing
from benchmarks.contenders import ADD_NORM, COPY, EAGER, NO_PDL, OURS, SEPARATE, Cell
from benchmarks.host import host_library
from benchmarks.models import MODELS
from benchmarks.results import (
    Results,
    Row,
    _title,
    copy_share,
    file_stem,
    plot,
    print_table,
    print_verdicts,
    ratio,
    read,
    verdicts,
)
from benchmarks.timing import DryTimer, GraphTimer, Timing
from moetrt.console import Output
from moetrt.cuda_op import kernel_params
from moetrt.errors import InputError
from moetrt.library import PluginLibrary
from tests.plugins.host.host_kernel import SM90_WITHOUT_CLUSTERS

DEEPSEEK = MODELS["deepseek-v3"]


def test_a_dry_run_tries_every_step_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path), "--models", "deepseek-v3", "qwen3-next"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("DRY RUN on the CPU")
    assert "tests/gpu: skipped" in printed
    assert "No ratios: tests/gpu skipped" in printed
    assert "not judged" in printed
    assert "NOT HELD" not in printed
    assert " us" not in printed
    (written,) = tmp_path.glob("*.json")
    assert written.with_suffix(".txt").is_file()
    assert list(tmp_path.glob("*.png")) == []
    data = json.loads(written.read_text())
    assert data["dry_run"] is True
    assert (data["tests"], data["faults"]) == ("skipped", [])
    assert data["card"] == "none (host build)"
    assert {row["timing"] for row in data["rows"]} == {None}
    notes = {row["note"] for row in data["rows"] if row["contender"] not in (ADD_NORM, SEPARATE)}
    assert notes == {""}
    ours = [row for row in data["rows"] if row["contender"] == OURS and row["model"] == "deepseek-v3"]
    assert {row["tokens"] for row in ours} == set(gpu_check.DRY_TOKENS)
    assert len({row["setting"] for row in ours}) > 1
    assert sum(row["default"] for row in ours) == len(gpu_check.DRY_TOKENS)
    assert {row["contender"] for row in data["rows"]} >= {OURS, NO_PDL, ADD_NORM, SEPARATE, EAGER, COPY}


def test_the_host_library_runs_on_the_whole_chip(tmp_path: Path) -> None:
    """Whichever of the simulator's devices the kernel's own tests chose last in this process."""
    host_library().functions.moetrt_host_set_device(SM90_WITHOUT_CLUSTERS)
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path), "--models", "deepseek-v3", "--tokens", "3"]) == 0


def test_a_wrong_kernel_ends_the_run_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forgets_the_factor(*arguments: object) -> object:
        params = kernel_params(*arguments)  # type: ignore[arg-type]
        params.routed_scaling_factor = 1.0
        return params

    monkeypatch.setattr(contenders, "kernel_params", forgets_the_factor)
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path), "--models", "deepseek-v3", "--tokens", "3"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: deepseek-v3, T=3, " in printed
    assert "norm_out is wrong: its error against float64 is" in printed
    (written,) = tmp_path.glob("*.json")
    faults = json.loads(written.read_text())["faults"]
    assert faults
    assert all("norm_out is wrong" in fault for fault in faults)
    # Above all figures.
    top = written.with_suffix(".txt").read_text().splitlines()[: 1 + len(faults)]
    assert top == ["tests/gpu: skipped", *(f"WRONG: {fault}" for fault in faults)]


def test_outputs_that_were_not_written_are_seen() -> None:
    cell = Cell(dataclasses.replace(DEEPSEEK, hidden=64), 4, torch.device("cpu"), 0, seed=0)
    writes_nothing = lambda buffers: tuple(buffers.outputs.values())  # noqa: E731
    assert cell.fault(writes_nothing, cell.sets[0]) == (  # type: ignore[arg-type]
        "norm_out is wrong: its error against float64 is nan, 1e-02 is taken"
    )


def test_a_way_that_writes_no_more_in_its_replays_is_not_timed() -> None:
    cell = Cell(dataclasses.replace(DEEPSEEK, hidden=64), 4, torch.device("cpu"), 0, seed=0)
    honest = contenders.eager(cell)
    wrong = tuple(torch.zeros_like(output) for output in cell.sets[-1].outputs.values())
    for result, message in ((wrong, "after the replays norm_out is wrong"), (honest.calls[0](), "norm_out is wrong")):
        with pytest.raises(contenders.WrongResultError, match=message):
            honest.accept(result)
    honest.accept(honest.calls[-1]())
    cell.poison()
    with pytest.raises(contenders.WrongResultError, match="after the replays norm_out is not finite everywhere"):
        cell.accept(honest.calls[-1](), outputs=True)
    # One element of a set that is not compared.
    for tensor in cell.written.values():
        tensor.zero_()
    cell.accept(honest.calls[-1](), outputs=True)
    cell.sets[0].outputs["residual_out"][1, 3] = math.nan
    with pytest.raises(contenders.WrongResultError, match="residual_out is not finite everywhere"):
        cell.accept(honest.calls[-1](), outputs=True)


def add_norm(x: torch.Tensor, buffers: contenders.Buffers) -> None:
    hidden = x + buffers.tensors["residual"]
    buffers.outputs["residual_out"].copy_(hidden)
    normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=contenders.EPS)
    buffers.outputs["norm_out"].copy_(normed.bfloat16() * buffers.tensors["gamma"])


def add_norm_in_place(x: torch.Tensor, buffers: contenders.Buffers) -> None:
    hidden = buffers.outputs["residual_out"]
    hidden += x
    normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=contenders.EPS)
    x.copy_(normed.bfloat16() * buffers.tensors["gamma"])


def wrong_add_norm(x: torch.Tensor, buffers: contenders.Buffers) -> None:
    add_norm(x, buffers)
    buffers.outputs["norm_out"].mul_(1.1)


@pytest.fixture
def separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for Triton's and FlashInfer's."""

    def finalize(
        rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, factor: float, out: torch.Tensor, *, block: int
    ) -> None:
        out.copy_((rows[index.long()].float() * weights.float().unsqueeze(-1)).sum(1) * factor)

    def shared_add(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None, out: torch.Tensor) -> None:
        out.copy_(routed + (shared if gate is None else gate.sigmoid() * shared))

    kernels = SimpleNamespace(FINALIZE_BLOCKS=(512,), finalize=finalize, shared_add=shared_add)
    monkeypatch.setitem(sys.modules, "benchmarks.triton_kernels", kernels)
    monkeypatch.setattr("benchmarks.triton_kernels", kernels, raising=False)
    monkeypatch.setattr(contenders, "find_spec", lambda name: object())
    found = {"right": add_norm, contenders.FLASHINFER: add_norm_in_place, "wrong": wrong_add_norm}
    monkeypatch.setattr(contenders, "add_norms", lambda: found)


@pytest.mark.usefixtures("separate_kernels")
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next", "mixtral"])
def test_separate_kernels_are_compared_after_their_replays(name: str) -> None:
    cell = Cell(dataclasses.replace(MODELS[name], hidden=64), 4, torch.device("cpu"), 0, seed=0)
    for contender in [*contenders.add_norm_alone(cell), *contenders.separate(cell, "right")]:
        if contender.setting != "wrong":
            DryTimer().time(contender.calls, contender.prepare, contender.accept)
            continue
        with pytest.raises(contenders.WrongResultError, match="after the replays norm_out is wrong"):
            DryTimer().time(contender.calls, contender.prepare, contender.accept)
    (in_place,) = contenders.separate(cell, contenders.FLASHINFER)
    assert in_place.check is not None
    assert cell.fault(in_place.check, cell.sets[-1]) == ""
    DryTimer().time(in_place.calls, in_place.prepare, in_place.accept)
    (wrong,) = contenders.separate(cell, "wrong")
    with pytest.raises(contenders.WrongResultError, match="after the replays norm_out is wrong"):
        DryTimer().time(wrong.calls, wrong.prepare, wrong.accept)


def test_a_copy_that_was_not_made_is_seen() -> None:
    contender, _ = contenders.copy(Cell(dataclasses.replace(DEEPSEEK, hidden=64), 4, torch.device("cpu"), 0, seed=0))
    contender.prepare(None)
    contender.calls[0]()
    with pytest.raises(contenders.WrongResultError, match="the copy differs from its source"):
        contender.accept(None)
    for call in contender.calls:
        call()
    contender.accept(None)


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_operand_of_every_set_begins_at_the_same_alignment(tokens: int) -> None:
    # Rows of 5760 bytes, weights of 8 and maps of 16 a token; the gate takes 2.
    for model in (MODELS["gpt-oss"], dataclasses.replace(MODELS["qwen3-next"], hidden=72)):
        cell = Cell(model, tokens, torch.device("cpu"), 100_000, seed=0)
        for name in (*cell.sets[0].tensors, *cell.sets[0].outputs, "routed"):
            if name not in ("gemm2_permuted", "gamma"):
                sets = [({"routed": each.routed} | {**each.tensors, **each.outputs})[name] for each in cell.sets]
                assert {(each.data_ptr() - sets[0].data_ptr()) % contenders.ALIGNMENT for each in sets} == {0}
                assert all(each.is_contiguous() and len(each) == tokens for each in sets)


def test_sets_of_buffers_are_larger_than_twice_the_cache() -> None:
    model = dataclasses.replace(DEEPSEEK, hidden=64)
    cell = Cell(model, 2, torch.device("cpu"), 100_000, seed=0)
    assert len(cell.sets) * cell.bytes >= 200_000
    rows = torch.cat([buffers.tensors["expanded_idx_to_permuted_idx"] for buffers in cell.sets]).flatten()
    # No two sets, and no two routes, name the same row.
    assert rows.unique().numel() == rows.numel() == 16 * len(cell.sets)
    starts = {buffers.outputs["norm_out"].data_ptr() for buffers in cell.sets}
    assert len(starts) == len(cell.sets)
    assert len(Cell(model, 1, torch.device("cpu"), 0, seed=0).sets) == 2


def run_on_nothing(deadline: float) -> gpu_check.Run:
    return gpu_check.Run(
        library=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        timer=DryTimer(),
        l2_bytes=0,
        backend="eager",
        seed=0,
        deadline=deadline,
    )


def notes(run: gpu_check.Run, token_counts: tuple[int, ...] = (1, 4)) -> list[list[str]]:
    return [[row.note for row in rows] for rows in run.measure(DEEPSEEK, token_counts)]


def test_time_that_is_over_is_said() -> None:
    assert notes(run_on_nothing(-math.inf)) == [["the time for this run was over"]] * 2


def test_an_error_in_a_cell_costs_no_other_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: gpu_check.Run, cell: Cell, compiled: object) -> Iterator[Row]:
        yield row(cell.tokens, OURS, 1e-6)
        if cell.tokens == 1:
            raise RuntimeError("no kernel image")
        if cell.tokens == 2:
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(gpu_check.Run, "_measure_cell", measure)
    run = run_on_nothing(math.inf)
    assert notes(run, (1, 2, 3)) == [["", "RuntimeError: no kernel image"], ["", "OutOfMemoryError: too large"], [""]]
    # A cell that is too large for the machine is not wrong.
    assert run.faults == ["deepseek-v3, T=1: RuntimeError: no kernel image"]


def test_a_device_that_no_longer_works_ends_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Breaks:
        def time(self, *arguments: object) -> None:
            run.device = torch.device("cuda")
            fails()

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    run = run_on_nothing(math.inf)
    run.library, run.timer = host_library(), Breaks()  # type: ignore[assignment]
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    # The first contender's error is its own; no other is tried.
    assert notes(run) == [[reason], [f"the device no longer worked: {reason}"]]
    assert run.faults[0] == f"the device no longer worked: {reason}"


def test_figures_are_on_disk_after_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: gpu_check.Run, model: object, token_counts: object) -> Iterator[list[Row]]:
        yield [row(1, OURS, 1e-6)]
        (written,) = tmp_path.glob("*.json")
        assert [each.tokens for each in read(written).rows] == [1]
        yield [row(4, OURS, 1e-6)]
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check.Run, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--dry-run", "--output", str(tmp_path), "--models", "deepseek-v3"])
    (written,) = tmp_path.glob("*.json")
    assert [each.tokens for each in read(written).rows] == [1, 4]
    assert written.with_suffix(".txt").is_file()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--models", "gpt-5"], "moetrt: error: model was 'gpt-5'; one of deepseek-v3, "),
        ([], "moetrt: error: this needs an NVIDIA GPU that PyTorch sees; --dry-run tries the script without one"),
    ],
    ids=["model", "no GPU"],
)
def test_what_cannot_run_is_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(arguments) == 2
    assert capsys.readouterr().err.startswith(line)


def test_a_gpu_before_sm80_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(InputError, match="the GPU is SM75; SM80 or later is taken"):
        gpu_check._check_gpu()


def row(
    tokens: int, contender: str, seconds: float | None, *, setting: str = "", moved: int = 1, **changes: object
) -> Row:
    time = None if seconds is None else Timing(seconds, seconds, seconds)
    return Row("deepseek-v3", tokens, contender, setting, moved, time, **changes)  # type: ignore[arg-type]


@pytest.fixture
def made_up() -> Results:
    rows = [
        row(1, OURS, 2e-6, setting="cluster_8", default=True),
        row(1, ADD_NORM, 3e-6, setting="slow"),
        row(1, ADD_NORM, 1.6e-6, setting="fast"),
        row(1, SEPARATE, 4e-6),
        row(1, EAGER, 40e-6),
        row(1024, OURS, 5e-5, setting="cta_16", moved=1000, default=True),
        row(1024, OURS, 4e-5, setting="cta_32", moved=1000),
        row(1024, COPY, 3.6e-5, moved=800),
        row(1024, SEPARATE, 6e-5),
        row(1024, EAGER, None, note="out of memory"),
        row(4096, OURS, None, note="the time for this run was over"),
    ]
    facts = {"card": "NVIDIA H200", "date": "2026-01-02 03:04:05", "tests": "passed", "faults": []}
    return Results(facts, [DEEPSEEK], rows)


def test_ratios_are_to_what_the_library_does_by_itself(made_up: Results) -> None:
    assert ratio(made_up, "deepseek-v3", 1, ADD_NORM) == pytest.approx(0.8)
    assert ratio(made_up, "deepseek-v3", 1024, SEPARATE) == pytest.approx(1.2)
    assert ratio(made_up, "deepseek-v3", 1024, EAGER) is None
    # 1000 bytes in 50 us beside 800 bytes in 36 us.
    assert copy_share(made_up, "deepseek-v3", 1024) == pytest.approx(0.9)
    assert copy_share(made_up, "deepseek-v3", 4096) is None


def test_verdicts_name_the_worst_cell(made_up: Results) -> None:
    share, norm, separate = verdicts(made_up)
    assert (share.reached, share.cell, share.held) == (pytest.approx(0.9), "deepseek-v3, T=1024", False)
    assert (norm.reached, norm.cell, norm.held) == (pytest.approx(1.25), "deepseek-v3, T=1", True)
    assert (separate.reached, separate.cell, separate.held) == (pytest.approx(1.2), "deepseek-v3, T=1024", False)


def test_the_table_has_a_dash_where_nothing_was_measured(made_up: Results, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(made_up, Output())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "2.00", "us", "2.00", "us", "cluster_8", "-", "2.00", "0.80", "-", "20.00"] in lines
    assert ["1024", "50.00", "us", "40.00", "us", "cta_32", "90", "%", "1.20", "-", "-", "-"] in lines
    assert ["4096", *["-"] * 7] in lines


@pytest.mark.parametrize("tests", ["failed", "skipped"])
def test_there_is_no_ratio_where_the_tests_did_not_pass(
    made_up: Results, tests: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results({**made_up.facts, "tests": tests, "faults": ["one"]}, made_up.models, made_up.rows)
    assert {(verdict.reached, verdict.held) for verdict in verdicts(results)} == {(None, None)}
    print_table(results, Output())
    print_verdicts(results, Output())
    printed = capsys.readouterr().out
    assert f"No ratios: tests/gpu {tests}" in printed
    assert ["1", "2.00", "us", "2.00", "us", "cluster_8", *["-"] * 5] in [line.split() for line in printed.splitlines()]
    assert printed.count("not judged") == 3
    assert _title(results) == f"MoE tail in bf16, NVIDIA H200, 2026-01-02 03:04:05, tests/gpu {tests}, 1 faults"


def test_files_come_back_as_they_were_written(made_up: Results, tmp_path: Path) -> None:
    made_up.write(tmp_path / "run.json")
    assert read(tmp_path / "run.json") == made_up
    assert plot(made_up, tmp_path / "run.png") == ""
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert file_stem(made_up.facts) == "nvidia-h200-2026-01-02-030405"


class FakeEvent:
    """Stands for an event; the "GPU" takes 100 us for a call."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


class FakeGraph:
    """Stands for a CUDA graph: it counts what it captured and what it replayed."""

    captured = 0
    capturing = False
    replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        FakeGraph.capturing, FakeGraph.captured = True, 0

    def capture_end(self) -> None:
        FakeGraph.capturing = False

    def replay(self) -> None:
        FakeGraph.replays += 1
        FakeEvent.clock += 0.1 * FakeGraph.captured  # milliseconds

    def reset(self) -> None:
        pass


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("Event", FakeEvent),
        ("CUDAGraph", FakeGraph),
        ("Stream", FakeStream),
        ("stream", lambda stream: stream),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    FakeGraph.replays = 0


@pytest.mark.usefixtures("fake_cuda")
def test_a_time_is_that_of_one_call_in_a_replay() -> None:
    def call() -> None:
        FakeGraph.captured += FakeGraph.capturing

    timed = GraphTimer(torch.device("cuda")).time([call] * 4)
    assert timed == Timing(*[pytest.approx(100e-6)] * 3)
    # Four sets are walked through four times; each stretch lasts 2 ms at least: two rounds of 1.6 ms; one replay to
    # warm up, one to see how long it takes.
    assert FakeGraph.captured == timing.LEAST_CALLS == 16
    assert FakeGraph.replays == 2 + timing.REPEATS * 2


@pytest.mark.usefixtures("fake_cuda")
def test_outputs_are_poisoned_before_the_replays_and_looked_at_after_them() -> None:
    seen: list[object] = []

    def call(number: int) -> int:
        seen.append(number)
        FakeGraph.captured += FakeGraph.capturing
        return number

    timer = GraphTimer(torch.device("cuda"))
    timer.time(
        [partial(call, 1), partial(call, 2)],
        lambda result: seen.append(("prepare", result, FakeGraph.replays)),
        lambda result: seen.append(("accept", result, FakeGraph.replays)),
    )
    replays = FakeGraph.replays
    # All calls once to warm up and once to be captured.
    assert seen == [*[1, 2] * 16, ("prepare", 2, 0), ("accept", 2, replays)]
    assert replays > timing.REPEATS


@pytest.mark.usefixtures("fake_cuda")
def test_a_call_that_fails_while_captured_ends_the_capture() -> None:
    def call() -> None:
        if FakeGraph.capturing:
            raise InputError("the kernel was not started")

    with pytest.raises(InputError):
        GraphTimer(torch.device("cuda")).time([call])
    assert not FakeGraph.capturing


@pytest.mark.parametrize(("tests", "code"), [("passed", 0), ("failed", 1), ("skipped", 1)])
def test_numbers_decide_the_exit_code(monkeypatch: pytest.MonkeyPatch, tests: str, code: int) -> None:
    monkeypatch.setattr(gpu_check, "_check_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "check_numbers", lambda output: tests)
    assert gpu_check.main(["--skip-times"]) == code


@pytest.mark.parametrize(
    ("code", "said", "state"),
    [
        (0, "SKIPPED [1] a reason\n12 passed, 1 skipped in 3.00s", "passed"),
        (0, "SKIPPED [9] no GPU\n9 skipped in 1.00s", "skipped"),
        (1, "1 failed, 12 passed in 3.00s", "failed"),
        (None, "", "failed"),
    ],
    ids=["passed", "skipped", "failed", "timed out"],
)
def test_tests_pass_only_where_some_ran(
    monkeypatch: pytest.MonkeyPatch, code: int | None, said: str, state: str
) -> None:
    monkeypatch.setattr(gpu_check, "_run_for", lambda command, seconds: (code, said))
    assert gpu_check.check_numbers(Output()) == state


def test_a_program_that_hangs_is_ended_with_all_that_it_started() -> None:
    hangs = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '30'])"
    started = time.monotonic()
    assert gpu_check._run_for([sys.executable, "-c", hangs], 2) == (None, "begun\n")
    assert time.monotonic() - started < 20
    assert gpu_check._run_for([sys.executable, "-c", "print('done'); raise SystemExit(3)"], 20) == (3, "done\n")


def test_facts_name_the_card_the_driver_and_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=60 << 20,
        total_memory=139 << 30,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_check, "_output_of", lambda command: f"asked {command[0]}")
    (tmp_path / "library.so").write_bytes(b"")
    library = PluginLibrary(tmp_path / "library.so", None)  # type: ignore[arg-type]
    facts = gpu_check.facts_of(torch.device("cuda", 0), library, dry=False)
    assert facts["dry_run"] is False
    assert (facts["card"], facts["compute_capability"], facts["multiprocessors"]) == ("NVIDIA H200", "9.0", 132)
    assert (facts["driver"], facts["commit"]) == ("asked nvidia-smi", "asked git")
    assert facts["library_sha256"].startswith("e3b0c44298fc1c14")


def test_a_program_that_is_missing_leaves_its_fact_empty() -> None:
    assert gpu_check._output_of(["moetrt-no-such-program"]) == ""
