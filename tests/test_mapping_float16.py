"""Files of ONNX Runtime's float16 converter: nodes out of order (case 50), and dtypes that do not fit (case 51)."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

from moetrt.errors import InputError
from moetrt.inspection import inspect_file
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model
from tests.mapping_graphs import HIDDEN, Graph, NormForm

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 8, 64, 32, 8, 2


class Layer(nn.Module):
    """Experts picked by a router, a residual and an RMSNorm, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 6)
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router(x).float().softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        inner = nn.functional.silu(torch.einsum("th,tkih->tki", x, self.up[ids]))
        rows = torch.einsum("tki,tkhi->tkh", inner, self.down[ids])
        hidden = residual + (rows * weights[..., None]).sum(1)
        return self.gamma * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)), hidden


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("float32") / "model.onnx"
    torch.manual_seed(0)
    example = (torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Layer().eval(),
            example,
            path,
            dynamo=False,
            opset_version=17,
            input_names=["x", "residual"],
            output_names=["norm_out", "hidden"],
            dynamic_axes={"x": {0: "T"}, "residual": {0: "T"}},
        )
    return onnx.load(path)


def run(path: Path, dtype: type) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    feeds = {name: generator.standard_normal((5, WIDTH)).astype(dtype) for name in ("x", "residual")}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [output.astype(np.float64) for output in session.run(None, feeds)]


CONVERTED = {
    "default": {},
    "keep_io_types": {"keep_io_types": True},
    "op_block_list": {"op_block_list": ["ReduceMean", "Pow", "Sqrt", "Softmax"]},
    "both": {"op_block_list": ["TopK", "ReduceSum"], "keep_io_types": True},
    "no inference": {"disable_shape_infer": True, "keep_io_types": True},
}


@pytest.mark.parametrize("options", CONVERTED.values(), ids=CONVERTED)
def test_case50_files_of_the_float16_converter_are_sorted_and_mapped(
    in_float32: onnx.ModelProto, tmp_path: Path, options: dict[str, Any]
) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(in_float32)
    source, target = tmp_path / "float16.onnx", tmp_path / "mapped.onnx"
    onnx.save(convert_float_to_float16(copy, **options), source)
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(onnx.load(source))
    report = map_file(source, target)
    assert report.complete, report.summary()
    assert [len(site.nodes) for site in inspect_file(source).sites] == [len(report.sites[0].nodes)]
    onnx.checker.check_model(onnx.load(target), full_check=True)
    dtype = np.float32 if options.get("keep_io_types") else np.float16
    for before, after in zip(run(source, dtype), run(target, dtype), strict=True):
        # Both round rows, products and sums of 2 routes and a residual to 11 bits, in another order and place: at most
        # 8 roundings a number, whose norm has no larger terms than the largest.
        np.testing.assert_allclose(after, before, rtol=0, atol=8 * 2**-11 * np.abs(before).max())


def in_order(model: ir.Model) -> bool:
    """Whether each node of each graph comes after those that it and its bodies read."""
    for graph in model.graphs():
        places = {node: place for place, node in enumerate(graph)}
        for node in graph:
            inner = [node, *(n for body in _bodies(node) for n in ir.traversal.RecursiveGraphIterator(body))]
            makers = [value.producer() for reader in inner for value in reader.inputs if value is not None]
            if any(places[maker] >= places[node] for maker in makers if maker in places):
                return False
    return True


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def values(*names: str) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T"]) for name in names]


def nested() -> onnx.ModelProto:
    """Nodes in a branch, in a function, and outside of the branch that reads them: all of them in the wrong order."""
    body = [helper.make_node("Neg", ["b"], ["y"]), helper.make_node("Add", ["a", "x"], ["b"])]
    other = [helper.make_node("Identity", ["x"], ["y"])]
    branches = [helper.make_graph(nodes, name, [], values("y")) for nodes, name in ((body, "then"), (other, "else"))]
    choose = helper.make_node("If", ["c"], ["chosen"], then_branch=branches[0], else_branch=branches[1])
    nodes = [
        helper.make_node("f", ["chosen"], ["z"], domain="own"),
        choose,
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("Cast", ["flag"], ["c"], to=TensorProto.BOOL),
    ]
    steps = [helper.make_node("Exp", ["q"], ["r"]), helper.make_node("Tanh", ["p"], ["q"])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "f", ["p"], ["r"], steps, opsets[:1])
    flag = helper.make_tensor_value_info("flag", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "g", [*values("x"), flag], values("z"))
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)


