"""One model all the way: DeepSeek-V3's architecture from PyTorch to a TensorRT engine, each step checked as it goes."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetrt.bench import trtexec
from moetrt.console import Output
from moetrt.files import output_directory

if TYPE_CHECKING:
    from moetrt.engine import EngineInfo
    from moetrt.mapping_report import MappingReport
    from moetrt.parity import ParityReport

SOURCE = "moetrt.models:deepseek_v3"
"""The model, as `moetrt export` takes it."""

TAILS = 3
"""How many MoE layers, and so tails, that model has."""

PROFILE: Mapping[str, trtexec.Profile] = {"input_ids": ((1, 1), (1, 16), (4, 64))}
"""Smallest, most common and largest [batch, seq] that the engines are built for."""

_COMPARED = {"batch": 2, "seq": 24}


@dataclass(frozen=True)
class DemoResult:
    """What the steps gave.

    Attributes:
        folder: where the files lie.
        report: of the mapping.
        parity: ONNX Runtime against PyTorch.
        engine: built with the plugin.
        baseline: the same file built without it.
        page: the report, a page that shows all of this.
    """

    folder: Path
    report: "MappingReport"
    parity: "ParityReport"
    engine: "EngineInfo"
    baseline: "EngineInfo"
    page: Path

    def figures(self) -> list["Figure"]:
        """What was wanted and what came out."""
        report, worst = self.report, self.parity.worst
        counts = (report.found, report.expected, report.mapped)
        layers, native = len(self.engine.plugin_layers), len(self.baseline.plugin_layers)
        return [
            Figure(
                "tails found / expected / mapped",
                " / ".join([str(TAILS)] * 3),
                " / ".join(map(str, counts)),
                counts == (TAILS,) * 3,
            ),
            Figure(
                "ONNX Runtime's error against float64",
                f"<= {worst.worst_tolerance:.1e}",
                f"{worst.worst:.1e} (PyTorch {worst.pytorch_worst:.1e})",
                self.parity.passed,
            ),
            Figure("PLUGIN_V3 layers, with the plugin", str(TAILS), str(layers), layers == TAILS),
            Figure("PLUGIN_V3 layers, without it", "0", str(native), native == 0),
        ]


@dataclass(frozen=True)
class Figure:
    """One line of the summary: what was to come out and what did."""

    what: str
    wanted: str
    got: str
    ok: bool


def run_demo(out: Output, folder: str | os.PathLike[str], *, seed: int = 0) -> DemoResult:
    """Runs every step and prints it.

    Args:
        out: where to print.
        folder: where the files go.
        seed: of the inputs that PyTorch and ONNX Runtime are compared on.

    Raises:
        MoetrtError: a step could not be done at all.
    """
    target = output_directory(folder)
    # Slow to import: not before the folder is known to be writable.
    from moetrt import backends
    from moetrt.capture import export
    from moetrt.engine import build_engine
    from moetrt.library import find_plugin_library
    from moetrt.mapping import map_file
    from moetrt.parity import compare
    from moetrt.report import make_report, write_report
    from moetrt.source import load_source

    out.heading("moetrt demo: a DeepSeek-V3-architecture model, from PyTorch to a TensorRT engine")
    library = find_plugin_library()
    backends.choose(backends.TENSORRT_RTX, progress=out.line)

    with out.step(_title(1, "model")) as step:
        source = load_source(SOURCE)
        step.result = f"{source.description}, random weights, {source.tails_expected} MoE layers"

    with out.step(_title(2, "export to ONNX")) as step:
        exported = export(source, target, progress=step.progress)
        step.result = f"{exported.model_path.name}: {exported.nodes} nodes, opset {exported.opset}"

    mapped = target / "mapped.onnx"
    with out.step(_title(3, "map the tails")) as step:
        report = map_file(exported.model_path, mapped, report_path=target / "mapping.json")
        step.ok = report.complete
        step.result = f"{mapped.name}: {report.summary()}"
        step.details = [site.name if site.matched else f"{site.name}: {site.reason}" for site in report.sites]

    with out.step(_title(4, "compare, by Polygraphy")) as step:
        parity = compare(mapped, source, seed=seed, sizes=_COMPARED, progress=step.progress)
        step.ok = parity.passed
        step.result = f"ONNX Runtime and PyTorch {'agree' if parity.passed else 'DIFFER'}"
        step.details = parity.lines()
    parity.write_json(target / "parity.json")

    def build(plugin: Path | None, name: str, title: str) -> "EngineInfo":
        with out.step(title) as step:
            engine = build_engine(
                mapped,
                target / name,
                backend=backends.TENSORRT_RTX,
                plugin_library=plugin,
                profiles=PROFILE,
                progress=step.progress,
            )
            step.ok = len(engine.plugin_layers) == (TAILS if plugin else 0)
            step.result = f"{name}: {engine.layer_count} layers, {len(engine.plugin_layers)} of them PLUGIN_V3"
            step.details = [f"PLUGIN_V3 {layer}" for layer in engine.plugin_layers]
        return engine

    engine = build(library, "plugin.engine", _title(5, "build with the plugin"))
    baseline = build(None, "baseline.engine", _title(6, "build without it"))
    page = write_report(make_report(target), target)
    return DemoResult(target, report, parity, engine, baseline, page)


def _title(number: int, what: str) -> str:
    return f"[{number}/6] {what:<22}"


def print_summary(out: Output, result: DemoResult) -> None:
    """Prints what came out, where the files lie, and what to run on a machine with a GPU."""
    out.line()
    out.heading("Summary")
    rows = [(figure.what, figure.wanted, figure.got, "ok" if figure.ok else "SHORT") for figure in result.figures()]
    out.table(("", "wanted", "got", ""), rows)
    out.line()
    out.line(f"Files in {result.folder.resolve()}:")
    for name, what in (
        ("model.onnx", "the exported model; its weights, mapped.onnx's too, are in model.onnx.data"),
        ("mapped.onnx", "each tail is one plugin node, with the operator's body as a function"),
        ("report.html", "all figures and pictures on one page; the same as report.json and report.md"),
        ("mapping.json", "each tail, its attributes, dtypes and shapes"),
        ("parity.json", "the comparison, with every figure"),
        ("plugin.engine", f"{result.engine.backend} {result.engine.version}, with the plugin; see plugin.engine.json"),
        ("baseline.engine", "the same file, built without it"),
    ):
        out.line(f"  {name:<16}{what}")
    out.line()
    out.line("With a GPU and TensorRT, this times both; elsewhere it writes a script for the machine that has them:")
    out.line()
    words = ["moetrt", "bench", str(result.folder / "mapped.onnx"), "-o", str(result.folder)]
    for option, position in (("--min", 0), ("--opt", 1), ("--max", 2)):
        words += [option, trtexec.shapes_text({name: bounds[position] for name, bounds in PROFILE.items()})]
    out.line(shlex.join(words))
