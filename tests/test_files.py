"""Outputs replace nothing but regular files of their own, and every refusal names the path as it was given."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moetrt.errors import InputError, InputTypeError
from moetrt.files import as_path, check_distinct, existing_file, output_directory, output_file, write_atomically


def written(path: Path, text: str = "new") -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(text)


def refusal(path: object) -> str:
    """The line with which writing to ``path`` is refused; the block never runs."""
    with pytest.raises(InputError) as error, write_atomically(path):  # type: ignore[arg-type]
        raise AssertionError("the block ran")
    assert "\n" not in str(error.value)
    return str(error.value)


def existing(path: object) -> object:
    return existing_file(path, "output file")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [as_path, existing, output_file, output_directory, lambda p: refusal(p)])
@pytest.mark.parametrize("value", [None, 3, b"x", ["a"], object()], ids=lambda value: type(value).__name__)
def test_what_is_no_path(function: Callable[..., object], value: object) -> None:
    arguments = (value, "output file") if function is as_path else (value,)
    with pytest.raises(InputTypeError, match=f"was .*of type {type(value).__name__}; a path is taken: a str or a Path"):
        function(*arguments)


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_paths_that_name_no_file(value: str) -> None:
    assert "a path is taken" in refusal(value)
    for function in (existing, output_file, output_directory):
        with pytest.raises(InputError, match=r"was .*; a path is taken"):
            function(value)


def test_files_to_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        existing_file(tmp_path / "none", "model")
    with pytest.raises(InputError, match="is not a file"):
        existing_file(tmp_path, "model")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"model '.*loop' cannot be read: Too many levels"):
        existing_file(tmp_path / "loop", "model")
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        existing_file(tmp_path / ("n" * 300), "model")
    (tmp_path / "there").write_text("")
    assert existing_file(str(tmp_path / "there"), "model") == tmp_path / "there"
    with pytest.raises(InputError, match="does not exist"):
        existing_file(tmp_path / "there" / "below", "model")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'/dev/full' is a device; a regular file is taken" in refusal("/dev/full")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    assert f"'{pipe}' is a named pipe" in refusal(pipe)
    link.symlink_to("/dev/null")
    assert f"'{link}' is a device" in refusal(link)
    assert link.is_symlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # short, since the system takes about 100 characters
        assert "is a socket" in refusal(tmp_path / "socket")
    assert f"'{tmp_path}' is a folder" in refusal(tmp_path)
    assert "cannot be written: File name too long" in refusal(tmp_path / ("n" * 300))
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "socket"]


def test_a_read_only_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    path.chmod(0o444)
    assert "the file there is read-only" in refusal(path)
    assert path.read_text() == "old"


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    link.symlink_to(real)
    for text in ("first", "second"):  # the first time it leads to nothing yet
        written(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert os.listdir(tmp_path / "far") == ["real"]


def test_folders_are_made_and_removed_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    with pytest.raises(FileNotFoundError, match="none"), write_atomically(path) as temporary:
        os.rename(temporary.parent.parent / "none", temporary)
    assert os.listdir(tmp_path) == []
    written(path)
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file"]


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for below in (file / "x", file / "y" / "x"):
        assert f"'{below.parent}' cannot be written: '{file}' is not a folder" in refusal(below)
    assert refusal("/proc/x") == "output folder '/proc' cannot be written: '/proc' takes no new files"
    assert "'/proc/self' takes no new files" in refusal("/proc/self/below/x")
    with pytest.raises(InputError, match=f"output folder '{file}' cannot be written: '{file}' is not a folder"):
        output_directory(file)


def test_one_file_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.write_text("")
    (tmp_path / "hard").hardlink_to(model)
    (tmp_path / "soft").symlink_to(model)
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in ("model", "hard", "soft", "folder/model", str(model)):
        with pytest.raises(InputError, match=f"^report '{name}' is the ONNX model itself.*; another name is taken$"):
            check_distinct([("ONNX model", model)], [("output file", "other"), ("report", name)])
    with pytest.raises(InputError, match=r"^report 'folder/new' is the output file itself, 'new'; another name is"):
        check_distinct([], [("output file", "new"), ("report", "folder/new")])
    # Inputs may be one file, and so may names that only look alike.
    check_distinct([("a", model), ("b", "hard")], [("output file", "new"), ("report", "new.json")])
    with pytest.raises(InputTypeError, match="report was None"):
        check_distinct([], [("report", None)])  # type: ignore[list-item]
