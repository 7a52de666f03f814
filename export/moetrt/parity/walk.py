"""The tails of a mapped file in their order, each against the graph before mapping on the same values.

The graph before mapping is run once, in float32; its values at the tails' inputs and outputs are given to both graphs.
So each tail is judged by itself: what is wrong before it is put right, and nothing that is wrong is blamed on a later
one. What a tail should give is then computed by the original graph's own nodes, one operator after the other: in
float64, where only what the tail means can differ, and in the model's dtype, where its roundings can.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from moetrt.capture import MODEL_FILE, capture
from moetrt.errors import InputError, MoetrtError
from moetrt.files import Named
from moetrt.inlining import inline_functions, normalise_domains
from moetrt.mapping import map_model
from moetrt.onnx_files import data_files, load_model
from moetrt.parity.between import alike, first_difference
from moetrt.parity.diagnosis import EXACT, Cause, Operation, differing, distance, explain, rounded
from moetrt.parity.runners import OrtRunner, session_of, side_by_side
from moetrt.parity.tails import Tail, outputs_of, tails_of, through_reshapes
from moetrt.parity.twins import (
    TORCH_DTYPES,
    computed,
    evaluate,
    expose,
    float32_twin,
    frontier,
    half_dtype,
)
from moetrt.parity.verdict import Errors, errors_of, number
from moetrt.reference import reference
from moetrt.shapes import fill_in_types
from moetrt.source import Source
from moetrt.spec import FINALIZE_ADD_RMS_NORM

WIRING = 1e-4
"""How far the float32 value that a tail reads may be from the original graph's: both graphs compute it from the same
values by the same operators, so all but a choice that hangs on a rounding agrees to about 1e-6."""

_FORM_SHARE = 0.05
"""A norm of the right form differs from the graph's own in the last place of few elements: where float32 sums that were
added in another order lie on the two sides of a rounding, in 16 bits about one of 2^9 to 2^12."""


@dataclass(frozen=True)
class TailVerdict:
    """One tail against the graph before mapping.

    Attributes:
        index, name, operator: which.
        error: for each output, the root mean square of its difference in float64 over that of what it should be.
        unfused: for each output, the errors of the original graph's own operators in the model's dtype.
        passed: whether every error is below `moetrt.parity.diagnosis.EXACT`, and the roundings are the original's.
        cause: what explains a failure best; empty where it passed or nothing explains it.
        left: the share of the error that the cause leaves.
    """

    index: int
    name: str
    operator: str
    error: Mapping[str, float]
    unfused: Mapping[str, Errors]
    passed: bool
    cause: str = ""
    left: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
        return {
            "index": self.index,
            "name": self.name,
            "operator": self.operator,
            "passed": self.passed,
            "error": {name: number(error) for name, error in self.error.items()},
            "unfused": {
                name: {"worst": number(errors.worst), "rms": number(errors.rms)}
                for name, errors in self.unfused.items()
            },
            "tolerance": EXACT,
            "cause": self.cause or None,
            "error_left": number(self.left) if self.cause else None,
        }

    def line(self) -> str:
        """The verdict for people."""
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.error.items())
        if self.passed:
            return f"ok: {self.name} is the tail it replaced: {errors} in float64"
        return f"DIFFERS: {self.name} is not the tail it replaced ({errors} in float64): {self.why}"

    @property
    def why(self) -> str:
        """The cause, or that there is none."""
        return self.cause or "no single change of an input or attribute explains it"


@dataclass
class Original:
    """The graph before mapping.

    Attributes:
        model: the graph.
        where: where it is from, in words.
        named: whether the user named its file.
        values: its values by name, in its dtypes, once `Walk.take` has filled them in.
        single: the same as they were computed, in float32 where the graph has 16 bits.
    """

    model: ir.Model
    where: str
    named: bool = False
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    single: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def again(self) -> ir.Model:
        """What mapping the graph gives now."""
        mapped = self.model.clone()
        map_model(mapped)
        return mapped


def files_before_mapping(path: Path, given: Path | None) -> list[Named]:
    """The files that `find_original` reads, for `moetrt.files.check_distinct`.

    Raises:
        InputError: the file that is given cannot be read.
    """
    place = given or path.with_name(MODEL_FILE)
    if given is None and not place.is_file():
        return []
    try:
        data = data_files(load_model(place))
    except MoetrtError:
        if given is not None:
            raise
        data = []
    what = "file before mapping"
    return [(what, place), *((f"data file of the {what}", file) for file in data)]


def find_original(path: Path, mapped: ir.Model, given: Path | None) -> tuple[Original | None, str]:
    """The file before mapping: the one that is given, else the exporter's beside the mapped file if it is that.

    The inputs and outputs of the two, and the names of what the tails give, tell whether it is. A mapped file that was
    edited afterwards is known by its tails' other names, as long as each tail keeps some.

    Returns:
        The graph, or None and why the file that lies beside is not taken; empty where there is none.

    Raises:
        InputError: the file that is given cannot be read, or is not the one that was mapped.
    """
    if given is not None and given.samefile(path):
        raise InputError(f"'{given}' is the mapped file itself; the file that it was mapped from is taken")
    place = given or path.with_name(MODEL_FILE)
    if given is None and (not place.is_file() or place.samefile(path)):
        return None, ""
    try:
        model = load_model(place)
        # As the mapper does: a tail in a function is known by the names that its values get where it is called.
        normalise_domains(model)
        inline_functions(model)
        fill_in_types(model)
        original = Original(model, f"'{place}'" if given else f"'{place.name}' beside it", named=given is not None)
        why = _not_original(mapped, original)
    except MoetrtError as error:
        if given is not None:
            raise
        return None, f"'{place.name}' beside it was left out: {error}"
    if not why:
        return original, ""
    if given is not None:
        raise InputError(f"'{place}' is not the file that '{path}' was mapped from: {why}")
    return None, f"'{place.name}' beside it is not the file that '{path.name}' was mapped from: {why}"


def capture_original(source: Source, mapped: ir.Model, say: Callable[[str], None]) -> tuple[Original | None, str]:
    """Exports the source anew, in memory; or None and why its graph is not the one that was mapped.

    The names of values are what ties the two graphs together; an export with other options has others.
    """
    opset = mapped.graph.opset_imports[""]
    why = ""
    # Only Transformers models have several forms; which one a file has, it does not say.
    for experts in ("gathered", "dense"):
        try:
            model = capture(source, opset=opset, experts=experts, progress=say)
        except MoetrtError as error:
            return None, str(error)
        original = Original(model, f"an export of {source.description} made now")
        why = _not_original(mapped, original)
        if not why:
            return original, ""
        if experts == "gathered" and not _has_experts(source):
            break
    return None, f"exported anew, {source.description} is not the graph that was mapped: {why}"


def _has_experts(source: Source) -> bool:
    from moetrt.experts import experts_modules

    return bool(experts_modules(source.module))


def _not_original(mapped: ir.Model, original: Original) -> str:
    """Why a graph is not the one that was mapped; empty where it is."""
    initializers = original.model.graph.initializers
    for what, mine, theirs in (
        ("inputs", mapped.graph.inputs, original.model.graph.inputs),
        ("outputs", mapped.graph.outputs, original.model.graph.outputs),
    ):
        names = [value.name or "" for value in theirs if value.name not in initializers]
        if set(names) != {value.name for value in mine if value.name not in mapped.graph.initializers}:
            return f"its {what} are {', '.join(names)}"
    tails = tails_of(mapped)
    for tail, found in zip(tails, _ties(mapped, tails, original), strict=True):
        lost = [
            f"'{value.name}', {name} of '{tail.name}',"
            for value, name in zip(tail.node.outputs, tail.spec.outputs, strict=True)
            if name not in found
        ]
        if lost:
            return f"{lost[0]} is no value of it, and no tail of it stands in that one's place"
    return ""


def _ties(mapped: ir.Model, tails: list[Tail], original: Original) -> list[dict[str, str]]:
    """The names under which the graph before mapping has each tail's outputs; without those that are not found.

    Where a mapped file was edited, a tail's output may have a name of its own, and another node the name that it had.
    Such a tail is one that mapping the original graph gives now: that which has its other output, else its inputs.
    """
    known = computed(original.model)
    found = [outputs_of(tail, known) for tail in tails]
    whole = all(set(names) == set(tail.spec.outputs) for tail, names in zip(tails, found, strict=True))
    if whole or not alike(mapped, original.again):
        return found
    others = [(other, outputs_of(other, known)) for other in tails_of(original.again)]
    for tail, names in zip(tails, found, strict=True):
        if set(names) != set(tail.spec.outputs):
            taken = {name for outputs in found if outputs is not names for name in outputs.values()}
            free = [(o, outputs) for o, outputs in others if o.spec is tail.spec and not taken & set(outputs.values())]
            names |= next(
                (outputs for _, outputs in free if names.items() & outputs.items()), _of_same_inputs(tail, free)
            )
    return found


def _of_same_inputs(tail: Tail, others: list[tuple[Tail, dict[str, str]]]) -> dict[str, str]:
    """The outputs of the one tail that reads most of what ``tail`` reads; empty where none reads half of it."""
    mine = tail.input_names().items()
    shared = [len(mine & other.input_names().items()) for other, _ in others]
    most = max(shared, default=0)
    return others[shared.index(most)][1] if 2 * most >= len(mine) and shared.count(most) == 1 else {}


class Walk:
    """The tails of a file beside the graph before mapping."""

    def __init__(self, mapped: ir.Model, original: Original) -> None:
        """Finds which values tie the two graphs together.

        Args:
            mapped: the file's graph; not changed.
            original: the graph before mapping; its values are filled in by `take`.
        """
        self.mapped, self.original = mapped, original
        self.half = half_dtype(mapped)
        self.tails = tails_of(mapped)
        known = computed(original.model)
        self.outputs = _ties(mapped, self.tails, original)
        self.carriers = {
            name: _carrier(tail.node.outputs[tail.spec.outputs.index(output)], known[name])
            for tail, names in zip(self.tails, self.outputs, strict=True)
            for output, name in names.items()
        }
        # What mapping that graph gives now: where hypotheses come from.
        self.again = original.again
        again = tails_of(self.again)
        self.counterparts = [
            next((other for other in again if set(outputs_of(other, known).values()) & set(names.values())), None)
            for names in self.outputs
        ]
        self.names = {name for names in self.outputs for name in names.values()}
        self.names |= {value.name for value in original.model.graph.outputs if value.name in known}
        for model, tails in ((mapped, self.tails), (self.again, again)):
            inputs = [value for tail in tails for value in tail.inputs.values()]
            self.names |= frontier(model, inputs, known)

    def take(self, feed: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Takes the values of the original graph's run, rounded to the dtypes that the graph has.

        Args:
            feed: the model's inputs, in the model's dtypes.
            values: at least those of `names`, by name.
        """
        dtypes = {name: value.dtype for name, value in computed(self.original.model).items()}
        for name in self.names:
            dtype = TORCH_DTYPES.get(dtypes[name] or ir.DataType.UNDEFINED)
            self.original.values[name] = values[name] if dtype is None else values[name].to(dtype)
        self.original.values.update(feed)
        self.original.single = {name: values[name] for name in self.names}

    def operands(self, tail: Tail) -> dict[str, torch.Tensor]:
        """A tail's inputs by the operator's names, in their dtypes, computed by the file from the original's values.

        Raises:
            InputError: onnx's evaluator does not compute them.
        """
        return _inputs_of(self.mapped, tail, self._given, None)

    @property
    def _given(self) -> dict[str, torch.Tensor]:
        """The original graph's values under the names that the file has them by."""
        values = self.original.values
        return values | {mine: values[name] for name, mine in self.carriers.items()}

    def unfused(self, tail: Tail) -> dict[str, torch.Tensor]:
        """What the original graph's own operators give for a tail's outputs, in the model's dtype."""
        return self._wanted(tail, None)

    def gold(self, tail: Tail) -> dict[str, torch.Tensor]:
        """The same in float64."""
        return self._wanted(tail, self._wider)

    @property
    def _wider(self) -> dict[ir.DataType, ir.DataType]:
        """What float64 stands for: the dtypes that the model computes in, not one that a fault has brought in."""
        kinds = [ir.DataType.FLOAT] if self.half is None else [ir.DataType.FLOAT, self.half]
        return dict.fromkeys(kinds, ir.DataType.DOUBLE)

    def _wanted(self, tail: Tail, wider: Mapping[ir.DataType, ir.DataType] | None) -> dict[str, torch.Tensor]:
        names = self.outputs[tail.index]
        known = {name: value for name, value in self.original.values.items() if name not in names.values()}
        values = evaluate(self.original.model, names.values(), _as(known, wider), wider=wider)
        return {_common(output): values[name] for output, name in names.items()}

    def judge(self, tail: Tail, *, thorough: bool = True) -> TailVerdict:
        """The verdict over one tail.

        Args:
            tail: one of `tails`.
            thorough: of a tail that is off, whether the other tails are looked at for an explanation: it takes time for
                each of them.

        Raises:
            InputError: onnx's evaluator does not compute what is needed.
        """
        gold, unfused = self.gold(tail), self.unfused(tail)
        operation = Operation(tail.spec, _inputs_of(self.mapped, tail, self._given, self._wider), tail.attributes)
        error = distance(operation.outputs(), gold)
        verdict = TailVerdict(
            index=tail.index,
            name=tail.name,
            operator=tail.spec.name,
            error=error,
            unfused={name: errors_of(unfused[name], gold[name], "unfused") for name in gold},
            passed=all(value <= EXACT for value in error.values()),
        )
        if not verdict.passed:
            return self._failed(verdict, self._cause(tail, operation, gold, thorough))
        cause = self._rounding(tail, unfused)
        return self._failed(verdict, cause) if cause is not None else verdict

    def _failed(self, verdict: TailVerdict, cause: Cause | None) -> TailVerdict:
        if cause is None:
            return replace(verdict, passed=False)
        return replace(verdict, passed=False, cause=cause.line(), left=cause.left)

    def _cause(
        self, tail: Tail, operation: Operation, gold: Mapping[str, torch.Tensor], thorough: bool
    ) -> Cause | None:
        for other in self.tails if thorough else ():
            # Before anything about this tail itself: another's outputs explain them wholly.
            if other is not tail and max(distance(operation.outputs(), self.gold(other)).values()) <= EXACT:
                return Cause(f"it gives the outputs of '{other.name}': the two are exchanged", 0.0)
        return explain(
            operation, gold, self._counterpart(tail), self._others(tail) if thorough else {}, self._tail_outputs()
        )

    def _tail_outputs(self) -> dict[str, torch.Tensor]:
        return {
            f"{output} of '{tail.name}'": self.original.values[name].double()
            for tail in self.tails
            for output, name in self.outputs[tail.index].items()
        }

    def _counterpart(self, tail: Tail) -> Operation | None:
        other = self.counterparts[tail.index]
        return None if other is None else self._operation(other)

    def _operation(self, tail: Tail) -> Operation:
        inputs = _inputs_of(self.again, tail, self.original.values, self._wider)
        return Operation(tail.spec, inputs, tail.attributes)

    def _others(self, tail: Tail) -> dict[str, Operation]:
        return {
            other.name: self._operation(counterpart)
            for other, counterpart in zip(self.tails, self.counterparts, strict=True)
            if other is not tail and counterpart is not None
        }

    def _rounding(self, tail: Tail, unfused: Mapping[str, torch.Tensor]) -> Cause | None:
        """What float64 cannot show: an input of fewer bits, and the order of the norm's last two steps."""
        if self.half is None:
            return None
        counterpart = self.counterparts[tail.index]
        if counterpart is not None:
            mine, right = self.operands(tail), _inputs_of(self.again, counterpart, self.original.values, None)
            for name, tensor in mine.items():
                if name in right and (text := rounded(name, _double(tensor), _double(right[name]))):
                    return Cause(text, 0.0)
        return self._norm_form(tail, unfused)

    def _norm_form(self, tail: Tail, unfused: Mapping[str, torch.Tensor]) -> Cause | None:
        if tail.spec is not FINALIZE_ADD_RMS_NORM:
            return None
        gamma = self.operands(tail)["gamma"]
        hidden, norm = unfused["residual_out"].reshape(-1, len(gamma)), unfused["norm_out"].reshape(-1, len(gamma))
        empty = hidden.new_zeros(len(hidden), len(gamma))
        inputs = {
            "gemm2_permuted": empty,
            "expert_weights": torch.zeros(len(hidden), 1),
            "residual": hidden,
            "gamma": gamma,
        }
        form = {name: tail.attributes[name] for name in ("eps", "weight_bias", "weight_before_cast")}

        def off(before_cast: int) -> float:
            given = reference(FINALIZE_ADD_RMS_NORM, inputs, {**form, "weight_before_cast": before_cast})[0]
            return float(differing(given, norm).double().mean())

        was = int(form["weight_before_cast"])
        mine, other = off(was), off(1 - was)
        if mine > _FORM_SHARE and other < mine / 4:
            return Cause(
                f"weight_before_cast was {was}; {1 - was} explains it: on the same hidden state the norm rounds "
                f"{mine:.0%} of the elements otherwise than the original graph, with {1 - was} {other:.1%}",
                0.0,
            )
        return None

    def wiring(self, feed: Mapping[str, torch.Tensor]) -> str:
        """Where every tail is right, the first value between tails that is not; empty where there is none.

        The file runs with the original's values in place of its tails' outputs, in float32.
        """
        off = self._first_off(feed, {})
        if off is None:
            return ""
        for earlier in reversed(self.tails[: off.tail.index if off.tail is not None else len(self.tails)]):
            names = list(self.outputs[earlier.index].values())
            exchanged = dict(zip(names, reversed(names), strict=True))
            after = self._first_off(feed, exchanged) if len(names) == 2 else off
            if after is None or after.place > off.place:
                return f"{off.text} is off: it reads the two outputs of '{earlier.name}' the other way round"
        between = first_difference(self.mapped, self.again, off.value)
        between = between or "what lies between them is not the original graph"
        return f"{off.text} is off, though every tail before it is right: {between}"

    def _first_off(self, feed: Mapping[str, torch.Tensor], exchanged: Mapping[str, str]) -> "_Point | None":
        values = self.original.single
        points: list[tuple[ir.Value, str, Tail | None]] = [
            (value, f"'{value.name}', {name} of '{tail.name}',", tail)
            for tail in self.tails
            for name, value in tail.inputs.items()
            if value.name in values and value.name not in feed and value.name in computed(self.mapped)
        ]
        points += [
            (value, f"output '{value.name}'", None) for value in self.mapped.graph.outputs if value.name in values
        ]
        twin = float32_twin(self.mapped.clone())
        cuts = set(self.carriers.values())
        renamed = cut(twin, {mine: values[name].dim() for name, mine in self.carriers.items()})
        expose(twin, {value.name or "" for value, _, _ in points})
        given = {name: _single(value) for name, value in feed.items()}
        given |= {mine: values[exchanged.get(name, name)] for name, mine in self.carriers.items()}
        with tempfile.TemporaryDirectory(prefix="moetrt-walk-") as folder:
            session = session_of(twin, Path(folder) / "cut.onnx", "the mapped file with its tails' outputs given")
            result = side_by_side([OrtRunner(session, name="cut")], given)["cut"]
        for place, (value, text, tail) in enumerate(points):
            name = value.name or ""
            if name in cuts:
                continue
            computes = result.get(renamed.get(name, name))
            if computes is not None and distance({name: computes}, {name: values[name]})[name] > WIRING:
                return _Point(place, value, text, tail)
        return None


