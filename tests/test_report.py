"""`moetrt report` makes one page of what the commands left: the same facts as HTML, JSON and Markdown."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest

from moetrt import cli
from moetrt.errors import InputError
from moetrt.report import make_report
from moetrt.report.facts import BAD, GOOD, MEASURED, MISSING
from moetrt.report.files import find_files
from moetrt.report.pages import html, json_text, markdown, write_report
from tests.test_bench import DEVICE, Planted, here, tail_name

SOURCE = "tests.models.families:deepseek_v3"
"""A dense layer and a MoE layer with a shared expert."""

POINT = "input_ids:2x8"
EXPORTED = "model.onnx.json"
FILES = ("mapping.json", "parity.json", "plugin.engine.json", "baseline.engine.json", "bench.json", EXPORTED)

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def commands_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command ran on a small DeepSeek-V3, bench with a stand-in for trtexec."""
    folder = tmp_path_factory.mktemp("report") / "model"

    def run(*words: object) -> None:
        assert cli.run([str(word) for word in words]) == 0

    run("export", SOURCE, "-o", folder)
    run("map", folder / "model.onnx", "-o", folder / "mapped.onnx", "--report", folder / "mapping.json")
    run("compare", folder / "mapped.onnx", "--against", SOURCE, "--json", folder / "parity.json")
    run("build", folder / "mapped.onnx", "-o", folder / "plugin.engine")
    run("build", folder / "mapped.onnx", "-o", folder / "baseline.engine", "--no-plugin")
    with pytest.MonkeyPatch.context() as monkeypatch:
        here(Planted(folder.parent / "tool", tail_name(folder / "mapped.onnx")), monkeypatch)
        run(
            "bench",
            folder / "mapped.onnx",
            "-o",
            folder,
            "--repeats",
            "3",
            "--bandwidth",
            "4.8",
            "--point",
            POINT,
        )
    assert (folder / "report.html").is_file(), "bench ends with the page of its folder"
    return folder


