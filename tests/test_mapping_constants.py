"""What is computed from stored values alone is a constant: eps, scales, 1/H and gamma; what may differ is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from moetrt.mapping import map_model
from moetrt.segments.constants import constant, is_constant, makers, scalar
from tests.equivalence import run_model
from tests.mapping_checks import assert_same_numbers, declined, mapped, matched
from tests.mapping_graphs import FLOAT, HIDDEN, Graph, NormForm

DTYPES = ["float32", "float16"]


def value_of(g: Graph, name: str) -> ir.Value:
    """The value called ``name`` in the graph's model, which has it as an output."""
    g.output(name)
    return next(value for value in g.model().graph.outputs if value.name == name)


def computed(g: Graph, op: str) -> str:
    """One operator that is computed, on numbers whose results are rounded."""
    dtype = FLOAT[g.dtype]
    some, others = g.const([0.1, 0.7, 3.0], dtype), g.const([1.7, 0.3, 7.0], dtype)
    if op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum"):
        return g.op(op, some, others)
    if op == "Cast":
        return g.op("Cast", g.const([1 / 3, 1e-6, 70000.0], TensorProto.DOUBLE), to=dtype)
    if op == "CastLike":
        return g.op("CastLike", g.const([1 / 3, 1e-6], TensorProto.DOUBLE), some)
    if op == "DequantizeLinear":
        return g.op(op, g.const([-3, 0, 100], TensorProto.INT8), g.const(0.01, dtype), g.const(2, TensorProto.INT8))
    if op == "Gather":
        return g.op(op, some, g.const(-1, TensorProto.INT64), axis=0)
    if op == "Slice":
        return g.op(op, some, g.ints(1), g.ints(2**62))
    if op == "Concat":
        return g.op(op, some, others, axis=0)
    if op == "Where":
        return g.op(op, g.const([1, 0, 1], TensorProto.BOOL), some, others)
    if op == "Range":
        return g.op(op, *(g.const(number, TensorProto.INT64) for number in (2, 11, 3)))
    if op == "ConstantOfShape":
        return g.op(op, g.ints(2, 3), value=helper.make_tensor("", dtype, [1], [0.1]))
    if op == "Transpose":
        return g.op(op, g.op("Unsqueeze", some, g.ints(0)), perm=[1, 0])
    if op == "Squeeze":
        return g.op(op, g.op("Unsqueeze", some, g.ints(0)), g.ints(0))
    if op == "Flatten":
        return g.op(op, some, axis=0)
    extra = {"Reshape": [3, 1], "Expand": [2, 3], "Tile": [2], "Unsqueeze": [0]}
    return g.op(op, some, g.ints(*extra[op])) if op in extra else g.op(op, some)


MOVES = ["Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Gather", "Slice", "Concat", "Transpose", "Tile"]
ARITHMETIC = ["Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Pow", "Exp", "Log", "Max", "Min", "Sum"]
OTHERS = ["Cast", "CastLike", "DequantizeLinear", "Expand", "ConstantOfShape", "Range", "Where"]
OPERATORS = [*MOVES, *ARITHMETIC, *OTHERS]


@pytest.mark.parametrize("opset", [19, 22])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_computed_constant_is_what_onnx_runtime_computes(op: str, dtype: str, opset: int) -> None:
    g = Graph(dtype, opset)
    name = computed(g, op)
    tensor = constant(value_of(g, name))
    assert tensor is not None
    wanted = run_model(g.model(), {})[name]
    assert (tensor.numpy().dtype, tensor.numpy().shape) == (wanted.dtype, wanted.shape)
    if op in ("Pow", "Exp", "Log"):
        # The last bit of these is left to who computes them.
        np.testing.assert_allclose(tensor.numpy(), wanted, rtol=2**-22 if dtype == "float32" else 2**-10)
    else:
        np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_float16_is_computed_in_float16() -> None:
    """1 / 41 * 41 is not 1 there; computed in float32, and rounded at the end, it were."""
    g = Graph("float16")
    part = g.op("Div", g.const(1.0), g.const(41.0))
    assert scalar(value_of(g, g.mul(part, g.const(41.0)))) == 1 - 2**-11


def with_default(g: Graph) -> str:
    g.const(2.0, name="given")
    return g.op("Add", g.input("given", []), g.const(1.0))


NOT_THE_SAME: dict[str, Callable[[Graph], str]] = {
    "an input with a default": with_default,
    "an input": lambda g: g.mul(g.input("given", [1]), g.const(2.0)),
    "random": lambda g: g.mul(g.op("RandomNormal", shape=[1]), g.const(2.0)),
    "random like": lambda g: g.op("RandomUniformLike", g.const([2.0])),
    "a size that is not known": lambda g: g.cast(g.op("Shape", g.input("given", ["T"])), "float32"),
}


