"""Choices that rounding decides, such as a router's between two experts of the same score: made alike on both sides.

Where scores are equal, or nearer than roundings move them, PyTorch and ONNX Runtime may choose different experts, and
either is right. Nothing would be compared then: so PyTorch, and its float64 run, are run with the choices that ONNX
Runtime made, and everything after them is compared as ever. A choice of scores further apart is no such one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import onnx_ir as ir
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moetrt.onnx_op import operator_of
from moetrt.parity.verdict import WORST_FACTOR, number

_CHOOSING = {
    torch.ops.aten.topk: 1,
    torch.ops.aten.sort: 1,
    torch.ops.aten.max: 1,
    torch.ops.aten.argmax: 0,
}
"""PyTorch's operators that choose, and which result the indices are."""

_AXES = {"TopK": -1, "ArgMax": 0}
"""ONNX's, and the axis where none is given."""


@dataclass(frozen=True)
class Chooser:
    """A node of a graph that chooses by scores.

    Attributes:
        name: the node's.
        scores, indices: the names of what it reads and gives.
        axis: the dimension that it chooses along.
        kept: whether the indices keep that dimension.
        where: the place in the model, in words.
    """

    name: str
    scores: str
    indices: str
    axis: int
    kept: bool
    where: str


def choosers(model: ir.Model) -> list[Chooser]:
    """The nodes of the main graph that choose by floating-point scores, in its order."""
    nodes = list(model.graph)
    tails = [place for place, node in enumerate(nodes) if operator_of(node) is not None]
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
    found = []
    for place, node in enumerate(nodes):
        if node.domain or node.op_type not in _AXES or node.inputs[0] is None or node.inputs[0].dtype not in floats:
            continue
        following = next((number for number, tail in enumerate(tails) if tail > place), None)
        where = f"'{node.name}'"
        if following is not None:
            where += f", before tail {following + 1} of {len(tails)} ({nodes[tails[following]].name})"
        found.append(
            Chooser(
                name=node.name or "",
                scores=node.inputs[0].name or "",
                indices=node.outputs[-1].name or "",
                axis=node.attributes.get_int("axis", _AXES[node.op_type]),
                kept=node.op_type == "TopK" or node.attributes.get_int("keepdims", 1) != 0,
                where=where,
            )
        )
    return found


