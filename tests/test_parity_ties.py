"""Experts of equal scores: which are chosen is named, both sides choose alike, and all else is compared as ever."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.functional import finalize_add_rms_norm
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import operator_of
from moetrt.parity import ParityReport, compare
from moetrt.source import Source

TOKENS, EXPERTS, TOP_K, HIDDEN = 12, 8, 2, 16

Choose = Callable[[torch.Tensor], torch.Tensor]

CHOICES: dict[str, tuple[Choose, str]] = {
    "topk": (lambda scores: scores.topk(TOP_K, -1, sorted=False).indices, "TopK"),
    "sort": (lambda scores: scores.sort(-1, descending=True).indices[:, :1], "TopK"),
    "argmax": (lambda scores: scores.argmax(-1, keepdim=True), "ArgMax"),
    "max": (lambda scores: scores.max(-1).indices[:, None], "ArgMax"),
}
"""How a router chooses, and the node that it becomes."""


class Layer(torch.nn.Module):
    """A router, experts that are a matrix each, and the tail."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = torch.nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.gamma = torch.nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))
        self.choose = choose

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x).softmax(-1)
        chosen = self.choose(scores)
        rows = torch.einsum("th,tkhi->tki", x, self.experts[chosen])
        index = torch.arange(chosen.numel(), dtype=torch.int32).view(chosen.shape)
        routed = UnfinalizedMoEOutput(rows.reshape(-1, HIDDEN), scores.gather(-1, chosen), index)
        return finalize_add_rms_norm(MoEOutput(routed, None, 2.5), residual, self.gamma)


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(choose) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


def make_source(choice: str = "topk", *, tied: bool = True) -> Source:
    torch.manual_seed(0)
    module = Model(CHOICES[choice][0])
    if tied:
        torch.nn.init.zeros_(module.layers[0].router.weight)
    return Source(module, {"x": torch.randn(TOKENS, HIDDEN)}, {"x": {0: "t"}}, description="Model")


