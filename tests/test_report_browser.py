"""The report's page in a real Chromium: light and dark, wide and narrow, on paper, and with names of all kinds."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from moetrt.report import make_report, write_report
from tests.test_report import NASTY, changed, commands_run, folder, nasty, only

__all__ = ["commands_run", "folder"]
"""Fixtures of the report's other tests."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    named = os.environ.get("MOETRT_CHROMIUM")
    executable = next((path for name in ([named] if named else NAMES) if (path := shutil.which(name))), None)
    if executable is None:
        pytest.fail("there is no Chromium to look at the report's page with: make browser, or apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=executable, args=options)
        yield chromium
        chromium.close()


@dataclass
class Seen:
    """A page that was opened, and what the browser said and asked for meanwhile."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Reader:
    """Opens pages; closes them when the test ends."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[Any] = []

    def open(self, path: Path, *, width: int = 1100, height: int = 900, scheme: str = "light") -> Seen:
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        self._contexts.append(context)
        page = context.new_page()
        seen = Seen(page)
        page.on("console", lambda message: seen.messages.append(message.text))
        page.on("pageerror", lambda error: seen.messages.append(str(error)))
        page.on("dialog", lambda dialog: seen.messages.append(dialog.message))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.goto(path.as_uri())
        return seen

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def reader(browser: Browser) -> Iterator[Reader]:
    opener = Reader(browser)
    yield opener
    opener.close()


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
                         return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = element => { for (let e = element; e; e = e.parentElement) {
                                const color = rgb(getComputedStyle(e).backgroundColor); if (color[3]) return color; }
                              return [255, 255, 255, 255]; };
  let worst = [99, ''], seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ['TITLE', 'DESC', 'STYLE'].includes(element.tagName.toUpperCase())) continue;
    const style = getComputedStyle(element), svg = element.ownerSVGElement;
    const [a, b] = [luminance(rgb(svg ? style.fill : style.color)), luminance(behind(svg ?? element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < worst[0]) worst = [ratio, walker.currentNode.data.trim()];
  }
  return [...worst, seen];
}"""


@pytest.mark.parametrize(
    ("scheme", "width", "height"), [("light", 1100, 900), ("dark", 1100, 900), ("light", 375, 812), ("dark", 375, 812)]
)
def test_the_page_in_a_browser(
    commands_run: Path, reader: Reader, tmp_path: Path, scheme: str, width: int, height: int
) -> None:
    path = write_report(make_report(commands_run), commands_run, tmp_path / "report.html")
    seen = reader.open(path, width=width, height=height, scheme=scheme)
    page = seen.page
    assert seen.messages == []
    assert seen.requests == [path.as_uri()]

    text = page.inner_text("body")
    for words in (
        "1 of 1 tail mapped",
        "within tolerance",
        "plugin.engine has 1 plugin layer",
        "end to end",
        "SHA-256",
    ):
        assert words in text
    pictures = page.locator("svg[role=img]").all()
    titles = [picture.locator("> title").text_content() for picture in pictures]
    assert {"Before mapping", "After mapping", "End to end", "All tails"} <= set(titles)
    for picture in pictures:
        box = picture.bounding_box()
        assert box is not None
        assert box["width"] >= min(300, width - 40)
        assert box["height"] >= 60
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    # Each mark of each plot is drawn, and inside its plot.
    marks = page.locator("svg[role=img] svg.mark path").all()
    assert len(marks) >= 10
    for mark in marks:
        box = mark.bounding_box()
        assert box is not None
        assert box["width"] + box["height"] > 4
        assert -8 <= box["x"] <= width

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(19, 23, 27)")
    ratio, worst, count = page.evaluate(CONTRAST)
    assert count > 100
    assert ratio >= 4.5, f"'{worst}' has contrast {ratio:.2f}; WCAG AA asks for 4.5"
    assert len(page.screenshot(path=tmp_path / "page.png", full_page=True)) > 50_000


BOXES = """selector => [...document.querySelectorAll(selector)].map(e => {
  const {left, right, top, bottom} = e.getBoundingClientRect(); return [e.textContent, left, right, top, bottom]; })"""


OUTLINES = """figure => [...figure.querySelectorAll('svg[role=img] svg.mark:not(.limit) path')].map(e => {
  const {x, y, width, height} = e.getBBox(), {e: right, f: down} = e.getScreenCTM();
  return [x + right, y + down, x + right + width, y + down + height]; })"""
"""The marks of a plot without their strokes."""


@pytest.mark.parametrize("width", [375, 1100])
def test_texts_of_the_pictures_keep_apart_and_within_their_box(
    commands_run: Path, reader: Reader, tmp_path: Path, width: int
) -> None:
    path = write_report(make_report(commands_run), commands_run, tmp_path / "report.html")
    page = reader.open(path, width=width).page
    assert page.locator("svg rect.plugin").count() == 1
    ((_, _, right, _, _),) = page.evaluate(BOXES, "svg:has(rect.plugin) rect.plugin")
    scale = page.evaluate("document.querySelector('svg:has(rect.plugin)').getScreenCTM().a")
    texts = page.evaluate(BOXES, ".picture > svg text")
    within = [box for box in texts if box[0].startswith(("MoEFinalize", "programmatic_dependent", "routed_scaling"))]
    assert len(within) >= 3
    inside = [box for box in within if box[1] < right and box[0].strip() != "MoEFinalizeAdd"]
    assert all(box[2] <= right - 8 * scale for box in inside), inside
    # What is the name and what is the shape of one operand are nearer than two operands.
    names = page.evaluate(BOXES, ".picture > svg text.strong")
    for one, other in pairwise(sorted(names, key=lambda box: (round(box[1]), box[3]))):
        if round(one[1]) == round(other[1]):
            assert other[3] - one[3] >= 36 * scale, (one, other)


def test_marks_of_one_value_are_all_to_be_seen(folder: Path, reader: Reader, tmp_path: Path) -> None:
    def alike(content: dict[str, Any]) -> None:
        for output in content["outputs"]:
            output["rms"] = output["pytorch"]["rms"]
            if output["unfused"] is not None:
                output["unfused"]["rms"] = output["rms"]

    changed(folder / "parity.json", alike)
    path = write_report(make_report(folder), folder, tmp_path / "report.html")
    page = reader.open(path).page
    figures = page.locator("#parity figure.plot").all()
    assert len(figures) >= 2
    for figure in figures:
        boxes = figure.evaluate(OUTLINES)
        assert len(boxes) >= 3
        for (x, y, right, bottom), (other_x, other_y, other_right, other_bottom) in combinations(boxes, 2):
            apart = max(max(x, other_x) - min(right, other_right), max(y, other_y) - min(bottom, other_bottom))
            assert apart >= 2, boxes


def test_a_table_that_scrolls_shows_that_there_is_more(commands_run: Path, reader: Reader, tmp_path: Path) -> None:
    """The right edge is darker than the page while there is more, and is not once all was scrolled past."""
    path = write_report(make_report(commands_run), commands_run, tmp_path / "report.html")
    page = reader.open(path, width=375).page
    wide = page.locator("#parity .scroll").first
    assert wide.evaluate("e => e.scrollWidth > e.clientWidth + 20")
    # The caption's line ends before the edge; so nothing else is drawn there.
    wide.evaluate("e => e.querySelectorAll('table, caption, th, td, span').forEach(x => x.style.visibility = 'hidden')")
    box = wide.bounding_box()
    assert box is not None
    wide.scroll_into_view_if_needed()
    at_start = wide.screenshot()
    wide.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    at_end = wide.screenshot()
    wide.evaluate("e => { e.style.background = 'none' }")
    without = wide.screenshot()
    # A shade at the right first, at the left then: both differ from none, and from each other.
    assert len({at_start, at_end, without}) == 3


def test_what_was_run_is_explained(commands_run: Path, reader: Reader, tmp_path: Path) -> None:
    path = write_report(make_report(commands_run), commands_run, tmp_path / "report.html")
    page = reader.open(path).page
    told = dict(
        zip(page.locator(".runners dt").all_inner_texts(), page.locator(".runners dd").all_inner_texts(), strict=True)
    )
    assert {"pytorch", "onnxruntime", "kernel-host"} <= set(told)
    assert "model's own dtype" in told["pytorch"]
    assert "compiled for the CPU" in told["kernel-host"]
    assert "tensorrt" not in told


def test_it_prints(commands_run: Path, reader: Reader, tmp_path: Path) -> None:
    """On paper in dark mode: dark text on white, nothing cut off at the right."""
    path = write_report(make_report(commands_run), commands_run, tmp_path / "report.html")
    page = reader.open(path, width=720, scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--page').trim()") == "#ffffff"
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("width", [375, 1100])
def test_names_of_all_kinds(folder: Path, reader: Reader, tmp_path: Path, width: int) -> None:
    path = write_report(make_report(nasty(folder)), folder, tmp_path / "report.html")
    seen = reader.open(path, width=width)
    assert seen.messages == []
    assert seen.requests == [path.as_uri()]
    assert seen.page.locator("script").count() == 0
    shown = " ".join(seen.page.locator("section#mapping").inner_text().split())
    assert " ".join(NASTY.split()) in shown
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_with_little_in_it(folder: Path, reader: Reader, tmp_path: Path) -> None:
    path = write_report(make_report(only(folder, "mapping.json")), folder, tmp_path / "report.html")
    seen = reader.open(path, width=375)
    assert seen.messages == []
    text = seen.page.inner_text("body")
    for what in ("comparison", "benchmark", "engine"):
        assert f"There is no {what} here. This makes one:" in text
    assert seen.page.locator("#parity svg, #benchmarks svg, #engines table").count() == 0
