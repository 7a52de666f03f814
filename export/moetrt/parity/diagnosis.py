"""Why a tail gives other numbers than the graph it replaced: which one change of an input or attribute helps.

Everything here is in float64, where a right tail agrees with the graph before mapping to about 1e-9: each hypothesis is
tried by computing the tail with that one change, and what is left of the error says how well it explains it. Some
hypotheses need nothing but the numbers that are wanted (factors by least squares, flags, the map, eps); others take one
input or attribute from what mapping the original graph anew gives.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from moetrt.errors import MoetrtError
from moetrt.reference import reference
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OperatorSpec

EXACT = 2.0**-20
"""Two tails that mean the same differ by less in float64: attributes are float32 numbers (2^-24 each), several of them
are multiplied, and constants of the graph that the mapper multiplied together were rounded once more."""

_WIDE = ("shared_output", "residual")
_MAP = "expanded_idx_to_permuted_idx"
_SCALES = ("routed_scaling_factor", "combine_scale", "residual_scale")


@dataclass(frozen=True)
class Operation:
    """One tail as numbers: which operator, its inputs in float64 (the map in int32), and its attributes."""

    spec: OperatorSpec
    inputs: Mapping[str, torch.Tensor]
    attributes: Mapping[str, float | int]

    def outputs(self) -> dict[str, torch.Tensor]:
        """What it gives, by name; "hidden" is residual_out too, so that the two operators can be compared."""
        values = reference(self.spec, self.inputs, self.attributes)
        found = dict(zip(self.spec.outputs, values, strict=True))
        return {"residual_out" if name == "hidden" else name: value for name, value in found.items()}

    def changed(self, **attributes: float | int) -> "Operation":
        """The same with other attributes."""
        return replace(self, attributes={**self.attributes, **attributes})

    def given(self, **inputs: torch.Tensor | None) -> "Operation":
        """The same with other inputs; None leaves one out."""
        merged = {**self.inputs, **inputs}
        return replace(self, inputs={name: value for name, value in merged.items() if value is not None})


@dataclass(frozen=True)
class Cause:
    """What explains a wrong tail.

    Attributes:
        text: in words.
        left: the error that is left once it is put right, relative to the error there was; 0 explains all of it.
    """

    text: str
    left: float

    @property
    def complete(self) -> bool:
        """Whether nothing else is wrong."""
        return self.left < 0.01

    def line(self) -> str:
        """The cause for people."""
        share = "" if self.complete else f" (and {self.left:.0%} of the error is left)"
        return f"{self.text}{share}"


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers, NaN in the same places included."""
    return one.shape == other.shape and not bool(differing(one, other).any())


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape differ, as booleans; NaN is NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())


