"""The lengths at which a file is compared end to end, beside the sizes at which it is looked at closely."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from moetrt.bounds import bounds_of
from moetrt.parity.choices import Tie, ties_as_list
from moetrt.parity.verdict import OutputParity
from moetrt.profiles import rows_of_routes
from moetrt.source import Source

TIMES = 4
"""How many times the example's size a dimension without a bound is looked at: a length that the trace decided something
by is most often near the example's."""


@dataclass(frozen=True)
class LengthParity:
    """What was found at one length.

    Attributes:
        sizes: of the dynamic dimensions, by symbol.
        inputs: name -> shape of the inputs; empty where none could be drawn.
        outputs: one for each output of the model, by ONNX Runtime; empty where one of the sides gave none.
        failure: what ONNX Runtime says where it fails and PyTorch runs; empty otherwise.
        unmeasured: why PyTorch gives nothing to compare with; empty where it does.
        cause: of a length that differs, what explains it, as far as known.
        ties: choices that rounding decides, which PyTorch was given as ONNX Runtime made them.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: tuple[OutputParity, ...] = ()
    failure: str = ""
    unmeasured: str = ""
    cause: str = ""
    ties: tuple[Tie, ...] = ()

    @property
    def where(self) -> str:
        """The sizes in words."""
        return ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())

    @property
    def passed(self) -> bool:
        """Whether nothing differs; where PyTorch gives nothing, nothing does."""
        return not self.failure and all(output.passed or output.undecided for output in self.outputs)

    @property
    def gap(self) -> str:
        """Why nothing, or not all, was compared; empty where all was."""
        if self.unmeasured:
            return self.unmeasured
        lost = next((output for output in self.outputs if output.undecided), None)
        if lost is not None:
            return f"{lost.name}: {lost.reason}"
        part = next((output for output in self.outputs if output.gap), None)
        return "" if part is None else f"{part.name}: {part.gap}"

    @property
    def why(self) -> str:
        """Of a length that differs: what is wrong."""
        if self.failure:
            return f"PyTorch runs, and {self.failure}"
        wrong = next((output for output in self.outputs if not output.passed and not output.undecided), None)
        return "" if wrong is None else wrong.headline().removeprefix("DIFFERS: ")

    def lines(self) -> list[str]:
        """The verdict for people: one line, and the figures of what differs."""
        if not self.passed:
            wrong = [output for output in self.outputs if not output.passed and not output.undecided]
            found = [f"DIFFERS: at {self.where}: {self.why}"]
            return found + [line for output in wrong for line in output.lines()[1:]]
        if not self.outputs:
            return [f"NOT MEASURED: at {self.where}: {self.unmeasured}"]
        names = ", ".join(output.name for output in self.outputs)
        worst = max((output.ratio for output in self.outputs), default=0.0)
        line = f"ok: at {self.where}: {names}, {self.outputs[0].runner} against pytorch: {worst:.2f} x pytorch's error"
        return [line + (f"; NOT MEASURED of {self.gap}" if self.gap else "")]

    def as_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
        return {
            "sizes": dict(self.sizes),
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "passed": self.passed,
            "outputs": [output.as_dict() for output in self.outputs],
            "failure": self.failure or None,
            "not_measured": self.unmeasured or None,
            "cause": self.cause or None,
            "ties": ties_as_list(self.ties),
        }


def other_lengths(model: ir.Model, source: Source) -> list[dict[str, int]]:
    """The lengths that are looked at by default: 1, and as long as the file allows, else `TIMES` the example's.

    The rows of a tail whose map is an input too are as many as the routes, as in a profile's default.

    Args:
        model: the file; a bound that it carries is its dimension's length.
        source: its dynamic dimensions; those that the file fixes are left out.

    Returns:
        The sizes by the source's symbols; nothing where every dimension is fixed.

    Raises:
        InputError: the file's bounds cannot be read.
    """
    names = _names_in_file(model, source)
    examples = {symbol: size for symbol, size in source.example_sizes.items() if symbol in names}
    bounds = bounds_of(model)
    lengths: list[dict[str, int]] = [{}, {}]
    for symbol, size in examples.items():
        bound = bounds.get(names[symbol])
        low, high = (1, None) if bound is None else (bound.minimum, bound.maximum)
        lengths[0][symbol] = low
        lengths[1][symbol] = max(TIMES * size, low) if high is None else high
    rows = rows_of_routes(model, {value.name or "": value for value in model.graph.inputs if value.shape is not None})
    by_name = {name: symbol for symbol, name in names.items()}
    for sizes in lengths:
        for dimension, routes in rows.items():
            counts = [size if isinstance(size, int) else sizes.get(by_name.get(str(size), "")) for size in routes]
            if (many := by_name.get(str(dimension))) and None not in counts:
                sizes[many] = math.prod(count or 0 for count in counts)
    found = [sizes for sizes in lengths if sizes and sizes != examples]
    return found if len(found) < 2 or found[0] != found[1] else found[:1]


def _names_in_file(model: ir.Model, source: Source) -> dict[str, str]:
    """The names that the source's symbols have in the file, of those that are dynamic in it wherever they stand."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    found: dict[str, str] = {}
    fixed = set()
    for name, dims in source.dynamic_shapes.items():
        for axis, symbol in dims.items():
            shape = shapes.get(name)
            dim = None if shape is None else shape[axis]
            if isinstance(dim, int):
                fixed.add(symbol)
            else:
                found.setdefault(symbol, str(dim.value or symbol) if dim is not None else symbol)
    return {symbol: name for symbol, name in found.items() if symbol not in fixed}