@pytest.fixture
def folder(commands_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    copy = tmp_path / "model"
    shutil.copytree(commands_run, copy, ignore=shutil.ignore_patterns("report.*", "*.engine", "libmoetrt*"))
    return copy


def changed(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def only(folder: Path, *names: str) -> Path:
    """``folder`` with these of our JSON files alone."""
    for name in set(FILES) - set(names):
        (folder / name).unlink()
    return folder


class Page(HTMLParser):
    """A page's elements, and its text by the id of the section that it is in ("" before the first)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {"": ""}
        self._section, self._style = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = str(dict(attrs)["id"])
            self.text[self._section] = ""
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.text[self._section] += data

    @property
    def whole(self) -> str:
        return " ".join(" ".join(self.text.values()).split())


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """The line with which `moetrt report` refuses; no page is there afterwards, nor a part of one."""
    before = sorted(os.listdir(folder)) if folder.is_dir() else None
    capsys.readouterr()
    assert cli.run(["report", str(folder), *map(str, options)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, lines
    assert before == (sorted(os.listdir(folder)) if folder.is_dir() else None)
    return lines[0]


# ------------------------------------------------------------------------------------------------------------ the facts


def test_every_figure_of_the_files_is_in_all_three(folder: Path) -> None:
    report = make_report(folder)
    texts = [Page(html(report)).whole, " ".join(markdown(report).replace("\\", "").split()), json_text(report)]
    mapping, parity, bench = (json.loads((folder / name).read_text()) for name in FILES[:2] + FILES[4:5])
    for content in (json.loads((folder / name).read_text()) for name in FILES):
        said = [content["command"], *content["versions"].values(), content["format"]]
        for text in texts:
            assert all(json.dumps(word)[1:-1] in text or word in text for word in said)
    hashes = [
        hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (*FILES, "mapped.onnx", "model.onnx")
    ]
    assert all(value in text for value in hashes for text in texts)
    for site in mapping["sites"]:
        assert all(site["name"] in text for text in texts)
    figures = [
        f"{value:.2e}"
        for output in parity["outputs"]
        for value in (
            output["rms"],
            output["worst"],
            *output["pytorch"].values(),
            *output["tolerance"].values(),
        )
        if value
    ]
    assert len(figures) > 20
    # PyTorch's worst error alone is not shown: the worst element has its value.
    shown = [f for f in figures if f not in {f"{output['pytorch']['worst']:.2e}" for output in parity["outputs"]}]
    for text in texts[:2]:
        assert [figure for figure in shown if figure not in text] == []
        (point,) = bench["points"]
        for what in ("end_to_end", "all_tails"):
            for way in ("plugin_ms", "native_ms"):
                assert f"{point[what][way]['low']['median'] * 1e3:.1f}" in text
        assert DEVICE in text
    facts = json.loads(texts[2], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert facts["format"] == "moetrt.report/1"
    assert [output["rms"] for output in facts["parity"][0]["outputs"]] == [o["rms"] for o in parity["outputs"]]


def test_the_verdicts_come_first_and_are_the_files_own(folder: Path) -> None:
    report = make_report(folder)
    assert [(verdict.what, verdict.state) for verdict in report.verdicts] == [
        ("Mapping", GOOD),
        ("Parity", GOOD),
        ("Engines", GOOD),
        ("Benchmarks", MEASURED),
    ]
    # The stand-in's planted times: 1.0 and 0.5 ms end to end, 0.4 and 0.2 in the tail.
    assert "2.00 times the plugin's time end to end and 2.00 times in the tails" in report.verdicts[3].text
    assert report.passed
    page = Page(html(report))
    assert all(verdict.text in page.text[""] for verdict in report.verdicts)


def test_what_fell_short_is_said_first(folder: Path) -> None:
    def fail(content: dict[str, Any]) -> None:
        content["passed"], content["cause"] = False, "shared_output is 2 times what it should be"
        content["outputs"][0] |= {"passed": False, "worst": None, "rms": None, "ratio": None, "nan": 7}
        content["outputs"][0]["worst_element"] |= {"index": [], "runner": None}
        content["tails"][0] |= {"passed": False, "cause": "shared_output twice"}

    changed(folder / "parity.json", fail)
    changed(
        folder / "mapping.json", lambda c: c.update(complete=False, mapped=0) or c["sites"][0].update(matched=False)
    )
    changed(folder / "plugin.engine.json", lambda content: content.update(plugin_layers=[]))
    report = make_report(folder)
    assert [verdict.state for verdict in report.verdicts] == [BAD, BAD, BAD, MEASURED]
    assert not report.passed
    for text in (Page(html(report)).whole, markdown(report).replace("\\", "")):
        assert "Not every check passed" in text
        assert "shared_output is 2 times what it should be" in text
        assert "shared_output twice" in text
        assert "not finite" in text
        assert "7 / 0" in text
        assert "finalize only" in text


def test_the_picture_has_the_nodes_that_the_mapped_file_lost(folder: Path) -> None:
    """One tail: what the source has and the mapped file has not is that tail, whoever asks."""
    source, mapped = (
        onnx.load(folder / name, load_external_data=False).graph for name in ("model.onnx", "mapped.onnx")
    )
    kept = {(node.op_type, *node.output) for node in mapped.node}
    lost = [node.op_type for node in source.node if (node.op_type, *node.output) not in kept]
    mapping = make_report(folder).mapping
    assert mapping is not None
    picture = mapping.picture
    assert picture is not None
    assert [node.op_type for node in picture.nodes] == lost
    # The finalize, the shared expert and the residual added, and the norm.
    assert lost[0] == "MoEFinalizeAdd"
    assert [lost.count(op_type) for op_type in ("Reshape", "Add", "ReduceMean", "Mul")] == [1, 3, 1, 2]
    page = html(make_report(folder))
    drawn = page[page.index("Before mapping") : page.index("After mapping")]
    for node in picture.nodes:
        assert f"</title>{node.op_type}</text>" in drawn
    for operand in (*picture.site.inputs, *picture.site.outputs):
        assert f"{operand.name}: {operand.described}" in page[page.index("After mapping") :]


@pytest.mark.parametrize("lost", ["model.onnx", "mapped.onnx"])
def test_a_model_that_is_gone_is_said_and_the_rest_stays(folder: Path, lost: str) -> None:
    (folder / lost).unlink()
    report = make_report(folder)
    assert report.mapping is not None
    assert report.mapping.picture is None
    assert "is not there any more, so there is no picture" in Page(html(report)).text["mapping"]
    assert "is not there any more, so there is no picture" in markdown(report)
    assert report.verdicts[0].state == GOOD


def test_a_source_that_was_exported_again_gives_no_picture(folder: Path) -> None:
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\x72\x00")
    assert "another one than was mapped" in Page(html(make_report(folder))).text["mapping"]


@pytest.mark.parametrize(
    ("kept", "section", "what", "words"),
    [
        (FILES[1:], "mapping", "mapping report", "moetrt map"),
        (("mapping.json",), "parity", "comparison", "moetrt compare"),
        (("mapping.json",), "benchmarks", "benchmark", "moetrt bench"),
        (("mapping.json",), "engines", "engine", "moetrt build"),
    ],
)
def test_a_part_that_is_missing_is_one_sentence_and_its_command(
    folder: Path, kept: tuple[str, ...], section: str, what: str, words: str
) -> None:
    report = make_report(only(folder, *kept))
    page = html(report)
    text = Page(page).text[section]
    assert f"There is no {what} here. This makes one:" in text
    assert f"There is no {what} here. This makes one:" in markdown(report)
    part = page[page.index(f'id="{section}"') :]
    assert not re.search(r"<svg|<table", part[: part.index("</section>")])
    (command,) = [part.command for part in report.missing if part.what == what]
    assert command.startswith(words)
    assert command in text
    program, name, *rest = command.split()
    with cli.cli.commands[name].make_context(name, rest) as context:
        assert program == "moetrt"
        assert context.params


def states(folder: Path) -> list[tuple[str, str]]:
    mapping = make_report(folder).mapping
    assert mapping is not None
    return [(layer.label, layer.state) for layer in mapping.layers]


def test_layers_without_a_tail_are_dense_only_where_all_tails_were_found(folder: Path) -> None:
    assert states(folder) == [("0", "dense"), ("1", "mapped")]
    assert 'title="Layer 0: dense"' in html(make_report(folder))
    changed(folder / "mapping.json", lambda content: content.update(expected=2, complete=False))
    assert states(folder) == [("0", "no tail found"), ("1", "mapped")]
    changed(
        folder / "mapping.json",
        lambda content: content.update(mapped=0) or content["sites"][0].update(matched=False, operator=None),
    )
    assert states(folder) == [("0", "no tail found"), ("1", "not mapped")]
    (folder / "mapped.onnx").unlink()
    assert states(folder) == [("1", "not mapped")]


def test_tails_that_were_plugin_nodes_before_have_no_picture(folder: Path) -> None:
    """As the contract exports them: what lies in the file before mapping is the plugin node already."""
    changed(folder / "mapping.json", lambda content: content["sites"][0].update(form="mapped before"))
    text = Page(html(make_report(folder))).text["mapping"]
    assert "The tails were plugin nodes before mapping" in text
    assert "nodes of" not in text


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_folder_without_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds nothing to report on: no JSON file of moetrt map --report, moetrt compare" in refusal(
        tmp_path, capsys
    )
    assert "does not exist" in refusal(tmp_path / "none", capsys)
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal(tmp_path / "file", capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / name).read_text()
    for end in (0, 60, len(text) // 2, len(text) - 3):
        (folder / name).write_text(text[:end])
        assert f"{name}' is cut off, or was changed: it is no JSON" in refusal(folder, capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_version(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed(folder / name, lambda content: content.update(format=content["format"].replace("/1", "/2")))
    assert re.search(
        rf"{name}': its format was moetrt\.\w+/2; this version .* reads moetrt\.\w+/1", refusal(folder, capsys)
    )


def places(content: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any] | list[Any], Any]]:
    """The fields of a file, of lists the first entry and the last: where, what has it, and its key there."""
    keys: list[Any] = list(content) if isinstance(content, dict) else []
    if isinstance(content, list) and content:
        keys = sorted({0, len(content) - 1})
    for key in keys:
        name = f"{where}[{key}]" if isinstance(content, list) else f"{where}.{key}".lstrip(".")
        yield name, content, key
        yield from places(content[key], name)


PYTHONS_WORDS = re.compile(r"\bobject has no\b|indices|NoneType|unsupported|subscript|expected str|<class|argument")


@pytest.mark.parametrize("name", FILES[:-1])
def test_each_field_is_read_or_refused_by_its_name(folder: Path, name: str) -> None:
    """Each field of each file gone, or of another kind: a page, or a line that names file and field."""
    only(folder, name)
    for onnx_file in folder.glob("*.onnx"):
        onnx_file.unlink()
    content = json.loads((folder / name).read_text())
    fields = list(places(content))
    # bench.json has the layers that each time is of; the report does not show them.
    fields = [field for field in fields if ".layers" not in field[0]]
    assert len(fields) > 15
    refused, drawn = 0, set()
    for where, holder, key in fields:
        whole = holder[key]
        for other in ("gone", None, -1, "x", [7], {"x": 7}, True):
            if other == "gone" and isinstance(holder, dict):
                del holder[key]
            else:
                holder[key] = other  # type: ignore[index]
            (folder / name).write_text(json.dumps(content))
            try:
                report = make_report(folder)
                facts = json_text(dataclasses.replace(report, created="", provenance=()))
                if facts not in drawn:
                    drawn.add(facts)
                    html(report), markdown(report)
            except InputError as error:
                refused += 1
                line = str(error)
                assert name in line
                assert "\n" not in line
                assert not PYTHONS_WORDS.search(line)
                # What follows from the field may be refused in its place, and a field within it be missing.
                of_it = {where, where.partition("[")[0], where.rpartition(".")[0], *DERIVED}
                assert any(part and part in line for part in of_it), (where, other, line)
            if isinstance(holder, dict) and other == "gone":
                # In its place among the others.
                holder[key] = whole
            holder[key] = whole  # type: ignore[index]
    assert refused > 2 * len(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("model"), "model is missing"),
        (lambda c: c["model"].update(sha256=None), "model.sha256 was null; a SHA-256 sum of 64 hex digits is taken"),
        (lambda c: c.update(source=7), "source was 7; text is taken"),
        (lambda c: c.update(command=[]), "command was []; text is taken"),
        (lambda c: c["versions"].update(torch=2), "versions.torch was 2; text is taken"),
    ],
)
def test_what_export_left_is_read_or_refused(
    folder: Path, change: Change, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder / EXPORTED, change)
    assert f"{EXPORTED}' is no whole moetrt.export/1 file ({says}" in refusal(folder, capsys)


def test_the_export_of_the_file_that_was_mapped_is_the_first_step(folder: Path) -> None:
    report = make_report(folder)
    assert report.provenance[0].file == EXPORTED
    assert (report.provenance[0].command or "").startswith("moetrt export ")


def test_an_export_that_was_not_mapped_since_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(folder / EXPORTED, lambda content: content["model"].update(sha256="7" * 64))
    assert re.search(
        r"model.onnx' was exported anew after '.*mapping.json' was written: its SHA-256 was .*model.onnx.json' has "
        r"777777777777...; map it again",
        refusal(folder, capsys),
    )


def test_the_export_of_another_file_is_passed_over(folder: Path) -> None:
    changed(folder / EXPORTED, lambda content: content["model"].update(file="other.onnx"))
    assert EXPORTED not in [made.file for made in make_report(folder).provenance]


def test_an_export_alone_is_nothing_to_report_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds nothing to report on" in refusal(only(folder, EXPORTED), capsys)


DERIVED = (
    "found",
    "mapped",
    "complete",
    "passed",
    "exact",
    "median",
    "iqr",
    "runs",
    "floor",
    "plugin_layers",
    "format",
)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("mapping.json", lambda c: c.update(found=99), "found was 99; its sites make it 1"),
        ("mapping.json", lambda c: c.update(mapped=0), "mapped was 0; its sites make it 1"),
        (
            "mapping.json",
            lambda c: c.update(expected=2),
            "complete was true; its sites and what was expected make it false",
        ),
        (
            "mapping.json",
            lambda c: c["sites"][0].update(operator=None),
            "sites[0].operator was null; the operator of a tail that is matched is taken",
        ),
        (
            "parity.json",
            lambda c: c.update(passed=False),
            "passed was false; its outputs, tails and lengths make it true",
        ),
        (
            "parity.json",
            lambda c: c.update(undecided=True),
            "undecided was true; its outputs, tails and lengths make it false",
        ),
        (
            "parity.json",
            lambda c: c["outputs"][0].update(rms=1.0),
            "outputs[0].passed was true; its errors and tolerance make it false",
        ),
        (
            "parity.json",
            lambda c: c["tails"][0]["error"].update(norm_out=None),
            "tails[0].passed was true; its error and tolerance make it false",
        ),
        (
            "plugin.engine.json",
            lambda c: c.update(plugin_library=None),
            "plugin_library was null; the name of the library that serves the 1 of plugin_layers is taken",
        ),
        (
            "plugin.engine.json",
            lambda c: c.update(onnx_sha256=None),
            "onnx_sha256 was null; a SHA-256 sum of 64 hex digits is taken",
        ),
        (
            "plugin.engine.json",
            lambda c: c["profile"]["input_ids"].update(min=[9, 999]),
            "; min, opt and max of one rank, none above the next is taken",
        ),
        (
            "bench.json",
            lambda c: c["points"][0]["end_to_end"]["plugin_ms"]["low"].update(median=0.1),
            "points[0].end_to_end.plugin_ms.low.median was 0.1; its runs make it 0.5",
        ),
        (
            "bench.json",
            lambda c: c["points"][0]["all_tails"]["ratio"]["low"]["runs"].__setitem__(0, 9.0),
            "points[0].all_tails.ratio.low.iqr was ",
        ),
        (
            "bench.json",
            lambda c: c["bandwidth"].update(bytes_per_second=1e12),
            "points[0].all_tails.floor.ms was ",
        ),
    ],
)
def test_what_contradicts_its_parts_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, change: Change, says: str
) -> None:
    changed(folder / name, change)
    line = refusal(folder, capsys)
    assert f"'{folder / name}' is no whole moetrt." in line
    assert says in line


def test_the_verdict_says_what_failed(folder: Path) -> None:
    """Outputs within tolerance pass a tail that differs, and an output may fail for more than its errors."""

    def tail_differs(content: dict[str, Any]) -> None:
        content["passed"] = content["tails"][0]["passed"] = False

    whole = (folder / "parity.json").read_text()
    changed(folder / "parity.json", tail_differs)
    text = make_report(folder).verdicts[1].text
    assert re.match(
        r"\d+ outputs within tolerance \(.*\)\. Within tolerance at batch=1, seq=1; batch=8, seq=32 too\. "
        r"1 tail other than what was replaced, layer 1 first\.$",
        text,
    )

    def near_a_tie(content: dict[str, Any]) -> None:
        content["passed"] = content["outputs"][0]["passed"] = False
        content["outputs"][0]["reason"] = "these inputs decide nothing"

    (folder / "parity.json").write_text(whole)
    changed(folder / "parity.json", near_a_tie)
    text = make_report(folder).verdicts[1].text
    assert re.match(r"1 of \d+ outputs within tolerance and still not passed: these inputs decide nothing\.", text)

    def empty(content: dict[str, Any]) -> None:
        content["passed"] = False
        content["outputs"] = content["lengths"] = []

    (folder / "parity.json").write_text(whole)
    changed(folder / "parity.json", empty)
    assert make_report(folder).verdicts[1].text == "No output was compared."


def test_case_56_each_length_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that differs, and one at which PyTorch gives nothing, are in the verdict and in the table of every form."""

    def at_lengths(content: dict[str, Any]) -> None:
        short, long = content["lengths"]
        short.update(outputs=[], not_measured="pytorch failed with ValueError: too short")
        long["passed"] = long["outputs"][0]["passed"] = content["passed"] = False
        long["cause"] = "the graph before mapping differs from PyTorch already"
        long["ties"] = [{"tokens": 3, "first": {}}]

    report = make_report(folder)
    assert [(length.passed, length.measured) for length in report.parity[0].lengths] == [(True, True)] * 2
    changed(folder / "parity.json", at_lengths)
    report = make_report(folder)
    assert report.verdicts[1].state == BAD
    assert "Out of tolerance at batch=8, seq=32. Not measured at batch=1, seq=1. 3 ties" in report.verdicts[1].text
    for text in (Page(html(report)).whole, markdown(report).replace("\\", ""), json_text(report)):
        for said in (
            "batch=8, seq=32",
            "the graph before mapping differs",
            "pytorch failed with ValueError: too short",
        ):
            assert said in text

    def denied(content: dict[str, Any]) -> None:
        content["lengths"][1]["passed"] = True

    changed(folder / "parity.json", denied)
    assert "lengths[1].passed was true; its outputs and failure make it false" in refusal(folder, capsys)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: {**c, "format": 7}, "its format was 7; moetrt.export/1, moetrt.mapping/1, "),
        (lambda c: {**c, "format": "moetrt.parities/1"}, 'its format was "moetrt.parities/1"; moetrt.export/1, '),
        (lambda c: {**c, "format": None, "command": "moetrt compare x"}, "its format was null; "),
        (lambda c: [c], "its content was a list; an object is taken"),
    ],
)
def test_a_file_of_ours_whose_form_was_changed_is_not_passed_over(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], Any], says: str
) -> None:
    content = json.loads((folder / "parity.json").read_text())
    (folder / "parity.json").write_text(json.dumps(change(content)))
    line = refusal(folder, capsys)
    assert f"'{folder / 'parity.json'}': {says}" in line


