"""The report's pictures as SVG elements: a tail before and after mapping, and plots on a log axis.

Colours come from the page's style sheet through classes, so that one picture serves light and dark. Plots have their
horizontal places in per cent and their sizes in pixels: they fit a phone, and their text stays as large as it is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetrt.report.graph import GraphNode, Operand, externals

Place = float | str
Legend = Sequence[tuple[str, str]]
"""The classes of the marks, and what they stand for."""


@dataclass(frozen=True)
class Element:
    """One SVG element: its tag and attributes, its text, and the words that a pointer resting on it shows.

    For a mark of a plot, ``text`` is its outline and ``move`` how far it stands beside its place.
    """

    tag: str
    attributes: dict[str, Any]
    text: str | None = None
    title: str | None = None
    move: str | None = None


@dataclass
class Drawing:
    """A picture.

    Attributes:
        title: what it shows, in a few words.
        description: what is to be seen in it, for who does not see it.
        height: pixels.
        width: pixels; None fills the width that there is.
        upright: whether figures go from the bottom up.
        crowded: whether it needs the whole width of the page.
        elements: what is drawn.
        legend: for a plot: the mark's class and what it stands for.
    """

    title: str
    description: str
    height: float = 0.0
    width: float | None = None
    upright: bool = False
    crowded: bool = False
    elements: list[Element] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def add(
        self,
        tag: str,
        *,
        text: str | None = None,
        title: str | None = None,
        move: str | None = None,
        **attributes: Place,
    ) -> None:
        """Draws one more element; ``class_`` is its class, and ``_`` stands for a hyphen."""
        named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        self.elements.append(Element(tag, named, text, title, move))


# ------------------------------------------------------------------------------------------------------ a tail's nodes

_WIDTH, _LEFT, _RIGHT = 420.0, 56.0, 188.0
"""Of the nodes' boxes; arrows to others than the next node go round their left side."""

_PLUGIN_LEFT, _PLUGIN_RIGHT, _PLUGIN_WIDTH = 4.0, 240.0, 438.0
_BOX, _GAP, _LINE = 26.0, 14.0, 37.0
"""Pixels: a box with one line beside it, the gap below it, and each line more."""

_LONGEST = 30
_MOST_NODES = 40


