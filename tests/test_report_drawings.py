"""The report's plots: places on a log axis, and pictures of tails of any size."""

import math
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from moetrt.capture import export
from moetrt.mapping import map_file
from moetrt.onnx_files import read_proto
from moetrt.report.drawings import (
    SHAPE_OF,
    LogAxis,
    Mark,
    Row,
    after,
    before,
    rows_plot,
    series_plot,
    shape_path,
    shortened,
)
from moetrt.report.graph import GraphNode, Operand, layer_of, layers_of, replaced_nodes, shape_text
from moetrt.source import load_source
from tests.mapping_graphs import full_tail
from tests.test_mapping import CASE25

FIGURES = st.lists(st.one_of(st.none(), st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=20)


@given(FIGURES)
def test_places_keep_the_order_and_lie_within_the_axis(values: list[float | None]) -> None:
    axis = LogAxis(values, 3.0, 97.0)
    places = [axis.place(value) for value in values]
    assert all(3.0 <= place <= 97.0 for place in places)
    # What is not finite is beyond everything, 0 below everything.
    order = sorted(values, key=lambda value: math.inf if value is None else value)
    sorted_places = [axis.place(value) for value in order]
    assert sorted_places == sorted(sorted_places)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 14
    assert [place for place, _ in ticks] == sorted(place for place, _ in ticks)
    assert ("0" in dict(map(reversed, ticks))) == (0.0 in values)  # type: ignore[arg-type]
    assert any(label == "not finite" for _, label in ticks) == (None in values)


def test_equal_ratios_are_equal_distances() -> None:
    axis = LogAxis([1e-8, 1e-2], 0.0, 100.0)
    steps = [axis.place(10.0 ** (exponent + 1)) - axis.place(10.0**exponent) for exponent in range(-8, -2)]
    assert steps == pytest.approx([steps[0]] * 6, abs=0.02)  # places are rounded to 0.01
    assert axis.place(1e-8) == 0.0
    assert axis.place(1e-2) == 100.0


@pytest.mark.parametrize("plot", [rows_plot, series_plot])
def test_every_figure_is_marked_once(plot) -> None:
    rows = [
        Row(f"layer {i}", (Mark("kernel-host", 1e-7 * i, 1e-7 * i, "ours"), Mark("limit", 1e-5, 1e-5, "most")))
        for i in range(1, 95)
    ]
    drawing = plot("title", "words", rows, [("kernel-host", "the kernel")], "axis")
    assert sum(element.tag == "svg" for element in drawing.elements) == 2 * 94
    marked = Row("a", (Mark("native", 1.0, 2.0, "a range"), Mark("plugin", None, None, "not finite")))
    assert sum(element.tag == "svg" for element in plot("t", "d", [marked], [], "axis").elements) == 3


@pytest.mark.parametrize("count", [6, 7, 94])
def test_marks_of_one_value_stand_apart_however_many_rows_there_are(count: int) -> None:
    series = ("kernel-host", "onnxruntime", "pytorch", "unfused")
    rows = [Row(f"layer {i}", tuple(Mark(name, 1e-7, 1e-7, name) for name in series)) for i in range(count)]
    marks = [element for element in series_plot("t", "d", rows, [], "axis").elements if element.tag == "svg"]
    places = [(mark.attributes["x"], mark.move) for mark in marks]
    assert len(set(places)) == len(places) == 4 * count
    # Of two neighbours, the last mark of one stands before the first of the other.
    if count > 6:
        percents = [float(str(x).rstrip("%")) for x, _ in places]
        assert percents == sorted(percents)
        assert all(0 <= percent <= 100 for percent in percents)


def test_no_two_series_that_stand_together_have_one_shape() -> None:
    for together in (
        ("kernel-host", "tensorrt", "onnxruntime", "pytorch", "unfused", "limit"),
        ("plugin", "native", "floor"),
    ):
        assert len({shape_path(series) for series in together}) == len(together)
    assert all(shape_path(series) for series in SHAPE_OF)


def chain(count: int) -> list[GraphNode]:
    return [GraphNode(f"n{i}", "Add", (f"v{i}", "v0"), (f"v{i + 1}",)) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 12, 40, 41, 600])
def test_a_tail_of_any_size_can_be_drawn(count: int) -> None:
    residual, out = Operand("residual", "v0", "FLOAT", "[T, 8]"), Operand("norm_out", f"v{count}", "FLOAT", "[T, 8]")
    drawing = before(chain(count), [residual], [out], {})
    boxes = [element for element in drawing.elements if element.attributes.get("class") == "node"]
    assert len(boxes) == min(count, 40)
    texts = [element.text for element in drawing.elements if element.tag == "text"]
    assert (f"… and {count - 40} nodes more …" in texts) == (count > 40)
    assert "norm_out" in texts
    assert all(0 <= element.attributes["y"] <= drawing.height for element in boxes)


