"""What a trace took for granted of its dynamic sizes: torch's guards, read one by one, become bounds or a refusal.

A Python branch, loop or number that depends on a size is traced as the example's size has it. torch notes the relation
that held (``n // 16 <= 0``) in the trace's shape environment, and goes on; a graph says nothing of it.
"""

import linecache
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from moetrt.bounds import Bound
from moetrt.errors import InputError
from moetrt.rewrites.read_branches import is_read

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ASKING = (
    os.path.join(_TORCH, "__init__.py"),
    os.path.join(_TORCH, "fx", "experimental", ""),
    os.path.join(_TORCH, "_dynamo", "variables", ""),
)
"""Where a symbolic number answers what it is asked, in torch: what lies outside is who asked."""

_EXPORTER = os.path.join(os.path.dirname(__file__), "capture.py")
"""What calls torch.onnx: where it asks for itself, no line of the model is being run."""

_DYNAMO = os.path.join(_TORCH, "_dynamo", "")

_DENSE = 4096
"""Every size up to this, and as far from the example, is tried; beyond, sizes further and further apart."""

_LARGEST = 2**31 - 1
_OTHERS = (2, 3, 5, 8, 13, 64, 100, 257, 4096)
"""What the other sizes of a relation are tried at, beside the size itself and its neighbours."""

_Holds = Callable[..., bool]


@dataclass(frozen=True)
class _Relation:
    """What held when it was asked for.

    Attributes:
        expression: a relation of sympy, over the symbols of its shape environment.
        place: the line of code outside torch that asked, or called what asked.
        of_torch: whether an operator of torch asked, and no line of Python's.
    """

    expression: sympy.Basic
    place: str
    of_torch: bool


class Guards:
    """The relations that traces noted, each with its line of code."""

    def __init__(self) -> None:
        self._relations: dict[ShapeEnv, dict[sympy.Basic, _Relation]] = {}

    def note(self, env: ShapeEnv, expression: sympy.Basic) -> None:
        if not isinstance(expression, sympy.Basic):
            return
        asked_by = _asked_by()
        if is_read(asked_by.file, asked_by.line):
            return
        relations = self._relations.setdefault(env, {})
        known = relations.get(expression)
        # One that Python asks, too, is not torch's own affair.
        if known is None or known.of_torch > asked_by.of_torch:
            place = _place(asked_by.file, asked_by.line)
            relations[expression] = _Relation(expression, place, asked_by.of_torch)

    def bounds(self, program: torch.export.ExportedProgram, symbols: Sequence[Mapping[int, str]]) -> dict[str, Bound]:
        """The sizes at which the graph of ``program`` is right, by symbol; none where all of 1 and more are.

        Args:
            program: a trace that was made while `noted` ran.
            symbols: for each input, the names of its dynamic dimensions.

        Raises:
            InputError: what the trace took for granted is no range of one size that holds the example's and others.
        """
        env = _environment(program)
        if env is None:
            return {}
        names, example = _names(env, symbols)
        found: dict[str, Bound] = {}
        for relation in self._relations.get(env, {}).values():
            expression = relation.expression.xreplace(names)
            # What the data make has no example to follow: torch asserts it for any data.
            if expression.free_symbols <= set(names.values()):
                bound = _bound(expression, example, relation)
                if bound is not None:
                    found[bound.symbol] = _both(found.get(bound.symbol), bound)
        for bound in found.values():
            if bound.maximum is not None and bound.maximum <= bound.minimum:
                raise _refused(bound.symbol, example[bound.symbol], bound.reason)
        return found

    def fixed(self, symbols: Sequence[Mapping[int, str]]) -> InputError | None:
        """Of a trace that torch gave up, the error that names which line of code fixed which dynamic size; or None."""
        for env, relations in self._relations.items():
            names, example = _names(env, symbols)
            for relation in relations.values():
                expression = relation.expression.xreplace(names)
                free = sorted(map(str, expression.free_symbols & set(names.values())))
                if isinstance(expression, sympy.Eq) and len(free) == 1:
                    bound = _range(expression, free[0], example, False)
                    if bound is not None and bound == (example[free[0]],) * 2:
                        return _refused(free[0], example[free[0]], f"{expression} in {relation.place}")
        return None


@contextmanager
def noted() -> Iterator[Guards]:
    """While the block runs, what traces take for granted of sizes is noted."""
    guards = Guards()
    log = ShapeEnv._log_guard

    def note(env: ShapeEnv, prefix: str, expression: Any, *args: Any, **kwargs: Any) -> None:
        # What is suppressed is asked for keys of torch's caches.
        if "suppressed" not in prefix:
            guards.note(env, expression)
        log(env, prefix, expression, *args, **kwargs)

    with patch.object(ShapeEnv, "_log_guard", note):
        yield guards


@dataclass(frozen=True)
class _Asked:
    """Who asks: the line of code outside torch, and whether it is an operator of torch that does, called there."""

    file: str
    line: int
    of_torch: bool


def _asked_by() -> _Asked:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_ASKING, __file__)):
        frame = frame.f_back
    # Where Dynamo traces, it asks for the lines that it reads.
    dynamo = frame is not None and frame.f_code.co_filename.startswith(_DYNAMO)
    of_torch = frame is not None and _is_torch(frame) and not dynamo
    lines = [line for line in TracingContext.extract_stack() if not line.filename.startswith(_TORCH)]
    if lines:
        return _Asked(lines[-1].filename, lines[-1].lineno or 0, of_torch)
    while frame is not None and _is_torch(frame):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == _EXPORTER:
        return _Asked("", 0, of_torch)
    return _Asked(frame.f_code.co_filename, frame.f_lineno, of_torch)


