"""Exported files at many lengths against PyTorch: the table that shows whether a graph holds its example's length."""

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import onnxruntime
import torch

from moetrt import chunked_models, models
from moetrt.bounds import Bound, as_json
from moetrt.capture import export
from moetrt.errors import InputError, MoetrtError
from moetrt.families import family_names
from moetrt.parity.runners import TorchRunner, ort_session
from moetrt.parity.verdict import OutputParity, judge
from moetrt.quiet import quiet
from moetrt.source import Source, load_source

LENGTHS = (1, 2, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 600)
"""One token, a few, and the sizes around the chunks of 64, 128 and 256 that models have."""

_SEEDS = (1, 2, 3)
"""Inputs on which a router is near a tie decide nothing, but a length that a graph holds is wrong on all."""


@dataclass(frozen=True)
class LengthRow:
    """One model at several lengths, in float32.

    Attributes:
        name: of the family, or the source.
        bounds: those that its file states.
        errors: by length: ONNX Runtime's largest error against a float64 run, over its root mean square; lengths beyond
            the bounds are left out.
        problems: by length: why the file is wrong there.
        error: why there is no file.
    """

    name: str
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    errors: Mapping[int, float] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a file, and it is right at each length within its bounds."""
        return self.error is None and not self.problems

    def cells(self, lengths: Sequence[int]) -> tuple[str, ...]:
        """The row as text: the name, an error by length, "-" beyond the bounds, and the bounds."""
        shown = [
            "wrong" if size in self.problems else f"{self.errors[size]:.0e}" if size in self.errors else "-"
            for size in lengths
        ]
        return (self.name, *shown, "; ".join(f"{symbol}: {bound.sizes}" for symbol, bound in self.bounds.items()))

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self) | {"bounds": as_json(self.bounds), "ok": self.ok}


def length_names() -> list[str]:
    """The families of docs/families.md, and those of `moetrt.chunked_models`."""
    return [*family_names(), *_chunked()]


def _chunked() -> list[str]:
    return [
        name
        for name, value in vars(chunked_models).items()
        if inspect.isfunction(value) and value.__module__ == chunked_models.__name__
    ]


def run_lengths(names: Sequence[str] = (), *, lengths: Sequence[int] = LENGTHS, jobs: int = 1) -> Iterator[LengthRow]:
    """Exports families and holds each file against PyTorch at several lengths.

    Args:
        names: as of `length_names`; all where empty.
        lengths: sizes of the last dynamic dimension; the others are 2.
        jobs: how many families to run at a time, each in a process of its own where there is more than one.

    Yields:
        Each row when it is done.

    Raises:
        InputError: an unknown name, or fewer jobs than 1.
    """
    known = length_names()
    for name in names:
        if name not in known:
            raise InputError(f"there is no family '{name}'; there are {', '.join(known)}")
    if jobs < 1:
        raise InputError(f"the jobs were {jobs}; 1 or more is taken")
    chosen = list(dict.fromkeys(names)) or known
    if jobs == 1 or len(chosen) == 1:
        for name in chosen:
            yield _family(name, tuple(lengths))
        return
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_family, name, tuple(lengths)) for name in chosen]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _family(name: str, lengths: Sequence[int]) -> LengthRow:
    file = chunked_models if name in _chunked() else models
    with quiet():
        source = load_source(f"{file.__name__}:{name}", dtype="fp32")
    return run_source(source, name, lengths)


def run_source(source: Source, name: str, lengths: Sequence[int] = LENGTHS) -> LengthRow:
    """One model of float32 at several lengths; what its export refuses ends up in the row.

    Args:
        source: its last dynamic dimension is the length; the others are 2.
        name: of the row.
        lengths: the sizes.
    """
    with tempfile.TemporaryDirectory(prefix="moetrt-lengths-") as folder, quiet():
        try:
            exported = export(source, folder)
        except MoetrtError as error:
            return LengthRow(name, error=str(error))
        *others, length = source.example_sizes
        errors: dict[int, float] = {}
        problems: dict[int, str] = {}
        session = ort_session(exported.model_path)()
        runners = (
            TorchRunner(source.module, source.example_inputs, source.output_names),
            TorchRunner(source.module, source.example_inputs, source.output_names, float64=True),
        )
        with runners[0], runners[1]:
            for size in lengths:
                if length in exported.bounds and size not in exported.bounds[length]:
                    continue
                sizes = {length: size, **{other: _within(2, exported.bounds.get(other)) for other in others}}
                try:
                    worst = _worst(source, sizes, session, runners)
                except _Fails as error:
                    problems[size] = str(error)
                    continue
                errors[size] = worst.worst
                if not worst.passed:
                    problems[size] = f"{worst.lines()[0]}; {worst.reason}"
    return LengthRow(name, exported.bounds, errors, problems)


def _within(size: int, bound: Bound | None) -> int:
    return size if bound is None or size in bound else bound.minimum


class _Fails(Exception):
    """ONNX Runtime does not run the file at a length."""


def _worst(
    source: Source, sizes: Mapping[str, int], session: onnxruntime.InferenceSession, runners: Sequence[TorchRunner]
) -> OutputParity:
    """The verdict that says most, on the first inputs that pass, else on the last."""
    for seed in _SEEDS:
        inputs = source.make_inputs(seed, **sizes)
        pytorch, gold = (runner.infer(dict(inputs)) for runner in runners)
        try:
            values = session.run(list(source.output_names), {name: x.numpy() for name, x in inputs.items()})
        except Exception as error:  # ONNX Runtime's errors have no common type
            raise _Fails(f"ONNX Runtime fails: {' '.join(str(error).split())[:300]}") from error
        verdicts = [
            judge(torch.as_tensor(value), pytorch[name], gold[name], name=name)
            for name, value in zip(source.output_names, values, strict=True)
        ]
        worst = min(verdicts, key=lambda verdict: (verdict.passed, -verdict.worst))
        if worst.passed:
            break
    return worst
