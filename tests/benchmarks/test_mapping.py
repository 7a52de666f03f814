"""The mapping benchmark: its graphs are what an export of that depth gives, its rules fail where they should.

Nothing is timed here; memory is, on a smaller model.
"""

import collections
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from benchmarks import mapping
from benchmarks.mapping import Command, Row, Seconds, Timed, main, run_command, time_mapping, widths_of
from benchmarks.mapping_graphs import CAPTURED, FOREIGN, MODELS, DeepModel, Widths, deepened, exported, write
from moetrt.console import Output
from moetrt.errors import InputError
from moetrt.onnx_files import load_model

QWEN3, DEEPSEEK_V3 = MODELS
SMALL = Widths(hidden=64, expert=32, experts=16)


@pytest.fixture(scope="module")
def few() -> onnx.ModelProto:
    """Qwen3-MoE of three layers as `moetrt export` writes it."""
    return exported(QWEN3, CAPTURED, SMALL)


def kinds(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def test_a_deepened_graph_is_the_export_of_that_depth(few: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node kinds, the weights' shapes, and how many tails the file says it has."""
    monkeypatch.setattr("benchmarks.mapping_graphs._EXPORTED_MOE_LAYERS", 4)
    real, deep = exported(QWEN3, CAPTURED, SMALL), deepened(few, 4)
    assert kinds(deep) == kinds(real)
    shapes = [sorted(list(tensor.dims) for tensor in model.graph.initializer) for model in (deep, real)]
    assert shapes[0] == shapes[1]
    assert {entry.key: entry.value for entry in deep.metadata_props}["moetrt.tails_expected"] == "4"
    assert any(tensor.name.startswith("model.layers.3.") for tensor in deep.graph.initializer)


@pytest.mark.parametrize("layers", [3, 7])
def test_layers_follow_one_another(few: onnx.ModelProto, layers: int, tmp_path: Path) -> None:
    """Each layer reads the one before: every node is needed for the output, and nothing is read before it is made."""
    deep = deepened(few, layers)
    made = {value.name for value in (*deep.graph.input, *deep.graph.initializer)}
    for node in deep.graph.node:
        assert set(node.input) - {""} <= made
        assert not made & set(node.output)
        made |= set(node.output)
    needed, pending = set(), [value.name for value in deep.graph.output]
    makers = {name: node for node in deep.graph.node for name in node.output}
    while pending:
        maker = makers.get(pending.pop())
        if maker is not None and maker.name not in needed:
            needed.add(maker.name)
            pending += maker.input
    assert {node.name for node in deep.graph.node} == needed
    write(deep, tmp_path / "model.onnx")
    load_model(tmp_path / "model.onnx")  # onnx.checker is content too


def test_the_last_layers_must_be_alike(few: onnx.ModelProto) -> None:
    with pytest.raises(InputError, match="the graph has 3 layers; as many as that, or more, are taken, not 2"):
        deepened(few, 2)
    odd = onnx.ModelProto()
    odd.CopyFrom(few)
    node = next(
        node for node in reversed(odd.graph.node) if any("layers.2" in entry.value for entry in node.metadata_props)
    )
    node.op_type = "Identity"
    with pytest.raises(InputError, match="layers 1 and 2 of the graph differ in their nodes"):
        deepened(odd, 4)


def small(model: DeepModel, tails: int) -> DeepModel:
    return replace(model, tails=tails, experts=16)


@pytest.mark.parametrize(
    ("model", "exporter"), [(QWEN3, FOREIGN), (DEEPSEEK_V3, CAPTURED)], ids=["Qwen3", "DeepSeek-V3"]
)
def test_every_tail_of_a_smaller_row_is_mapped(
    model: DeepModel, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark's own way on eight layers and 1 GB of weights: all that it holds but time holds here."""
    monkeypatch.setattr(mapping, "MOST_SECONDS", float("inf"))
    monkeypatch.setattr(mapping, "MOST_RATIO", float("inf"))
    row = mapping.measure(small(model, 8), exporter, weights=1e9, repeats=1, output=Output(quiet=True))
    assert row.faults() == []
    assert 1e9 <= row.weights < 1.1e9
    assert row.whole.mapped == 8
    assert row.half.mapped == 4


def test_memory_does_not_grow_with_the_weights(few: onnx.ModelProto, tmp_path: Path) -> None:
    """2 GB beside a graph, copied or not, against the same graph with next to nothing: the graph is all that is held.

    What the peaks differ by otherwise are the allocator's and the loader's whims; one 16 MB piece of a copy would show.
    """
    model = small(QWEN3, 4)
    wide = exported(model, CAPTURED, widths_of(model, 2e9))
    peaks = []
    for name, graph in (("narrow", few), ("wide", wide)):
        source = tmp_path / name / "model.onnx"
        length = write(deepened(graph, model.layers), source)
        runs = [run_command(source, source.parent / output) for output in ("mapped.onnx", "other/mapped.onnx")]
        peaks.append([run.peak for run in runs])
    assert length >= 2e9
    for narrow, other in zip(*peaks, strict=True):
        assert other - narrow < 12e6


SECONDS = Seconds(0.5, 0.1, 0.2, 0.3)


def row(**changes: object) -> Row:
    whole = Timed(10_000, 94, SECONDS, SECONDS)
    half = Timed(5_000, 47, SECONDS, Seconds(0, 0.05, 0.1, 0))
    copy = Command(3.0, 200_000_000, 20_000_000_000, 0)
    made = Row(QWEN3, CAPTURED, 20_000_000_000, whole, half, replace(copy, data=0), copy)
    return replace(made, **changes)  # type: ignore[arg-type]


NAN = float("nan")
BROKEN = {
    "tails": ({"whole": Timed(1, 93, SECONDS, SECONDS)}, "93 of 94 tails were mapped"),
    "slow": (
        {
            "whole": Timed(1, 94, SECONDS, Seconds(0, 1.5, 0.6, 0)),
            "half": Timed(1, 47, SECONDS, Seconds(0, 0.7, 0.3, 0)),
        },
        "mapping took 2.10 s, more than 2.0 s",
    ),
    "ratio": (
        {"whole": Timed(1, 94, SECONDS, Seconds(0, 0.3, 0.04, 0))},
        "twice the layers took 2.27 times as long, more than 2.2",
    ),
    "nan": ({"half": Timed(1, 47, SECONDS, Seconds(0, NAN, 0, 0))}, "twice the layers took nan times as long"),
    "peak": ({"beside": Command(1, 1_000_000_000, 0, 0)}, "the peak was 1.00 GB, not under 1 GB"),
    "copied": ({"beside": Command(1, 1, 4096, 0)}, "beside its data, 4096 bytes were copied"),
    "dense": (
        {"elsewhere": Command(1, 1, 20_000_000_000, 300_000_000)},
        "is 20000000000 bytes of which 300000000 are on the disk",
    ),
    "short": ({"elsewhere": Command(1, 1, 19_999_999_999, 0)}, "the copy of 20000000000 bytes of holes is 19999999999"),
}


def test_a_row_within_the_rules_has_no_fault() -> None:
    assert row().faults() == []


@pytest.mark.parametrize(("changes", "said"), BROKEN.values(), ids=BROKEN)
def test_each_rule_is_held(changes: dict[str, object], said: str) -> None:
    found = row(**changes).faults()
    assert len(found) == 1
    assert said in found[0]
    assert found[0].startswith("Qwen3-235B by moetrt: ")


def test_the_fastest_of_each_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Timed(9, 2, SECONDS, SECONDS)
    turns = [
        Timed(7, 1, Seconds(1, 2, 3, 4), Seconds(1, 1, 1, 1)),
        other,
        Timed(7, 1, Seconds(4, 3, 2, 1), Seconds(2, 2, 0, 2)),
        other,
    ]
    runs = iter(turns)
    monkeypatch.setattr(mapping, "_time_once", lambda source: next(runs))
    first, second = time_mapping([tmp_path / "a", tmp_path / "b"], 2)
    assert first == Timed(7, 1, Seconds(1, 2, 2, 1), Seconds(1, 1, 0, 1))
    assert second == other


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_prints_both_tables(
    broken: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(model: DeepModel, exporter: str, **options: object) -> Row:
        assert options.items() >= {"weights": 3e9, "repeats": 2}.items()
        tails = model.tails - (broken and exporter == FOREIGN)
        timed = Timed(9, tails, SECONDS, SECONDS), Timed(5, model.tails // 2, SECONDS, SECONDS)
        return replace(row(model=model, exporter=exporter), whole=timed[0], half=timed[1])

    monkeypatch.setattr(mapping, "measure", measured)
    assert main(["--repeats", "2", "--gigabytes", "3"]) == int(broken)
    lines = capsys.readouterr().out.splitlines()
    assert "DeepSeek-V3 torch 61 9 57/58" in " ".join(" ".join(lines).split()) or not broken
    assert max(map(len, lines)) <= 80
    assert lines[-1] == (
        "DeepSeek-V3 by torch: 57 of 58 tails were mapped"
        if broken
        else "every rule holds: see the head of benchmarks/mapping.py"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "0"], "--repeats was 0; 1 to 100 is taken"),
        (["--gigabytes", "nan"], "--gigabytes was nan; 0.001 to 1000 is taken"),
    ],
)
def test_options_that_are_not_taken(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"moetrt: error: {said}\n"
