"""Ranges of files are copied byte for byte, with their holes."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrt import file_copy
from moetrt.errors import InputError
from moetrt.file_copy import copy_range, data_ranges, shares_blocks

MIB = 1 << 20
ISLANDS = {0: b"a" * 5000, 10 * MIB + 7: b"b" * 100_000, 30 * MIB: b"c" * (20 * MIB), 60 * MIB: b"d"}
SIZE = 64 * MIB


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 MiB of which four parts are data and the rest is hole."""
    path = tmp_path_factory.mktemp("sparse") / "sparse.bin"
    with path.open("wb") as file:
        for offset, content in ISLANDS.items():
            file.seek(offset)
            file.write(content)
        file.truncate(SIZE)
    return path


@contextmanager
def opened(source: Path, target: Path) -> Iterator[tuple[int, int]]:
    with source.open("rb") as one, target.open("wb") as other:
        yield one.fileno(), other.fileno()


def copied(source: Path, offset: int, length: int, target: Path, place: int) -> list[int]:
    with opened(source, target) as (one, other):
        pieces = list(copy_range(one, offset, length, other, place))
        os.ftruncate(other, place + length)
    return pieces


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_holes_stay_holes(sparse: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.bin"
    pieces = copied(sparse, 0, SIZE, target, 0)
    assert target.read_bytes() == sparse.read_bytes()
    # A part of data ends where a block of the file system does.
    block = os.statvfs(tmp_path).f_bsize
    least = sum(len(content) for content in ISLANDS.values())
    assert least <= sum(pieces) <= least + 2 * len(ISLANDS) * block
    assert disk_bytes(target) <= least + (2 * len(ISLANDS) + 8) * block
    assert max(pieces) <= 16 * MIB


def test_a_file_that_is_all_hole_costs_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "hole.bin", tmp_path / "copy.bin"
    with source.open("wb") as file:
        file.truncate(1 << 40)
    assert copied(source, 4096, (1 << 40) - 4096, target, 0) == []
    assert target.stat().st_size == (1 << 40) - 4096
    assert disk_bytes(target) == 0


edges = st.sampled_from([0, 4095, 4096, 5000, 5001, 10 * MIB, 10 * MIB + 8, 30 * MIB, 50 * MIB, 60 * MIB + 1, SIZE])


@settings(max_examples=20, deadline=None)
@given(start=edges, stop=edges, place=st.sampled_from([0, 1, 4096, 5 * MIB + 3]))
def test_any_range_to_any_place(
    start: int, stop: int, place: int, sparse: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    start, stop = sorted((start, stop))
    target = tmp_path_factory.mktemp("any") / "copy.bin"
    copied(sparse, start, stop - start, target, place)
    assert target.read_bytes() == bytes(place) + sparse.read_bytes()[start:stop]
    target.unlink()


def _raises(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    "call", [_raises(errno.EXDEV), _raises(errno.EINVAL), _raises(errno.ENOSYS), lambda *_: 0], ids="XIN0"
)
def test_where_the_kernel_does_not_copy_python_does(
    call: Callable[..., int], sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", call)
    target = tmp_path / "copy.bin"
    copied(sparse, 3, SIZE - 3, target, 5)
    assert target.read_bytes() == bytes(5) + sparse.read_bytes()[3:]
    assert disk_bytes(target) < 21 * MIB


def test_a_full_disk_is_no_reason_to_try_again(sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", _raises(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        copied(sparse, 0, SIZE, tmp_path / "copy.bin", 0)


@pytest.mark.parametrize("size", [SIZE, 60 * MIB + 1, 100], ids=["ends in a hole", "ends in data", "short"])
def test_a_source_that_ends_early(size: int, sparse: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    copied(sparse, 0, size, source, 0)
    with pytest.raises(InputError, match="it ended 17 bytes early"):
        copied(source, 10, size + 7, tmp_path / "copy.bin", 0)


def test_a_source_that_is_cut_while_it_is_copied(sparse: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    copied(sparse, 0, SIZE, source, 0)
    with opened(source, tmp_path / "copy.bin") as (one, other):
        pieces = copy_range(one, 0, SIZE, other, 0)
        next(pieces)
        os.truncate(source, 40 * MIB)
        with pytest.raises(InputError, match=f"it ended {24 * MIB} bytes early"):
            list(pieces)


def test_data_ranges_are_those_of_the_range_alone(sparse: Path) -> None:
    with sparse.open("rb") as file:
        assert list(data_ranges(file.fileno(), 100, 200)) == [(100, 200)]
        assert list(data_ranges(file.fileno(), 20 * MIB, MIB)) == []
        assert list(data_ranges(file.fileno(), 29 * MIB, 2 * MIB)) == [(30 * MIB, MIB)]
        assert list(data_ranges(file.fileno(), 62 * MIB, 2 * MIB)) == []
        assert list(data_ranges(file.fileno(), 0, 0)) == []


@pytest.mark.parametrize("shared", [True, False])
def test_asking_for_shared_blocks_leaves_the_target_empty(
    shared: bool, sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: int, request: int, argument: bytes) -> int:
        if not shared:
            raise OSError(errno.EOPNOTSUPP, "not here")
        os.ftruncate(target, SIZE)
        return 0

    monkeypatch.setattr(file_copy.fcntl, "ioctl", clone)
    target = tmp_path / "copy.bin"
    with opened(sparse, target) as (one, other):
        assert shares_blocks(one, other) is shared
    assert target.stat().st_size == 0
