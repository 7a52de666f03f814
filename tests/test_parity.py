"""Parity finds what it is for: planted faults are caught, correct runs pass, and every wrong pairing is one line."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from moetrt.backends import Backend
from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.cuda_op import launch
from moetrt.errors import InputError, InputTypeError
from moetrt.functional import finalize_add_rms_norm
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import make_model, named_inputs, operator_of
from moetrt.parity import compare
from moetrt.parity.finite import first_not_finite
from moetrt.parity.runners import (
    OrtRunner,
    TorchRunner,
    experts_set_to,
    float64_copy,
    ort_session,
    session_of,
    tensorrt_runner,
)
from moetrt.parity.tails import tails_of
from moetrt.parity.twins import float32_twin
from moetrt.parity.verdict import TENSORRT, Errors, argmax_changed, judge
from moetrt.source import Source, as_source
from moetrt.spec import FINALIZE_ADD_RMS_NORM, Operand

TOKENS, TOP_K, HIDDEN = 6, 3, 32


class TwoTails(nn.Module):
    """Two MoE layers whose expert GEMMs are one Linear: all that parity needs is two tails with weights around them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, TOP_K * HIDDEN, bias=False) for _ in range(2))
        self.shared = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.gammas = nn.ParameterList(nn.Parameter(1 + 0.1 * torch.randn(HIDDEN)) for _ in range(2))

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden
        for experts, shared, gamma in zip(self.experts, self.shared, self.gammas, strict=True):
            rows = experts(hidden).view(-1, HIDDEN)
            moe = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), shared(hidden), 2.5)
            hidden, residual = finalize_add_rms_norm(moe, residual, gamma, eps=1e-5)
        return hidden, residual


