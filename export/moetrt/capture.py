"""A PyTorch module becomes an ONNX file: torch.onnx translates, and what it leaves untidy is put right here."""

import io
import json
import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch

from moetrt.bfloat16 import widen_undefined
from moetrt.bounds import Bound, as_json, bounds_of, write_bounds
from moetrt.errors import InputError, InputTypeError, MoetrtError
from moetrt.experts import deferred_finalize
from moetrt.files import as_path, file_sha256, output_directory, output_file, sole_writer, write_atomically
from moetrt.guards import Guards, noted
from moetrt.huggingface import CausalLM
from moetrt.mapping import TAILS_EXPECTED, inference_problem, sort_topk
from moetrt.onnx_files import data_path_of, read_proto, save_model
from moetrt.onnx_op import attach_functions, named_inputs, operator_of, translation_table
from moetrt.provenance import command, versions
from moetrt.quiet import quiet
from moetrt.rewrites import rewritten
from moetrt.segments.reading import dims
from moetrt.source import FlatModule, Source, check_dynamic, check_source, first_sentence
from moetrt.spec import DATA_DTYPES

MODEL_FILE = "model.onnx"
"""The file's name in the folder; its weights lie beside it in ``model.onnx.data``."""

FORMAT = "moetrt.export/1"

DEFAULT_OPSET = 22
OPSETS = range(18, 26)

_IS_DIM = re.compile("[0-9]{1,9}")
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class ExportResult:
    """What `export` wrote.

    Attributes:
        model_path: the ONNX file.
        data_path: the weights' file beside it; None where every tensor was small.
        stale: other ONNX files in the folder that read the weights' file, which holds other weights for them now.
        sidecar: ``model.onnx.json`` beside it: source, opset, inputs, expected tails, command and versions.
        opset: version of the standard ONNX operators in the file.
        tails_expected: how many tails the source said there are; None where it does not say.
        operators: how many of moetrt's operator nodes the graph has.
        nodes: how many nodes the graph has.
        bounds: the sizes at which the file is right, by symbol, where it is not right at all; the file holds them too.
    """

    model_path: Path
    data_path: Path | None
    stale: tuple[Path, ...]
    sidecar: Path
    opset: int
    tails_expected: int | None
    operators: int
    nodes: int
    bounds: Mapping[str, Bound] = field(default_factory=dict)


def export(
    source: Source,
    directory: str | os.PathLike[str],
    *,
    opset: int = DEFAULT_OPSET,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    experts: str = "gathered",
    progress: Callable[[str], None] | None = None,
) -> ExportResult:
    """Writes ``directory/model.onnx``, for the weights ``model.onnx.data``, and what they were made of, as JSON.

    Files of an earlier export are replaced when the new ones are whole; until then, and when anything fails, the folder
    is as it was.

    Args:
        source: the model; `moetrt.source.load_source` and `moetrt.source.as_source` make one.
        directory: the folder; made where it does not exist.
        opset, dynamic, experts, progress: as of `capture`.

    Raises:
        InputError: the folder cannot be written, an argument is not taken, or torch could not export the module: one
            line with the cause, from which the original is chained.
        InputTypeError: the source is no `Source`, or the dynamic dimensions are no dict.
    """
    folder = as_path(directory, "output folder")
    path = folder / MODEL_FILE
    with _folder(folder):
        # Asked before the export, which may take long.
        output_file(path)
        output_file(data_path_of(path))
        sidecar = output_file(path.with_name(path.name + ".json"), "description of the model")
        model = capture(source, opset=opset, dynamic=dynamic, experts=experts, progress=progress)
        operators = sum(operator_of(node) is not None for node in model.graph)
        with sole_writer(path, progress), write_atomically(sidecar) as temporary:
            if progress:
                progress("writing weights")
            save_model(model, path, progress=progress)
            content = {
                "format": FORMAT,
                "model": {"file": path.name, "sha256": file_sha256(path)},
                "source": source.description,
                "opset": opset,
                "inputs": {value.name: dims(value) for value in model.graph.inputs},
                "bounds": as_json(bounds_of(model)),
                "tails_expected": source.tails_expected,
                "operators": operators,
                "command": command(),
                "versions": versions("torch", "transformers", "onnx", "onnx-ir", "onnxscript"),
            }
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            data: Path | None = data_path_of(path)
            if not _has_external_data(model):
                # One that lies there belonged to the file that was just replaced.
                data_path_of(path).unlink(missing_ok=True)
                data = None
    return ExportResult(
        model_path=path,
        data_path=data,
        stale=tuple(_readers_of(data, path)) if data is not None else (),
        sidecar=sidecar,
        opset=opset,
        tails_expected=source.tails_expected,
        operators=operators,
        nodes=len(model.graph),
        bounds=bounds_of(model),
    )


