"""The command ``moetrt``: each subcommand calls one function of the package and prints what it returned.

Exit codes: 0 done; 1 done, but short of what was asked (tails not mapped, parity not reached, plugin layers missing);
2 the input was not taken; 3 a fault of moetrt itself; 130 interrupted.
"""

import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from moetrt.errors import InputError, MoetrtError

# Everything else is imported where it is used: `moetrt --help` must not wait for torch.

_SHAPE_OPTIONS = ("--min", "--opt", "--max", "--shape")
_SHAPE = re.compile(r"[^-].*:\[?\d+([x,]\d+)*\]?$|[^-].*:\[?\]?$")


class Shortfall(MoetrtError):
    """The run ended well but reached less than was asked for; exit code 1."""


class _Command(click.Command):
    """A command whose shape options take several words, as in ``--min ids:1x1 mask:1x1``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for position, word in enumerate(args):
            after_option = position > 0 and args[position - 1] in _SHAPE_OPTIONS
            if option and not after_option and _SHAPE.match(word) and not Path(word).exists():
                spread.append(option)
            elif word in _SHAPE_OPTIONS:
                option = word
            elif not after_option:
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

            if verbose:
                click.get_current_context().find_root().meta["verbose"] = True
            function(Output(quiet=quiet), **options)

        return cli.command(name, cls=_Command)(run)

    return decorate


def _output_file(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("-o", "--output", required=True, metavar="FILE", help="The file to write.")(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="moetrt", prog_name="moetrt")
def cli() -> None:
    """Brings the MoE finalize + add + RMSNorm tail of PyTorch models to TensorRT."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process; a user's mistake is one line on stderr, never a traceback."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    context: dict[str, Any] = {}
    try:
        with cli.make_context("moetrt", list(arguments)) as root:
            context = root.meta
            cli.invoke(root)
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
        # The reader of a pipe left (`| head`): nothing more can be said, and the interpreter must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if context.get("verbose"):
            traceback.print_exc()
        return _complain(f"unexpected {type(error).__name__}: {error} (-v prints the traceback)", 3)


def _complain(message: str, code: int) -> int:
    click.echo(f"moetrt: error: {' '.join(message.split())}", err=True)
    return code


def parse_shapes(words: Sequence[str], option: str) -> dict[str, tuple[int, ...]]:
    """Reads ``NAME:DIMS`` words, each of which may hold several separated by commas as trtexec's do.

    Args:
        words: such as ``["input_ids:1x16,attention_mask:1x16"]``; ``[1,16]`` is taken too.
        option: the option they were given to, for the message.

    Raises:
        InputError: a word is not of that form, or a name is given twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for word in words:
        for part in re.split(r",(?![^\[]*\])(?=[^,]*:)", word):
            name, colon, sizes = part.rpartition(":")
            sizes = sizes.removeprefix("[").removesuffix("]")
            if not colon or not name or not re.fullmatch(r"(\d+([x,]\d+)*)?", sizes):
                raise InputError(f"{option} was '{part}'; NAME:DIMS is taken, such as input_ids:1x16")
            if name in shapes:
                raise InputError(f"{option} names '{name}' twice")
            shapes[name] = tuple(int(size) for size in re.split("[x,]", sizes)) if sizes else ()
    return shapes


def profiles(
    minimum: Sequence[str], optimum: Sequence[str], maximum: Sequence[str]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Joins the three options to one profile per input; a bound that is left out is the nearest given, the
    optimum the largest.
    """
    low, middle, high = (
        parse_shapes(words, option)
        for words, option in ((minimum, "--min"), (optimum, "--opt"), (maximum, "--max"))
    )
    joined = {}
    for name in {**low, **middle, **high}:
        given = [bounds[name] for bounds in (low, middle, high) if name in bounds]
        joined[name] = (given[0], middle.get(name, given[-1]), given[-1])
    return joined