def shortened(text: str, length: int = _LONGEST) -> str:
    """``text`` in at most ``length`` characters: its middle is left out, since names differ at their ends."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


def before(
    nodes: Sequence[GraphNode],
    inputs: Iterable[Operand],
    outputs: Iterable[Operand],
    constants: Mapping[str, str],
) -> Drawing:
    """The nodes that a tail was, from the first to the last, and what goes in and out of them.

    Args:
        nodes: in the order of the graph.
        inputs, outputs: the operator's, by the graph's names for them.
        constants: by value's name: what is in it.
    """
    count = len(nodes)
    known = {operand.value: operand for operand in inputs}
    results = {operand.value: operand for operand in outputs}
    drawing = Drawing(
        "Before mapping",
        f"{count} nodes: {', '.join(node.op_type for node in nodes)}.",
        width=_WIDTH,
    )
    shown = list(nodes)
    left_out = 0
    if count > _MOST_NODES:
        left_out = count - _MOST_NODES
        shown = [*nodes[: _MOST_NODES // 2], *nodes[-_MOST_NODES // 2 :]]
    outside = set(externals(nodes))
    spans: list[tuple[float, float]] = []
    top = 10.0
    for index, node in enumerate(shown):
        if left_out and index == _MOST_NODES // 2:
            drawing.add("text", x=_LEFT, y=top + 17, class_="quiet", text=f"… and {left_out} nodes more …")
            top += _BOX + _GAP
        labels = [(name, known.get(name), False) for name in node.inputs if name in outside]
        labels += [(name, results[name], True) for name in node.outputs if name in results]
        bottom = top + max(_BOX, _LINE * len(labels) - 4)
        title = f"{node.op_type} {node.name}"
        drawing.add("rect", x=_LEFT, y=top, width=_RIGHT - _LEFT, height=bottom - top, rx=5, class_="node", title=title)
        middle, centre = (_LEFT + _RIGHT) / 2, (top + bottom) / 2
        drawing.add("text", x=middle, y=centre + 4, text_anchor="middle", text=shortened(node.op_type, 18), title=title)
        for line, (name, operand, out) in enumerate(labels):
            y = top + _BOX / 2 + _LINE * line
            _label(drawing, _RIGHT, y, name, operand, constants.get(name), out=out)
        spans.append((top, bottom))
        top = bottom + _GAP
    _edges(drawing, shown, spans)
    drawing.height = top
    return drawing


def after(
    operator: str, inputs: Sequence[Operand], outputs: Sequence[Operand], attributes: Mapping[str, float]
) -> Drawing:
    """The one node that a tail is now."""
    drawing = Drawing(
        "After mapping",
        f"One node, {operator}: {', '.join(operand.name for operand in inputs)} in, "
        f"{', '.join(operand.name for operand in outputs)} out.",
        width=_PLUGIN_WIDTH,
    )
    lines = [operator, "one plugin node", "", *(f"{name} {value:g}" for name, value in attributes.items())]
    rows = [(operand, False) for operand in inputs] + [(operand, True) for operand in outputs]
    height = max((_BOX + _GAP) * len(rows), 17.0 * len(lines) + 24)
    drawing.add("rect", x=_PLUGIN_LEFT, y=10, width=_PLUGIN_RIGHT - _PLUGIN_LEFT, height=height, rx=6, class_="plugin")
    for index, line in enumerate(lines):
        style = "strong" if index == 0 else "quiet"
        drawing.add("text", x=_PLUGIN_LEFT + 12, y=34 + 17 * index, class_=style, text=shortened(line, 34), title=line)
    step = height / len(rows)
    for index, (operand, out) in enumerate(rows):
        _label(drawing, _PLUGIN_RIGHT, 10 + step * (index + 0.5), operand.value, operand, None, out=out)
    drawing.height = height + 20
    return drawing


def _label(
    drawing: Drawing, right: float, y: float, name: str, operand: Operand | None, constant: str | None, *, out: bool
) -> None:
    """An arrow at the right side of a box, with what flows there."""
    end = right + 24
    style = "output" if out else "input" if operand is not None else "other"
    drawing.add("path", d=f"M{right:g},{y:g} H{end:g}", class_=style)
    tip = f"M{end - 6:g},{y - 4:g} l6,4 l-6,4 z" if out else f"M{right + 7:g},{y - 4:g} l-6,4 l6,4 z"
    drawing.add("path", d=tip, class_=f"head {style}")
    x = end + 6
    longest = int(((drawing.width or _WIDTH) - x) / 6.4)
    if operand is None:
        text = f"constant {constant}" if constant is not None else name
        drawing.add("text", x=x, y=y + 4, class_="quiet", text=shortened(text, longest), title=name)
        return
    title = f"{operand.name}: {operand.described}, {operand.value}"
    drawing.add("text", x=x, y=y - 2, class_="strong", text=operand.name, title=title)
    drawing.add("text", x=x, y=y + 12, class_="quiet", text=shortened(operand.described, longest), title=title)


def _edges(drawing: Drawing, nodes: Sequence[GraphNode], spans: Sequence[tuple[float, float]]) -> None:
    """From each node to those that read it: straight to the next one, round the left side to others."""
    makers = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    middle = (_LEFT + _RIGHT) / 2
    lanes: list[int] = []
    edges = {(makers[value], index) for index, node in enumerate(nodes) for value in node.inputs if value in makers}
    for start, end in sorted(edges):
        low, high = spans[start], spans[end]
        if end == start + 1:
            drawing.add("path", d=f"M{middle:g},{low[1]:g} V{high[0] - 2:g}", class_="edge")
            drawing.add("path", d=f"M{middle - 4:g},{high[0] - 6:g} l4,6 l4,-6 z", class_="head edge")
            continue
        lane = next((index for index, until in enumerate(lanes) if until <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        x = max(4.0, _LEFT - 14 - 9 * lane)
        leave, arrive = low[1] - 8, high[0] + 9
        drawing.add("path", d=f"M{_LEFT:g},{leave:g} H{x:g} V{arrive:g} H{_LEFT - 2:g}", class_="edge")
        drawing.add("path", d=f"M{_LEFT - 7:g},{arrive - 4:g} l6,4 l-6,4 z", class_="head edge")


# --------------------------------------------------------------------------------------------------------------- plots


@dataclass(frozen=True)
class Mark:
    """One figure of a plot.

    Attributes:
        series: its class, a key of `SHAPE_OF`.
        low, high: the figure; a range where they differ. None is not finite.
        title: the figure in words.
    """

    series: str
    low: float | None
    high: float | None
    title: str


@dataclass(frozen=True)
class Row:
    """One line of a plot, or one place along a plot: its label and its figures."""

    label: str
    marks: tuple[Mark, ...]


class LogAxis:
    """Places on a log axis, in per cent; 0 and what is not finite have places of their own at its ends.

    Args:
        values: all that is to be placed.
        first, last: per cent of the ends.
    """

    def __init__(self, values: Iterable[float | None], first: float, last: float) -> None:
        values = list(values)
        positive = [value for value in values if value is not None and value > 0]
        self._zero = any(value is not None and value <= 0 for value in values)
        self._endless = any(value is None for value in values)
        self._ticks = _around(min(positive, default=1.0), max(positive, default=1.0))
        self._low, self._decades = math.log10(self._ticks[0]), math.log10(self._ticks[-1] / self._ticks[0])
        # An end for 0 or for what is not finite takes an eighth of the axis.
        eighth = (last - first) / 8
        self._ends = (first, last)
        self._first, self._last = first + eighth * self._zero, last - eighth * self._endless

    def place(self, value: float | None) -> float:
        """Where ``value`` is, per cent."""
        if value is None:
            return self._ends[1]
        if value <= 0:
            return self._ends[0]
        return round(self._first + (self._last - self._first) * (math.log10(value) - self._low) / self._decades, 2)

    def ticks(self) -> list[tuple[float, str]]:
        """Per cent and label of each tick."""
        found = [(self.place(value), _tick(value)) for value in self._ticks]
        if self._zero:
            found.insert(0, (self._ends[0], "0"))
        if self._endless:
            found.append((self._ends[1], "not finite"))
        return found


def _around(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around what is shown; where that is more than two decades, powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 2:
        stride = math.ceil((last - first) / 8)
        return [10.0**decade for decade in range(first, last + stride, stride)]
    steps = [factor * 10.0**decade for decade in range(first - 1, last + 1) for factor in (1, 2, 5)]
    below = max(index for index, step in enumerate(steps) if step <= low * 1.0001)
    above = min((index for index, step in enumerate(steps) if step >= high * 0.9999), default=len(steps) - 1)
    return steps[below : max(above, below + 1) + 1]


def _tick(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}"


def rows_plot(
    title: str, description: str, rows: Sequence[Row], legend: Sequence[tuple[str, str]], axis: str
) -> Drawing:
    """A plot with one line a row, figures from left to right."""
    drawing = Drawing(title, description, legend=list(legend))
    scale = LogAxis((v for row in rows for mark in row.marks for v in (mark.low, mark.high)), 3.0, 97.0)
    top, step = 6.0, 58.0
    bottom = top + step * len(rows)
    _vertical_grid(drawing, scale, top, bottom, axis)
    for index, row in enumerate(rows):
        y = top + step * index + 36
        drawing.add("text", x="0", y=y - 24, text=shortened(row.label, 48), title=row.label)
        drawing.add("line", x1="0", x2="100%", y1=y, y2=y, class_="track")
        for mark in row.marks:
            lane = y + _BELOW.get(mark.series, 0)
            _mark(drawing, mark, (scale.place(mark.low), lane), (scale.place(mark.high), lane))
    drawing.height = bottom + 38
    return drawing


def _vertical_grid(drawing: Drawing, scale: LogAxis, top: float, bottom: float, axis: str) -> None:
    ticks = scale.ticks()
    for index, (percent, label) in enumerate(ticks):
        anchor = "start" if index == 0 else "end" if index == len(ticks) - 1 else "middle"
        x = "0" if index == 0 else "100%" if index == len(ticks) - 1 else f"{percent}%"
        drawing.add("line", x1=f"{percent}%", x2=f"{percent}%", y1=top, y2=bottom, class_="grid")
        drawing.add("text", x=x, y=bottom + 15, text_anchor=anchor, class_="tick", text=label)
    drawing.add("text", x="0", y=bottom + 33, class_="quiet", text=axis)


_CROWDED = 6
"""More rows than this side by side have small marks, near each other."""


def series_plot(
    title: str, description: str, rows: Sequence[Row], legend: Legend, axis: str, *, along: str = ""
) -> Drawing:
    """A plot with the rows side by side, from left to right, and figures from the bottom up.

    Args:
        title, description, rows, legend: of the plot.
        axis: what the figures are.
        along: what the rows are, where their labels are numbers alone.
    """
    crowded = len(rows) > _CROWDED
    drawing = Drawing(title, description, legend=list(legend), upright=True, crowded=crowded)
    height, top = 200.0, 36.0
    scale = LogAxis((v for row in rows for mark in row.marks for v in (mark.low, mark.high)), 0.0, 100.0)

    def y(value: float | None) -> float:
        return round(top + height * (1 - scale.place(value) / 100), 1)

    drawing.add("text", x="0", y=10, class_="quiet", text=axis)
    for percent, label in scale.ticks():
        line = round(top + height * (1 - percent / 100), 1)
        drawing.add("line", x1="0", x2="100%", y1=line, y2=line, class_="grid")
        drawing.add("text", x="0", y=line - 3, class_="tick", text=label)
    drawing.add("text", x="0", y=top + height + 17, class_="tick", text=along)
    first, last = 16.0, 90.0
    if crowded:
        # Where there is no room for pixels, marks of one row stand apart by parts of the way to the next one.
        way = (97.0 - first) / len(rows)
        last = 97.0 - way / 2
    every = math.ceil(len(rows) / 8)
    for index, row in enumerate(rows):
        x = round((first + last) / 2 if len(rows) == 1 else first + (last - first) * index / (len(rows) - 1), 2)
        if index % every == 0:
            label = shortened(row.label, 10)
            drawing.add("text", x=f"{x}%", y=top + height + 17, text_anchor="middle", class_="tick", text=label)
        for mark in row.marks:
            aside = _ASIDE.get(mark.series, 0)
            at = round(x + aside / _WIDEST * way, 2) if crowded else x
            move = f"scale({_SMALL})" if crowded else f"translate({aside},0)"
            _mark(drawing, mark, (at, y(mark.low)), (at, y(mark.high)), move, upright=True)
    drawing.height = top + height + 25
    return drawing


_SHAPES = {
    "circle": "M-5,0 a5,5 0 1,0 10,0 a5,5 0 1,0 -10,0 z",
    "diamond": "M0,-6 L6,0 L0,6 L-6,0 z",
    "square": "M-4.5,-4.5 H4.5 V4.5 H-4.5 z",
    "up": "M-5.5,4.5 L0,-5.5 L5.5,4.5 z",
    "down": "M-5.5,-4.5 L0,5.5 L5.5,-4.5 z",
    "bar": "M0,-8 V8",
    "dash": "M-14,0 H14",
}
SHAPE_OF = {
    "kernel-host": "circle",
    "tensorrt": "down",
    "onnxruntime": "up",
    "runner": "circle",
    "pytorch": "square",
    "unfused": "diamond",
    "limit": "bar",
    "plugin": "circle",
    "native": "diamond",
    "floor": "bar",
}
"""Series differ in shape as well as in colour."""

_ASIDE = {"tensorrt": -28, "kernel-host": -14, "onnxruntime": 0, "pytorch": 14, "unfused": 28}
_BELOW = {"pytorch": 13, "unfused": -13, "native": -13}
"""Pixels by which marks stand apart, side by side or one below the other, so that none hides another."""

_WIDEST = 70
"""Pixels of all that stands side by side."""

_SMALL = 0.6
"""Size of the marks of a plot with many rows."""


def shape_path(series: str, *, upright: bool = False) -> str:
    """The outline of a series' mark, round (0, 0)."""
    shape = SHAPE_OF[series]
    return _SHAPES["dash" if shape == "bar" and upright else shape]


def _mark(
    drawing: Drawing,
    mark: Mark,
    low: tuple[float, float],
    high: tuple[float, float],
    move: str | None = None,
    *,
    upright: bool = False,
) -> None:
    """Draws a figure at ``low``, a place in per cent and in pixels, and the span to ``high`` where that is another."""
    if low != high:
        drawing.add(
            "line",
            x1=f"{low[0]}%",
            x2=f"{high[0]}%",
            y1=low[1],
            y2=high[1],
            class_=f"span {mark.series}",
            title=mark.title,
        )
    for x, y in dict.fromkeys((low, high)):
        # A path has no places in per cent; a picture within the picture has.
        drawing.add(
            "svg",
            x=f"{x}%",
            y=y,
            overflow="visible",
            class_=f"mark {mark.series}",
            text=shape_path(mark.series, upright=upright),
            title=mark.title,
            move=move,
        )