def test_numbers_that_json_does_not_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "parity.json").read_text()
    for number in ("NaN", "-Infinity"):
        (folder / "parity.json").write_text(re.sub(r'("rms": )[^,\n]+', rf"\g<1>{number}", text, count=1))
        assert f"it is no JSON ({number} is no number of JSON)" in refusal(folder, capsys)
    (folder / "parity.json").write_text(re.sub(r'("rms": )[^,\n]+', r"\g<1>1e999", text, count=1))
    assert "outputs[0].rms was Infinity; a finite number is taken" in refusal(folder, capsys)
    (folder / "parity.json").write_text(re.sub(r'("how": )"[^"]*"', r'\g<1>"\\ud800"', text, count=1))
    assert "how was " in refusal(folder, capsys)


def test_what_is_called_json_and_is_no_file_is_passed_over(folder: Path) -> None:
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as opened:
        opened.bind(os.path.relpath(folder / "socket.json"))
        assert cli.run(["report", str(folder)]) == 0


@pytest.mark.parametrize(("target", "why"), [("nowhere", "does not exist"), ("zz.json", "cannot be read: Too many ")])
def test_a_link_that_leads_nowhere(folder: Path, capsys: pytest.CaptureFixture[str], target: str, why: str) -> None:
    """It may have been one of ours."""
    (folder / "zz.json").symlink_to(target)
    assert refusal(folder, capsys).startswith(f"moetrt: error: JSON file '{folder / 'zz.json'}' {why}")


