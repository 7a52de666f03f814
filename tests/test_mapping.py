"""Tails grow from the captured finalize node over what follows, and only over what may be taken in."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from moetrt import mapping_report
from moetrt.errors import InputError, InputTypeError
from moetrt.mapping import TAILS_EXPECTED, map_file, map_model
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import operator_of
from moetrt.segments import forms, routers, untyped
from tests.equivalence import compare_models
from tests.mapping_checks import assert_same_numbers, declined, mapped, matched, only, operators
from tests.mapping_graphs import FLOAT, FURTHER_FORMS, HIDDEN, Graph, NormForm, feeds, full_tail

# The tail's whole length


def test_case20_reshape_between_combine_and_residual_add() -> None:
    graph = full_tail()
    site = matched(graph)
    assert site.attributes["routed_scaling_factor"] == 2.5
    assert site.shapes["residual"] == ["B", "S", HIDDEN]
    assert site.shapes["norm_out"] == ["B", "S", HIDDEN]
    after, _ = mapped(graph.model())
    assert [value.shape for value in after.graph.outputs] == [ir.Shape(["B", "S", HIDDEN])] * 2
    assert [node.op_type for node in after.graph] == ["MoEFinalizeAddRMSNorm", "Add"]


@pytest.mark.parametrize("orders", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("reshape", ["first", "middle", "none"])
def test_both_operand_orders_and_every_place_of_the_reshape(orders: tuple[bool, ...], reshape: str) -> None:
    g = Graph()
    in_tokens = {"first": ["B", "S", HIDDEN], "middle": ["T", HIDDEN], "none": ["T", HIDDEN]}[reshape]
    shared = g.input("shared", in_tokens)
    residual = g.input("residual", ["T", HIDDEN] if reshape == "none" else ["B", "S", HIDDEN])
    value = g.mul(g.routed(), g.const(1.75), orders[0])
    if reshape == "first":
        value = g.to_tokens(value)
    value = g.add(value, shared, orders[1])
    if reshape == "middle":
        value = g.to_tokens(value)
    hidden = g.add(value, residual, orders[2])
    g.output(NormForm().write(g, hidden, rank=2 if reshape == "none" else 3), hidden)
    site = matched(g)
    assert set(site.inputs) >= {"shared_output", "residual"}


@pytest.mark.parametrize("after_what", ["norm", "sum"])
def test_reshape_after_the_residual_add(after_what: str) -> None:
    """The sum is [T, H] and the rest of the model wants [B, S, H]: the Reshape moves behind the plugin node."""
    g = Graph()
    g.input("like", ["B", "S", HIDDEN])
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    if after_what == "sum":
        hidden = g.to_tokens(hidden, "like")
        g.output(NormForm().write(g, hidden), g.op("Neg", hidden))
    else:
        normal = NormForm().write(g, hidden, rank=2)
        g.output(g.to_tokens(normal, "like"), hidden)
    matched(g)


def test_squeezed_batch_of_one() -> None:
    g = Graph()
    residual = g.input("residual", [1, "T", HIDDEN])
    value = g.op("Unsqueeze", g.routed(), g.ints(0))
    hidden = g.add(value, residual)
    g.output(NormForm().write(g, hidden), hidden)
    assert matched(g).shapes["norm_out"] == [1, "T", HIDDEN]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("reshaped", [False, True])
def test_shared_expert_times_sigmoid_of_its_gate(swap: bool, rank: int, reshaped: bool) -> None:
    g = Graph()
    residual = g.input("residual", ["B", "S", HIDDEN])
    shape: list[int | str] = ["B", "S"] if rank == 3 else ["T"]
    gated = g.mul(g.op("Sigmoid", g.input("gate", [*shape, 1])), g.input("shared", [*shape, HIDDEN]), swap)
    routed = g.routed()
    if rank == 2 and reshaped:
        value = g.to_tokens(g.add(routed, gated, swap))
    elif rank == 2:
        value = g.add(g.to_tokens(routed), g.to_tokens(gated), swap)
    elif reshaped:
        value = g.add(routed, g.op("Reshape", gated, g.ints(-1, HIDDEN)), swap)
        value = g.to_tokens(value)
    else:
        value = g.add(g.to_tokens(routed), gated, swap)
    hidden = g.add(residual, value)
    g.output(NormForm().write(g, hidden), hidden)
    site = matched(g)
    assert site.shapes["shared_gate"] in (["T", 1], [None, 1])
    assert {"shared_output", "shared_gate", "residual"} <= set(site.inputs)


def test_gated_output_added_after_the_residual() -> None:
    g = Graph()
    value = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    gated = g.mul(g.input("shared", ["T", HIDDEN]), g.op("Sigmoid", g.input("gate", ["T", 1])))
    hidden = g.add(value, gated)
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    site = matched(g)
    assert site.inputs["residual"]["value"] == "residual"
    assert site.inputs["shared_output"]["value"] == "shared"


@pytest.mark.parametrize("swap", [False, True])
def test_combine_and_residual_scale(swap: bool) -> None:
    """Granite and MiniMax: c * (2.5 * routed + shared) + r * residual."""
    g = Graph()
    value = g.add(g.mul(g.routed(), g.const(2.5)), g.input("shared", ["T", HIDDEN]), swap)
    value = g.mul(value, g.const([0.22]), swap)
    hidden = g.add(g.mul(g.input("residual", ["T", HIDDEN]), g.const(3.5), swap), value, swap)
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    attributes = matched(g).attributes
    assert attributes["combine_scale"] == pytest.approx(0.22, rel=1e-6)
    assert attributes["routed_scaling_factor"] == pytest.approx(2.5, rel=1e-6)
    assert attributes["residual_scale"] == 3.5


def test_scale_of_the_whole_sum() -> None:
    g = Graph()
    value = g.add(g.routed(), g.input("shared", ["T", HIDDEN]))
    hidden = g.op("Div", g.add(value, g.input("residual", ["T", HIDDEN])), g.const(4.0))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    attributes = matched(g).attributes
    assert (attributes["combine_scale"], attributes["residual_scale"]) == (0.25, 0.25)


def test_attributes_and_inputs_of_the_captured_node_are_kept() -> None:
    g = Graph()
    g.routed()
    g.nodes.clear()
    g.values.clear()
    shared = g.input("shared", ["T", HIDDEN])
    value = g.op(
        "MoEFinalizeAdd",
        *("rows", "weights", "map", shared),
        domain="moetrt",
        has_shared_output=1,
        routed_scaling_factor=2.5,
        combine_scale=0.5,
        apply_expert_weights=0,
    )
    g.values.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["T", HIDDEN]))
    hidden = g.add(value, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    site = matched(g)
    assert site.attributes["apply_expert_weights"] == 0
    assert site.attributes["routed_scaling_factor"] == 2.5
    assert site.attributes["combine_scale"] == 0.5


# The norm's forms


CASE25 = {
    "pow-reciprocal": NormForm(),
    "mul-reciprocal": NormForm(square="Mul"),
    "div-by-root": NormForm(inverse="Div"),
    "one-over-root": NormForm(inverse="Div1", swap_multiply=True),
    "power-minus-half": NormForm(inverse="Pow"),
    "power-half": NormForm(inverse="PowHalf", swap_multiply=True),
    "positive-axis": NormForm(positive_axis=True),
    "eps-first": NormForm(swap_eps=True),
    "gamma-second": NormForm(swap_gamma=True),
    "constant-nodes": NormForm(constant_nodes=True),
    "one-plus-gamma": NormForm(gamma_plus_one="right"),
    "one-plus-gamma-left": NormForm(gamma_plus_one="left", square="Mul", swap_gamma=True),
}


@pytest.mark.parametrize("opset", [17, 18, 22])
@pytest.mark.parametrize("name", CASE25)
def test_case25_every_form_of_the_norm(name: str, opset: int) -> None:
    """Opset 17 has the axes of ReduceMean as an attribute, 18 and later as an input."""
    site = matched(full_tail(CASE25[name], opset=opset))
    assert site.attributes["eps"] == 1e-5
    assert site.attributes["weight_bias"] == float(name.startswith("one-plus"))


HALF_FORMS = {
    "cast-then-gamma": (NormForm(up=True, down="before"), 0),
    "gamma-then-cast": (NormForm(up=True, down="after", gamma_dtype="float32"), 1),
    "half-gamma-then-cast": (NormForm(up=True, down="after"), 1),
    "gemma": (NormForm(up=True, down="after", gamma_plus_one="left"), 1),
    "all-in-half": (NormForm(), 0),
}


@pytest.mark.parametrize("name", HALF_FORMS)
def test_case25_casts_around_the_norm(name: str) -> None:
    form, before_cast = HALF_FORMS[name]
    site = matched(full_tail(form, dtype="float16"))
    assert site.attributes["weight_before_cast"] == before_cast
    assert site.dtype == "FLOAT16"
    assert site.inputs["gamma"]["dtype"] == ("FLOAT" if form.gamma_dtype else "FLOAT16")


@pytest.mark.parametrize("name", HALF_FORMS)
def test_case33_bfloat16_graph(name: str) -> None:
    """ONNX Runtime has no bfloat16 arithmetic on a CPU: nodes and bytes are looked at, the numbers are fp16's above."""
    form, before_cast = HALF_FORMS[name]
    model = full_tail(form, dtype="bfloat16").model()
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    before = {name: (tensor.dtype, tensor.tobytes()) for name, tensor in weights.items() if tensor is not None}
    after, report = mapped(model)
    site = only(report)
    assert site.matched, site.reason
    assert site.dtype == "BFLOAT16"
    assert site.attributes["weight_before_cast"] == before_cast
    gamma = after.graph.initializers[site.inputs["gamma"]["value"]].const_value
    assert gamma is not None
    assert (gamma.dtype, gamma.tobytes()) == before[site.inputs["gamma"]["value"]]
    for name, value in after.graph.initializers.items():
        assert value.const_value is not None
        assert (value.const_value.dtype, value.const_value.tobytes()) == before[name]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    form=st.builds(
        NormForm,
        square=st.sampled_from(["Pow", "Mul"]),
        inverse=st.sampled_from(["Reciprocal", "Div1", "Div", "Pow", "PowHalf"]),
        positive_axis=st.booleans(),
        swap_eps=st.booleans(),
        swap_multiply=st.booleans(),
        swap_gamma=st.booleans(),
        gamma_plus_one=st.sampled_from(["", "left", "right"]),
        constant_nodes=st.booleans(),
        up=st.booleans(),
        down=st.sampled_from(["before", "after"]),
    )
)
def test_case25_forms_combined(form: NormForm) -> None:
    site = matched(full_tail(form, dtype="float16"))
    narrow = form.down == "before" or not form.up
    assert site.attributes["weight_before_cast"] == int(not narrow)


