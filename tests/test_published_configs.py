"""Folders with the config.json of published models, their sizes cut down: each loads whole, or with its true reason."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from onnxruntime import InferenceSession

from moetrt.capture import export
from moetrt.errors import InputError
from moetrt.mapping import map_file
from moetrt.quiet import quiet
from moetrt.source import load_source
from tests.checkpoints import configure, read, write

CONFIGS = Path(__file__).parent / "configs"


def folder_of(name: str, path: Path, **changes: Any) -> tuple[Path, Any]:
    """A checkpoint in float32 with random weights in the hub's layout, and its whole model.

    Args:
        name: of a file in tests/configs, which becomes the folder's ``config.json`` but for its quantisation.
        path: of the folder.
        changes: of the config.
    """
    path.mkdir()
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")) | changes
    for key in ("quantization_config", "auto_map"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config))
    with quiet():
        kind = getattr(transformers, config["architectures"][0])
        torch.manual_seed(0)
        model = kind(transformers.AutoConfig.from_pretrained(path)).float().eval()
        model.save_pretrained(path)
    # As it is published: Transformers would write its own, newer spelling.
    (path / "config.json").write_text(json.dumps(config))
    return path, model


@pytest.mark.parametrize(
    ("name", "kind", "tails"),
    [
        # auto_map names code of its own, of a type that Transformers has.
        ("DeepSeek-V3", "DeepseekV3ForCausalLM", 1),
        ("DeepSeek-V4-Flash", "DeepseekV4ForCausalLM", 2),
        ("gpt-oss-20b", "GptOssForCausalLM", 2),
        # Images too: Transformers has a text model of two of them, whose folders have weights that it does not take.
        ("Qwen3.5-35B-A3B", "Qwen3_5MoeForCausalLM", 2),
        ("Llama-4-Scout-17B-16E-Instruct", "Llama4ForCausalLM", 2),
        ("gemma-4-26B-A4B", "Gemma4ForConditionalGeneration", 2),
        ("Kimi-K2.5-NVFP4", "Kimi_K25ForConditionalGeneration", 1),
    ],
)
def test_a_published_config_gives_the_whole_models_logits(name: str, kind: str, tails: int, tmp_path: Path) -> None:
    changes = {"architectures": [kind]} if name.startswith("Kimi") else {}
    folder, model = folder_of(name, tmp_path / "model", **changes)
    source = load_source(folder, dtype="fp32")
    assert source.description == kind
    assert source.tails_expected == tails
    inputs = source.make_inputs(1, batch=2, seq=7)
    # Llama-4's whole model does not run without an image.
    whole = model.language_model if kind == "Llama4ForCausalLM" else model
    with torch.no_grad():
        assert torch.equal(source.module(*inputs.values()), whole(**inputs, use_cache=False).logits)


def test_a_model_that_is_whole_alone_is_exported_by_its_text(tmp_path: Path) -> None:
    folder, model = folder_of("Kimi-K2.5-NVFP4", tmp_path / "model", architectures=["Kimi_K25ForConditionalGeneration"])
    source = load_source(folder, dtype="fp32")
    exported = export(source, tmp_path / "out")
    report = map_file(exported.model_path, tmp_path / "out/mapped.onnx")
    assert (report.complete, len(report.sites)) == (True, 1)
    inputs = source.make_inputs(1, batch=3, seq=5)
    feed = {name: tensor.numpy() for name, tensor in inputs.items()}
    (logits,) = InferenceSession(tmp_path / "out/mapped.onnx").run(None, feed)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        wanted = model(**inputs).logits
        exact = model.double()(**inputs).logits
    # As compare has it: 4 times PyTorch's own distance from float64, for rounding in another order.
    assert (torch.from_numpy(logits) - exact).abs().max() <= 4 * (wanted - exact).abs().max()
    names = [tensor.name for tensor in onnx.load(exported.model_path, load_external_data=False).graph.initializer]
    assert [name for name in names if "vision" in name or "projector" in name] == []


def test_a_part_that_the_whole_model_lacks_is_no_tower(tmp_path: Path) -> None:
    """What the text model does not take is left out where it is known whose it is, and else refused."""
    folder, _ = folder_of("Qwen3.5-35B-A3B", tmp_path / "model")
    extra = {"model.language_model.layers.0.mlp.second_gate.weight": torch.zeros(4)}
    write(folder, read(folder) | extra)
    with pytest.raises(
        InputError, match=f"have 1 tensors that Qwen3_5MoeForCausalLM .* not take, such as {min(extra)}"
    ):
        load_source(folder)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "Kimi-K2-Instruct",
            "Transformers [^ ]* has no model of type 'kimi_k2', and the folder brings model code of its own, which is "
            "not run; .*; its architecture DeepseekV3ForCausalLM is that of Transformers' model_type 'deepseek_v3'",
        ),
        (
            "Kimi-K2.5-NVFP4",
            "its weights are quantised as ModelOpt's NVFP4; FP8, MXFP4 and int8 with their scales, and",
        ),
    ],
)
def test_a_published_config_that_is_not_taken_says_why(name: str, line: str, tmp_path: Path) -> None:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    with pytest.raises(InputError, match=f"^source folder '.*': {line}"):
        load_source(tmp_path)


def test_a_copy_of_a_type_is_taken_by_its_name(tmp_path: Path) -> None:
    """As the message for Kimi-K2 says."""
    folder, model = folder_of("Kimi-K2-Instruct", tmp_path / "model", model_type="deepseek_v3")
    configure(folder, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    source = load_source(folder, dtype="fp32")
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(source.module(ids), model(input_ids=ids).logits)
