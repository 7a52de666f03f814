"""`moetrt demo` does the main job, and ends non-zero where a step fell short."""

import dataclasses
import json
import re
from pathlib import Path

import onnx
import pytest

from moetrt import cli, demo
from moetrt.console import Output
from moetrt.engine import read_sidecar
from tests.documents import ROOT
from tests.engine_strings import check_every_layer, engine_strings


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoResult:
    return demo.run_demo(Output(quiet=True), tmp_path_factory.mktemp("demo") / "out")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `moetrt demo` as if its steps had given a result; returns the exit code and what was printed."""

    def run(result: demo.DemoResult) -> tuple[int, str, str]:
        monkeypatch.setattr(demo, "run_demo", lambda *_, **__: result)
        code = cli.run(["demo"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_three_tails_are_found_expected_and_mapped(result: demo.DemoResult) -> None:
    assert (result.report.found, result.report.expected, result.report.mapped) == (3, 3, 3)
    assert {site.operator for site in result.report.sites} == {"MoEFinalizeAddRMSNorm"}
    # Routed scaling 2.5 is folded into the weights by this architecture's router, so the node must not scale again.
    assert {site.attributes["routed_scaling_factor"] for site in result.report.sites} == {1.0}


def test_tensorrt_has_the_plugin_layers_by_name(result: demo.DemoResult) -> None:
    names = {site.name for site in result.report.sites}
    assert set(result.engine.plugin_layers) == names
    assert result.baseline.plugin_layers == ()
    assert read_sidecar(result.engine.path)["plugin_layers"] == list(result.engine.plugin_layers)


@pytest.mark.parametrize("way", ["plugin", "baseline"])
def test_case_49_every_layer_is_its_own_nodes(result: demo.DemoResult, way: str) -> None:
    """TensorRT puts a unit separator between the nodes of a fusion, and a record separator between fusions."""
    texts = engine_strings(result.folder / f"{way}.engine")
    assert len(texts) > 100
    assert check_every_layer(texts, result.folder / "mapped.onnx", plugin=way == "plugin") == {"\x1e", "\x1f"}


def test_the_files_are_where_the_summary_says(result: demo.DemoResult) -> None:
    files = {path.name for path in result.folder.iterdir()}
    named = {"model.onnx", "model.onnx.data", "mapped.onnx", "mapping.json", "plugin.engine", "baseline.engine"}
    report = {"parity.json", "report.html", "report.json", "report.md"}
    assert files == named | report | {"model.onnx.json", "plugin.engine.json", "baseline.engine.json"}
    assert json.loads((result.folder / "mapping.json").read_text())["mapped"] == 3
    onnx.checker.check_model(result.folder / "mapped.onnx", full_check=True)


def test_the_readme_shows_the_tail_as_the_report_does(result: demo.DemoResult) -> None:
    shown, said = (
        re.search(r"^    before   (.*)\n    after    (.*)$", text.read_text(encoding="utf-8"), re.MULTILINE)
        for text in (ROOT / "README.md", result.folder / "report.md")
    )
    assert shown is not None
    assert said is not None
    assert shown.groups() == said.groups()


def test_the_summary_is_one_page_and_has_the_figures(result: demo.DemoResult, run) -> None:
    code, out, err = run(result)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 47
    assert "3 / 3 / 3" in out
    assert "moetrt bench " in out
    assert "SHORT" not in out


def test_a_tail_that_was_not_mapped_is_short(result: demo.DemoResult, run) -> None:
    sites = [dataclasses.replace(result.report.sites[0], matched=False, reason="no norm"), *result.report.sites[1:]]
    code, out, err = run(dataclasses.replace(result, report=dataclasses.replace(result.report, sites=sites)))
    assert code == 1
    assert "3 / 3 / 2" in out
    assert err == "moetrt: error: the demo fell short in: tails found / expected / mapped\n"


def test_an_output_that_differs_is_short(result: demo.DemoResult, run) -> None:
    outputs = (dataclasses.replace(result.parity.outputs[0], passed=False),)
    code, out, err = run(dataclasses.replace(result, parity=dataclasses.replace(result.parity, outputs=outputs)))
    assert code == 1
    assert "SHORT" in out
    assert "ONNX Runtime's error" in err


def test_missing_and_unwanted_plugin_layers_are_short(result: demo.DemoResult, run) -> None:
    code, _, err = run(dataclasses.replace(result, engine=result.baseline, baseline=result.engine))
    assert code == 1
    assert "with the plugin" in err
    assert "without it" in err


def test_the_folder_is_made_and_the_default_is_under_out(tmp_path: Path) -> None:
    with cli.demo_command.make_context("demo", []) as context:
        assert context.params["output"] == "out/demo"
