"""What nobody says the dtype or the rank of keeps one tail from being mapped, with a reason, and no other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from moetrt import cli
from moetrt.mapping import map_file, map_model
from moetrt.mapping_report import MappingReport
from moetrt.onnx_files import proto_of, save_model
from tests.equivalence import compare_models
from tests.mapping_checks import RELATIVE, mapped, operators
from tests.mapping_graphs import HIDDEN, TOP_K, Graph, NormForm, feeds

EXPERTS = 8


def custom(g: Graph, *inputs: str) -> str:
    """What an operator gives that no inference knows."""
    return g.op("Custom", *inputs, domain="acme")


def finish(g: Graph, hidden: str) -> None:
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    for name in g.outputs[-2:]:
        g.values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", HIDDEN]))


def good_tail(g: Graph) -> str:
    """A tail that is mapped; returns its hidden state."""
    hidden = g.add(g.gathered(), g.input("residual", ["T", HIDDEN]))
    finish(g, hidden)
    return hidden


def summed(g: Graph, rows: str, weights: str) -> str:
    return g.op("ReduceSum", g.mul(rows, g.op("Unsqueeze", weights, g.ints(-1))), g.ints(1), keepdims=0)


def picked(g: Graph, rows: str, index: str) -> str:
    return g.op("Gather", rows, g.op("Max", index, g.const(0, TensorProto.INT32)), axis=0)


def of_weights(g: Graph) -> str:
    return summed(g, picked(g, "rows", "map"), custom(g, "weights"))


def of_cast_weights(g: Graph) -> str:
    return summed(g, picked(g, "rows", "map"), g.cast(custom(g, "weights"), "float32"))


def of_rows(g: Graph) -> str:
    return summed(g, picked(g, custom(g, "rows"), "map"), "weights")


def of_reshaped_rows(g: Graph) -> str:
    rows = picked(g, custom(g, "rows"), "map")
    return summed(g, g.op("Reshape", rows, g.ints(-1, TOP_K, HIDDEN)), "weights")


def of_cast_rows(g: Graph) -> str:
    return summed(g, picked(g, g.cast(custom(g, "rows"), "float32"), "map"), "weights")


def of_map(g: Graph) -> str:
    return summed(g, picked(g, "rows", custom(g, "map")), "weights")


def of_routes(g: Graph) -> str:
    return summed(g, custom(g, "rows"), "weights")


@pytest.mark.parametrize(
    "form", [of_weights, of_cast_weights, of_rows, of_reshaped_rows, of_cast_rows, of_map, of_routes]
)
def test_a_sum_of_unknown_dtype_is_a_site_beside_one_that_is_mapped(form: Callable[[Graph], str]) -> None:
    g = Graph()
    finish(g, g.add(form(g), good_tail(g)))
    report = map_model(ir.from_proto(g.proto("acme")))
    assert (report.found, report.mapped, report.complete) == (2, 1, False)
    (site,) = report.unmatched
    assert (site.form, site.operator) == ("untyped", None)
    assert "(from Custom 'node_custom_" in (site.reason or "")
    assert "has no known dtype: give it a value_info" in (site.reason or "")


def test_a_sum_of_unknown_rank_is_a_site() -> None:
    g = Graph()
    finish(g, g.add(of_routes(g), good_tail(g)))
    unknown = next(node.output[0] for node in g.nodes if node.op_type == "Custom")
    info = onnx.ValueInfoProto(name=unknown)
    info.type.tensor_type.elem_type = TensorProto.FLOAT
    g.values.append(info)
    (site,) = map_model(ir.from_proto(g.proto("acme"))).unmatched
    assert f"'{unknown}' (from Custom 'node_{unknown}') has no known rank" in (site.reason or "")


@pytest.mark.parametrize("form", [of_weights, of_rows, of_map, of_routes])
def test_a_value_info_is_all_that_is_missing(form: Callable[[Graph], str]) -> None:
    g = Graph()
    finish(g, g.add(form(g), good_tail(g)))
    node = next(node for node in g.nodes if node.op_type == "Custom")
    like = g.inputs[node.input[0]]
    shape = (
        ["T", TOP_K, HIDDEN]
        if form is of_routes
        else [size.dim_param or size.dim_value for size in like.type.tensor_type.shape.dim]
    )
    g.values.append(helper.make_tensor_value_info(node.output[0], like.type.tensor_type.elem_type, shape))
    report = map_model(ir.from_proto(g.proto("acme")))
    assert (report.found, report.complete) == (2, True), [site.became for site in report.sites]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_operands_of_a_captured_node_need_a_dtype(place: int) -> None:
    g = Graph()
    value = g.routed()
    g.nodes[-1].input[place] = "untyped"
    g.nodes.insert(0, helper.make_node("Custom", ["rows"], ["untyped"], name="experts", domain="acme"))
    finish(g, g.add(value, g.input("residual", ["T", HIDDEN])))
    (site,) = map_model(ir.from_proto(g.proto("acme"))).sites
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    name = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")[place]
    assert (site.reason or "").startswith(f"{name} 'untyped' (from Custom 'experts') has no known dtype")


@pytest.mark.parametrize("gated", [False, True])
def test_an_untyped_shared_output_stays_outside(gated: bool) -> None:
    """The sum alone is mapped, beside what the custom operator gives."""
    g = Graph()
    routed = g.gathered()
    residual = g.input("residual", ["T", HIDDEN])
    shared = custom(g, residual)
    if gated:
        shared = g.mul(residual, g.op("Sigmoid", shared))
    finish(g, g.add(g.add(routed, shared), residual))
    model = ir.from_proto(g.proto("acme"))
    (site,) = map_model(model).sites
    assert site.operator == "MoEFinalizeAdd"
    assert "adds a value, but 'custom_" in (site.reason or "")
    assert proto_of(model).graph.node


def pooled(g: Graph) -> str:
    """The mean of a sentence's words, by a mask: nothing is added to the sum."""
    words = custom(g, g.input("words", ["T", TOP_K, HIDDEN]))
    total = summed(g, words, custom(g, "weights"))
    return g.op("Div", total, g.const(3.0))


