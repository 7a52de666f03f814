"""A fault is planted in a mapped model, and `moetrt compare` says which tail is off and what is wrong with it.

The table below holds, for each fault, the words that must be in what compare says. The model is written the plain way,
operation after operation, so that its graph before mapping has the tails unfused.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.errors import InputError
from moetrt.functional import finalize_add
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import attach_functions, make_node, named_inputs, operator_of, read_attributes
from moetrt.parity import ParityReport, compare
from moetrt.parity.diagnosis import Operation, difference, distance, equal, explain
from moetrt.source import Source
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM
from tests.operator_cases import make_case

TOKENS, TOP_K, HIDDEN = 12, 3, 32
BF16, FP32 = torch.bfloat16, torch.float32


class PlainNorm(nn.Module):
    """RMSNorm as Transformers writes it: rounded to the input's dtype before gamma."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.2 * torch.randn(HIDDEN))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.gamma * wide.to(hidden.dtype)


class Layer(nn.Module):
    """One MoE layer whose expert GEMMs are a Linear, with a gated shared expert."""

    def __init__(self, factor: float, eps: float) -> None:
        super().__init__()
        self.experts = nn.Linear(HIDDEN, TOP_K * HIDDEN, bias=False)
        self.shared = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 1, bias=False)
        self.norm = PlainNorm(eps)
        self.factor = factor

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.experts(hidden).view(-1, HIDDEN)
        routed = finalize_add(MoEOutput(UnfinalizedMoEOutput(rows, weights, index)))
        shared = torch.sigmoid(self.gate(hidden)) * self.shared(hidden)
        residual = residual + (routed * self.factor + shared)
        return self.norm(residual), residual


