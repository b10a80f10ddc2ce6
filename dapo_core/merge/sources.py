"""The interface of merge sources: sharded models read as whole tensors, block by block."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3
from zlib_ng import zlib_ng  # ten times as fast as zlib's CRC

from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import CHUNK_BYTES
from dapo_core.model.names import FilePiece

if TYPE_CHECKING:
    import torch


DTYPE_CODES = {  # torch's name: safetensors' code
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a whole tensor; its values stay in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Readable(Protocol):
    """Consecutive tensor values."""

    def read(self) -> Iterator[memoryview]:
        """Yield the values in parts, each valid until this thread reads the next one."""


@dataclass(frozen=True)
class Block:
    """Consecutive tensor values in a file, within a byte range that has a checksum."""

    path: Path
    offset: int  # of the first value in the file
    num_bytes: int  # of the values
    start: int  # of the byte range with the checksum
    end: int
    # CRC32 or blake3 of the range; None: verified when the source was opened
    checksum: int | str | None

    def read(self) -> Iterator[memoryview]:
        """Yield the values in parts, each valid until this thread reads the next one.

        Raises CheckpointError, naming the file, if it is too short or the checksum does not match.
        """
        checksum = _Checksum(self.checksum)
        end = self.offset + self.num_bytes
        buffer = _thread_buffer()
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if self.checksum is not None:
                for part in self._range(descriptor, buffer, self.start, self.offset):
                    checksum.update(part)
            for part in self._range(descriptor, buffer, self.offset, end):
                checksum.update(part)
                yield part
            if self.checksum is not None:
                for part in self._range(descriptor, buffer, end, self.end):
                    checksum.update(part)
        finally:
            os.close(descriptor)
        if not checksum.is_right():
            raise CheckpointError(
                f"{self.path} is damaged or from another checkpoint: bytes {self.start:,} to "
                f"{self.end:,} do not match the checksum taken when they were written; copy the "
                "file again from the node that wrote it, or merge another checkpoint"
            )

    def _range(
        self, descriptor: int, buffer: memoryview, start: int, end: int
    ) -> Iterator[memoryview]:
        while start < end:
            part = buffer[: min(len(buffer), end - start)]
            done = 0
            while done < len(part):
                count = os.preadv(descriptor, [part[done:]], start + done)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at {start + done:,} bytes; copy it again from the node "
                        "that wrote it"
                    )
                done += count
            yield part
            start += len(part)


# reused per thread: allocating memory costs as much as reading into it
_BUFFERS = threading.local()


def _thread_buffer() -> memoryview:
    if not hasattr(_BUFFERS, "buffer"):
        _BUFFERS.buffer = memoryview(bytearray(CHUNK_BYTES))
    return _BUFFERS.buffer


class _Checksum:
    """Incremental CRC32 or blake3, depending on the expected value; None computes nothing."""

    def __init__(self, expected: int | str | None) -> None:
        self._expected = expected
        self._crc32, self._blake3 = 0, blake3()

    def update(self, part: memoryview) -> None:
        if isinstance(self._expected, int):
            self._crc32 = zlib_ng.crc32(part, self._crc32)
        elif self._expected is not None:
            self._blake3.update(part)

    def is_right(self) -> bool:
        return self._expected in (
            None,
            self._crc32 if isinstance(self._expected, int) else self._blake3.hexdigest(),
        )


class Source(Protocol):
    """A checkpoint that was verified to be complete when it was opened."""

    @property
    def label(self) -> str:
        """Name of the checkpoint in errors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by the ranks' names, in model order."""

    @property
    def model_files(self) -> Path:
        """Folder with the model's configuration and tokenizer."""

    def pieces(self, name: str) -> list[FilePiece]:
        """Tensors of the model's files that this tensor is split into, in row order."""

    def blocks(self, name: str) -> Sequence[Readable]:
        """Positions of the whole tensor's values, in row-major order."""

    def describe(self) -> dict[str, Any]:
        """Manifest entry of the source, without paths: the same model gives the same manifest."""