def draw(seed: int, sizes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Small hidden states, so that eps counts; a route of each token but the first may be on another rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sizes["tokens"]
    index = torch.randperm(tokens * TOP_K, generator=generator).view(tokens, TOP_K).int()
    index[1:, 0] = -1
    return {
        "hidden": (0.1 * torch.randn(tokens, HIDDEN, generator=generator)).to(dtype),
        "weights": torch.rand(tokens, TOP_K, generator=generator),
        "index": index,
    }


def make_source(dtype: torch.dtype = torch.float32) -> Source:
    torch.manual_seed(0)

    def random_inputs(seed: int, sizes: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        return draw(seed, sizes, dtype)

    return Source(
        module=TwoTails().to(dtype),
        example_inputs=random_inputs(0, {"tokens": TOKENS}),
        dynamic_shapes={name: {0: "tokens"} for name in ("hidden", "weights", "index")},
        output_names=("norm", "residual"),
        tails_expected=2,
        description="TwoTails",
        random_inputs=random_inputs,
    )


def mapped(source: Source, folder: Path) -> Path:
    exported = export(source, folder)
    report = map_file(exported.model_path, folder / "mapped.onnx")
    assert report.mapped == 2
    return folder / "mapped.onnx"


@pytest.fixture(scope="module")
def source() -> Source:
    return make_source()


@pytest.fixture(scope="module")
def good(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mapped(source, tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    source = make_source(torch.bfloat16)
    return source, mapped(source, tmp_path_factory.mktemp("bfloat16"))


# ------------------------------------------------------------------------------------------------------ right and wrong


@pytest.mark.parametrize(("seed", "tokens"), [(0, TOKENS), (1, 1), (2, 50)])
def test_a_mapped_model_agrees_with_pytorch(source: Source, good: Path, seed: int, tokens: int) -> None:
    report = compare(good, source, seed=seed, sizes={"tokens": tokens})
    assert report.passed
    whole = [output for output in report.outputs if not output.tail]
    alone = [output for output in report.outputs if output.tail]
    assert [(output.name, output.runner) for output in whole] == [
        (name, runner) for runner in ("onnxruntime", "onnxruntime-unmapped") for name in ("norm", "residual")
    ]
    assert len(alone) == 2 * 2 * 2
    assert {output.runner for output in alone} == {"onnxruntime", "kernel-host"}
    assert {output.name.rpartition(".")[2] for output in alone} == {"norm_out", "residual_out"}
    for output in report.outputs:
        assert output.shape == (tokens, HIDDEN)
        # Both runs are float32, and neither is exact.
        assert 0 < output.worst <= output.worst_tolerance < 1e-5
        assert 0 < output.pytorch_worst < 1e-6
        assert (output.nan, output.inf, output.pytorch_nan, output.pytorch_inf) == (0, 0, 0, 0)
        # The file before mapping is beside the mapped one: its error stands beside each.
        assert (output.unfused is None) == (output.runner == "onnxruntime-unmapped")
        if output.unfused is not None:
            assert 0 < output.unfused.worst < 1e-5
    assert [tail.passed for tail in report.tails] == [True, True]
    assert report.notes == ("the graph before mapping is 'model.onnx' beside it",)
    assert report.cause == ""


Fault = Callable[[ir.Model, ir.Node], None]


def attribute(name: str, value: float | int) -> Fault:
    def plant(model: ir.Model, node: ir.Node) -> None:
        kind = ir.AttrFloat32 if isinstance(value, float) else ir.AttrInt64
        node.attributes[name] = kind(name, value)  # type: ignore[arg-type]

    return plant


def replaced_by(op_type: str, name: str) -> Fault:
    """The input ``name`` becomes ``op_type(input, input)``: Add doubles it, Sub makes it 0."""

    def plant(model: ir.Model, node: ir.Node) -> None:
        value = named_inputs(node)[name]
        changed = ir.node(op_type, [value, value])
        changed.outputs[0].name, changed.outputs[0].type, changed.outputs[0].shape = "changed", value.type, value.shape
        model.graph.insert_before(node, changed)
        node.replace_input_with(list(node.inputs).index(value), changed.outputs[0])

    return plant


def swapped_outputs(model: ir.Model, node: ir.Node) -> None:
    first, second = node.outputs
    uses = [(use, second) for use in first.uses()] + [(use, first) for use in second.uses()]
    for use, other in uses:
        use.node.replace_input_with(use.idx, other)


def taken_from_the_other_tail(model: ir.Model, node: ir.Node) -> None:
    other = next(n for n in model.graph if operator_of(n) and n is not node)
    place = list(node.inputs).index(named_inputs(node)["gamma"])
    node.replace_input_with(place, named_inputs(other)["gamma"])


CASE22: dict[str, Fault] = {
    "scale wrong": attribute("routed_scaling_factor", 2.4999),
    "scale missing": attribute("routed_scaling_factor", 1.0),
    "residual scale": attribute("residual_scale", 1.0001),
    "combine scale": attribute("combine_scale", 0.9999),
    "shared twice": replaced_by("Add", "shared_output"),
    "shared missing": replaced_by("Sub", "shared_output"),
    "residual missing": replaced_by("Sub", "residual"),
    "eps of another layer": attribute("eps", 1e-6),
    "weight_bias": attribute("weight_bias", 1.0),
    "weights ignored": attribute("apply_expert_weights", 0),
    "swapped outputs": swapped_outputs,
    "gamma of another layer": taken_from_the_other_tail,
}


def planted(path: Path, fault: Fault, folder: Path) -> Path:
    model = load_model(path)
    # The first tail: its outputs go into the second layer, not only out of the graph.
    fault(model, next(node for node in model.graph if operator_of(node)))
    return save_model(model, folder / "faulty.onnx")


@pytest.mark.parametrize("fault", CASE22.values(), ids=CASE22.keys())
def test_case22_a_planted_fault_is_caught(source: Source, good: Path, tmp_path: Path, fault: Fault) -> None:
    report = compare(planted(good, fault, tmp_path), source, unmapped_path=good.with_name("model.onnx"))
    assert not report.passed
    worst = report.worst
    assert worst.worst > worst.worst_tolerance or worst.rms > worst.rms_tolerance
    assert worst.lines()[0].startswith("DIFFERS: ")
    assert "NaN 0" in worst.lines()[-1]


def test_the_report_prints_what_is_to_be_known(source: Source, good: Path) -> None:
    report = compare(good, source, seed=5)
    text = "\n".join(report.lines())
    assert "mapped.onnx in ONNX Runtime against TwoTails in PyTorch" in text
    assert "inputs from seed 5: hidden [6x32], weights [6x3], index [6x3]" in text
    for output in report.outputs[:2]:
        assert f"ok: {output.name} [6x32] float32, onnxruntime against pytorch" in text
        index = ", ".join(map(str, output.worst_index))
        assert f"worst element [{index}]: onnxruntime {output.worst_values[0]:.9g}" in text
    assert "relative error" in text
    assert "tolerance: 4 x (worst) and 2 x (rms) PyTorch's own distance from float64" in text
    assert "NaN 0 (pytorch 0), Inf 0 (pytorch 0)" in text
    for tail in report.tails:
        (line,) = [line for line in report.lines() if line.startswith(f"ok: {tail.name} by itself in float32")]
        assert all(f"{name} " in line for name in ("onnxruntime", "kernel-host", "pytorch", "unfused"))
    # Five lines an output of the model, one for each of the unfused path's, one a tail, one a length, four around them.
    assert len(report.lines()) == 2 * 5 + 2 + 2 + 2 + 4


def test_the_same_seed_gives_the_same_report(source: Source, good: Path) -> None:
    assert compare(good, source, seed=3) == compare(good, source, seed=3)
    assert compare(good, source, seed=3) != compare(good, source, seed=4)


# -------------------------------------------------------------------------------------------------------------- 16 bits


def test_a_bfloat16_model_is_compared_as_its_twin_and_tail_by_tail(half: tuple[Source, Path]) -> None:
    source, path = half
    said: list[str] = []
    report = compare(path, source, sizes={"tokens": 9}, progress=said.append)
    assert report.passed
    assert "2 tails by themselves in bfloat16" in report.how
    twin = [output for output in report.outputs if not output.tail]
    tails = [output for output in report.outputs if output.tail]
    assert [output.name for output in twin] == ["norm", "residual"] * 2
    # Computed in float32, in spite of weights in 16 bits.
    assert all(output.dtype == "float32" and output.worst < 1e-5 for output in twin)
    assert len(tails) == 2 * 2 * 2
    assert {output.dtype for output in tails} == {"bfloat16"}
    assert {output.runner for output in tails} == {"onnxruntime", "kernel-host"}
    assert {output.name.rpartition(".")[2] for output in tails} == {"norm_out", "residual_out"}
    assert all(1e-4 < output.worst < 0.1 for output in tails)
    # The source is as it was.
    assert next(source.module.parameters()).dtype == torch.bfloat16
    assert any("twin" in line for line in said)


@pytest.mark.parametrize("name", ["scale missing", "shared twice", "shared missing", "weight_bias", "swapped outputs"])
def test_case22_a_planted_fault_is_caught_in_bfloat16(half: tuple[Source, Path], tmp_path: Path, name: str) -> None:
    source, path = half
    faulty = planted(path, CASE22[name], tmp_path)
    assert not compare(faulty, source, unmapped_path=path.with_name("model.onnx")).passed


def test_a_fault_in_the_function_alone_is_caught_tail_by_tail(half: tuple[Source, Path], tmp_path: Path) -> None:
    """A tail is run by the function that the file has, not by one made anew."""
    source, path = half
    model = load_model(path)
    (function,) = model.functions.values()
    mean = next(node for node in function if node.op_type == "ReduceMean")
    mean.op_type = "ReduceSum"
    faulty = save_model(model, tmp_path / "faulty.onnx")
    report = compare(faulty, source, unmapped_path=path.with_name("model.onnx"))
    failed = {output.name.rpartition(".")[2] for output in report.outputs if not output.passed}
    assert failed == {"norm", "residual", "norm_out"}


def test_the_twin_has_no_16_bit_number_left(half: tuple[Source, Path]) -> None:
    twin = float32_twin(load_model(half[1]))
    small = {ir.DataType.BFLOAT16, ir.DataType.FLOAT16}
    for graph in [*twin.graphs(), *(function.graph for function in twin.functions.values())]:
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        assert not small & {value.dtype for value in values}
    weights = [value.const_value for value in twin.graph.initializers.values() if value.const_value is not None]
    assert weights
    assert all(weight.dtype not in small for weight in weights)


# ---------------------------------------------------------------------------------------------------------- the verdict


def verdict(value: torch.Tensor, pytorch: torch.Tensor, gold: torch.Tensor) -> bool:
    return judge(value, pytorch, gold, name="y").passed


def test_rounding_in_another_order_passes_and_one_wrong_element_does_not() -> None:
    gold = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pytorch = gold.float()
    nearby = torch.nextafter(pytorch, torch.tensor(math.inf))
    assert verdict(nearby, pytorch, gold)
    wrong = nearby.clone()
    wrong[7, 3] += 1e-4
    result = judge(wrong, pytorch, gold, name="y")
    assert not result.passed
    assert result.worst_index == (7, 3)
    assert result.worst_values == (float(wrong[7, 3]), float(pytorch[7, 3]), float(gold[7, 3]))
    assert result.relative_error == pytest.approx(1e-4 / abs(float(gold[7, 3])), rel=0.01)


def test_a_small_error_everywhere_does_not_pass() -> None:
    """Each element is within the tolerance of the worst one; together they are too far away."""
    gold = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = judge((gold + 3e-7).float(), gold.float(), gold, name="y")
    assert not result.passed
    assert result.worst <= result.worst_tolerance
    assert result.rms > result.rms_tolerance


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_nan_or_infinity_must_be_pytorchs(special: float) -> None:
    gold = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pytorch = gold.float()
    odd = pytorch.clone()
    odd[2, 1] = special
    assert not verdict(odd, pytorch, gold)
    assert not verdict(pytorch, odd, gold)
    assert verdict(odd, odd, gold)
    result = judge(odd, pytorch, gold, name="y")
    assert (result.nan, result.inf) == ((1, 0) if math.isnan(special) else (0, 1))
    assert (result.pytorch_nan, result.pytorch_inf) == (0, 0)


def test_infinities_of_another_sign_differ() -> None:
    gold = torch.ones(4, dtype=torch.float64)
    plus, minus = gold.float(), gold.float()
    plus[0], minus[0] = math.inf, -math.inf
    assert not verdict(plus, minus, gold)


def test_nothing_finite_is_nothing_compared() -> None:
    lost = torch.full((4,), math.nan)
    result = judge(lost, lost, lost.double(), name="y")
    assert not result.passed
    assert "nothing can be compared" in result.reason
    assert result.undecided
    assert not judge(torch.ones(4), lost, lost.double(), name="y").undecided
    assert not judge(lost, torch.ones(4), torch.ones(4).double(), name="y").undecided


def test_inputs_that_decide_nothing_are_no_pass() -> None:
    """Where PyTorch itself is far from float64, as when a router takes another expert, every distance would pass."""
    gold = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pytorch = gold.float()
    pytorch[3] += 1
    result = judge(pytorch, pytorch, gold, name="y")
    assert not result.passed
    assert "take another seed" in result.reason


def test_whole_numbers_must_be_equal() -> None:
    numbers = torch.arange(6).view(2, 3)
    assert verdict(numbers, numbers, numbers)
    assert not verdict(numbers + 1, numbers, numbers)


def test_other_shapes_differ_and_empty_ones_do_not() -> None:
    one = torch.ones(2, 3)
    result = judge(torch.ones(3, 2), one, one.double(), name="y")
    assert not result.passed
    assert result.reason == "shapes differ: pytorch has [2, 3]"
    assert verdict(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3).double())


def test_an_output_with_nothing_to_compare_is_json(tmp_path: Path) -> None:
    lost = torch.full((4,), math.nan)
    figures = judge(lost, lost, lost.double(), name="y").as_dict()
    json.dumps(figures, allow_nan=False)
    assert figures["worst"] is None
    assert figures["worst_element"] == dict.fromkeys(("runner", "pytorch", "float64", "relative_error")) | {"index": []}
    assert figures["nan"] == figures["pytorch_nan"] == 4


def test_the_ratio_is_of_the_root_mean_squares() -> None:
    gold = torch.zeros(2, 2, dtype=torch.float64) + 1
    pytorch, value = gold.float(), gold.float()
    assert judge(value, pytorch, gold, name="y").ratio == 1
    assert judge(value + 2**-10, pytorch, gold, name="y").ratio == math.inf
    assert judge(value + 2**-10, pytorch + 2**-12, gold, name="y").ratio == 4


LOGITS = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0], [0.0, 1.0, 0.5], [2.0, 1.0, 0.0]])


