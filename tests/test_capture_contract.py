"""Modules that use the contract, exported; and how an export treats its folder, its options and its failures."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from moetrt import models
from moetrt.capture import OPSETS, capture, export, parse_dynamic
from moetrt.errors import InputError, InputTypeError
from moetrt.external_data import MARK_BYTES
from moetrt.files import file_sha256
from moetrt.onnx_files import load_model
from moetrt.onnx_op import named_inputs, operator_of, read_attributes
from moetrt.source import Source, as_source
from tests.models import contract

KINDS = ("front", "foreign", "gather_form", "producer", "finalize_only")


def source_of(kind: str) -> Source:
    return as_source(getattr(contract, kind)(), kind)


def run(path: Path, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})


def agrees(source: Source, path: Path, seed: int = 0, **sizes: int) -> None:
    inputs = source.make_inputs(seed, **sizes)
    with torch.no_grad():
        wanted = source.module(*inputs.values())
    got = run(path, inputs)
    assert len(got) == len(wanted) == len(source.output_names)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_modules_agree_with_pytorch(kind: str, tmp_path: Path) -> None:
    source = source_of(kind)
    result = export(source, tmp_path)
    agrees(source, result.model_path)
    assert result.tails_expected is None
    if source.dynamic_shapes:
        agrees(source, result.model_path, seed=1, tokens=1)
        agrees(source, result.model_path, seed=2, tokens=17, rows=30)


@pytest.mark.parametrize("kind", ["front", "foreign"])
def test_the_front_becomes_the_operator(kind: str) -> None:
    model = capture(source_of(kind))
    (node,) = model.graph
    assert node.op_type == "MoEFinalizeAddRMSNorm"
    assert node.domain == "moetrt"
    assert [value.name for value in node.outputs] == ["output_0", "output_1"]
    assert {name: value.name for name, value in named_inputs(node).items()} == {
        "gemm2_permuted": "gemm2_permuted",
        "expert_weights": "expert_weights",
        "expanded_idx_to_permuted_idx": "expanded_idx_to_permuted_idx",
        "shared_output": "shared_output",
        "residual": "residual",
        "gamma": "gamma",
    }
    attributes = read_attributes(node)
    assert attributes["routed_scaling_factor"] == 2.5
    assert attributes["eps"] == pytest.approx(1e-5)


def test_the_gather_form_stays_in_standard_operators() -> None:
    model = capture(source_of("gather_form"))
    assert not any(operator_of(node) for node in model.graph)
    assert not model.functions


def test_dataclasses_name_inputs_and_outputs() -> None:
    assert source_of("foreign").input_names == (
        "shared_output",
        "gemm2_permuted",
        "expert_weights",
        "expanded_idx_to_permuted_idx",
        "residual",
    )
    producer = source_of("producer")
    assert producer.input_names == ("rows", "weights", "index")
    assert producer.output_names == ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    assert source_of("finalize_only").output_names == ("output",)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_that_is_taken_runs(opset: int, tmp_path: Path) -> None:
    source = source_of("front")
    result = export(source, tmp_path, opset=opset)
    assert load_model(result.model_path).graph.opset_imports[""] == result.opset == opset
    agrees(source, result.model_path)


@pytest.mark.parametrize("opset", [17, 26, 0])
def test_another_opset_is_refused(opset: int) -> None:
    with pytest.raises(InputError, match=f"the opset was {opset}; 18 to 25 are taken"):
        capture(source_of("front"), opset=opset)


def shapes(model) -> dict[str, list[str]]:
    return {value.name: [str(dim) for dim in value.shape] for value in model.graph.inputs}


def test_dynamic_dimensions_are_the_sources_or_none_or_those_named() -> None:
    source = source_of("front")
    assert shapes(capture(source))["gemm2_permuted"] == ["rows", "32"]
    assert shapes(capture(source, dynamic=False))["gemm2_permuted"] == ["24", "32"]
    named = shapes(capture(source, dynamic={"gemm2_permuted": {0: "anything"}}))
    assert named["gemm2_permuted"] == ["anything", "32"]
    assert named["residual"] == ["6", "32"]


def test_case32_dynamic_dimensions_that_are_not_there() -> None:
    source = source_of("front")
    with pytest.raises(InputError, match="name the input 'gemm'; there are gemm2_permuted, expert_weights, "):
        capture(source, dynamic={"gemm": {0: "rows"}})
    with pytest.raises(InputError, match="dynamic dimension 2 of input 'residual'; it has 2, counted from 0"):
        capture(source, dynamic={"residual": {2: "rows"}})
    with pytest.raises(InputError, match="was called 'a b'; a name is taken"):
        capture(source, dynamic={"residual": {0: "a b"}})


def test_a_dynamic_dimension_of_one_is_refused() -> None:
    source = source_of("producer")
    one = dataclasses.replace(source, example_inputs={**source.example_inputs, "weights": torch.ones(1, 3)})
    with pytest.raises(InputError, match=r"dimension 0 of input 'weights' \('tokens'\) .* is 1 in the example"):
        capture(one, dynamic={"weights": {0: "tokens"}})


def test_dynamic_dimensions_of_the_command_line() -> None:
    assert parse_dynamic(["ids:0=batch,1=seq", "a.b:c:2=x"]) == {"ids": {0: "batch", 1: "seq"}, "a.b:c": {2: "x"}}
    for word in ("ids", "ids:", ":0=batch", "ids:batch", "ids:0=", "ids:x=batch", "ids:0=1"):
        with pytest.raises(InputError, match=r"--dynamic was .* is taken, such as input_ids:0=batch,1=seq"):
            parse_dynamic([word])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_modules(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetrt.source import DTYPES, load_source

    monkeypatch.chdir(Path(__file__).parents[1])
    source = load_source("tests.models.contract:front", dtype=dtype)
    assert source.example_inputs["gemm2_permuted"].dtype == DTYPES[dtype]
    assert source.example_inputs["expanded_idx_to_permuted_idx"].dtype == torch.int32
    (node,) = capture(source).graph
    kinds = {name: value.dtype.name for name, value in named_inputs(node).items()}
    wanted = {"bf16": "BFLOAT16", "fp16": "FLOAT16"}[dtype]
    assert kinds.pop("expanded_idx_to_permuted_idx") == "INT32"
    assert set(kinds.values()) == {wanted} == {value.dtype.name for value in node.outputs}


def test_case31_files_of_an_earlier_export_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_bytes(b"stale" * 10000)
    (tmp_path / "model.onnx").write_bytes(b"stale")
    result = export(source_of("front"), tmp_path)
    # Its only weight is small and lies in the model file.
    assert result.data_path is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.json"]
    wide = torch.nn.Linear(64, 64)
    (tmp_path / "model.onnx.data").write_bytes(b"stale" * 10000)
    source = as_source((wide, torch.ones(2, 64)))
    result = export(source, tmp_path)
    assert result.data_path == tmp_path / "model.onnx.data"
    assert result.data_path.stat().st_size == 64 * 64 * 4 + MARK_BYTES
    agrees_single(source, result.model_path)


def agrees_single(source: Source, path: Path) -> None:
    inputs = source.make_inputs(4)
    with torch.no_grad():
        (wanted,) = source.module(*inputs.values())
    np.testing.assert_allclose(run(path, inputs)[0], wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_an_unwritable_folder_is_refused_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: pytest.fail("it came as far as the export"))
    with pytest.raises(InputError, match=r"output folder '.*/file/out' cannot be written"):
        export(source_of("front"), tmp_path / "file" / "out")


@pytest.mark.parametrize("where", ["export", "save"])
def test_a_failure_leaves_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the disk is full")

    if where == "export":
        monkeypatch.setattr(torch.onnx, "export", fail)
    else:
        monkeypatch.setattr("moetrt.onnx_files.ir.to_proto", fail)
    with pytest.raises((InputError, RuntimeError), match="the disk is full"):
        export(source_of("front"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_bytes(b"earlier")
    (tmp_path / "out" / "model.onnx.data").write_bytes(b"earlier data")
    (tmp_path / "out" / "model.onnx.json").write_bytes(b"earlier description")
    with pytest.raises((InputError, RuntimeError), match="the disk is full"):
        export(source_of("front"), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        "model.onnx": b"earlier",
        "model.onnx.data": b"earlier data",
        "model.onnx.json": b"earlier description",
    }


def test_what_the_file_was_made_of_lies_beside_it(tmp_path: Path) -> None:
    result = export(source_of("front"), tmp_path)
    assert result.sidecar == tmp_path / "model.onnx.json"
    content = json.loads(result.sidecar.read_text())
    assert content["format"] == "moetrt.export/1"
    assert content["model"] == {"file": "model.onnx", "sha256": file_sha256(result.model_path)}
    assert content["inputs"]["gemm2_permuted"] == ["rows", 32]
    assert (content["opset"], content["operators"], content["tails_expected"]) == (22, 1, None)
    assert content["command"] is None  # called from Python
    assert content["versions"]["torch"] == importlib.metadata.version("torch")


def test_case28_a_failed_export_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.qwen3_moe().train()
    model.lm_head.eval()
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append((model.get_experts_implementation()[""], model.training))
        raise RuntimeError("no translation for aten::x")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(InputError, match=r"Qwen3MoeForCausalLM was not exported to ONNX: .*no translation") as caught:
        capture(as_source(model))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert seen == [("moetrt_gathered", False)]
    assert model.get_experts_implementation()[""] == "grouped_mm"
    assert model.training
    assert model.model.layers[0].training
    assert not model.lm_head.training


def test_a_model_that_pytorch_does_not_run() -> None:
    """torch.export traces a product of two dtypes; the file would be found invalid by the first that reads it."""
    model = models.mixtral().half()
    model.lm_head.float()
    with pytest.raises(InputError) as caught:
        capture(as_source(model))
    assert str(caught.value).startswith(
        "MixtralForCausalLM does not run in PyTorch on its example inputs: RuntimeError: expected m1 and m2 to have "
        "the same dtype, but got: c10::Half != float; its ONNX graph is not valid either: "
    )


def test_a_module_that_cannot_be_exported(capfd: pytest.CaptureFixture[str]) -> None:
    from tests.models import wrong

    with pytest.raises(InputError) as caught:
        capture(as_source(wrong.data_dependent()))
    text = str(caught.value)
    assert text.startswith("_Branches was not exported to ONNX: GuardOnDataDependentSymNode: Could not guard on")
    assert "\n" not in text
    assert len(text) < 400
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")


def test_float64_rows_are_refused() -> None:
    source = source_of("front")
    wide = {name: x.double() if x.is_floating_point() else x for name, x in source.example_inputs.items()}
    with pytest.raises(
        InputTypeError, match="MoEFinalizeAddRMSNorm': its rows were double; bfloat16, float16, float32 "
    ):
        capture(dataclasses.replace(source, module=source.module.double(), example_inputs=wide))


def test_an_export_is_silent_and_tells_its_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    export(source_of("front"), tmp_path, progress=steps.append)
    assert steps == ["tracing Front", "tidying the graph", "writing weights"]
    assert capfd.readouterr() == ("", "")


def test_outputs_that_the_source_does_not_name() -> None:
    source = dataclasses.replace(source_of("front"), output_names=("norm_out",))
    with pytest.raises(InputError, match="Front gave 2 outputs; its source names 1: norm_out"):
        capture(source)


def test_operators_are_named_after_their_modules() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tails = torch.nn.ModuleList([contract.Front(), contract.Front()])

        def forward(self, moe_output, residual):
            norm, residual = self.tails[0](moe_output, residual)
            again, residual = self.tails[1](moe_output, residual)
            return norm + again + self.tails[1](moe_output, residual)[0]

    _module, inputs, dynamic = contract.front()
    model = capture(as_source((Layers(), inputs, dynamic)))
    names = [node.name for node in model.graph if operator_of(node)]
    assert names == ["tails.0", "tails.1", "tails.1_2"]


WITHOUT_TRANSFORMERS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

sys.meta_path.insert(0, Missing())
from moetrt.capture import export
from moetrt.source import load_source

print(export(load_source("tests.models.contract:front"), sys.argv[1]).operators)
"""


def test_contract_modules_need_no_transformers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr


def test_a_file_that_reads_the_weights_that_were_replaced_is_named(tmp_path: Path) -> None:
    """What was mapped from the export before shares its data file, where the new weights lie."""
    export(as_source((torch.nn.Linear(64, 64), torch.ones(2, 64))), tmp_path)
    mapped, elsewhere = tmp_path / "mapped.onnx", tmp_path / "other.onnx"
    mapped.write_bytes((tmp_path / "model.onnx").read_bytes())
    elsewhere.write_bytes(b"no ONNX")
    result = export(as_source((torch.nn.Linear(64, 64), torch.ones(2, 64))), tmp_path)
    assert result.stale == (mapped,)