def fused_norm(op_type: str, dtype: str, domain: str = "", **attributes: float) -> Graph:
    g = Graph(dtype, 23 if op_type == "RMSNormalization" else 22)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = g.op(op_type, hidden, g.vector(3), domain=domain, **attributes)
    g.values.append(helper.make_tensor_value_info(normal, FLOAT[dtype], ["T", HIDDEN]))
    g.output(normal, hidden)
    return g


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_case25_rms_normalization(dtype: str, axis: int) -> None:
    site = matched(fused_norm("RMSNormalization", dtype, axis=axis, epsilon=3e-5, stash_type=1))
    assert site.attributes["eps"] == pytest.approx(3e-5, rel=1e-6)
    assert site.attributes["weight_before_cast"] == int(dtype == "float32")


def test_case25_rms_normalization_default_eps() -> None:
    assert matched(fused_norm("RMSNormalization", "float32")).attributes["eps"] == pytest.approx(1e-5)


def test_case25_simplified_layer_normalization() -> None:
    """ONNX Runtime's optimiser writes it into the standard domain; onnx.checker does not know it there."""
    graph = fused_norm("SimplifiedLayerNormalization", "float32", axis=-1, epsilon=2e-5, stash_type=1)
    model = graph.model()
    report = map_model(model)
    assert only(report).matched
    assert only(report).attributes["eps"] == pytest.approx(2e-5)
    onnx.checker.check_model(ir.to_proto(model))


def test_case24_eps_of_every_layer_is_kept() -> None:
    g = Graph()
    hidden = g.input("residual", ["T", HIDDEN])
    wanted = [1e-6, 1e-5, 3e-3, 0.25]
    for layer, eps in enumerate(wanted):
        hidden = g.add(hidden, g.routed())
        normal = NormForm(constant_nodes=layer % 2 == 1).write(g, hidden, eps=eps, seed=layer, rank=2)
        hidden = g.add(hidden, normal)
    g.output(hidden)
    model = g.model()
    after, report = mapped(model)
    assert [site.attributes["eps"] for site in report.sites] == wanted
    assert (report.found, report.mapped) == (4, 4)
    assert_same_numbers(model, after)


