"""The command ``moetrt``: each subcommand calls one function of the package and prints what it returned.

Exit codes: 0 done; 1 done, but short of what was asked (tails not mapped, parity not reached, plugin layers missing);
2 the input was not taken, or the system refused (a full disk); 3 a fault of moetrt itself; 130 interrupted; 141 who
reads the output left (`| head`), as other tools end then.
"""

import functools
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from moetrt.errors import InputError, MoetrtError
from moetrt.provenance import keep_command

# Everything else is imported where it is used: `moetrt --help` must not wait for torch.

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_EXTRAS = {"transformers": "hf"}
_SPREAD_OPTIONS = ("--min", "--opt", "--max", "--shapes", "--dynamic", "--point")
# Of these, the words that follow belong to the one before: each time the option is given is another value.
_JOINED_OPTIONS = ("--point", "--shapes")
_SPREAD_WORD = re.compile(r"[^-].*:\d")


_PIPE_CLOSED = 141
"""What the shell says of a tool that SIGPIPE ended, 128 + 13; 1 would say that the run fell short."""

_PRINT_ALONE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "inspect": lambda _: True,
    "doctor": lambda _: True,
    "families": lambda options: not (options["json_path"] or options["page_path"]),
    "bench": lambda options: options["dry_run"],
}
"""Commands whose only product, with such options, is what they print."""


class Shortfall(MoetrtError):
    """The run ended well but reached less than was asked for; exit code 1."""


