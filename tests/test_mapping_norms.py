"""Every spelling of RMSNorm is found, and every other norm is declined by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization

from moetrt.errors import InputError
from moetrt.mapping import map_model
from moetrt.onnx_files import load_model, save_model
from tests.mapping_checks import assert_same_numbers, declined, mapped, matched, only, operators
from tests.mapping_graphs import FLOAT, FURTHER_FORMS, HIDDEN, Graph, NormForm, full_tail


@pytest.mark.parametrize("opset", [17, 18, 22])
@pytest.mark.parametrize("name", FURTHER_FORMS)
def test_case25_further_forms(name: str, opset: int) -> None:
    site = matched(full_tail(FURTHER_FORMS[name], opset=opset))
    assert site.attributes["eps"] == 1e-5
    assert site.attributes["weight_bias"] == float("one-plus" in name or "gemma" in name)
    assert site.shapes["gamma"] == [HIDDEN]


@pytest.mark.parametrize("gamma_dtype", ["", "float32"])
@pytest.mark.parametrize("down", ["before", "after"])
@pytest.mark.parametrize("name", FURTHER_FORMS)
def test_case25_further_forms_with_casts(name: str, down: str, gamma_dtype: str) -> None:
    site = matched(
        full_tail(replace(FURTHER_FORMS[name], up=True, down=down, gamma_dtype=gamma_dtype), dtype="float16")
    )
    assert site.attributes["weight_before_cast"] == int(down == "after")


@pytest.mark.parametrize("form", [NormForm(wide_eps=True), NormForm(wide_eps=True, inverse="Div", swap_eps=True)])
def test_case25_eps_added_in_float32(form: NormForm) -> None:
    assert matched(full_tail(form, dtype="float16")).attributes["eps"] == 1e-5


def test_case24_eps_differs_by_layer_and_form() -> None:
    g = Graph()
    hidden = g.input("residual", ["B", "S", HIDDEN])
    wanted = {name: 1e-6 * (number + 1) for number, name in enumerate(FURTHER_FORMS)}
    for number, (name, eps) in enumerate(wanted.items()):
        hidden = g.add(hidden, g.to_tokens(g.routed()))
        hidden = g.add(hidden, FURTHER_FORMS[name].write(g, hidden, eps=eps, seed=number))
    g.output(hidden)
    after, report = mapped(model := g.model())
    assert [site.attributes["eps"] for site in report.sites] == pytest.approx(list(wanted.values()), rel=1e-6)
    assert report.mapped == len(FURTHER_FORMS)
    assert_same_numbers(model, after)


@pytest.mark.parametrize("last", ["hidden", "normal", "both"])
def test_norm_of_a_view_whose_shape_is_read_off_the_hidden_state(last: str) -> None:
    """[B, S, H] is flattened for the norm alone; the graph's outputs keep either shape."""
    g = Graph()
    hidden = g.add(g.to_tokens(g.routed()), g.input("residual", ["B", "S", HIDDEN]))
    tokens = g.op("ReduceProd", g.op("Shape", hidden, start=0, end=2), g.ints(0), keepdims=1)
    flat = g.op("Reshape", hidden, g.op("Concat", tokens, g.ints(HIDDEN), axis=0))
    normal = NormForm().write(g, flat, rank=2)
    g.output(*({"hidden": [hidden, normal], "normal": [normal], "both": [normal, flat]}[last]))
    matched(g)


def test_norm_of_tokens_unflattened() -> None:
    """The sum is [T, H] and goes on as such; the norm alone reads [B, S, H]."""
    g = Graph()
    g.input("like", ["B", "S", HIDDEN])
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = NormForm().write(g, g.to_tokens(hidden, "like"))
    g.output(normal, g.op("Neg", hidden))
    assert matched(g).shapes["norm_out"] == ["T", HIDDEN]