def test_the_plugin_node_shows_what_flows_in_and_out() -> None:
    inputs = [Operand("gemm2_permuted", "rows", "BFLOAT16", "[R, 7168]"), Operand("gamma", "g", "FLOAT", "[7168]")]
    drawing = after("MoEFinalizeAddRMSNorm", inputs, [Operand("norm_out", "o", "BFLOAT16", "[T, 7168]")], {"eps": 1e-6})
    texts = [element.text for element in drawing.elements if element.tag == "text"]
    for text in ("MoEFinalizeAddRMSNorm", "eps 1e-06", "gemm2_permuted", "BFLOAT16 [R, 7168]", "norm_out"):
        assert text in texts


@given(st.text(max_size=200), st.integers(3, 60))
def test_a_name_is_shortened_in_its_middle(text: str, length: int) -> None:
    short = shortened(text, length)
    assert len(short) <= length
    if len(text) <= length:
        assert short == text
    else:
        head, tail = short.split("…")[0], short[short.rindex("…") + 1 :] if "…" not in text else ""
        assert text.startswith(head)
        assert text.endswith(tail)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts/MoEFinalizeAddRMSNorm", ("model.layers", 3)),
        ("/model/layers.12/mlp/experts.7/MatMul", ("model.layers", 12)),
        ("decoder/block_4/ffn", ("decoder.block", 4)),
        ("transformer.h.0.moe", ("transformer.h", 0)),
        ("layers.61", ("layers", 61)),
        ("model.norm.weight", None),
        ("players.3.x", None),
        ("path.4", None),
        ("node_MatMul_3", None),
    ],
)
def test_a_name_tells_its_layer(name: str, layer: tuple[str, int] | None) -> None:
    assert layer_of(name) == layer


def test_layers_come_from_weights_where_nothing_else_has_them() -> None:
    weights = [helper.make_tensor(f"m.layers.{i}.w", TensorProto.FLOAT, [1], [1.0]) for i in (10, 2, 0)]
    graph = helper.make_graph([helper.make_node("Identity", ["m.layers.0.w"], ["y"])], "g", [], [], weights)
    model: onnx.ModelProto = helper.make_model(graph)
    assert layers_of(model) == [("m.layers", 0), ("m.layers", 2), ("m.layers", 10)]


def test_shapes_for_people() -> None:
    assert shape_text(["batch", 3, None]) == "[batch, 3, ?]"
    assert shape_text([]) == "[]"
    assert shape_text(None) == "[?]"


@pytest.mark.parametrize("name", sorted(CASE25))
def test_the_nodes_of_a_tail_are_found_in_every_form_of_norm(tmp_path: Path, name: str) -> None:
    """One tail: what the file lost is that tail, also where the plugin node's output is reshaped on."""
    source_path, mapped_path = tmp_path / "model.onnx", tmp_path / "mapped.onnx"
    onnx.save(full_tail(CASE25[name]).proto(), source_path)
    (site,) = map_file(source_path, mapped_path).sites
    source, mapped = onnx.load(source_path), onnx.load(mapped_path)
    found = replaced_nodes(source, mapped, [str(output["value"]) for output in site.outputs.values()])
    left = {tuple(node.output) for node in mapped.graph.node if node.domain != "moetrt"}
    lost = [tuple(node.output) for node in source.graph.node if tuple(node.output) not in left]
    assert len(lost) >= 9
    # Beside these, only the sum and the norm's result, whose values have other makers now.
    further = [node for node in found if node.outputs not in lost]
    assert [node.outputs for node in found if node not in further] == lost
    assert len(further) <= 2
    assert {node.op_type for node in further} <= {"Add", "Mul"}
    assert [node.op_type for node in found].count("MoEFinalizeAdd") == 1
    assert "ReduceMean" in {node.op_type for node in found}


def test_the_picture_is_of_one_tail_of_several(tmp_path: Path) -> None:
    """The tail before, and nodes that tails share, are not drawn along: the residual is the tail before's hidden."""
    exported = export(load_source("moetrt.models:deepseek_v3"), tmp_path)
    sites = map_file(exported.model_path, tmp_path / "mapped.onnx").sites
    source, mapped = read_proto(exported.model_path), read_proto(tmp_path / "mapped.onnx")
    for site in sites:
        found = replaced_nodes(source, mapped, [str(output["value"]) for output in site.outputs.values()])
        kinds = [node.op_type for node in found]
        assert kinds.count("MoEFinalizeAdd") == kinds.count("ReduceMean") == 1
        assert len(kinds) <= 12


def test_a_reshape_after_the_plugin_node_leads_back_to_the_tail() -> None:
    def node(op_type: str, inputs: str, outputs: str, domain: str = "") -> onnx.NodeProto:
        return helper.make_node(op_type, inputs.split(), outputs.split(), domain=domain)

    def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
        return helper.make_model(helper.make_graph(nodes, "g", [], []))

    before_, after_ = node("MatMul", "x w", "rows"), node("Neg", "view", "y")
    source = model(before_, node("Add", "rows r", "sum"), node("Reshape", "sum s", "view"), after_)
    mapped = model(before_, node("Tail", "rows r", "t", "moetrt"), node("Reshape", "t s", "view"), after_)
    assert [found.op_type for found in replaced_nodes(source, mapped, ["t"])] == ["Add", "Reshape"]
    assert replaced_nodes(source, mapped, ["none"]) == ()