class Plain(nn.Module):
    """Two layers, one after the other or, ``parallel``, both on the same hidden state."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(2.5, 1e-5), Layer(1.5, 1e-3)])
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.parallel = parallel

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.layers
        normed, residual = first(hidden, hidden, weights, index)
        if self.parallel:
            return normed, residual, *second(hidden, hidden, weights, index)
        normed, residual = second(normed, residual, weights, index)
        return normed, residual, self.head(normed)


def draw(seed: int, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Small hidden states, so that eps counts; normalised weights; some routes on another rank, one row twice."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sizes["tokens"]
    index = torch.randperm(tokens * TOP_K, generator=generator).view(tokens, TOP_K).int()
    index[1::3, 0] = -1
    index[0, 1] = index[0, 2]
    weights = torch.rand(tokens, TOP_K, generator=generator) + 0.1
    return {
        "hidden": (0.1 * torch.randn(tokens, HIDDEN, generator=generator)).to(dtype),
        "weights": weights / weights.sum(-1, keepdim=True),
        "index": index,
    }


def make_source(dtype: torch.dtype, parallel: bool = False) -> Source:
    torch.manual_seed(0)

    def random_inputs(seed: int, sizes: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        return draw(seed, sizes, dtype)

    outputs = ("norm", "residual", "norm_2", "residual_2") if parallel else ("norm", "residual", "logits")
    return Source(
        module=Plain(parallel).to(dtype),
        example_inputs=random_inputs(0, {"tokens": TOKENS}),
        dynamic_shapes={name: {0: "tokens"} for name in ("hidden", "weights", "index")},
        output_names=outputs,
        tails_expected=2,
        description="Plain",
        random_inputs=random_inputs,
    )


@dataclass(frozen=True)
class Mapped:
    """A source, its file before mapping beside its mapped file."""

    source: Source
    path: Path


def mapped(source: Source, folder: Path) -> Mapped:
    exported = export(source, folder)
    report = map_file(exported.model_path, folder / "mapped.onnx")
    assert report.complete, report.summary()
    return Mapped(source, folder / "mapped.onnx")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Mapped:
    return mapped(make_source(FP32), tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Mapped:
    return mapped(make_source(BF16), tmp_path_factory.mktemp("bfloat16"))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Mapped:
    return mapped(make_source(FP32, parallel=True), tmp_path_factory.mktemp("parallel"))


# --------------------------------------------------------------------------------------------------- planting a fault

Fault = Callable[[ir.Model, ir.Node], None]


def tails(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if operator_of(node) is not None]


def attribute(name: str, value: float | int) -> Fault:
    def plant(model: ir.Model, node: ir.Node) -> None:
        kind = ir.AttrFloat32 if isinstance(value, float) else ir.AttrInt64
        node.attributes[name] = kind(name, value)  # type: ignore[arg-type]

    return plant


def inserted(
    model: ir.Model, before: ir.Node, op_type: str, *inputs: ir.Value, like: ir.Value, **attributes: object
) -> ir.Value:
    """The output of a new node."""
    node = ir.node(op_type, list(inputs), attributes=attributes)  # type: ignore[arg-type]
    node.outputs[0].name = f"planted_{op_type}_{len(model.graph)}"
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    model.graph.insert_before(before, node)
    return node.outputs[0]


def replaced(node: ir.Node, name: str, value: ir.Value) -> None:
    node.replace_input_with(list(node.inputs).index(named_inputs(node)[name]), value)


def with_itself(name: str, op_type: str) -> Fault:
    """The input becomes ``op_type(input, input)``: Add doubles it, Sub makes it 0."""

    def plant(model: ir.Model, node: ir.Node) -> None:
        value = named_inputs(node)[name]
        replaced(node, name, inserted(model, node, op_type, value, value, like=value))

    return plant


def without(*names: str) -> Fault:
    """The node without some of its optional inputs."""

    def plant(model: ir.Model, node: ir.Node) -> None:
        spec = operator_of(node)
        assert spec is not None
        kept = {name: value for name, value in named_inputs(node).items() if name not in names}
        outputs = [(output.name, output.type, output.shape) for output in node.outputs]
        new = make_node(spec, kept, read_attributes(node), name=node.name)
        model.graph.insert_before(node, new)
        for old, output, (name, kind, shape) in zip(node.outputs, new.outputs, outputs, strict=True):
            old.replace_all_uses_with(output, replace_graph_outputs=True)
            old.name = None
            output.name, output.type, output.shape = name, kind, shape
        model.graph.remove(node, safe=True)
        # The node has another list of inputs now, and so another function.
        attach_functions(model)

    return plant


def shared_in_the_residual(model: ir.Model, node: ir.Node) -> None:
    inputs = named_inputs(node)
    both = inserted(model, node, "Add", inputs["residual"], inputs["shared_output"], like=inputs["residual"])
    replaced(node, "residual", both)


def cast_and_back(name: str, dtype: ir.DataType) -> Fault:
    def plant(model: ir.Model, node: ir.Node) -> None:
        value = named_inputs(node)[name]
        narrow = inserted(model, node, "Cast", value, like=value, to=int(dtype))
        narrow.type = ir.TensorType(dtype)
        replaced(node, name, inserted(model, node, "Cast", narrow, like=value, to=int(value.dtype or 0)))

    return plant


def unnormalised(model: ir.Model, node: ir.Node) -> None:
    """Each token's weights times a number of its own, as before they are divided by their sum."""
    weights = named_inputs(node)["expert_weights"]
    axes = inserted(model, node, "Constant", like=weights, value=ir.tensor([1]))
    largest = inserted(model, node, "ReduceMax", weights, axes, like=weights, keepdims=1)
    largest.shape = None
    replaced(node, "expert_weights", inserted(model, node, "Mul", weights, largest, like=weights))


def rolled(model: ir.Model, node: ir.Node) -> None:
    """The weights of a token's routes in another order: first, second, third become second, third, first."""
    weights = named_inputs(node)["expert_weights"]
    order = inserted(model, node, "Constant", like=weights, value=ir.tensor([*range(1, TOP_K), 0]))
    replaced(node, "expert_weights", inserted(model, node, "Gather", weights, order, like=weights, axis=1))


def backwards(name: str, axis: int) -> Fault:
    """The input in the reverse order along ``axis``."""

    def plant(model: ir.Model, node: ir.Node) -> None:
        value = named_inputs(node)[name]
        bounds = [inserted(model, node, "Constant", like=value, value=ir.tensor([number]))
                  for number in (-1, -(2**62), axis, -1)]  # fmt: skip
        replaced(node, name, inserted(model, node, "Slice", value, *bounds, like=value))

    return plant


def map_with(op_type: str, number: int) -> Fault:
    def plant(model: ir.Model, node: ir.Node) -> None:
        index = named_inputs(node)["expanded_idx_to_permuted_idx"]
        constant = inserted(model, node, "Constant", like=index, value=ir.tensor(number, dtype=ir.DataType.INT32))
        constant.shape = ir.Shape([])
        name = "expanded_idx_to_permuted_idx"
        replaced(node, name, inserted(model, node, op_type, index, constant, like=index))

    return plant