class _Command(click.Command):
    """A command whose options for shapes take several words, as in ``--min ids:1x1 mask:1x1``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option, awaits_value = "", False
        for word in args:
            name, equals, _ = word.partition("=")
            if awaits_value:
                awaits_value = False
            elif name in _SPREAD_OPTIONS:
                option, awaits_value = name, not equals
            elif option in _JOINED_OPTIONS and _SPREAD_WORD.match(word):
                spread[-1] += f",{word}"
                continue
            elif option and _SPREAD_WORD.match(word):
                spread.append(option)
            else:
                option = ""
            spread.append(word)
        return super().parse_args(ctx, spread)


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Registers a subcommand with the options that all of them have; the function gets an `Output` first."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
        @click.option("-v", "--verbose", is_flag=True, help="On a fault of moetrt itself, print the traceback.")
        @functools.wraps(function)
        def run(*, quiet: bool, verbose: bool, **options: Any) -> None:
            from moetrt.console import Output

            # Asked first: the work may be long.
            if sys.stdout is None and not quiet and _PRINT_ALONE.get(name, lambda _: False)(options):
                raise InputError(f"the output cannot be written: stdout is closed, and {name} does nothing but print")
            if verbose:
                click.get_current_context().find_root().meta["verbose"] = True
            function(Output(quiet=quiet), **options)

        return cli.command(name, cls=_Command, context_settings=_SETTINGS)(run)

    return decorate


def _output_file(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("-o", "--output", required=True, metavar="FILE", help="The file to write.")(function)


@click.group(context_settings=_SETTINGS)
@click.version_option(package_name="moetrt", prog_name="moetrt")
def cli() -> None:
    """Brings the MoE finalize + add + RMSNorm tail of PyTorch models to TensorRT."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process; a user's mistake is one line on stderr, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name may hold what the terminal's encoding has not: it is shown escaped, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:] if arguments is None else arguments)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            # Full or gone, as `run` has said where it could: the interpreter would try again and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    context: dict[str, Any] = {}
    try:
        with cli.make_context("moetrt", list(arguments)) as root:
            context = root.meta
            keep_command(root, arguments)
            cli.invoke(root)
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except Shortfall as error:
        return _complain(str(error), 1)
    except MoetrtError as error:
        return _complain(str(error), 2)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`): nothing more can be said.
        return _PIPE_CLOSED
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            return _complain(f"{error.name} is not installed; pip install 'moetrt[{_EXTRAS[error.name]}]'", 2)
        if context.get("verbose"):
            traceback.print_exc()
        if isinstance(error, OSError) and error.strerror:
            # A file that is open already, such as stdout, is not named in the error.
            where = f"'{error.filename}'" if error.filename else "the output cannot be written"
            return _complain(f"{where}: {error.strerror}", 2)
        return _complain(f"unexpected {type(error).__name__}: {error} (-v prints the traceback)", 3)


def _complain(message: str, code: int) -> int:
    # Where stderr cannot be written, the exit code still says it.
    with suppress(OSError):
        from moetrt.console import visible

        click.echo(f"moetrt: error: {visible(' '.join(message.split()))}", err=True)
    return code


def _shapes(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Reads ``NAME:DIMS`` words, each of which may hold several separated by commas as trtexec's do."""
    from moetrt.profiles import parse_shapes

    return parse_shapes(part for word in words for part in re.split(r",(?=[^,]*:)", word))


def _shape_option(name: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", f"{name}_words", multiple=True, metavar="NAME:DIMS ...", help=text)


def _dtype_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--dtype", metavar="NAME", help="Convert the model first: fp32, fp16 or bf16.")(function)


@_command("export")
@click.argument("source")
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder that model.onnx is written to.")
@click.option("--opset", type=int, default=22, show_default=True, help="ONNX opset of the exported graph.")
@_dtype_option
@click.option(
    "--dynamic", multiple=True, metavar="NAME:DIM=SYMBOL,... ...", help="Dynamic dimensions; default: the source's."
)
@click.option("--static", is_flag=True, help="Fix every dimension at its size in the example inputs.")
@click.option(
    "--experts",
    metavar="FORM",
    default="gathered",
    show_default=True,
    help="Expert GEMMs of Transformers models: gathered (short inputs) or dense (long prompts).",
)
def export_command(
    out: Any,
    source: str,
    output: str,
    opset: int,
    dtype: str | None,
    dynamic: tuple[str, ...],
    static: bool,
    experts: str,
) -> None:
    """Export SOURCE, a Hugging Face folder or "package.module:factory", to ONNX with its tails kept recognisable."""
    if dynamic and static:
        raise InputError("--dynamic and --static were both given; one of them is taken")
    from moetrt.capture import export, parse_dynamic
    from moetrt.source import load_source

    chosen = parse_dynamic(dynamic) if dynamic else not static
    with out.step("load") as step:
        loaded = load_source(source, dtype=dtype)
        step.result = loaded.description
    with out.step("export") as step:
        result = export(loaded, output, opset=opset, dynamic=chosen, experts=experts, progress=step.progress)
        step.result = f"{result.model_path}: {result.nodes} nodes, opset {result.opset}"
        expected = "not known" if result.tails_expected is None else result.tails_expected
        step.details.append(f"tails: {expected} expected, {result.operators} captured")
        step.details += map(str, result.bounds.values())
    for other in result.stale:
        out.line(f"note: '{other}' reads '{result.data_path}', which holds other weights now: map again")
    out.line(f"next: moetrt map {result.model_path} -o {result.model_path.with_name('mapped.onnx')}")


@_command("map")
@click.argument("model")
@_output_file
@click.option("--report", metavar="FILE", help="Also write the report, one entry per site, as JSON.")
@click.option("--no-function", is_flag=True, help="Leave out the function bodies: only a plugin can run the result.")
@click.option("--allow-unmatched", is_flag=True, help="Exit 0 although some tails were not mapped.")
def map_command(
    out: Any, model: str, output: str, report: str | None, no_function: bool, allow_unmatched: bool
) -> None:
    """Map every MoE tail of MODEL, any ONNX file, to one plugin node."""
    from moetrt.mapping import map_file

    onto_itself = os.path.exists(output) and os.path.exists(model) and os.path.samefile(model, output)
    with out.step("map") as step:
        result = map_file(model, output, function=not no_function, report_path=report, progress=step.progress)
        step.result = f"{output}: {result.summary()}"
        step.ok = result.complete
    if result.sites:
        out.table(("tail", "became"), [(site.name, site.became) for site in result.sites])
    for note in result.notes:
        out.line(f"note: {note}")
    if onto_itself:
        out.line(
            "note: the file was mapped onto itself: the graph before mapping is gone, which moetrt compare holds the "
            "tails against; it exports the model anew where something differs, and --unmapped names a copy"
        )
    if not result.complete and not allow_unmatched:
        if not result.found and not result.expected:
            raise Shortfall(f"'{model}' has no MoE tail; '{output}' is a copy")
        raise Shortfall(f"not every tail of '{model}' was mapped: {result.summary()}; --allow-unmatched accepts that")


@_command("inspect")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(out: Any, file: str, as_json: bool) -> None:
    """Show the tails of FILE, their attributes, dtypes and shapes, and what each reader of the file will run."""
    from moetrt.inspection import inspect_file

    found = inspect_file(file)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        for line in found.lines():
            out.line(line)
    if found.refused:
        raise Shortfall(f"the plugin refuses {found.refused} of the {len(found.tails)} nodes in '{file}'")


@_command("build")
@click.argument("model")
@_output_file
@click.option("--backend", metavar="NAME", help="tensorrt or tensorrt-rtx; default: what this machine can build with.")
@click.option("--plugin", metavar="FILE", help="The plugin library; default: the one that moetrt was installed with.")
@click.option("--no-plugin", is_flag=True, help="Build the baseline: TensorRT's own layers for the same file.")
@_shape_option("min", "Smallest sizes of the inputs; default of each dynamic dimension: 1.")
@_shape_option("opt", "Sizes that the engine is tuned for; default: 32, or what of --min to --max is nearest to it.")
@_shape_option("max", "Largest sizes; default: 256, or --opt or --min where that is larger.")
@click.option(
    "--target", "targets", multiple=True, metavar="SM89", help="TensorRT-RTX alone: GPUs; default: SM80 and later."
)
def build_command(
    out: Any,
    model: str,
    output: str,
    backend: str | None,
    plugin: str | None,
    no_plugin: bool,
    min_words: tuple[str, ...],
    opt_words: tuple[str, ...],
    max_words: tuple[str, ...],
    targets: tuple[str, ...],
) -> None:
    """Build a TensorRT engine from the mapped MODEL, its tails run by the plugin."""
    if plugin and no_plugin:
        raise InputError("--plugin and --no-plugin were both given; one of them is taken")
    from moetrt.backends import choose
    from moetrt.engine import build_engine
    from moetrt.files import existing_file
    from moetrt.profiles import profile_text

    existing_file(model, "ONNX model")
    # Says where it makes the link that TensorRT-RTX's parser needs.
    choose(backend, progress=out.line)
    low, best, high = _shapes(min_words), _shapes(opt_words), _shapes(max_words)
    profiles = {name: (low.get(name), best.get(name), high.get(name)) for name in {**low, **best, **high}}
    with out.step("build") as step:
        engine = build_engine(
            model,
            output,
            backend=backend,
            plugin_library=None if no_plugin else plugin or True,
            profiles=profiles,
            targets=targets,
            progress=step.progress,
        )
        step.result = f"{engine.path}: {engine.backend} {engine.version}, {engine.layer_count} layers"
        step.ok = no_plugin or bool(engine.plugin_layers)
        step.details.append(f"plugin layers: {len(engine.plugin_layers)}")
        step.details += [f"  {layer}" for layer in engine.plugin_layers]
        ranges = {name: bounds for name, bounds in engine.profile.items() if len(set(bounds)) > 1}
        step.details += ["profile: smallest / tuned for / largest"] if ranges else []
        step.details += [f"  {name}: {profile_text(bounds)}" for name, bounds in ranges.items()]
    for warning in engine.warnings:
        out.line(f"warning: {warning}")
    out.line(f"description: {engine.sidecar}")
    if not no_plugin and not engine.plugin_layers:
        raise Shortfall(f"no layer of '{output}' is the plugin's: '{model}' has no mapped tail (moetrt map makes them)")


@_command("compare")
@click.argument("model")
@click.option("--against", required=True, metavar="SOURCE", help="The PyTorch model, as `moetrt export` takes it.")
@_dtype_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@_shape_option(
    "shapes",
    "Sizes of the inputs; given again, others, compared end to end. Default: those of the source's example, then 1 in "
    "each dynamic dimension, then the longest that the file allows, else 4 times the example.",
)
@click.option(
    "--unmapped", metavar="FILE", help="The file before mapping; default: model.onnx beside MODEL if it is that."
)
@click.option(
    "--experts-implementation",
    metavar="NAME",
    help="What the experts of a Transformers model run in PyTorch: eager, batched_mm or grouped_mm.",
)
@click.option("--engine", metavar="FILE", help="Run this engine too; needs a GPU.")
@click.option("--engine-without-plugin", metavar="FILE", help="Run this engine, built without the plugin, too.")
@click.option(
    "--backend", metavar="NAME", help="Of the engines: tensorrt or tensorrt-rtx; default: what this machine has."
)
@click.option("--plugin", metavar="FILE", help="The engine's plugin library; default: the one that came with moetrt.")
@click.option("--json", "json_path", metavar="FILE", help="Also write the report as JSON.")
@click.option("--report", "report_folder", metavar="DIR", help="Write parity.json there, and the page of that folder.")
@click.option("--save-inputs", metavar="FILE", help="Keep the inputs, as Polygraphy's --load-inputs takes them.")
@click.option("--load-inputs", metavar="FILE", help="Run on the inputs of this file in place of drawn ones.")
@click.option("--save-inputs-raw", metavar="DIR", help="Keep the inputs, as trtexec's --loadInputs takes them.")
def compare_command(
    out: Any,
    model: str,
    against: str,
    dtype: str | None,
    seed: int,
    shapes_words: tuple[str, ...],
    unmapped: str | None,
    experts_implementation: str | None,
    engine: str | None,
    engine_without_plugin: str | None,
    backend: str | None,
    plugin: str | None,
    json_path: str | None,
    report_folder: str | None,
    save_inputs: str | None,
    load_inputs: str | None,
    save_inputs_raw: str | None,
) -> None:
    """Run MODEL in ONNX Runtime, and its tails in the kernel, against the PyTorch SOURCE, measured against float64."""
    if load_inputs and shapes_words:
        raise InputError("--load-inputs and --shapes were both given; one of them is taken")
    from moetrt.files import check_distinct, existing_file, output_file
    from moetrt.onnx_files import files_of, load_model
    from moetrt.parity import compare, replay
    from moetrt.parity.walk import files_before_mapping
    from moetrt.report.pages import page_files
    from moetrt.source import load_source

    shapes = [_shapes([word]) for word in shapes_words]
    existing_file(model, "ONNX model")
    in_folder = os.path.join(report_folder, "parity.json") if report_folder else None
    # --json may name the very file that --report writes.
    reports = {os.path.realpath(path): path for path in (json_path, in_folder) if path}
    written = [*(("report", path) for path in reports.values()), ("inputs file", save_inputs)]
    written += [("page of the report", str(path)) for path in (page_files(report_folder) if report_folder else ())]
    outputs = [(what, output_file(path, what)) for what, path in written if path]
    with out.step("compare") as step:
        graph = load_model(model)
        if save_inputs_raw:
            inputs = [value.name or "" for value in graph.graph.inputs if value.name not in graph.graph.initializers]
            places = replay.raw_paths(inputs, save_inputs_raw).values()
            outputs += [("raw inputs file", output_file(place, "raw inputs file")) for place in places]
        read = [("inputs file that is read", load_inputs), ("engine", engine), ("engine", engine_without_plugin)]
        read += [("plugin library", plugin), *(("file of the source", path) for path in _files_of(against))]
        before = files_before_mapping(Path(model), existing_file(unmapped, "file before mapping") if unmapped else None)
        check_distinct([*files_of(graph, model), *before, *((what, path) for what, path in read if path)], outputs)
        source = load_source(against, dtype=dtype)
        sizes = source.sizes_of(shapes[0]) if shapes else None
        feed = replay.load_inputs(load_inputs) if load_inputs else replay.draw_inputs(graph, source, seed, sizes)
        report = compare(
            model,
            source,
            seed=seed,
            sizes=sizes,
            lengths=[source.sizes_of(asked) for asked in shapes[1:]] if shapes else None,
            inputs=load_inputs,
            unmapped_path=unmapped,
            experts_implementation=experts_implementation,
            engine_path=engine,
            engine_without_plugin_path=engine_without_plugin,
            backend=backend,
            plugin_library=plugin or True,
            progress=step.progress,
        )
        step.ok = report.passed
        step.result = report.result
        step.details += report.lines()
    if save_inputs:
        out.line(f"inputs: {replay.save_inputs(feed, save_inputs)}")
    if save_inputs_raw:
        out.line(f"inputs: {replay.trtexec_argument(replay.save_raw(feed, save_inputs_raw))}")
    if json_path:
        out.line(f"report: {report.write_json(json_path)}")
    if report_folder and in_folder:
        report.write_json(in_folder)
        _page_of(out, report_folder)
    if report.undecided:
        raise Shortfall(f"'{model}' was not compared with {report.source}: {report.verdict}")
    if not report.passed:
        raise Shortfall(f"'{model}' differs from {report.source}: {report.verdict}")


@_command("bench")
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder of the benchmark.")
@click.option(
    "--tool",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="trtexec-10, trtexec-11, tensorrt-rtx, python (TensorRT's module), or auto: what is here.",
)
@click.option("--plugin", metavar="FILE", help="The plugin library; default: the one that moetrt was installed with.")
@_shape_option("min", "Smallest sizes of the engine's inputs; with none of the three, the points' own; else 1.")
@_shape_option("opt", "Sizes that it is tuned for; with none of the three, the first point's; else as `moetrt build`.")
@_shape_option("max", "Largest sizes; with none of the three, the points' own; else as `moetrt build`.")
@_shape_option("point", "Sizes to measure at; given again, another point. Default: --opt.")
@click.option("--load-inputs", metavar="FILE", help="Inputs that Polygraphy saved; each feed is a point.")
@click.option("--repeats", type=int, default=5, show_default=True, help="How often each way runs at each point.")
@click.option("--seconds", type=float, help="Measure each run for at least this long; default: the tool's, 3.")
@click.option("--time-limit", type=float, default=3600, show_default=True, help="Seconds that a command may take.")
@click.option("--bandwidth", type=float, metavar="TB/S", help="Of the GPU's memory, for the floor; default: the log's.")
@click.option("--script", is_flag=True, help="Run nothing: only write DIR/bench.sh for another machine.")
@click.option("--dry-run", is_flag=True, help="Print the command lines; write and run nothing.")
@click.option("--read", is_flag=True, help="Run nothing: read what was run in DIR, wherever that was.")
def bench_command(
    out: Any,
    model: str,
    output: str,
    tool: str,
    plugin: str | None,
    min_words: tuple[str, ...],
    opt_words: tuple[str, ...],
    max_words: tuple[str, ...],
    point_words: tuple[str, ...],
    load_inputs: str | None,
    repeats: int,
    seconds: float | None,
    time_limit: float,
    bandwidth: float | None,
    script: bool,
    dry_run: bool,
    read: bool,
) -> None:
    """Time the plugin against TensorRT's own layers for the mapped MODEL: end to end, and tail by tail."""
    if script + dry_run + read > 1:
        raise InputError("--script, --dry-run and --read: one of them is taken")
    if bandwidth is not None and not 1e-6 <= bandwidth <= 1e6:
        raise InputError(f"--bandwidth was {bandwidth:g}; 1e-06 to 1e+06 TB/s is taken")
    from moetrt.bench import benchmark

    bytes_per_second = None if bandwidth is None else bandwidth * 1e12
    if read:
        _refuse_with_read()
        benchmark.print_result(out, benchmark.read_bench(model, output, bandwidth=bytes_per_second))
        _page_of(out, output)
        return
    choice = benchmark.choose_tool(tool)
    if script or dry_run:
        benchmark.check_program(choice)
    plan, notes = benchmark.prepare(
        model,
        output,
        choice,
        plugin_library=plugin,
        minimum=_shapes(min_words),
        optimum=_shapes(opt_words),
        maximum=_shapes(max_words),
        points=[_shapes([word]) for word in point_words],
        inputs_path=load_inputs,
        repeats=repeats,
        seconds=seconds,
        time_limit=time_limit,
        write=not dry_run,
    )
    out.line(f"tool: {choice.tool}: {choice.why}")
    if dry_run or script or not choice.runs_here:
        for note in notes:
            out.line(f"note: {note}")
    if dry_run:
        out.line(benchmark.commands_text(plan))
    elif script or not choice.runs_here:
        for line in benchmark.script_lines(plan, output):
            out.line(line)
    else:
        with out.step("bench") as step:
            benchmark.run_here(plan, output, choice, time_limit=time_limit, progress=step.progress)
            step.result = f"{output}: {len(plan.points)} points, {plan.repeats} repeats of each way"
        benchmark.print_result(out, benchmark.read_bench(model, output, bandwidth=bytes_per_second))
        _page_of(out, output)


def _files_of(source: str) -> list[str]:
    """The files of a source: of a folder, or those of a factory's module and of the packages around it."""
    if os.path.isdir(source):
        return [entry.path for entry in os.scandir(source) if entry.is_file()]
    from moetrt.source import module_files

    return module_files(source.partition(":")[0])


def _page_of(out: Any, folder: str) -> None:
    """Makes the page of a folder whose own work is done: what keeps a page from being made is said and no more."""
    from moetrt.report import make_report, write_report

    try:
        out.line(f"report: {write_report(make_report(folder), folder)}")
    except InputError as error:
        out.line(f"no report page: {error}")


def _refuse_with_read() -> None:
    """--read takes everything from the manifest: what else is given would be passed over in silence."""
    context = click.get_current_context()
    kept = ("model", "output", "bandwidth", "read", "quiet", "verbose")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in kept and source == click.core.ParameterSource.COMMANDLINE:
            raise InputError(f"--read takes the benchmark as DIR has it; {parameter.opts[0]} was given")


@_command("report")
@click.argument("folder", metavar="DIR")
@click.option("-o", "--output", metavar="FILE.html", help="The page; default: DIR/report.html.")
def report_command(out: Any, folder: str, output: str | None) -> None:
    """Make one page of what map, compare, build and bench left in DIR; the same as JSON and Markdown beside it."""
    from moetrt.report import make_report, write_report
    from moetrt.report.facts import BAD

    report = make_report(folder)
    page = write_report(report, folder, output)
    for verdict in report.verdicts:
        out.line(f"{verdict.state:<9}{verdict.what}: {verdict.text}")
    out.line(f"report: {page}")
    bad = [verdict.what for verdict in report.verdicts if verdict.state == BAD]
    if bad:
        raise Shortfall(f"'{page}' has verdicts that are bad: {', '.join(bad)}")


@_command("demo")
@click.option("-o", "--output", default="out/demo", show_default=True, metavar="DIR", help="Where the files go.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs.")
def demo_command(out: Any, output: str, seed: int) -> None:
    """Take a DeepSeek-V3-architecture model with random weights all the way to an engine."""
    from moetrt.demo import print_summary, run_demo

    result = run_demo(out, output, seed=seed)
    print_summary(out, result)
    short = [figure.what for figure in result.figures() if not figure.ok]
    if short:
        raise Shortfall(f"the demo fell short in: {', '.join(short)}")


@_command("families")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "json_path", metavar="FILE", help="Also write every row with its sites and figures as JSON.")
@click.option("--page", "page_path", metavar="FILE", help="Also write the table of all families as a Markdown page.")
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="fp32, bf16 or fp16; default: each of them.")
@click.option("--lengths", is_flag=True, help="Only export, and hold each file against PyTorch at 14 lengths, in fp32.")
@click.option("-j", "--jobs", type=int, metavar="N", help="Families to run at a time; default: one a processor.")
def families_command(
    out: Any,
    names: tuple[str, ...],
    json_path: str | None,
    page_path: str | None,
    dtypes: tuple[str, ...],
    lengths: bool,
    jobs: int | None,
) -> None:
    """Take small models of the MoE families NAME, or all, through export, map, compare and build."""
    if lengths:
        if page_path is not None or dtypes:
            raise InputError("--lengths was given with --page or --dtype; it is a table in fp32 alone")
        _print_lengths(out, names, json_path, jobs)
        return
    if page_path is not None and (names or dtypes):
        raise InputError("--page was given with families or dtypes; it is a page of all families in all dtypes")
    from moetrt.families import DTYPES, default_jobs, family_names, run_families
    from moetrt.families_page import COLUMNS, cells, page
    from moetrt.files import check_distinct, output_file, write_atomically

    written = [("JSON file", json_path), ("page", page_path)]
    check_distinct([], [(what, output_file(path)) for what, path in written if path])
    rows = []
    with out.bar("families", len(set(names)) or len(family_names())) as done:
        for row in run_families(names, dtypes=dtypes or DTYPES, jobs=default_jobs() if jobs is None else jobs):
            rows.append(row)
            *_, inputs, attributes = cells(row)
            done("; ".join([row.name, *(filter(None, (inputs, attributes)) if row.ok else row.problems())]), row.ok)
    rows.sort(key=lambda row: row.name)
    # Inputs and attributes are in the lines above: the table fits a terminal without them.
    out.table(COLUMNS[:-2], [cells(row)[:-2] for row in rows])
    if json_path is not None:
        with write_atomically(json_path) as temporary:
            temporary.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n", encoding="utf-8")
    failed = [row.name for row in rows if not row.ok]
    if failed:
        raise Shortfall(f"not as they should be: {', '.join(failed)}")
    if page_path is not None:
        with write_atomically(page_path) as temporary:
            temporary.write_text(page(rows), encoding="utf-8")


def _print_lengths(out: Any, names: tuple[str, ...], json_path: str | None, jobs: int | None) -> None:
    """The table of lengths, and what is wrong in it."""
    from moetrt.families import default_jobs
    from moetrt.files import output_file, write_atomically
    from moetrt.lengths import LENGTHS, length_names, run_lengths

    if json_path is not None:
        output_file(json_path, "JSON file")
    rows = []
    with out.bar("families", len(set(names)) or len(length_names())) as done:
        for row in run_lengths(names, jobs=default_jobs() if jobs is None else jobs):
            rows.append(row)
            said = [*filter(None, [row.error]), *(f"{size}: {problem}" for size, problem in row.problems.items())]
            done("; ".join([row.name, *map(str, row.bounds.values()), *said]), row.ok)
    rows.sort(key=lambda row: row.name)
    out.table(("family", *map(str, LENGTHS), "bounds"), [row.cells(LENGTHS) for row in rows])
    if json_path is not None:
        with write_atomically(json_path) as temporary:
            temporary.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n", encoding="utf-8")
    wrong = [row.name for row in rows if not row.ok]
    if wrong:
        raise Shortfall(f"not right at every length within their bounds: {', '.join(wrong)}")


@_command("doctor")
@click.option("--build", "build_library", is_flag=True, help="Build the plugin library when it is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(out: Any, build_library: bool, as_json: bool) -> None:
    """Check what this machine has for exporting, mapping, building and running."""
    from moetrt.doctor import examine

    checks = examine(build=build_library)
    if as_json:
        click.echo(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        for check in checks:
            out.line(f"{check.status:<8}{check.name}: {check.detail}")
            if check.remedy:
                out.line(f"{'':<8}-> {check.remedy}")
    missing = [check.name for check in checks if check.status == "missing" and check.needed]
    if missing:
        raise Shortfall(f"missing: {', '.join(missing)}")
