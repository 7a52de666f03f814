"""The sizes at which an ONNX file is right, where it is not right at all: kept in the file, by the dimension's name.

A Python branch or loop on a length leaves the example's branch in the graph, which other lengths would not have taken.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import onnx_ir as ir

from moetrt.errors import InputError

DIMENSION_BOUNDS = "moetrt.dimension_bounds"
"""Key of the model's metadata: JSON, ``{"seq": {"minimum": 1, "maximum": 15, "reason": "..."}}``."""


@dataclass(frozen=True)
class Bound:
    """The sizes of one dynamic dimension at which a file gives what its model gives.

    Attributes:
        symbol: the dimension's name in the file, such as ``seq``.
        minimum: the smallest size, at least 1.
        maximum: the largest; None where there is none.
        reason: what in the model holds for these sizes alone, and where it says so, in one line.
    """

    symbol: str
    minimum: int
    maximum: int | None
    reason: str

    @property
    def sizes(self) -> str:
        """The sizes in words: ``1 to 15``, ``at least 16`` or ``8 alone``."""
        if self.maximum is None:
            return f"at least {self.minimum}"
        return f"{self.minimum} to {self.maximum}" if self.maximum > self.minimum else f"{self.minimum} alone"

    def __contains__(self, size: int) -> bool:
        return self.minimum <= size and (self.maximum is None or size <= self.maximum)

    def __str__(self) -> str:
        return f"the file is right only where '{self.symbol}' is {self.sizes}: {self.reason}"


def bounds_of(model: ir.Model) -> dict[str, Bound]:
    """The bounds that ``model`` carries, by symbol; none where every size is right, or nothing is said.

    Raises:
        InputError: the metadata are not what `write_bounds` writes.
    """
    text = model.metadata_props.get(DIMENSION_BOUNDS)
    if text is None:
        return {}
    try:
        return {symbol: _bound(symbol, entry) for symbol, entry in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(
            f"the metadata '{DIMENSION_BOUNDS}' of the model were '{text[:80]}'; a minimum, a maximum and a reason by "
            "dimension, as moetrt writes them, are taken"
        ) from error


def _bound(symbol: str, entry: Mapping[str, object]) -> Bound:
    minimum, maximum, reason = entry["minimum"], entry["maximum"], entry["reason"]
    if not (type(minimum) is int and type(maximum) in (int, type(None)) and isinstance(reason, str)):
        raise TypeError(symbol)
    return Bound(symbol, minimum, maximum, reason)  # type: ignore[arg-type]


def write_bounds(model: ir.Model, bounds: Mapping[str, Bound]) -> None:
    """Writes ``bounds`` into the metadata of ``model``, in place of those that it has."""
    model.metadata_props.pop(DIMENSION_BOUNDS, None)
    if bounds:
        model.metadata_props[DIMENSION_BOUNDS] = json.dumps(as_json(bounds))


def as_json(bounds: Mapping[str, Bound]) -> dict[str, dict[str, int | str | None]]:
    """The bounds for JSON, by symbol: minimum, maximum (null where there is none) and reason."""
    return {
        symbol: {key: value for key, value in asdict(bound).items() if key != "symbol"}
        for symbol, bound in bounds.items()
    }


def check_sizes(bounds: Mapping[str, Bound], sizes: Mapping[str, int]) -> None:
    """Checks that sizes by symbol lie within the bounds.

    Raises:
        InputError: one does not.
    """
    for symbol, size in sizes.items():
        bound = bounds.get(symbol)
        if bound is not None and size not in bound:
            raise InputError(f"dimension '{symbol}' was {size}; {bound.sizes} is taken: {bound.reason}")


def check_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Checks that the shapes of a model's inputs, by name, lie within the bounds that the model carries.

    Raises:
        InputError: as of `bounds_of` and `check_sizes`.
    """
    bounds = bounds_of(model)
    for value in model.graph.inputs if bounds else ():
        for dimension, size in zip(value.shape or (), shapes.get(value.name or "", ()), strict=False):
            if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None:
                check_sizes(bounds, {dimension.value: size})