def _is_torch(frame: FrameType) -> bool:
    """Whether a call is torch's own, of code that torch wrote, or goes through a mode of `moetrt.rewrites`."""
    return frame.f_code.co_filename.startswith((_TORCH, "<")) or frame.f_code.co_name == "__torch_function__"


def _place(file: str, line: int) -> str:
    """A line of code, by a path that is not of this machine alone: ``models/mine.py:12 'if n > 0:'``."""
    if not file:
        return "an operator of torch"
    roots = sorted((os.path.join(os.path.abspath(root), "") for root in sys.path), key=len, reverse=True)
    shown = next((file.removeprefix(root) for root in roots if file.startswith(root)), os.path.basename(file))
    text = " ".join(linecache.getline(file, line).split())
    return f"{shown}:{line} '{text}'"


def _environment(program: torch.export.ExportedProgram) -> ShapeEnv | None:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        for size in sizes:
            if isinstance(size, torch.SymInt):
                env: ShapeEnv = size.node.shape_env
                return env
    return None


def _names(
    env: ShapeEnv, symbols: Sequence[Mapping[int, str]]
) -> tuple[dict[sympy.Basic, sympy.Symbol], dict[str, int]]:
    """The environment's symbols as the dimensions' names, and the example's size of each."""
    names: dict[sympy.Basic, sympy.Symbol] = {}
    example = {}
    for symbol, sources in env.var_to_sources.items():
        for source in sources:
            place, dim = getattr(getattr(source, "base", None), "index", None), getattr(source, "idx", None)
            name = symbols[place].get(dim) if isinstance(place, int) and isinstance(dim, int) else None
            if name is not None:
                names[symbol] = sympy.Symbol(name, integer=True, positive=True)
                example[name] = int(env.backed_var_to_val[symbol])
    return names, example


def _bound(expression: sympy.Basic, example: Mapping[str, int], relation: _Relation) -> Bound | None:
    """The range of one size in which a relation holds, whatever the others are; None where it always does.

    Raises:
        InputError: there is none.
    """
    free = sorted(map(str, expression.free_symbols))
    if not free:
        return None
    reason = f"{expression} in {relation.place}"
    smallest = 1
    if relation.of_torch:
        # Operators broadcast a size of 1: torch asks while it traces, ONNX's own do when they run.
        if isinstance(expression, sympy.Ne) and 1 in expression.args:
            return None
        smallest = 2
    ranges = {symbol: _range(expression, symbol, example, relation.of_torch) for symbol in free}
    if (smallest, None) in ranges.values():
        return None
    for symbol, found in ranges.items():
        if found is not None:
            low, high = found
            return Bound(symbol, 1 if low == smallest else low, high, reason)
    if len(free) == 1:
        raise _refused(free[0], example[free[0]], reason)
    sizes = " and ".join(f"{symbol} = {example[symbol]}" for symbol in free)
    raise InputError(
        f"the graph is right only where {reason}, as it is at {sizes}; dimensions that do not depend on each other, or "
        "have one name, are taken"
    )


def _refused(symbol: str, size: int, reason: str) -> InputError:
    return InputError(
        f"dimension '{symbol}' is to be dynamic, but the graph is right only where {reason}, as it is at {symbol} = "
        f"{size}; code that takes a range of sizes the same way is taken"
    )


def _both(one: Bound | None, other: Bound) -> Bound:
    """Both bounds at once, with the reasons of the two ends."""
    if one is None:
        return other
    low = one if one.minimum >= other.minimum else other
    highs = [bound for bound in (one, other) if bound.maximum is not None]
    high = min(highs, key=lambda bound: bound.maximum or 0, default=low)
    ends = [bound for bound in (low, high) if bound.minimum > 1 or bound.maximum is not None]
    reasons = dict.fromkeys(bound.reason for bound in ends)
    return Bound(one.symbol, low.minimum, high.maximum, "; ".join(reasons))


def _range(
    expression: sympy.Basic, symbol: str, example: Mapping[str, int], of_torch: bool
) -> tuple[int, int | None] | None:
    """The sizes around the example's at which the relation holds for all others tried; None where it does not there."""
    free = sorted(map(str, expression.free_symbols))
    others = [name for name in free if name != symbol]
    smallest = 2 if of_torch else 1
    tried = [{smallest, example[name], *_OTHERS} for name in others]
    relation = _compiled(expression, [symbol, *others])

    def holds(size: int) -> bool:
        near = {max(one, smallest) for one in (size // 2, size - 1, size, size + 1, 2 * size)} if others else set()
        return all(relation(size, *rest) for rest in product(*(near | values for values in tried)))

    size = example[symbol]
    if not holds(size):
        return None
    low = size
    while low > smallest and size - low < _DENSE and holds(low - 1):
        low -= 1
    if low > smallest and size - low >= _DENSE:
        low = _edge(holds, low, smallest)
    high = size
    while high - size < _DENSE and holds(high + 1):
        high += 1
    if high - size < _DENSE:
        return low, high
    constants = {int(number) for number in expression.atoms(sympy.Integer) if abs(number) < _LARGEST}
    far = {high + math.ceil(1.02**step) for step in range(1, 1080)}
    far |= {abs(number) * factor + by for number in constants for factor in (1, 2, 3, 64) for by in (-1, 0, 1)}
    for known in sorted(size for size in far if high < size <= _LARGEST):
        if not holds(known):
            return low, _edge(holds, high, known)
        high = known
    return low, None


def _edge(holds: _Holds, inside: int, outside: int) -> int:
    """The last size that holds between one that does and one that may not."""
    if holds(outside):
        return outside
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


def _compiled(expression: sympy.Basic, names: Sequence[str]) -> _Holds:
    text = PythonPrinter().doprint(expression)
    function: _Holds = eval(f"lambda {', '.join(names)}: {text}", {"torch": torch, "math": math})
    return function