ALL_FORMS = {
    **FURTHER_FORMS,
    "plain": NormForm(),
    "swapped": NormForm(swap_gamma=True),
    "swapped-all": NormForm(swap_gamma=True, swap_eps=True, swap_multiply=True),
    "mul": NormForm(square="Mul"),
    "constants": NormForm(constant_nodes=True),
    "div": NormForm(inverse="Div"),
    "casts-before": NormForm(up=True, down="before"),
    "casts-before-swapped": NormForm(up=True, down="before", swap_gamma=True),
    "casts-after": NormForm(up=True, down="after"),
    "casts-after-fp32-gamma": NormForm(up=True, down="after", gamma_dtype="float32", swap_gamma=True),
    "gemma": NormForm(gamma_plus_one="right"),
}


def fused_by_onnxscript(graph: Graph) -> int:
    """How many norms onnxscript's own rule fuses in ``graph``."""
    return int(fuse_rms_normalization(graph.model()))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_case25_what_onnxscripts_rule_fuses_is_found(dtype: str) -> None:
    fused = []
    for name, form in ALL_FORMS.items():
        if form.up and dtype == "float32":
            continue
        graph = full_tail(form, dtype=dtype, opset=23)
        if fused_by_onnxscript(graph):
            fused.append(name)
            assert matched(graph).operator == "MoEFinalizeAddRMSNorm", name
    # The rule must have had something to say, in both orders of gamma.
    expected = {"float32": {"plain", "swapped"}, "float16": {"casts-before", "casts-after-fp32-gamma"}}[dtype]
    assert expected <= set(fused), fused


def test_case25_the_rule_fuses_a_gamma_that_is_an_input_and_we_do_not() -> None:
    """The one difference: a gamma, or an eps, that is not a constant is not taken, whatever the form."""
    g = Graph(opset=23)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    mean = g.mean(g.op("Pow", hidden, g.const(2.0)))
    normal = g.mul(hidden, g.op("Reciprocal", g.op("Sqrt", g.add(mean, g.const(1e-5)))))
    g.output(g.mul(normal, g.input("gamma", [HIDDEN])), hidden)
    assert fused_by_onnxscript(g) == 1
    declined(g, "gamma 'gamma' is an input of the graph, not a constant: store it as an initializer")


def test_case25_a_folded_one_plus_gamma_is_gamma() -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = NormForm(gamma_plus_one="left").write(g, hidden, rank=2)
    g.output(normal, hidden)
    runtime = matched(g)
    add = next(node for node in g.nodes if node.op_type == "Add" and node.output[0] in g.nodes[-1].input)
    gamma = next(name for name in add.input if g.initializers[name].dims)
    stored = np.frombuffer(g.initializers[gamma].raw_data, np.float32)
    folded = g.const(1 + stored)
    g.nodes.remove(add)
    g.nodes[-1].input[:] = [folded if name == add.output[0] else name for name in g.nodes[-1].input]
    site = matched(g)
    assert (runtime.attributes["weight_bias"], site.attributes["weight_bias"]) == (1.0, 0.0)


# Norms of other kinds, by name


def with_norm(op_type: str, *, domain: str = "", opset: int = 22, **attributes: float) -> Graph:
    g = Graph(opset=opset)
    residual = g.input("residual", ["T", HIDDEN])
    routed = g.add(g.routed(), g.input("shared", ["T", HIDDEN]))
    hidden = routed if op_type.startswith("Skip") else g.add(routed, residual)
    inputs = {
        "LpNormalization": [hidden],
        "LayerNormalization": [hidden, g.vector(1)],
        "GroupNormalization": [hidden, g.vector(1), g.vector(2)],
        "SkipLayerNormalization": [hidden, residual, g.vector(1), g.vector(2)],
        "SkipSimplifiedLayerNormalization": [residual, hidden, g.vector(1)],
    }[op_type]
    normal = g.op(op_type, *inputs, domain=domain, **attributes)
    g.values.append(helper.make_tensor_value_info(normal, FLOAT["float32"], ["T", HIDDEN]))
    g.output(normal)
    if not domain:
        g.output(hidden)
    return g