def distance(outputs: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """For each output that is wanted: the root mean square of the difference over that of what is wanted.

    inf where an output is missing, is of another size, or has NaN or infinities in other places.
    """
    found = {}
    for name, right in wanted.items():
        value = outputs.get(name)
        if value is None or value.numel() != right.numel():
            found[name] = math.inf
            continue
        value, right = value.reshape(-1).double(), right.reshape(-1).double()
        finite = torch.isfinite(right)
        if not torch.equal(finite, torch.isfinite(value)) or not equal(value[~finite], right[~finite]):
            found[name] = math.inf
            continue
        size = float(right[finite].square().mean().sqrt()) if finite.any() else 0.0
        error = float((value - right)[finite].square().mean().sqrt()) if finite.any() else 0.0
        found[name] = error / size if size else error
    return found


def explain(
    tail: Operation,
    wanted: Mapping[str, torch.Tensor],
    original: Operation | None,
    others: Mapping[str, Operation],
    named: Mapping[str, torch.Tensor],
) -> Cause | None:
    """Finds the one change that explains most.

    Args:
        tail: as the file has it.
        wanted: what its outputs should be, by name ("hidden" under the name residual_out).
        original: what mapping the original graph anew gives in its place; None where it gives no tail there.
        others: the other tails of the original graph, by name.
        named: values of the original graph that an input may have been mistaken for, by what they are.

    Returns:
        The cause, or None where nothing leaves less than half of the error.
    """
    before = _size(_outputs(tail), wanted)
    tried: list[Cause] = []
    for text, candidate in _hypotheses(tail, wanted, original, others, named):
        after = _size(_outputs(candidate), wanted)
        if math.isfinite(after):
            tried.append(Cause(text, after / before if math.isfinite(before) else after))
    if not tried:
        return None
    best = min(cause.left for cause in tried)
    if best >= 0.5:
        return None
    # Hypotheses come the plainest first; several may leave nothing but roundings.
    return next(cause for cause in tried if cause.left <= max(4 * best, EXACT / min(before, 1.0), 1e-6))


def _outputs(operation: Operation | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if not isinstance(operation, Operation):
        return operation
    try:
        return operation.outputs()
    except MoetrtError:  # the change does not fit the other inputs: it explains nothing
        return {}


def _size(outputs: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    return max(distance(outputs, wanted).values(), default=math.inf)


Hypothesis = tuple[str, Operation | Mapping[str, torch.Tensor]]


def _hypotheses(
    tail: Operation,
    wanted: Mapping[str, torch.Tensor],
    original: Operation | None,
    others: Mapping[str, Operation],
    named: Mapping[str, torch.Tensor],
) -> Iterator[Hypothesis]:
    if original is not None:
        yield from _attributes_of(tail, original)
        yield from _inputs_of(tail, original, others, named)
    yield from _flags(tail)
    yield from _factors(tail, wanted)
    yield from _eps(tail, wanted)
    yield from _weights(tail)
    yield from _maps(tail)
    for name, other in others.items():
        if "gamma" in tail.inputs and "gamma" in other.inputs:
            yield f"gamma is not this tail's; that of '{name}' explains it", tail.given(gamma=other.inputs["gamma"])
    outputs = _outputs(tail)
    if len(outputs) == 2:
        exchanged = {"norm_out": outputs["residual_out"], "residual_out": outputs["norm_out"]}
        yield "norm_out and residual_out are exchanged", exchanged
    if original is not None:
        yield _all_differences(tail, original, others, named), original


def _flags(tail: Operation) -> Iterator[Hypothesis]:
    for name in ("apply_expert_weights", "weight_bias"):
        if name in tail.attributes:
            was = tail.attributes[name]
            other = 1 - int(was)
            yield f"{name} was {was:g}; {other} explains it", tail.changed(**{name: other})


def _factors(tail: Operation, wanted: Mapping[str, torch.Tensor]) -> Iterator[Hypothesis]:
    """Least squares of the hidden state that is wanted on the terms of the tail's own sum."""
    hidden = wanted.get("residual_out")
    terms = _terms(tail)
    if hidden is None or not terms:
        return
    right = hidden.reshape(-1)
    columns = torch.stack([term.reshape(-1) for term in terms.values()], 1)
    finite = torch.isfinite(right) & torch.isfinite(columns).all(1)
    if int(finite.sum()) < columns.shape[1]:
        return
    solution = torch.linalg.lstsq(columns[finite], right[finite].unsqueeze(1), driver="gelsd").solution.squeeze(1)
    factors = dict(zip(terms, (float(x) for x in solution), strict=True))
    # What the tail's attributes multiply each term with.
    combine = float(tail.attributes["combine_scale"])
    routed = float(tail.attributes["routed_scaling_factor"])
    residual = float(tail.attributes.get("residual_scale", 1.0))
    if "ungated" in factors and abs(factors["ungated"] / combine - 1) < 1e-3 and abs(factors["shared"]) < 1e-3:
        yield "shared_gate is applied to shared_output and should not be", tail.given(shared_gate=None)
    scale = {
        "combine_scale": factors.get("shared", factors["routed"] / routed if routed else 0.0),
        "routed_scaling_factor": factors["routed"] / combine if combine else 0.0,
        "residual_scale": factors.get("residual", residual),
    }
    for name in _SCALES:
        if name in tail.attributes and math.isfinite(scale[name]):
            value = _plain(scale[name])
            text = f"{name} was {_number(tail.attributes[name])}; {_number(value)} explains it"
            yield text + _how(float(tail.attributes[name]), value), tail.changed(**{name: value})
    for name, term, expected in (("shared_output", "shared", combine), ("residual", "residual", residual)):
        if term in factors and expected:
            times = _plain(factors[term] / expected)
            if times and abs(times - 1) > 1e-6:
                text = f"{name} counts {_number(_plain(1 / times))} times; once explains it"
            elif not times:
                text = f"{name} is added and should not be"
            else:
                continue
            yield text, tail.given(**{name: tail.inputs[name] * times})


def _terms(tail: Operation) -> dict[str, torch.Tensor]:
    """The parts of the tail's sum before they are scaled, each ``[T*H]`` in float64."""
    plain = {"combine_scale": 1.0, "routed_scaling_factor": 1.0}
    without = dict.fromkeys(("residual", "shared_output", "shared_gate", "gamma"))
    hidden = _hidden_size(tail)
    names = {entry.name for entry in FINALIZE_ADD.attributes}
    kept = {name: value for name, value in tail.attributes.items() if name in names} | plain
    alone = Operation(FINALIZE_ADD, tail.inputs, kept).given(**without)
    outputs = _outputs(alone)
    if not outputs:
        return {}
    terms = {"routed": outputs["residual_out"][..., :hidden]}
    if "shared_output" in tail.inputs:
        shared = tail.inputs["shared_output"].flatten(0, -2)
        if "shared_gate" in tail.inputs:
            terms["shared"] = shared * torch.sigmoid(tail.inputs["shared_gate"])
            terms["ungated"] = shared
        else:
            terms["shared"] = shared
    if "residual" in tail.inputs:
        terms["residual"] = tail.inputs["residual"].flatten(0, -2)
    return terms


def _hidden_size(tail: Operation) -> int:
    names = ("gamma", "residual", "shared_output", "gemm2_permuted")
    return next(tail.inputs[name].shape[-1] for name in names if name in tail.inputs)


def _eps(tail: Operation, wanted: Mapping[str, torch.Tensor]) -> Iterator[Hypothesis]:
    """The eps with which the norm that is wanted follows from the hidden state that is wanted."""
    if tail.spec is not FINALIZE_ADD_RMS_NORM or not {"norm_out", "residual_out"} <= set(wanted):
        return
    gamma = tail.inputs["gamma"] + tail.attributes["weight_bias"]
    hidden = wanted["residual_out"].reshape(-1, len(gamma))
    norm = wanted["norm_out"].reshape(-1, len(gamma))
    unscaled = hidden * gamma
    inverse = (norm * unscaled).sum(-1) / unscaled.square().sum(-1)
    found = float((1 / inverse.square() - hidden.square().mean(-1)).nanmedian()) if len(hidden) else math.nan
    if math.isfinite(found) and found >= 0:
        value = float(f"{found:.3g}")
        yield f"eps was {tail.attributes['eps']:g}; {value:g} explains it", tail.changed(eps=value)


def _attributes_of(tail: Operation, original: Operation) -> Iterator[Hypothesis]:
    for name, was in tail.attributes.items():
        value = original.attributes.get(name, was)
        if value != was:
            text = f"{name} was {_number(was)}; {_number(value)} explains it"
            how = _how(float(was), float(value)) if name in _SCALES else ""
            yield text + how, tail.changed(**{name: value})


def _inputs_of(
    tail: Operation, original: Operation, others: Mapping[str, Operation], named: Mapping[str, torch.Tensor]
) -> Iterator[Hypothesis]:
    for entry in tail.spec.inputs:
        name = entry.name
        mine, right = tail.inputs.get(name), original.inputs.get(name)
        if right is None and mine is None:
            continue
        if mine is None:
            what = "the rows are taken in their order" if name == _MAP else "it is not added"
            if name == "shared_gate":
                what = "shared_output is added whole"
            gate = {"shared_gate": original.inputs.get("shared_gate")} if name == "shared_output" else {}
            yield f"{name} is missing: {what}", tail.given(**{name: right, **gate})
        elif right is None:
            changes: dict[str, torch.Tensor | None] = {name: None}
            if name == "shared_output":
                changes["shared_gate"] = None
            yield f"{name} is given, which the original graph has not", tail.given(**changes)
        elif not equal(mine, right):
            yield difference(name, mine, original, others, named), tail.given(**{name: right})


def difference(
    name: str,
    mine: torch.Tensor,
    original: Operation,
    others: Mapping[str, Operation],
    named: Mapping[str, torch.Tensor],
) -> str:
    """What one input of the file's tail is, seen from the original graph's, in words."""
    right = original.inputs[name]
    for other, operation in others.items():
        theirs = operation.inputs.get(name)
        if theirs is not None and equal(theirs, mine):
            return f"{name} is that of '{other}'"
    if mine.shape != right.shape:
        return f"{name} is {list(mine.shape)}; the original graph's is {list(right.shape)}"
    if name == _MAP:
        return _map_difference(mine, right)
    if text := rounded(name, mine, right):
        return text
    for text, value in named.items():
        if equal(value.reshape(-1).double(), mine.reshape(-1)):
            return f"{name} is {text}"
    share = float(differing(mine, right).double().mean())
    missing = mine.isnan() & right.isnan()
    moved = reordered(name, mine, right)
    if missing.any():
        # NaN in the same places, such as rows that no map names, say nothing of the others.
        mine, right = mine.masked_fill(missing, 0), right.masked_fill(missing, 0)
        original = original.given(**{name: right})
    if not mine.any():
        return f"{name} is all 0"
    factor = float((mine * right).sum() / right.square().sum())
    if _close(mine, factor * right):
        return f"{name} is {_number(_plain(factor))} times the original graph's"
    if name == "expert_weights":
        sums = right.sum(-1, keepdim=True)
        if _close(mine / mine.sum(-1, keepdim=True), right / sums):
            sums_to = f"a token's sum to {_range(mine)}, not {_range(right)}"
            return f"{name} are not normalised as the original graph's are: {sums_to}"
    if moved:
        return moved
    if name in _WIDE:
        text = _combination(name, mine, original)
        if text:
            return text
    return f"{name} has other values than the original graph's ({share:.0%} of them)"


def rounded(name: str, mine: torch.Tensor, right: torch.Tensor) -> str:
    """In words, that ``mine`` is ``right`` in fewer bits; empty where it is not. Both in float64."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if not equal(mine, right) and equal(right.to(dtype).double(), mine):
            return f"{name} is rounded to {str(dtype).removeprefix('torch.')}, which the original graph's is not"
    return ""


_UNITS = {
    "gemm2_permuted": ("rows", "hidden elements"),
    "expert_weights": ("tokens", "routes"),
    _MAP: ("tokens", "routes"),
}
"""What the first and the last dimension of an input count, where it is not tokens and hidden elements."""


def reordered(name: str, mine: torch.Tensor, right: torch.Tensor) -> str:
    """In words, that ``mine`` is ``right`` in another order of its rows or columns, or within each token or wholly.

    Empty where it is not; both are of one shape, and an infinity or NaN goes along with its row.
    """
    be = "are" if name == "expert_weights" else "is"
    units = _UNITS.get(name, ("tokens", "hidden elements"))
    one, other = (value.double().reshape(-1, value.shape[-1]) for value in (mine, right))
    if not one.numel():
        return ""
    for dim, unit in enumerate(units):
        text = _order(one.movedim(dim, 0), other.movedim(dim, 0))
        if text is not None:
            return f"{name} {be} the original graph's in another order of the {one.shape[dim]} {unit}{text}"
    if name in _UNITS and units[1] == "routes" and _same(one.sort(-1).values, other.sort(-1).values):
        return f"{name} {be} the original graph's in another order of the {one.shape[1]} routes, each token in its own"
    if _same(one.reshape(-1).sort().values, other.reshape(-1).sort().values):
        return f"{name} {be} the original graph's in another order of all its {one.numel()} elements"
    return ""


def _order(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """How the rows of ``one`` lie that are those of ``other``, both ``[N, M]``; None where they are not.

    Empty for an order that has no name.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(one.shape[1], 1, generator=generator, dtype=torch.float64) + 0.5
    # Equal rows have equal sums: sorted by these, the rows of the two lie side by side.
    sums = [(side.nan_to_num(0.0, 0.0, 0.0) @ direction).squeeze(1) for side in (one, other)]
    places = [torch.argsort(key, stable=True) for key in sums]
    order = torch.empty_like(places[0])
    order[places[0]] = places[1]
    if not _same(one, other[order]):
        return None
    if _same(one, other.flip(0)):
        return ", the reverse"
    # Told by the row of the largest sum: rows of zeros or NaN may be many.
    turned = int(places[1][-1] - places[0][-1]) % len(order)
    if _same(one, other.roll(-turned, 0)):
        return f", turned by {turned}"
    away = differing(one, other).any(1).nonzero().flatten().tolist()
    return f", {away[0]} and {away[1]} exchanged" if len(away) == 2 else ""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for roundings, with NaN and infinities in the same places."""
    finite = torch.isfinite(other)
    kept = torch.equal(finite, torch.isfinite(one)) and equal(one[~finite], other[~finite])
    return kept and (not finite.any() or _close(one[finite], other[finite]))


def _combination(name: str, mine: torch.Tensor, original: Operation) -> str:
    """``mine`` as a sum of the original graph's wide inputs, where it is one."""
    parts = {
        key: original.inputs[key]
        for key in _WIDE
        if key in original.inputs and original.inputs[key].numel() == mine.numel()
    }
    columns = torch.stack([part.reshape(-1) for part in parts.values()], 1)
    if columns.shape[0] < columns.shape[1]:
        return ""
    solution = torch.linalg.lstsq(columns, mine.reshape(-1, 1), driver="gelsd").solution
    if not _close(columns @ solution, mine.reshape(-1, 1)):
        return ""
    factors = {key: _plain(float(x)) for key, x in zip(parts, solution.squeeze(1), strict=True)}
    words = [key if factor == 1 else f"{_number(factor)} times {key}" for key, factor in factors.items() if factor]
    return f"{name} is {' plus '.join(words) or 'all 0'} of the original graph"


def _map_difference(mine: torch.Tensor, right: torch.Tensor) -> str:
    other = mine != right
    count, total = int(other.sum()), mine.numel()
    absent = right == -1
    if bool((other <= absent).all()) and len(mine[other].unique()) == 1:
        row = int(mine[other][0])
        return (
            f"{_MAP} names row {row} in {count} of {total} entries where the original graph's is -1 (on another rank)"
        )
    if bool((other <= (mine == -1)).all()):
        return f"{_MAP} is -1 in {count} of {total} entries where the original graph names a row"
    steps = (mine - right)[~absent].unique()
    if len(steps) == 1:
        return f"{_MAP} is the original graph's {int(steps[0]):+d}"
    if text := reordered(_MAP, mine, right):
        return text
    where = tuple(int(i) for i in other.nonzero()[0])
    return (
        f"{_MAP} differs in {count} of {total} entries, first {list(where)}: {int(mine[where])}, "
        f"the original graph's is {int(right[where])}"
    )


def _weights(tail: Operation) -> Iterator[Hypothesis]:
    weights = tail.inputs["expert_weights"]
    sums = weights.sum(-1, keepdim=True)
    if not _close(sums, torch.ones_like(sums)):
        text = "expert_weights are not normalised; weights whose sum is 1 for each token explain it"
        yield text, tail.given(expert_weights=weights / sums)
    top_k = weights.shape[1]
    for step in {1, top_k - 1} - {0, top_k}:
        text = f"expert_weights are in another order of the {top_k} routes"
        yield text, tail.given(expert_weights=weights.roll(step, -1))
    if top_k > 1:
        yield f"expert_weights are in another order of the {top_k} routes", tail.given(expert_weights=weights.flip(-1))


def _maps(tail: Operation) -> Iterator[Hypothesis]:
    index = tail.inputs.get(_MAP)
    if index is None:
        return
    for step in (1, -1):
        moved = torch.where(index == -1, index, index - step).to(torch.int32)
        yield f"{_MAP} is {step:+d} too far", tail.given(**{_MAP: moved})
    if tail.inputs["gemm2_permuted"].shape[0] == index.numel():
        yield f"{_MAP} is given; rows in their order explain it", tail.given(**{_MAP: None})


def _all_differences(
    tail: Operation, original: Operation, others: Mapping[str, Operation], named: Mapping[str, torch.Tensor]
) -> str:
    """Several things at once, each named."""
    parts = [text for text, _ in (*_attributes_of(tail, original), *_inputs_of(tail, original, others, named))]
    if tail.spec is not original.spec:
        parts.insert(0, f"the tail is a {tail.spec.name} in place of a {original.spec.name}")
    return "several at once: " + "; ".join(parts)


def _plain(value: float) -> float:
    """``value`` without the noise of least squares: the shortest number within 1e-6 of it."""
    if abs(value) < 1e-6:
        return 0.0
    short = (float(f"{value:.{digits}g}") for digits in range(1, 7))
    return next((number for number in short if abs(number - value) < 1e-6 * abs(value)), value)


def _number(value: float | int) -> str:
    """The shortest spelling of the float32 number that ``value`` is, else nine digits."""
    single = np.float32(value)
    return f"{single:g}" if float(f"{single:g}") == value else str(single) if float(single) == value else f"{value:.9g}"


def _how(was: float, value: float) -> str:
    """Well-known ways to get from the right factor to the wrong one."""
    if value in (0.0, 1.0):
        return ""
    if math.isclose(was, value * value, rel_tol=1e-6):
        return " (it is applied twice)"
    if was == 1:
        return " (it is left out)"
    if math.isclose(was, 2 * value, rel_tol=1e-6):
        return " (it is doubled)"
    return ""


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for roundings in the rows' precision of the values they were computed from."""
    size = float(b.square().mean().sqrt())
    return float((a - b).abs().max()) <= 2.0**-18 * size if a.numel() and math.isfinite(size) else False


def _range(weights: torch.Tensor) -> str:
    sums = weights.sum(-1)
    low, high = float(sums.min()), float(sums.max())
    return f"{low:.3g}" if math.isclose(low, high, rel_tol=1e-4) else f"{low:.3g} to {high:.3g}"