def _readers_of(data: Path, model_path: Path) -> Iterator[Path]:
    """The ONNX files beside ``model_path`` that keep weights in ``data``, such as what was mapped before."""
    for other in sorted(data.parent.glob("*.onnx")):
        with suppress(InputError):  # what is no ONNX reads no weights
            tensors = read_proto(other).graph.initializer if other != model_path else ()
            if any(("location", data.name) in ((e.key, e.value) for e in tensor.external_data) for tensor in tensors):
                yield other


def capture(
    source: Source,
    *,
    opset: int = DEFAULT_OPSET,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    experts: str = "gathered",
    progress: Callable[[str], None] | None = None,
) -> ir.Model:
    """Translates a module to an ONNX model in memory.

    The module is in inference mode meanwhile, and its Transformers models defer their finalize; both are restored, also
    when the export raises.

    Args:
        source: the model.
        opset: version of the standard ONNX operators; from 23, torch writes attention and rotary embedding as operators
            that TensorRT does not take for every model.
        dynamic: True: the source's own dynamic dimensions; False: none; or symbols by input and dimension,
            ``{"input_ids": {0: "batch", 1: "seq"}}``.
        experts: the form of the expert GEMMs in Transformers models, see `moetrt.experts.EXPERTS_FORMS`.
        progress: called with a few words at each step.

    Returns:
        The model. Operator nodes are named after the module that they come from and have their model-local functions;
        ``metadata_props`` hold the number of tails that the source expects, and the bounds of dynamic dimensions at
        which alone the graph is right (`moetrt.bounds`).

    Raises:
        InputError, InputTypeError: as of `export`. Among them: a Python branch, loop or number that depends on a size,
            and not as a range of sizes.
    """
    check_source(source)
    if opset not in OPSETS:
        raise InputError(f"the opset was {opset}; {OPSETS.start} to {OPSETS.stop - 1} are taken")
    chosen = source.dynamic_shapes if dynamic is True else dynamic or {}
    check_dynamic(chosen, source.example_inputs)
    _check_sizes(source, chosen)
    if progress:
        progress(f"tracing {source.description}")
    try:
        with (
            quiet(),
            deferred_finalize(source.module, experts),
            rewritten(source.module, experts),
            _inference(source.module),
        ):
            model, bounds = _translate(source, chosen, opset)
    except MoetrtError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{source.description} was not exported to ONNX: {_cause(error)}") from error
    if progress:
        progress("tidying the graph")
    _strip(model, _depth(source.module))
    _name_operators(model)
    _check_operators(model)
    widen_undefined(model)
    sort_topk(model)
    attach_functions(model)
    problem = inference_problem(model)
    if problem is not None:
        _check_that_it_runs(source, problem)
    if source.tails_expected is not None:
        model.metadata_props[TAILS_EXPECTED] = str(source.tails_expected)
    write_bounds(model, bounds)
    return model


def parse_dynamic(words: Sequence[str]) -> dict[str, dict[int, str]]:
    """Reads dynamic dimensions as the command line has them: ``NAME:0=batch,1=seq``.

    Raises:
        InputError: a word is not of that form.
    """
    dynamic: dict[str, dict[int, str]] = {}
    for word in words:
        name, colon, dims = word.rpartition(":")
        pairs = [part.partition("=") for part in dims.split(",")]
        if (
            not colon
            or not name
            or not all(_IS_DIM.fullmatch(dim) and symbol.isidentifier() for dim, _, symbol in pairs)
        ):
            raise InputError(f"--dynamic was '{word}'; NAME:DIM=SYMBOL,... is taken, such as input_ids:0=batch,1=seq")
        dynamic.setdefault(name, {}).update((int(dim), symbol) for dim, _, symbol in pairs)
    return dynamic