def mapped(source: Source, folder: Path) -> Path:
    assert map_file(export(source, folder).model_path, folder / "mapped.onnx").mapped == 2
    return folder / "mapped.onnx"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose first router gives every expert the same score."""
    return mapped(make_source(), tmp_path_factory.mktemp("tied"))


def tie_lines(report: ParityReport) -> list[str]:
    return [note for note in report.notes if note.startswith("tie")]


def test_case_57_equal_scores_are_named_and_both_sides_choose_alike(tied: Path, tmp_path: Path) -> None:
    report = compare(tied, make_source())
    assert report.passed, report.verdict
    # Nothing is set aside: every element is measured, by the rule that there is.
    assert all(output.unmeasured == 0 and output.worst <= output.worst_tolerance < 1e-4 for output in report.outputs)
    assert len(report.ties) == TOKENS
    assert {tie.token for tie in report.ties} == set(range(TOKENS))
    for tie in report.ties:
        assert len(tie.taken) == len(tie.left) > 0
        assert not set(tie.taken) & set(tie.left)
        assert tie.margin == 0 <= tie.rounding < 1e-5
        assert {score for group in tie.scores for score in group} == {1 / EXPERTS}
    first = report.ties[0]
    line = tie_lines(report)[0]
    assert line.startswith("tie: token 0 at 'node_topk")
    assert "before tail 1 of 2 (layers.0" in line
    assert f"ONNX Runtime takes {', '.join(map(str, first.taken))}, PyTorch {', '.join(map(str, first.left))}" in line
    assert "0.125" in line
    assert "equal (and 11 more tokens there)" in line
    # Each length has its own.
    assert [len(length.ties) for length in report.lengths] == [1, 4 * TOKENS]
    assert report.result == f"within tolerance; with ONNX Runtime's choice at {5 * TOKENS + 1} ties"
    content = json.loads(report.write_json(tmp_path / "parity.json").read_text())
    assert [entry["tokens"] for entry in content["ties"]] == [TOKENS]
    assert content["ties"][0]["first"]["margin"] == 0


def planted(path: Path, fault: Callable[[ir.Model], None], folder: Path) -> Path:
    model = load_model(path)
    fault(model)
    return save_model(model, folder / "faulty.onnx")


def scaled(model: ir.Model) -> None:
    node = [node for node in model.graph if operator_of(node)][1]
    node.attributes["routed_scaling_factor"] = ir.AttrFloat32("routed_scaling_factor", 2.4)


def slightly_wrong_expert(model: ir.Model) -> None:
    shape = (EXPERTS, HIDDEN, HIDDEN)
    weights = [value for value in model.graph.initializers.values() if value.shape == shape]
    changed(weights[1], lambda numbers: numbers * 1.001)


def changed(weight: ir.Value, change: Callable[[np.ndarray], np.ndarray]) -> None:
    assert weight.const_value is not None
    weight.const_value = ir.tensor(change(weight.const_value.numpy()), name=weight.name)


def exchanged_router(model: ir.Model) -> None:
    changed(model.graph.initializers["layers.1.router.weight"], lambda numbers: numbers[::-1].copy())


def test_case_57_a_fault_beside_ties_is_still_named(tied: Path, tmp_path: Path) -> None:
    before = tied.with_name("model.onnx")
    report = compare(planted(tied, scaled, tmp_path), make_source(), unmapped_path=before)
    assert report.result == "DIFFERS"
    assert "the first tail that is off is 2 of 2" in report.cause
    assert "routed_scaling_factor was 2.4; 2.5 explains it" in report.cause
    assert tie_lines(report)


def test_case_57_a_small_fault_between_the_tails_is_still_found(tied: Path, tmp_path: Path) -> None:
    path = planted(tied, slightly_wrong_expert, tmp_path)
    report = compare(path, make_source(), unmapped_path=tied.with_name("model.onnx"))
    assert report.result == "DIFFERS"
    assert "is not the weight of the graph before mapping" in report.cause


def test_case_57_another_choice_of_other_scores_is_no_tie(tied: Path, tmp_path: Path) -> None:
    """A router whose experts are exchanged: its choices are told of, and nothing is compared by them."""
    path = planted(tied, exchanged_router, tmp_path)
    report = compare(path, make_source(), unmapped_path=tied.with_name("model.onnx"))
    assert report.result == "DIFFERS"
    assert report.ties == ()
    assert any(
        note.startswith("no tie: token ") and "before tail 2 of 2" in note and "of roundings" in note
        for note in report.notes
    )
    assert not tie_lines(report)


@pytest.mark.parametrize("choice", ["sort", "argmax", "max"])
def test_case_57_scores_that_rounding_alone_parts_are_a_tie(tmp_path: Path, choice: str) -> None:
    """Pairs of experts whose scores are the same sum in another order: float64, PyTorch and ONNX Runtime disagree."""
    source = make_source(choice, tied=False)
    router = source.module.layers[0].router.weight  # type: ignore[union-attr, index]
    with torch.no_grad():
        router[1::2] = router[::2].flip(-1)
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(200, HIDDEN // 2, generator=generator)
    feed = {"x": torch.cat([half, half.flip(-1)], -1)}
    path = mapped(source, tmp_path)
    assert CHOICES[choice][1] in {node.op_type for node in load_model(path).graph}
    report = compare(path, source, inputs=feed)
    assert report.passed, report.verdict
    assert report.ties
    assert all(tie.margin <= tie.rounding < 1e-5 for tie in report.ties)


def test_a_module_that_chooses_otherwise_than_its_file_is_not_known(tied: Path) -> None:
    """Its choices cannot be told from the file's, and a note says so."""
    source = make_source()
    other = copy.deepcopy(source.module)

    def twice(scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(4, -1).indices[:, 2:] if scores.topk(3, -1).indices.numel() else scores.long()

    for layer in other.layers:  # type: ignore[union-attr]
        layer.choose = twice
    report = compare(tied, Source(other, source.example_inputs, source.dynamic_shapes, description="Other"))
    assert not report.passed
    assert any("choose the same experts is not known: the file chooses 2 times" in note for note in report.notes)