def test_case50_branches_functions_and_what_they_read_are_sorted(tmp_path: Path) -> None:
    path, target = tmp_path / "nested.onnx", tmp_path / "mapped.onnx"
    onnx.save(nested(), path)
    model = load_model(path)
    assert in_order(model)
    assert [node.op_type for node in model.graph] == ["Abs", "Cast", "If", "f"]
    assert [node.op_type for node in model.functions["own", "f", ""]] == ["Tanh", "Exp"]
    map_file(path, target)
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    for flag, chosen in ((1, -(np.abs(x) + x)), (0, x)):
        found = session.run(None, {"x": x, "flag": np.array(flag, dtype=np.float32)})[0]
        # Two functions of a dozen roundings each at most, of numbers up to e.
        np.testing.assert_allclose(found, np.exp(np.tanh(chosen.astype(np.float64))), atol=24 * 2**-23)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_case50_any_order_of_a_chain_becomes_the_only_right_one(tmp_path: Path, order: tuple[int, ...]) -> None:
    nodes = [helper.make_node("Abs", [f"v{i}"], [f"v{i + 1}"]) for i in range(4)]
    graph = helper.make_graph([nodes[i] for i in order], "g", values("v0"), values("v4"))
    path = tmp_path / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    assert [node.outputs[0].name for node in load_model(path).graph] == ["v1", "v2", "v3", "v4"]


@pytest.mark.parametrize("where", ["graph", "itself", "branch"])
def test_case50_nodes_that_read_each_other_are_named(tmp_path: Path, where: str) -> None:
    if where == "branch":
        proto = nested()
        proto.graph.node[1].attribute[1].g.node[1].input[0] = "y"
        proto.graph.node[1].attribute[1].g.node[1].name = "inner"
        words = "'y', 'inner'"
    else:
        nodes = [helper.make_node("Add", ["x", "c"], ["a"], name="first"), helper.make_node("Abs", ["a"], ["b"])]
        nodes.append(helper.make_node("Neg", ["b"], ["c"], name="last"))
        nodes = nodes if where == "graph" else [helper.make_node("Add", ["x", "c"], ["c"], name="last")]
        proto = helper.make_model(helper.make_graph(nodes, "g", values("x"), values("c")), ir_version=9)
        words = "'first', 'last', 'b'" if where == "graph" else "'last'"
    path = tmp_path / "circle.onnx"
    onnx.save(proto, path)
    with pytest.raises(InputError) as error:
        load_model(path)
    assert str(error.value) == f"ONNX model '{path}': nodes read each other in a circle: {words}"


def misfit(what: str) -> onnx.ModelProto:
    """A tail in float16 that a converter left one number, or one Cast, of in float32."""
    wide = TensorProto.FLOAT
    g = Graph("float16")
    residual = g.input("residual", ["T", HIDDEN], wide if what == "residual" else None)
    routed = g.gathered()
    for node in g.nodes:
        if what == "weights" and node.op_type == "Cast":
            node.attribute[0].i = wide
    hidden = g.add(routed, residual)
    normal = NormForm(up=True, down="none" if what == "no Cast" else "before").normalised(g, hidden, rank=2)
    normal = g.op("Mul", normal, g.vector(5, wide if what == "gamma" else None))
    if what == "epsilon":
        name = next(node.input[1] for node in g.nodes if node.op_type == "Add" and node.input[1] in g.initializers)
        g.initializers[name].CopyFrom(onnx.numpy_helper.from_array(np.float16(1e-5), name))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["T", HIDDEN]) for name in (normal, hidden)]
    declared = [helper.make_tensor_value_info(routed, wide, ["T", HIDDEN])] if what == "declared" else []
    graph = helper.make_graph(
        g.nodes, "g", list(g.inputs.values()), infos, list(g.initializers.values()), value_info=declared
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


MISFITS = {
    "gamma": "Mul 'node_mul_18' has 'cast_17' of FLOAT16 and 'const_8' of FLOAT",
    "residual": "Add 'node_add_9' has 'reducesum_8' of FLOAT16 and 'residual' of FLOAT",
    "weights": "Mul 'node_mul_7' has 'where_6' of FLOAT16 and 'unsqueeze_5' of FLOAT",
    "epsilon": "Add 'node_add_13' has 'reducemean_12' of FLOAT and 'const_7' of FLOAT16",
    "no Cast": "Mul 'node_mul_17' has 'mul_16' of FLOAT and 'const_8' of FLOAT16",
    "declared": "ReduceSum 'node_reducesum_8' has 'mul_7' of FLOAT16 and 'reducesum_8' of FLOAT",
}


@pytest.mark.parametrize(("what", "words"), MISFITS.items())
def test_case51_dtypes_that_do_not_fit_are_refused(tmp_path: Path, what: str, words: str) -> None:
    path, target = tmp_path / "misfit.onnx", tmp_path / "mapped.onnx"
    onnx.save(misfit(what), path)
    with pytest.raises(Exception, match="Type"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with pytest.raises(InputError) as error:
        map_file(path, target)
    assert str(error.value) == f"ONNX model '{path}': {words}; one dtype is taken for both"
    assert not target.exists()
    warnings_of = inspect_file(path).warnings
    assert f"mapping would fail: {words}; one dtype is taken for both" in warnings_of


def test_case51_the_same_tail_without_the_misfit_is_mapped(tmp_path: Path) -> None:
    onnx.save(misfit("none"), tmp_path / "fits.onnx")
    assert map_file(tmp_path / "fits.onnx", tmp_path / "mapped.onnx").complete