class _Entry(torch.nn.Module):
    """Gives any module one signature, so that dynamic dimensions are told to torch in one way."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> object:
        return self.module(*tensors)


def _translate(
    source: Source, dynamic: Mapping[str, Mapping[int, str]], opset: int
) -> tuple[ir.Model, dict[str, Bound]]:
    """The module as ONNX, and the sizes at which the graph is right."""
    shapes = tuple(dict(dynamic.get(name, {})) for name in source.input_names)
    entry = _Entry(source.module)
    entry.training = False
    # When tracing fails, torch prints the graph so far to stderr, which need not be what is at fault.
    with torch.no_grad(), redirect_stderr(io.StringIO()), noted() as guards:
        program = _exported(entry, source, shapes, opset, guards)
    model: ir.Model = program.model
    if len(model.graph.outputs) != len(source.output_names):
        raise InputError(
            f"{source.description} gave {len(model.graph.outputs)} outputs; "
            f"its source names {len(source.output_names)}: {', '.join(source.output_names)}"
        )
    assert program.exported_program is not None
    bounds = guards.bounds(program.exported_program, shapes)
    for value, symbols in zip(model.graph.inputs, shapes, strict=True):
        for dim, symbol in symbols.items():
            became = None if value.shape is None else value.shape[dim]
            if became != ir.SymbolicDim(symbol):
                raise InputError(
                    f"dimension {dim} of input '{value.name}' is to be dynamic as '{symbol}', but became {became} in "
                    "the graph"
                )
    return model, bounds


def _exported(
    entry: torch.nn.Module, source: Source, shapes: tuple[dict[int, str], ...], opset: int, guards: Guards
) -> torch.onnx.ONNXProgram:
    try:
        program = torch.onnx.export(
            entry,
            tuple(source.example_inputs.values()),
            input_names=list(source.input_names),
            output_names=list(source.output_names),
            opset_version=opset,
            dynamic_shapes=(shapes,),
            custom_translation_table=translation_table(),
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        fixed = guards.fixed(shapes) if "static shape" in str(_innermost(error)) else None
        if fixed is None:
            raise
        raise fixed from error
    assert program is not None
    return program


def _check_that_it_runs(source: Source, problem: str) -> None:
    """torch traces with tensors that have no values, which some operators take in dtypes that they do not compute."""
    try:
        with quiet(), torch.no_grad(), _inference(source.module):
            source.module(*source.example_inputs.values())
    except Exception as error:
        raise InputError(
            f"{source.description} does not run in PyTorch on its example inputs: {_cause(error)}; its ONNX graph is "
            f"not valid either: {problem}"
        ) from error


def _check_sizes(source: Source, dynamic: Mapping[str, Mapping[int, str]]) -> None:
    for name, symbols in dynamic.items():
        for dim, symbol in symbols.items():
            size = source.example_inputs[name].shape[dim]
            if size < 2:
                # torch.export takes 0 and 1 for constants.
                raise InputError(
                    f"dimension {dim} of input '{name}' ('{symbol}') is to be dynamic, but is {size} in the example "
                    "inputs; at least 2 is taken"
                )


@contextmanager
def _inference(module: torch.nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for child, training in modes:
            child.training = training


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """The folder is known to be writable before the long work starts, and is not left behind empty."""
    made = not folder.exists()
    output_directory(folder)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _cause(error: BaseException) -> str:
    """What torch's exporter wrapped: the innermost cause says most, and torch's own text is long."""
    seen = _innermost(error)
    return first_sentence(seen) if isinstance(seen, MoetrtError) else f"{type(seen).__name__}: {first_sentence(seen)}"


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _depth(module: torch.nn.Module) -> int:
    """How many of our own wrappers lie around the user's module, each of which prefixes every name."""
    return 2 if isinstance(module, CausalLM | FlatModule) else 1


def weights_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights of a source's module by the names that an exported file has them under."""
    prefix = "module." * (_depth(module) - 1)
    return {name.removeprefix(prefix): weight for name, weight in module.named_parameters()}


def _strip(model: ir.Model, depth: int) -> None:
    """Gives weights and nodes the names of the user's module, and drops notes that hold paths of this machine."""
    prefix = "module." * depth
    for value in list(model.graph.initializers.values()):
        name = value.name or ""
        if name.startswith(prefix) and name.removeprefix(prefix) not in model.graph.initializers:
            value.name = name.removeprefix(prefix)
    for key in [key for key in model.graph.metadata_props if key.startswith("pkg.torch.")]:
        del model.graph.metadata_props[key]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        scope = _scope(node, prefix)
        node.metadata_props.clear()
        if scope:
            node.metadata_props["module"] = scope
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _scope(node: ir.Node, prefix: str) -> str:
    """The module that a node comes from, such as ``model.layers.1.mlp.experts``; empty for the outermost."""
    noted = node.metadata_props.get(_SCOPES)
    if noted is None:
        return ""
    scopes = literal_eval(noted)  # a list of names from the outermost module to the operation itself
    return f"{scopes[-2]}".removeprefix(prefix) if len(scopes) > 1 and scopes[-2].startswith(prefix) else ""


def _name_operators(model: ir.Model) -> None:
    """Names each operator node after its module: the name is the layer's name in TensorRT and in reports."""
    used: dict[str, int] = {}
    for node in model.graph:
        if operator_of(node) is None:
            continue
        stem = node.metadata_props.get("module") or node.op_type
        count = used[stem] = used.get(stem, 0) + 1
        node.name = stem if count == 1 else f"{stem}_{count}"


def _check_operators(model: ir.Model) -> None:
    """PyTorch computes the operators in float64 too, as a reference; an ONNX node of it could not be run."""
    for node in model.graph:
        if operator_of(node) is None:
            continue
        dtype = named_inputs(node)["gemm2_permuted"].dtype
        if dtype not in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT):
            was = "unknown" if dtype is None else dtype.name.lower()
            raise InputTypeError(
                f"{node.op_type} '{node.name}': its rows were {was}; {', '.join(DATA_DTYPES)} are taken: convert the "
                "model first"
            )


def _has_external_data(model: ir.Model) -> bool:
    return any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values())