@pytest.mark.parametrize("what", NOT_THE_SAME)
def test_what_may_differ_from_run_to_run_is_no_constant(what: str) -> None:
    g = Graph()
    value = value_of(g, NOT_THE_SAME[what](g))
    assert constant(value) is None
    assert not is_constant(value)
    assert scalar(value) is None


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_is_no_number(number: float) -> None:
    g = Graph()
    value = value_of(g, g.mul(g.const(number), g.const(2.0)))
    assert is_constant(value)
    assert scalar(value) is None


def test_one_over_0_is_no_number() -> None:
    g = Graph()
    assert scalar(value_of(g, g.op("Reciprocal", g.const(0.0)))) is None


def test_an_infinite_filling_is_no_number() -> None:
    g = Graph()
    fill = helper.make_tensor("", TensorProto.FLOAT, [1], [np.inf])
    assert scalar(value_of(g, g.op("ConstantOfShape", g.ints(2), value=fill))) is None


@pytest.mark.parametrize(("shape", "dtype"), [([5], ir.DataType.FLOAT), ([3], ir.DataType.FLOAT16)])
def test_a_file_that_says_another_shape_or_dtype_is_not_believed(shape: list[int], dtype: ir.DataType) -> None:
    stored = ir.Value(name="stored", const_value=ir.tensor(np.ones(3, np.float32)))
    made = ir.node("Neg", [stored]).outputs[0]
    made.shape, made.dtype = ir.Shape(shape), dtype
    assert constant(made) is None


def test_an_operator_of_another_domain_is_not_computed() -> None:
    g = Graph()
    name = g.op("Identity", g.const(2.0), domain="elsewhere")
    g.values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    g.output(g.op("Neg", name))
    value = g.model("elsewhere").graph.outputs[0]
    assert constant(value) is None
    assert not is_constant(value)


SIZES = {
    "last": lambda g, shape: g.op("Gather", shape, g.const(-1, TensorProto.INT64), axis=0),
    "slice": lambda g, shape: g.op("Squeeze", g.op("Slice", shape, g.ints(2), g.ints(3)), g.ints(0)),
    "gathered, then sliced": lambda g, shape: g.op(
        "Slice", g.op("Gather", shape, g.ints(0, 2), axis=0), g.ints(-1), g.ints(2**62)
    ),
}


@pytest.mark.parametrize("how", SIZES)
def test_a_size_that_is_a_number_is_one_beside_those_that_are_not(how: str) -> None:
    g = Graph()
    shape = g.op("Shape", g.input("x", ["B", "S", HIDDEN]))
    assert scalar(value_of(g, SIZES[how](g, shape))) == HIDDEN


@pytest.mark.parametrize("index", [0, 1])
def test_a_size_that_is_no_number_stays_unknown(index: int) -> None:
    g = Graph()
    shape = g.op("Shape", g.input("x", ["B", "S", HIDDEN]))
    size = g.op("Gather", shape, g.const(index, TensorProto.INT64), axis=0)
    assert constant(value_of(g, shape)) is None
    assert constant(value_of(g, size)) is None
    zero = g.mul(g.cast(size, "float32"), g.const(0.0))
    assert scalar(value_of(g, zero)) is None


def test_what_is_large_is_not_read() -> None:
    """Its data lies in a file that is not there; its sizes are known without it."""
    wide = ir.Value(name="wide", shape=ir.Shape([4096, 4096]), type=ir.TensorType(ir.DataType.FLOAT))
    place = {"location": "nowhere", "offset": 0, "length": 4 * 4096**2, "base_dir": Path("/nowhere")}
    wide.const_value = ir.ExternalTensor(dtype=ir.DataType.FLOAT, shape=wide.shape, name="wide", **place)
    doubled = ir.node("Add", [wide, wide]).outputs[0]
    doubled.shape, doubled.dtype = wide.shape, ir.DataType.FLOAT
    assert is_constant(doubled)
    assert constant(doubled) is None
    first = ir.node("Slice", [doubled, *(ir.Value(name=name) for name in "ab")]).outputs[0]
    first.shape, first.dtype = ir.Shape([1]), ir.DataType.FLOAT
    assert constant(first) is None
    sizes = ir.node("Shape", [doubled]).outputs[0]
    sizes.shape, sizes.dtype = ir.Shape([2]), ir.DataType.INT64
    tensor = constant(sizes)
    assert tensor is not None
    assert tensor.numpy().tolist() == [4096, 4096]


