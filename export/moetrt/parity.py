"""ONNX Runtime, or an engine, against PyTorch: the error of each is measured against a float64 run of the model."""

import copy
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch

from moetrt.backends import Progress
from moetrt.errors import InputError, InputTypeError
from moetrt.library import find_plugin_library
from moetrt.onnx_files import load_model, save_model
from moetrt.onnx_op import make_model, named_inputs, operator_of, read_attributes
from moetrt.reference import reference
from moetrt.runners import OrtRunner, TorchRunner, ort_session, tensorrt_runner
from moetrt.source import Source, check_source
from moetrt.spec import Operand, OperatorSpec

WORST_FACTOR = 4.0
RMS_FACTOR = 2.0
"""How much larger than PyTorch's an error may be, at the worst element and in the mean square.

Two correct float32 runs differ from float64 by rounding in another order alone. Over DeepSeek-V3 and Qwen3-MoE models
of 3 and 4 layers, three seeds and 1 to 99 tokens, ONNX Runtime's error was 0.75 to 2.5 times PyTorch's at the worst
element and 0.9 to 1.9 times in the mean square.
"""

SENSITIVE = 0.01
"""Where PyTorch's own error is above this, relative to the output's RMS, the inputs decide nothing."""

_TORCH_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.BOOL: torch.bool,
}
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TF32_STEP = 2.0**-10

_PYTORCH, _GOLD, _ORT, _TENSORRT = "pytorch", "pytorch-float64", "onnxruntime", "tensorrt"


@dataclass(frozen=True)
class OutputParity:
    """One output of one runner against PyTorch.

    Errors are absolute differences from the float64 run over that output's root mean square, so that they mean the same
    for every model; ``worst`` is the largest, ``rms`` the root mean square.

    Attributes:
        name: the output; "<node>.<output>" where one tail was compared by itself.
        runner: "onnxruntime" or "tensorrt".
        shape, dtype: of the output.
        worst_index: the element where the runner's error is largest; empty where there is none to compare.
        worst_values: that element as (runner, PyTorch, float64).
        relative_error: the runner's error there over the magnitude of the float64 value; inf where that is 0.
        worst, rms: the runner's errors.
        pytorch_worst, pytorch_rms: PyTorch's.
        worst_tolerance, rms_tolerance: what ``worst`` and ``rms`` may be.
        reason: where the tolerances come from; or why there is nothing to compare.
        nan, inf: how many elements the runner has.
        pytorch_nan, pytorch_inf: how many PyTorch has.
        passed: the verdict.
    """

    name: str
    runner: str
    shape: tuple[int, ...]
    dtype: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float, float]
    relative_error: float
    worst: float
    rms: float
    pytorch_worst: float
    pytorch_rms: float
    worst_tolerance: float
    rms_tolerance: float
    reason: str
    nan: int
    inf: int
    pytorch_nan: int
    pytorch_inf: int
    passed: bool

    def lines(self) -> list[str]:
        """The figures for people, the verdict first."""
        verdict = "ok" if self.passed else "DIFFERS"
        sizes = "x".join(map(str, self.shape)) or "scalar"
        found = [f"{verdict}: {self.name} [{sizes}] {self.dtype}, {self.runner} against pytorch"]
        if self.worst_index:
            theirs, ours, gold = self.worst_values
            where = ", ".join(map(str, self.worst_index))
            found += [
                f"  worst element [{where}]: {self.runner} {theirs:.9g}, pytorch {ours:.9g}, float64 {gold:.9g}; "
                f"relative error {self.relative_error:.2e}",
                f"  error against float64: worst {self.worst:.2e} (pytorch {self.pytorch_worst:.2e}, "
                f"at most {self.worst_tolerance:.2e}), rms {self.rms:.2e} (pytorch {self.pytorch_rms:.2e}, "
                f"at most {self.rms_tolerance:.2e})",
            ]
        found.append(f"  tolerance: {self.reason}")
        found.append(f"  NaN {self.nan} (pytorch {self.pytorch_nan}), Inf {self.inf} (pytorch {self.pytorch_inf})")
        return found