def _shape_option(name: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", f"{name}_shapes", multiple=True, metavar="NAME:DIMS ...", help=text)


@_command("export")
@click.argument("source")
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder that model.onnx is written to.")
@click.option("--opset", type=int, default=22, show_default=True, help="ONNX opset of the exported graph.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Convert the model first.")
@click.option("--static", is_flag=True, help="Fix every dimension at the example's size instead of keeping it dynamic.")
def export_command(out: Any, source: str, output: str, opset: int, dtype: str | None, static: bool) -> None:
    """Export SOURCE (a Hugging Face folder, or "package.module:factory") to ONNX, its tails kept recognisable."""
    from moetrt.files import output_directory

    folder = output_directory(output)
    from moetrt.capture import export
    from moetrt.source import load_source

    with out.step("load") as step:
        loaded = load_source(source, dtype=dtype)
        step.result = loaded.description
    with out.step("export to ONNX") as step:
        result = export(loaded, folder, opset=opset, dynamic=not static)
        step.result = str(result.model_path)
        step.details.append(f"tails expected: {_count(result.tails_expected)}")
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
    """Map every MoE tail of MODEL (any ONNX file) to one plugin node."""
    from moetrt.mapping import map_file

    with out.step("map") as step:
        result = map_file(model, output, function=not no_function, report_path=report)
        step.result = f"{output}: {tails_text(result)}"
        step.ok = not result.unmatched and bool(result.mapped)
    _print_sites(out, result)
    reason = shortfall(result)
    if reason and not allow_unmatched:
        raise Shortfall(reason)


@_command("inspect")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(out: Any, file: str, as_json: bool) -> None:
    """Show the tails of FILE, their attributes, dtypes and shapes, and what each reader of the file will run."""
    from moetrt.inspection import inspect_file

    print_inspection(out, inspect_file(file), as_json=as_json)


@_command("build")
@click.argument("model")
@_output_file
@click.option("--backend", metavar="NAME", help="tensorrt or tensorrt-rtx; default: what this machine can build with.")
@click.option("--plugin", metavar="FILE", help="The plugin library; default: the one that moetrt was installed with.")
@click.option("--no-plugin", is_flag=True, help="Build the unfused baseline: TensorRT's own layers for the same file.")
@_shape_option("min", "Smallest sizes of each input with dynamic dimensions.")
@_shape_option("opt", "Sizes that the engine is tuned for.")
@_shape_option("max", "Largest sizes.")
def build_command(out: Any, model: str, output: str, **options: Any) -> None:
    """Build a TensorRT engine from the mapped MODEL, its tails run by the plugin."""
    build(out, model, output, **options)


@_command("compare")
@click.argument("model")
@click.option("--against", required=True, metavar="SOURCE", help="The PyTorch model, as `moetrt export` takes it.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@_shape_option("shape", "Sizes of the inputs; default: the source's example.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="As given to `moetrt export`.")
def compare_command(
    out: Any, model: str, against: str, seed: int, shape_shapes: tuple[str, ...], dtype: str | None
) -> None:
    """Run MODEL in ONNX Runtime against the PyTorch SOURCE, both measured against float64."""
    compare(out, model, against, seed, shape_shapes, dtype)


@_command("demo")
@click.option("-o", "--output", default="out/demo", show_default=True, metavar="DIR", help="Where the files go.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs.")
def demo_command(out: Any, output: str, seed: int) -> None:
    """Take a DeepSeek-V3-architecture model with random weights all the way to an engine."""
    from moetrt.demo import run_demo

    failed = run_demo(out, output, seed=seed)
    if failed:
        raise Shortfall(f"demo: {', '.join(failed)} fell short")


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
            out.line(f"{check.status:<8}{check.name:<22}{check.detail}")
            if check.remedy:
                out.line(f"{'':<30}-> {check.remedy}")
    missing = [check.name for check in checks if check.status == "missing" and check.needed]
    if missing:
        raise Shortfall(f"missing: {', '.join(missing)}")
