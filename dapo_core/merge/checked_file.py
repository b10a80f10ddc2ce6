"""A file that is compared with what was meant for it while it is on its way to the disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dapo_core.errors import CheckpointError

PART_BYTES = 1024**2  # written and read back at once, while it is in the processor's cache
# The kernel takes page cache in blocks as large as the write. While free, those of 128 KiB and more are given back
# to a virtual machine's host, which is slow to find them again.
_WRITE_BYTES = 64 * 1024
_ON_ITS_WAY_BYTES = 16 * 1024**2  # given to the disk at once
_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h: begin, and wait for nothing
_LIBC = ctypes.CDLL(None)


class CheckedFile:
    """A new file, written from its first byte to its last."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._num_bytes = self._num_on_their_way = 0
        self._read_back = bytearray(PART_BYTES)

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def append(self, values: memoryview, what: str) -> None:
        """Write bytes and read them back; raises CheckpointError, which names `what`, when they differ.

        The disk begins to take them while more is written, so that little is left to sync.
        """
        for start in range(0, len(values), PART_BYTES):
            part = values[start : start + PART_BYTES]
            self._write(part)
            if self._last(len(part)) != part:
                raise CheckpointError(
                    f"{self._name}: {what} read back differs from the checkpoint; is the disk sound?"
                )
        if self._num_bytes - self._num_on_their_way >= _ON_ITS_WAY_BYTES:
            self._begin_sync()

    def sync(self) -> None:
        """Wait until the disk has all of it."""
        os.fsync(self._descriptor)

    def _write(self, part: memoryview) -> None:
        while len(part):
            count = _WRITE_BYTES - self._num_bytes % _WRITE_BYTES
            written = os.pwrite(self._descriptor, part[:count], self._num_bytes)
            self._num_bytes += written
            part = part[written:]

    def _last(self, count: int) -> bytearray:
        """What the file has for the last `count` bytes, or less."""
        read, view = 0, memoryview(self._read_back)[:count]
        while more := os.preadv(self._descriptor, [view[read:]], self._num_bytes - count + read):
            read += more
        return self._read_back if read == PART_BYTES else self._read_back[:read]

    def _begin_sync(self) -> None:
        """A hint, whose result does not matter: fsync reports what goes wrong."""
        start, count = self._num_on_their_way, self._num_bytes - self._num_on_their_way
        _LIBC.sync_file_range(
            self._descriptor, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE
        )
        self._num_on_their_way = self._num_bytes