@pytest.mark.parametrize(
    ("op_type", "domain", "attributes", "words"),
    [
        (
            "LayerNormalization",
            "",
            {},
            "follows: LayerNorm, not RMSNorm; MoEFinalizeAddRMSNorm has no mean and no bias",
        ),
        ("LpNormalization", "", {"p": 2}, "follows: an Lp norm"),
        ("GroupNormalization", "", {"num_groups": 4}, "follows: GroupNorm, not RMSNorm over the whole hidden state"),
        ("SkipLayerNormalization", "com.microsoft", {}, "follows: LayerNorm, not RMSNorm, with its residual add fused"),
        ("SkipSimplifiedLayerNormalization", "com.microsoft", {}, "map the model before it is optimised"),
    ],
)
def test_case26_norms_that_are_operators(op_type: str, domain: str, attributes: dict[str, float], words: str) -> None:
    graph = with_norm(op_type, domain=domain, opset=21, **attributes)
    model = graph.model(*([domain] if domain else []))
    after = ir.from_proto(ir.to_proto(model))
    site = only(map_model(after))
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert words in (site.reason or ""), site.reason
    assert f"{op_type} 'node_" in (site.reason or "")
    assert "shared_output" in site.inputs
    assert_same_numbers(model, after)


def l2_norm(g: Graph, hidden: str, *, clamped: bool) -> str:
    """F.normalize(x) * sqrt(H) * gamma."""
    length = g.reduce("ReduceL2", hidden)
    if clamped:
        length = g.op("Max", length, g.const(1e-12))
    scaled = g.mul(g.op("Div", hidden, length), g.const(math.sqrt(HIDDEN)))
    return g.mul(scaled, g.vector(3))


@pytest.mark.parametrize("clamped", [False, True])
def test_case26_l2_norm_is_named(clamped: bool) -> None:
    """Its eps bounds the length from below instead of being added to the mean square: near 0 the numbers differ."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    g.output(l2_norm(g, hidden, clamped=clamped), hidden)
    declined(g, "follows: an L2 norm, which has no mean and no eps as RMSNorm has them; x / sqrt(mean(x * x) + eps)")


def test_case26_group_norm_spelled_out() -> None:
    """RMS over 4 groups of the hidden state."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    groups = g.op("Reshape", hidden, g.ints(-1, 4, HIDDEN // 4))
    normal = g.op("Reshape", _rms(g, groups), g.ints(-1, HIDDEN))
    g.output(g.mul(normal, g.vector(2)), hidden)
    declined(g, ", 4, 4] before it is normalised: GroupNorm, not RMSNorm over the whole hidden state")


def _rms(g: Graph, value: str) -> str:
    mean = g.mean(g.op("Mul", value, value))
    return g.mul(value, g.op("Reciprocal", g.op("Sqrt", g.add(mean, g.const(1e-5)))))


