"""A file that is right at the example's length and not at others is found, and the length is named."""

import json
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from moetrt import cli
from moetrt.bounds import Bound, write_bounds
from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.errors import InputError
from moetrt.functional import finalize_add_rms_norm
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.parity import compare
from moetrt.parity.lengths import other_lengths
from moetrt.source import Source
from tests.conftest import BLOCK

HIDDEN, WINDOW, EXAMPLE = 32, 16, 8


class Windows(torch.nn.Module):
    """A context of whole windows of tokens, where there are any: a Python branch on the length.

    ``baked`` takes the branch of a length below a window, as an export that reads no guard does.
    """

    def __init__(self, *, baked: bool) -> None:
        super().__init__()
        self.rows = torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.gamma = torch.nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))
        self.baked = baked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = torch.zeros(HIDDEN)
        if not self.baked and len(x) >= WINDOW:
            whole = x[: len(x) // WINDOW * WINDOW]
            context = whole.view(-1, WINDOW, HIDDEN).mean((0, 1))
        rows = self.rows(x + context).view(-1, HIDDEN)
        index = torch.arange(2 * x.shape[0], dtype=torch.int32).view(-1, 2)
        moe = MoEOutput(UnfinalizedMoEOutput(rows, x[:, :2].softmax(-1), index))
        return finalize_add_rms_norm(moe, x, self.gamma)[0]


def windows(*, baked: bool) -> Source:
    torch.manual_seed(0)
    example = {"x": torch.randn(EXAMPLE, HIDDEN)}
    return Source(Windows(baked=baked), example, {"x": {0: "t"}}, description="Windows")


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mapped file that has the example's branch, ``model.onnx`` beside it."""
    folder = tmp_path_factory.mktemp("windows")
    map_file(export(windows(baked=True), folder).model_path, folder / "mapped.onnx")
    return folder / "mapped.onnx"


def test_case_56_a_length_that_the_trace_decided_by_is_found(baked: Path, tmp_path: Path) -> None:
    report = compare(baked, windows(baked=False))
    # At the example's length all is well.
    assert all(output.passed for output in report.outputs)
    assert [(length.where, length.passed) for length in report.lengths] == [("t=1", True), ("t=32", False)]
    assert not report.passed
    assert report.result == "DIFFERS"
    assert report.verdict == (
        "at t=32: the graph before mapping differs from PyTorch already: the mapping is not what is off; "
        "at other sizes the file is right: the export may have decided a Python branch or loop on a length"
    )
    text = "\n".join(report.lines())
    assert "ok: at t=1: output, onnxruntime against pytorch" in text
    assert "DIFFERS: at t=32: output [32x32] float32, onnxruntime against pytorch" in text
    content = json.loads(report.write_json(tmp_path / "parity.json").read_text())
    assert content["passed"] is False
    assert [entry["sizes"] for entry in content["lengths"]] == [{"t": 1}, {"t": 32}]
    assert [entry["passed"] for entry in content["lengths"]] == [True, False]
    assert content["lengths"][1]["cause"] in content["cause"]
    # The same file against the module that it was made of.
    assert compare(baked, windows(baked=True)).passed


def test_case_56_sizes_that_are_given_stand_in_place_of_the_default(baked: Path) -> None:
    source = windows(baked=False)
    assert compare(baked, source, sizes={"t": 15}).lengths == ()
    report = compare(baked, source, sizes={"t": 3}, lengths=[{"t": 15}, {"t": 16}])
    assert [(length.where, length.passed) for length in report.lengths] == [("t=15", True), ("t=16", False)]
    assert report.verdict.startswith("at t=16: ")
    assert compare(baked, source, inputs={"x": torch.randn(5, HIDDEN)}).lengths == ()


def test_case_56_shapes_given_again_are_further_lengths(mapped_block: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", str(mapped_block), "--against", BLOCK]
    shapes = ["--shapes", "x:3x64", "residual:3x64", "--shapes", "x:9x64", "--shapes", "x:17x64", "residual:17x64"]
    assert cli.run([*words, *shapes]) == 0
    printed = capsys.readouterr().out
    assert "inputs from seed 0: x [3x64], residual [3x64]" in printed
    assert [line.split(": ")[1] for line in printed.splitlines() if " at tokens=" in line] == [
        "at tokens=9",
        "at tokens=17",
    ]


def bounded(path: Path, maximum: int | None, folder: Path, minimum: int = 1) -> Path:
    model = load_model(path)
    write_bounds(model, {"t": Bound("t", minimum, maximum, "a branch in forward, windows.py:9")})
    return save_model(model, folder / "bounded.onnx")


def test_case_56_a_bound_of_the_file_is_the_longest_length(baked: Path, tmp_path: Path) -> None:
    path = bounded(baked, WINDOW - 1, tmp_path)
    source = windows(baked=False)
    report = compare(path, source, unmapped_path=baked.with_name("model.onnx"))
    assert [length.where for length in report.lengths] == ["t=1", "t=15"]
    assert report.passed
    # Beyond it the file itself says that it is not right.
    with pytest.raises(InputError, match=r"dimension 't' was 16; 1 to 15 is taken: a branch in forward"):
        compare(path, source, sizes={"t": 16})
    with pytest.raises(InputError, match="dimension 't' was 20"):
        compare(path, source, inputs={"x": torch.randn(20, HIDDEN)})
    # A bound that is too wide is found to be.
    wide = bounded(baked, WINDOW, tmp_path)
    assert compare(wide, source, unmapped_path=baked.with_name("model.onnx")).verdict.startswith("at t=16: ")


@pytest.mark.parametrize(
    ("minimum", "maximum", "lengths"),
    [(4, None, [4, 32]), (40, None, [40]), (8, 8, []), (1, 8, [1]), (1, 5000, [1, 5000])],
)
def test_the_lengths_that_bounds_leave(
    baked: Path, tmp_path: Path, minimum: int, maximum: int | None, lengths: list[int]
) -> None:
    model = load_model(bounded(baked, maximum, tmp_path, minimum))
    assert other_lengths(model, windows(baked=True)) == [{"t": length} for length in lengths]


def test_a_dimension_that_the_file_fixes_has_no_other_length(baked: Path, tmp_path: Path) -> None:
    model = load_model(baked)
    model.graph.inputs[0].shape = ir.Shape([EXAMPLE, HIDDEN])
    assert other_lengths(model, windows(baked=True)) == []


class Taken(torch.nn.Module):
    """Takes at least ``least`` tokens, and at most ``most``."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self.windows, self.least, self.most = Windows(baked=True), least, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.least <= len(x) <= self.most:
            raise ValueError(f"{len(x)} tokens are not taken")
        return self.windows(x)


def test_where_pytorch_gives_nothing_it_is_said(baked: Path) -> None:
    """The module refuses a length, or its inputs cannot be drawn there: nothing differs, and nothing was measured."""
    source = windows(baked=True)
    taken = Taken(2, 16)
    taken.windows.load_state_dict(source.module.state_dict())
    narrow = Source(taken, source.example_inputs, source.dynamic_shapes, description="Taken")
    report = compare(baked, narrow)
    assert report.passed
    reasons = {length.where: length.unmeasured for length in report.lengths}
    assert reasons == {
        "t=1": "pytorch failed with ValueError: 1 tokens are not taken",
        "t=32": "pytorch failed with ValueError: 32 tokens are not taken",
    }
    assert report.result.startswith("within tolerance; NOT MEASURED of at t=1: pytorch failed")
    assert any(line.startswith("NOT MEASURED: at t=32: pytorch failed") for line in report.lines())


def test_where_only_onnx_runtime_fails_the_file_differs(baked: Path, tmp_path: Path) -> None:
    """An example's length that is left in the graph, as a loop over chunks leaves it."""
    model = load_model(baked)
    x = model.graph.inputs[0]
    table = ir.val("table", const_value=ir.tensor(torch.zeros(EXAMPLE + 2, HIDDEN).numpy(), name="table"))
    start, end = (ir.val(name, const_value=ir.tensor([size], name=name)) for name, size in (("start", 0), ("end", 10)))
    for value in (table, start, end):
        model.graph.register_initializer(value)
    reader = next(use.node for use in x.uses() if use.node.op_type == "MatMul" or use.node.op_type == "Add")
    count = ir.node("Shape", [x], {"start": 0, "end": 1})
    head = ir.node("Slice", [table, start, count.outputs[0]])
    added = ir.node("Add", [x, head.outputs[0]])
    added.outputs[0].dtype, added.outputs[0].shape = x.dtype, x.shape
    for use in tuple(x.uses()):
        if use.node is reader:
            use.node.replace_input_with(use.idx, added.outputs[0])
    model.graph.insert_before(reader, [count, head, added])
    path = save_model(model, tmp_path / "chunk.onnx")
    report = compare(path, windows(baked=True), unmapped_path=baked.with_name("model.onnx"))
    assert [length.passed for length in report.lengths] == [True, False]
    assert report.lengths[1].failure.startswith("ONNX Runtime failed: ")
    assert report.verdict.startswith("at t=32: PyTorch runs, and ONNX Runtime failed: ")
    assert "so does the file before mapping" not in report.verdict