@dataclass(frozen=True)
class _Point:
    """A value of the mapped graph that can be held against the original's: its place, and of which tail it is."""

    place: int
    value: ir.Value
    text: str
    tail: Tail | None


def _carrier(output: ir.Value, original: ir.Value) -> str:
    """The name of what a tail gives in the mapped graph, in the shape that the original graph has it."""
    values = list(through_reshapes(output))
    named = [value for value in values if value.name == original.name]
    alike = [v for v in values if v.shape is not None and original.shape is not None and v.shape == original.shape]
    return (named or alike or values)[0].name or ""


def cut(model: ir.Model, ranks: Mapping[str, int]) -> dict[str, str]:
    """Makes inner values of a graph inputs of it, in place; who computed them before does so under another name.

    Args:
        model: the graph.
        ranks: the values' names, and how many dimensions each has.

    Returns:
        The other names.
    """
    values, renamed = computed(model), {}
    for name, rank in ranks.items():
        value = values.get(name)
        if value is None:
            continue
        shape = ir.Shape([f"{name}_{dim}" for dim in range(rank)])
        given = ir.Value(name=name, type=value.type, shape=shape)
        for use in tuple(value.uses()):
            use.node.replace_input_with(use.idx, given)
        renamed[name] = value.name = f"{name}/computed"
        model.graph.inputs.append(given)
    return renamed


def _inputs_of(
    model: ir.Model,
    tail: Tail,
    known: Mapping[str, torch.Tensor],
    wider: Mapping[ir.DataType, ir.DataType] | None,
) -> dict[str, torch.Tensor]:
    names = tail.input_names()
    values = evaluate(model, names.values(), _as(known, wider), wider=wider)
    if wider is None:
        return {name: values[value] for name, value in names.items()}
    return {name: _double(values[value]) for name, value in names.items()}


def _as(
    known: Mapping[str, torch.Tensor], wider: Mapping[ir.DataType, ir.DataType] | None
) -> Mapping[str, torch.Tensor]:
    if not wider:
        return known
    wide = {TORCH_DTYPES[dtype] for dtype in wider}
    return {name: value.double() if value.dtype in wide else value for name, value in known.items()}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _common(output: str) -> str:
    return "residual_out" if output == "hidden" else output
