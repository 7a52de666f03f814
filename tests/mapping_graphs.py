"""Small ONNX graphs that end in a MoE tail, in every spelling of the norm, for the tests of mapping."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from tests.equivalence import seeded_inputs

TOKENS, TOP_K, ROWS, HIDDEN = 6, 3, 24, 16
SIZES = {"T": TOKENS, "R": ROWS, "B": 2, "S": 3}
RANGES = {"map": (-1, ROWS)}

FLOAT = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@dataclass
class Graph:
    """Builds a model node by node; every method returns the name of the value that it makes."""

    dtype: str = "float32"
    opset: int = 22
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    values: list[onnx.ValueInfoProto] = field(default_factory=list)

    def op(self, op_type: str, *inputs: str, domain: str = "", count: int = 1, **attributes: Any) -> str:
        names = [f"{op_type.lower()}_{len(self.nodes)}" + ("" if i == 0 else f"_{i}") for i in range(count)]
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name=f"node_{names[0]}", domain=domain, **attributes)
        )
        return names[0]

    def input(self, name: str, shape: list[int | str], dtype: int | None = None) -> str:
        self.inputs[name] = helper.make_tensor_value_info(name, dtype or FLOAT[self.dtype], shape)
        return name

    def const(self, value: Any, dtype: int | None = None, name: str | None = None) -> str:
        name = name or f"const_{len(self.initializers)}"
        data = helper.tensor_dtype_to_np_dtype(dtype or FLOAT[self.dtype])
        self.initializers[name] = numpy_helper.from_array(np.array(value, dtype=np.float64).astype(data), name)
        return name

    def ints(self, *values: int) -> str:
        return self.const(list(values), TensorProto.INT64)

    def vector(self, seed: int, dtype: int | None = None, name: str | None = None, shape: Sequence[int] = ()) -> str:
        """A weight of [HIDDEN], or [*shape, HIDDEN], away from 0."""
        return self.const(np.random.default_rng(seed).uniform(0.5, 1.5, (*shape, HIDDEN)), dtype, name)

    def cast(self, value: str, dtype: str) -> str:
        return self.op("Cast", value, to=FLOAT[dtype])

    def cast_int32(self, value: str) -> str:
        return self.op("Cast", value, to=TensorProto.INT32)

    def reduce(self, op_type: str, value: str, axis: int = -1) -> str:
        """ReduceSum has its axes as an input in all opsets here, the others from opset 18 on."""
        if self.opset < 18 and op_type != "ReduceSum":
            return self.op(op_type, value, axes=[axis], keepdims=1)
        return self.op(op_type, value, self.ints(axis), keepdims=1, noop_with_empty_axes=0)

    def mean(self, value: str, axis: int = -1) -> str:
        return self.reduce("ReduceMean", value, axis)

    def routed(self, **attributes: Any) -> str:
        """A captured finalize node: [T, H] out of gemm2_permuted, expert_weights and map, which are graph inputs."""
        for name, shape, dtype in (
            ("rows", ["R", HIDDEN], None),
            ("weights", ["T", TOP_K], TensorProto.FLOAT),
            ("map", ["T", TOP_K], TensorProto.INT32),
        ):
            self.inputs.setdefault(name, helper.make_tensor_value_info(name, dtype or FLOAT[self.dtype], shape))
        value = self.op(
            "MoEFinalizeAdd",
            "rows",
            "weights",
            "map",
            domain="moetrt",
            has_expanded_idx_to_permuted_idx=1,
            **attributes,
        )
        self.values.append(helper.make_tensor_value_info(value, FLOAT[self.dtype], ["T", HIDDEN]))
        return value

    def gathered(self) -> str:
        """The same in standard operators, as the contract says it: rows by the map, masked, weighted, summed over k."""
        self.routed()
        self.nodes.pop()
        self.values.pop()
        zero = self.const(0, TensorProto.INT32)
        rows = self.op("Gather", "rows", self.op("Max", "map", zero), axis=0)
        keep = self.op("Unsqueeze", self.op("GreaterOrEqual", "map", zero), self.ints(-1))
        weights = self.op("Unsqueeze", self.cast("weights", self.dtype), self.ints(-1))
        weighted = self.mul(self.op("Where", keep, rows, self.const(0.0)), weights)
        return self.op("ReduceSum", weighted, self.ints(1), keepdims=0)

    def to_tokens(self, value: str, batch_of: str = "residual") -> str:
        """[T, H] as [B, S, H], the sizes read off another value, as torch.onnx writes a view."""
        head = self.op("Shape", batch_of, start=0, end=2)
        return self.op("Reshape", value, self.op("Concat", head, self.ints(HIDDEN), axis=0), allowzero=1)

    def add(self, one: str, other: str, swap: bool = False) -> str:
        return self.op("Add", other, one) if swap else self.op("Add", one, other)

    def mul(self, one: str, other: str, swap: bool = False) -> str:
        return self.op("Mul", other, one) if swap else self.op("Mul", one, other)

    def output(self, *names: str) -> None:
        self.outputs += names

    def proto(self, *domains: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "graph",
            list(self.inputs.values()),
            [helper.make_empty_tensor_value_info(name) for name in self.outputs],
            list(self.initializers.values()),
            value_info=self.values,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(domain, 1) for domain in ("moetrt", *domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        for output in inferred.graph.output:
            if not output.type.HasField("tensor_type"):
                known = {value.name: value for value in (*self.values, *self.inputs.values())}
                output.CopyFrom(known[output.name])
        return inferred

    def model(self, *domains: str) -> ir.Model:
        return ir.from_proto(self.proto(*domains))


def feeds(model: ir.Model, seed: int = 0) -> dict[str, np.ndarray]:
    return seeded_inputs(model, SIZES, seed=seed, ranges=RANGES)


@dataclass(frozen=True)
class NormForm:
    """One spelling of RMSNorm."""

    square: str = "Pow"  # or "Mul"
    inverse: str = "Reciprocal"  # "Div1": 1/sqrt; "Div": x/sqrt; "Pow": power -0.5; "PowHalf": power 0.5, reciprocal
    positive_axis: bool = False
    swap_eps: bool = False
    swap_multiply: bool = False
    swap_gamma: bool = False
    gamma_plus_one: str = ""  # "right" or "left"
    constant_nodes: bool = False
    up: bool = False  # the arithmetic is in float32
    down: str = "none"  # "before" or "after" gamma
    gamma_dtype: str = ""  # the model's by default
    mean: str = "ReduceMean"  # "SumDiv", "SumMul": a sum times 1/H; "SumSquare": ReduceSumSquare, divided by H
    gamma_shape: str = ""  # "1H", "11H": stored so; "unsqueezed", "reshaped": brought to [1, H] by a node
    view: bool = False  # reads [B*S, H], and its result goes back to [B, S, H]
    wide_eps: bool = False  # the mean is widened to float32, and eps is added there

    def write(self, g: Graph, hidden: str, *, eps: float = 1e-5, seed: int = 5, rank: int = 3) -> str:
        if self.view:
            flat = g.op("Reshape", hidden, g.ints(-1, HIDDEN))
            normal = replace(self, view=False).write(g, flat, eps=eps, seed=seed, rank=2)
            return g.op("Reshape", normal, g.op("Shape", hidden), allowzero=1)
        return self.weighted(g, self.normalised(g, hidden, eps=eps, rank=rank), seed)

    def normalised(self, g: Graph, hidden: str, *, eps: float = 1e-5, rank: int = 3) -> str:
        """What gamma multiplies."""
        x = g.cast(hidden, "float32") if self.up else hidden
        work = "float32" if self.up else g.dtype
        number = (lambda v: g.op("Constant", value=g_tensor(v, work))) if self.constant_nodes else None

        def scalar(value: float) -> str:
            return number(value) if number else g.const(value, FLOAT[work])

        axis = rank - 1 if self.positive_axis else -1
        if self.mean == "SumSquare":
            mean = g.op("Div", g.reduce("ReduceSumSquare", x, axis), scalar(HIDDEN))
        else:
            square = g.op("Mul", x, x) if self.square == "Mul" else g.op("Pow", x, scalar(2.0))
            if self.mean == "ReduceMean":
                mean = g.mean(square, axis)
            elif self.mean == "SumDiv":
                mean = g.op("Div", g.reduce("ReduceSum", square, axis), scalar(HIDDEN))
            else:
                mean = g.mul(scalar(1 / HIDDEN), g.reduce("ReduceSum", square, axis), self.swap_multiply)
        if self.wide_eps:
            shifted = g.cast(g.add(g.cast(mean, "float32"), g.const(eps, FLOAT["float32"]), self.swap_eps), work)
        else:
            shifted = g.add(mean, scalar(eps), self.swap_eps)
        if self.inverse == "Pow":
            normal = g.mul(x, g.op("Pow", shifted, scalar(-0.5)), self.swap_multiply)
        else:
            root = g.op("Pow", shifted, scalar(0.5)) if self.inverse == "PowHalf" else g.op("Sqrt", shifted)
            if self.inverse == "Div":
                normal = g.op("Div", x, root)
            else:
                one = g.op("Div", scalar(1.0), root) if self.inverse == "Div1" else g.op("Reciprocal", root)
                normal = g.mul(x, one, self.swap_multiply)
        return g.cast(normal, g.dtype) if self.down == "before" else normal

    def weighted(self, g: Graph, normal: str, seed: int = 5) -> str:
        """``normal`` times gamma."""
        gamma_dtype = self.gamma_dtype or g.dtype
        gamma = g.vector(seed, FLOAT[gamma_dtype], shape=self.gamma_shape.count("1") * [1])
        if self.gamma_shape == "unsqueezed":
            gamma = g.op("Unsqueeze", gamma, g.ints(0))
        elif self.gamma_shape == "reshaped":
            gamma = g.op("Reshape", gamma, g.ints(1, -1))
        multiply_in = g.dtype if self.down == "before" or not self.up else "float32"
        if gamma_dtype != multiply_in:
            gamma = g.cast(gamma, multiply_in)
        if self.gamma_plus_one:
            gamma = g.add(gamma, g.const(1.0, FLOAT[multiply_in]), self.gamma_plus_one == "left")
        result = g.mul(gamma, normal, self.swap_gamma)
        return g.cast(result, g.dtype) if self.down == "after" else result


FURTHER_FORMS = {
    "sum-div": NormForm(mean="SumDiv"),
    "sum-times-inverse": NormForm(mean="SumMul", square="Mul"),
    "sum-times-inverse-swapped": NormForm(mean="SumMul", swap_multiply=True),
    "sum-square": NormForm(mean="SumSquare", inverse="Div"),
    "sum-square-power": NormForm(mean="SumSquare", inverse="Pow", positive_axis=True),
    "gamma-1H": NormForm(gamma_shape="1H"),
    "gamma-11H": NormForm(gamma_shape="11H", swap_gamma=True),
    "gamma-unsqueezed": NormForm(gamma_shape="unsqueezed"),
    "one-plus-gamma-reshaped": NormForm(gamma_shape="reshaped", gamma_plus_one="right"),
    "view": NormForm(view=True),
    "view-of-gemma": NormForm(view=True, gamma_plus_one="left", inverse="Div"),
}
"""Forms that no exporter that we know writes for a whole model, but that files from elsewhere have."""


def g_tensor(value: float, dtype: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype=helper.tensor_dtype_to_np_dtype(FLOAT[dtype])))


def full_tail(
    form: NormForm | None = None, *, dtype: str = "float32", opset: int = 22, third_reader: bool = False
) -> Graph:
    """Routed scale, shared add, Reshape to [B, S, H], residual add, norm, and a next residual add."""
    g = Graph(dtype, opset)
    residual = g.input("residual", ["B", "S", HIDDEN])
    shared = g.input("shared", ["T", HIDDEN])
    value = g.mul(g.routed(), g.const(2.5))
    value = g.to_tokens(g.add(value, shared))
    hidden = g.add(residual, value)
    normal = (form or NormForm()).write(g, hidden)
    g.output(normal, g.add(hidden, normal))
    if third_reader:
        g.output(g.op("Neg", hidden))
    return g
