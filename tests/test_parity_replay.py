"""Inputs of a comparison: drawn as the contract has them, kept, and replayed by moetrt, Polygraphy and trtexec."""

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moetrt import cli
from moetrt.capture import export
from moetrt.contract import MoEOutput, UnfinalizedMoEOutput
from moetrt.errors import InputError
from moetrt.functional import finalize_add_rms_norm
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model
from moetrt.parity import compare
from moetrt.parity.replay import draw_inputs, load_inputs, save_inputs, save_raw, trtexec_argument
from moetrt.source import Source
from tests.conftest import BLOCK

TOKENS, TOP_K, ROWS, HIDDEN = 40, 3, 160, 16
MAP = "expanded_idx_to_permuted_idx"


class Tail(nn.Module):
    """A contract-level module: the experts' rows and the map come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(HIDDEN))

    def forward(
        self, rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        moe = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), None, 1.0)
        return finalize_add_rms_norm(moe, residual, self.gamma)


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    torch.manual_seed(0)
    example = {
        "rows": torch.randn(8, HIDDEN),
        "weights": torch.rand(2, TOP_K),
        "index": torch.arange(2 * TOP_K, dtype=torch.int32).view(2, TOP_K),
        "residual": torch.randn(2, HIDDEN),
    }
    dynamic = {"rows": {0: "rows"}} | {name: {0: "tokens"} for name in ("weights", "index", "residual")}
    source = Source(Tail(), example, dynamic, ("norm", "hidden"), tails_expected=1, description="Tail")
    folder = tmp_path_factory.mktemp("contract")
    map_file(export(source, folder).model_path, folder / "mapped.onnx")
    return source, folder / "mapped.onnx"


def test_a_map_that_comes_from_outside_has_absent_routes_repeats_and_padding(contract: tuple[Source, Path]) -> None:
    source, path = contract
    model = load_model(path)
    feed = draw_inputs(model, source, 3, {"tokens": TOKENS, "rows": ROWS})
    index, rows = feed["index"], feed["rows"]
    assert index.dtype == torch.int32
    assert index.min() == -1
    assert index.max() < ROWS
    named = index[index >= 0]
    assert 0 < int((index == -1).sum()) < index.numel() / 2
    assert len(named.unique()) < len(named)  # some row is two routes'
    padding = torch.ones(ROWS, dtype=torch.bool)
    padding[named.long()] = False
    assert padding.any()
    assert rows[padding].isnan().all()
    assert rows[~padding].isfinite().all()
    again = draw_inputs(model, source, 3, {"tokens": TOKENS, "rows": ROWS})
    assert all(torch.equal(feed[name].nan_to_num(7), again[name].nan_to_num(7)) for name in feed)
    assert not torch.equal(draw_inputs(model, source, 4, {"tokens": TOKENS, "rows": ROWS})["index"], index)
    report = compare(path, source, seed=3, sizes={"tokens": TOKENS, "rows": ROWS})
    assert report.passed, "\n".join(report.lines())
    assert all(output.nan == output.inf == 0 for output in report.outputs)


def test_fewer_rows_than_routes_are_repeated(contract: tuple[Source, Path]) -> None:
    source, path = contract
    report = compare(path, source, sizes={"tokens": TOKENS, "rows": 5})
    assert report.passed, "\n".join(report.lines())


FEEDS = {
    "float32": {"x": torch.randn(3, 4), "ids": torch.arange(6).view(2, 3), "flag": torch.tensor([True, False])},
    "bfloat16": {"x": torch.randn(3, 4).bfloat16(), "map": torch.tensor([[-1, 2]], dtype=torch.int32)},
    "float16": {"x": torch.tensor([1.0, float("nan"), 6e-8]).half(), "none": torch.zeros(0, 4)},
}


@pytest.mark.parametrize("name", FEEDS)
def test_inputs_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    feed = FEEDS[name]
    again = load_inputs(save_inputs(feed, tmp_path / "inputs.json"))
    assert list(again) == list(feed)
    for key, tensor in feed.items():
        assert again[key].dtype == tensor.dtype
        assert again[key].shape == tensor.shape
        assert bits(again[key]) == bits(tensor)


def test_polygraphy_reads_bfloat16_as_such(tmp_path: Path) -> None:
    path = save_inputs(FEEDS["bfloat16"], tmp_path / "inputs.json")
    said = polygraphy("inspect", "data", path)
    assert "x [dtype=bfloat16, shape=(3, 4)]" in said
    assert "map [dtype=int32, shape=(1, 2)]" in said


def polygraphy(*words: object) -> str:
    command = [sys.executable, str(Path(sys.executable).with_name("polygraphy")), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_raw_files_hold_the_numbers_and_nothing_else(tmp_path: Path) -> None:
    feed = {"scope/x:0": torch.randn(3, 4).bfloat16(), "ids": torch.arange(6).view(2, 3)}
    paths = save_raw(feed, tmp_path / "raw")
    assert {name: path.name for name, path in paths.items()} == {"scope/x:0": "scope_x_0.bin", "ids": "ids.bin"}
    assert paths["scope/x:0"].read_bytes() == bits(feed["scope/x:0"])
    assert np.array_equal(np.fromfile(paths["ids"], np.int64).reshape(2, 3), feed["ids"].numpy())
    folder = tmp_path / "raw"
    # As the shell takes it, so that the quotes reach trtexec.
    assert shlex.split(trtexec_argument(paths)) == [
        f"--loadInputs='scope/x:0':{folder}/scope_x_0.bin,ids:{folder}/ids.bin"
    ]
    with_blank = save_raw({"ids": torch.ones(1)}, tmp_path / "a b")
    assert shlex.split(trtexec_argument(with_blank)) == [f"--loadInputs=ids:{tmp_path}/a b/ids.bin"]
    with pytest.raises(InputError, match=r"^inputs 'a:b' and another would both be written to '.*a_b\.bin'$"):
        save_raw({"a/b": torch.ones(1), "a:b": torch.ones(1)}, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [
        ("a,b", "raw", "input 'a,b' has a comma or a quote in its name"),
        ("x", "r,aw", "of input 'x' has a comma or a quote in its path"),
        ("x", "it's", "of input 'x' has a comma or a quote in its path"),
    ],
)
def test_raw_files_that_trtexec_could_not_name_are_not_written(
    name: str, folder: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        save_raw({name: torch.ones(1)}, tmp_path / folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "not json", '{"x": 1}', "[]", '[{"x": 1}]', "[3]"])
def test_a_file_without_inputs_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_inputs(path)
    assert str(caught.value).startswith(f"inputs file '{path}'")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"^inputs file '.*none.json' does not exist$"):
        load_inputs(tmp_path / "none.json")


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.run([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_kept_inputs_are_replayed_by_compare_and_by_polygraphy(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, folder, report = tmp_path / "inputs.json", tmp_path / "raw", tmp_path / "parity.json"
    common = ["compare", mapped_block, "--against", BLOCK]
    first = said(capsys, *common, "--seed", 7, "--shapes", "x:9x64", "residual:9x64", "--save-inputs", inputs,
                 "--save-inputs-raw", folder, "--json", report)  # fmt: skip
    assert f"inputs: {inputs}" in first
    assert f"inputs: --loadInputs=x:{folder}/x.bin,residual:{folder}/residual.bin" in first
    assert f"report: {report}" in first
    assert '"command": "moetrt compare ' in report.read_text()
    second = said(capsys, *common, "--load-inputs", inputs)
    assert "inputs as given: x [9x64], residual [9x64]" in second
    figures = [line for line in first.splitlines() if "error against float64" in line]
    assert figures == [line for line in second.splitlines() if "error against float64" in line]
    said_by_polygraphy = polygraphy("run", mapped_block, "--onnxrt", "--load-inputs", inputs)
    assert "norm_out [dtype=float32, shape=(9, 64)]" in said_by_polygraphy


def test_options_that_contradict_each_other_are_refused(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["compare", str(mapped_block), "--against", BLOCK]
    for words, line in (
        (["--load-inputs", "a.json", "--shapes", "x:9x64"],
         "--load-inputs and --shapes were both given; one of them is taken"),
        (["--json", str(mapped_block)], f"report '{mapped_block}' is the ONNX model itself; another name is taken"),
        (["--json", str(tmp_path / "a"), "--save-inputs", str(tmp_path / "a")],
         f"inputs file '{tmp_path / 'a'}' is the report itself; another name is taken"),
        (["--unmapped", str(tmp_path / "none.onnx")], f"file before mapping '{tmp_path / 'none.onnx'}' does not exist"),
    ):  # fmt: skip
        assert cli.run([*common, *words]) == 2
        assert capsys.readouterr().err == f"moetrt: error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_loaded_inputs_of_another_model_are_refused(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for feed, part in (
        ({"y": torch.ones(2)}, "has the inputs x, residual; inputs file '{}' has y"),
        ({"x": torch.ones(3, 64).half(), "residual": torch.ones(3, 64)}, "is float, of inputs file '{}' float16"),
        ({"x": torch.ones(3, 65), "residual": torch.ones(3, 64)}, "is ?x64, of inputs file '{}' 3x65"),
    ):
        path = save_inputs(feed, tmp_path / "inputs.json")
        assert cli.run(["compare", str(mapped_block), "--against", BLOCK, "--load-inputs", str(path)]) == 2
        assert part.format(path) in capsys.readouterr().err
