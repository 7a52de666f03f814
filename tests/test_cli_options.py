"""How the command line reads its words, before any of them is acted on."""

import subprocess
import sys
import time

import click
import pytest

from moetrt import cli
from moetrt.errors import InputError


def parse(*words: str) -> dict[str, object]:
    """The parameters that `moetrt build` gets for these words."""
    with cli.build_command.make_context("build", list(words)) as context:
        return context.params


def test_shape_options_take_several_words() -> None:
    got = parse("m.onnx", "--min", "ids:1x1", "mask:1x1", "--max", "ids:4x8", "-o", "m.engine")
    assert got["min_words"] == ("ids:1x1", "mask:1x1")
    assert got["max_words"] == ("ids:4x8",)
    assert (got["model"], got["output"]) == ("m.onnx", "m.engine")


def test_a_file_name_after_a_shape_is_not_taken_for_one() -> None:
    got = parse("--opt", "ids:1x1", "m.onnx", "-o", "m.engine")
    assert got["model"] == "m.onnx"
    assert got["opt_words"] == ("ids:1x1",)


def test_shape_options_can_be_repeated_and_joined_with_equals() -> None:
    got = parse("m.onnx", "--min=ids:1x1", "mask:1x2", "--min", "x:3", "-o", "m.engine")
    assert got["min_words"] == ("ids:1x1", "mask:1x2", "x:3")


@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        (["ids:1x16,mask:1x16"], {"ids": (1, 16), "mask": (1, 16)}),
        (["ids:1x16", "mask:2x3"], {"ids": (1, 16), "mask": (2, 3)}),
        (["ids:1,16"], {"ids": (1, 16)}),
        (["ids:1,16,mask:2"], {"ids": (1, 16), "mask": (2,)}),
        (["scope/x:0:7"], {"scope/x:0": (7,)}),
        ([], {}),
    ],
)
def test_shapes_are_read_as_trtexec_and_polygraphy_spell_them(words: list[str], shapes: dict[str, object]) -> None:
    assert cli._shapes(words) == shapes


@pytest.mark.parametrize("word", ["ids", "ids:", ":1x2", "ids:1xa", "ids:-1x2", "ids:1x"])
def test_a_malformed_shape_is_refused_with_what_it_was(word: str) -> None:
    with pytest.raises(InputError) as caught:
        cli._shapes([word])
    assert word in str(caught.value)


def test_help_does_not_wait_for_torch() -> None:
    subprocess.run([sys.executable, "-m", "moetrt", "--help"], check=True, capture_output=True)  # fills caches
    started = time.monotonic()
    code = "import sys; from moetrt.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "torch was imported"
    assert "Usage: moetrt" in done.stdout
    # 0.2 s here; a machine that is busy with other tests gets room, but not the second and more that torch takes.
    assert time.monotonic() - started < 1.0


def test_every_command_has_help_that_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ["", *cli.cli.commands]:
        assert cli.run([word for word in (name, "-h") if word]) == 0
        text = capsys.readouterr().out
        assert "Usage: moetrt" in text
        assert max(map(len, text.splitlines())) <= 100


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.metadata

    assert cli.run(["--version"]) == 0
    assert importlib.metadata.version("moetrt") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["bild"], "bild"),
        (["build", "m.onnx"], "--output"),
        (["build", "m.onnx", "-o", "e", "--targt", "SM89"], "--targt"),
        (["export", "m", "-o", "d", "--opset", "new"], "new"),
        (["map", "a", "b", "-o", "c"], "b"),
        (["export", "m:f", "-o", "d", "--static", "--dynamic", "x:0=n"], "--static"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_2(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("moetrt: error: ")
    assert named in lines[0]


def test_no_words_show_help_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(("verbose", "lines"), [(False, 1), (True, 2)])
def test_a_fault_of_ours_is_one_line_and_a_traceback_only_when_asked(
    verbose: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("wires crossed")

    monkeypatch.setattr("moetrt.doctor.examine", broken)
    assert cli.run(["doctor", *(["-v"] if verbose else [])]) == 3
    text = capsys.readouterr().err
    assert "unexpected RuntimeError: wires crossed" in text.splitlines()[-1]
    assert ("Traceback" in text) is verbose
    assert len(text.splitlines()) >= lines


def test_interruption_is_said_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moetrt.doctor.examine", interrupted)
    assert cli.run(["doctor"]) == 130
    assert capsys.readouterr().err == "moetrt: error: interrupted\n"


def test_commands_are_those_of_the_readme() -> None:
    assert isinstance(cli.cli, click.Group)
    assert set(cli.cli.commands) == {
        "export",
        "map",
        "inspect",
        "build",
        "compare",
        "bench",
        "report",
        "demo",
        "doctor",
    }
