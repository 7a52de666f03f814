"""Sources: folders and factories that are taken, and one line for each that is not."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moetrt import models
from moetrt.capture import export
from moetrt.errors import InputError, InputTypeError, MoetrtError
from moetrt.nested import flatten, names_of
from moetrt.parity import compare
from moetrt.quiet import quiet
from moetrt.source import Source, as_source, load_source
from tests.models import contract, families

ROOT = Path(__file__).parents[1]
X = torch.zeros(2, 3)


@pytest.fixture(autouse=True)
def _in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hugging face")
    with quiet():
        families.deepseek_v3().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of its own for each test to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_a_folder_gives_the_saved_model(saved: Path) -> None:
    source = load_source(str(saved))
    assert source.description == "DeepseekV3ForCausalLM"
    assert source.tails_expected == 1
    assert source.input_names == ("input_ids",)
    assert source.output_names == ("logits",)
    inputs = source.make_inputs(3, batch=2, seq=5)
    with torch.no_grad():
        wanted = families.deepseek_v3()(**inputs).logits
        assert torch.equal(source.module(*inputs.values()), wanted)
    assert not source.module.training


@pytest.mark.parametrize("kind", ["folder", "factory"])
@pytest.mark.parametrize("dtype", ["bf16", "float16", torch.bfloat16])
def test_dtype_leaves_what_the_model_keeps_in_float32(saved: Path, kind: str, dtype: str | torch.dtype) -> None:
    text = str(saved) if kind == "folder" else "tests.models.families:deepseek_v3"
    source = load_source(text, dtype=dtype)
    wanted = torch.float16 if dtype == "float16" else torch.bfloat16
    for name, tensor in source.module.module.state_dict().items():
        kept = name.endswith(("gate.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if kept else wanted), name
    # Frequencies rounded to 16 bits would be another rotary embedding.
    assert source.module.module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_without_a_dtype_a_folder_keeps_its_own(folder: Path) -> None:
    with quiet():
        load_source(str(folder), dtype="bf16").module.module.save_pretrained(folder)
    assert load_source(str(folder)).module.module.lm_head.weight.dtype == torch.bfloat16


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_remove("config.json"), "has no config.json; a Hugging Face model folder is taken"),
        (_write("config.json", "{"), "not a valid JSON file"),
        (_write("config.json", "{}"), "Should have a `model_type` key"),
        (_config(model_type="superduper"), "model type `superduper` but Transformers does not recognize this"),
        (_write("config.json", '{"model_type": "vit"}'), "has no causal language model of type 'vit'"),
        (_config(model_type="own", auto_map={"AutoConfig": "own.Own"}), "brings model code of its own, which is not"),
        (_config(num_attention_heads="four"), "'num_attention_heads' expected int, got str"),
        (_config(num_hidden_layers=3), "its weights lack 16 tensors of DeepseekV3ForCausalLM, such as model.layers.2."),
        (_config(hidden_size=128), r"its weights have lm_head.weight as \[96, 64\], .* takes \[96, 128\]"),
        (
            _remove("model.safetensors"),
            "has no weights; model.safetensors is taken, or model.safetensors.index.json with",
        ),
        (_cut_short, "header"),
        (
            _write("config.json", '{"model_type": "llama"}'),
            "^source folder '.*/model': LlamaForCausalLM is a model without MoE; a model with experts is taken$",
        ),
    ],
)
def test_a_folder_that_is_not_taken(
    folder: Path, change: Callable[[Path], None], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    with pytest.raises(MoetrtError, match=line) as caught:
        load_source(str(folder))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/no/such/folder", "source folder '/no/such/folder' does not exist; a Hugging Face folder or 'package.module"),
        ("", "^source was ''; a Hugging Face folder or 'package.module:factory' is taken$"),
        ("x" * 5000, "^source 'x*' cannot be read: File name too long$"),
        ("nothing", "source folder 'nothing' does not exist"),
        ("a b:c", "source was 'a b:c'; a Hugging Face folder or 'package.module:factory' is taken"),
        ("pyproject.toml", "source 'pyproject.toml' is a file; a Hugging Face folder or"),
        ("no_such:x", "source 'no_such:x': there is no module 'no_such' in the current folder or the installation"),
        ("tests.no_such:x", "there is no module 'tests.no_such' in the current folder"),
        ("tests.models.import_fails:x", "importing 'tests.models.import_fails' raised ModuleNotFoundError: No module"),
        ("tests.models.wrong:nothing", "source 'tests.models.wrong:nothing': 'tests.models.wrong' has no 'nothing'"),
        ("tests.models.wrong:NOT_CALLABLE", "is of type int; a function without arguments is taken"),
        ("tests.models.wrong:needs_arguments", "raised TypeError: .* missing 1 required positional argument: 'size'"),
        ("tests.models.wrong:raises", "source 'tests.models.wrong:raises' raised KeyError: 'weights of layer 7'"),
        ("tests.models.wrong:exits", "source 'tests.models.wrong:exits' raised SystemExit: 0"),
        ("tests.models.wrong:exits_when_imported", "exits_when_imported' raised SystemExit: 3"),
        ("tests.models.script:x", "importing 'tests.models.script' raised SystemExit: 3"),
        ("tests.models.wrong:module_exits", "called with its example inputs raised SystemExit: 5"),
        ("tests.models.wrong:number", "gave an object of type int; a Transformers model, a moetrt.source.Source or"),
        ("tests.models.wrong:bare_module", r"gave the module Linear without inputs; \(module, example_inputs\) is"),
        ("tests.models.wrong:no_tensors", "gave example inputs without a tensor"),
        ("tests.models.wrong:inputs_do_not_fit", "called with its example inputs raised RuntimeError: mat1 and mat2"),
        (
            "tests.models.families:llama",
            "^source 'tests.models.families:llama': LlamaForCausalLM is a model without MoE; a model with experts is",
        ),
    ],
)
def test_a_source_that_is_not_taken(text: str, line: str) -> None:
    with pytest.raises(MoetrtError, match=line) as caught:
        load_source(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, 3, b"moetrt.models:deepseek_v3", ["a"]])
def test_a_source_of_another_type_is_named(text: object) -> None:
    with pytest.raises(InputTypeError, match=f"^source was of type {type(text).__name__}; a str or a path is taken$"):
        load_source(text)  # type: ignore[arg-type]


def test_a_source_folder_may_be_a_path(saved: Path) -> None:
    assert load_source(saved).description == "DeepseekV3ForCausalLM"
    with pytest.raises(InputError, match="source folder '/nope' does not exist"):
        load_source(Path("/nope"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"module": "m"}, "the module of a source was of type str; a torch.nn.Module is taken"),
        (
            {"example_inputs": [X]},
            "the example inputs of a source was of type list; a dict of tensors by name is taken",
        ),
        ({"example_inputs": {"x": 3}}, "example input 'x' was of type int; a tensor is taken"),
        ({"example_inputs": {3: X}}, "the name of an example input was of type int; a str is taken"),
        ({"output_names": "output"}, "the output names of a source was of type str; a sequence of names is taken"),
        ({"output_names": (1,)}, "the name of an output was of type int; a str is taken"),
        ({"tails_expected": "3"}, "tails_expected of a source was of type str; an int or None is taken"),
        ({"description": None}, "the description of a source was of type NoneType; a str is taken"),
        ({"random_inputs": 7}, "random_inputs of a source was of type int; a function of seed and sizes, or None,"),
        ({"dynamic_shapes": "x"}, "the dynamic dimensions was of type str; a dict such as "),
        ({"dynamic_shapes": {"x": ["n"]}}, "the dynamic dimensions of input 'x' was of type list; a dict such as "),
        ({"dynamic_shapes": {"x": {0: 3}}}, "the name of dynamic dimension 0 of input 'x' was of type int; a str is"),
        ({"dynamic_shapes": {"x": {"0": "n"}}}, "dynamic dimension '0' of input 'x' was of type str; an int is taken"),
    ],
)
def test_a_part_of_a_source_of_another_type_is_named(changes: dict[str, object], line: str) -> None:
    parts = {"module": torch.nn.Identity(), "example_inputs": {"x": X}} | changes
    with pytest.raises(InputTypeError) as caught:
        Source(**parts)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("source", ["tests.models.contract:front", None, torch.nn.Identity()])
def test_what_takes_a_source_takes_nothing_else(source: object, tmp_path: Path) -> None:
    line = f"the source was of type {type(source).__name__}; a moetrt.source.Source, which load_source and as_source"
    with pytest.raises(InputTypeError, match=line):
        export(source, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=line):
        compare(tmp_path / "mapped.onnx", source)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_factories_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_model_of_mine.py").write_text("from tests.models.contract import front as make\n")
    with pytest.raises(InputError, match="there is no module 'a_model_of_mine'"):
        load_source("a_model_of_mine:make")
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    assert load_source("a_model_of_mine:make").description == "Front"


@pytest.mark.parametrize("dtype", ["int8", "double", torch.int32])
def test_another_dtype_is_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(InputError, match=r"the dtype was .*; one of bf16, bfloat16, fp16, float16, fp32, float32"):
        load_source("tests.models.families:llama", dtype=dtype)


def test_experts_without_an_interface_are_named() -> None:
    model = families.llama()
    model.config.num_experts = 8
    with pytest.raises(InputError, match="the experts of LlamaForCausalLM take no experts implementation"):
        as_source(model)


def test_a_model_without_logits_is_named() -> None:
    with pytest.raises(InputError, match="Qwen3MoeModel gives no logits; a causal language model or"):
        as_source(models.qwen3_moe().model)


def test_a_source_is_taken_as_it_is() -> None:
    source = as_source(contract.front())
    assert as_source(source) is source
    with pytest.raises(InputTypeError, match=r"^the model gave an object of type str; "):
        as_source("model")


def test_inputs_are_the_same_for_the_same_seed_and_in_range() -> None:
    source = as_source(contract.front())
    one, same, other = source.make_inputs(1), source.make_inputs(1), source.make_inputs(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["residual"], other["residual"])
    assert list(one) == list(source.input_names)
    index = source.make_inputs(3, tokens=500)["expanded_idx_to_permuted_idx"]
    assert index.shape == (500, 3)
    assert index.dtype == torch.int32
    assert int(index.min()) == -1
    assert int(index.max()) < contract.ROWS
    tokens = as_source(models.qwen3_moe()).make_inputs(0, batch=4, seq=100)["input_ids"]
    assert tokens.shape == (4, 100)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 96


def test_half_precision_inputs_are_the_rounded_float32_ones() -> None:
    wide = load_source("tests.models.contract:front").make_inputs(1)
    half = load_source("tests.models.contract:front", dtype="bf16").make_inputs(1)
    # The examples' mean and deviation differ by their own rounding.
    assert torch.allclose(half["residual"].float(), wide["residual"], rtol=2e-2, atol=2e-2)


def test_sizes_that_are_not_taken() -> None:
    source = as_source(contract.front())
    with pytest.raises(InputError, match="'batch' is not a dynamic size of Front; there are rows, tokens"):
        source.make_inputs(0, batch=2)
    with pytest.raises(InputError, match="the size 'tokens' was 0; at least 1 is taken"):
        source.make_inputs(0, tokens=0)
    with pytest.raises(InputError, match="there are none: every dimension is fixed"):
        as_source(contract.producer()).make_inputs(0, tokens=2)
    with pytest.raises(InputTypeError, match="the size 'tokens' was of type float; a whole number is taken"):
        source.make_inputs(0, tokens=2.0)  # type: ignore[arg-type]
    # More than any memory, and more than torch can count.
    for size in (10**17, 10**30):
        with pytest.raises(InputError, match=f"^inputs of Front with seed=0, .*tokens={size}.* cannot be made: "):
            source.make_inputs(0, tokens=size)


@pytest.mark.parametrize("shapes", ["residual:9x32", {"residual": 9}, {"residual": "9x32"}])
def test_case32_shapes_of_another_type_are_named(shapes: Any) -> None:
    with pytest.raises(InputTypeError, match=r"^the shapes? .*was of type (str|int); a .* is taken$"):
        as_source(contract.front()).sizes_of(shapes)


def test_seeds_that_are_not_taken() -> None:
    source = as_source(contract.front())
    assert source.make_inputs(-(2**63)).keys() == source.make_inputs(2**64 - 1).keys()
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(InputError, match=f"the seed was {seed}; -9223372036854775808 to 18446744073709551615 is"):
            source.make_inputs(seed)
    with pytest.raises(InputTypeError, match="the seed was of type str; a whole number is taken"):
        source.make_inputs("0")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyError("tokens"), SystemExit(0)])
def test_random_inputs_that_raise_are_named(error: BaseException) -> None:
    def fails(seed: int, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        raise error

    source = Source(torch.nn.Identity(), {"x": X}, random_inputs=fails, description="Mine")
    with pytest.raises(InputError, match=f"^inputs of Mine with seed=4 cannot be made: {type(error).__name__}: "):
        source.make_inputs(4)


def test_case32_sizes_of_shapes() -> None:
    source = as_source(contract.front())
    assert source.sizes_of({"residual": (9, 32), "gemm2_permuted": (40, 32)}) == {"tokens": 9, "rows": 40}
    for shapes, line in (
        ({"residuals": (9, 32)}, "there is no input 'residuals'; there are gemm2_permuted, expert_weights, "),
        ({"residual": (9,)}, "input 'residual' was given 1 dimensions; 2 are taken"),
        ({"residual": (9, 64)}, "dimension 1 of input 'residual' was 64; it is fixed at 32"),
        ({"residual": (9, 32), "expert_weights": (8, 3)}, "was 8, but 'tokens' is 9 already"),
    ):
        with pytest.raises(InputError, match=line):
            source.sizes_of(shapes)


def test_nested_containers_come_back_as_they_were() -> None:
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    value = {"x": [a, (b, None)], "y": contract.ForeignOutput(c, contract.ForeignUnfinalized(a, b, c), 2.0)}
    leaves, rebuild = flatten(value)
    assert [".".join(path) for path, _ in leaves] == [
        "x.0",
        "x.1.0",
        "y.shared_output",
        "y.routed.gemm2_permuted",
        "y.routed.expert_weights",
        "y.routed.expanded_idx_to_permuted_idx",
    ]
    again = rebuild([tensor for _, tensor in leaves])
    assert again["x"][0] is a
    assert again["x"][1] == (b, None)
    assert type(again["y"]) is contract.ForeignOutput
    assert again["y"].routed.gemm2_permuted is a
    assert again["y"].routed_scaling_factor == 2.0


def test_names_are_unique_identifiers() -> None:
    assert names_of([("a", "rows"), ("b", "rows"), ("c",)]) == ("a_rows", "b_rows", "c")
    assert names_of([("0",), ("1",)], "output") == ("output_0", "output_1")
    assert names_of([()], "output") == ("output",)


def test_the_module_of_a_source_takes_its_inputs_in_order() -> None:
    module, inputs, _ = contract.front()
    source: Source = as_source((module, inputs))
    norm, hidden = source.module(*source.example_inputs.values())
    wanted = module(**inputs)
    assert torch.equal(norm, wanted[0])
    assert torch.equal(hidden, wanted[1])


def test_case_55_what_a_module_keeps_of_its_first_call_is_forgotten() -> None:
    """Loading calls it: a length that it keeps would be the example's, for PyTorch's runs too."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.first is None:
                self.first, self.added = x.shape[0], 1
            return x * self.first

    module = Keeps().eval()
    source = as_source((module, {"x": torch.ones(6, 4)}, {"x": {0: "tokens"}}))
    assert module.first is None
    assert not hasattr(module, "added")
    assert torch.equal(source.module(torch.ones(2, 4))[0], torch.full((2, 4), 2.0))
