"""Nodes of both operators with their inputs' dtypes and shapes, and one-node ONNX models of them."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from onnx import TensorProto, helper

from moetrt.spec import DOMAIN, FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, PLUGIN_NAMESPACE, PLUGIN_VERSION, OperatorSpec

Dim = int | str

ONNX_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


@dataclass(frozen=True)
class Node:
    """One node: which optional inputs it has, and each input's dtype and shape."""

    spec: OperatorSpec
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[Dim, ...]]
    attributes: Mapping[str, object] = field(default_factory=dict)
    name: str = "layers.3/tail"

    @property
    def inputs(self) -> list[str]:
        return [entry.name for entry in self.spec.inputs if entry.name in self.shapes]

    @property
    def flags(self) -> dict[str, int]:
        return {entry.flag: int(entry.name in self.shapes) for entry in self.spec.optional_inputs}

    @property
    def output_shape(self) -> tuple[Dim, ...]:
        for name in ("residual", "shared_output"):
            if name in self.shapes:
                return self.shapes[name]
        last = self.shapes["gamma"][0] if "gamma" in self.shapes else self.shapes["gemm2_permuted"][1]
        return (self.shapes["expert_weights"][0], last)

    def with_input(self, name: str, dtype: str | None = None, shape: tuple[Dim, ...] | None = None) -> "Node":
        dtypes, shapes = dict(self.dtypes), dict(self.shapes)
        if dtype is not None:
            dtypes[name] = dtype
        if shape is not None:
            shapes[name] = shape
        return replace(self, dtypes=dtypes, shapes=shapes)

    def with_attributes(self, **attributes: object) -> "Node":
        return replace(self, attributes={**self.attributes, **attributes})

    def type_list(self) -> list[str]:
        return [self.dtypes[name] for name in self.inputs]

    def shape_list(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The inputs' shapes with the symbols replaced."""
        return [concrete(self.shapes[name], sizes) for name in self.inputs]

    def onnx_model(self) -> bytes:
        data = self.dtypes["gemm2_permuted"]
        values: dict[str, object] = {entry.name: entry.default for entry in self.spec.attributes}
        values |= self.flags | {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
        values |= self.attributes
        node = helper.make_node(
            self.spec.name, self.inputs, list(self.spec.outputs), name=self.name, domain=DOMAIN, **values
        )
        inputs = [
            helper.make_tensor_value_info(name, ONNX_DTYPES[self.dtypes[name]], self.shapes[name])
            for name in self.inputs
        ]
        outputs = [
            helper.make_tensor_value_info(name, ONNX_DTYPES[data], self.output_shape) for name in self.spec.outputs
        ]
        graph = helper.make_graph([node], "one_node", inputs, outputs)
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid(DOMAIN, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def concrete(shape: tuple[Dim, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)


def make_node(
    spec: OperatorSpec = FINALIZE_ADD_RMS_NORM,
    *,
    optional: tuple[str, ...] = ("expanded_idx_to_permuted_idx", "residual"),
    data: str = "bfloat16",
    side: str | None = None,
    tokens: Dim = "T",
    rows: Dim = "R",
    top_k: int = 4,
    hidden: int = 64,
    stride: int | None = None,
    leading: tuple[Dim, ...] | None = None,
) -> Node:
    """A node that is taken. ``side`` is the dtype of expert_weights, shared_gate and gamma; ``leading`` the leading
    dimensions of residual and shared_output."""
    lead = (tokens,) if leading is None else leading
    shapes: dict[str, tuple[Dim, ...]] = {
        "gemm2_permuted": (rows, stride or hidden),
        "expert_weights": (tokens, top_k),
        "expanded_idx_to_permuted_idx": (tokens, top_k),
        "shared_output": (*lead, hidden),
        "shared_gate": (tokens, 1),
        "residual": (*lead, hidden),
        "gamma": (hidden,),
    }
    by_rule = {"data": data, "data or float32": side or data, "int32": "int32"}
    present = [entry for entry in spec.inputs if not entry.optional or entry.name in optional]
    return Node(
        spec,
        {entry.name: by_rule[entry.dtype] for entry in present},
        {entry.name: shapes[entry.name] for entry in present},
    )


def optional_combinations(spec: OperatorSpec) -> Iterator[tuple[str, ...]]:
    """Every set of optional inputs that is taken: the gate comes only with what it gates."""
    names = [entry.name for entry in spec.optional_inputs]
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            if "shared_gate" not in chosen or "shared_output" in chosen:
                yield chosen


ALL_COMBINATIONS = [
    (spec, optional) for spec in (FINALIZE_ADD_RMS_NORM, FINALIZE_ADD) for optional in optional_combinations(spec)
]


def combination_id(value: object) -> str:
    """A readable pytest id for an entry of ALL_COMBINATIONS."""
    if isinstance(value, OperatorSpec):
        return value.name
    short = {"expanded_idx_to_permuted_idx": "map", "shared_output": "shared", "shared_gate": "gate"}
    return "+".join(short.get(name, name) for name in value) or "none" if isinstance(value, tuple) else str(value)