STEPS = ["scale", "divide", "shared", "gated", "residual", "scaled residual", "divided residual", "half gated"]
STEPS += ["tokens", "batch", "reader", "identity"]
ENDS = ["norm", "norm and reader", "two norms", "layer norm", "norm then add", "norm then bias", "nothing"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.booleans()), max_size=7),
    end=st.sampled_from(ENDS),
    form=st.sampled_from([*CASE25.values(), *FURTHER_FORMS.values()]),
)
def test_whatever_follows_the_finalize_the_numbers_stay(
    steps: list[tuple[str, bool]], end: str, form: NormForm
) -> None:
    """Any chain of what may follow a finalize, in any order: mapped or declined, the outputs are the same."""
    g = Graph()
    g.input("like", ["B", "S", HIDDEN])
    value, rank = g.routed(), 2

    def fresh(name: str, width: int = HIDDEN) -> str:
        return g.input(f"{name}_{len(g.inputs)}", [*(["T"] if rank == 2 else ["B", "S"]), width])

    for step, swap in steps:
        if step == "scale":
            value = g.mul(value, g.const(1.5), swap)
        elif step == "divide":
            value = g.op("Div", value, g.const([0.75]))
        elif step in ("shared", "residual"):
            value = g.add(value, fresh(step), swap)
        elif step == "gated":
            value = g.add(value, g.mul(g.op("Sigmoid", fresh("gate", 1)), fresh("shared"), swap), swap)
        elif step == "scaled residual":
            value = g.add(value, g.mul(fresh("residual"), g.const(0.5), swap), swap)
        elif step == "divided residual":
            value = g.add(value, g.op("Div", fresh("residual"), g.const(1.6)), swap)
        elif step == "half gated":
            gated = g.mul(fresh("shared"), g.op("Sigmoid", fresh("gate", 1)), swap)
            value = g.add(value, g.mul(gated, g.const(0.5), swap), swap)
        elif step == "tokens":
            value, rank = g.op("Reshape", value, g.ints(-1, HIDDEN)), 2
        elif step == "batch":
            value, rank = g.to_tokens(value, "like"), 3
        elif step == "reader":
            g.output(g.op("Neg", value))
        else:
            value = g.op("Identity", value)
    if end in ("nothing", "norm and reader"):
        g.output(value)
    if end == "layer norm":
        g.output(g.op("LayerNormalization", value, g.vector(1), g.vector(2)))
    elif end != "nothing":
        normal = form.write(g, value, rank=rank)
        if end == "norm then add":
            normal = g.add(fresh("late"), normal)
        elif end == "norm then bias":
            normal = g.add(normal, g.vector(3))
        elif end == "two norms":
            g.output(NormForm().write(g, value, seed=7, rank=rank))
        g.output(normal)
    model = g.model()
    after, report = mapped(model)
    site = only(report)
    assert site.operator in ("MoEFinalizeAdd", "MoEFinalizeAddRMSNorm")
    assert site.matched == (site.reason is None)
    for difference in compare_models(model, after, feeds(model)):
        assert difference.relative <= 1e-5, str(difference)


# What reads the hidden state


def test_case23_third_reader_and_graph_output() -> None:
    graph = full_tail(third_reader=True)
    matched(graph)
    g = full_tail()
    hidden = next(node.output[0] for node in g.nodes if node.op_type == "Add" and "residual" in node.input)
    g.output(hidden)
    model = g.model()
    after, report = mapped(model)
    assert only(report).matched
    assert [value.name for value in after.graph.outputs] == g.outputs
    assert only(report).outputs["residual_out"]["value"] == hidden
    assert_same_numbers(model, after)


def test_case23_reader_placed_before_the_norm() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    early = g.op("Neg", hidden)
    normal = NormForm().write(g, hidden, rank=2)
    g.output(early, g.add(normal, early))
    matched(g)


def test_norm_inside_reader_in_an_inner_graph() -> None:
    """A branch of If reads the hidden state of the outer graph."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    flag = g.input("flag", [], TensorProto.BOOL)
    branches = []
    for op_type in ("Neg", "Abs"):
        node = helper.make_node(op_type, [hidden], [f"branch_{op_type}"])
        info = helper.make_tensor_value_info(f"branch_{op_type}", TensorProto.FLOAT, ["T", HIDDEN])
        branches.append(helper.make_graph([node], op_type, [], [info]))
    chosen = g.op("If", flag, then_branch=branches[0], else_branch=branches[1])
    g.output(NormForm().write(g, hidden, rank=2), chosen)
    matched(g)


def test_two_norms_of_one_hidden_state() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, seed=1, rank=2), NormForm(square="Mul").write(g, hidden, seed=2, rank=2))
    model = g.model()
    after, report = mapped(model)
    assert operators(after) == ["MoEFinalizeAddRMSNorm"]
    assert [node.op_type for node in after.graph].count("Sqrt") == 1
    assert only(report).matched
    assert_same_numbers(model, after)


def test_norms_that_share_their_root() -> None:
    """Two gammas on one normalised value: the second keeps its nodes, which read residual_out."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    first = NormForm().write(g, hidden, rank=2)
    normal = next(name for name in g.nodes[-1].input if name.startswith("mul"))
    g.output(first, g.mul(normal, g.vector(9)), hidden)
    matched(g)


def test_a_fan_of_layers_shares_one_finalize() -> None:
    """The routed sum itself has another reader: nothing may grow over it."""
    g = Graph()
    routed = g.routed()
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), g.op("Neg", routed))
    site = declined(g, "is read by Add 'node_add_1', Neg 'node_neg_")
    assert "shared_output" not in site.inputs


def test_routed_sum_is_a_graph_output() -> None:
    g = Graph()
    routed = g.routed()
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), routed)
    declined(g, "the graph's outputs")


# What is declined, by name


def test_case26_layer_norm() -> None:
    g = full_tail()
    hidden = next(node.output[0] for node in g.nodes if node.op_type == "Add" and "residual" in node.input)
    g.nodes = g.nodes[: next(i for i, node in enumerate(g.nodes) if node.op_type == "Pow")]
    g.outputs = [g.op("LayerNormalization", hidden, g.vector(1), g.vector(2)), hidden]
    site = declined(g, "LayerNorm, not RMSNorm")
    assert {"shared_output"} <= set(site.inputs)
    assert site.attributes["routed_scaling_factor"] == 2.5


def test_case26_layer_norm_spelled_out() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    centred = g.op("Sub", hidden, g.mean(hidden))
    variance = g.mean(g.op("Mul", centred, centred))
    root = g.op("Sqrt", g.op("Add", variance, g.const(1e-5)))
    g.output(g.mul(g.op("Div", centred, root), g.vector(1)), hidden)
    site = declined(g, "LayerNorm (the mean is subtracted), not RMSNorm")
    assert site.inputs["shared_output"]["value"] == "residual"