def test_case26_layer_norm_of_a_view_and_in_float32() -> None:
    g = Graph("float16")
    hidden = g.add(g.to_tokens(g.routed()), g.input("residual", ["B", "S", HIDDEN]))
    wide = g.cast(g.op("Reshape", hidden, g.ints(-1, HIDDEN)), "float32")
    centred = g.op("Sub", wide, g.mean(wide))
    root = g.op("Sqrt", g.add(g.mean(g.op("Pow", centred, g.const(2.0, 1))), g.const(1e-5, 1)))
    g.output(g.cast(g.mul(g.op("Div", centred, root), g.vector(1, 1)), "float16"), hidden)
    declined(g, "LayerNorm (the mean is subtracted), not RMSNorm")


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("between", ["nothing", "reshape", "scale", "cast"])
@pytest.mark.parametrize("norm", ["spelled out", "fused", "gemma"])
def test_case26_sandwich_norms(norm: str, between: str, swap: bool) -> None:
    """Grok, and Gemma's post-feedforward norm: the MoE output is normalised, and only then added to the residual."""
    g = Graph("float16" if between == "cast" else "float32", 23)
    residual = g.input("residual", ["B", "S", HIDDEN] if between == "reshape" else ["T", HIDDEN])
    value = g.add(g.routed(), g.input("shared", ["T", HIDDEN]), swap)
    if norm == "fused":
        normal = g.op("RMSNormalization", value, g.vector(3), epsilon=1e-5)
    else:
        form = NormForm(gamma_plus_one="left" if norm == "gemma" else "")
        if between == "cast":
            form = replace(form, up=True, down="after")
        normal = form.write(g, value, rank=2)
    if between == "reshape":
        normal = g.to_tokens(normal)
    elif between == "scale":
        normal = g.mul(normal, g.const(0.5), swap)
    hidden = g.add(residual, normal, swap)
    g.output(NormForm().write(g, hidden, seed=8, rank=3 if between == "reshape" else 2), hidden)
    site = declined(g, "sandwich norm: the MoE output is normalised first, and Add 'node_add_")
    assert site.inputs["shared_output"]["value"] == "shared"


@pytest.mark.parametrize("norm", ["spelled out", "fused"])
def test_case26_bias_after_either_spelling(norm: str) -> None:
    g = Graph(opset=23)
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    if norm == "fused":
        normal = g.op("RMSNormalization", hidden, g.vector(3), epsilon=1e-5)
    else:
        normal = NormForm().write(g, hidden, rank=2)
    g.output(g.add(g.vector(4), normal), hidden)
    declined(g, "a bias is added after the RMSNorm (Add 'node_add_")


@pytest.mark.parametrize("form", ["mul", "expand", "matmul"])
def test_case26_hyper_connections(form: str) -> None:
    """DeepSeek-V4: [B, S, n, H] streams, mixed by matrices; the MoE output goes into each with its own weight."""
    g = Graph()
    streams = g.input("streams", ["B", "S", 4, HIDDEN])
    mix = g.input("mix", ["B", "S", 4, 4])
    post = g.input("post", ["B", "S", 4, 1])
    value = g.to_tokens(g.add(g.routed(), g.input("shared", ["T", HIDDEN])), "streams")
    value = g.op("Unsqueeze", value, g.ints(2))
    if form == "expand":
        value = g.mul(post, g.op("Expand", value, g.op("Shape", streams)))
    else:
        value = g.mul(post, value) if form == "mul" else g.op("MatMul", post, value)
    hidden = g.add(value, g.op("MatMul", mix, streams))
    g.output(NormForm().write(g, hidden, rank=4))
    site = declined(g, "spreads the MoE output over 4 residual streams; one residual of the MoE output's own shape")
    assert (site.reason or "").startswith("hyper-connections: ")
    assert site.inputs["shared_output"]["value"] == "shared"


