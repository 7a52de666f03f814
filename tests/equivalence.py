"""Two ONNX models get the same inputs in ONNX Runtime, and their outputs are compared."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from moetrt.errors import InputError
from moetrt.onnx_files import save_model
from moetrt.onnx_op import attach_functions


@dataclass(frozen=True)
class Difference:
    """How far one output of two models differs.

    Attributes:
        output: the output's name.
        largest: the largest absolute difference; infinite where one side is not a number and the other is.
        scale: the largest absolute value of the first model's output.
        index: where the largest difference is.
        before: the first model's value there.
        after: the second model's value there.
    """

    output: str
    largest: float
    scale: float
    index: tuple[int, ...]
    before: float
    after: float

    @property
    def relative(self) -> float:
        """The largest difference as a part of the largest value."""
        return self.largest / self.scale if self.scale else self.largest

    def __str__(self) -> str:
        return (
            f"output '{self.output}' differs by {self.largest:.3g} ({self.relative:.2e} of its largest value) at "
            f"{list(self.index)}: {self.before:.6g} before, {self.after:.6g} after"
        )


def seeded_inputs(
    model: ir.Model,
    sizes: Mapping[str, int],
    *,
    seed: int = 0,
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, np.ndarray]:
    """Random inputs for ``model``: floats from a normal distribution, integers evenly from their range.

    Args:
        model: whose inputs are wanted.
        sizes: the number for each symbolic dimension.
        seed: of the random numbers.
        ranges: by input: the least integer, and one more than the greatest; 0 and 2 where left out.

    Raises:
        InputError: an input's shape or dtype is not known, or ``sizes`` lacks a dimension.
    """
    random = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        if value.shape is None or value.dtype is None or value.name is None:
            raise InputError(f"input '{value.name}' has no shape or dtype")
        shape = [_size(dim, sizes, value.name) for dim in value.shape]
        if value.dtype.is_floating_point():
            feeds[value.name] = random.standard_normal(shape).astype(value.dtype.numpy())
        else:
            low, high = (ranges or {}).get(value.name, (0, 2))
            feeds[value.name] = random.integers(low, high, shape).astype(value.dtype.numpy())
    return feeds


def _size(dim: int | ir.SymbolicDim, sizes: Mapping[str, int], name: str) -> int:
    if isinstance(dim, int):
        return dim
    if dim.value is None or dim.value not in sizes:
        raise InputError(f"input '{name}' has the dimension '{dim.value}', whose size is not given")
    return sizes[dim.value]


def run_model(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs ``model`` in ONNX Runtime on the CPU, unoptimised, with the operators' functions; ``model`` stays as it is.

    Raises:
        InputError: ONNX Runtime cannot load or run it (a bfloat16 model, outside its tails, for instance).
    """
    import onnxruntime

    copy = model.clone()
    attach_functions(copy)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="moetrt-") as folder:
        path = save_model(copy, Path(folder) / "model.onnx")
        try:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            values = session.run(None, dict(feeds))
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            raise InputError(f"ONNX Runtime cannot run the model: {' '.join(str(error).split())}") from error
    return {output.name: value for output, value in zip(session.get_outputs(), values, strict=True)}


def compare_models(before: ir.Model, after: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[Difference]:
    """Runs both models on ``feeds`` and measures how far each floating-point output differs.

    Args:
        before: the model that is right.
        after: the model with the same inputs and outputs.
        feeds: by input name.

    Raises:
        InputError: the models' outputs differ in names, shapes or dtypes, or a model does not run.
    """
    first, second = run_model(before, feeds), run_model(after, feeds)
    if list(first) != list(second):
        raise InputError(f"the models' outputs differ: {', '.join(first)} before, {', '.join(second)} after")
    return [_difference(name, first[name], second[name]) for name in first]


def _difference(name: str, before: np.ndarray, after: np.ndarray) -> Difference:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise InputError(
            f"output '{name}' was {before.dtype} {list(before.shape)} before, {after.dtype} {list(after.shape)} after"
        )
    one, two = before.astype(np.float64), after.astype(np.float64)
    if one.size == 0:
        return Difference(name, 0.0, 0.0, (), 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        apart = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0.0, np.abs(one - two))
    apart = np.where(np.isnan(apart), np.inf, apart)
    index = np.unravel_index(int(apart.argmax()), apart.shape)
    at = tuple(int(i) for i in index)
    finite = np.abs(one[np.isfinite(one)])
    return Difference(name, float(apart[at]), float(finite.max(initial=0.0)), at, float(one[at]), float(two[at]))