def test_a_changed_argmax_is_counted_and_a_tie_is_no_change() -> None:
    other = LOGITS.clone()
    other[0, 2] = 4  # the top moves
    other[1, 1] = 4  # of the two that were largest, one is
    other[2, 0] = 1  # one more is largest
    result = judge(other, LOGITS, LOGITS.double(), name="logits")
    assert (result.tokens, result.argmax_changed, result.pytorch_argmax_changed) == (4, 1, 0)
    assert "argmax changed for 1 of 4 tokens (pytorch against float64: 0)" in "\n".join(result.lines())
    assert result.as_dict()["argmax_changed"] == 1
    # What is no logits has no argmax.
    hidden = judge(other, LOGITS, LOGITS.double(), name="hidden")
    assert (hidden.tokens, hidden.argmax_changed) == (None, None)


def test_a_nan_changes_the_argmax_unless_both_have_it() -> None:
    lost = LOGITS.clone()
    lost[3, 0] = math.nan
    assert argmax_changed(lost, LOGITS) == 1
    assert argmax_changed(LOGITS, lost) == 1
    assert argmax_changed(lost, lost) == 0
    assert argmax_changed(LOGITS[:0], LOGITS[:0]) == 0


# -------------------------------------------------------------------------------------------------------------- runners


class CastsInside(nn.Module):
    """Computes in float32 whatever its parameters are, as norms and routers of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 / 3]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(torch.float32) * self.weight.float(), torch.softmax(x, -1, dtype=torch.float32)


def run(runner: TorchRunner | OrtRunner, feed: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    with runner as active:
        return active.infer(dict(feed))  # type: ignore[no-any-return]


def test_a_float64_run_is_float64_throughout() -> None:
    module = CastsInside()
    x = torch.tensor([[0.1, 0.7, -2.0]])
    product, softmax = run(TorchRunner(module, {"x": x}, ("product", "softmax"), float64=True), {"x": x}).values()
    assert product.dtype == softmax.dtype == torch.float64
    assert torch.equal(product, x.double() * module.weight.double())
    assert torch.equal(softmax, torch.softmax(x.double(), -1))
    # `double()` alone would not do.
    assert not torch.equal(float64_copy(module)(x.double())[0].double(), product)
    assert module.weight.dtype == torch.float32


def test_a_module_keeps_its_mode() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    x = torch.ones(100)
    outputs = run(TorchRunner(module, {"x": x}, ("y",)), {"x": x})
    assert torch.equal(outputs["y"], x)
    assert module.training


def test_onnx_runtime_takes_and_gives_bfloat16(tmp_path: Path) -> None:
    """Polygraphy's own runner has no bfloat16: numpy has none."""
    tokens = 5
    operands = {
        "gemm2_permuted": Operand("bfloat16", (None, HIDDEN)),
        "expert_weights": Operand("float32", (None, TOP_K)),
        "expanded_idx_to_permuted_idx": Operand("int32", (None, TOP_K)),
        "residual": Operand("bfloat16", (None, HIDDEN)),
        "gamma": Operand("bfloat16", (HIDDEN,)),
    }
    path = tmp_path / "tail.onnx"
    ir.save(make_model(FINALIZE_ADD_RMS_NORM, operands, {}), path)
    for count in (tokens, 0):
        feed = {
            "gemm2_permuted": torch.randn(count * TOP_K, HIDDEN).bfloat16(),
            "expert_weights": torch.rand(count, TOP_K),
            "expanded_idx_to_permuted_idx": torch.arange(count * TOP_K, dtype=torch.int32).view(count, TOP_K),
            "residual": torch.randn(count, HIDDEN).bfloat16(),
            "gamma": torch.ones(HIDDEN).bfloat16(),
        }
        outputs = run(OrtRunner(ort_session(path)), feed)
        assert list(outputs) == ["norm_out", "residual_out"]
        assert all(value.shape == (count, HIDDEN) and value.dtype == torch.bfloat16 for value in outputs.values())
        rows = feed["gemm2_permuted"].float().view(count, TOP_K, HIDDEN)
        hidden = (rows * feed["expert_weights"].unsqueeze(-1)).sum(1) + feed["residual"].float()
        assert torch.allclose(outputs["residual_out"].float(), hidden, rtol=2**-7, atol=2**-7)


