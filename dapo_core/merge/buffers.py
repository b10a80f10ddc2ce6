"""Memory that is used again and again between a file and those who read or make its bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BUFFER_BYTES = 2 * 1024**2


def new_buffers(count: int) -> list[Bytes]:
    """Private memory, all of it given back when it is dropped."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [np.frombuffer(mmap.mmap(-1, BUFFER_BYTES, private), np.uint8) for _ in range(count)]


def write_all(descriptor: int, part: Bytes, offset: int) -> None:
    """Write the part at the offset, however often the system has to be asked."""
    written = 0
    while written < len(part):
        written += os.pwrite(descriptor, part[written:].data, offset + written)


def read_buffers(descriptor: int) -> Generator[Bytes, None, None]:
    """The file's bytes from its start; each part is valid until the next is asked for, which is read meanwhile."""
    buffers = new_buffers(2)

    def read(offset: int) -> int:
        return os.preadv(descriptor, [buffers[0].data], offset)

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
