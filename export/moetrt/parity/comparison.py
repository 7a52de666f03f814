"""ONNX Runtime, the kernel or an engine against PyTorch: the error of each is measured against a float64 run."""

import copy
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch

from moetrt.backends import Progress, choose
from moetrt.bounds import check_shapes
from moetrt.capture import weights_of
from moetrt.errors import InputError, InputTypeError, MoetrtError
from moetrt.files import existing_file, file_sha256, write_atomically
from moetrt.library import KernelLibrary, find_plugin_library, load_host_library
from moetrt.onnx_files import load_model
from moetrt.parity.choices import Choosing, Tie, choosers, find_ties, fits, made_by, ties_as_list, told
from moetrt.parity.finite import first_not_finite
from moetrt.parity.lengths import LengthParity, other_lengths
from moetrt.parity.replay import draw_inputs, load_inputs
from moetrt.parity.runners import OrtRunner, Results, TorchRunner, at_each, session_of, side_by_side, tensorrt_runner
from moetrt.parity.tails import operands_from, run_tail, tails_of
from moetrt.parity.twins import FLOATS, TORCH_DTYPES, expose, float32_twin, half_dtype
from moetrt.parity.verdict import (
    GOLD,
    KERNEL,
    NATIVE,
    ORT,
    PYTORCH,
    TENSORRT,
    UNMAPPED,
    OutputParity,
    errors_of,
    judge,
    step_of,
)
from moetrt.parity.walk import Original, TailVerdict, Walk, capture_original, find_original
from moetrt.parity.weights import other_weights
from moetrt.provenance import command, versions
from moetrt.shapes import fill_in_types
from moetrt.source import DTYPES, Source, check_source

FORMAT = "moetrt.parity/1"
"""What `ParityReport.as_dict` says it is."""

_DECIDED = "; at other sizes the file is right: the export may have decided a Python branch or loop on a length"

_PACKAGES = ("torch", "transformers", "onnx", "onnxruntime", "polygraphy")