def test_files_of_two_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(folder / "bench.json", lambda content: content["model"].update(sha256="ab" * 32))
    line = refusal(folder, capsys)
    assert "are of different models" in line
    assert "bench.json" in line
    assert "SHA-256 abababababab..." in line


def test_an_engine_that_was_changed_since(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "plugin.engine").open("ab") as file:
        file.write(b"x")
    line = refusal(folder, capsys)
    assert "plugin.engine' is another file than when" in line
    assert line.endswith("build it again")


def test_a_mapped_model_that_was_changed_since(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "mapped.onnx").open("ab") as file:
        file.write(b"\x72\x00")
    assert "mapped.onnx' is another file than when" in refusal(folder, capsys)


def test_two_mapping_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(folder / "mapping.json", folder / "again.json")
    line = refusal(folder, capsys)
    assert "again.json' and '" in line
    assert "are both mapping reports" in line


def test_the_page_replaces_nothing_that_it_was_made_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mapping.json").rename(folder / "report.json")
    assert "report.json' is the moetrt.mapping/1 file itself" in refusal(folder, capsys)
    assert cli.run(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    assert {"page.html", "page.json", "page.md"} <= set(os.listdir(folder))
    # Pages of an earlier run are no input of the next.
    assert cli.run(["report", str(folder), "-o", str(folder / "page.html")]) == 0


def test_outputs_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a name that ends in .html is taken" in refusal(folder, capsys, "-o", folder / "page.pdf")
    (folder / "report.md").mkdir()
    assert "report.md' is a folder" in refusal(folder, capsys)
    assert not (folder / "report.html").exists()


def test_the_files_of_other_tools_are_passed_over(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "gpu.times.json").write_text('[{ "computeMs" : nan }]')
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "tokenizer.json").write_text("[" * 100_000)
    (folder / "below").mkdir()
    (folder / "below" / "mapping.json").write_text("{")
    assert sorted(file.path.name for file in find_files(folder)) == sorted(FILES)


