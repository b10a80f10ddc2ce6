"""Files written and read past the kernel's page cache, where the file system can do that.

A merge passes every byte once: in the cache it would displace what others keep there, and finding pages for it
costs more than writing. What is read back comes from the disk, not from the memory that was written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BUFFER_BYTES = 2 * 1024**2  # a multiple of every block size, so that each buffer begins at a block
_BLOCK_BYTES = 4096


def new_buffers(count: int) -> list[Bytes]:
    """Memory at page boundaries, as the disk wants it, all of it given back when it is dropped."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [np.frombuffer(mmap.mmap(-1, BUFFER_BYTES, private), np.uint8) for _ in range(count)]


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of which whole buffers are written or read, at multiples of BUFFER_BYTES."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which is how a file system says that it always uses the cache
            raise
        descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_buffer(descriptor: int, buffer: Bytes, num_bytes: int, offset: int) -> None:
    """Write the first `num_bytes`, and what follows them up to the end of their block: the caller truncates."""
    end = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    written = 0
    while written < end:
        pwrite = partial(os.pwrite, descriptor, buffer[written:end].data, offset + written)
        written += _direct_or_not(descriptor, pwrite)


def read_buffers(descriptor: int) -> Generator[Bytes, None, None]:
    """The file's bytes from its start; each part is valid until the next is asked for, which is read meanwhile."""
    buffers = new_buffers(2)

    def read(offset: int) -> int:
        return _direct_or_not(descriptor, lambda: os.preadv(descriptor, [buffers[0].data], offset))

    with ThreadPoolExecutor(1, thread_name_prefix="merge-read") as ahead:
        offset, count = 0, BUFFER_BYTES
        running = ahead.submit(read, 0)
        while count == BUFFER_BYTES:
            count = running.result()
            buffers.reverse()
            if count == BUFFER_BYTES:
                offset += count
                running = ahead.submit(read, offset)
            yield buffers[1][:count]


def _direct_or_not(descriptor: int, action: Callable[[], int]) -> int:
    """What the action returns, through the cache where the file system wants other places or sizes."""
    try:
        return action()
    except OSError as error:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return action()
