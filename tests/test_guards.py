"""Case 55: a Python branch, loop or number that depends on a length is exported right, bounded or refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from moetrt.bounds import Bound, bounds_of
from moetrt.capture import capture, export
from moetrt.errors import InputError
from moetrt.onnx_files import load_model
from moetrt.source import Source, as_source
from tests.models import lengths

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 80, 81, 130)

RIGHT = ("padded", "at_least_four", "first_sixteen", "third", "as_number", "same_name")
BOUNDED = {
    "windows": (1, 15, "if whole.shape[0] > 0:"),
    "windows_long": (16, None, "if whole.shape[0] > 0:"),
    "looped": (33, 48, "for chunk in range(padded.shape[0]):"),
    "split": (33, 48, "x.split(CHUNK)"),
    "half": (8, 9, "int(x.shape[0] * 0.5)"),
    "not_five": (6, None, "x.shape[0] == 5"),
    "single": (2, None, "x.shape[0] == 1"),
    "in_a_scan": (6, None, "scan(step, "),
    "table": (1, 64, "x + positions[: x.shape[0]]"),
    "sixth": (6, None, "x[5]"),
    "branch_and_number": (6, None, "x.shape[0] > 5"),
    "checked": (1, 100_000, "torch._check(x.shape[0] <= 100_000)"),
}
REFUSED = {
    "by_four": "x.shape[0] % 4 == 0",
    "by_row": "for row in x",
    "logarithm": "math.log(x.shape[0])",
    "same_size": "x.shape[0] == y.shape[0]",
    "other_size": "x.shape[0] == y.shape[0]",
    "fewer": "x.shape[0] < y.shape[0]",
    "added": "(x + y).mean(0)",
    "reshaped": "x.reshape(-1, 4 * HIDDEN)",
}


def source_of(name: str) -> Source:
    return as_source(getattr(lengths, name)(), name)


def wrong_sizes(source: Source, path: Path, sizes: Sequence[int] = LENGTHS) -> list[int]:
    """The sizes at which the file does not give what the module gives, or fails."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    symbol = next(iter(source.example_sizes))
    found = []
    for size in sizes:
        inputs = source.make_inputs(1, **{symbol: size})
        with torch.no_grad():
            wanted = source.module(*inputs.values())[0].numpy()
        try:
            (got,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        except Exception:  # ONNX Runtime's errors have no common type
            found.append(size)
            continue
        if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-5, atol=1e-5):
            found.append(size)
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_case_55_what_no_length_changes_has_no_bound(name: str, tmp_path: Path) -> None:
    source = source_of(name)
    result = export(source, tmp_path)
    assert result.bounds == {}
    assert wrong_sizes(source, result.model_path) == []


@pytest.mark.parametrize("name", BOUNDED)
def test_case_55_a_branch_or_loop_on_a_length_is_bounded(name: str, tmp_path: Path) -> None:
    source = source_of(name)
    minimum, maximum, line = BOUNDED[name]
    result = export(source, tmp_path)
    bound = result.bounds["tokens"]
    assert (bound.minimum, bound.maximum) == (minimum, maximum)
    assert line in bound.reason
    assert "tests/models/lengths.py:" in bound.reason
    assert bounds_of(load_model(result.model_path)) == {"tokens": bound}
    within = [size for size in LENGTHS if size in bound]
    assert within
    assert wrong_sizes(source, result.model_path, within) == []


def test_case_55_beyond_its_bound_a_file_is_wrong(tmp_path: Path) -> None:
    source = source_of("windows")
    assert wrong_sizes(source, export(source, tmp_path).model_path) == [size for size in LENGTHS if size >= 16]


@pytest.mark.parametrize("name", REFUSED)
def test_case_55_what_is_no_range_of_one_length_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        export(source_of(name), tmp_path / "out")
    assert REFUSED[name] in str(caught.value)
    assert "tests/models/lengths.py:" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_static_export_has_no_bound() -> None:
    assert bounds_of(capture(source_of("windows"), dynamic=False)) == {}


def test_bounds_have_no_path_of_this_machine() -> None:
    bound = bounds_of(capture(source_of("windows")))["tokens"]
    assert isinstance(bound, Bound)
    assert str(Path.cwd()) not in bound.reason
