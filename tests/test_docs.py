"""The pages under docs/: commands and snippets run as shown, links lead somewhere, and what is named exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import onnx_ir as ir
import pytest

from moetrt import cli
from moetrt.onnx_op import operator_of
from tests.documents import NEEDS_TRTEXEC, PAGES, ROOT, Session, blocks, pattern, run_page
from tests.trtexec_stand_in import VARIABLE, install

DOCS = ROOT / "docs"
MARKDOWN = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def by_name(path: Path) -> str:
    return path.name if path.parent == ROOT else f"docs/{path.name}"


class Stage(Session):
    """A session whose trtexec stand-in knows the tails of the model that was mapped last."""

    def command(self, line: str, *, with_trtexec: bool = False) -> str:
        if with_trtexec:
            self.trtexec = plant(self.folder, self.folder / "model/mapped.onnx")
        return super().command(line, with_trtexec=with_trtexec)


def plant(folder: Path, model: Path) -> tuple[Path, dict[str, str]]:
    """A stand-in for trtexec that times ``model``'s tails; its numbers are made up, and no page shows them."""
    tails = [node for node in ir.load(model).graph if operator_of(node) is not None]

    def layers(way: str, ms: float) -> list[dict[str, object]]:
        inner = "{0}" if way == "plugin" else "node_Mul_1 | {0} ({1})"
        metadata = [f"[ONNX Layer: {inner.format(node.name, node.op_type)}]" for node in tails]
        return [{"Name": f"{way} {number}", "ms": ms, "Metadata": text} for number, text in enumerate(metadata)]

    planted = {
        "version": [11, 1, 0],
        "failure": "",
        "drift": 0.0,
        "inputs": {"input_ids": 2 * 8 * 8},
        "plugin": {"compute_ms": 1.0, "layers": layers("plugin", 0.1)},
        "native": {"compute_ms": 1.2, "layers": layers("native", 0.2)},
    }
    path = folder / "planted.json"
    path.write_text(json.dumps(planted))
    return install(folder / "bin").parent, {VARIABLE: str(path)}


@pytest.fixture(scope="session", autouse=True)
def doctor() -> None:
    """As README's installation ends: the first command that needs TensorRT-RTX's link makes it, and says so."""
    assert cli.run(["doctor"]) == 0


@pytest.fixture(scope="session")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tutorial leaves behind."""
    folder = tmp_path_factory.mktemp("tutorial")
    run_page(DOCS / "tutorial.md", Stage(folder))
    return folder


def test_tutorial(tutorial: Path) -> None:
    assert {path.name for path in (tutorial / "model").glob("*.json")} >= {
        "mapping.json",
        "parity.json",
        "plugin.engine.json",
        "bench.json",
        "report.json",
    }


@pytest.mark.parametrize("name", ["contract.md", "forms.md"])
def test_page(name: str, tmp_path: Path) -> None:
    run_page(DOCS / name, Stage(tmp_path))


def test_pages_without_commands_have_none() -> None:
    run = {"tutorial.md", "contract.md", "forms.md", "troubleshooting.md"}
    for page in PAGES:
        if page.name not in run:
            assert {block.language for block in blocks(page)} <= {"text"}, page


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("sh", "python", "text"), block.where
        assert set(block.options) <= {"exit", "raises", "file", "from"}, block.where
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in text
    assert not re.search(r"(?:\A|\n\n)    \S", text), "an indented block, which nothing runs"


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page) if "from" in block.options], ids=lambda b: b.where
)
def test_excerpts_are_the_source_word_for_word(block) -> None:
    source = (ROOT / block.options["from"]).read_text(encoding="utf-8")
    for part in block.text.split("\n...\n"):
        assert part.strip("\n") in source, block.where


def test_what_needs_a_gpu_says_so_in_the_page() -> None:
    marked = [block for page in PAGES for block in blocks(page) if NEEDS_TRTEXEC in block.text]
    assert marked
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and re.search(r"^(trtexec|bash \S*bench\.sh)", block.text, re.MULTILINE):
                assert block in marked, block.where


def inline_commands() -> Iterator[tuple[str, list[str]]]:
    for page in MARKDOWN:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`(moetrt [^`]+)`", text):
            yield by_name(page), span.replace("\n", " ").split()


@pytest.mark.parametrize(("page", "words"), list(inline_commands()), ids=lambda value: str(value))
def test_commands_within_a_line_exist_with_their_options(page: str, words: list[str]) -> None:
    command = cli.cli.commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
    assert isinstance(command, click.Command)


def test_options_named_alone_exist_somewhere() -> None:
    """`--seed` and its like: each is an option of some command of moetrt's, or of a program that is named with it."""
    known = {
        option for command in cli.cli.commands.values() for parameter in command.params for option in parameter.opts
    }
    for page in PAGES:
        for span in re.findall(r"`(--[a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert span in known | OTHERS_OPTIONS, (page.name, span)


OTHERS_OPTIONS = {"--plugins", "--dynamicPlugins", "--profilingVerbosity", "--stronglyTyped", "--exportProfile"}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", MARKDOWN, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name) if name else page
        assert place.exists(), (page.name, target)
        if anchor:
            assert anchor in anchors(place), (page.name, target)


def test_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([^)#]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in PAGES} - {"README.md"} == named


@pytest.mark.parametrize("page", MARKDOWN, ids=by_name)
def test_files_and_make_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, target
    for name in re.findall(r"`((?:export|tests|plugins|benchmarks|samples)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


class TestRunner:
    """The checks above can fail."""

    @pytest.mark.parametrize(
        ("expected", "said", "same"),
        [
            ("a\nb", "a\nb\n", True),
            ("a\nb", "a\nb\nc\n", False),
            ("a … s", "a 1.5 s\n", True),
            ("a … s", "a 1.5\ns\n", False),
            ("a\n...\nz", "a\nb\nc\nz\n", True),
            ("a\n...\nz", "a\nz\n", True),
            ("a\n...\nz", "a\nb\n", False),
            ("(1.0)", "(100)\n", False),
        ],
    )
    def test_what_is_printed_is_compared(self, expected: str, said: str, same: bool) -> None:
        assert bool(pattern(expected).fullmatch(said)) is same

    @pytest.mark.parametrize(
        "text",
        [
            "```sh\nmoetrt inspect nothing.onnx\n```\n",
            "```sh\nfalse | cat\n```\n",
            "```sh exit=2\ntrue\n```\n",
            "```python\nassert False\n```\n",
            "```python raises=ValueError\npass\n```\n",
            "```python\nprint(1)\n```\n\n```text\n2\n```\n",
            "```python file=a.py\nprint(1)\n```\n\n```sh\npython a.py\n```\n\n```text\n2\n```\n",
        ],
    )
    def test_page_that_is_wrong_fails(self, text: str, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(text)
        with pytest.raises(AssertionError):
            run_page(page, Session(tmp_path))

    def test_snippets_share_names_and_files_are_found(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "```python file=helper_of_this_page.py\nvalue = 3\n```\n\n"
            "```python\nfrom helper_of_this_page import value\n```\n\n"
            "```python\nprint(value)\n```\n\n```text\n3\n```\n\n```python raises=ZeroDivisionError\nvalue / 0\n```\n\n"
            "```text\nZeroDivisionError: division by zero\n```\n"
        )
        run_page(page, Session(tmp_path))
