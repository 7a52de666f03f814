"""Bytes go from file to file inside the kernel: holes stay holes, and blocks are shared where the file system can."""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator

from moetrt.errors import InputError

# What one call copies: short enough for progress to move, and the most that ever is in memory.
_CHUNK = 1 << 24
# From linux/fs.h: an ioctl by which a range of one file shares its blocks with another.
_FICLONERANGE = 0x4020940D
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What copy_file_range says where the kernel cannot copy between these two file systems."""


def data_ranges(file: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The parts of a range of an open file that are not holes, each as its offset and length in bytes.

    Where the file system knows of no holes, all of the range is one part.
    """
    end = offset + length
    while offset < end:
        try:
            start = os.lseek(file, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the file's end
                return
            raise
        if start >= end:
            return
        offset = min(end, os.lseek(file, start, os.SEEK_HOLE))
        yield start, offset - start


def copy_range(source: int, offset: int, length: int, target: int, place: int) -> Iterator[int]:
    """Copies a range of the open file ``source`` to ``place`` in the open file ``target``, as the iterator is consumed.

    Holes are skipped, so the target must be a hole there: a new file is. Its length is the caller's to set.

    Yields:
        how many bytes were copied, after each piece of the work.

    Raises:
        InputError: the source ended early.
    """
    for start, size in data_ranges(source, offset, length):
        left = size
        while left:
            at = start + size - left
            copied = _copy_some(source, at, min(left, _CHUNK), target, place + at - offset)
            if not copied:
                break
            left -= copied
            yield copied
        if left:
            break
    short = offset + length - os.fstat(source).st_size
    if short > 0:
        raise InputError(f"it ended {short} bytes early; it was cut short while being read")


def _copy_some(source: int, offset: int, count: int, target: int, place: int) -> int:
    try:
        copied = os.copy_file_range(source, target, count, offset, place)
        # Some kernels say 0 for files of some file systems that hold more.
        if copied:
            return copied
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    return os.pwrite(target, os.pread(source, count, offset), place)


def shares_blocks(source: int, target: int) -> bool:
    """Whether the new, empty open file ``target`` can have the blocks of ``source``, so that a copy takes no space."""
    try:
        # A length of 0 is all of the source.
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, 0, 0, 0))
    except OSError:
        return False
    os.ftruncate(target, 0)
    return True
