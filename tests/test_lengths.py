"""Case 55: the table of lengths is right where files are right, and fails where one holds its example's length."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moetrt import cli, lengths
from moetrt.bounds import Bound
from moetrt.errors import InputError
from moetrt.families import family_names
from moetrt.guards import Guards
from moetrt.lengths import LengthRow, length_names, run_lengths, run_source
from moetrt.source import as_source
from tests.models import lengths as modules

CHUNKED = ("deepseek_v4_compressed", "nemotron_h", "granite_moe_hybrid", "minimax", "kimi_linear")


def test_every_family_is_in_the_table() -> None:
    assert length_names() == [*family_names(), *CHUNKED]


@pytest.mark.parametrize("name", ["qwen3_moe", "minimax", "deepseek_v4_compressed"])
def test_case_55_a_family_is_right_at_every_length(name: str) -> None:
    sizes = (1, 4, 129)
    (row,) = run_lengths([name], lengths=sizes)
    assert (row.error, dict(row.problems), dict(row.bounds)) == (None, {}, {})
    assert sorted(row.errors) == sorted(sizes)
    assert row.ok


def test_a_length_beyond_the_bounds_is_left_out() -> None:
    row = run_source(as_source(modules.windows()), "windows", (1, 15, 16, 33))
    assert row.ok
    assert sorted(row.errors) == [1, 15]
    assert row.cells((1, 16))[2:] == ("-", "tokens: 1 to 15")


def test_a_branch_that_no_bound_states_is_found() -> None:
    """Planted: the guards of the trace are not read, as it was before."""
    with patch.object(Guards, "bounds", lambda *_: {}):
        row = run_source(as_source(modules.windows()), "windows", (1, 15, 16, 33))
    assert not row.ok
    assert sorted(row.problems) == [16, 33]
    assert row.cells((15, 16))[2] == "wrong"


def test_a_loop_that_no_bound_states_is_found() -> None:
    with patch.object(Guards, "bounds", lambda *_: {}):
        row = run_source(as_source(modules.looped()), "looped", (33, 48, 49, 64))
    assert sorted(row.problems) == [49, 64]


def test_what_is_not_exported_is_an_error_of_its_row() -> None:
    row = run_source(as_source(modules.by_four()), "by_four", (8,))
    assert not row.ok
    assert "x.shape[0] % 4 == 0" in (row.error or "")


BOUND = Bound("seq", 1, 15, "n // 16 <= 0 in model.py:3 'if n // 16 > 0:'")


@contextmanager
def rows(*made: LengthRow) -> Any:
    with patch.object(lengths, "run_lengths", lambda *_, **__: iter(made)):
        yield


def test_the_command_prints_the_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.json"
    with rows(LengthRow("one", {"seq": BOUND}, {1: 2e-6}), LengthRow("other", {}, {1: 1e-6, 600: 3e-6})):
        assert cli.run(["families", "--lengths", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "seq: 1 to 15" in printed
    assert str(BOUND) in printed
    found = {row["name"]: row for row in json.loads(path.read_text())}
    assert found["one"]["bounds"]["seq"]["maximum"] == 15
    assert found["other"]["errors"] == {"1": 1e-6, "600": 3e-6}


def test_the_command_fails_where_a_length_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with rows(LengthRow("one", {}, {1: 2e-6, 600: 0.5}, {600: "logits differ"}), LengthRow("other", error="refused")):
        assert cli.run(["families", "--lengths"]) == 1
    captured = capsys.readouterr()
    assert "600: logits differ" in captured.out
    assert "not right at every length within their bounds: one, other" in captured.err


@pytest.mark.parametrize("words", [["--dtype", "bf16"], ["--page", "page.md"]])
def test_options_that_the_table_does_not_take_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["families", "--lengths", *words]) == 2
    assert "--lengths was given with --page or --dtype" in capsys.readouterr().err


def test_unknown_families_and_jobs_are_refused() -> None:
    with pytest.raises(InputError, match="there is no family 'qwen'; there are afmoe, "):
        next(run_lengths(["qwen"]))
    with pytest.raises(InputError, match="the jobs were 0; 1 or more is taken"):
        next(run_lengths(jobs=0))