def made_by(chooser: Chooser, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The indices that a node gave, ``[rows, K]``; None where they are not among the outputs of the run."""
    indices = outputs.get(chooser.indices)
    return None if indices is None else _rows(indices, chooser.axis, chooser.kept)


@dataclass
class Choice:
    """One call that chose.

    Attributes:
        scores: what it read, ``[rows, E]``.
        own: the indices that it gave by itself, ``[rows, K]``.
        replaced: the rows in which others were given in their place, ``[rows]``.
    """

    scores: torch.Tensor
    own: torch.Tensor
    replaced: torch.Tensor


class Choosing(TorchDispatchMode):
    """While it is on, PyTorch's choices are recorded in ``seen``, and made as they are given."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """Makes a mode.

        Args:
            given: the indices of each call in turn, ``[rows, K]``; calls that they do not fit choose by themselves.
        """
        super().__init__()
        self._given = given
        self.seen: list[Choice] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator; of one that chooses, with other indices."""
        result = func(*args, **(kwargs or {}))
        place, parameters = _CHOOSING.get(func.overloadpacket), [entry.name for entry in func._schema.arguments]
        if place is None or "dim" not in parameters:
            return result
        scores, axis = args[0], (dict(zip(parameters, args, strict=False)) | (kwargs or {})).get("dim", -1)
        if not scores.is_floating_point() or not scores.dim() or axis is None:
            return result
        indices = result[place] if isinstance(result, tuple | list) else result
        kept = indices.dim() == scores.dim()
        rows, own = _rows(scores, axis, True), _rows(indices, axis, kept)
        given = self._given[len(self.seen)] if len(self.seen) < len(self._given) else own
        if given.shape != own.shape or bool(((given < 0) | (given >= rows.shape[-1])).any()):
            given = own
        replaced = _another(own, given, rows.shape[-1])
        self.seen.append(Choice(rows, own, replaced))
        if not replaced.any():
            return result
        made = torch.where(replaced[:, None], given, own)
        chosen = _as_before(made, indices, axis, kept)
        if not isinstance(result, tuple | list):
            return chosen
        return _as_before(rows.gather(-1, made), indices, axis, kept), chosen


def _rows(tensor: torch.Tensor, axis: int, kept: bool) -> torch.Tensor:
    """``[..., E, ...]`` as ``[rows, E]``."""
    if not kept:
        return tensor.reshape(-1, 1)
    moved = tensor.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _as_before(rows: torch.Tensor, like: torch.Tensor, axis: int, kept: bool) -> torch.Tensor:
    """The reverse of `_rows`."""
    if not kept:
        return rows.reshape(like.shape)
    return rows.reshape(like.movedim(axis, -1).shape).movedim(-1, axis)


def _another(own: torch.Tensor, given: torch.Tensor, among: int) -> torch.Tensor:
    """The rows whose choice is another: another order counts where all are taken, and is one of chance otherwise."""
    if own.shape[-1] < among:
        own, given = own.sort(-1).values, given.sort(-1).values
    return (own != given).any(-1)


@dataclass(frozen=True)
class Tie:
    """One token's choice that was made alike.

    Attributes:
        chooser: the node.
        token: which, counted over all dimensions but the one that is chosen along.
        taken, left: what ONNX Runtime chose that PyTorch did not, and the other way round.
        scores: of these two groups, in float64.
        margin: how far the scores are apart.
        rounding: how far apart roundings may bring them.
    """

    chooser: Chooser
    token: int
    taken: tuple[int, ...]
    left: tuple[int, ...]
    scores: tuple[tuple[float, ...], tuple[float, ...]]
    margin: float
    rounding: float

    @property
    def decided(self) -> bool:
        """Whether the scores are too far apart for a tie."""
        return not self.margin <= self.rounding

    def line(self) -> str:
        """The choice for people."""
        taken, left = (", ".join(map(str, chosen)) for chosen in (self.taken, self.left))
        scores = " and ".join(", ".join(f"{score:.9g}" for score in group) for group in self.scores)
        apart = f"{self.margin:.1e} apart" if self.margin else "equal"
        found = (
            f"token {self.token} at {self.chooser.where}: ONNX Runtime takes {taken}, PyTorch {left}, "
            f"with the scores {scores}, {apart}"
        )
        return f"{found}, more than the {self.rounding:.1e} of roundings" if self.decided else found

    def as_dict(self) -> dict[str, Any]:
        """The choice for JSON; what is not finite is null."""
        return {
            "node": self.chooser.name,
            "token": self.token,
            "onnxruntime": list(self.taken),
            "pytorch": list(self.left),
            "scores": [[number(score) for score in group] for group in self.scores],
            "margin": number(self.margin),
            "rounding": number(self.rounding),
        }


def find_ties(
    nodes: Sequence[Chooser],
    given: Sequence[torch.Tensor],
    pytorch: Sequence[Choice],
    gold: Sequence[Choice],
    step: float,
) -> list[Tie]:
    """Each choice that PyTorch or its float64 run would have made otherwise.

    Args:
        nodes: the nodes that chose.
        given: their indices.
        pytorch, gold: the calls, while they were given these indices.
        step: what roundings are relative to 1.

    Returns:
        In the order of the graph. Scores may be apart by twice what an output may be off by in the worst element.
    """
    found = []
    for node, indices, mine, exact in zip(nodes, given, pytorch, gold, strict=True):
        wide = exact.scores.double()
        error = (mine.scores.double() - wide).abs()
        limit = 2 * (WORST_FACTOR * _largest(error) + step * _largest(wide))
        for row in (mine.replaced | exact.replaced).nonzero().flatten().tolist():
            other = (mine if mine.replaced[row] else exact).own[row]
            found.append(_tie(node, row, indices[row], other, wide[row], limit))
    return found


def _tie(
    node: Chooser, row: int, indices: torch.Tensor, other: torch.Tensor, scores: torch.Tensor, limit: float
) -> Tie:
    whole = len(indices) == len(scores)
    taken = [i for place, i in enumerate(indices.tolist()) if i != other[place] if whole or i not in other.tolist()]
    left = [i for place, i in enumerate(other.tolist()) if i != indices[place] if whole or i not in indices.tolist()]
    pair = scores[taken], scores[left]
    one, another = pair if whole else (side.sort(descending=True).values for side in pair)
    # Two infinities of one sign are no distance apart.
    margin = float((one - another).abs().where(one != another, 0.0).max())
    listed = tuple(tuple(side.tolist()) for side in pair)
    return Tie(node, row, tuple(taken), tuple(left), (listed[0], listed[1]), margin, limit)


def by_node(ties: Sequence[Tie]) -> list[list[Tie]]:
    """The choices of each node."""
    return [list(group) for _, group in groupby(ties, key=lambda tie: tie.chooser)]


def ties_as_list(ties: Sequence[Tie]) -> list[dict[str, Any]]:
    """The choices for JSON: of each node how many tokens have one, and the first."""
    return [{"tokens": len(group), "first": group[0].as_dict()} for group in by_node(ties)]


def told(ties: Sequence[Tie], where: str) -> list[str]:
    """The choices for people, a line for each node.

    Args:
        ties: that were made alike.
        where: the length at which, in words; empty for the one that is looked at closely.
    """
    lines = []
    for group in by_node(ties):
        more = "" if len(group) == 1 else f" (and {len(group) - 1} more tokens there)"
        lines.append(
            f"tie{where and f' at {where}'}: {group[0].line()}{more}; rounding decides, and PyTorch was run with "
            "ONNX Runtime's choice"
        )
    return lines


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def fits(given: Sequence[torch.Tensor], seen: Sequence[Choice]) -> bool:
    """Whether the calls are the nodes: as many, of the same sizes."""
    return len(given) == len(seen) and all(one.shape == other.own.shape for one, other in zip(given, seen, strict=True))