# ------------------------------------------------------------------------------------------------------- names of users


NASTY = "<script>alert(1)</script>\"'`&amp;|*_[x](y)\n\tÄ層🙂 " + "very.long." * 60


def nasty(folder: Path) -> Path:
    """The folder, with names that a page must not take for its own."""
    mapping = json.loads((folder / "mapping.json").read_text())
    names = {site["name"] for site in mapping["sites"]} | {"DeepseekV3ForCausalLM", "trtexec-11", DEVICE}
    names |= {operand["value"] for site in mapping["sites"] for operand in site["inputs"].values()}

    def change(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: change(value) for key, value in content.items()}
        if isinstance(content, list):
            return [change(entry) for entry in content]
        return NASTY + content if isinstance(content, str) and content in names else content

    for name in FILES:
        content = change(json.loads((folder / name).read_text()))
        if name == "parity.json":
            for output in content["outputs"]:
                output["name"] = NASTY + output["name"] if output["tail"] is None else f"{output['tail']}.norm_out"
            content["cause"] = NASTY
        if name == "mapping.json":
            content["notes"] = [NASTY]
            content["sites"][0]["inputs"]["residual"]["shape"] = [NASTY, None, 64]
        (folder / name).write_text(json.dumps(content))
    return folder


def test_names_are_text_in_the_page_and_in_markdown(folder: Path) -> None:
    report = make_report(nasty(folder))
    page = html(report)
    assert "<script" not in page
    parsed = Page(page)
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "img", "iframe", "object", "embed", "form"})
    assert all(not name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert " ".join(NASTY.split()) in parsed.whole
    # A line that is indented is code: it stands as it is.
    text = "\n".join(line for line in markdown(report).splitlines() if not line.startswith("    "))
    assert "<script" not in text.replace("\\<script", "")
    assert re.search(r"(?<!\\)<|(?<!\\)\|\*", text) is None
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert len(tables) > 10
    assert set(rows) <= {3, 4, 5, 6, 7, 8, 10, 14}
    assert json.loads(json_text(report))["mapping"]["notes"] == [NASTY]


def test_it_needs_nothing_from_elsewhere(folder: Path) -> None:
    parsed = Page(html(make_report(folder)))
    links = [
        value
        for _, attributes in parsed.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "xlink:href", "data", "action")
    ]
    assert all(value is not None and value.startswith(("#", "data:")) for value in links)
    assert "url(" not in html(make_report(folder))