def test_case26_sandwich_norm() -> None:
    """Grok: the MoE output is normalised, and only then added to the residual."""
    g = Graph()
    value = g.add(g.routed(), g.input("shared", ["T", HIDDEN]))
    normal = NormForm().write(g, value, rank=2)
    hidden = g.add(g.input("residual", ["T", HIDDEN]), normal)
    g.output(NormForm().write(g, hidden, seed=8, rank=2), hidden)
    site = declined(g, "sandwich norm")
    assert site.inputs["shared_output"]["value"] == "shared"


def test_case26_bias_after_the_norm() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    g.output(g.add(NormForm().write(g, hidden, rank=2), g.vector(4)), hidden)
    declined(g, "a bias is added after the RMSNorm")


def test_fused_forms_of_onnx_runtime_are_named() -> None:
    g = Graph()
    routed, residual = g.routed(), g.input("residual", ["T", HIDDEN])
    g.output(g.op("SkipSimplifiedLayerNormalization", routed, residual, g.vector(1), domain="com.microsoft"))
    g.values.append(helper.make_tensor_value_info(g.outputs[0], TensorProto.FLOAT, ["T", HIDDEN]))
    site = only(map_model(g.model("com.microsoft")))
    assert site.became.startswith("MoEFinalizeAdd without its norm: SkipSimplifiedLayerNormalization")
    assert "map the model before it is optimised" in site.became


def bad_norm(change: str) -> Graph:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    number = {"negative eps": -1e-6, "eps of columns": np.full(HIDDEN, 1e-6)}.get(change, 1e-6)
    eps = g.input("eps", [1]) if change == "eps" else g.const(number)
    square = g.op("Pow", hidden, g.const(3.0 if change == "cube" else 2.0))
    reduce = "ReduceSum" if change == "sum" else "ReduceMean"
    shifted = g.add(g.op(reduce, square, g.ints(0 if change == "axis" else -1), keepdims=1), eps)
    inverse = g.op("Reciprocal", g.op("Sqrt", g.op("Abs", shifted) if change == "root" else shifted))
    normal = g.mul(hidden, inverse)
    if change == "gamma input":
        gamma = g.input("gamma", [HIDDEN])
    elif change == "gamma computed":
        gamma = g.op("Exp", g.input("gamma", [HIDDEN]))
    elif change == "gamma shape":
        gamma = g.const(np.ones((6, HIDDEN)))
    elif change == "gamma scalar":
        gamma = g.const(np.ones(1))
    elif change == "gamma plus two":
        gamma = g.add(g.input("gamma", [HIDDEN]), g.const(2.0))
    else:
        gamma = g.vector(1)
    g.output(normal if change == "no gamma" else g.mul(normal, gamma), hidden)
    return g


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("axis", "is over axes [0], not over the last one alone"),
        ("sum", "sums the squares, but no division by H follows"),
        ("root", "does not divide the hidden state in a form that is known"),
        ("eps", "eps of the RMSNorm (Add 'node_add_4') is not a constant number"),
        ("eps of columns", "eps of the RMSNorm (Add 'node_add_4') has shape [16]; one number is taken"),
        ("negative eps", "0 or more is taken"),
        ("gamma input", "gamma 'gamma' is an input of the graph, not a constant"),
        ("gamma computed", "gamma comes from Exp"),
        ("gamma shape", "gamma 'const_3' has shape [6, 16]; [H] = [16] is taken"),
        ("gamma scalar", "has shape [1]; [H] = [16] is taken"),
        ("gamma plus two", "gamma comes from Add"),
        ("no gamma", "the RMSNorm has no gamma"),
        ("cube", "none of which is an RMSNorm"),
    ],
)
def test_norms_that_must_not_be_taken(change: str, words: str) -> None:
    declined(bad_norm(change), words)


def stopped(what: str) -> Graph:
    """A finalize and one node that no tail may take in; a full norm follows where the shapes allow it."""
    g = Graph()
    routed = g.routed()
    residual = g.input("residual", ["T", HIDDEN])
    if what == "itself":
        value = g.add(routed, routed)
    elif what == "reshape":
        value = g.op("Reshape", g.op("Reshape", routed, g.ints(-1, HIDDEN // 2)), g.ints(-1, HIDDEN))
    elif what == "cast":
        value = g.cast(g.cast(routed, "float16"), "float32")
    elif what == "zero":
        value = g.mul(routed, g.const(0.0))
    elif what == "higher rank":
        value = g.op("Squeeze", g.mul(routed, g.const([[[2.0]]])), g.ints(0))
    elif what == "divides":
        value = g.op("Div", g.const(2.0), routed)
    elif what == "relu":
        value = g.op("Relu", routed)
    elif what == "two gates":
        shared = g.input("shared", ["T", HIDDEN])
        for gate in ("gate", "other_gate"):
            routed = g.add(routed, g.mul(g.op("Sigmoid", g.input(gate, ["T", 1])), shared))
        value = routed
    elif what == "inner":
        branches = []
        for name, read in (("inner", routed), ("other", residual)):
            info = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", HIDDEN])
            branches.append(helper.make_graph([helper.make_node("Neg", [read], [name])], name, [], [info]))
        flag = g.const(True, TensorProto.BOOL)
        value = g.op("If", flag, then_branch=branches[0], else_branch=branches[1])
    else:
        value = residual
    hidden = g.add(value, residual)
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    return g


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("itself", "adds the sum to itself"),
        ("reshape", "of ['T', 16]: the last dimension must stay H, a number"),
        ("cast", "makes it FLOAT16 while the rows are FLOAT: mixed dtypes"),
        ("zero", "multiplies by 0"),
        ("higher rank", "changes the shape from ['T', 16] to [1, 'T', 16]"),
        ("divides", "divides by the sum, or by 0"),
        ("relu", "Relu 'node_relu_1' follows, which is no part of a MoE tail"),
        ("two gates", "adds a second gated output"),
        ("inner", "is read by Neg 'inner' in an inner graph"),
        ("dead", "nothing reads 'moefinalizeadd_0'"),
    ],
)
def test_nodes_that_stop_a_tail(what: str, words: str) -> None:
    declined(stopped(what), words)


def test_combine_scale_of_0_stays() -> None:
    g = Graph()
    g.inputs["shared"] = helper.make_tensor_value_info("shared", TensorProto.FLOAT, ["T", HIDDEN])
    g.routed(has_shared_output=1, combine_scale=0.0)
    g.nodes[0].input.append("shared")
    g.output(g.add(g.nodes[0].output[0], g.input("residual", ["T", HIDDEN])))
    declined(g, "the combine_scale of MoEFinalizeAdd 'node_moefinalizeadd_0' is 0")


def other_norm(what: str) -> Graph:
    """Norms in half precision, and fused ones, that the operator does not compute."""
    g = Graph("float16", 23)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    if what in ("axis 0", "stash_type"):
        attributes = {"axis": 0} if what == "axis 0" else {"stash_type": 10}
        scale = g.const(np.ones((6, HIDDEN))) if what == "axis 0" else g.vector(1)
        g.output(g.op("RMSNormalization", hidden, scale, **attributes), hidden)
        return g
    wide = g.cast(hidden, "float32")
    square = g.op("Mul", wide, wide)
    if what == "keepdims":
        mean = g.op("Unsqueeze", g.op("ReduceMean", square, g.ints(-1), keepdims=0), g.ints(0))
    elif what == "axes":
        mean = g.op("ReduceMean", square, g.input("axes", [1], TensorProto.INT64), keepdims=1)
    else:
        mean = g.mean(square)
    inverse = g.op("Reciprocal", g.op("Sqrt", g.add(mean, g.const(1e-5, TensorProto.FLOAT))))
    normal = g.mul(wide, inverse)
    if what == "bfloat16":
        normal = g.cast(g.cast(normal, "bfloat16"), "float32")
    if what == "no multiply":
        g.output(g.op("Neg", normal), hidden)
        return g
    g.output(g.mul(normal, g.vector(1, TensorProto.FLOAT)), hidden)
    return g


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("axis 0", "normalises from axis 0 on, not over the last one alone"),
        ("stash_type", "has stash_type 10; 1 (float32) is taken"),
        ("keepdims", "does not keep the last axis (keepdims=0)"),
        ("axes", "the axes of ReduceMean 'node_reducemean_4' are not constant"),
        ("bfloat16", "is rounded to BFLOAT16; the rows are FLOAT16"),
        ("wide result", "stays FLOAT while the rows are FLOAT16; cast it to the rows' dtype"),
        ("no multiply", "no Mul by gamma follows"),
    ],
)
def test_other_norms_are_named(what: str, words: str) -> None:
    model = other_norm(what).model()
    site = only(map_model(model))
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert words in (site.reason or ""), site.reason