def test_pooling_of_unknown_dtype_is_no_site() -> None:
    g = Graph()
    good_tail(g)
    g.output(pooled(g))
    g.values.append(helper.make_tensor_value_info(g.outputs[-1], TensorProto.FLOAT, ["T", HIDDEN]))
    report = map_model(ir.from_proto(g.proto("acme")))
    assert (report.found, report.complete) == (1, True), [site.became for site in report.sites]


def routed_by_custom_scores(g: Graph, table: tuple[int, ...]) -> None:
    """A TopK of scores of unknown dtype picks from a table, whose rows meet by their maximum."""
    scores = custom(g, g.op("MatMul", "residual", g.const(np.ones((HIDDEN, EXPERTS)))))
    g.op("TopK", scores, g.ints(2), axis=-1, count=2)
    found = g.op("Gather", g.const(np.ones(table)), g.nodes[-1].output[1], axis=0)
    g.output(g.op("ReduceMax", found, g.ints(1), keepdims=0))
    g.values.append(helper.make_tensor_value_info(g.outputs[-1], TensorProto.FLOAT, ["T", *table[1:]]))


def with_router(*table: int) -> MappingReport:
    g = Graph()
    good_tail(g)
    routed_by_custom_scores(g, table)
    return map_model(ir.from_proto(g.proto("acme")))


def test_a_router_of_unknown_scores_is_a_site() -> None:
    (site,) = with_router(EXPERTS, HIDDEN, HIDDEN).unmatched
    assert site.form == "router"
    assert "chooses among experts, but 'custom_" in (site.reason or "")
    assert "has no known dtype" in (site.reason or "")


def test_words_chosen_by_unknown_scores_are_no_site() -> None:
    assert with_router(EXPERTS, HIDDEN).complete