def test_an_engine_without_a_gpu_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetrt.parity.runners.gpus", lambda: ())
    engine = tmp_path / "a.engine"
    with pytest.raises(InputError, match=r"^engine '.*' does not exist$"):
        tensorrt_runner(engine, plugin_library=None)
    engine.write_bytes(b"engine")
    with pytest.raises(InputError, match=r"^engine '.*' runs on a GPU and none is to be seen$"):
        tensorrt_runner(engine, plugin_library=None)


class Experts(nn.Module):
    """What a Transformers model has of experts' implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.implementation = "grouped_mm"
        self.seen: list[str] = []

    def get_experts_implementation(self) -> str:
        return self.implementation

    def set_experts_implementation(self, implementation: str) -> None:
        self.implementation = implementation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.implementation)
        if self.implementation == "batched_mm":
            raise RuntimeError("no memory")
        return x


def test_a_named_experts_implementation_is_set_for_the_run_alone() -> None:
    module, x = Experts(), torch.ones(2)
    for name, seen in (("eager", "eager"), (None, "grouped_mm")):
        run(TorchRunner(module, {"x": x}, ("y",), experts_implementation=name), {"x": x})
        assert module.seen.pop() == seen
        assert module.implementation == "grouped_mm"
    with pytest.raises(InputError, match="no memory"):
        run(TorchRunner(module, {"x": x}, ("y",), experts_implementation="batched_mm"), {"x": x})
    assert module.implementation == "grouped_mm"


def test_an_experts_implementation_that_is_not_there_is_named(source: Source, good: Path) -> None:
    assert refused(good, source, experts_implementation="eager") == (
        "TwoTails is no Transformers model: it has no experts to run as 'eager'"
    )
    # A module of the contract is named, not what takes its tensors apart.
    flat = as_source((torch.nn.Linear(2, 2), torch.ones(1, 2))).module
    with pytest.raises(InputError, match=r"^Linear is no Transformers model"), experts_set_to(flat, "eager"):
        pass
    assert refused(good, source, experts_implementation="fastest") == (
        "the experts implementation was 'fastest'; eager, batched_mm, grouped_mm are taken"
    )


def test_without_the_kernels_host_build_the_report_says_so(
    source: Source, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETRT_HOST_LIBRARY", str(tmp_path / "none.so"))
    report = compare(good, source)
    assert report.passed
    assert not any(output.runner == "kernel-host" for output in report.outputs)
    (note,) = [note for note in report.notes if note.startswith("the kernel was not compared: ")]
    assert "none.so' does not exist" in note
    assert f"note: {note}" in report.lines()


def test_a_kernel_that_is_wrong_is_named(
    source: Source, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated(*arguments: object) -> tuple[torch.Tensor, ...]:
        norm, residual = launch(*arguments)  # type: ignore[arg-type]
        return -norm, residual

    monkeypatch.setattr("moetrt.parity.runners.launch", negated)
    # Nothing lies beside the file, and its outputs are right: the tails alone are reason enough to look into it.
    report = compare(planted(good, lambda model, node: None, tmp_path), source)
    failed = {(output.runner, output.name.rpartition(".")[2]) for output in report.outputs if not output.passed}
    assert failed == {("kernel-host", "norm_out")}
    assert report.cause == "MoEFinalizeAddRMSNorm is the tail it replaced, but the kernel computes norm_out wrongly"


def test_engines_stand_beside_onnx_runtime(
    source: Source, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU's runner stood in for by ONNX Runtime: on the file, and on one with a fault."""
    faulty = planted(good, CASE22["scale missing"], tmp_path)

    def runner(path: Path, *, plugin_library: Path | None, backend: str | None, name: str) -> OrtRunner:
        assert (plugin_library is None) == (name == "tensorrt-without-plugin")
        return OrtRunner(ort_session(path), name=name)

    monkeypatch.setattr("moetrt.parity.comparison.tensorrt_runner", runner)
    monkeypatch.setattr("moetrt.parity.comparison.choose", lambda backend: Backend("tensorrt", math, "11.4.0"))
    report = compare(good, source, engine_path=good, engine_without_plugin_path=good)
    assert report.passed
    assert {output.runner for output in report.outputs if not output.tail} == {
        "onnxruntime",
        "onnxruntime-unmapped",
        "tensorrt",
        "tensorrt-without-plugin",
    }
    assert "in ONNX Runtime and TensorRT and TensorRT without the plugin against TwoTails" in report.how
    assert report.as_dict()["versions"]["tensorrt"] == "11.4.0"
    report = compare(good, source, engine_path=faulty)
    assert {output.runner for output in report.outputs if not output.passed} == {"tensorrt"}
    assert report.cause == "the file is right in ONNX Runtime, and the engine is off"


