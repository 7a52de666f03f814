"""A report as one HTML page, as JSON and as Markdown: the same facts three times, written together."""

import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from moetrt.console import visible
from moetrt.errors import InputError
from moetrt.files import check_distinct, output_file, write_atomically
from moetrt.report import drawings
from moetrt.report.drawings import Drawing, Mark, Row, rows_plot, series_plot
from moetrt.report.facts import FORMAT, BenchFacts, LengthParity, OutputParity, ParityFacts, Report, Spread, Timing
from moetrt.report.graph import layer_label

PAGE = "report.html"

_SYMBOLS = {
    "good": "✓",
    "bad": "✕",
    "missing": "–",
    "part": "◧",
    "mapped": "■",
    "finalize only": "◧",
    "not mapped": "✕",
    "no tail found": "·",
    "dense": "·",
    "measured": "•",
}
"""States have a symbol beside their colour."""


_LONGEST_LABEL = 40
"""Characters of a name beside a verdict, which must stay in sight; its title has the whole."""


def page_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that `write_report` writes into the folder of a report where no page is named."""
    return [(Path(folder) / PAGE).with_suffix(suffix) for suffix in (".html", ".json", ".md")]


def write_report(report: Report, folder: str | os.PathLike[str], page: str | os.PathLike[str] | None = None) -> Path:
    """Writes the report as HTML, and as JSON and Markdown beside it.

    Args:
        report: the facts.
        folder: what the report is on.
        page: the HTML file; its siblings have the same name with ``.json`` and ``.md``. None: ``folder/report.html``.

    Returns:
        The HTML file.

    Raises:
        InputError: the page has no name that ends in .html, one of the files is one that the report was made of, or
            cannot be written. None is written then.
        InputTypeError: a path is no path.
    """
    target = output_file(Path(folder) / PAGE if page is None else page)
    if target.suffix != ".html":
        raise InputError(f"output file was '{target}'; a name that ends in .html is taken")
    texts = {".html": html(report), ".json": json_text(report), ".md": markdown(report)}
    targets = {suffix: output_file(target.with_suffix(suffix)) for suffix in texts}
    check_distinct(
        [(f"{entry.format} file", Path(folder) / entry.file) for entry in report.provenance],
        [("report", path) for path in targets.values()],
    )
    with ExitStack() as stack:
        temporaries = {suffix: stack.enter_context(write_atomically(path)) for suffix, path in targets.items()}
        for suffix, text in texts.items():
            temporaries[suffix].write_text(text, encoding="utf-8")
    return target


def json_text(report: Report) -> str:
    """The facts as JSON; what is not finite is null."""
    return json.dumps({"format": FORMAT} | _finite(asdict(report)), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def html(report: Report) -> str:
    """The page: one file that needs no other and no network."""
    picture = report.mapping.picture if report.mapping is not None else None
    return (
        _environment()
        .get_template(PAGE)
        .render(
            report=report,
            before=picture
            and drawings.before(picture.nodes, picture.site.inputs, picture.site.outputs, picture.constants),
            after=picture
            and drawings.after(
                picture.site.operator or "", picture.site.inputs, picture.site.outputs, picture.site.attributes
            ),
            parity_plots=[parity_plots(facts) for facts in report.parity],
            libraries={
                engine.plugin_library: engine.plugin_library_sha256
                for engine in report.engines
                if engine.plugin_library
            },
            bench_plots=[bench_plots(facts) for facts in report.benchmarks],
        )
    )


def markdown(report: Report) -> str:
    """The page for a terminal, a pull request or a wiki."""
    text = _environment().get_template("report.md").render(report=report)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _visible(value: object) -> object:
    """What a template prints: text of others' files with unseen characters escaped."""
    return visible(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("moetrt.report", "templates"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sci": scientific,
        "length_verdict": length_verdict,
        "number": _number,
        "us": microseconds,
        "percent": percent,
        "spread": spread,
        "bytes": _bytes,
        "symbol": _SYMBOLS.__getitem__,
        "slug": lambda state: state.replace(" ", "-"),
        "attributes": lambda entries: ", ".join(f"{name} {value:g}" for name, value in entries.items()),
        "md": _escaped_markdown,
        "short": lambda text: drawings.shortened(text, _LONGEST_LABEL),
        "one_line": lambda text: " ".join(str(text).split()),
        "indented": lambda text: "\n".join(f"    {line}" for line in text.splitlines()),
    }
    environment.globals |= {"shape_path": drawings.shape_path, "runners": runners}
    return environment


# ---------------------------------------------------------------------------------------------------- figures in words


def length_verdict(length: LengthParity) -> str:
    """The verdict over one length, in a word or two."""
    if not length.passed:
        return "differs"
    return "passed" if length.measured else "not measured"


def scientific(value: float | None) -> str:
    """An error: three digits."""
    return "not finite" if value is None else f"{value:.2e}" if value else "0"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def microseconds(milliseconds: float | None) -> str:
    """A time in microseconds; a dash where it is not known."""
    return "–" if milliseconds is None else f"{milliseconds * 1e3:.2f}"


def percent(share: float | None) -> str:
    """A part of 1."""
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def spread(value: Spread | None, unit: float = 1.0, digits: int = 1) -> str:
    """Median ± interquartile range; both medians where only bounds are known; and None is what was not found."""
    if value is None:
        return "not found"
    if value.high is not None:
        return f"{value.median * unit:.{digits}f} to {value.high * unit:.{digits}f}"
    iqr = "" if value.iqr is None else f" ± {value.iqr * unit:.{digits}f}"
    return f"{value.median * unit:.{digits}f}{iqr}"


def _bytes(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _escaped_markdown(text: object) -> str:
    """Text that stands in a line or a cell of Markdown as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(str(text).split()))


# --------------------------------------------------------------------------------------------------------------- plots

_UNFUSED = "onnxruntime-unmapped"
"""The runner that others are held against; its own verdict is in the table."""

_RUNNERS = {
    "pytorch": "PyTorch in the model's own dtype: the model as PyTorch runs it, in the type that its weights have",
    "onnxruntime": "ONNX Runtime on the mapped file; of a tail, on the function that the file has for its node",
    _UNFUSED: "ONNX Runtime on the file before mapping, the unfused path",
    "kernel-host": "the plugin's own kernel, its CUDA source compiled for the CPU and run on the tail's inputs",
    "tensorrt": "the TensorRT engine with the plugin, on the GPU",
    "tensorrt-without-plugin": "the TensorRT engine of the same file without the plugin, on the GPU",
}
"""What each runner is."""


def runners(facts: ParityFacts) -> dict[str, str]:
    """What was run in a comparison, in a few words each."""
    ran = {"pytorch", *(output.runner for output in facts.outputs)}
    ran |= {_UNFUSED} if any(output.has_unfused for output in facts.outputs) else set()
    return {name: text for name, text in _RUNNERS.items() if name in ran}


_PARITY_LEGEND = (
    ("pytorch", "PyTorch in the model's own dtype"),
    ("unfused", "the unfused path, in ONNX Runtime before mapping"),
    ("limit", "tolerance"),
)
_ERROR_AXIS = "RMS error against float64, relative (log)"


def parity_plots(facts: ParityFacts) -> list[Drawing]:
    """The errors of a comparison: of the model's outputs, then of each output of the tails, tail by tail."""
    whole = [output for output in facts.outputs if output.tail is None and output.runner != _UNFUSED]
    plots = []
    if whole:
        rows = [Row(f"{output.label}, {output.runner}", _error_marks([output], "runner")) for output in whole]
        legend = _legend(whole, [("runner", "the runner named in the line")])
        plots.append(rows_plot("Error of the model's outputs", _described(whole), rows, legend, _ERROR_AXIS))
    of_tails = [output for output in facts.outputs if output.tail is not None]
    for name in dict.fromkeys(output.output for output in of_tails):
        outputs = [output for output in of_tails if output.output == name]
        by_tail: dict[str | None, list[OutputParity]] = {}
        for output in outputs:
            by_tail.setdefault(output.tail, []).append(output)
        labels = [layer_label(tail or "") for tail in by_tail]
        layers = all(label.startswith("layer ") for label in labels)
        rows = [
            Row(label.removeprefix("layer ") if layers else label, _error_marks(group))
            for label, group in zip(labels, by_tail.values(), strict=True)
        ]
        legend = _legend(outputs, [(_series(runner), runner) for runner in dict.fromkeys(o.runner for o in outputs)])
        title, described = f"Error of each tail's {name}", _described(outputs)
        plots.append(series_plot(title, described, rows, legend, _ERROR_AXIS, along="layer" if layers else ""))
    return plots


def _series(runner: str) -> str:
    """The class of a runner's marks; one that has none of its own looks like any."""
    return runner if runner in drawings.SHAPE_OF else "runner"


def _legend(outputs: Sequence[OutputParity], runners: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    unfused = any(output.has_unfused for output in outputs)
    return [*runners, *(entry for entry in _PARITY_LEGEND if entry[0] != "unfused" or unfused)]


def _error_marks(outputs: Sequence[OutputParity], series: str | None = None) -> tuple[Mark, ...]:
    """The figures of the runners that an output has, and what they are held against, each once."""
    figures = []
    for output in outputs:
        figures.append(("limit", output.rms_tolerance, "tolerance"))
        figures.append(("pytorch", output.pytorch_rms, "PyTorch"))
        if output.has_unfused:
            figures.append(("unfused", output.unfused_rms, "unfused path"))
    figures += [(series or _series(output.runner), output.rms, output.runner) for output in outputs]
    label = outputs[0].label
    return tuple(Mark(kind, at, at, f"{label}: {who} {scientific(at)}") for kind, at, who in dict.fromkeys(figures))


def _described(outputs: Sequence[OutputParity]) -> str:
    return "; ".join(
        f"{output.label}, {output.runner}: {scientific(output.rms)}, PyTorch {scientific(output.pytorch_rms)}, "
        f"{f'unfused {scientific(output.unfused_rms)}, ' if output.has_unfused else ''}"
        f"tolerance {scientific(output.rms_tolerance)}"
        for output in outputs
    )


_TIME_AXIS = "GPU time, microseconds (log)"


def bench_plots(facts: BenchFacts) -> list[Drawing]:
    """Times by profile point with and without the plugin: end to end, then in the tails, with their floor."""
    legend = [("plugin", "with the plugin"), ("native", "TensorRT's own layers")]
    whole = [Row(point.shapes, _time_marks(point.end_to_end)) for point in facts.points]
    tails = [Row(point.shapes, _time_marks(point.all_tails)) for point in facts.points]
    floor = any(point.all_tails.floor_ms is not None for point in facts.points)
    return [
        rows_plot("End to end", _times_described(facts, whole=True), whole, legend, _TIME_AXIS),
        rows_plot(
            "All tails",
            _times_described(facts, whole=False),
            tails,
            [*legend, *([("floor", "floor: the bytes at the memory's bandwidth")] if floor else [])],
            _TIME_AXIS,
        ),
    ]


def _time_marks(timing: Timing) -> tuple[Mark, ...]:
    marks = []
    if timing.floor_ms is not None:
        at = timing.floor_ms * 1e3
        marks.append(Mark("floor", at, at, f"floor {microseconds(timing.floor_ms)} µs"))
    for series, value, who in (("native", timing.native, "native layers"), ("plugin", timing.plugin, "plugin")):
        if value is None:
            continue
        low, high = value.median * 1e3, (value.median if value.high is None else value.high) * 1e3
        marks.append(Mark(series, low, high, f"{who} {spread(value, 1e3)} µs"))
    return tuple(marks)


def _times_described(facts: BenchFacts, *, whole: bool) -> str:
    timings = [(point.shapes, point.end_to_end if whole else point.all_tails) for point in facts.points]
    return "; ".join(
        f"{shapes}: plugin {spread(timing.plugin, 1e3)} µs, native {spread(timing.native, 1e3)} µs"
        for shapes, timing in timings
    )