def map_is_the_order(model: ir.Model, node: ir.Node) -> None:
    without("expanded_idx_to_permuted_idx")(model, node)


def of_the_other_tail(*names: str) -> Fault:
    def plant(model: ir.Model, node: ir.Node) -> None:
        (other,) = [tail for tail in tails(model) if tail is not node]
        for name in names:
            replaced(node, name, named_inputs(other)[name])

    return plant


def norms_exchanged(model: ir.Model, node: ir.Node) -> None:
    """gamma and all attributes of the two tails change places."""
    one, other = tails(model)
    gammas = named_inputs(one)["gamma"], named_inputs(other)["gamma"]
    replaced(one, "gamma", gammas[1])
    replaced(other, "gamma", gammas[0])
    kept = dict(one.attributes), dict(other.attributes)
    for tail, attributes in ((one, kept[1]), (other, kept[0])):
        tail.attributes.clear()
        tail.attributes.update(attributes)


def tails_exchanged(model: ir.Model, node: ir.Node) -> None:
    """Everything that reads one tail's outputs reads the other's."""
    one, other = tails(model)
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        position = [model.graph.outputs.index(mine), model.graph.outputs.index(theirs)]
        model.graph.outputs[position[0]], model.graph.outputs[position[1]] = theirs, mine
        mine.name, theirs.name = f"{mine.name}?", mine.name
        mine.name = OTHER_NAMES[theirs.name or ""]


OTHER_NAMES = {"norm": "norm_2", "residual": "residual_2"}


def outputs_exchanged(model: ir.Model, node: ir.Node) -> None:
    """What reads norm_out reads residual_out, and the other way round."""
    first, second = node.outputs
    uses = [(use, second) for use in first.uses()] + [(use, first) for use in second.uses()]
    for use, other in uses:
        use.node.replace_input_with(use.idx, other)


def experts_doubled(model: ir.Model, node: ir.Node) -> None:
    """Between the tails: the GEMM of the second layer."""
    gemm = next(n for n in model.graph if any(v is not None and v.name == "layers.1.experts.weight" for v in n.inputs))
    value = gemm.inputs[1]
    assert value is not None
    gemm.replace_input_with(1, inserted(model, gemm, "Add", value, value, like=value))


def under_its_name(output: int) -> Fault:
    """What reads an output of the tail reads 1.1 times that: the output is renamed, and a new node has its name."""

    def plant(model: ir.Model, node: ir.Node) -> None:
        value = node.outputs[output]
        name, readers = value.name, tuple(value.uses())
        factor = ir.tensor(1.1, dtype=value.dtype or ir.DataType.FLOAT)
        constant = ir.node("Constant", [], attributes={"value": factor}, name="factor")
        constant.outputs[0].name = "factor"
        scaled = ir.node("Mul", [value, constant.outputs[0]], name="planted")
        scaled.outputs[0].type, scaled.outputs[0].shape = value.type, value.shape
        model.graph.insert_after(node, [constant, scaled])
        for use in readers:
            use.node.replace_input_with(use.idx, scaled.outputs[0])
        for place, result in enumerate(model.graph.outputs):
            if result is value:
                model.graph.outputs[place] = scaled.outputs[0]
        value.name = f"{name}_before"
        scaled.outputs[0].name = name

    return plant


def both_under_their_names(model: ir.Model, node: ir.Node) -> None:
    for output in (0, 1):
        under_its_name(output)(model, node)
        next(n for n in model.graph if n.name == "planted").name = f"planted_{output}"
        next(n for n in model.graph if n.name == "factor").outputs[0].name = f"factor_{output}"
        next(n for n in model.graph if n.name == "factor").name = f"factor_{output}"


def another_head(model: ir.Model, node: ir.Node) -> None:
    """The last GEMM reads a weight of other numbers under the same name."""
    (value,) = [v for v in model.graph.initializers.values() if v.name == "head.weight"]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy()[::-1].copy(), name=value.name)


def body_sums(model: ir.Model, node: ir.Node) -> None:
    """The function's own mistake: the norm's mean is a sum."""
    for function in model.functions.values():
        mean = next(part for part in function if part.op_type == "ReduceMean")
        mean.op_type = "ReduceSum"


MAP = "expanded_idx_to_permuted_idx"