MICROSOFT: dict[str, Callable[[Graph, str], str]] = {
    "FusedMatMul": lambda g, x: microsoft(g, "FusedMatMul", x, square(g), alpha=0.5),
    "FusedMatMul-transB": lambda g, x: microsoft(g, "FusedMatMul", x, square(g), transB=1),
    "FusedGemm": lambda g, x: microsoft(g, "FusedGemm", x, square(g), activation="Relu"),
    "QuickGelu": lambda g, x: microsoft(g, "QuickGelu", x),
    "BiasGelu": lambda g, x: microsoft(g, "BiasGelu", x, g.vector(3)),
    "FastGelu": lambda g, x: microsoft(g, "FastGelu", x),
    "SkipLayerNormalization": lambda g, x: microsoft(g, "SkipLayerNormalization", x, x, g.vector(3)),
    "MatMulNBits": lambda g, x: microsoft(
        g,
        "MatMulNBits",
        x,
        g.const(np.arange(HIDDEN * 8).reshape(HIDDEN, 1, 8), TensorProto.UINT8),
        g.const([0.01] * HIDDEN),
        K=HIDDEN,
        N=HIDDEN,
        bits=4,
        block_size=16,
    ),
}


def microsoft(g: Graph, op_type: str, *inputs: str, **attributes: object) -> str:
    return g.op(op_type, *inputs, domain="com.microsoft", **attributes)


def square(g: Graph) -> str:
    return g.const(np.random.default_rng(4).normal(size=(HIDDEN, HIDDEN)))


@pytest.mark.parametrize("operator", MICROSOFT)
def test_rows_behind_an_operator_of_onnx_runtime_are_typed(operator: str) -> None:
    g = Graph()
    g.routed()
    g.nodes.pop()
    g.values.pop()
    routed = summed(g, picked(g, MICROSOFT[operator](g, "rows"), "map"), "weights")
    finish(g, g.add(routed, g.input("residual", ["T", HIDDEN])))
    before = ir.from_proto(g.proto("com.microsoft"))
    after, report = mapped(before)
    assert (report.found, report.complete) == (1, True), [site.became for site in report.sites]
    assert operators(after) == ["MoEFinalizeAddRMSNorm"]
    for seed in range(2):
        given = feeds(before, seed)
        given["map"] = np.abs(given["map"])
        for difference in compare_models(before, after, given):
            assert difference.relative <= RELATIVE["float32"], str(difference)


def test_a_product_over_transposed_batches_stays_unknown() -> None:
    g = Graph()
    g.routed()
    g.nodes.pop()
    g.values.pop()
    x = g.input("x", [2, 3, HIDDEN])
    rows = microsoft(g, "FusedMatMul", x, g.const(np.ones((2, HIDDEN, HIDDEN))), transBatchA=1)
    finish(g, g.add(summed(g, picked(g, rows, "map"), "weights"), g.input("residual", ["T", HIDDEN])))
    (site,) = map_model(ir.from_proto(g.proto("com.microsoft"))).sites
    assert "has no known dtype" in (site.reason or "")


def test_names_that_the_graph_has_are_not_taken_again() -> None:
    """A value is named as what another run of the mapper would write beside its plugin node."""
    g = Graph()
    good_tail(g)
    first, report = mapped(ir.from_proto(g.proto()))
    (site,) = report.sites
    made = [
        value.name or "" for node in first.graph for value in node.outputs if (value.name or "").startswith(site.name)
    ]
    assert made
    for name in made:
        proto = g.proto()
        other = proto.graph.node.add()
        other.CopyFrom(helper.make_node("Neg", ["residual"], [name]))
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", HIDDEN]))
        before = ir.from_proto(proto)
        after, report = mapped(before)
        assert report.complete
        for difference in compare_models(before, after, feeds(before)):
            assert difference.relative <= RELATIVE["float32"], str(difference)


def test_a_model_that_cannot_be_written_is_our_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = Graph()
    good_tail(g)
    source = save_model(g.model(), tmp_path / "model.onnx")

    def broken(model: ir.Model, **_: object) -> MappingReport:
        model.graph[0].outputs[0].type = ir.TensorType(None)  # type: ignore[arg-type]
        return MappingReport([])

    monkeypatch.setattr("moetrt.mapping.map_model", broken)
    with pytest.raises(RuntimeError, match="the model cannot be written: AttributeError: 'NoneType'"):
        map_file(source, tmp_path / "mapped.onnx")
    assert cli.run(["map", str(source), "-o", str(tmp_path / "mapped.onnx")]) == 3
    assert "unexpected RuntimeError: the model cannot be written: AttributeError: 'No" in capsys.readouterr().err
    assert not (tmp_path / "mapped.onnx").exists()
    assert proto_of(g.model()).graph.node
