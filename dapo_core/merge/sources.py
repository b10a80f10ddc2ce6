"""What a merge reads: a model in shards, by the names and rows of its whole tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3
from zlib_ng import zlib_ng  # ten times as fast as zlib's CRC

from dapo_core.digests import CHUNK_BYTES
from dapo_core.errors import CheckpointError
from dapo_core.parameter_names import FilePiece

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
    """A whole tensor of a source; its values are still in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Block:
    """Consecutive values of a tensor in a file, inside the bytes that one checksum covers."""

    path: Path
    offset: int  # of the first value in the file
    num_bytes: int  # of the values
    start: int  # of the bytes under the checksum
    end: int
    checksum: int | str | None  # CRC32 or blake3 of them; None: checked when the source was opened

    def read(self) -> Iterator[memoryview]:
        """The values, in parts of at most CHUNK_BYTES, each valid until this thread reads the next one.

        Raises CheckpointError, which names the file, when it is too short or its bytes do not have the checksum.
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
                f"{self.path} is damaged or from another checkpoint: bytes {self.start:,} to {self.end:,} do not "
                "have the checksum that was taken when they were written; copy the file again from the node that "
                "wrote it, or merge another checkpoint"
            )

    def _range(self, descriptor: int, buffer: memoryview, start: int, end: int) -> Iterator[memoryview]:
        while start < end:
            part = buffer[: min(len(buffer), end - start)]
            done = 0
            while done < len(part):
                count = os.preadv(descriptor, [part[done:]], start + done)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at {start + done:,} bytes; copy it again from the node that wrote it"
                    )
                done += count
            yield part
            start += len(part)


_BUFFERS = threading.local()  # one for each thread: new memory costs as much as reading into it


def _thread_buffer() -> memoryview:
    if not hasattr(_BUFFERS, "buffer"):
        _BUFFERS.buffer = memoryview(bytearray(CHUNK_BYTES))
    return _BUFFERS.buffer


class _Checksum:
    """CRC32, blake3 or nothing of the bytes that pass."""

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
    """A checkpoint, found complete when it was opened."""

    @property
    def label(self) -> str:
        """Its name in errors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By the names that the ranks used, in the order of the model."""

    @property
    def model_files(self) -> Path:
        """Folder with the model's configuration and tokenizer."""

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensors of the model's files that the tensor becomes, in the order of its rows."""

    def blocks(self, name: str) -> list[Block]:
        """Where the values of the whole tensor lie, in row-major order."""

    def describe(self) -> dict[str, Any]:
        """The manifest's entry about the source, without paths: the same model has the same manifest."""
