"""docs/troubleshooting.md has every error message of the sources, and no other."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.documents import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGE = ROOT / "export" / "moetrt"
RAISED = ("InputError", "InputTypeError", "MoetrtError", "Shortfall", "ValueError")
PLACE = "…"

LEFT_OUT = {
    # What is raised is another message of this list, or of TensorRT or the plugin, with a few words before it.
    "mapping.py": {PLACE},
    "onnx_files.py": {f"ONNX model '{PLACE}': {PLACE}"},
    "library.py": {PLACE},
    "rewrites/complex_numbers.py": {PLACE},
    # Part of "'…' is cut off, or was changed: it is no JSON (…)".
    "json_files.py": {f"{PLACE} is no number of JSON"},
    # How `moetrt demo` and `moetrt doctor` end: the lines above say what is short or missing.
    "cli.py": {f"the demo fell short in: {PLACE}", f"missing: {PLACE}"},
}


def template(node: ast.expr) -> str:
    """A message with `PLACE` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return PLACE


@cache
def templates() -> tuple[tuple[str, str], ...]:
    """Each file below the package with each message that it raises."""
    return tuple(_templates())


def _templates() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED and node.args:
                yield path.relative_to(PACKAGE).as_posix(), template(node.args[0])


def sections() -> dict[str, str]:
    """The page's parts by their headings."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


OTHERS = ("Messages of TensorRT", "Messages of ONNX Runtime, Polygraphy and PyTorch")
PLUGIN_LINES = sections()["The plugin library"].partition("The plugin writes its own lines")[2]
REASONS = sections()["map"].partition("Reasons in that table.")[2]


def first_cells(text: str) -> list[str]:
    """What stands in backticks in the first column of the tables."""
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def quotes() -> list[str]:
    ours = [text for name, text in sections().items() if name not in OTHERS]
    text = "\n".join(ours).replace(PLUGIN_LINES, "").replace(REASONS, "")
    of_the_operator = re.findall(r"`(…: [^`]+)`", sections()["The operator"].partition("Beside them")[0])
    return [*first_cells(text), *of_the_operator]


def covers(quote: str, message: str) -> bool:
    """Whether ``message`` is what ``quote`` shows; `PLACE` in the quote stands for any text, also for none.

    A quote of few words of its own would cover what it does not mean: it must be the message as it is.
    """
    if len(re.findall(r"[A-Za-z]{2,}", quote)) < 4:
        return quote == message
    return re.fullmatch(".*".join(map(re.escape, quote.split(PLACE))), message, re.DOTALL) is not None


def test_every_message_is_in_the_page() -> None:
    # The mapper raises some of its reasons.
    shown = [*quotes(), *first_cells(REASONS)]
    assert len(set(templates())) > 200
    lacking = [
        f"{file}: {message}"
        for file, message in sorted(set(templates()))
        if message not in LEFT_OUT.get(file, ()) and not any(covers(quote, message) for quote in shown)
    ]
    assert not lacking


def test_every_quoted_message_is_in_the_sources() -> None:
    messages = {message for _, message in templates()}
    assert [quote for quote in quotes() if not any(covers(quote, message) for message in messages)] == []


def test_what_is_left_out_is_there() -> None:
    found = set(templates())
    assert [
        (file, message) for file, left in LEFT_OUT.items() for message in left if (file, message) not in found
    ] == []


def test_a_message_that_the_page_lacks_is_seen() -> None:
    shown = quotes()
    assert not any(covers(quote, f"layer '{PLACE}' was {PLACE}; a number is wanted") for quote in shown)
    assert any(covers(quote, f"{PLACE} '{PLACE}' does not exist") for quote in shown)


def literals(path: Path) -> list[str]:
    """The texts of two or more words in a C++ file, neighbours joined, without the signs at their ends."""
    code = re.sub(r"//[^\n]*|^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    code = re.sub(r'"\s*\n\s*"', "", code)
    texts = [text.strip(" ,;:'()") for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', code)]
    return [text for text in texts if " " in text and len(re.findall(r"[A-Za-z]{2,}", text)) >= 2]


def test_every_line_of_the_plugin_is_in_one_of_the_pages() -> None:
    pages = " ".join((PAGE.read_text(encoding="utf-8") + (PAGE.parent / "operator.md").read_text("utf-8")).split())
    files = [path for path in sorted((ROOT / "plugins/plugin").glob("*.cpp")) if path.name != "operator_table.cpp"]
    found = [text for path in files for text in literals(path)]
    assert "is not known; 10, 11 and TensorRT-RTX from 1.7 are taken" in found
    assert [text for text in found if text not in pages and text not in NOT_SAID] == []


NOT_SAID = {
    # Names of types that no message of today's TensorRT holds.
    "TensorRT's PluginFieldType",
    "TensorRT's DataType",
}


def test_every_quoted_line_of_the_plugin_is_in_its_sources() -> None:
    files = [*(ROOT / "plugins/plugin").glob("*.cpp"), *(ROOT / "plugins/kernel").glob("*.cpp")]
    code = " ".join(text for path in files for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text("utf-8")))
    for quote in first_cells(PLUGIN_LINES):
        # A line is put together of pieces: at signs between words it may be cut.
        for words in re.split(r"[,;:'()…]", quote):
            assert words.strip() in code, quote


@cache
def reasons() -> frozenset[str]:
    """Every text of four or more words in the mapper's segments that is no docstring."""
    found = set()
    for path in sorted((PACKAGE / "segments").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        passed_over = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        passed_over |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in passed_over:
                text = template(node)
                # A piece of a longer one begins with its space.
                if text.count(" ") >= 3 and not text.startswith(" "):
                    found.add(text)
    return frozenset(found)


def test_every_reason_of_the_mapper_is_in_the_page() -> None:
    shown = first_cells(REASONS)
    assert len(reasons()) > 60
    assert [reason for reason in reasons() if not any(covers(quote, reason) for quote in shown)] == []


def test_every_quoted_reason_is_one_of_the_mapper() -> None:
    said = reasons() | {message for _, message in templates()}
    assert [quote for quote in first_cells(REASONS) if not any(covers(quote, reason) for reason in said)] == []