def test_gamma_of_another_half_dtype() -> None:
    """Spelled out, the Cast that widens it stays; the fused operator reads it as it is stored."""
    site = matched(full_tail(NormForm(up=True, down="after", gamma_dtype="bfloat16"), dtype="float16"))
    assert site.inputs["gamma"]["dtype"] == "FLOAT"
    g = Graph("float16", 23)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = g.op("RMSNormalization", hidden, g.vector(1, TensorProto.BFLOAT16))
    g.values.append(helper.make_tensor_value_info(normal, TensorProto.FLOAT16, ["T", HIDDEN]))
    g.output(normal, hidden)
    site = only(map_model(g.model()))
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert "is BFLOAT16; the rows' dtype or FLOAT is taken" in (site.reason or "")


def test_normalised_value_rounded_to_another_half_dtype() -> None:
    g = Graph("float16")
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    wide = g.cast(hidden, "float32")
    inverse = g.op("Reciprocal", g.op("Sqrt", g.mean(g.op("Mul", wide, wide))))
    normal = g.cast(g.cast(g.mul(wide, inverse), "bfloat16"), "float32")
    g.output(g.cast(g.mul(normal, g.vector(1, TensorProto.FLOAT)), "float16"), hidden)
    site = only(map_model(g.model()))
    assert "is rounded to BFLOAT16; the rows are FLOAT16" in (site.reason or "")
    assert site.operator == "MoEFinalizeAdd"


def test_norm_without_eps() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    inverse = g.op("Reciprocal", g.op("Sqrt", g.mean(g.op("Mul", hidden, hidden))))
    g.output(g.mul(g.mul(hidden, inverse), g.vector(1)), hidden)
    assert matched(g).attributes["eps"] == 0.0


def test_inverse_rounded_before_it_multiplies() -> None:
    """The hidden state itself is multiplied, in half precision, by an inverse that was computed in float32."""
    g = Graph("float16")
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    wide = g.cast(hidden, "float32")
    inverse = g.op("Reciprocal", g.op("Sqrt", g.add(g.mean(g.op("Mul", wide, wide)), g.const(1e-5, 1))))
    g.output(g.mul(g.mul(hidden, g.cast(inverse, "float16")), g.vector(1)), hidden)
    assert matched(g).attributes["weight_before_cast"] == 0


def test_post_norm_is_no_sandwich() -> None:
    """norm(x + moe(x)): what reads the norm is the next layer, and more than one node of it."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = NormForm().write(g, hidden, rank=2)
    g.output(g.add(normal, g.op("Tanh", normal)))
    matched(g)


def test_shape_inference_that_stopped_before_is_a_note(tmp_path: Path) -> None:
    """TopK of bfloat16 is in real exports and not in ONNX's list of types: it does not stop the mapping."""
    proto = full_tail(NormForm(up=True, down="before"), dtype="bfloat16").proto()
    proto.graph.input.append(helper.make_tensor_value_info("router", TensorProto.BFLOAT16, ["T", 4]))
    proto.graph.initializer.append(helper.make_tensor("k", TensorProto.INT64, [1], [2]))
    proto.graph.node.append(helper.make_node("TopK", ["router", "k"], ["top", "top_index"], name="topk"))
    proto.graph.output.append(helper.make_tensor_value_info("top_index", TensorProto.INT64, ["T", 2]))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    report = map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx")
    assert report.complete
    assert len(report.notes) == 1
    assert "shape inference stops, as it does on the model before mapping" in report.notes[0]
    assert "\n" not in report.notes[0]


def test_overridable_initializers_are_not_constant() -> None:
    """An initializer that is a graph input too may be fed at run time."""
    g = full_tail()
    eps = next(name for node in g.nodes if node.op_type == "Add" for name in node.input if name.startswith("const"))
    g.inputs[eps] = helper.make_tensor_value_info(eps, TensorProto.FLOAT, [])
    report = map_model(g.model())
    assert "is not a constant number" in (only(report).reason or "")


@pytest.mark.parametrize(
    ("shape", "words"),
    [([HIDDEN], "not the same shape"), ([1, HIDDEN], "not the same shape"), (["B", "T", HIDDEN], "not the same shape")],
)
def test_broadcast_adds_are_not_taken(shape: list[int | str], words: str) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", shape))
    g.output(NormForm().write(g, hidden, rank=max(2, len(shape))), hidden)
    declined(g, words)


