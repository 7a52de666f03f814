"""One model all the way: DeepSeek-V3's architecture from PyTorch to a TensorRT engine, each step checked as it goes."""

import os
from dataclasses import dataclass
from pathlib import Path

from moetrt import trtexec
from moetrt.console import Output
from moetrt.files import output_directory

SOURCE = "moetrt.models:deepseek_v3"
PROFILE = {"input_ids": ((1, 1), (1, 16), (4, 64))}

_BATCH, _SEQUENCE = 2, 24
_STEPS = 6


@dataclass(frozen=True)
class Figure:
    """One line of the summary: what was to come out and what did."""

    what: str
    wanted: str
    got: str
    ok: bool


def run_demo(out: Output, folder: str | os.PathLike[str], *, seed: int = 0) -> list[str]:
    """Runs every step, prints each and the summary.

    Args:
        out: where to print.
        folder: where the files go.
        seed: of the inputs that PyTorch and ONNX Runtime are compared on.

    Returns:
        What fell short, empty when nothing did.

    Raises:
        MoetrtError: a step could not be done at all.
    """
    target = output_directory(folder)
    # Heavy imports come after the folder is known to be writable.
    from moetrt import backends
    from moetrt.capture import export
    from moetrt.engine import build_engine
    from moetrt.library import find_plugin_library
    from moetrt.mapping import map_file
    from moetrt.parity import compare
    from moetrt.source import load_source

    out.heading("moetrt demo: a DeepSeek-V3-architecture model, from PyTorch to a TensorRT engine")
    library = find_plugin_library()
    backends.choose(backends.TENSORRT_RTX, progress=out.line)

    with out.step(f"[1/{_STEPS}] model") as step:
        source = load_source(SOURCE)
        step.result = f"{source.description}, random weights, {source.tails_expected} MoE layers"

    with out.step(f"[2/{_STEPS}] export to ONNX") as step:
        exported = export(source, target, progress=step.progress)
        step.result = f"{exported.model_path.name}: {exported.nodes} nodes, opset {exported.opset}"

    mapped = target / "mapped.onnx"
    with out.step(f"[3/{_STEPS}] map the tails") as step:
        report = map_file(exported.model_path, mapped, report_path=target / "report.json")
        step.ok = report.complete
        step.result = f"{mapped.name}: {report.found} found, {report.expected} expected, {report.mapped} mapped"
        step.details = [f"{site.name}: {site.operator or site.reason}" for site in report.sites]

    with out.step(f"[4/{_STEPS}] ONNX Runtime, PyTorch") as step:
        sizes = {"batch": _BATCH, "seq": _SEQUENCE}
        parity = compare(mapped, source, seed=seed, sizes=sizes, progress=step.progress)
        step.ok = parity.passed
        step.result = "agree" if parity.passed else "DIFFER"
        step.details = parity.lines()

    engines = {}
    for number, plugin in ((5, library), (6, None)):
        with out.step(f"[{number}/{_STEPS}] engine {'with the' if plugin else 'without'} plugin") as step:
            engine = build_engine(
                mapped,
                target / f"{'plugin' if plugin else 'baseline'}.engine",
                backend=backends.TENSORRT_RTX,
                plugin_library=plugin,
                profiles=PROFILE,
                progress=step.progress,
            )
            engines[plugin is not None] = engine
            step.ok = len(engine.plugin_layers) == (report.expected if plugin else 0)
            step.result = f"{engine.path.name}: {engine.layer_count} layers, {len(engine.plugin_layers)} of the plugin"
            step.details = [f"PLUGIN_V3 {layer}" for layer in engine.plugin_layers]

    with_plugin, baseline = engines[True], engines[False]
    worst = parity.worst
    figures = [
        Figure(
            "tails found / expected / mapped",
            f"{source.tails_expected} each",
            f"{report.found} / {report.expected} / {report.mapped}",
            report.complete,
        ),
        Figure("worst error against float64", f"<= {worst.worst_tolerance:.1e}", f"{worst.worst:.1e}", parity.passed),
        Figure("  PyTorch's own", "", f"{worst.pytorch_worst:.1e}", True),
        Figure(
            "PLUGIN_V3 layers, with the plugin",
            str(source.tails_expected),
            str(len(with_plugin.plugin_layers)),
            len(with_plugin.plugin_layers) == source.tails_expected,
        ),
        Figure("PLUGIN_V3 layers, without", "0", str(len(baseline.plugin_layers)), not baseline.plugin_layers),
    ]
    _summary(out, target, figures, f"{with_plugin.backend} {with_plugin.version}")
    _commands(out, mapped, library)
    return [figure.what.strip() for figure in figures if not figure.ok]


def _summary(out: Output, target: Path, figures: list[Figure], backend: str) -> None:
    out.line()
    out.heading("Summary")
    out.table(
        ("", "wanted", "got", ""),
        [(figure.what, figure.wanted, figure.got, "ok" if figure.ok else "FELL SHORT") for figure in figures],
    )
    out.line()
    out.line(f"Files in {target.resolve()}")
    for name, what in (
        ("model.onnx", "the exported model; its weights, and mapped.onnx's, are in model.onnx.data"),
        ("mapped.onnx", "each tail one plugin node, with the operator's body as a function"),
        ("report.json", "each tail, its attributes, dtypes and shapes"),
        ("plugin.engine", f"built by {backend} with the plugin"),
        ("baseline.engine", "the same file built without it"),
    ):
        out.line(f"  {name:<16} {what}")


def _commands(out: Output, mapped: Path, library: Path) -> None:
    out.line()
    out.heading("On a GPU machine (H100, H200, B200 too), with TensorRT 11's trtexec")
    engine = mapped.with_name("gpu.engine")
    shapes = {name: best for name, (_, best, _) in PROFILE.items()}
    for command in (
        trtexec.build_command(mapped, engine, plugin_library=library, profile=PROFILE),
        trtexec.run_command(engine, plugin_library=library, shapes=shapes, export_prefix=mapped.with_name("gpu")),
    ):
        out.line(trtexec.command_text(command))
    out.line("Without --dynamicPlugins the first builds the baseline. samples/trtexec_commands.py: other versions.")