def test_norm_fused_by_onnx_runtime_is_named(tmp_path: Path) -> None:
    """Its extended level writes an operator that onnx does not know; at the basic level the norm stays."""
    g = Graph()
    hidden = g.add(g.gathered(), g.input("residual", ["T", HIDDEN]))
    g.output(NormForm(inverse="Div").write(g, hidden, rank=2), hidden)
    model = g.model()
    save_model(model, tmp_path / "model.onnx")
    for level in ("EXTENDED", "BASIC"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(tmp_path / f"{level}.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    with pytest.raises(
        InputError, match=r"is a SimplifiedLayerNormalization, which ONNX Runtime's optimiser writes for"
    ):
        load_model(tmp_path / "EXTENDED.onnx")
    optimised = load_model(tmp_path / "BASIC.onnx")
    assert only(map_model(optimised)).matched
    assert_same_numbers(model, optimised)


# Other orders of the same arithmetic


def flat_mean(g: Graph, x: str) -> str:
    return g.op("ReduceMean", g.mul(x, x), g.ints(-1), keepdims=0)


def restored(g: Graph, value: str, how: str, rank: int) -> str:
    """One number a row, its last axis put back."""
    if how == "reshape" and rank == 2:
        return g.op("Reshape", value, g.ints(-1, 1))
    if how == "reshape":
        return g.op("Reshape", value, g.ints(0, -1, 1))
    return g.op("Unsqueeze", value, g.ints(-1))


def numbers_like(g: Graph, value: float, x: str) -> str:
    """A number in the dtype of ``x``, which is float32 where it was widened."""
    return g.const(value, FLOAT["float32" if x.startswith("cast") else g.dtype])


MEANS: dict[str, Callable[[Graph, str, int], str]] = {
    "unsqueezed": lambda g, x, rank: restored(g, flat_mean(g, x), "unsqueeze", rank),
    "reshaped": lambda g, x, rank: restored(g, flat_mean(g, x), "reshape", rank),
    "divided before the sum": lambda g, x, rank: g.reduce(
        "ReduceSum", g.op("Div", g.mul(x, x), numbers_like(g, HIDDEN, x))
    ),
    "divided twice": lambda g, x, rank: g.op(
        "Div",
        g.reduce("ReduceSum", g.op("Div", g.mul(x, x), numbers_like(g, 4, x))),
        numbers_like(g, HIDDEN / 4, x),
    ),
    "einsum": lambda g, x, rank: restored(
        g,
        g.op(
            "Div",
            g.op("Einsum", x, x, equation="bsh, bsh -> bs" if rank == 3 else "...h,...h->..."),
            numbers_like(g, HIDDEN, x),
        ),
        "unsqueeze",
        rank,
    ),
    "product with ones": lambda g, x, rank: g.op(
        "Div", g.op("MatMul", g.mul(x, x), numbers_like(g, np.ones((HIDDEN, 1)), x)), numbers_like(g, HIDDEN, x)
    ),
    "product with 1/H": lambda g, x, rank: restored(
        g, g.op("MatMul", g.mul(x, x), numbers_like(g, np.full(HIDDEN, 1 / HIDDEN), x)), "unsqueeze", rank
    ),
    "plain": lambda g, x, rank: g.mean(g.mul(x, x)),
}

ORDERS = ["last", "gamma times hidden", "hidden times gamma", "gamma times inverse", "gamma over root", "one quotient"]
QUOTIENTS = ORDERS[4:]
INVERSES = ["reciprocal of root", "root of reciprocal", "power of root", "one over root", "power", "late axis"]


def reordered(g: Graph, hidden: str, mean: str, inverse: str, order: str, *, wide: bool, rank: int) -> str:
    """The norm of ``hidden``, in float32 where ``wide``."""
    x = g.cast(hidden, "float32") if wide else hidden
    dtype = FLOAT["float32" if wide else g.dtype]
    gamma = g.vector(7, dtype)
    late = inverse == "late axis"
    value = g.add(flat_mean(g, x) if late else MEANS[mean](g, x, rank), g.const(1e-5, dtype))
    root = "" if inverse in ("root of reciprocal", "power") and order not in QUOTIENTS else g.op("Sqrt", value)
    if late:
        root = restored(g, root, "unsqueeze", rank)
    if order == "gamma over root":
        normal = g.mul(g.op("Div", gamma, root), x)
    elif order == "one quotient":
        normal = g.op("Div", g.mul(x, gamma), root)
    else:
        one = {
            "root of reciprocal": lambda: g.op("Sqrt", g.op("Reciprocal", value)),
            "power of root": lambda: g.op("Pow", root, g.const(-1.0, dtype)),
            "one over root": lambda: g.op("Div", g.const(1.0, dtype), root),
            "power": lambda: g.op("Pow", value, g.const(-0.5, dtype)),
        }.get(inverse, lambda: g.op("Reciprocal", root))()
        normal = {
            "last": lambda: g.mul(g.mul(x, one), gamma),
            "gamma times hidden": lambda: g.mul(one, g.mul(gamma, x)),
            "hidden times gamma": lambda: g.mul(g.mul(x, gamma), one),
            "gamma times inverse": lambda: g.mul(x, g.mul(one, gamma)),
        }[order]()
    return g.cast(normal, g.dtype) if wide else normal


def tail_with(
    mean: str, inverse: str, order: str, *, dtype: str = "float32", wide: bool = False, rank: int = 3
) -> Graph:
    g = Graph(dtype)
    routed = g.routed()
    residual = g.input("residual", ["B", "S", HIDDEN] if rank == 3 else ["T", HIDDEN])
    hidden = g.add(g.to_tokens(routed) if rank == 3 else routed, residual)
    g.output(reordered(g, hidden, mean, inverse, order, wide=wide, rank=rank), hidden)
    return g


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mean", MEANS)
def test_case25_means_of_squares(mean: str, rank: int) -> None:
    matched(tail_with(mean, "reciprocal of root", "last", rank=rank))
    site = matched(tail_with(mean, "reciprocal of root", "gamma times hidden", dtype="float16", wide=True, rank=rank))
    assert site.attributes["weight_before_cast"] == 1


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("inverse", INVERSES)
def test_case25_orders_of_the_products(inverse: str, order: str, wide: bool) -> None:
    site = matched(tail_with("plain", inverse, order, dtype="float16" if wide else "float32", wide=wide))
    assert site.attributes["eps"] == 1e-5
    assert site.attributes["weight_before_cast"] == 1
    assert site.shapes["gamma"] == [HIDDEN]


@pytest.mark.parametrize("order", ORDERS[1:])
def test_gamma_that_is_multiplied_in_early_in_16_bits_is_not_taken(order: str) -> None:
    """It is rounded where neither order of the operator rounds."""
    declined(
        tail_with("plain", "reciprocal of root", order, dtype="float16"),
        "rounds to FLOAT16 what gamma multiplies before the norm is complete: multiply the normalised value by gamma",
    )


def test_gamma_that_multiplies_the_rows_in_16_bits_is_not_taken() -> None:
    """Only the product is widened; the mean is of the widened sum."""
    g = Graph("float16")
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    x = g.cast(hidden, "float32")
    root = g.op("Sqrt", g.add(g.mean(g.mul(x, x)), g.const(1e-5, FLOAT["float32"])))
    weighted = g.cast(g.mul(hidden, g.vector(1)), "float32")
    g.output(g.cast(g.op("Div", weighted, root), "float16"), hidden)
    declined(g, "rounds to FLOAT16 what gamma multiplies before the norm is complete")


@pytest.mark.parametrize("early", [False, True])
def test_early_gamma_that_is_an_input_is_not_taken(early: bool) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    root = g.op("Sqrt", g.add(g.mean(g.mul(hidden, hidden)), g.const(1e-5)))
    gamma = g.input("gamma", [HIDDEN])
    g.output(g.op("Div", g.mul(hidden, gamma), root) if early else g.mul(g.op("Div", hidden, root), gamma), hidden)
    declined(g, "gamma 'gamma' is an input of the graph, not a constant")


@pytest.mark.parametrize("where", ["weighted", "scaled"])
def test_early_products_that_are_read_elsewhere_stay(where: str) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    inverse = g.op("Reciprocal", g.op("Sqrt", g.add(g.mean(g.mul(hidden, hidden)), g.const(1e-5))))
    one, other = (hidden, inverse) if where == "weighted" else (inverse, hidden)
    product = g.mul(one, g.vector(1))
    g.output(g.mul(product, other), g.op("Neg", product), hidden)
    declined(g, "a value inside the RMSNorm, is also read by Neg")


@pytest.mark.parametrize("back", ["nothing", "first axis", "reshape"])
def test_a_mean_that_would_meet_the_columns_is_not_taken(back: str) -> None:
    """keepdims=0 and T = H: the mean of a row would divide a column."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    mean = flat_mean(g, hidden)
    if back == "first axis":
        mean = g.op("Unsqueeze", mean, g.ints(0))
    elif back == "reshape":
        mean = g.op("Reshape", mean, g.ints(1, -1))
    root = g.op("Sqrt", g.add(mean, g.const(1e-5)))
    g.output(g.mul(g.op("Div", hidden, root), g.vector(1)), hidden)
    site = only(map_model(g.model()))
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert "does not keep the last axis (keepdims=0)" in (site.reason or "")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("eps", "eps of the RMSNorm (Add 'node_add_"),
        ("number", "after the sum of squares has no constant number for H"),
        ("exponent", "does not keep the last axis (keepdims=0)"),
    ],
)
def test_a_mean_that_a_number_gives_another_shape_is_not_taken(where: str, words: str) -> None:
    """keepdims=0 and a number of shape [1, 1, 1]: the batch of [B, 1, H] would become the rows of [1, B, 1]."""
    g = Graph()
    hidden = g.add(g.op("Unsqueeze", g.routed(), g.ints(1)), g.input("residual", ["T", 1, HIDDEN]))

    def number(value: float, name: str) -> str:
        return g.const(np.full([1, 1, 1], value) if name == where else value)

    total = g.op("ReduceSum", g.mul(hidden, hidden), g.ints(-1), keepdims=0)
    shifted = g.add(g.op("Div", total, number(HIDDEN, "number")), number(1e-5, "eps"))
    normal = g.op("Div", hidden, g.op("Pow", shifted, number(0.5, "exponent")))
    g.output(g.mul(normal, g.vector(1)), hidden)
    declined(g, words)


def test_an_einsum_that_turns_its_rows_is_not_taken() -> None:
    """B = S: the sum of row [b, s] would divide row [s, b]."""
    g = Graph()
    residual = g.input("residual", [3, 3, HIDDEN])
    hidden = g.add(g.op("Reshape", g.routed(), g.ints(3, 3, HIDDEN)), residual)
    total = g.op("Unsqueeze", g.op("Einsum", hidden, hidden, equation="bsh,bsh->sb"), g.ints(-1))
    root = g.op("Sqrt", g.add(g.op("Div", total, g.const(HIDDEN)), g.const(1e-5)))
    g.output(g.mul(g.op("Div", hidden, root), g.vector(1)), hidden)
    assert (site := only(map_model(g.model()))).operator != "MoEFinalizeAddRMSNorm"
    assert not site.matched


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other numbers", "no division by H follows"),
        ("unequal numbers", "squares the hidden state, but no ReduceMean follows"),
        ("two columns", "squares the hidden state, but no ReduceMean follows"),
        ("another einsum", "none of which is an RMSNorm"),
        ("twice the mean", "makes no mean of the squares: by 8, while H is 16"),
        ("clamped", "does not divide the hidden state in a form that is known"),
        ("fourth root", "does not divide the hidden state in a form that is known"),
        ("square root of the square", "does not divide the hidden state in a form that is known"),
    ],
)
def test_sums_that_are_no_mean_of_squares(what: str, words: str) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    square = "" if what == "another einsum" else g.mul(hidden, hidden)
    if what == "another einsum":
        total = g.op("Unsqueeze", g.op("Einsum", hidden, hidden, equation="th,uh->t"), g.ints(-1))
        mean = g.op("Div", total, g.const(HIDDEN))
    elif what in ("other numbers", "unequal numbers", "two columns"):
        column = np.full((HIDDEN, 1), 1 / HIDDEN)
        if what == "other numbers":
            column *= 2
        elif what == "unequal numbers":
            column[3] = 0.5
        else:
            column = np.full((HIDDEN, HIDDEN), 1 / HIDDEN)
        mean = g.op("MatMul", square, g.const(column))
    elif what == "twice the mean":
        mean = g.op("Div", g.reduce("ReduceSum", g.op("Mul", square, g.const(2.0))), g.const(HIDDEN))
    else:
        mean = g.mean(square)
    shifted = g.op("Max", mean, g.const(1e-5)) if what == "clamped" else g.add(mean, g.const(1e-5))
    root = g.op("Sqrt", shifted)
    if what == "fourth root":
        root = g.op("Sqrt", root)
    elif what == "square root of the square":
        root = g.op("Pow", root, g.const(2.0))
    g.output(g.mul(g.op("Div", hidden, root), g.vector(1)), hidden)
    declined(g, words)


# What must not be taken


def norm_read_inside(where: str) -> Graph:
    """A norm of which one inner value has a further reader."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    square = g.op("Pow", hidden, g.const(2.0))
    mean = g.mean(square)
    shifted = g.add(mean, g.const(1e-5))
    root = g.op("Sqrt", shifted)
    inverse = g.op("Reciprocal", root)
    normal = g.mul(hidden, inverse)
    g.output(g.mul(normal, g.vector(1)), hidden)
    value = {"square": square, "mean": mean, "shifted": shifted, "root": root, "inverse": inverse, "normal": normal}
    g.output(value[where] if where in ("mean", "root") else g.op("Neg", value[where]))
    return g


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("square", "is also read by Neg 'node_neg_9': it must stay"),
        ("mean", "is a graph output: it must stay"),
        ("shifted", "is also read by Neg"),
        ("root", "is a graph output"),
        ("inverse", "is also read by Neg"),
        ("normal", "is also read by Neg"),
    ],
)
def test_norm_whose_inner_value_has_another_reader(where: str, words: str) -> None:
    site = declined(norm_read_inside(where), words)
    assert "a value inside the RMSNorm" in (site.reason or "")
    assert site.inputs["shared_output"]["value"] == "residual"