@dataclass(frozen=True)
class Row:
    """One fault: in which tail (0 or 1), and what compare must say of it."""

    fault: str
    plant: Fault
    says: str
    tail: int = 0
    model: str = "both"


TABLE = [
    Row("routed_scaling_factor dropped", attribute("routed_scaling_factor", 1.0),
        "routed_scaling_factor was 1; 2.5 explains it (it is left out)"),
    Row("routed_scaling_factor doubled", attribute("routed_scaling_factor", 5.0),
        "routed_scaling_factor was 5; 2.5 explains it (it is doubled)"),
    Row("routed_scaling_factor squared", attribute("routed_scaling_factor", 6.25),
        "routed_scaling_factor was 6.25; 2.5 explains it (it is applied twice)"),
    Row("routed_scaling_factor of a later tail", attribute("routed_scaling_factor", 1.0),
        "routed_scaling_factor was 1; 1.5 explains it (it is left out)", tail=1),
    Row("routed_scaling_factor a little off", attribute("routed_scaling_factor", 2.4999),
        "routed_scaling_factor was 2.4999; 2.5 explains it"),
    Row("residual_scale", attribute("residual_scale", 0.5), "residual_scale was 0.5; 1 explains it"),
    Row("combine_scale", attribute("combine_scale", 0.22), "combine_scale was 0.22; 1 explains it"),
    Row("shared expert left out", without("shared_output", "shared_gate"),
        "shared_output is missing: it is not added"),
    Row("shared expert is 0", with_itself("shared_output", "Sub"), "shared_output is all 0"),
    Row("shared expert twice", with_itself("shared_output", "Add"), "shared_output is 2 times the original graph's"),
    Row("shared expert in the residual too", shared_in_the_residual,
        "residual is shared_output plus residual of the original graph"),
    Row("shared gate left out", without("shared_gate"), "shared_gate is missing: shared_output is added whole"),
    Row("weights cast to float16", cast_and_back("expert_weights", ir.DataType.FLOAT16),
        "expert_weights is rounded to float16, which the original graph's is not"),
    Row("weights cast to bfloat16", cast_and_back("expert_weights", ir.DataType.BFLOAT16),
        "expert_weights is rounded to bfloat16, which the original graph's is not"),
    Row("weights not normalised", unnormalised, "expert_weights are not normalised as the original graph's are"),
    Row("weights in another order", rolled, "expert_weights are the original graph's in another order"),
    Row("rows in another order", backwards("gemm2_permuted", 0),
        "gemm2_permuted is the original graph's in another order of the 36 rows, the reverse"),
    Row("rows with their hidden elements in another order", backwards("gemm2_permuted", 1),
        "gemm2_permuted is the original graph's in another order of the 32 hidden elements, the reverse"),
    Row("weights of another token", backwards("expert_weights", 0),
        "expert_weights are the original graph's in another order of the 12 tokens, the reverse"),
    Row("map in another order", backwards(MAP, 0),
        f"{MAP} is the original graph's in another order of the 12 tokens, the reverse"),
    Row("map in another order of the routes", backwards(MAP, 1),
        f"{MAP} is the original graph's in another order of the 3 routes, the reverse"),
    Row("shared expert in another order", backwards("shared_output", 0),
        "shared_output is the original graph's in another order of the 12 tokens, the reverse"),
    Row("shared gate in another order", backwards("shared_gate", 0),
        "shared_gate is the original graph's in another order of the 12 tokens, the reverse"),
    Row("residual in another order", backwards("residual", 1),
        "residual is the original graph's in another order of the 32 hidden elements, the reverse"),
    Row("gamma in another order", backwards("gamma", 0),
        "gamma is the original graph's in another order of the 32 hidden elements, the reverse"),
    Row("weights ignored", attribute("apply_expert_weights", 0), "apply_expert_weights was 0; 1 explains it"),
    Row("weight_bias", attribute("weight_bias", 1.0), "weight_bias was 1; 0 explains it"),
    Row("weight_before_cast", attribute("weight_before_cast", 1), "weight_before_cast was 1; 0 explains it",
        model="half"),
    Row("eps", attribute("eps", 1e-6), "eps was 1e-06; 1e-05 explains it"),
    Row("eps of a later tail", attribute("eps", 1e-6), "eps was 1e-06; 0.001 explains it", tail=1),
    Row("gamma of another layer", of_the_other_tail("gamma"), "gamma is that of '"),
    Row("map moved by one", map_with("Add", 1), f"{MAP} is the original graph's +1"),
    Row("-1 taken for row 0", map_with("Max", 0),
        f"{MAP} names row 0 in 4 of 36 entries where the original graph's is -1"),
    Row("map left out", map_is_the_order, f"{MAP} is missing: the rows are taken in their order"),
    Row("residual left out", without("residual"), "residual is missing: it is not added"),
    Row("residual is 0", with_itself("residual", "Sub"), "residual is all 0"),
    Row("norm and attributes of two tails exchanged", norms_exchanged,
        "several at once: eps was 0.001; 1e-05 explains it"),
    Row("two tails exchanged", tails_exchanged, "': the two are exchanged", model="parallel"),
    Row("outputs of a tail exchanged", outputs_exchanged, "residual is norm_out of '"),
    Row("outputs of the last tail exchanged", outputs_exchanged,
        "output 'logits' is off: it reads the two outputs of 'layers.1/MoEFinalizeAddRMSNorm' the other way round",
        tail=1),
    Row("a GEMM between the tails", experts_doubled,
        "gemm2_permuted of 'layers.1/MoEFinalizeAddRMSNorm', is off, though every tail before it is right: "
        "Add 'node_Add_0' (not in the graph before mapping) changes 'layers.1.experts.weight'"),
    Row("a node behind a tail under its output's name", under_its_name(0),
        "after tail 1 of 2 (layers.0/MoEFinalizeAddRMSNorm), Mul 'planted' (not in the graph before mapping) changes "
        "norm_out"),
    Row("a node behind a tail's residual under its name", under_its_name(1),
        "after tail 1 of 2 (layers.0/MoEFinalizeAddRMSNorm), Mul 'planted' (not in the graph before mapping) changes "
        "residual_out"),
    Row("nodes behind a tail under both names", both_under_their_names,
        "after tail 1 of 2 (layers.0/MoEFinalizeAddRMSNorm), Mul 'planted_0' (not in the graph before mapping) changes "
        "norm_out"),
    Row("a node behind the last tail under its output's name", under_its_name(0),
        "after tail 2 of 2 (layers.1/MoEFinalizeAddRMSNorm), Mul 'planted' (not in the graph before mapping) changes "
        "norm_out", tail=1),
    Row("another weight behind the tails", another_head,
        "is off, though every tail before it is right: weight 'head.weight' of "),
    Row("the function's body", body_sums, "but its function in the file computes norm_out wrongly"),
]  # fmt: skip