@dataclass(frozen=True)
class ParityReport:
    """What `compare` found.

    Attributes:
        onnx_path: the file that was run.
        source: the PyTorch model in a few words.
        seed: of the inputs.
        inputs: name -> shape of the inputs.
        how: what was run, in one line.
        outputs: one for each output and runner; tails that were compared by themselves follow.
    """

    onnx_path: Path
    source: str
    seed: int
    inputs: dict[str, tuple[int, ...]]
    how: str
    outputs: tuple[OutputParity, ...]

    @property
    def passed(self) -> bool:
        """Whether every output passed; a report without outputs does not."""
        return bool(self.outputs) and all(output.passed for output in self.outputs)

    @property
    def worst(self) -> OutputParity:
        """The output that says most: one that differs if there is one, else the one nearest to its tolerance."""
        return max(
            self.outputs, key=lambda o: (not o.passed, o.worst / o.worst_tolerance if o.worst_tolerance else 0.0)
        )

    def lines(self) -> list[str]:
        """The report for people."""
        sizes = ", ".join(f"{name} [{'x'.join(map(str, shape))}]" for name, shape in self.inputs.items())
        head = [self.how, f"inputs from seed {self.seed}: {sizes}"]
        return head + [line for output in self.outputs for line in output.lines()]


def compare(
    onnx_path: str | os.PathLike[str],
    source: Source,
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    engine_path: str | os.PathLike[str] | None = None,
    plugin_library: str | os.PathLike[str] | Literal[True] | None = True,
    backend: str | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Runs an ONNX file and the PyTorch model it came from on the same inputs, through Polygraphy's Comparator.

    PyTorch runs twice: as it is, and in float64 throughout, which is the gold. An output passes when its distance from
    the gold is no more than `WORST_FACTOR` (worst element) and `RMS_FACTOR` (root mean square) times PyTorch's own,
    plus one unit in the last place; and when its NaNs and infinities are PyTorch's.

    A model in bfloat16 or float16 does not run whole in ONNX Runtime on a CPU, and a router's choice near a tie would
    differ by chance. There, the file and the model are compared as their float32 twins (the same graph and the same
    16-bit weights, computed in float32), and each tail by itself in its own dtype, on the twin's values.

    Args:
        onnx_path: the file; external data beside it.
        source: the PyTorch model, which also makes the inputs, in range.
        seed: of the inputs.
        sizes: of dynamic dimensions by symbol; the source's example sizes where left out.
        engine_path: an engine of the same file, run too; needs a GPU.
        plugin_library: that the engine was built with; True is the one that came with the package, None is none.
        backend: for the engine, as of `moetrt.backends.choose`.
        progress: called with one line at each step.

    Raises:
        InputError: the file or its data is missing or not ONNX, its inputs or outputs are not the source's, or a runner
            does not take it.
        InputTypeError: the source is no `Source`, or a seed or size is no whole number.
    """
    check_source(source)
    if not isinstance(sizes, Mapping | None) or not all(isinstance(symbol, str) for symbol in sizes or ()):
        raise InputTypeError(f"the sizes were {sizes!r}; a dict of ints by symbol is taken")
    say = progress or (lambda _: None)
    model = load_model(onnx_path)
    path = Path(onnx_path)
    feed = source.make_inputs(seed, **(sizes or {}))
    _check_interface(model, path, source, feed)
    half = _half_dtype(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in feed.items()}
    engine: _Engine | None = None
    if engine_path is not None:
        engine = (engine_path, find_plugin_library() if plugin_library is True else plugin_library, backend)
    if half is None:
        results = _run(path, source.module, feed, source.output_names, engine=engine, say=say)
        how = f"{path.name} in ONNX Runtime{' and TensorRT' if engine else ''} against {source.description} in PyTorch"
        return ParityReport(path, source.description, seed, shapes, how, _hinted(_judge_all(results), source))

    step = _step(_TORCH_DTYPES[half])
    twin_feed = {name: t.float() if t.is_floating_point() else t for name, t in feed.items()}
    with tempfile.TemporaryDirectory(prefix="moetrt-twin-") as name:
        folder = Path(name)
        say(f"making the float32 twin of {path.name}")
        tails = list(_tails(model))
        twin = float32_twin(load_model(path))
        _expose(twin, {value.name or "" for tail in tails for value in tail.inputs.values()})
        twin_path = save_model(twin, folder / "twin.onnx")
        module = copy.deepcopy(source.module).float()
        results = _run(twin_path, module, twin_feed, source.output_names, say=say)
        # The file holds constants that the exporter rounded to the model's dtype, such as attention's scale.
        judged = list(_judge_all(results, step=step))
        values = {**twin_feed, **results[_ORT]}
        if engine is not None:
            # A GPU runs the 16-bit model itself, so it is held against PyTorch in 16 bits.
            judged += _judge_all(_run(None, source.module, feed, source.output_names, engine=engine, say=say))
        for tail in tails:
            say(f"comparing {tail.name} in {half.name.lower()}")
            judged += _compare_tail(tail, values, half, folder)
    how = (
        f"the float32 twins of {path.name} in ONNX Runtime and of {source.description} in PyTorch; "
        f"{len(tails)} tails by themselves in {half.name.lower()}"
    )
    return ParityReport(path, source.description, seed, shapes, how, _hinted(judged, source))


def _hinted(outputs: Iterable[OutputParity], source: Source) -> tuple[OutputParity, ...]:
    """Says where the inputs come from when PyTorch itself gives NaN or infinities for them."""
    if source.random_inputs is not None:
        return tuple(outputs)
    hint = (
        "; the inputs were drawn between the smallest and largest value of each example input, whatever their sizes "
        "are: a moetrt.source.Source with random_inputs draws others"
    )
    return tuple(
        output
        if output.passed or not output.pytorch_nan + output.pytorch_inf
        else dataclasses.replace(output, reason=output.reason + hint)
        for output in outputs
    )


def float32_twin(model: ir.Model) -> ir.Model:
    """Turns ``model`` into the same graph with every 16-bit floating-point number in float32, in place.

    Returns:
        ``model``; its 16-bit weights are read into memory.
    """
    single = ir.DataType.FLOAT
    for graph in [*model.graphs(), *(function.graph for function in model.functions.values())]:
        for value in _values(graph):
            if value.dtype in _HALVES:
                value.dtype = single
            if value.const_value is not None and value.const_value.dtype in _HALVES:
                value.const_value = _float32(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in _HALVES:
                    node.attributes[name] = ir.AttrTensor(name, _float32(attribute.value))
                # Cast and the generators name the dtype that they give.
                if name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.value in _HALVES:
                    node.attributes[name] = ir.AttrInt64(name, single)
    return model


def _float32(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _half_dtype(model: ir.Model) -> ir.DataType | None:
    found = {value.dtype for graph in model.graphs() for value in _values(graph)}
    return next((dtype for dtype in reversed(_HALVES) if dtype in found), None)


def _step(dtype: torch.dtype) -> float:
    """One unit in the last place at 1."""
    return torch.finfo(dtype).eps


def _check_interface(model: ir.Model, path: Path, source: Source, feed: Mapping[str, torch.Tensor]) -> None:
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    if set(inputs) != set(feed):
        raise InputError(
            f"'{path}' has the inputs {', '.join(inputs)}; {source.description} has {', '.join(feed)}: "
            "is it this model's file?"
        )
    outputs = [value.name or "" for value in model.graph.outputs]
    if set(outputs) != set(source.output_names):
        raise InputError(
            f"'{path}' has the outputs {', '.join(outputs)}; {source.description} has "
            f"{', '.join(source.output_names)}: is it this model's file?"
        )
    for name, value in inputs.items():
        tensor = feed[name]
        if _TORCH_DTYPES.get(value.dtype or ir.DataType.UNDEFINED) != tensor.dtype:
            wanted = "unknown" if value.dtype is None else value.dtype.name.lower()
            raise InputError(
                f"input '{name}' of '{path}' is {wanted}, of {source.description} {str(tensor.dtype)[6:]}; "
                "they must be the same"
            )
        if value.shape is None:
            continue
        dims = [dim if isinstance(dim, int) else None for dim in value.shape]
        if len(dims) != tensor.dim() or any(d not in (None, s) for d, s in zip(dims, tensor.shape, strict=True)):
            wanted = "x".join("?" if dim is None else str(dim) for dim in dims)
            raise InputError(
                f"input '{name}' of '{path}' is {wanted}; {source.description} was given "
                f"{'x'.join(map(str, tensor.shape))}"
            )


_Results = dict[str, dict[str, torch.Tensor]]
_Engine = tuple[str | os.PathLike[str], str | os.PathLike[str] | None, str | None]


def _run(
    path: Path | None,
    module: torch.nn.Module,
    feed: Mapping[str, torch.Tensor],
    output_names: Sequence[str],
    *,
    engine: _Engine | None = None,
    say: Progress = lambda _: None,
) -> _Results:
    """Runner name -> outputs by name, from one run of Polygraphy's Comparator."""
    from polygraphy.comparator import Comparator
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    runners: list[Any] = [
        TorchRunner(module, feed, output_names, name=_PYTORCH),
        TorchRunner(module, feed, output_names, float64=True, name=_GOLD),
    ]
    if path is not None:
        runners.append(OrtRunner(ort_session(path), name=_ORT))
    if engine is not None:
        engine_path, library, backend = engine
        runners.append(tensorrt_runner(engine_path, plugin_library=library, backend=backend, name=_TENSORRT))
    say(f"running {', '.join(runner.name for runner in runners)}")
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        try:
            results = Comparator.run(runners, data_loader=[dict(feed)])
        except PolygraphyException as error:
            reason = " ".join(str(error).split())
            raise InputError(f"'{path or engine}' could not be compared: {reason}") from error
        return {
            name: {output: torch.as_tensor(value) for output, value in iterations[0].items()}
            for name, iterations in results
        }


def _judge_all(results: _Results, *, step: float | None = None, prefix: str = "") -> Iterator[OutputParity]:
    for runner, outputs in results.items():
        if runner in (_PYTORCH, _GOLD):
            continue
        for name, gold in results[_GOLD].items():
            yield judge(outputs[name], results[_PYTORCH][name], gold, name=prefix + name, runner=runner, step=step)


def judge(
    value: torch.Tensor,
    pytorch: torch.Tensor,
    gold: torch.Tensor,
    *,
    name: str,
    runner: str = _ORT,
    step: float | None = None,
) -> OutputParity:
    """The verdict over one output.

    Args:
        value: the runner's output.
        pytorch: PyTorch's, of the same dtype and shape.
        gold: the float64 run's; where it is not floating-point, equality is asked for.
        name, runner: for the report.
        step: what the runner rounds to, relative to 1; the output dtype's unit in the last place where None, and
            2**-10, TF32's, for float32 in TensorRT.
    """
    exact = not gold.is_floating_point()
    dtype = str(value.dtype).removeprefix("torch.")
    ours, theirs, want = (t.to(torch.float64) for t in (pytorch, value, gold))
    same_shape = value.shape == pytorch.shape == gold.shape
    finite = torch.isfinite(theirs) & torch.isfinite(ours) & torch.isfinite(want) if same_shape else torch.zeros(0)
    measured = same_shape and bool(finite.any())
    scale, peak = 1.0, 1.0
    worst, rms, pytorch_worst, pytorch_rms, relative = math.inf, math.inf, math.inf, math.inf, math.inf
    index: tuple[int, ...] = ()
    values = (math.nan, math.nan, math.nan)
    if measured:
        reference_values = want[finite]
        scale = float(reference_values.square().mean().sqrt()) or 1.0
        peak = float(reference_values.abs().max()) / scale
        error, pytorch_error = ((side - want).abs().where(finite, 0.0) for side in (theirs, ours))
        worst, pytorch_worst = float(error.max()) / scale, float(pytorch_error.max()) / scale
        rms, pytorch_rms = (float(e[finite].square().mean().sqrt()) / scale for e in (error, pytorch_error))
        index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        values = (float(theirs[index]), float(ours[index]), float(want[index]))
        relative = float(error[index]) / abs(values[2]) if values[2] else (math.inf if error[index] else 0.0)

    if exact:
        worst_tolerance = rms_tolerance = 0.0
        reason = f"{dtype} must be equal"
    else:
        tf32 = step is None and runner == _TENSORRT and value.dtype == torch.float32
        what = "one unit in the last place" if step is None else f"{step:.1e}, one unit in the last place of 16 bits,"
        if tf32:
            what, step = "2^-10, which TF32 rounds to,", _TF32_STEP
        step = _step(value.dtype) if step is None else step
        worst_tolerance = WORST_FACTOR * pytorch_worst + step * peak
        rms_tolerance = RMS_FACTOR * pytorch_rms + step
        reason = (
            f"{WORST_FACTOR:g} x (worst) and {RMS_FACTOR:g} x (rms) PyTorch's own distance from float64, "
            f"for rounding in another order, plus {what} of the largest element"
        )
    passed = measured and worst <= worst_tolerance and rms <= rms_tolerance
    if not same_shape:
        reason = f"shapes differ: pytorch has {list(pytorch.shape)}"
    elif value.numel() == 0:
        passed, reason = True, "there is no element"
    elif not measured:
        reason = "no element is finite on every side: there is nothing to compare"
    elif not exact and pytorch_worst > SENSITIVE and value.dtype in (torch.float32, torch.float64):
        passed = False
        reason = (
            f"PyTorch's own error, {pytorch_worst:.1e}, is above {SENSITIVE:g}: these inputs decide nothing "
            "(a router near a tie?); take another seed"
        )
    elif not _same_specials(theirs, ours):
        passed, reason = False, "NaN or Inf is where PyTorch has none, or the other way round"
    return OutputParity(
        name=name,
        runner=runner,
        shape=tuple(value.shape),
        dtype=dtype,
        worst_index=index,
        worst_values=values,
        relative_error=relative,
        worst=worst,
        rms=rms,
        pytorch_worst=pytorch_worst,
        pytorch_rms=pytorch_rms,
        worst_tolerance=worst_tolerance if measured else 0.0,
        rms_tolerance=rms_tolerance if measured else 0.0,
        reason=reason,
        nan=int(theirs.isnan().sum()),
        inf=int(theirs.isinf().sum()),
        pytorch_nan=int(ours.isnan().sum()),
        pytorch_inf=int(ours.isinf().sum()),
        passed=passed,
    )


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan, inf = a.isnan(), a.isinf()
    return bool((nan == b.isnan()).all() and (inf == b.isinf()).all() and (a[inf] == b[inf]).all())


@dataclass(frozen=True)
class _Tail:
    """One operator node of a 16-bit file, and where its inputs come from."""

    node: ir.Node
    spec: OperatorSpec
    function: ir.Function | None
    inputs: dict[str, ir.Value]
    opset: int

    @property
    def name(self) -> str:
        return self.node.name or str(self.node.outputs[0].name)


def _tails(model: ir.Model) -> Iterator[_Tail]:
    for node in model.graph:
        spec = operator_of(node)
        if spec is not None:
            function = model.functions.get(node.op_identifier())
            yield _Tail(node, spec, function, named_inputs(node), model.graph.opset_imports[""])


def _expose(twin: ir.Model, names: set[str]) -> None:
    """Makes values of the graph outputs of it."""
    outputs = {value.name for value in twin.graph.outputs}
    for node in twin.graph:
        for value in node.outputs:
            if value.name in names - outputs:
                twin.graph.outputs.append(value)


class _TailModule(torch.nn.Module):
    """The operator's reference as a module."""

    def __init__(self, tail: _Tail) -> None:
        super().__init__()
        self._spec, self._names, self._attributes = tail.spec, list(tail.inputs), read_attributes(tail.node)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return reference(self._spec, dict(zip(self._names, tensors, strict=True)), self._attributes)


def _compare_tail(
    tail: _Tail, values: Mapping[str, torch.Tensor], half: ir.DataType, folder: Path
) -> Iterator[OutputParity]:
    feed, operands = {}, {}
    for name, value in tail.inputs.items():
        dtype = _TORCH_DTYPES[value.dtype or half]
        found = values.get(value.name or "")
        tensor = _constant(value) if found is None else found
        feed[name] = tensor.to(dtype)
        operands[name] = Operand(str(dtype).removeprefix("torch."), list(tensor.shape))
    model = make_model(tail.spec, operands, read_attributes(tail.node), opset=tail.opset)
    if tail.function is not None:
        # The file's own function is what is on trial.
        model.functions.clear()
        model.functions[tail.function.identifier()] = tail.function
        next(iter(model.graph)).overload = tail.function.overload
    for output in model.graph.outputs:
        if output.shape is None:
            output.shape = ir.Shape([feed["expert_weights"].shape[0], None])
    path = save_model(model, folder / "tail.onnx")
    results = _run(path, _TailModule(tail), feed, tail.spec.outputs)
    yield from _judge_all(results, prefix=f"{tail.name}.")


def _constant(value: ir.Value) -> torch.Tensor:
    if value.const_value is None:
        raise InputError(f"value '{value.name}' of the graph was not computed; the tail that reads it is not compared")
    array = value.const_value.numpy()
    return torch.from_numpy(array.astype("float32") if value.dtype in _HALVES else array.copy())
