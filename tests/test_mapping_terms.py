"""What is added to the routed part: residual and combine scales, the shared expert's gate, dtypes."""

from __future__ import annotations

import pytest
from onnx import TensorProto

from tests.mapping_checks import declined, matched
from tests.mapping_graphs import FLOAT, HIDDEN, Graph, NormForm, g_tensor

DTYPES = ["float32", "float16"]


def times(g: Graph, value: str, factor: float, how: str, swap: bool, dtype: str = "") -> str:
    """``value * factor``, the number an initializer, a Constant node or of shape [1], or as a division."""
    dtype = dtype or g.dtype
    if how == "div":
        return g.op("Div", value, g.const(1 / factor, FLOAT[dtype]))
    if how == "constant":
        number = g.op("Constant", value=g_tensor(factor, dtype))
    else:
        number = g.const([factor] if how == "one element" else factor, FLOAT[dtype])
    return g.mul(value, number, swap)


HOW = ["scalar", "one element", "constant", "div"]


def ends_with_norm(g: Graph, hidden: str, rank: int) -> None:
    form = NormForm(up=True, down="before") if g.dtype == "float16" else NormForm()
    g.output(form.write(g, hidden, rank=rank), hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("how", HOW)
def test_granite_residual_multiplier(how: str, where: str, swap: bool, dtype: str) -> None:
    """residual + x * 0.22, before or after the Reshape to [B, S, H], x with its shared expert."""
    g = Graph(dtype)
    residual = g.input("residual", ["B", "S", HIDDEN])
    value = g.add(g.routed(), g.input("shared", ["T", HIDDEN]), swap)
    if where == "before":
        value = times(g, value, 0.22, how, swap)
    value = g.to_tokens(value)
    if where == "after":
        value = times(g, value, 0.22, how, swap)
    ends_with_norm(g, g.add(residual, value, swap), 3)
    site = matched(g)
    # A number in half precision has 11 bits; its inverse, for a division, is rounded too.
    assert site.attributes["combine_scale"] == pytest.approx(0.22, rel=1e-6 if dtype == "float32" else 2**-11)
    assert site.attributes["routed_scaling_factor"] == pytest.approx(1.0)
    assert site.attributes["residual_scale"] == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_minimax_alpha_and_beta(how: str, swap: bool, dtype: str) -> None:
    """residual * alpha + x * beta."""
    g = Graph(dtype)
    residual = times(g, g.input("residual", ["B", "S", HIDDEN]), 3.5, how, swap)
    value = times(g, g.to_tokens(g.routed()), 0.75, how, swap)
    ends_with_norm(g, g.add(residual, value, swap), 3)
    site = matched(g)
    rel = 1e-6 if dtype == "float32" else 2**-11
    assert site.attributes["residual_scale"] == pytest.approx(3.5, rel=rel)
    assert site.attributes["routed_scaling_factor"] == pytest.approx(0.75, rel=rel)
    assert site.inputs["residual"]["value"] == "residual"


@pytest.mark.parametrize("how", HOW)
def test_scaled_residual_behind_casts_and_a_reshape(how: str) -> None:
    """The residual is scaled in float32, rounded, and flattened before the Add; B * S need not be T by its name."""
    g = Graph("float16")
    wide = times(g, g.cast(g.input("residual", ["B", "S", HIDDEN]), "float32"), 1.5, how, False, "float32")
    residual = g.op("Reshape", g.cast(wide, "float16"), g.ints(-1, HIDDEN))
    ends_with_norm(g, g.add(residual, g.routed()), 2)
    site = matched(g)
    assert site.attributes["residual_scale"] == pytest.approx(1.5)
    assert site.shapes["residual"] == ["T", HIDDEN]


def test_scaled_residual_with_another_reader_stays() -> None:
    """The product is there anyway: it is the residual, as it is."""
    g = Graph()
    residual = g.mul(g.input("residual", ["T", HIDDEN]), g.const(1.5))
    ends_with_norm(g, g.add(residual, g.routed()), 2)
    g.output(g.op("Neg", residual))
    site = matched(g)
    assert site.attributes["residual_scale"] == 1.0
    assert site.inputs["residual"]["value"] == residual


@pytest.mark.parametrize("swap", [False, True])
def test_residual_divided_by_itself_or_by_a_tensor_is_no_scale(swap: bool) -> None:
    g = Graph()
    residual, factor = g.input("residual", ["T", HIDDEN]), g.input("factor", ["T", HIDDEN])
    scaled = g.op("Div", factor, residual) if swap else g.op("Div", residual, factor)
    ends_with_norm(g, g.add(scaled, g.routed()), 2)
    assert matched(g).inputs["residual"]["value"] == scaled


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("where", ["routed", "whole", "both"])
def test_routed_scaling_and_combine_scale(where: str, swap: bool) -> None:
    """The routed part alone, or with the shared expert, or each by its own number."""
    g = Graph()
    value = g.routed()
    if where in ("routed", "both"):
        value = g.mul(value, g.const(2.5), swap)
    value = g.add(g.input("shared", ["T", HIDDEN]), value, swap)
    if where in ("whole", "both"):
        value = g.mul(value, g.const(0.4), swap)
    ends_with_norm(g, g.add(value, g.input("residual", ["T", HIDDEN])), 2)
    attributes = matched(g).attributes
    assert attributes["routed_scaling_factor"] == pytest.approx(1.0 if where == "whole" else 2.5, rel=1e-6)
    assert attributes["combine_scale"] == pytest.approx(1.0 if where == "routed" else 0.4, rel=1e-6)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("gate", ["same", "float32", "sigmoid in float32"])
@pytest.mark.parametrize("shape", ["tokens", "batch", "tokens gate of a batch", "batch of tokens"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_expert_gate(dtype: str, shape: str, gate: str, swap: bool) -> None:
    """sigmoid(gate) * shared, the gate [T, 1] or [B, S, 1], in the rows' dtype or float32, in either order."""
    g = Graph(dtype)
    residual = g.input("residual", ["B", "S", HIDDEN])
    leading: list[int | str] = ["B", "S"] if shape in ("batch", "batch of tokens") else ["T"]
    logits = g.input("gate", [*leading, 1], TensorProto.FLOAT if gate == "float32" else None)
    if gate == "sigmoid in float32":
        logits = g.cast(logits, "float32")
    factor = g.op("Sigmoid", logits)
    if dtype == "float16" and gate != "same":
        factor = g.cast(factor, "float16")
    shared_leading: list[int | str] = ["B", "S"] if shape in ("batch", "tokens gate of a batch") else ["T"]
    shared = g.input("shared", [*shared_leading, HIDDEN])
    if shape == "tokens gate of a batch":
        head = g.op("Shape", shared, start=0, end=2)
        factor = g.op("Reshape", factor, g.op("Concat", head, g.ints(1), axis=0))
    elif shape == "batch of tokens":
        factor = g.op("Reshape", factor, g.ints(-1, 1))
    gated = g.mul(factor, shared, swap)
    routed = g.routed()
    if len(shared_leading) == 2:
        value = g.add(g.to_tokens(routed), gated, swap)
    else:
        value = g.to_tokens(g.add(routed, gated, swap))
    ends_with_norm(g, g.add(residual, value, swap), 3)
    site = matched(g)
    assert site.inputs["shared_output"]["value"] == "shared"
    wide = gate == "float32" and dtype == "float16"
    assert site.inputs["shared_gate"]["dtype"] == ("FLOAT" if wide or dtype == "float32" else "FLOAT16")


@pytest.mark.parametrize("swap", [False, True])
def test_scaled_gated_output(swap: bool) -> None:
    """routed * 2 + 0.5 * (sigmoid(gate) * shared)."""
    g = Graph()
    gated = g.mul(g.op("Sigmoid", g.input("gate", ["T", 1])), g.input("shared", ["T", HIDDEN]), swap)
    value = g.add(g.mul(g.routed(), g.const(2.0)), g.mul(gated, g.const(0.5), swap), swap)
    ends_with_norm(g, g.add(value, g.input("residual", ["T", HIDDEN])), 2)
    attributes = matched(g).attributes
    assert (attributes["combine_scale"], attributes["routed_scaling_factor"]) == (0.5, 4.0)


def test_gate_of_every_column_is_a_plain_shared_output() -> None:
    """A gate [T, H] is no gate of the operator: its product is added as it is."""
    g = Graph()
    gated = g.mul(g.op("Sigmoid", g.input("gate", ["T", HIDDEN])), g.input("shared", ["T", HIDDEN]))
    ends_with_norm(g, g.add(g.add(g.routed(), gated), g.input("residual", ["T", HIDDEN])), 2)
    site = matched(g)
    assert site.inputs["shared_output"]["value"] == gated
    assert "shared_gate" not in site.inputs


# A residual stream in float32

SIZES = {"gate": 1, "shared": HIDDEN, "residual": HIDDEN}


@pytest.mark.parametrize("shared", [False, True])
def test_float32_residual_stream_over_half_rows(shared: bool) -> None:
    """The operator's residual has the rows' dtype: finalize and shared add are mapped, the rest stays as it is."""
    g = Graph("float16")
    residual = g.input("residual", ["T", HIDDEN], TensorProto.FLOAT)
    value = g.routed()
    if shared:
        value = g.add(value, g.input("shared", ["T", HIDDEN]))
    hidden = g.add(residual, g.cast(value, "float32"))
    square = g.op("Pow", hidden, g.const(2.0, TensorProto.FLOAT))
    inverse = g.op("Reciprocal", g.op("Sqrt", g.add(g.mean(square), g.const(1e-5, TensorProto.FLOAT))))
    g.output(g.cast(g.mul(g.mul(hidden, inverse), g.vector(1, TensorProto.FLOAT)), "float16"), hidden)
    site = declined(
        g,
        "'residual' that is added is FLOAT while the rows are FLOAT16: mixed dtypes; keep both the residual stream and "
        "the rows in FLOAT, or both in FLOAT16",
    )
    assert ("shared_output" in site.inputs) == shared


def test_float32_rows_and_residual_with_a_half_norm_are_not_taken() -> None:
    """The stream is float32 and the norm's result half: no one dtype fits the operator's outputs."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    square = g.op("Pow", hidden, g.const(2.0))
    inverse = g.op("Reciprocal", g.op("Sqrt", g.add(g.mean(square), g.const(1e-5))))
    normal = g.cast(g.mul(hidden, inverse), "float16")
    g.output(g.mul(normal, g.vector(1, TensorProto.FLOAT16)), hidden)
    declined(g, "is rounded to FLOAT16; the rows are FLOAT")


def test_half_operands_over_float32_rows() -> None:
    """Their Casts to float32 are what is added: nothing is lost."""
    g = Graph()
    wide = {name: g.cast(g.input(name, ["T", size], TensorProto.FLOAT16), "float32") for name, size in SIZES.items()}
    gated = g.mul(g.op("Sigmoid", wide["gate"]), wide["shared"])
    ends_with_norm(g, g.add(g.add(g.routed(), gated), wide["residual"]), 2)
    site = matched(g)
    assert {name: site.inputs[name]["value"] for name in ("shared_gate", "shared_output", "residual")} == {
        "shared_gate": wide["gate"],
        "shared_output": wide["shared"],
        "residual": wide["residual"],
    }
