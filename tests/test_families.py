"""The MoE families: each goes through all steps as its config says, the page has what came out, and a row can fail."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from moetrt import cli, families, mapping, models
from moetrt.families import Family, Variant, family_names, layer_counts, run_families, run_family
from moetrt.families_page import page, table_lines
from moetrt.mapping_report import MappingReport
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import operator_of

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
NAME = "qwen3_moe"


@pytest.fixture(scope="session")
def rows() -> dict[str, Family]:
    """Every family in a dtype of 16 bits by turns, every third in float32 too; `make families` runs all in all.

    In float32 more of them are in tests/test_lengths.py, test_capture_models.py and test_mapping_foreign_models.py.
    """
    names = family_names()
    both = [NAME, *names[::3]]
    others = [name for name in names if name not in both]
    done = [*run_families(both, dtypes=("fp32", "bf16"), jobs=families.default_jobs())]
    done += [*run_families(others[::2], dtypes=("fp16",)), *run_families(others[1::2], dtypes=("bf16",))]
    return {row.name: row for row in done}


@pytest.fixture(scope="session")
def good(rows: dict[str, Family]) -> Family:
    """One row, as it should be, in float32."""
    return dataclasses.replace(rows[NAME], variants={"fp32": rows[NAME].variants["fp32"]})


@pytest.mark.parametrize("name", family_names())
def test_a_family_goes_through_all_steps(rows: dict[str, Family], name: str) -> None:
    row = rows[name]
    assert row.problems() == []
    assert row.ok
    assert set(row.variants) & {"bf16", "fp16"}


def test_the_page_has_what_came_out(rows: dict[str, Family]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(list(rows.values())), "run `make families`"


def test_a_changed_cell_makes_the_page_stale(good: Family) -> None:
    other = dataclasses.replace(good, moe_layers=3)
    assert table_lines([good])[-1] != table_lines([other])[-1]
    assert page([good]) != page([other])


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("deepseek_v3", (4, 3)),  # first_k_dense_replace 1
        ("afmoe", (3, 2)),  # num_dense_layers 1
        ("llama4", (4, 2)),  # interleave_moe_layer_step 2
        ("qwen3_moe_sparse", (4, 2)),  # decoder_sparse_step 2
        ("mixtral", (2, 2)),
        ("dbrx", (2, 2)),  # n_layers
    ],
)
def test_layers_are_counted_by_the_config(name: str, counts: tuple[int, int]) -> None:
    assert layer_counts(getattr(models, name)().config) == counts


def test_layers_that_a_config_leaves_out_are_not_counted() -> None:
    config = models.qwen3_moe().config
    config.num_hidden_layers, config.mlp_only_layers = 6, [0, 4]
    assert layer_counts(config) == (6, 4)


@pytest.mark.parametrize("name", family_names())
def test_no_weight_of_a_family_is_left_even(name: str) -> None:
    """Norm weights, correction biases and the like tell one layer from another, and 1 + w from w."""
    model = getattr(models, name)()
    module = model if isinstance(model, torch.nn.Module) else model.module
    for path, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.min() < tensor.max(), path


def changed(row: Family, **changes: object) -> Family:
    return dataclasses.replace(row, variants={"fp32": dataclasses.replace(row.variants["fp32"], **changes)})


def one_site_without_its_norm(variant: Variant) -> dict[str, object]:
    first, *others = variant.sites
    return {"sites": (dataclasses.replace(first, matched=False, operator="MoEFinalizeAdd", reason="no norm"), *others)}


def all_sites_without_their_norm(variant: Variant) -> dict[str, object]:
    declined = {"matched": False, "operator": "MoEFinalizeAdd", "reason": "no norm"}
    return {"sites": tuple(dataclasses.replace(site, **declined) for site in variant.sites)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: dataclasses.replace(row, moe_layers=3), "2 tails found, for 3 MoE layers"),
        (lambda row: dataclasses.replace(row, moe_layers=1), "1 MoE layers; a family is tried with 2 or more"),
        (lambda row: dataclasses.replace(row, new_experts=(4, 0)), "hit [4, 0] experts that the example missed"),
        (lambda row: dataclasses.replace(row, new_experts=()), "hit [] experts that the example missed"),
        (
            lambda row: dataclasses.replace(row, other_norm="LayerNorm"),
            "became MoEFinalizeAddRMSNorm; the model has LayerNorm",
        ),
        (
            lambda row: dataclasses.replace(
                changed(row, **all_sites_without_their_norm(row.variants["fp32"])), other_norm="sandwich norm"
            ),
            "declined its norm without naming sandwich norm: no norm",
        ),
        (lambda row: dataclasses.replace(row, error="fp16: no translation"), "fp16: no translation"),
        (lambda row: changed(row, sites=row.variants["fp32"].sites[1:]), "fp32: 1 tails found, for 2 MoE layers"),
        (
            lambda row: changed(row, **one_site_without_its_norm(row.variants["fp32"])),
            "MoEFinalizeAdd without its norm",
        ),
        (lambda row: changed(row, parity=row.variants["fp32"].parity[1:]), "compared on 1 shapes; 2 are wanted"),
        (lambda row: changed(row, excess=("logits: too much",)), "fp32: logits: too much"),
        (lambda row: changed(row, plugin_layers=1), "1 plugin layers, for 2 MoE layers"),
        (lambda row: changed(row, native_plugin_layers=2), "2 plugin layers in the engine without the plugin"),
    ],
)
def test_a_row_that_is_not_as_it_should_be_fails(good: Family, change: Callable[[Family], Family], said: str) -> None:
    assert good.ok
    row = change(good)
    assert not row.ok
    assert said in "; ".join(row.problems())


def leave_out_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    map_node, left_out = mapping._Mapper.map_node, []

    def skip_first(self: mapping._Mapper, node: ir.Node) -> None:
        if operator_of(node) and not left_out:
            left_out.append(node)
        else:
            map_node(self, node)

    monkeypatch.setattr(mapping._Mapper, "map_node", skip_first)


def double_a_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    def map_wrongly(model_path: Path, mapped: Path) -> MappingReport:
        report = mapping.map_file(model_path, mapped)
        model = load_model(mapped)
        next(node for node in model.graph if operator_of(node)).attributes.add(ir.AttrFloat32("residual_scale", 2.0))
        save_model(model, mapped)
        return report

    monkeypatch.setattr(families, "map_file", map_wrongly)


def count_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "layer_counts", lambda _: (3, 3))


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (leave_out_a_tail, "1 tails found, for 2 MoE layers"),
        (double_a_residual, "ONNX Runtime and PyTorch differ: DIFFERS: logits"),
        (count_another_layer, "2 tails mapped, for 3 MoE layers"),
    ],
)
def test_what_is_wrong_fails_the_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    plant: Callable[[pytest.MonkeyPatch], None],
    said: str,
) -> None:
    plant(monkeypatch)
    report = tmp_path / "rows.json"
    assert cli.run(["families", NAME, "--dtype", "fp32", "--json", str(report)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"moetrt: error: not as they should be: {NAME}\n"
    assert f"FAILED {NAME}" in captured.out
    assert said in captured.out
    (row,) = json.loads(report.read_text())
    assert row["ok"] is False
    assert said in "; ".join(row["problems"])


def test_a_step_that_refuses_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise families.InputError("no translation for aten::x")

    monkeypatch.setattr(families, "export", refused)
    row = run_family(NAME, dtypes=("bf16",))
    assert row.problems() == ["bf16: no translation for aten::x"]


def test_experts_that_the_example_hits_are_not_new() -> None:
    source = families.load_source(f"moetrt.models:{NAME}")
    wide = dataclasses.replace(source, example_inputs=source.make_inputs(1, batch=2, seq=70))
    assert families._said_by_the_model(NAME, wide).new_experts == (0, 0)
    assert families._said_by_the_model(NAME, families._narrowed(source)).new_experts == (6, 6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["gpt5"], "there is no family 'gpt5'; there are"),
        (["--dtype", "int8"], "the dtype was 'int8'; fp32, bf16, fp16 are taken"),
        (["-j", "0"], "the jobs were 0; 1 or more is taken"),
        ([NAME, "--page", "families.md"], "--page was given with families or dtypes"),
        (["--json", "."], "'.' is a folder"),
    ],
)
def test_what_the_command_does_not_take(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["families", *words]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
