"""The fuzz of the mapper: a short run finds nothing, and one with a fault planted in the mapper finds that."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from benchmarks import fuzz
from benchmarks.fuzz import CRASHED, KEPT, MAPPED, WRONG, Summary, examine, mutated
from benchmarks.fuzz_compare import Comparison, Feeds, Session, feeds_of
from benchmarks.fuzz_graphs import GRAPHS, graph
from benchmarks.fuzz_mutations import MUTATIONS, Mutant
from moetrt import mapping
from moetrt.removal import detach
from moetrt.segments import combine, growth, loop, rms_norm, routes, sums
from moetrt.segments.reading import dims
from moetrt.segments.tail import Operand, Write

Patch = tuple[Any, str, Any]


def _forget_masks(found: routes.Found, base: routes.PerRoute | None) -> None:
    found.masks.clear()


def _by_size(node: ir.Node, ndim: int) -> tuple[int, ir.Node] | None:
    """The first axis whose size is a number, whichever is summed."""
    sizes = dims(node.inputs[0]) if node.inputs[0] is not None else None
    return next(((axis, node) for axis, size in enumerate(sizes or []) if isinstance(size, int)), None)


def _without_scale(seed: Any, tail: Any, shared: Any) -> dict[str, float | int]:
    combined = shared.scale if shared is not None else 1.0
    return {"combine_scale": combined, "routed_scaling_factor": 1.0, "apply_expert_weights": seed.apply_expert_weights}


def _untransposed(write: Write, value: ir.Value, top_k: int | str | None) -> ir.Value:
    sizes = ir.tensor([-1, int(top_k or 0)], dtype=ir.DataType.INT64)
    shape = write("Constant", [], {"value": sizes}, ir.DataType.INT64, [2])
    return write("Reshape", [value, shape], {}, value.dtype, [None, top_k])


def _remove_all(node: ir.Node) -> list[str]:
    """Removes the nodes inside a norm, whoever else reads them."""
    pending = [node]
    while pending:
        current = pending.pop()
        pending += [made for value in current.inputs if value is not None and (made := value.producer()) is not None]
        if current is node or current.op_type in ("Pow", "ReduceMean", "Sqrt", "Reciprocal"):
            detach(current)
    return []


_add, _plus_eps = growth._add, rms_norm._plus_eps


def _add_and_forget(tail: growth.Tail, node: ir.Node, seed: Any) -> None:
    _add(tail, node, seed)
    tail.terms.pop()


def _no_eps(mean: ir.Value, source: Any) -> tuple[ir.Value, float]:
    return _plus_eps(mean, source)[0], 0.0


def _as_it_is(index: Operand, *others: Any) -> Operand:
    return index


_NOT_CHECKED: list[Patch] = [(mapping, "unaccounted", lambda *arguments: None)]


@dataclass(frozen=True)
class Fault:
    """A fault of the mapper.

    Attributes:
        patches: what it is planted by: a module, a name in it, and what stands there instead.
        kinds: of changes, one of which shows it.
        number: the first graph that shows it, with seed 0.
    """

    patches: list[Patch]
    kinds: tuple[str, ...]
    number: int


FAULTS: dict[str, Fault] = {
    "an axis": Fault([(sums, "summed_axis", _by_size)], ("axis",), 56),
    "a bound": Fault([(module, "lowered", _as_it_is) for module in (routes, loop)], ("clamp",), 43),
    "a cast": Fault([(routes, "keeps", lambda *dtypes: True)], ("cast",), 7),
    "a mask": Fault([(routes, "set_other_masks_apart", _forget_masks), *_NOT_CHECKED], ("mask",), 82),
    "a scale": Fault([(mapping, "_sum_attributes", _without_scale)], ("constant",), 7),
    "an added term": Fault([(growth, "_add", _add_and_forget), *_NOT_CHECKED], ("swap",), 0),
    "a transpose": Fault([(routes, "_transposed", _untransposed)], ("transpose",), 9),
    "an eps": Fault([(rms_norm, "_plus_eps", _no_eps)], ("constant",), 10),
    "an extra reader": Fault(
        [(mapping, "remove_dead", _remove_all), (rms_norm, "_check_readers", lambda *arguments: None)], ("reader",), 2
    ),
    "the order of the routes": Fault([(loop, "_complaint", lambda *arguments: None)], ("constant", "axis"), 286),
    "T for K's partner": Fault(
        [(module, "may_be_repeated", lambda *sizes: False) for module in (routes, sums, combine)]
        + [(routes, "_other_tokens", lambda *operands: None)],
        ("shape",),
        3,
    ),
    "an entry beyond the rows": Fault([(routes, "_only_rows", _as_it_is)], ("swap",), 12),
    "a broadcast": Fault([(routes, "_check_alike", lambda *arguments: None)], ("shape",), 41),
}


@pytest.fixture(scope="module")
def short_run() -> Summary:
    return fuzz.fuzz(0, 0, 150)


def test_a_short_run_finds_nothing(short_run: Summary) -> None:
    assert [str(result) for result in short_run.found] == []
    assert sum(short_run.total.values()) == 150
    assert short_run.compared >= 90
    assert short_run.total[MAPPED] >= 60
    # What is never mapped would prove nothing, nor would a kind of change that never runs.
    assert short_run.total[KEPT] >= 20
    assert all(short_run.outcomes[kind, MAPPED] for kind in MUTATIONS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph is right without the fault."""
    fault = FAULTS[name]
    right = examine(0, fault.number, fault.kinds)
    assert right.outcome in (MAPPED, KEPT), right
    for module, attribute, instead in fault.patches:
        monkeypatch.setattr(module, attribute, instead)
    planted = examine(0, fault.number, fault.kinds)
    assert planted.outcome in (WRONG, CRASHED), planted
    assert planted.changes == right.changes