def test_a_long_way_from_what_is_stored_is_given_up() -> None:
    g = Graph()
    value = g.const(1.0)
    for _ in range(65):
        value = g.op("Neg", value)
    assert makers(value_of(g, value)) is None


# In tails

GAMMAS: dict[str, Callable[[Graph], str]] = {
    "product": lambda g: g.mul(g.vector(1), g.vector(2)),
    "product with a number": lambda g: g.mul(g.const(0.5), g.vector(2)),
    "sum": lambda g: g.add(g.vector(1), g.vector(2)),
    "plus two": lambda g: g.add(g.vector(1), g.const(2.0)),
    "one plus twice": lambda g: g.add(g.const(1.0), g.add(g.vector(1), g.const(1.0))),
    "exponential": lambda g: g.op("Exp", g.vector(1)),
    "transposed": lambda g: g.op("Transpose", g.const(np.linspace(0.5, 1.5, HIDDEN).reshape(HIDDEN, 1)), perm=[1, 0]),
    "columns of a table": lambda g: g.op("Gather", g.vector(1, shape=[5]), g.const(3, TensorProto.INT64), axis=0),
    "expanded": lambda g: g.op("Expand", g.const(1.5), g.ints(HIDDEN)),
    "integers": lambda g: g.op("Cast", g.cast_int32(g.const(np.arange(HIDDEN) / 3 + 1)), to=FLOAT[g.dtype]),
    "dequantised": lambda g: g.op(
        "DequantizeLinear", g.const(np.arange(HIDDEN) - 5, TensorProto.INT8), g.const(0.1), g.const(0, TensorProto.INT8)
    ),
    "double": lambda g: g.op("Cast", g.vector(1, TensorProto.DOUBLE), to=FLOAT[g.dtype]),
    "reshaped twice": lambda g: g.op(
        "Unsqueeze", g.op("Squeeze", g.op("Add", g.vector(1, shape=[1]), g.vector(2)), g.ints(0)), g.ints(0)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", GAMMAS)
def test_gamma_is_computed_from_stored_values(what: str, dtype: str) -> None:
    g = Graph(dtype)
    hidden = g.add(g.to_tokens(g.routed()), g.input("residual", ["B", "S", HIDDEN]))
    normal = NormForm(up=dtype == "float16", down="before" if dtype == "float16" else "none").normalised(g, hidden)
    g.output(g.mul(GAMMAS[what](g), normal), hidden)
    site = matched(g)
    assert site.shapes["gamma"] == [HIDDEN]
    assert site.attributes["weight_bias"] == 0.0


def test_one_plus_gamma_in_16_bits_keeps_its_rounding() -> None:
    """The operator adds the 1 in float32."""
    g = Graph("float16")
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    normal = NormForm(up=True, down="before").normalised(g, hidden)
    gamma = g.add(g.const(1.0), g.vector(1))
    g.output(g.mul(gamma, normal), hidden)
    site = matched(g)
    assert site.inputs["gamma"]["value"] == gamma
    assert site.attributes["weight_bias"] == 0.0


def test_two_layers_share_what_their_gammas_are_computed_from() -> None:
    """The nodes stand after the first plugin node in the file, and before it in what is mapped."""
    g = Graph()
    hidden, scale = g.input("residual", ["T", HIDDEN]), ""
    for seed in (1, 2):
        hidden = g.add(hidden, g.routed())
        normal = NormForm().normalised(g, hidden)
        scale = scale or g.op("Sqrt", g.const(2.0))
        hidden = g.add(g.mul(g.mul(g.vector(seed), scale), normal), hidden)
    g.output(hidden)
    after, report = mapped(model := g.model())
    assert [site.operator for site in report.sites] == ["MoEFinalizeAddRMSNorm"] * 2
    assert_same_numbers(model, after)


@pytest.mark.parametrize("what", ["gamma", "eps", "scale"])
def test_a_default_that_can_be_overridden_is_no_constant_of_a_tail(what: str) -> None:
    g = Graph()
    given = g.input("given", [HIDDEN] if what == "gamma" else [])
    g.const(np.full(HIDDEN, 1.5) if what == "gamma" else 1.5, name="given")
    value = g.op("Sqrt", given)
    routed = g.mul(g.routed(), value) if what == "scale" else g.routed()
    hidden = g.add(routed, g.input("residual", ["T", HIDDEN]))
    mean = g.mean(g.op("Pow", hidden, g.const(2.0)))
    normal = g.op("Div", hidden, g.op("Sqrt", g.add(mean, value if what == "eps" else g.const(1e-5))))
    g.output(g.mul(normal, value if what == "gamma" else g.vector(1)), hidden)
    words = {"gamma": "gamma comes from Sqrt", "eps": "is not a constant number", "scale": "is not a constant number"}
    site = declined(g, words[what])
    assert site.attributes["routed_scaling_factor"] == 1.0


NUMBERS: dict[str, Callable[[Graph, float], str]] = {
    "cast": lambda g, number: g.op("Cast", g.const(number, TensorProto.DOUBLE), to=FLOAT[g.dtype]),
    "cast like": lambda g, number: g.op("CastLike", g.const(number, TensorProto.DOUBLE), g.const(1.0)),
    "quotient": lambda g, number: g.op("Div", g.const(number * 8), g.const(8.0)),
    "product": lambda g, number: g.mul(g.const(number / 4), g.const(4.0)),
    "root": lambda g, number: g.op("Sqrt", g.const(number**2)),
    "power": lambda g, number: g.op("Pow", g.const(1 / number), g.const(-1.0)),
    "unsqueezed": lambda g, number: g.op("Unsqueeze", g.op("Sqrt", g.const(number**2)), g.ints(0)),
    "narrowed": lambda g, number: g.op("Cast", g.const(number, TensorProto.FLOAT16), to=FLOAT[g.dtype]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_of_a_tail_are_computed(what: str, dtype: str) -> None:
    """The scales of the routed part and of the residual, and eps."""
    g = Graph(dtype)
    number, wide = NUMBERS[what], Graph("float32", initializers=g.initializers, nodes=g.nodes)
    residual = g.mul(g.input("residual", ["T", HIDDEN]), number(g, 1.5))
    hidden = g.add(g.mul(g.routed(), number(g, 2.2)), residual)
    x = g.cast(hidden, "float32") if dtype == "float16" else hidden
    mean = g.mean(g.op("Pow", x, wide.const(2.0)))
    normal = g.op("Div", x, g.op("Sqrt", g.add(mean, number(wide, 0.3))))
    g.output(g.mul(g.cast(normal, "float16") if dtype == "float16" else normal, g.vector(1)), hidden)
    attributes = matched(g).attributes
    halved = dtype == "float16" or what == "narrowed"
    assert attributes["residual_scale"] == 1.5
    assert attributes["routed_scaling_factor"] == pytest.approx(2.2, rel=2**-10 if halved else 1e-6)
    assert attributes["eps"] == pytest.approx(0.3, rel=2**-11 if what == "narrowed" else 1e-6)


def width(g: Graph, hidden: str, how: str) -> str:
    """x.shape[-1], as a float."""
    size = g.op("Gather", g.op("Shape", hidden), g.const(-1, TensorProto.INT64), axis=0)
    return g.op("Reciprocal", g.cast(size, "float32")) if how == "inverse" else g.cast(size, "float32")


@pytest.mark.parametrize("how", ["inverse", "divided"])
def test_h_is_read_off_the_hidden_state(how: str) -> None:
    g = Graph()
    hidden = g.add(g.to_tokens(g.routed()), g.input("residual", ["B", "S", HIDDEN]))
    total = g.reduce("ReduceSum", g.mul(hidden, hidden))
    mean = g.op("Mul" if how == "inverse" else "Div", total, width(g, hidden, how))
    normal = g.op("Div", hidden, g.op("Sqrt", g.add(mean, g.const(1e-5))))
    g.output(g.mul(normal, g.vector(1)), hidden)
    matched(g)


def test_another_size_of_the_hidden_state_is_not_h() -> None:
    g = Graph()
    hidden = g.add(g.to_tokens(g.routed()), g.input("residual", ["B", "S", HIDDEN]))
    total = g.reduce("ReduceSum", g.mul(hidden, hidden))
    size = g.cast(g.op("Gather", g.op("Shape", hidden), g.const(1, TensorProto.INT64), axis=0), "float32")
    normal = g.op("Div", hidden, g.op("Sqrt", g.add(g.op("Div", total, size), g.const(1e-5))))
    g.output(g.mul(normal, g.vector(1)), hidden)
    declined(g, "after the sum of squares has no constant number for H")


def test_weights_in_other_files_are_not_opened(tmp_path: Path) -> None:
    """The gamma is computed from two stored vectors whose file is gone while the graph is mapped."""
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    gamma = g.mul(g.vector(1, name="a"), g.vector(2, name="b"))
    g.output(g.mul(gamma, NormForm().normalised(g, hidden)), hidden)
    proto = g.proto()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=HIDDEN * 4)
    loaded = ir.load(tmp_path / "m.onnx")
    (tmp_path / "m.data").rename(tmp_path / "elsewhere")
    assert map_model(loaded).mapped == 1