@dataclass(frozen=True)
class ParityReport:
    """What `compare` found.

    Attributes:
        onnx_path: the file that was run.
        sha256: of that file, when it was read.
        source: the PyTorch model in a few words.
        seed: of the inputs; None where they were given.
        inputs: name -> shape of the inputs.
        how: what was run, in one line.
        outputs: one for each output and runner; tails that were compared by themselves follow.
        tails: each tail against the graph before mapping, in order; empty where there was none to hold them against.
        lengths: what was found at other lengths, end to end.
        ties: choices that rounding decides, which PyTorch was given as ONNX Runtime made them.
        cause: for a model that differs, the first thing that is off and what explains it; empty where nothing is known.
        notes: what was not run and why, and where the graph before mapping is from.
        backends: which TensorRT ran the engines, and its version.
    """

    onnx_path: Path
    sha256: str
    source: str
    seed: int | None
    inputs: dict[str, tuple[int, ...]]
    how: str
    outputs: tuple[OutputParity, ...]
    tails: tuple[TailVerdict, ...] = ()
    lengths: tuple[LengthParity, ...] = ()
    ties: tuple[Tie, ...] = ()
    cause: str = ""
    notes: tuple[str, ...] = ()
    backends: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every output, tail and length passed; a report without outputs does not."""
        return bool(self.outputs) and _all_passed((*self.outputs, *self.tails, *self.lengths))

    @property
    def undecided(self) -> bool:
        """Whether it did not pass only because PyTorch itself gives nothing that could be compared."""
        return any(output.undecided for output in self.outputs) and not self._differs

    @property
    def _differs(self) -> bool:
        return any(map(_off, self.outputs)) or not _all_passed((*self.tails, *self.lengths))

    @property
    def worst(self) -> OutputParity:
        """The output that says most: one that differs if there is one, else the one nearest to its tolerance."""
        return max(
            self.outputs,
            key=lambda o: (_off(o), not o.passed, o.worst / o.worst_tolerance if o.worst_tolerance else 0.0),
        )

    @property
    def verdict(self) -> str:
        """The whole report in one line: of a failure, what it is and what explains it."""
        if self.cause:
            return self.cause
        tail = next((tail for tail in self.tails if not tail.passed), None)
        if tail is not None and self.worst.passed:
            return tail.line()
        length = next((length for length in self.lengths if not length.passed), None)
        if length is not None and self.worst.passed:
            return length.lines()[0]
        return self.worst.headline()

    @property
    def gaps(self) -> tuple[str, ...]:
        """The outputs and lengths that passed though not all of them was measured, one line each."""
        found = {output.name: output.gap for output in self.outputs if output.gap and not output.tail}
        # What is no number here is none at other lengths either: those say it in their own lines.
        found |= {f"at {length.where}": length.gap for length in self.lengths if length.gap and not found}
        return tuple(f"{name}: {gap}" for name, gap in found.items())

    @property
    def result(self) -> str:
        """How it came out, in a few words."""
        if not self.passed:
            return "UNDECIDED" if self.undecided else "DIFFERS"
        tied = [*self.ties, *(tie for length in self.lengths for tie in length.ties)]
        ties = f"; with ONNX Runtime's choice at {len(tied)} tie{'s' if len(tied) > 1 else ''}" if tied else ""
        return f"within tolerance{ties}" + "".join(f"; NOT MEASURED of {gap}" for gap in self.gaps)

    def lines(self) -> list[str]:
        """The report for people: every output of the model, a line for each tail, and all figures of what differs."""
        sizes = ", ".join(f"{name} [{'x'.join(map(str, shape))}]" for name, shape in self.inputs.items())
        drawn = "inputs as given" if self.seed is None else f"inputs from seed {self.seed}"
        found = [self.how, f"{drawn}: {sizes}"]
        found.append("errors are differences from a float64 run over the output's root mean square")
        if self.cause:
            found.append(f"{'UNDECIDED' if self.undecided else 'cause'}: {self.cause}")
        if self.undecided and all(output.undecided for output in self.outputs if not output.tail):
            # Of a tail or output there is nothing more to say.
            return found + [f"note: {note}" for note in self.notes]
        for output in self.outputs:
            short = output.passed and (output.tail or output.runner == UNMAPPED)
            found += output.lines() if not short else [] if output.tail else [output.headline()]
        by_name = {tail.name: tail for tail in self.tails}
        for name, outputs in self._by_tail().items():
            found.append(_tail_line(name, outputs, by_name.get(name)))
        found += [tail.line() for tail in self.tails if not tail.passed]
        found += [line for length in self.lengths for line in length.lines()]
        return found + [f"note: {note}" for note in self.notes]

    def _by_tail(self) -> dict[str, list[OutputParity]]:
        found: dict[str, list[OutputParity]] = {}
        for output in self.outputs:
            if output.tail:
                found.setdefault(output.tail, []).append(output)
        return found

    def as_dict(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The report for JSON.

        Args:
            folder: where it is written: the model's path is relative to it; to the current folder where None.
        """
        return {
            "format": FORMAT,
            "command": command(),
            "versions": versions(*_PACKAGES) | dict(self.backends),
            "model": {"file": os.path.relpath(self.onnx_path, folder), "sha256": self.sha256},
            "source": self.source,
            "seed": self.seed,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "how": self.how,
            "passed": self.passed,
            "undecided": self.undecided,
            "cause": self.cause or None,
            "outputs": [output.as_dict() for output in self.outputs],
            "tails": [tail.as_dict() for tail in self.tails],
            "lengths": [length.as_dict() for length in self.lengths],
            "ties": ties_as_list(self.ties),
            "notes": list(self.notes),
        }

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report to ``path``.

        Raises:
            InputError: the folder cannot be written.
        """
        target = Path(path)
        text = json.dumps(self.as_dict(target.parent), indent=2, allow_nan=False)
        with write_atomically(target) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        return target


def _all_passed(verdicts: Iterable[OutputParity | TailVerdict | LengthParity]) -> bool:
    return all(verdict.passed for verdict in verdicts)


def _off(output: OutputParity) -> bool:
    """Whether an output differs: one of which nothing can be compared does not."""
    return not output.passed and not output.undecided


def _tail_line(name: str, outputs: Sequence[OutputParity], tail: TailVerdict | None) -> str:
    """What was measured of one tail by itself, in one line."""
    parts = []
    for runner in dict.fromkeys(output.runner for output in outputs):
        worst = max((output for output in outputs if output.runner == runner), key=lambda o: o.rms)
        parts.append(f"{runner} {worst.rms:.1e}")
    first = max(outputs, key=lambda o: o.rms)
    parts.append(f"pytorch {first.pytorch_rms:.1e}")
    if first.unfused is not None:
        parts.append(f"unfused {first.unfused.rms:.1e}")
    if tail is not None:
        parts.append(f"from the tail it replaced {max(tail.error.values()):.1e}")
    if any(output.undecided for output in outputs) and not any(map(_off, outputs)):
        return f"UNDECIDED: {name} by itself in {first.dtype}: {first.reason}"
    gap = next((output for output in outputs if output.gap), None)
    if gap is not None:
        parts.append(f"of {gap.name.rpartition('.')[2]} {gap.gap}")
    verdict = "ok" if all(output.passed for output in outputs) and (tail is None or tail.passed) else "DIFFERS"
    return f"{verdict}: {name} by itself in {first.dtype}, rms error against float64: {', '.join(parts)}"


def compare(
    onnx_path: str | os.PathLike[str],
    source: Source,
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    lengths: Sequence[Mapping[str, int]] | None = None,
    engine_path: str | os.PathLike[str] | None = None,
    plugin_library: str | os.PathLike[str] | Literal[True] | None = True,
    backend: str | None = None,
    progress: Progress | None = None,
    inputs: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None,
    unmapped_path: str | os.PathLike[str] | None = None,
    experts_implementation: str | None = None,
    engine_without_plugin_path: str | os.PathLike[str] | None = None,
) -> ParityReport:
    """Runs an ONNX file and the PyTorch model it came from on the same inputs, through Polygraphy's Comparator.

    PyTorch runs twice: as it is, and in float64 throughout, which is the gold. An output passes when its distance from
    the gold is no more than `moetrt.parity.verdict.WORST_FACTOR` (worst element) and `RMS_FACTOR` there (root mean
    square) times PyTorch's own, plus one unit in the last place; and when its NaNs and infinities are PyTorch's.

    Each tail is compared by itself too, in its own dtype and on its values in the model: the file's function in ONNX
    Runtime, and the kernel in its host build.

    Each tail is also held against the graph before mapping (`moetrt.parity.walk`): the file that is named, or the
    exporter's ``model.onnx`` beside the mapped file; where there is neither and the model differs, the source is
    exported anew. Of a model that differs the report then names the first tail that is off and what explains it.

    A model in bfloat16 or float16 does not run whole in ONNX Runtime on a CPU, and a router's choice near a tie would
    differ by chance. There, the file and the model are compared as their float32 twins (the same graph and the same
    16-bit weights, computed in float32), and each tail in its own dtype on the twin's values.

    Args:
        onnx_path: the file; external data beside it.
        source: the PyTorch model, which also makes the inputs, in range.
        seed: of the inputs.
        sizes: of dynamic dimensions by symbol; the source's example sizes where left out.
        lengths: further sizes, at which ONNX Runtime is held against PyTorch end to end. Where None, and neither sizes
            nor inputs are given, those of `moetrt.parity.lengths.other_lengths`.
        engine_path: an engine of the same file, run too; needs a GPU.
        plugin_library: that the engine was built with; True is the one that came with the package, None is none.
        backend: for the engines, as of `moetrt.backends.choose`.
        progress: called with one line at each step.
        inputs: run on these in place of drawn ones; a path is of a file that `moetrt.parity.replay.load_inputs` reads.
        unmapped_path: the file before mapping: the unfused path, run beside the mapped one.
        experts_implementation: what the experts of a Transformers model run in PyTorch: "eager", "batched_mm" or
            "grouped_mm"; what they are set to where None. The float64 run is eager.
        engine_without_plugin_path: an engine of the same file built without the plugin, run too; needs a GPU.

    Raises:
        InputError: the file or its data is missing or not ONNX, its inputs or outputs are not the source's, the file
            before mapping is another's, or a runner does not take it.
        InputTypeError: the source is no `Source`, or a seed or size is no whole number.
    """
    check_source(source)
    for given in (sizes, *(lengths or ())):
        if not isinstance(given, Mapping | None) or not all(isinstance(symbol, str) for symbol in given or ()):
            raise InputTypeError(f"the sizes were {given!r}; a dict of ints by symbol is taken")
    model = load_model(onnx_path)
    fill_in_types(model)
    path = Path(onnx_path)
    # Whose the inputs are, where they do not fit.
    whose = source.description
    if inputs is not None and not isinstance(inputs, Mapping):
        whose, inputs = f"inputs file '{os.fspath(inputs)}'", load_inputs(inputs)
    feed = draw_inputs(model, source, seed, sizes) if inputs is None else _in_order(inputs, source)
    _check_interface(model, path, source, feed, whose)
    check_shapes(model, {name: tuple(tensor.shape) for name, tensor in feed.items()})
    if lengths is None:
        lengths = other_lengths(model, source) if sizes is None and inputs is None else []
    before = None if unmapped_path is None else existing_file(unmapped_path, "file before mapping")
    engines = []
    if engine_path is not None:
        library = find_plugin_library() if plugin_library is True else plugin_library
        engines.append(_Engine(TENSORRT, engine_path, library, backend))
    if engine_without_plugin_path is not None:
        engines.append(_Engine(NATIVE, engine_without_plugin_path, None, backend))
    comparison = _Comparison(
        path,
        model,
        source,
        feed,
        find_original(path, model, before),
        experts_implementation,
        progress or (lambda _: None),
    )
    with tempfile.TemporaryDirectory(prefix="moetrt-compare-") as folder:
        drawn = _Lengths(lengths, lambda length: draw_inputs(model, source, seed, length))
        return comparison.report(Path(folder), engines, None if inputs is not None else seed, drawn)


@dataclass(frozen=True)
class _Engine:
    """An engine to run; ``runner`` is its name in the report."""

    runner: str
    path: str | os.PathLike[str]
    library: str | os.PathLike[str] | None
    backend: str | None


@dataclass(frozen=True)
class _Lengths:
    """Further sizes, and what draws inputs of them."""

    sizes: Sequence[Mapping[str, int]]
    draw: Callable[[Mapping[str, int]], dict[str, torch.Tensor]]


class _Comparison:
    """One file against one source on one set of inputs."""

    def __init__(
        self,
        path: Path,
        model: ir.Model,
        source: Source,
        feed: Mapping[str, torch.Tensor],
        original: tuple[Original | None, str],
        experts: str | None,
        say: Progress,
    ) -> None:
        self.path, self.model, self.source, self.feed = path, model, source, feed
        self.experts, self.say = experts, say
        self.tails = tails_of(model)
        self.choosers = choosers(model)
        self.half = half_dtype(model)
        self.original, why = original
        self.notes: list[str] = [why] if why else []
        self.kernel = self._kernel()

    def _kernel(self) -> KernelLibrary | None:
        if not self.tails:
            return None
        try:
            return load_host_library()
        except InputError as error:
            self.notes.append(f"the kernel was not compared: {error}")
            return None

    def report(
        self, folder: Path, engines: Sequence[_Engine], seed: int | None, lengths: _Lengths | None = None
    ) -> ParityReport:
        """Runs everything."""
        # A 16-bit model runs as its float32 twin; both are the same where the model is float32.
        module = self.source.module if self.half is None else copy.deepcopy(self.source.module).float()
        feed = {name: self._single(tensor) for name, tensor in self.feed.items()}
        walk, unfused = self._prepared(folder)
        shown = self._read_by_tails() | {chooser.indices for chooser in self.choosers}
        runners: list[Any] = [
            *self._pytorch(module, feed),
            self._onnx(folder / "mapped", self._runnable(self.path), shown, ORT, repr(str(self.path))),
        ]
        ends = runners[:]
        if unfused is not None:
            runners.append(unfused)
        if self.half is None:
            runners += self._engines(engines)
        self.say(f"running {', '.join(runner.name for runner in runners)}")
        results = side_by_side(runners, feed)
        # The file holds constants that the exporter rounded to the model's dtype, such as attention's scale.
        step = None if self.half is None else step_of(TORCH_DTYPES[self.half])
        judged = list(self._judged(results, step))
        ties = self._settle(module, feed, results, step) if any(map(_off, judged)) else []
        if ties:
            judged = list(self._judged(results, step))
        if self.half is not None and engines:
            # A GPU runs the 16-bit model itself, so it is held against PyTorch in 16 bits.
            again = [*self._pytorch(self.source.module, self.feed), *self._engines(engines)]
            judged += self._judged(side_by_side(again, self.feed), None)
        values = {**feed, **results[ORT]}
        if walk is not None:
            walk.take(self.feed, results[UNMAPPED])
        alone = list(self._by_themselves(folder, walk, values))
        if walk is None and self.tails and any(map(_off, (*judged, *alone))):
            walk = self._walk_anew(folder, feed, results)
            judged += self._judged({name: results[name] for name in (PYTORCH, GOLD, UNMAPPED) if name in results}, step)
            alone = alone if walk is None else list(self._by_themselves(folder, walk, values))
        judged += alone
        tails = self._walk(walk)
        outputs = _hinted(judged, self.source if seed is not None else None)
        self._note(outputs, values)
        others = [] if lengths is None else list(self._at_lengths(module, ends, lengths, step))
        cause = self._cause(walk, tails, outputs)
        first = next((place for place, length in enumerate(others) if not length.passed), None)
        if lengths is not None and first is not None and not any(map(_off, outputs)) and _all_passed(tails):
            # Nothing but the length is off: there the file is looked at as closely as it was here.
            others[first] = self._explained(folder / "length", others[first], lengths)
            cause = f"at {others[first].where}: {others[first].cause}"
        return ParityReport(
            onnx_path=self.path,
            sha256=file_sha256(self.path),
            source=self.source.description,
            seed=seed,
            inputs={name: tuple(tensor.shape) for name, tensor in self.feed.items()},
            how=self._how(engines),
            outputs=outputs,
            tails=tails,
            lengths=tuple(others),
            ties=tuple(ties),
            cause=cause,
            notes=tuple(dict.fromkeys(self.notes)),
            backends=dict(map(self._backend, engines)),
        )

    def _note(self, outputs: Sequence[OutputParity], values: Mapping[str, torch.Tensor]) -> None:
        """What a verdict alone would not show: what was not measured, and what passes by a tolerance's least part."""
        gaps = {output.name: output.gap for output in outputs if output.gap and not output.tail}
        lost = any(output.undecided for output in outputs)
        origin = first_not_finite(self.source.module, self.feed, self.tails, values) if gaps or lost else ""
        self.notes += [
            f"{name}: {gap}{f', from {origin}' if origin else ''}; the errors are of the rest"
            for name, gap in gaps.items()
        ]
        if lost and origin:
            self.notes.append(f"what is not finite comes from {origin}")
        self.notes += [
            f"{output.name}: {output.excess}" for output in outputs if output.excess and output.runner != UNMAPPED
        ]

    def _prepared(self, folder: Path) -> tuple[Walk | None, OrtRunner | None]:
        """The walk and the run of the file before mapping, where there is one that ONNX Runtime takes."""
        if self.original is None:
            return None, None
        try:
            walk = Walk(self.model, self.original)
            return walk, self._unfused(folder, walk)
        except MoetrtError as error:
            if self.original.named:
                raise
            # Nobody asked for it: it lay beside the mapped file.
            self.notes.append(f"the graph before mapping, {self.original.where}, was left out: {error}")
            return None, None

    def _single(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if self.half is not None and tensor.is_floating_point() else tensor

    def _pytorch(
        self,
        module: torch.nn.Module,
        feed: Mapping[str, torch.Tensor],
        modes: tuple[Choosing | None, Choosing | None] = (None, None),
    ) -> list[TorchRunner]:
        """PyTorch as it is and in float64, each with a mode of its own."""
        names, (mode, gold) = self.source.output_names, modes
        return [
            TorchRunner(module, feed, names, experts_implementation=self.experts, mode=mode, name=PYTORCH),
            TorchRunner(module, feed, names, float64=True, mode=gold, name=GOLD),
        ]

    def _settle(
        self,
        module: torch.nn.Module,
        feed: Mapping[str, torch.Tensor],
        results: Results,
        step: float | None,
        where: str = "",
    ) -> list[Tie]:
        """Where PyTorch chose otherwise than ONNX Runtime, and rounding decides, PyTorch is run with the same choices.

        Returns:
            The choices; ``results`` has PyTorch's outputs with them. Nothing where the two chose alike, or scores that
            are too far apart: a note says which.
        """
        made = [made_by(chooser, results[ORT]) for chooser in self.choosers]
        given = [indices for indices in made if indices is not None]
        if not given:
            return []
        self.say("looking for choices that rounding decides")
        mine, gold = Choosing(given), Choosing(given)
        again, failures = at_each(self._pytorch(module, feed, (mine, gold)), [feed])[0]
        if failures or len(given) < len(made) or not (fits(given, mine.seen) and fits(given, gold.seen)):
            self.notes.append(
                "whether PyTorch and ONNX Runtime choose the same experts is not known: the file chooses "
                f"{len(made)} times by scores, PyTorch {len(mine.seen)} times or among others"
            )
            return []
        ties = find_ties(self.choosers, given, mine.seen, gold.seen, step or step_of(torch.float32))
        decided = next((tie for tie in ties if tie.decided), None)
        if decided is not None:
            self.notes.append(f"no tie{where and f' at {where}'}: {decided.line()}")
            return []
        results |= again
        self.notes += told(ties, where)
        return ties

    def _at_lengths(
        self, module: torch.nn.Module, runners: Sequence[Any], lengths: _Lengths, step: float | None
    ) -> Iterator[LengthParity]:
        """ONNX Runtime against PyTorch at each further length, end to end."""
        drawn: list[tuple[Mapping[str, int], Mapping[str, torch.Tensor]]] = []
        for sizes in lengths.sizes:
            try:
                drawn.append((sizes, lengths.draw(sizes)))
            except InputError as error:
                yield LengthParity(sizes, {}, unmeasured=str(error))
        if not drawn:
            return
        self.say("running " + "; ".join(LengthParity(sizes, {}).where for sizes, _ in drawn))
        feeds = [{name: self._single(tensor) for name, tensor in feed.items()} for _, feed in drawn]
        for place, (results, failures) in enumerate(at_each(runners, feeds)):
            sizes, feed = drawn[place]
            found = LengthParity(sizes, {name: tuple(tensor.shape) for name, tensor in feed.items()})
            lost = failures.get(PYTORCH) or failures.get(GOLD)
            if lost is not None:
                yield dataclasses.replace(found, unmeasured=str(lost))
                continue
            if ORT in failures:
                found = dataclasses.replace(found, failure=str(failures[ORT]))
            else:
                found = dataclasses.replace(found, outputs=tuple(self._judged(results, step)))
                if not found.passed and (ties := self._settle(module, feeds[place], results, step, found.where)):
                    found = dataclasses.replace(found, outputs=tuple(self._judged(results, step)), ties=tuple(ties))
            yield found

    def _explained(self, folder: Path, found: LengthParity, lengths: _Lengths) -> LengthParity:
        """A length that differs, with what is off there."""
        self.say(f"looking at {found.where} closely")
        return dataclasses.replace(found, cause=self._cause_at(folder, found, lengths.draw(found.sizes)))

    def _cause_at(self, folder: Path, found: LengthParity, feed: Mapping[str, torch.Tensor]) -> str:
        folder.mkdir()
        original = None if self.original is None else dataclasses.replace(self.original, values={}, single={})
        closely = _Comparison(self.path, self.model, self.source, feed, (original, ""), self.experts, self.say)
        try:
            if not found.failure:
                report = closely.report(folder, [], None)
                if not _all_passed(report.tails):
                    return report.verdict
                return f"{found.why if report.passed else report.verdict}{_DECIDED}"
            runner = None if original is None else closely._prepared(folder)[1]
            single = {name: self._single(tensor) for name, tensor in feed.items()}
            if runner is not None and at_each([runner], [single])[0][1]:
                return f"{found.why}; so does the file before mapping: the mapping is not what is off{_DECIDED}"
        except MoetrtError as error:
            self.notes.append(f"at {found.where}, what is off was not found: {error}")
        return found.why

    def _runnable(self, path: Path) -> ir.Model:
        """A copy of a file's model that may be changed, and runs in ONNX Runtime."""
        model = load_model(path)
        fill_in_types(model)
        if self.half is None:
            return model
        self.say(f"making the float32 twin of {path.name}")
        return float32_twin(model)

    def _read_by_tails(self) -> set[str]:
        return {name for tail in self.tails for name in tail.input_names().values()}

    def _onnx(self, folder: Path, model: ir.Model, shown: Iterable[str], runner: str, name: str) -> OrtRunner:
        expose(model, shown, f"{name}: ")
        folder.mkdir()
        # Loaded now: what ONNX Runtime does not take is known before anything runs.
        return OrtRunner(session_of(model, folder / "model.onnx", name)(), name=runner)

    def _unfused(self, folder: Path, walk: Walk) -> OrtRunner:
        model = walk.original.model.clone()
        twin = model if self.half is None else float32_twin(model)
        return self._onnx(
            folder / "unmapped", twin, walk.names, UNMAPPED, f"the file before mapping ({walk.original.where})"
        )

    def _engines(self, engines: Sequence[_Engine]) -> Iterator[Any]:
        for engine in engines:
            yield tensorrt_runner(
                engine.path, plugin_library=engine.library, backend=engine.backend, name=engine.runner
            )

    def _judged(self, results: Results, step: float | None) -> Iterator[OutputParity]:
        """The model's outputs. The unfused path has a verdict of its own, and stands beside the others as a measure."""
        for runner, outputs in results.items():
            if runner in (PYTORCH, GOLD):
                continue
            for name in self.source.output_names:
                gold = results[GOLD][name]
                output = judge(outputs[name], results[PYTORCH][name], gold, name=name, runner=runner, step=step)
                if UNMAPPED in results and runner != UNMAPPED:
                    unfused = errors_of(results[UNMAPPED][name], gold, UNMAPPED)
                    output = dataclasses.replace(output, unfused=unfused)
                yield output

    def _weights(self) -> str:
        """In words, that the file has other weights than the source; empty where it has the same.

        Where the file before mapping is there, its weights are looked at: one that the mapped file alone has otherwise
        is a fault of that file, which `Walk` finds.
        """
        self.say("looking for weights that differ")
        file, count = self.model if self.original is None else self.original.model, len(weights_of(self.source.module))
        lost, named = other_weights(file, self.source.module)
        # Tools fold single weights into others.
        if 2 * len(lost) <= count and not (named and self.original is not None):
            return ""
        return (
            f"the weights are not the source's: {len(lost)} of {count} of "
            f"{self.source.description} are not in the file, '{lost[0]}' first; a factory that draws its weights has "
            "to seed them, and a file is compared with the weights that it was exported with"
        )

    def _walk_anew(self, folder: Path, feed: Mapping[str, torch.Tensor], results: Results) -> Walk | None:
        """The walk where no file before mapping is to be had: the source is exported once more.

        What ONNX Runtime gives for that is added to ``results``.
        """
        if self._weights():
            # An export of the source would have its weights, and every tail be off by them.
            return None
        self.say(f"exporting {self.source.description} anew, to find what is off")
        self.original, why = capture_original(self.source, self.model, self.say)
        if self.original is None:
            self.notes.append(
                f"the tails were not held against the graph before mapping: {why}; --unmapped names its file"
            )
            return None
        walk, unfused = self._prepared(folder)
        if walk is not None and unfused is not None:
            results |= side_by_side([unfused], feed)
            walk.take(self.feed, results[UNMAPPED])
        return walk

    def _by_themselves(
        self, folder: Path, walk: Walk | None, values: Mapping[str, torch.Tensor]
    ) -> Iterator[OutputParity]:
        for tail in self.tails:
            self.say(f"comparing {tail.name} by itself")
            unfused: dict[str, torch.Tensor] = {}
            try:
                # From the original's values, so that nothing before the tail counts; else from the file's own run.
                operands = (
                    operands_from(tail, values, self.half or ir.DataType.FLOAT) if walk is None else walk.operands(tail)
                )
                unfused, wanted = ({}, {}) if walk is None else (walk.unfused(tail), walk.gold(tail))
            except InputError as error:
                self.notes.append(str(error))
                continue
            results = run_tail(tail, operands, folder, self.kernel)
            for runner, outputs in results.items():
                if runner in (PYTORCH, GOLD):
                    continue
                for name, gold in results[GOLD].items():
                    output = judge(
                        outputs[name],
                        results[PYTORCH][name],
                        gold,
                        name=f"{tail.name}.{name}",
                        runner=runner,
                        tail=tail.name,
                    )
                    common = "residual_out" if name == "hidden" else name
                    if common in unfused:
                        errors = errors_of(unfused[common], wanted[common], "unfused")
                        output = dataclasses.replace(output, unfused=errors)
                    yield output

    def _walk(self, walk: Walk | None) -> tuple[TailVerdict, ...]:
        if walk is None:
            return ()
        self.notes.append(f"the graph before mapping is {walk.original.where}")
        found: list[TailVerdict] = []
        for tail in walk.tails:
            self.say(f"holding {tail.name} against the graph before mapping")
            try:
                found.append(walk.judge(tail, thorough=all(verdict.passed for verdict in found)))
            except InputError as error:
                self.notes.append(f"{tail.name} was not held against the graph before mapping: {error}")
        return tuple(found)

    def _cause(self, walk: Walk | None, tails: Sequence[TailVerdict], outputs: Sequence[OutputParity]) -> str:
        first = next((tail for tail in tails if not tail.passed), None)
        if first is not None:
            return f"the first tail that is off is {first.index + 1} of {len(self.tails)}, {first.name}: {first.why}"
        wrong = [output for output in outputs if _off(output)]
        lost = [output for output in outputs if output.undecided]
        if lost and not wrong:
            whole = {output.name for output in outputs if not output.tail} <= {output.name for output in lost}
            what = "every output" if whole else ", ".join(dict.fromkeys(output.name for output in lost))
            return what + lost[0].reason.removeprefix("every element")
        if not wrong:
            return ""
        if weights := self._weights():
            return weights
        if walk is None:
            return ""
        alone = next((output for output in wrong if output.tail), None)
        if alone is not None:
            what = "the kernel" if alone.runner == KERNEL else "its function in the file"
            names = [
                output.name.rpartition(".")[2]
                for output in wrong
                if (output.tail, output.runner) == (alone.tail, alone.runner)
            ]
            return f"{alone.tail} is the tail it replaced, but {what} computes {' and '.join(names)} wrongly"
        if any(output.runner == UNMAPPED for output in wrong):
            return "the graph before mapping differs from PyTorch already: the mapping is not what is off"
        if all(output.runner in (TENSORRT, NATIVE) for output in wrong):
            return "the file is right in ONNX Runtime, and the engine is off"
        self.say("looking between the tails")
        return walk.wiring(self.feed)

    @staticmethod
    def _backend(engine: _Engine) -> tuple[str, str]:
        chosen = choose(engine.backend)
        return chosen.name, chosen.version

    def _how(self, engines: Sequence[_Engine]) -> str:
        where = ["ONNX Runtime"]
        named = {TENSORRT: "TensorRT", NATIVE: "TensorRT without the plugin"}
        where += [named[engine.runner] for engine in engines]
        names = " and ".join(where)
        pytorch = "PyTorch" if self.experts is None else f"PyTorch ({self.experts} experts)"
        tails = "1 tail by itself" if len(self.tails) == 1 else f"{len(self.tails)} tails by themselves"
        alone = f"; {tails}" if self.tails else ""
        if self.half is None:
            return f"{self.path.name} in {names} against {self.source.description} in {pytorch}{alone}"
        return (
            f"the float32 twins of {self.path.name} in {names} and of {self.source.description} in {pytorch}{alone}"
            f"{f' in {self.half.name.lower()}' if alone else ''}"
        )


def _in_order(inputs: Mapping[str, torch.Tensor], source: Source) -> dict[str, torch.Tensor]:
    """The inputs that were given, in the order of the source's."""
    known = {name: inputs[name] for name in source.input_names if name in inputs}
    return known | {name: tensor for name, tensor in inputs.items() if name not in known}


def _hinted(outputs: Iterable[OutputParity], source: Source | None) -> tuple[OutputParity, ...]:
    """Says where the inputs come from when PyTorch itself gives NaN or infinities for them."""
    if source is None or source.random_inputs is not None:
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


def _check_interface(model: ir.Model, path: Path, source: Source, feed: Mapping[str, torch.Tensor], whose: str) -> None:
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    if set(inputs) != set(feed):
        raise InputError(
            f"'{path}' has the inputs {', '.join(inputs)}; {whose} has {', '.join(feed)}: is it this model's file?"
        )
    outputs = [value.name or "" for value in model.graph.outputs]
    if set(outputs) != set(source.output_names):
        raise InputError(
            f"'{path}' has the outputs {', '.join(outputs)}; {source.description} has "
            f"{', '.join(source.output_names)}: is it this model's file? A factory's Source names them by output_names"
        )
    _check_weights(model, path, source)
    for name, value in inputs.items():
        tensor = feed[name]
        if TORCH_DTYPES.get(value.dtype or ir.DataType.UNDEFINED) != tensor.dtype:
            wanted = "unknown" if value.dtype is None else value.dtype.name.lower()
            raise InputError(
                f"input '{name}' of '{path}' is {wanted}, of {whose} {str(tensor.dtype)[6:]}; they must be the same"
            )
        if value.shape is None:
            continue
        dims = [dim if isinstance(dim, int) else None for dim in value.shape]
        if len(dims) != tensor.dim() or any(d not in (None, s) for d, s in zip(dims, tensor.shape, strict=True)):
            wanted = "x".join("?" if dim is None else str(dim) for dim in dims)
            raise InputError(f"input '{name}' of '{path}' is {wanted}, of {whose} {'x'.join(map(str, tensor.shape))}")


def _check_weights(model: ir.Model, path: Path, source: Source) -> None:
    """Refuses a source that has weights of other sizes, or was loaded in another floating-point type than the file.

    What rounding its weights does to the numbers would be far more than what a comparison is to find. Weights have the
    same names in both; single ones may be of another type on either side.
    """
    pairs = []
    for name, weight in weights_of(source.module).items():
        value = model.graph.initializers.get(name)
        shape = None if value is None or value.shape is None else tuple(value.shape.numpy())
        if shape is not None and math.prod(shape) != weight.numel():
            mine, theirs = ("x".join(map(str, dims)) or "scalar" for dims in (shape, weight.shape))
            raise InputError(
                f"weight '{name}' of '{path}' is {mine}, of {source.description} {theirs}: is it this model's file?"
            )
        if value is not None and value.dtype in FLOATS and weight.is_floating_point():
            pairs.append((TORCH_DTYPES[value.dtype], weight.dtype))
    other = [pair for pair in pairs if pair[0] != pair[1]]
    if 2 * len(other) <= len(pairs):
        return
    kind, found = max(set(other), key=other.count)
    names = [str(dtype).removeprefix("torch.") for dtype in (kind, found)]
    option = next(word for word, dtype in DTYPES.items() if dtype == kind)
    raise InputError(
        f"the weights of '{path}' are {names[0]}, those of {source.description} were loaded as {names[1]}; a source of "
        f"the file's own type is taken (--dtype {option})"
    )
