"""Memory of tensors, kept in a file meanwhile: what offloading is where the device's memory is the host's."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from typing import IO, Any

import torch


class Spill:
    """Tensors whose memory is in a file of TMPDIR, which has no name and ends with the process.

    They remain the same objects, with all their views. Until `restore`, their elements must not be touched.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Writes the tensors and frees their memory, one after the other. Raises OSError if the disk is full."""
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open until `restore`
        self._spilled: list[tuple[torch.UntypedStorage, int]] = []
        for storage in {tensor.data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
            num_bytes = storage.nbytes()
            if num_bytes:
                self._file.write(_elements(storage, num_bytes))
                self._spilled.append((storage, num_bytes))
                storage.resize_(0)
        self._file.flush()
        # malloc keeps what is freed below its threshold, which grows with use.
        ctypes.CDLL(None).malloc_trim(0)

    def restore(self) -> None:
        """Read the tensors back and remove the file."""
        self._file.seek(0)
        for storage, num_bytes in self._spilled:
            storage.resize_(num_bytes)
            self._file.readinto(_elements(storage, num_bytes))  # type: ignore[attr-defined]
        self._file.close()


def _elements(storage: torch.UntypedStorage, num_bytes: int) -> Any:
    """The storage's memory as a buffer; a numpy array would make it one that cannot be resized."""
    return (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
