"""What a run prints where somebody watches, and where nobody does."""

import io
import re

import pytest
from rich.console import Console

from moetrt.console import Output, visible


def output_to(terminal: bool) -> tuple[Output, io.StringIO]:
    out, stream = Output(), io.StringIO()
    out._console = Console(
        file=stream,
        force_terminal=terminal,
        width=80,
        highlight=False,
        markup=False,
        color_system="standard" if terminal else None,
    )
    return out, stream


def test_a_terminal_shows_what_a_step_is_doing() -> None:
    out, stream = output_to(terminal=True)
    with out.step("export") as step:
        step.progress("tracing [/a/path] with brackets")
        assert step._status is not None
        step._status.stop()
        step._status.start()
        step.result = "model.onnx"
    assert "export: tracing [/a/path] with brackets" in stream.getvalue()
    assert "model.onnx" in stream.getvalue()


def test_a_pipe_gets_results_alone() -> None:
    out, stream = output_to(terminal=False)
    with out.step("export") as step:
        step.progress("tracing")
        step.result = "model.onnx"
        step.details.append("tails: 3")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("ok     export   model.onnx  ")
    assert first.endswith(" s")
    assert second == "       tails: 3"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_others_print_during_a_step_is_not_among_the_results(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out, stream = output_to(terminal)
    with out.step("load") as step:
        print("from the user's model")
        step.result = "done"
    print("after it")
    shown = capsys.readouterr()
    assert shown.out == "after it\n"
    # Where somebody watches, rich prints it above the spinner.
    assert "from the user's model" in (stream.getvalue() if terminal else shown.err)


def test_a_step_that_fell_short_says_so() -> None:
    out, stream = output_to(terminal=False)
    with out.step("map") as step:
        step.ok = False
    assert stream.getvalue().startswith("FAILED map")


def test_a_step_that_raised_leaves_the_word_to_the_error() -> None:
    out, stream = output_to(terminal=False)
    with pytest.raises(ValueError, match="broken"), out.step("map"):
        raise ValueError("broken")
    assert stream.getvalue() == ""


def test_a_row_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(("tail", "became"), [("layer/" * 40, "MoEFinalizeAddRMSNorm")])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["tail", "became"]
    assert row.split() == ["layer/" * 40, "MoEFinalizeAddRMSNorm"]


def test_what_would_not_be_seen_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    name = "a\u202eb\x1b[31mc\x07\u200bd"
    shown = r"a\u202eb\x1b[31mc\x07\u200bd"
    out.line(name)
    out.heading(name)
    out.table(("tail",), [(name,)])
    with out.step("map") as step:
        step.result = name
        step.details.append(name)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if shown in line] == [line for line in lines if line.strip() != "tail"]
    assert visible("größer\tfünf\n") == "größer\tfünf\n"


def test_paths_are_not_broken_and_tables_fold() -> None:
    out, stream = output_to(terminal=True)
    out.line("/" + "long/" * 40)
    out.table(("tail", "became"), [("layer/" * 20, "MoEFinalizeAddRMSNorm")])
    path, *table = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert path == "/" + "long/" * 40
    assert max(map(len, table)) <= 80
    assert "".join(line.split("  ")[0].strip() for line in table[1:]) == "layer/" * 20