def test_it_can_be_read_without_seeing_it(folder: Path) -> None:
    parsed = Page(html(make_report(folder)))
    headings = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert [a.get("lang") for tag, a in parsed.tags if tag == "html"] == ["en"]
    counts = {name: sum(tag == name for tag, _ in parsed.tags) for name in ("table", "caption", "thead", "figure")}
    assert counts["table"] == counts["caption"] == counts["thead"] > 5
    assert all("scope" in attributes for tag, attributes in parsed.tags if tag == "th")
    pictures = [a for tag, a in parsed.tags if tag == "svg" and a.get("role") == "img"]
    assert len(pictures) == counts["figure"] >= 5
    identifiers = [a["id"] for _, a in parsed.tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    for picture in pictures:
        assert set(str(picture["aria-labelledby"]).split()) <= set(identifiers)


# ---------------------------------------------------------------------------------------------------- from the commands


def test_the_command_says_where_the_page_lies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("good     Mapping: 1 of 1 tail mapped")
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert {"report.html", "report.json", "report.md"} <= set(os.listdir(folder))
    for suffix in ("html", "md"):
        assert "1 tail found, 1 expected, 1 mapped." in (folder / f"report.{suffix}").read_text()


def test_compare_makes_the_page_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only(folder, "mapping.json")
    mapped = str(folder / "mapped.onnx")
    assert cli.run(["compare", mapped, "--against", SOURCE, "--report", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert [verdict.state for verdict in make_report(folder).verdicts] == [GOOD, GOOD, MISSING, MISSING]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("mapping.json", lambda content: content.update(found="three"), 'found was "three"; a whole number is taken'),
        (
            "mapping.json",
            lambda content: content.update(complete=1),
            "complete was 1; its sites and what was expected make it true",
        ),
        (
            "mapping.json",
            lambda content: content["sites"][0].update(form=None),
            "sites[0].form was null; text is taken",
        ),
        (
            "parity.json",
            lambda content: content.update(passed="yes"),
            'passed was "yes"; its outputs, tails and lengths make it true',
        ),
        (
            "parity.json",
            lambda content: content["outputs"][0].update(rms="0"),
            'outputs[0].rms was "0"; a finite number is taken',
        ),
        (
            "parity.json",
            lambda content: content["outputs"][0].update(nan=True),
            "outputs[0].nan was true; a whole number is taken",
        ),
        ("parity.json", lambda content: content.update(notes=[3]), "notes[0] was 3; text is taken"),
        ("bench.json", lambda content: content.update(repeats="3"), 'repeats was "3"; a whole number is taken'),
        (
            "plugin.engine.json",
            lambda content: content.update(layer_count=[]),
            "layer_count was []; a whole number is taken",
        ),
    ],
)
def test_a_value_of_another_type_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, change: Change, says: str
) -> None:
    changed(folder / name, change)
    line = refusal(folder, capsys)
    assert f"'{folder / name}' is no whole moetrt." in line
    assert f"({says}); write it again with moetrt " in line