def test_a_16_bit_model_runs_in_an_engine_as_it_is(
    half: tuple[Source, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = half
    fed: list[torch.dtype] = []

    class Engine(TorchRunner):
        def infer_impl(self, feed_dict: Mapping[str, torch.Tensor]) -> Any:
            fed.append(feed_dict["hidden"].dtype)
            return super().infer_impl(feed_dict)

    def runner(path: Path, *, plugin_library: Path | None, backend: str | None, name: str) -> TorchRunner:
        return Engine(source.module, source.example_inputs, source.output_names, name=name)

    monkeypatch.setattr("moetrt.parity.comparison.tensorrt_runner", runner)
    monkeypatch.setattr("moetrt.parity.comparison.choose", lambda backend: Backend("tensorrt", math, "11.4.0"))
    report = compare(path, source, engine_path=path)
    assert fed == [torch.bfloat16]
    engine = [output for output in report.outputs if output.runner == "tensorrt"]
    assert [output.dtype for output in engine] == ["bfloat16"] * 2
    assert report.passed


def test_a_file_beside_it_that_cannot_run_is_left_out(source: Source, tmp_path: Path) -> None:
    """Nobody named it, so it is no reason to refuse; the one that is named is."""
    path = mapped(source, tmp_path)
    exported = path.with_name("model.onnx")
    model = load_model(exported)
    model.functions.clear()
    exported.write_bytes(ir.to_proto(model).SerializeToString())
    report = compare(path, source)
    assert report.passed
    assert report.tails == ()
    (note,) = report.notes
    assert note.startswith("the graph before mapping, 'model.onnx' beside it, was left out: ONNX Runtime does not take")
    line = refused(path, source, unmapped_path=exported)
    assert line.startswith(f"ONNX Runtime does not take the file before mapping ('{exported}'): ")


# ------------------------------------------------------------------------------------------------------- wrong pairings


def refused(path: Path, source: Source, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        compare(path, source, **options)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_files_that_cannot_be_read_are_named(source: Source, good: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.onnx"
    assert refused(missing, source) == f"ONNX model '{missing}' does not exist"
    text = tmp_path / "text.onnx"
    text.write_text("not a model\n" * 50)
    assert refused(text, source).startswith(f"'{text}' is not an ONNX model")
    # The model without the weights that lay beside it.
    moved = tmp_path / "moved.onnx"
    moved.write_bytes(good.read_bytes())
    assert "needs its data file 'model.onnx.data' beside it" in refused(moved, source)


def test_another_models_file_is_named(source: Source, good: Path, tmp_path: Path) -> None:
    model = load_model(good)
    model.graph.inputs[0].name = "states"
    other = save_model(model, good.with_name("inputs.onnx"))
    line = refused(other, source)
    assert line.startswith(f"'{other}' has the inputs states, weights, index; TwoTails has hidden, weights, index")
    model = load_model(good)
    model.graph.outputs[0].name = "other"
    line = refused(save_model(model, good.with_name("outputs.onnx")), source)
    assert "has the outputs other, residual; TwoTails has norm, residual" in line


def test_inputs_of_another_dtype_or_shape_are_named(source: Source, good: Path, half: tuple[Source, Path]) -> None:
    given = {name: t.to(torch.bfloat16) if name == "hidden" else t for name, t in draw(0, {"tokens": 3}).items()}
    line = refused(good, source, inputs=given)
    assert line.startswith(f"input 'hidden' of '{good}' is float, of TwoTails bfloat16")
    model = load_model(good)
    model.graph.inputs[1].shape = ir.Shape([TOKENS, TOP_K])
    fixed = save_model(model, good.with_name("fixed.onnx"))
    assert compare(fixed, source).passed
    line = refused(fixed, source, sizes={"tokens": 9})
    assert line == f"input 'weights' of '{fixed}' is 6x3, of TwoTails 9x3"
    assert refused(good, source, sizes={"tokenz": 9}).startswith("'tokenz' is not a dynamic size of TwoTails")


def test_a_source_of_another_dtype_is_named_with_what_to_give(
    source: Source, good: Path, half: tuple[Source, Path]
) -> None:
    taken = "a source of the file's own type is taken"
    assert refused(good, half[0]) == (
        f"the weights of '{good}' are float32, those of TwoTails were loaded as bfloat16; {taken} (--dtype fp32)"
    )
    assert refused(half[1], source) == (
        f"the weights of '{half[1]}' are bfloat16, those of TwoTails were loaded as float32; {taken} (--dtype bf16)"
    )
    # One weight that is kept in float32, in the source or in the file, is no other type.
    kept = dataclasses.replace(half[0], module=copy.deepcopy(half[0].module))
    kept.module.gammas[0].data = kept.module.gammas[0].data.float()  # type: ignore[index,union-attr]
    assert compare(half[1], kept).passed


def untyped(path: Path, target: Path) -> Path:
    """The file as a graph editor leaves it: nothing is said of its inner values."""
    proto = onnx.load(path, load_external_data=False)
    del proto.graph.value_info[:]
    for function in proto.functions:
        del function.value_info[:]
    onnx.save(proto, target)
    return target


def test_a_file_without_value_info_is_compared(source: Source, good: Path) -> None:
    before = good.with_name("model.onnx")
    original = untyped(before, good.with_name("untyped-model.onnx"))
    report = compare(untyped(good, good.with_name("untyped.onnx")), source, unmapped_path=original)
    typed = compare(good, source, unmapped_path=before)
    assert report.passed
    assert len(report.tails) == 2
    assert [output.as_dict() for output in report.outputs] == [output.as_dict() for output in typed.outputs]
    assert [tail.as_dict() for tail in report.tails] == [tail.as_dict() for tail in typed.tails]


def test_a_16_bit_file_without_value_info_is_compared(half: tuple[Source, Path]) -> None:
    source, good = half
    report = compare(untyped(good, good.with_name("untyped.onnx")), source)
    assert report.passed
    assert {output.dtype for output in report.outputs if output.tail} == {"bfloat16"}


def test_a_value_without_a_type_is_named(source: Source, good: Path, tmp_path: Path) -> None:
    """An operator that nobody knows lies before a tail."""
    model = load_model(good)
    tail = next(node for node in model.graph if operator_of(node) is not None)
    rows = tail.inputs[0]
    assert rows is not None
    node = ir.Node("com.example", "Odd", [rows], outputs=[ir.Value(name="odd")], name="odd_one")
    model.graph.insert_before(tail, node)
    model.graph.opset_imports["com.example"] = 1
    tail.replace_input_with(0, node.outputs[0])
    path = save_model(model, tmp_path / "odd.onnx")
    line = refused(path, source)
    assert line.startswith(f"'{path}': value 'odd' of node 'odd_one' (Odd) has no type, and onnx's shape inference")
    tail.replace_input_with(0, rows)
    save_model(model, path)
    line = refused(path, source)
    assert line.startswith(f"ONNX Runtime does not take '{path}': ")
    assert "moetrt-compare-" not in line


def test_a_file_of_our_own_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ir.Model(ir.Graph([], [ir.Value(name="y")], nodes=[], opset_imports={"": 22}, name="g"), ir_version=10)
    with pytest.raises(InputError, match=r"^'the\.onnx' is not valid: ") as error:
        session_of(model, tmp_path / "ours.onnx", "'the.onnx'")
    assert str(tmp_path) not in str(error.value)


def test_a_file_that_onnx_runtime_does_not_take_is_named(source: Source, good: Path) -> None:
    model = load_model(good)
    # Without its functions an operator of moetrt's is nobody's.
    model.functions.clear()
    line = refused(save_model(model, good.with_name("bare.onnx")), source)
    assert line.startswith(f"ONNX Runtime does not take '{good.with_name('bare.onnx')}': ")


def test_sizes_of_another_type_are_named(source: Source, good: Path) -> None:
    for sizes, shown in (([3], r"\[3\]"), ({3: 4}, "{3: 4}")):
        with pytest.raises(InputTypeError, match=f"^the sizes were {shown}; a dict of ints by symbol is taken$"):
            compare(good, source, sizes=sizes)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="the size 'tokens' was of type str; a whole number is taken"):
        compare(good, source, sizes={"tokens": "3"})  # type: ignore[dict-item]
    with pytest.raises(InputTypeError, match="the seed was of type NoneType; a whole number is taken"):
        compare(good, source, seed=None)  # type: ignore[arg-type]


def nan_rows(feed: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    hidden = feed["hidden"].clone()
    hidden[:rows] = math.nan
    return feed | {"hidden": hidden}


def test_nan_where_pytorch_has_it_is_no_difference(source: Source, good: Path) -> None:
    report = compare(good, source, inputs=nan_rows(draw(0, {"tokens": 40}), 1))
    assert report.passed, "\n".join(report.lines())
    assert all(0 < output.nan < 40 * HIDDEN for output in report.outputs if not output.tail)


def test_what_was_not_measured_is_told_loudly(source: Source, good: Path) -> None:
    report = compare(good, source, inputs=nan_rows(draw(0, {"tokens": 40}), 1))
    lost = {output.name: output.nan for output in report.outputs if not output.tail}
    for name, count in lost.items():
        told = f"{count} of {40 * HIDDEN} elements are NaN in PyTorch too"
        assert f"{name}: {told}" in report.gaps
        note = f"{name}: {told}, from input 'hidden', which has {HIDDEN} NaN; the errors are of the rest"
        assert note in report.notes
        assert f"NOT MEASURED of {name}: {told}" in report.result
        assert f"ok: {name} [40x{HIDDEN}] float32, onnxruntime against pytorch; {told}" in report.lines()
    assert "of norm_out " in "\n".join(report.lines())
    measured = compare(good, source)
    assert (measured.gaps, measured.result) == ((), "within tolerance")


@pytest.mark.parametrize(("number", "kind"), [(math.nan, "NaN"), (math.inf, "Inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, number: float, kind: str) -> None:
    """A gamma of one NaN or infinity reaches one column of the last norm, in every runner alike."""
    source = make_source()
    with torch.no_grad():
        source.module.gammas[1][3] = number  # type: ignore[index,union-attr]
    report = compare(mapped(source, tmp_path), source)
    assert report.passed, "\n".join(report.lines())
    told = f"norm: {TOKENS} of {TOKENS * HIDDEN} elements are {kind} in PyTorch too"
    assert report.gaps == (told,)
    weight = f"weight 'gammas.1', which has 1 {kind}"
    assert f"{told}, from {weight}; the errors are of the rest" in report.notes
    assert report.result == f"within tolerance; NOT MEASURED of {told}"
    with torch.no_grad():
        source.module.gammas[1][:] = number  # type: ignore[index,union-attr]
    (tmp_path / "all").mkdir()
    report = compare(mapped(source, tmp_path / "all"), source)
    assert not report.passed
    assert report.result == "UNDECIDED"
    assert report.cause.startswith("norm, ")
    assert f"what is not finite comes from weight 'gammas.1', which has {HIDDEN} {kind}" in report.notes


def test_padded_rows_of_nan_are_read_by_nobody(source: Source, good: Path) -> None:
    tails = tails_of(load_model(good))
    tail = tails[1]
    rows = torch.full((4, 2), math.nan)
    rows[1] = 1.0
    names = {name: value.name or "" for name, value in tail.inputs.items()}
    values = {names["gemm2_permuted"]: rows, names["expanded_idx_to_permuted_idx"]: torch.tensor([[1, -1]])}
    assert first_not_finite(source.module, {}, tails, values) == ""
    values[names["expanded_idx_to_permuted_idx"]] = torch.tensor([[1, 2]])
    said = first_not_finite(source.module, {}, tails, values)
    assert said == f"before tail 2 of 2, {tail.name}, whose gemm2_permuted has 2 NaN"


def test_where_float64_alone_is_not_finite_it_is_said() -> None:
    value, gold = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, math.inf]).double()
    assert judge(value, value, gold, name="y").gap == "1 of 4 elements is NaN or Inf in PyTorch's float64 run"
    special = torch.tensor([1.0, math.nan, 1.0, 1.0])
    gold[1] = math.nan
    said = judge(special, special, gold, name="y").gap
    assert said == "2 of 4 elements are NaN or Inf in PyTorch's float64 run, some NaN in both"


def test_an_error_that_passes_by_the_last_place_alone_is_told() -> None:
    gold = torch.linspace(0.5, 1, 64).double()
    ours = (gold * (1 + 1e-6)).float()
    near = judge((gold * (1 + 2e-6)).float(), ours, gold, name="y", step=2**-7)
    far = judge((gold * (1 + 1e-3)).float(), ours, gold, name="y", step=2**-7)
    assert near.passed
    assert near.excess == ""
    assert far.passed
    assert far.excess.startswith("onnxruntime's error is ")
    assert " x PyTorch's own (" in far.excess
    assert far.excess.endswith("it passes by the unit in the last place alone")
    beside = dataclasses.replace(far, unfused=Errors("onnxruntime-unmapped", far.worst, far.rms))
    assert beside.excess.endswith(f"alone; onnxruntime-unmapped has {far.ratio:.0f} x")
    exact = judge((gold * (1 + 1e-3)).float(), gold.float(), gold.float().double(), name="y", step=2**-7)
    assert "onnxruntime's error is not 0 as PyTorch's own is (" in exact.excess
    # What fails says so itself; and TF32 is what an engine rounds to.
    assert judge(2 * ours, ours, gold, name="y", step=2**-7).excess == ""
    engine = judge((gold * (1 + 1e-4)).float(), ours, gold, name="y", runner=TENSORRT)
    assert engine.passed
    assert engine.excess == ""


def test_a_half_model_that_passes_by_the_last_place_alone_has_a_note(half: tuple[Source, Path], tmp_path: Path) -> None:
    """A residual of 1.0005 times itself: less than bfloat16 can show, and far more than float32 rounds."""
    source, good = half
    model = load_model(good)
    for node in model.graph:
        if operator_of(node) is not None:
            node.attributes["residual_scale"] = ir.AttrFloat32("residual_scale", 1.0005)
    report = compare(save_model(model, tmp_path / "near.onnx"), source)
    whole = [output for output in report.outputs if output.runner == "onnxruntime" and not output.tail]
    for output in whole:
        assert output.passed
        assert output.ratio > 10
        assert f"{output.name}: {output.excess}" in report.notes
        assert "\n".join(report.lines()).count(f"note: {output.name}: {output.excess}") == 1
    assert not any(": onnxruntime-unmapped's" in note for note in report.notes)
    assert not any("last place alone" in note for note in compare(good, source).notes)


def test_where_all_is_nan_nothing_passes_and_nothing_is_blamed(source: Source, good: Path) -> None:
    report = compare(good, source, inputs=nan_rows(draw(0, {"tokens": TOKENS}), TOKENS))
    assert not report.passed
    assert report.undecided
    assert report.verdict == "every output is NaN in PyTorch too: nothing can be compared"
    text = "\n".join(report.lines())
    assert f"UNDECIDED: {report.verdict}" in text
    assert "DIFFERS" not in text
    assert not any(tail.name in text for tail in report.tails)
    assert report.as_dict()["undecided"] is True


def test_nan_that_pytorch_has_not_is_blamed(source: Source, good: Path, tmp_path: Path) -> None:
    model = load_model(good)
    for node in model.graph:
        if operator_of(node) is not None:
            # Their product is infinite.
            for name in ("routed_scaling_factor", "combine_scale"):
                node.attributes[name] = ir.AttrFloat32(name, 3e38)
    report = compare(save_model(model, tmp_path / "nan.onnx"), source)
    assert all(output.nan + output.inf for output in report.outputs if output.runner == "onnxruntime")
    assert not report.passed
    assert not report.undecided


def test_nan_from_inputs_that_were_drawn_like_the_example_says_so(source: Source, tmp_path: Path) -> None:
    """The example's map names rows that fewer tokens do not have: PyTorch and ONNX Runtime both give NaN."""

    class Clamps(TwoTails):
        # A map that is computed is not known to be one.
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, weights, index = tensors
            return super().forward(hidden, weights, index.clamp(min=-1))

    clamping = Clamps()
    clamping.load_state_dict(source.module.state_dict())
    source = dataclasses.replace(source, module=clamping, random_inputs=None)
    report = compare(mapped(source, tmp_path), source, sizes={"tokens": 2})
    assert not report.passed
    assert report.worst.nan == report.worst.pytorch_nan > 0
    assert "drawn between the smallest and largest value of each example input" in report.worst.reason
    assert "a moetrt.source.Source with random_inputs draws others" in "\n".join(report.lines())


def test_a_module_that_exits_is_named(good: Path, source: Source) -> None:
    class Exits(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            raise SystemExit(0)

    assert refused(good, dataclasses.replace(source, module=Exits())) == "pytorch failed with SystemExit: 0"


def test_a_module_that_fails_is_named(good: Path, source: Source) -> None:
    class Fails(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such\nexpert")

    failing = Source(
        Fails(), source.example_inputs, source.dynamic_shapes, source.output_names, random_inputs=source.random_inputs
    )
    assert refused(good, failing) == "pytorch failed with RuntimeError: no such expert"
