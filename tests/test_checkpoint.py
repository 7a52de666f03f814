"""Checkpoints: every tensor is used, used with its scales, known to be of no use, or refused by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moetrt import checkpoint, models
from moetrt.checkpoint import read_checkpoint
from moetrt.errors import InputError
from moetrt.quantized import Declared, dequantize, read_declared
from moetrt.quiet import quiet
from moetrt.source import load_source
from tests import checkpoints
from tests.checkpoints import E4M3, WEIGHTS, Tensors, change, configure, read, to_blocks, to_fp8, write

PROJ = "model.layers.0.mlp.experts.3.down_proj.weight"


def _saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE in bfloat16 as the hub lays it out: a tensor for each expert."""
    return _saved(models.qwen3_moe(), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of its own for each test to change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def loaded(folder: Path) -> Tensors:
    source = load_source(folder)
    state: Tensors = source.module.module.state_dict()
    return state


def assert_stands_for(folder: Path, meant: Tensors) -> None:
    """The folder loads as a folder of the weights that it stands for does, to the bit."""
    got = loaded(folder)
    for name in ("hf_quant_config.json", WEIGHTS):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, meant)
    wanted = loaded(folder)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def of_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max() / 448


def of_rows(weight: torch.Tensor) -> torch.Tensor:
    return (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


@pytest.mark.parametrize(
    ("scale_of", "scale_name", "declare"),
    [
        (of_tensor, "weight_scale", {}),
        (lambda weight: of_tensor(weight).reshape(1), "weight_scale", {"quantization_config": COMPRESSED}),
        (lambda weight: of_tensor(weight).reshape(1, 1), "weight_scale_inv", {}),
        (of_rows, "weight_scale", {"quantization_config": COMPRESSED}),
        (lambda weight: of_rows(weight).flatten(), "weight_scale", {"quantization_config": MODELOPT}),
        (of_tensor, "scale", {}),
    ],
)
def test_case_53_fp8_is_loaded_with_its_scales(
    folder: Path,
    scale_of: Callable[[torch.Tensor], torch.Tensor],
    scale_name: str,
    declare: dict[str, Any],
) -> None:
    quantised, meant = to_fp8(read(folder), scale_name, scale_of)
    write(folder, quantised)
    configure(folder, **declare)
    assert_stands_for(folder, meant)


def test_case_53_modelopts_own_layout(folder: Path) -> None:
    """Nothing in config.json, hf_quant_config.json beside it, scales of activations and of the cache."""
    quantised, meant = to_fp8(read(folder), "weight_scale", of_tensor)
    for name in [name for name in quantised if name.endswith("weight_scale")]:
        quantised[name.replace("weight_scale", "input_scale")] = torch.tensor(0.01)
    quantised["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    write(folder, quantised)
    configure(folder, "hf_quant_config.json", quantization={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    assert_stands_for(folder, meant)


def test_case_53_int8_is_loaded_with_its_scales(folder: Path) -> None:
    quantised, meant = read(folder), read(folder)
    for name, tensor in read(folder).items():
        if checkpoints.is_quantised(name, tensor):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            quantised[name] = (tensor.float() / scale).round().to(torch.int8)
            quantised[f"{name}_scale"] = scale
            meant[name] = (quantised[name].float() * scale).to(torch.bfloat16)
    write(folder, quantised)
    assert_stands_for(folder, meant)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the numbers of a tensor are read: what is refused is refused before."""

    def fails(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint.Stored, "__getitem__", fails)


def as_dtype(dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({PROJ: tensors[PROJ].to(dtype)})


def beside(name: str, tensor: torch.Tensor, dtype: torch.dtype = E4M3) -> Callable[[Tensors], object]:
    """The projection in ``dtype`` with ``tensor`` beside it."""
    return lambda tensors: tensors.update({PROJ: tensors[PROJ].to(dtype), name: tensor})


ONE = torch.tensor(0.5)
SCALE = f"{PROJ}_scale"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (as_dtype(E4M3), f"have {PROJ} as F8_E4M3 without a scale that is known, such as {PROJ}_scale; FP8, MXFP4 and"),
        (as_dtype(torch.float8_e5m2), f"have {PROJ} as F8_E5M2 without a scale"),
        (as_dtype(torch.int8), f"have {PROJ} as I8 without a scale"),
        (as_dtype(torch.uint8), f"have {PROJ} as U8 without a scale"),
        (as_dtype(torch.bool), f"have {PROJ} as BOOL without a scale"),
        (as_dtype(torch.int32), f"have {PROJ} as I32 without a scale"),
        # Scales that mean something else, or nothing that is certain.
        (beside(SCALE, ONE, torch.uint8), f"have {PROJ} as U8 with {SCALE} as F32, a format that is not known"),
        (beside(SCALE, ONE.to(E4M3), torch.uint8), f"have {PROJ} as U8 with {SCALE} as F8_E4M3, a format that is not"),
        (beside(SCALE, torch.ones(64, 2).to(torch.float8_e8m0fnu), torch.int8), "with .* as F8_E8M0, a format that is"),
        (
            beside(SCALE, torch.ones(64, 2)),
            r"as \[64, 32\] with .*_scale as \[64, 2\]; one scale, one for each row, or",
        ),
        (beside(SCALE, torch.ones(2)), r"with .*_scale as \[2\]; one scale, .* \(of which the config gives no size\)"),
        # What is left when the weight is wide already, or the scale is one of several.
        (beside(SCALE, ONE, torch.bfloat16), f"have 1 tensors that Qwen3MoeForCausalLM .* not take, such as {SCALE}"),
        (
            lambda tensors: tensors.update({PROJ: tensors[PROJ].to(E4M3), SCALE: ONE, f"{SCALE}_2": ONE}),
            f"have 1 tensors that .* does not take, such as {SCALE}_2",
        ),
        (
            lambda tensors: tensors.update({PROJ.replace("weight", "pre_quant_scale"): torch.ones(32)}),
            "have 1 tensors that .* does not take, such as model.layers.0.mlp.experts.3.down_proj.pre_quant_scale",
        ),
        (
            lambda tensors: tensors.update({PROJ.replace("weight", "qweight"): tensors.pop(PROJ).to(torch.int32)}),
            "have 1 tensors that .* does not take, such as model.layers.0.mlp.experts.3.down_proj.qweight",
        ),
        (lambda tensors: tensors.update({"model.extra.weight": ONE}), "not take, such as model.extra.weight"),
        (lambda tensors: tensors.update({"model.layers.2.mlp.gate.weight": ONE}), "such as model.layers.2.mlp.gate"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_case_53_a_tensor_that_is_not_accounted_for_is_refused(
    folder: Path, function: Callable[[Tensors], object], line: str
) -> None:
    change(folder, function)
    with pytest.raises(InputError, match=f"^source folder '.*/model': its weights .*{line}"):
        load_source(folder)


@pytest.mark.parametrize(
    ("file", "declared", "name"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("config.json", {"quantization_config": {"load_in_4bit": True}}, "a method without a name"),
        (
            "config.json",
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "ModelOpt's NVFP4",
        ),
        ("config.json", {"quantization_config": COMPRESSED | {"format": "pack-quantized"}}, "pack-quantized"),
        ("config.json", {"compression_config": COMPRESSED | {"format": "marlin-24"}}, "marlin-24"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "ModelOpt's W4A8_AWQ"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_case_53_another_quantisation_is_refused_by_its_name(
    folder: Path, file: str, declared: dict[str, Any], name: str
) -> None:
    configure(folder, file, **declared)
    with pytest.raises(InputError, match=f"'.*/model': its weights are quantised as {name}; FP8, MXFP4 and int8 with"):
        load_source(folder)


def test_case_53_a_part_of_the_config_may_say_it(tmp_path: Path) -> None:
    """As in a text model's own config."""
    configure(tmp_path, text_config={"quantization_config": BLOCK_FP8})
    assert read_declared(tmp_path, "it") == Declared((24, 40), fp4=False)
    configure(tmp_path, vision_config={"quantization_config": {"quant_method": "bitnet"}})
    with pytest.raises(InputError, match=r"^it: its weights are quantised as bitnet; FP8, MXFP4 and int8"):
        read_declared(tmp_path, "it")


def test_a_file_that_is_not_json_is_named(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(
        InputError, match=r"'.*/model': hf_quant_config.json cannot be read as JSON: Expecting property"
    ):
        load_source(folder)


def test_case_53_what_a_model_has_no_use_for_is_left_out(folder: Path) -> None:
    """A layer that predicts tokens ahead, and the frequencies that old checkpoints keep for each layer."""
    wanted = loaded(folder)
    extra = {
        "model.layers.2.eh_proj.weight": ONE,
        "model.layers.2.mlp.experts.0.up_proj.weight": ONE,
        "model.layers.0.self_attn.rotary_emb.inv_freq": ONE,
    }
    change(folder, lambda tensors: tensors.update(extra))
    configure(folder, num_nextn_predict_layers=1)
    got = loaded(folder)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def stored(folder: Path, tensors: Tensors) -> dict[str, checkpoint.Stored]:
    folder.mkdir()
    write(folder, tensors)
    return read_checkpoint(folder, "it")


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 300), (576, 128), (1, 129), (128, 1)])
def test_case_54_blocks_of_128_are_dequantised(tmp_path: Path, rows: int, columns: int) -> None:
    """Also where the last block is not whole, as DeepSeek-V3's kv_a_proj_with_mqa of 576 rows."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    codes, scales, meant = to_blocks(weight, 128, 128)
    tensors = stored(tmp_path / "f", {"a.weight": codes, "a.weight_scale_inv": scales})
    got = dequantize(tensors, Declared((128, 128), fp4=False), "it")
    assert list(got) == ["a.weight"]
    assert got["a.weight"].shape == (rows, columns)
    assert torch.equal(got["a.weight"][...], meant)
    if not rows % 128 and not columns % 128:
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        assert torch.equal(got["a.weight"][...], theirs)


@pytest.mark.parametrize("exponents", [torch.float8_e8m0fnu, torch.uint8])
def test_case_54_scales_that_are_exponents(tmp_path: Path, exponents: torch.dtype) -> None:
    """DeepSeek-V3.2's and MXFP8's scales are powers of two: 2^(b - 127) of a byte b."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(4, 64, generator=generator).to(E4M3)
    scales = torch.randint(118, 130, (4, 2), generator=generator, dtype=torch.uint8).view(exponents)
    tensors = stored(tmp_path / "f", {"a.weight": codes, "a.weight_scale_inv": scales})
    got = dequantize(tensors, Declared((1, 32), fp4=False), "it")["a.weight"][...]
    factors = 2.0 ** (scales.view(torch.uint8).double() - 127)
    assert torch.equal(got.double(), codes.double() * factors.repeat_interleave(32, 1))


def test_case_54_two_numbers_a_byte(tmp_path: Path) -> None:
    """DeepSeek-V4's experts, by Transformers' own dequantisation."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (6, 32), generator=generator, dtype=torch.int8)
    scales = torch.randint(118, 130, (6, 2), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = stored(tmp_path / "f", {"a.weight": codes, "a.scale": scales})
    got = dequantize(tensors, Declared((128, 128), fp4=True), "it")["a.weight"]
    assert got.shape == (6, 64)
    assert torch.equal(got[...], Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32))


@pytest.mark.parametrize("scales", [(1, 8), (8, 8), (2, 1, 8)])
def test_case_53_a_scale_for_each_column_is_of_no_format(tmp_path: Path, scales: tuple[int, ...]) -> None:
    """No tool writes one: it would be a row's scale, turned, which fits a square weight too."""
    weight = torch.ones(*scales[:-2], 8, 8).to(E4M3)
    tensors = stored(tmp_path / "f", {"a.weight": weight, "a.weight_scale": torch.ones(scales)})
    with pytest.raises(InputError, match=r"one scale, one for each row, or one for each block .* is taken"):
        dequantize(tensors, Declared(None, fp4=False), "it")


@pytest.mark.parametrize("kind", ["float", "exponent", "mxfp4"])
def test_case_53_a_scale_that_is_no_number_is_refused(tmp_path: Path, kind: str) -> None:
    """Of exponents, the byte 255 is NaN."""
    nan = torch.tensor([[1.0, float("nan")]]) if kind == "float" else torch.tensor([[127, 255]], dtype=torch.uint8)
    weight = {"a.weight": torch.ones(1, 64).to(E4M3), "a.weight_scale": nan}
    blocks = {"a_blocks": torch.zeros(1, 1, 2, 16, dtype=torch.uint8), "a_scales": nan[None]}
    tensors = stored(tmp_path / "f", blocks if kind == "mxfp4" else weight)
    (joined,) = dequantize(tensors, Declared((1, 32), fp4=False), "it").values()
    with pytest.raises(InputError, match=r"it: its weights have NaN or Inf in a.*_scales?; finite scales are taken"):
        joined[...]


def test_case_54_a_weight_beside_its_own_blocks_is_refused(tmp_path: Path) -> None:
    tensors = {
        "a.down_proj": torch.zeros(1, 32, 2),
        "a.down_proj_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8),
        "a.down_proj_scales": torch.full((1, 2, 1), 127, dtype=torch.uint8),
    }
    declared = Declared(None, fp4=False)
    with pytest.raises(InputError, match=r"have both a.down_proj and a.down_proj_blocks for a.down_proj; one spelling"):
        dequantize(stored(tmp_path / "f", tensors), declared, "it")
    del tensors["a.down_proj"]
    assert list(dequantize(stored(tmp_path / "g", tensors), declared, "it")) == ["a.down_proj"]


@pytest.mark.parametrize("size", ["128", [0, 128], [128], [128, 128, 1], 128])
def test_case_54_a_block_of_another_form_is_refused(folder: Path, size: object) -> None:
    configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": size})
    with pytest.raises(InputError, match=r"its weight_block_size was .*; two numbers of 1 or more are taken$"):
        load_source(folder)


BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}


def test_without_a_dtype_in_the_config_most_numbers_decide(folder: Path) -> None:
    """Not the first tensor, which may be one that the model keeps in float32."""
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, lambda tensors: tensors.update({name: tensors[name].float() for name in list(tensors)[:1]}))
    assert {tensor.dtype for tensor in loaded(folder).values()} == {torch.bfloat16}