def test_names_are_shown_as_they_are_spelled_and_stay_short(folder: Path) -> None:
    """A name may turn the direction of writing, hold a terminal's sequences, or be longer than a window."""
    odd, long = "a\u202eb\x1b[31mc", "tail" * 200

    def rename(content: dict[str, Any]) -> None:
        content["outputs"][0]["name"] = odd
        content["tails"][0]["name"] = long
        content["notes"] = [odd]

    changed(folder / "parity.json", rename)
    assert cli.run(["report", str(folder)]) == 0
    html, markdown = ((folder / f"report.{suffix}").read_text() for suffix in ("html", "md"))
    for text in (html, markdown):
        assert not {char for char in text if char in "\u202e\x1b"}
    assert r"a\u202eb\x1b[31mc" in html
    assert f'title="{long}">{long[:19]}…{long[-20:]}</span>' in html


def test_an_undecided_comparison_is_told_from_one_that_differs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def undecided(content: dict[str, Any]) -> None:
        content.update(passed=False, undecided=True, cause="every output is NaN in PyTorch too")
        for output in content["outputs"]:
            output.update(passed=False, undecided=True)

    changed(folder / "parity.json", undecided)
    # The page is made all the same: it says what is wrong.
    assert cli.run(["report", str(folder)]) == 1
    page = folder / "report.html"
    assert capsys.readouterr().err == f"moetrt: error: '{page}' has verdicts that are bad: Parity\n"
    for suffix in ("html", "md"):
        text = (folder / f"report.{suffix}").read_text()
        assert "could not be compared: PyTorch gives nothing finite there" in text
        assert "Undecided" in text
        assert "Out of tolerance" not in text
        assert "differs" not in text.partition("Benchmarks</h2>")[0].partition("Parity</h2>")[2]


def test_what_was_not_measured_is_in_the_verdict(folder: Path) -> None:
    def lost(content: dict[str, Any]) -> None:
        for output in content["outputs"]:
            if not output["tail"]:
                output.update(nan=7, pytorch_nan=7)

    changed(folder / "parity.json", lost)
    assert cli.run(["report", str(folder)]) == 0
    for suffix in ("html", "md"):
        text = (folder / f"report.{suffix}").read_text()
        assert "within tolerance (" in text
        assert "7 elements of logits could not be measured: NaN or Inf in PyTorch too." in text


def test_what_keeps_bench_from_its_page_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are there and printed; a page that cannot be made is a line more, not a failure."""
    (folder / "parity.json").write_text("")
    mapped = str(folder / "mapped.onnx")
    assert cli.run(["bench", mapped, "-o", str(folder), "--read"]) == 0
    assert "no report page: " in capsys.readouterr().out.splitlines()[-1]


def test_the_same_facts_give_the_same_page(folder: Path) -> None:
    report = make_report(folder)
    assert (html(report), json_text(report), markdown(report)) == (html(report), json_text(report), markdown(report))
    first = write_report(report, folder).read_text()
    assert write_report(report, folder).read_text() == first