@pytest.mark.parametrize("name", ["an added term", "a mask"])
def test_what_is_dropped_is_not_mapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mapper's own check in place the same faults change no number: the site stays, with the reason."""
    fault = FAULTS[name]
    module, attribute, instead = fault.patches[0]
    monkeypatch.setattr(module, attribute, instead)
    assert examine(0, fault.number, fault.kinds).outcome in (MAPPED, KEPT)
    model = ir.from_proto(graph(0))
    report = mapping.map_model(model)
    (site,) = report.sites
    assert "would be dropped" in str(site.reason), site


def test_a_number_gives_the_same_graph_again() -> None:
    one, other = mutated(3, 11), mutated(3, 11)
    assert one.done == other.done
    assert one.proto.SerializeToString() == other.proto.SerializeToString()
    assert mutated(4, 11).done != one.done


@pytest.mark.parametrize("number", range(len(GRAPHS)), ids=lambda number: GRAPHS[number].__name__)
def test_each_graph_is_mapped_as_it_is(number: int) -> None:
    model = ir.from_proto(graph(number))
    (site,) = mapping.map_model(model).sites
    norm = GRAPHS[number].__name__ != "accumulated_before_layer_norm"
    assert site.operator == ("MoEFinalizeAddRMSNorm" if norm else "MoEFinalizeAdd")


def _ends_the_process(seed: int, number: int, kinds: Sequence[str] = ()) -> Mutant:
    """As ONNX Runtime's Einsum does where there is no token."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_graph_that_ends_the_process_is_one_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "mutated", _ends_the_process)
    summary = fuzz.fuzz(0, 0, 2)
    assert dict(summary.total) == {fuzz.NOT_RUN: 2}


def _one_node(op_type: str, *inputs: str) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["T"]) for name in ("a", "b")]
    output = helper.make_tensor_value_info("c", TensorProto.FLOAT16, ["T"])
    graph = helper.make_graph([helper.make_node(op_type, list(inputs), ["c"])], "one", infos, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        (("Add", "a", "b"), ("Add", "b", "a"), False),
        (("Add", "a", "b"), ("Sub", "a", "b"), True),
        (("Mul", "a", "b"), ("Add", "a", "b"), True),
    ],
    ids=str,
)
def test_numbers_are_held_against_float64(before: tuple[str, ...], after: tuple[str, ...], wrong: bool) -> None:
    original = _one_node(*before)
    session = Session(original)
    comparison = Comparison(original, _one_node(*after), session)
    found = []
    for feeds in feeds_of(original, 0):
        outputs = session.run(feeds.values)
        assert outputs is not None
        found.append(comparison.wrong(feeds, outputs))
    assert found[0] is None  # no token, no number
    assert any(found) == wrong


def test_an_overflow_of_the_graph_alone_is_no_fault() -> None:
    """60000 + 60000 - 60000 is Inf in float16, and 60000 in float32: the mapped graph may give either."""
    original = _one_node("Add", "a", "b")
    large = np.full(3, 60000.0, dtype=np.float16)
    comparison = Comparison(original, original, Session(original))
    feeds = Feeds("T=3", {"a": large, "b": large})
    outputs = {"c": np.array([np.inf, np.inf, 1.0], dtype=np.float16)}
    found = comparison.wrong(feeds, outputs)
    assert found is not None
    assert found.error == np.inf


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert fuzz.main(["--count", "8", "--seed", "5", "--save", str(tmp_path / "found")]) == 0
    out = capsys.readouterr().out
    assert "8" in out
    assert f"{CRASHED}" in out
    assert "0 found (seed 5)" in out
    assert list((tmp_path / "found").iterdir()) == []


def test_what_is_found_is_printed_and_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS["a scale"]
    for module, attribute, instead in fault.patches:
        monkeypatch.setattr(module, attribute, instead)
    assert fuzz.main(["--count", "3", "--seed", "0", "--save", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    saved = list(tmp_path.iterdir())
    assert saved
    for path in saved:
        number = path.stem.partition("-")[2]
        assert f"{number} {WRONG}: " in out
        onnx.load(path)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["--count", "0"], "--count was 0"), (["--seed", "-1"], "--seed was -1"), (["--start", "-1"], "--start was -1")],
)
def test_options_that_are_not_taken(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(arguments) == 2
    assert line in capsys.readouterr().err


def test_float16_is_rounded_after_each_node() -> None:
    """ONNX Runtime hands float16 on in float32 where it has no operator for it, and 2 + 0.00001 then is no 2."""
    nodes = [helper.make_node("Add", ["x", "y"], ["more"]), helper.make_node("Sub", ["more", "x"], ["left"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1]) for name in ("x", "y", "left")]
    model = helper.make_model(helper.make_graph(nodes, "rounds", values[:2], values[2:]), ir_version=10)
    outputs = Session(model).run({"x": np.array([2.0], np.float16), "y": np.array([1e-5], np.float16)})
    assert outputs is not None
    assert outputs["left"].tolist() == [0.0]