def test_two_norms_that_share_their_root_are_one_norm_and_its_rest() -> None:
    """After common subexpressions are merged, two norms of one hidden state differ in their gammas alone."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = _rms(g, hidden)
    g.output(g.mul(normal, g.vector(1)), g.mul(g.vector(2), normal), hidden)
    matched(g)
    assert operators(mapped(g.model())[0]) == ["MoEFinalizeAddRMSNorm"]


@pytest.mark.parametrize("width", [2 * HIDDEN, HIDDEN // 2])
def test_sum_of_squares_over_another_width(width: int) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    total = g.reduce("ReduceSum", g.op("Mul", hidden, hidden))
    shifted = g.add(g.op("Div", total, g.const(float(width))), g.const(1e-5))
    g.output(g.mul(g.op("Div", hidden, g.op("Sqrt", shifted)), g.vector(1)), hidden)
    declined(g, f"makes no mean of the squares: by {width}, while H is 16")


def test_eps_after_the_root_is_not_taken() -> None:
    """x / (sqrt(mean(x * x)) + eps)."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    root = g.op("Sqrt", g.mean(g.op("Mul", hidden, hidden)))
    g.output(g.mul(g.op("Div", hidden, g.add(root, g.const(1e-3))), g.vector(1)), hidden)
    declined(g, "does not divide the hidden state in a form that is known: x / sqrt(mean(x * x) + eps) is taken")


def test_norm_that_reads_a_narrower_copy_is_not_taken() -> None:
    """float32 rows, normalised in half precision: mixed dtypes."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    wide = g.cast(g.cast(hidden, "float16"), "float32")
    g.output(g.mul(_rms(g, wide), g.vector(1)), hidden)
    site = only(map_model(model := g.model()))
    assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
    assert_same_numbers(g.model(), model)


def test_norm_that_squares_one_copy_and_divides_another_is_not_taken() -> None:
    """The root is that of the sum; what it divides was rounded to bfloat16."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    root = g.op("Sqrt", g.add(g.mean(g.op("Mul", hidden, hidden)), g.const(1e-5)))
    other = g.cast(g.cast(hidden, "bfloat16"), "float32")
    g.output(g.mul(g.op("Div", other, root), g.vector(1)), hidden)
    declined(g, "does not divide the hidden state in a form that is known")