CASES = [(row, model) for row in TABLE for model in (("single", "half") if row.model == "both" else (row.model,))]


def faulty(good: Mapped, row: Row, folder: Path) -> Path:
    model = load_model(good.path)
    row.plant(model, tails(model)[row.tail])
    return save_model(model, folder / "faulty.onnx")


def run(good: Mapped, path: Path) -> ParityReport:
    return compare(path, good.source, unmapped_path=good.path.with_name("model.onnx"))


@pytest.mark.parametrize(("row", "model"), CASES, ids=[f"{row.fault}-{model}" for row, model in CASES])
def test_case22_a_fault_is_named(
    row: Row, model: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    good: Mapped = request.getfixturevalue(model)
    report = run(good, faulty(good, row, tmp_path))
    print(f"{row.fault} ({model}): {report.cause}")  # pytest -s prints the table
    record_property(row.fault, report.cause)
    assert not report.passed
    assert row.says in report.cause
    assert report.cause in "\n".join(report.lines())
    assert report.as_dict()["cause"] == report.cause
    wrong = [tail for tail in report.tails if not tail.passed]
    measured = [line for line in report.lines() if " by itself in " in line]
    assert not [line for tail in wrong for line in measured if line.startswith(f"ok: {tail.name} by itself")]
    if wrong:
        first = wrong[0]
        # What is upstream of a tail is put right: the other one is not blamed.
        exchanged = len(wrong) == 2 and "exchanged" in row.fault
        assert [tail.index for tail in wrong] == [row.tail] or exchanged or row.plant is outputs_exchanged
        assert first.left < 0.01
        assert f"{first.index + 1} of 2" in report.cause


@pytest.mark.parametrize("model", ["single", "half", "parallel"])
def test_a_right_file_is_blamed_for_nothing(model: str, request: pytest.FixtureRequest) -> None:
    good: Mapped = request.getfixturevalue(model)
    for seed, tokens in ((0, TOKENS), (1, 1), (2, 40)):
        report = compare(good.path, good.source, seed=seed, sizes={"tokens": tokens})
        assert report.passed, "\n".join(report.lines())
        assert report.cause == ""
        assert [tail.passed for tail in report.tails] == [True, True]
        assert all(error < 1e-12 for tail in report.tails for error in tail.error.values())
        logits = [output for output in report.outputs if output.name == "logits"]
        assert all(output.tokens == tokens and output.argmax_changed == 0 for output in logits)
        assert bool(logits) == (model != "parallel")


def test_without_a_file_before_mapping_the_source_is_exported_anew(single: Mapped, tmp_path: Path) -> None:
    row = TABLE[0]
    said: list[str] = []
    report = compare(faulty(single, row, tmp_path), single.source, progress=said.append)
    assert row.says in report.cause
    assert "the graph before mapping is an export of Plain made now" in report.notes
    assert "exporting Plain anew, to find what is off" in said


def test_a_file_beside_it_that_is_another_is_not_taken_and_that_is_said(
    single: Mapped, parallel: Mapped, tmp_path: Path
) -> None:
    path = faulty(single, TABLE[0], tmp_path)
    save_model(load_model(parallel.path.with_name("model.onnx")), tmp_path / "model.onnx")
    report = compare(path, single.source)
    assert TABLE[0].says in report.cause
    assert report.notes == (
        "'model.onnx' beside it is not the file that 'faulty.onnx' was mapped from: "
        "its outputs are norm, residual, norm_2, residual_2",
        "the graph before mapping is an export of Plain made now",
    )
    (tmp_path / "model.onnx").write_text("no model\n" * 50)
    assert compare(path, single.source).notes[0].startswith("'model.onnx' beside it was left out: '")


def test_a_tail_that_no_name_ties_to_the_graph_before_mapping_is_named(single: Mapped, tmp_path: Path) -> None:
    """Neither what it gives nor what it reads has a name of that graph."""
    model = load_model(single.path)
    both_under_their_names(model, tails(model)[0])
    for name, value in named_inputs(tails(model)[0]).items():
        replaced(tails(model)[0], name, inserted(model, tails(model)[0], "Identity", value, like=value))
    path = save_model(model, tmp_path / "faulty.onnx")
    with pytest.raises(InputError) as caught:
        compare(path, single.source, unmapped_path=single.path.with_name("model.onnx"))
    assert str(caught.value).endswith(
        "norm_out of 'layers.0/MoEFinalizeAddRMSNorm', is no value of it, and no tail of it stands in that one's place"
    )


def test_an_edited_file_is_not_tied_to_a_graph_of_other_nodes(single: Mapped, tmp_path: Path) -> None:
    """The same names of outputs, weights and half of the values, as another form of export has them."""
    original = load_model(single.path.with_name("model.onnx"))
    known = {value.name for node in load_model(single.path).graph for value in node.outputs}
    for node in list(original.graph):
        # Each node reads another value than it did.
        if node.op_type in ("Reshape", "MatMul", "Gemm", "Mul", "Sigmoid") and node.outputs[0].name in known:
            value = node.inputs[0]
            assert value is not None
            node.replace_input_with(0, inserted(original, node, "Identity", value, like=value))
    other = save_model(original, tmp_path / "other.onnx")
    row = next(row for row in TABLE if row.fault == "nodes behind a tail under both names")
    path = faulty(single, row, tmp_path)
    with pytest.raises(InputError, match=r"is not the file that .* no tail of it stands in that one's place$"):
        compare(path, single.source, unmapped_path=other)
    # A file that was not edited is tied by its tails' names, whatever lies between.
    assert compare(single.path, single.source, unmapped_path=other).passed


def test_a_fault_of_the_export_is_not_blamed_on_the_mapping(single: Mapped, tmp_path: Path) -> None:
    """Both files have it: what differs from PyTorch differed before mapping."""
    paths = []
    for name in ("model.onnx", "mapped.onnx"):
        model = load_model(single.path.with_name(name))
        experts_doubled(model, tails(model)[0])
        paths.append(save_model(model, tmp_path / name))
    report = compare(paths[1], single.source)
    assert not report.passed
    assert all(tail.passed for tail in report.tails)
    assert report.cause == "the graph before mapping differs from PyTorch already: the mapping is not what is off"


def test_another_file_before_mapping_is_refused(single: Mapped, parallel: Mapped) -> None:
    with pytest.raises(InputError, match=r"' is the mapped file itself; the file that it was mapped from is taken$"):
        compare(single.path, single.source, unmapped_path=single.path)
    other = parallel.path.with_name("model.onnx")
    with pytest.raises(InputError, match=r"is not the file that '.*' was mapped from: "):
        compare(single.path, single.source, unmapped_path=other)
    with pytest.raises(InputError, match=r"^file before mapping '.*' does not exist$"):
        compare(single.path, single.source, unmapped_path=single.path.with_name("none.onnx"))


# ------------------------------------------------------------------------------------ what the numbers alone can tell


def operation() -> Operation:
    scales = {"routed_scaling_factor": 2.5, "residual_scale": 0.5, "combine_scale": 0.22}
    case = make_case(tokens=16, hidden=24, gate=True, eps=1e-3, seed=5, **scales)
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in case.tensors.items()}
    tensors["residual"] = tensors["residual"] * 0.05
    return Operation(case.spec, tensors, case.spec.complete(case.attributes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor was 1; 2.5 explains it (it is left out)"),
        ({"combine_scale": 1.0}, "combine_scale was 1; 0.22 explains it (it is left out)"),
        ({"residual_scale": 1.0}, "residual_scale was 1; 0.5 explains it (it is left out)"),
        ({"weight_bias": 1.0}, "weight_bias was 1; 0 explains it"),
        ({"apply_expert_weights": 0}, "apply_expert_weights was 0; 1 explains it"),
        ({"eps": 1e-6}, "eps was 1e-06; 0.001 explains it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_attribute_is_found_by_the_numbers_alone(change: dict[str, float], says: str) -> None:
    """Where mapping the original graph anew makes the same mistake, it is no help."""
    right = operation()
    cause = explain(right.changed(**change), right.outputs(), None, {}, {})
    assert cause is not None
    assert cause.text == says
    assert cause.complete


INPUTS: list[tuple[str, Callable[[Operation], Operation], str]] = [
    ("shared twice", lambda o: o.given(shared_output=2 * o.inputs["shared_output"]),
     "shared_output counts 2 times; once explains it"),
    ("residual thrice", lambda o: o.given(residual=3 * o.inputs["residual"]),
     "residual_scale was 0.5; 0.166666667 explains it"),
    ("weights not normalised", lambda o: o.given(expert_weights=3 * o.inputs["expert_weights"]),
     "routed_scaling_factor was 2.5; 0.833333 explains it"),
    ("map moved", lambda o: o.given(**{MAP: torch.where(o.inputs[MAP] < 0, -1, o.inputs[MAP] + 1).int()}),
     f"{MAP} is +1 too far"),
    ("weights rolled", lambda o: o.given(expert_weights=o.inputs["expert_weights"].roll(1, -1)),
     "expert_weights are in another order of the 3 routes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), [row[1:] for row in INPUTS], ids=[row[0] for row in INPUTS])
def test_an_input_is_found_by_the_numbers_alone(change: Callable[[Operation], Operation], says: str) -> None:
    right = operation()
    cause = explain(change(right), right.outputs(), None, {}, {})
    assert cause is not None
    assert cause.text == says
    assert cause.complete


ORDERS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("gemm2_permuted", lambda x: x.flip(0), "is the original graph's in another order of the 48 rows, the reverse"),
    ("gemm2_permuted", lambda x: x.roll(-3, 0), "is the original graph's in another order of the 48 rows, turned by 3"),
    ("gemm2_permuted", lambda x: x[[0, 1, 2, 9, *range(4, 9), 3, *range(10, 48)]],
     "is the original graph's in another order of the 48 rows, 3 and 9 exchanged"),
    ("gemm2_permuted", lambda x: x[torch.randperm(48, generator=torch.Generator().manual_seed(1))] * (1 + 1e-9),
     "is the original graph's in another order of the 48 rows"),
    ("residual", lambda x: x.flatten().roll(7).view(x.shape),
     "is the original graph's in another order of all its 384 elements"),
    ("expert_weights", lambda x: torch.stack([row.roll(i) for i, row in enumerate(x)]),
     "are the original graph's in another order of the 3 routes, each token in its own"),
    (MAP, lambda x: torch.stack([row.roll(i) for i, row in enumerate(x)]),
     "is the original graph's in another order of the 3 routes, each token in its own"),
    # The nearest that are no other order: one element, or one NaN, is another.
    ("gemm2_permuted", lambda x: (x + (x.nan_to_num() == x.nan_to_num().max())).flip(0), "has other values"),
    ("gemm2_permuted", lambda x: x.flip(0).nan_to_num(0.0), "has other values"),
    ("expert_weights", lambda x: x.flip(0) * 1.01, "has other values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "says"), ORDERS)
def test_another_order_is_told_from_other_values(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    """Rows that no map names hold NaN, and lie elsewhere too."""
    right = operation()
    mine = change(right.inputs[name])
    text = difference(name, mine, right, {}, {})
    assert text == f"{name} {says}" or (says == "has other values" and text.startswith(f"{name} {says}"))


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (lambda rows: 2 * rows, "gemm2_permuted is 2 times the original graph's"),
        (
            lambda rows: rows.to(BF16).double(),
            "gemm2_permuted is rounded to bfloat16, which the original graph's is not",
        ),
        (lambda rows: rows.where(rows > 0, 0.0).where(~rows.isnan(), math.nan), "has other values"),
    ],
    ids=["factor", "rounded", "other"],
)
def test_nan_in_the_same_places_is_no_difference(factor: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    """Rows that no map names, the padding, hold NaN on both sides."""
    rows = torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1 / 3
    rows[::2] = math.nan
    original = operation().given(gemm2_permuted=rows)
    mine = factor(rows)
    assert says in difference("gemm2_permuted", mine, original, {}, {})
    assert equal(rows, rows.clone())
    assert not equal(rows, mine)
    assert not equal(rows, rows.nan_to_num(0))
    if says == "has other values":
        share = int((rows <= 0).sum()) / rows.numel()
        assert f"({share:.0%} of them)" in difference("gemm2_permuted", mine, original, {}, {})


def test_a_gate_too_many_and_exchanged_outputs_are_found_by_the_numbers_alone() -> None:
    right = operation()
    ungated = right.given(shared_gate=None)
    cause = explain(right, ungated.outputs(), None, {}, {})
    assert cause is not None
    assert cause.text == "shared_gate is applied to shared_output and should not be"
    outputs = right.outputs()
    exchanged = {"norm_out": outputs["residual_out"], "residual_out": outputs["norm_out"]}
    cause = explain(right, exchanged, None, {}, {})
    assert cause is not None
    assert cause.text == "norm_out and residual_out are exchanged"


def test_what_no_single_change_explains_has_no_cause() -> None:
    right = operation()
    noise = {name: torch.randn_like(value) for name, value in right.outputs().items()}
    assert explain(right, noise, None, {}, {}) is None


def test_what_helps_only_in_part_says_so() -> None:
    right = operation()
    wrong = right.changed(routed_scaling_factor=1.0).given(gamma=right.inputs["gamma"] * 1.02)
    cause = explain(wrong, right.outputs(), None, {}, {})
    assert cause is not None
    assert not cause.complete
    assert "of the error is left)" in cause.line()


def test_the_two_operators_can_be_held_against_each_other() -> None:
    """A tail that was mapped without its norm has the hidden state alone."""
    right = operation()
    names = {entry.name for entry in FINALIZE_ADD.attributes}
    kept = {name: value for name, value in right.attributes.items() if name in names}
    alone = Operation(FINALIZE_ADD, right.inputs, kept).given(residual=None, gamma=None)
    whole = dataclasses.replace(right, spec=FINALIZE_ADD_RMS_NORM).given(residual=None)
    wanted = {"residual_out": whole.outputs()["residual_out"]}
    assert distance(alone.outputs(), wanted) == {"residual_out": 0.0}


def test_the_report_is_json(single: Mapped, tmp_path: Path) -> None:
    path = run(single, faulty(single, TABLE[0], tmp_path)).write_json(tmp_path / "parity.json")
    content = json.loads(path.read_text())
    assert content["format"] == "moetrt.parity/1"
    assert content["passed"] is False
    assert content["model"]["file"] == "faulty.onnx"
    assert content["command"] is None
    assert content["tails"][0]["cause"] in content["cause"]
    assert {output["runner"] for output in content["outputs"]} == {
        "onnxruntime",
        "onnxruntime-unmapped",
        "kernel-host",
    }