def test_case_54_a_block_scaled_folder_as_published(folder: Path) -> None:
    quantised, meant = read(folder), read(folder)
    for name, tensor in read(folder).items():
        if checkpoints.is_quantised(name, tensor):
            quantised[name], quantised[f"{name}_scale_inv"], wide = to_blocks(tensor.float(), 24, 40)
            meant[name] = wide.to(torch.bfloat16)
    write(folder, quantised)
    configure(folder, quantization_config=BLOCK_FP8)
    assert_stands_for(folder, meant)


@pytest.mark.parametrize("declared", [True, False])
def test_case_54_an_mxfp4_folder_as_published(tmp_path: Path, declared: bool) -> None:
    """gpt-oss: bytes of two numbers, [experts, rows, groups, 16], for a parameter [experts, columns, rows]."""
    sizes = models.SMALL | {"intermediate_size": 64, "num_hidden_layers": 1}
    config = GptOssConfig(**sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    folder = _saved(models.randomized(GptOssForCausalLM, config), tmp_path / "model")
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*table, *(-value for value in table)])
    generator = torch.Generator().manual_seed(0)
    quantised, meant = read(folder), read(folder)
    for name, tensor in read(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), generator=generator)
            scales = torch.randint(118, 126, codes.shape[:-1], generator=generator)
            del quantised[name]
            quantised[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            quantised[f"{name}_scales"] = scales.to(torch.uint8)
            wide = (values[codes] * 2.0 ** (scales[..., None] - 127)).reshape(experts, rows, columns)
            meant[name] = wide.transpose(1, 2).to(torch.bfloat16)
    write(folder, quantised)
    if declared:
        configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert_stands_for(folder, meant)


def test_case_54_blocks_without_their_exponents(tmp_path: Path) -> None:
    codes = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    tensors = stored(tmp_path / "f", {"a_blocks": codes, "a_scales": codes[0, :, 0, :1]})
    line = r"^it: its weights have a_scales as \[4, 1\] and a_blocks as \[2, 4, 1, 16\]; an exponent for each block is"
    with pytest.raises(InputError, match=line):
        dequantize(tensors, Declared(None, fp4=False), "it")


def numbered(tensors: Tensors, old: int, new: int | None) -> None:
    """Gives an expert of the first layer another number, or none."""
    for name in [name for name in tensors if f"layers.0.mlp.experts.{old}." in name]:
        tensor = tensors.pop(name)
        if new is not None:
            tensors[name.replace(f"experts.{old}.", f"experts.{new}.")] = tensor


def doubled(tensors: Tensors) -> None:
    for name in [name for name in tensors if "layers.0.mlp.experts.7." in name]:
        tensors[name.replace("experts.7.", "experts.8.")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            lambda tensors: tensors.update({PROJ: tensors[PROJ][:, 1:]}),
            rf"have {PROJ} as \[64, 31\], Qwen3MoeForCausalLM by its config.json takes \[64, 32\]",
        ),
        (
            lambda tensors: tensors.update(
                {name: part[1:] for name, part in tensors.items() if name.endswith("experts.0.up_proj.weight")}
            ),
            r"have model.layers.0.mlp.experts.0.up_proj.weight as \[31, 64\], .* takes \[32, 64\]",
        ),
        (
            lambda tensors: tensors.update(
                {name: part[1:] for name, part in tensors.items() if "experts" in name and "up_proj" in name}
            ),
            r"have model.layers.0.mlp.experts.gate_up_proj as \[8, 63, 64\], .* takes \[8, 64, 64\]",
        ),
        (
            lambda tensors: tensors.update(
                {name: part[:, 1:] for name, part in tensors.items() if "experts" in name and "up_proj" in name}
            ),
            "that become model.layers.0.mlp.experts.gate_up_proj do not fit together: .*Sizes of tensors must",
        ),
        # Slot 3 would hold expert 4, and so on: eight tensors, but not those of experts 0 to 7.
        (
            lambda tensors: numbered(tensors, 3, 8),
            "have 3 tensors that .* not take, such as .*0.mlp.experts.8.down_proj",
        ),
        (
            lambda tensors: numbered(tensors, 3, None),
            "lack 3 tensors of .*, such as model.layers.0.mlp.experts.3.down_pr",
        ),
        (
            lambda tensors: numbered(tensors, 0, None),
            "lack 3 tensors of .*, such as model.layers.0.mlp.experts.0.down_pr",
        ),
        (
            lambda tensors: numbered(tensors, 7, None),
            "lack 3 tensors of .*, such as model.layers.0.mlp.experts.7.down_pr",
        ),
        (lambda tensors: tensors.pop(PROJ), f"lack 1 tensors of .*, such as {PROJ}"),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": tensors["model.embed_tokens.weight"]}),
            "have both .*embed_tokens.weight and .*embed_tokens.weight for model.embed_tokens.weight; one spelling is",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 64, 32)}),
            "have both .* and .* for model.layers.0.mlp.experts.down_proj; one spelling is taken",
        ),
        (
            # Sorted by its name, expert 3 would come last.
            lambda tensors: tensors.update({PROJ.removeprefix("model."): tensors.pop(PROJ)}),
            "have both .* and .* for model.layers.0.mlp.experts.down_proj; one spelling is taken",
        ),
        (doubled, "have 3 tensors that .* does not take, such as model.layers.0.mlp.experts.8.down_proj.weight"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_case_57_experts_that_are_not_the_models_are_named(
    folder: Path, function: Callable[[Tensors], object], line: str
) -> None:
    change(folder, function)
    with pytest.raises(InputError, match=f"^source folder '.*/model': its weights .*{line}") as caught:
        load_source(folder)
    assert "\n" not in str(caught.value)


def shard(folder: Path) -> dict[str, str]:
    """The folder's weights in two files, and their index."""
    tensors = read(folder)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(places.values()):
        write(folder, {name: tensors[name] for name, place in places.items() if place == file}, file)
    configure(folder, checkpoint.INDEX, metadata={}, weight_map=places)
    return places


def test_shards_are_one_checkpoint(folder: Path) -> None:
    wanted = loaded(folder)
    shard(folder)
    got = loaded(folder)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def double_a_name(folder: Path) -> None:
    tensors = checkpoints.load_file(folder / SECOND)
    save_file(tensors | {PROJ: torch.zeros(64, 32, dtype=torch.bfloat16)}, folder / SECOND)


def misplace(folder: Path) -> None:
    places = json.loads((folder / checkpoint.INDEX).read_text())["weight_map"]
    configure(folder, checkpoint.INDEX, weight_map=places | {PROJ: SECOND})


@pytest.mark.parametrize(
    ("breaks", "line"),
    [
        (
            lambda folder: (folder / SECOND).unlink(),
            f"{checkpoint.INDEX} places model.* in {SECOND}, which does not exist",
        ),
        (misplace, f"{checkpoint.INDEX} places {PROJ} in {SECOND}, which lacks it; a whole checkpoint is taken"),
        (double_a_name, f"both {FIRST} and {SECOND} have {PROJ}; one of them is taken"),
        (
            lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:3000]),
            f"{SECOND} is not a safetensors file, or was cut short: Error while deserializing header",
        ),
        (
            lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1]),
            f"{SECOND} is not a safetensors file, or was cut short: Error while deserializing header: incomplete",
        ),
        (lambda folder: (folder / checkpoint.INDEX).write_text("{}"), "has no weight_map of files by tensor .KeyError"),
        (
            lambda folder: (folder / checkpoint.INDEX).write_text("["),
            "has no weight_map of files by tensor .JSONDecode",
        ),
        (
            lambda folder: (folder / checkpoint.INDEX).write_text('{"weight_map": {"a": 3}}'),
            "no weight_map .* .TypeErr",
        ),
    ],
)
@pytest.mark.usefixtures("unread")
def test_case_57_shards_that_are_not_whole_are_named(folder: Path, breaks: Callable[[Path], None], line: str) -> None:
    shard(folder)
    breaks(folder)
    with pytest.raises(InputError, match=f"^source folder '.*/model': .*{line}") as caught:
        load_source(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model-00001-of-00002.safetensors"])
def test_case_44_weights_in_another_format_are_named(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    line = (
        f"'.*/model' has its weights as {name} alone; model.safetensors is taken, or model.safetensors.index.json with"
    )
    with pytest.raises(InputError, match=line):
        load_source(folder)


def test_case_53_an_adapter_is_not_left_out_in_silence(folder: Path) -> None:
    configure(folder, "adapter_config.json", peft_type="LORA")
    with pytest.raises(
        InputError, match=r"'.*/model' has an adapter of its weights, adapter_config.json; a model that"
    ):
        load_source(folder)


def test_case_44_a_folder_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(
        InputError, match=r"'.*/model' has no weights; model.safetensors is taken, or model.safetensors"
    ):
        load_source(folder)


def test_case_44_own_code_is_not_run_where_transformers_has_the_type(folder: Path) -> None:
    wanted = loaded(folder)
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(folder, auto_map=own)
    (folder / "own.py").write_text("raise SystemExit('run')")
    got = loaded(folder)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "has no model of type 'own', and the folder brings model code of its own, which is not run; .*; its "
            "architecture Qwen3MoeForCausalLM is that of Transformers' model_type 'qwen3_moe'$",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}, "architectures": ["Own"]},
            "which is not run; load the model in a factory and name that: 'package.module:factory'$",
        ),
        # Transformers would ask for leave to run the folder's code, of a type that is no language model.
        (
            {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.Model"}},
            "no causal language model of type 'vit'$",
        ),
        ({"dtype": "float8_e4m3fn"}, "the dtype of its config.json was torch.float8_e4m3fn; one of bf16, "),
        ({"dtype": "int8"}, "the dtype of its config.json was torch.int8; one of bf16, "),
    ],
)
@pytest.mark.usefixtures("unread")
def test_case_44_types_that_are_not_taken(folder: Path, changes: dict[str, Any], line: str) -> None:
    configure(folder, **changes)
    with pytest.raises(InputError, match=f"^source folder '.*/model': .*{line}"):
        load_source(folder)