def test_three_additions() -> None:
    g = Graph()
    value = g.routed()
    for name in ("shared", "more", "residual"):
        value = g.add(value, g.input(name, ["T", HIDDEN]))
    g.output(NormForm().write(g, value, rank=2), value)
    site = declined(g, "a third addition")
    assert site.inputs["shared_output"]["value"] == "shared"


def test_scale_by_a_tensor_is_not_taken() -> None:
    g = Graph()
    value = g.mul(g.routed(), g.input("factor", ["T", 1]))
    hidden = g.add(value, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    declined(g, "multiplies by 'factor', which is not a constant number")


def test_mixed_dtypes_are_not_taken() -> None:
    """Rows in half precision, a residual stream in float32."""
    g = Graph("float16")
    residual = g.input("residual", ["T", HIDDEN], TensorProto.FLOAT)
    hidden = g.add(g.cast(g.routed(), "float32"), residual)
    g.output(g.cast(hidden, "float16"))
    declined(g, "'residual' that is added is FLOAT while the rows are FLOAT16: mixed dtypes")


def test_sum_in_float32_of_half_operands_is_taken() -> None:
    g = Graph("float16")
    value = g.add(g.cast(g.routed(), "float32"), g.cast(g.input("shared", ["T", HIDDEN]), "float32"))
    hidden = g.cast(g.add(value, g.cast(g.input("residual", ["T", HIDDEN]), "float32")), "float16")
    g.output(NormForm(up=True, down="before").write(g, hidden, rank=2), hidden)
    site = matched(g)
    assert site.inputs["residual"]["value"] == "residual"


def test_all_reduce_after_the_shared_add() -> None:
    """Tensor parallelism: another domain's node follows; what is before it is one plugin node."""
    g = Graph()
    value = g.add(g.mul(g.routed(), g.const(2.5)), g.input("shared", ["T", HIDDEN]))
    reduced = g.op("AllReduce", value, domain="com.example")
    g.values.append(helper.make_tensor_value_info(reduced, TensorProto.FLOAT, ["T", HIDDEN]))
    hidden = g.add(reduced, g.input("residual", ["T", HIDDEN]))
    g.output(NormForm().write(g, hidden, rank=2), hidden)
    site = only(map_model(g.model("com.example")))
    assert (site.operator, site.attributes["routed_scaling_factor"]) == ("MoEFinalizeAdd", 2.5)
    assert "AllReduce" in (site.reason or "")
    assert "shared_output" in site.inputs


def test_nothing_follows_the_finalize() -> None:
    g = Graph()
    g.output(g.add(g.mul(g.routed(), g.const(2.0)), g.input("shared", ["T", HIDDEN])))
    model = g.model()
    after, report = mapped(model)
    site = only(report)
    assert (site.operator, site.matched, site.reason) == ("MoEFinalizeAdd", True, None)
    assert [node.op_type for node in after.graph] == ["MoEFinalizeAdd"]
    assert report.complete
    assert_same_numbers(model, after)


# Faults that numbers must catch


def test_case22_shared_expert_twice_missing_or_swapped_is_caught() -> None:
    model = full_tail().model()
    after, _ = mapped(model)
    assert all(difference.relative < 2e-6 for difference in compare_models(model, after, feeds(model)))
    for fault in ("twice", "missing", "residual for shared", "gamma", "scale", "gate"):
        broken = ir.from_proto(ir.to_proto(after))
        node = next(node for node in broken.graph if operator_of(node))
        names = list(only(map_model(ir.from_proto(ir.to_proto(after)))).inputs)
        shared, residual = names.index("shared_output"), names.index("residual")
        if fault == "twice":
            add = ir.node("Add", [node.inputs[shared], node.inputs[shared]], name="again")
            add.outputs[0].name = "again"
            broken.graph.insert_before(node, add)
            node.replace_input_with(shared, add.outputs[0])
        elif fault == "missing":
            zero = ir.node("Sub", [node.inputs[shared], node.inputs[shared]], name="none")
            zero.outputs[0].name = "none"
            broken.graph.insert_before(node, zero)
            node.replace_input_with(shared, zero.outputs[0])
        elif fault == "residual for shared":
            node.replace_input_with(shared, node.inputs[residual])
        elif fault == "gamma":
            node.attributes["weight_bias"] = ir.AttrFloat32("weight_bias", 1.0)
        elif fault == "scale":
            node.attributes["routed_scaling_factor"] = ir.AttrFloat32("routed_scaling_factor", 1.0)
        else:
            node.attributes["apply_expert_weights"] = ir.AttrInt64("apply_expert_weights", 0)
        worst = max(difference.relative for difference in compare_models(model, broken, feeds(model)))
        assert worst > 1e-2, fault


# Whole models


def layers(count: int, *, dtype: str = "float32") -> Graph:
    """``count`` decoder layers: a stand-in for attention, and a MoE tail that ends in the next layer."""
    g = Graph(dtype)
    hidden = g.input("residual", ["B", "S", HIDDEN])
    normal = NormForm().write(g, hidden, seed=0)
    for layer in range(count):
        attention = g.op("Tanh", normal)
        hidden = g.add(hidden, attention, layer % 2 == 0)
        normal = NormForm(square="Mul").write(g, hidden, seed=2 * layer + 1)
        shared = g.op("Softsign", normal)
        value = g.to_tokens(g.mul(g.routed(), g.const(2.5), layer % 3 == 0))
        hidden = g.add(hidden, g.add(value, shared, layer % 2 == 1), layer % 3 == 1)
        normal = NormForm(swap_gamma=layer % 2 == 1).write(g, hidden, eps=1e-6 * (layer + 1), seed=2 * layer + 2)
    g.output(normal)
    return g


def test_94_layers_are_mapped_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tail is mapped, and the walk's questions grow with the layers, not with their square."""
    from moetrt.segments import reading

    asked = 0
    readers = reading.readers

    def counted(value: ir.Value) -> list[ir.Node]:
        nonlocal asked
        asked += 1
        return readers(value)

    for module in ("reading", "growth", "rms_norm"):
        monkeypatch.setattr(f"moetrt.segments.{module}.readers", counted)
    steps = {}
    for count in (47, 94):
        model = layers(count).model()
        model.metadata_props[TAILS_EXPECTED] = str(count)
        nodes, asked = len(model.graph), 0
        report = map_model(model)
        steps[count] = asked
        assert (report.found, report.expected, report.mapped) == (count, count, count)
        assert report.complete
        # Scale, Shape, Concat, Reshape, two Adds and the norm's seven nodes go into the finalize node.
        assert len(model.graph) == nodes - 13 * count
        assert operators(model) == ["MoEFinalizeAddRMSNorm"] * count
    assert steps[94] <= 2.1 * steps[47]
    assert report.sites[93].attributes["eps"] == pytest.approx(94e-6)
    onnx.checker.check_model(ir.to_proto(model))


def test_layers_give_the_same_numbers() -> None:
    model = layers(4).model()
    after, report = mapped(model)
    assert report.mapped == 4
    assert_same_numbers(model, after)
    again, second = mapped(after)
    assert [site.form for site in second.sites] == ["mapped before"] * 4
    assert second.complete
    assert len(again.graph) == len(after.graph)


def test_tails_of_different_inputs_get_overloads() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    hidden = g.add(hidden, NormForm().write(g, hidden, rank=2))
    hidden = g.add(g.add(g.routed(), g.input("shared", ["T", HIDDEN])), hidden)
    g.output(NormForm().write(g, hidden, rank=2))
    model = g.model()
    after, report = mapped(model)
    assert report.mapped == 2
    assert len({node.overload for node in after.graph if operator_of(node)}) == 2
    assert len(after.functions) == 2
    assert_same_numbers(model, after)


def test_tails_inside_a_model_local_function_are_inlined() -> None:
    g = full_tail()
    proto = g.proto()
    function = helper.make_function(
        "local",
        "Tail",
        [*g.inputs],
        list(g.outputs),
        [*(helper.make_node("Constant", [], [n], value=t) for n, t in g.initializers.items()), *g.nodes],
        opset_imports=[helper.make_opsetid("", 22), helper.make_opsetid("moetrt", 1)],
    )
    node = helper.make_node("Tail", list(g.inputs), list(g.outputs), domain="local", name="call")
    outer = helper.make_model(
        helper.make_graph([node], "outer", list(g.inputs.values()), list(proto.graph.output)),
        functions=[function],
        opset_imports=[*function.opset_import, helper.make_opsetid("local", 1)],
        ir_version=10,
    )
    model = ir.from_proto(outer)
    report = map_model(model)
    assert only(report).matched, only(report).reason
    assert operators(model) == ["MoEFinalizeAddRMSNorm"]
    assert_same_numbers(g.model(), model)


# Never silent


def test_case21_nothing_found_is_never_silent(tmp_path: Path) -> None:
    g = Graph()
    g.output(NormForm().write(g, g.input("residual", ["T", HIDDEN]), rank=2))
    model = g.model()
    report = map_model(model)
    assert (report.found, report.mapped, report.complete) == (0, 0, False)
    model.metadata_props[TAILS_EXPECTED] = "3"
    report = map_model(model)
    assert report.summary() == "tails: 0 found, 3 expected, 0 mapped"
    assert not report.complete


def test_case21_sums_without_their_norm_are_counted() -> None:
    g = Graph()
    g.output(g.op("LayerNormalization", g.routed(), g.vector(1), g.vector(2)))
    report = map_model(g.model())
    assert report.summary() == "tails: 1 found, unknown expected, 0 mapped whole, 1 without their norm"
    assert (report.as_dict()["mapped"], report.complete) == (0, False)


def test_case21_fewer_than_expected() -> None:
    model = full_tail().model()
    model.metadata_props[TAILS_EXPECTED] = "2"
    report = map_model(model)
    assert (report.found, report.expected, report.mapped, report.complete) == (1, 2, 1, False)


def test_case21_report_as_json(tmp_path: Path) -> None:
    graph = bad_norm("axis")
    source, report_path = tmp_path / "model.onnx", tmp_path / "reports" / "report.json"
    model = graph.model()
    model.metadata_props[TAILS_EXPECTED] = "1"
    save_model(model, source)
    report = map_file(source, tmp_path / "mapped.onnx", report_path=report_path)
    written = json.loads(report_path.read_text())
    assert written == json.loads(json.dumps(report.as_dict()))
    assert {key: written[key] for key in ("found", "expected", "mapped", "complete")} == {
        "found": 1,
        "expected": 1,
        "mapped": 0,
        "complete": False,
    }
    site = written["sites"][0]
    assert site["operator"] == "MoEFinalizeAdd"
    assert "not over the last one alone" in site["reason"]
    assert site["inputs"]["gemm2_permuted"] == {"value": "rows", "dtype": "FLOAT", "shape": ["R", HIDDEN]}


def test_case34_topk_is_made_to_sort() -> None:
    g = full_tail()
    top = g.op("TopK", "weights", g.ints(2), sorted=0, largest=1, count=2)
    g.output(g.op("ReduceSum", top, g.ints(-1)))
    model = g.model()
    after, report = mapped(model)
    assert report.sorted_topk == 1
    assert next(node for node in after.graph if node.op_type == "TopK").attributes.get_int("sorted") == 1
    assert_same_numbers(model, after)


# Files


@pytest.mark.parametrize("function", [True, False])
def test_map_file_writes_the_mapped_model(tmp_path: Path, function: bool) -> None:
    source, output = tmp_path / "in" / "model.onnx", tmp_path / "out" / "mapped.onnx"
    save_model(full_tail().model(), source)
    report = map_file(source, output, function=function)
    assert report.complete
    model = load_model(output)
    assert len(model.functions) == int(function)
    node = next(node for node in model.graph if operator_of(node))
    assert node.attributes["plugin_version"].as_string() == "1"
    assert node.attributes["plugin_namespace"].as_string() == "moetrt"
    assert node.name == "node_moefinalizeadd_0/MoEFinalizeAddRMSNorm"


def test_map_file_onto_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save_model(layers(2).model(), path)
    before = load_model(path)
    before_numbers = ir.from_proto(ir.to_proto(before))
    map_file(path, path)
    assert_same_numbers(before_numbers, load_model(path))
    assert map_file(path, path).complete


def test_weights_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gamma and a matrix lie in a data file; nothing asks for their elements, in the same folder or another."""
    g = full_tail()
    gamma = next(name for name in g.initializers if g.initializers[name].dims == [HIDDEN])
    wide = g.op("MatMul", g.outputs[0], g.const(np.ones((HIDDEN, 64)), name="matrix"))
    g.output(wide)
    proto = g.proto()
    source = tmp_path / "model.onnx"
    onnx.save(proto, source, save_as_external_data=True, location="weights.bin", size_threshold=64)
    external = {name: value.const_value for name, value in load_model(source).graph.initializers.items()}
    assert {name for name, tensor in external.items() if isinstance(tensor, ir.ExternalTensor)} == {gamma, "matrix"}

    def refuse(self: ir.ExternalTensor) -> None:
        raise AssertionError(f"{self.name} was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(ir.ExternalTensor, "_load", refuse)
        for output in (tmp_path / "mapped.onnx", tmp_path / "other" / "mapped.onnx"):
            assert map_file(source, output).complete
    model = load_model(source)
    for output in (tmp_path / "mapped.onnx", tmp_path / "other" / "mapped.onnx"):
        assert_same_numbers(model, load_model(output))


def test_small_constants_in_a_linked_data_file_are_read(tmp_path: Path) -> None:
    """Every tensor is external, and the file has a second name, as in a cache of models: onnx_ir would refuse it."""
    source = tmp_path / "model.onnx"
    onnx.save(full_tail().proto(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "second.bin").hardlink_to(tmp_path / "weights.bin")
    report = map_file(source, tmp_path / "other" / "mapped.onnx")
    assert only(report).attributes["eps"] == 1e-5
    assert_same_numbers(full_tail().model(), load_model(tmp_path / "other" / "mapped.onnx"))


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """A model with weights.bin, mapped beside it, so that both files name the one data file."""
    g = full_tail()
    g.output(g.op("MatMul", g.outputs[0], g.const(np.ones((HIDDEN, 64)), name="matrix")))
    onnx.save(
        g.proto(), tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=64
    )
    map_file(tmp_path / "model.onnx", tmp_path / "mapped.onnx")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "output", "report", "said"),
    [
        ("model.onnx", "model.onnx.data", None, "output file 'model.onnx.data' is the data file of 'model.onnx' its"),
        ("mapped.onnx", "model.onnx.data", None, "output file 'model.onnx.data' is the data file of 'mapped.onnx' i"),
        ("mapped.onnx", "model.onnx", None, "data file of the output 'model.onnx.data' is the data file of 'mapped."),
        ("mapped.onnx", "out.onnx", "model.onnx.data", "report 'model.onnx.data' is the data file of 'mapped.onnx' "),
        ("model.onnx", "out.onnx", "out.onnx", "report 'out.onnx' is the output file itself; another name is taken"),
        ("model.onnx", "out.onnx", "out.onnx.data", "report 'out.onnx.data' is the data file of the output itself"),
        ("model.onnx", "out.onnx", "model.onnx", "report 'model.onnx' is the ONNX model itself; another name is tak"),
        ("model.onnx", "model.onnx", "./model.onnx", "report 'model.onnx' is the ONNX model itself"),
        ("model.onnx", "model.onnx", "model.onnx.data", "report 'model.onnx.data' is the data file of 'model.onnx'"),
        ("model.onnx", "link.onnx", "model.onnx", "report 'model.onnx' is the ONNX model itself"),
        ("model.onnx", "out.onnx", "model.onnx/report", "output folder 'model.onnx' cannot be written"),
        ("model.onnx", "new/out.onnx", "/dev/full", "report '/dev/full' is a device"),
    ],
)
def test_no_file_of_the_run_replaces_another(
    shared_folder: Path, source: str, output: str, report: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared_folder)
    Path("link.onnx").symlink_to("model.onnx")
    before = {path.name: path.read_bytes() for path in shared_folder.iterdir()}
    with pytest.raises(InputError) as error:
        map_file(source, output, report_path=report)
    assert str(error.value).startswith(said)
    assert {path.name: path.read_bytes() for path in shared_folder.iterdir()} == before


def test_a_link_to_the_model_is_the_model(shared_folder: Path) -> None:
    link = shared_folder / "link.onnx"
    link.symlink_to("model.onnx")
    before = load_model(shared_folder / "mapped.onnx")
    assert map_file(link, shared_folder / "model.onnx", report_path=shared_folder / "report.json").complete
    assert_same_numbers(before, load_model(link))


@pytest.mark.parametrize("value", [None, 3, b"x", ["a"]], ids=str)
def test_what_is_no_path_is_named(shared_folder: Path, value: Any) -> None:
    model, output = shared_folder / "model.onnx", shared_folder / "out.onnx"
    with pytest.raises(InputTypeError, match=r"^ONNX model was .*; a path is taken"):
        map_file(value, output)
    with pytest.raises(InputTypeError, match=r"^output file was .*; a path is taken"):
        map_file(model, value)
    if value is not None:
        with pytest.raises(InputTypeError, match=r"^report was .*; a path is taken"):
            map_file(model, output, report_path=value)
    assert not output.exists()


def test_what_mapping_refuses_names_the_file(tmp_path: Path) -> None:
    g = full_tail()
    g.nodes[0].attribute.append(helper.make_attribute("has_shared_output", 1))
    (tmp_path / "bad.onnx").write_bytes(g.proto().SerializeToString())
    with pytest.raises(InputError, match=r"^ONNX model '.*bad.onnx': node 'node_moefinalizeadd_0'"):
        map_file(tmp_path / "bad.onnx", tmp_path / "out.onnx")


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        map_file(tmp_path / "no.onnx", tmp_path / "out.onnx")
    old = full_tail(opset=17).proto()
    old.opset_import[0].version = 12
    (tmp_path / "old.onnx").write_bytes(old.SerializeToString())
    with pytest.raises(InputError, match=r"old.onnx': its opset was 12; 17 to \d+ are taken"):
        map_file(tmp_path / "old.onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_broken_operator_node_is_named() -> None:
    g = full_tail()
    g.nodes[0].attribute.append(helper.make_attribute("has_shared_output", 1))
    with pytest.raises(InputError, match=r"node 'node_moefinalizeadd_0' \(MoEFinalizeAdd\): its inputs were"):
        map_model(ir.from_proto(g.proto()))


def test_map_of_int64_is_named() -> None:
    g = full_tail()
    g.inputs["map"] = helper.make_tensor_value_info("map", TensorProto.INT64, ["T", 3])
    with pytest.raises(InputTypeError, match="input expanded_idx_to_permuted_idx was int64; int32 is taken"):
        map_model(g.model())


def test_the_report_names_every_form() -> None:
    """What `Site.form` is documented to be is what the modules that find tails call their forms."""
    modules = [*vars(forms).values(), routers, untyped, mapping_report]
    names = {
        value
        for module in modules
        if isinstance(module, ModuleType)
        for key, value in vars(module).items()
        if key == "FORM" or key.endswith("_FORM")
    }
    text = re.search(r"form: (.*?)\n        operator:", mapping_report.Site.__doc__ or "", re.DOTALL)
    assert text is not None
    assert set(re.findall(r'"([^"]+)"', text[1])) == names
