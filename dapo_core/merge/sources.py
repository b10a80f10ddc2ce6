"""What a merge reads: a model in shards, by the names and rows of its whole tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1024**2  # of a tensor at once: read, hashed and written while it is in the processor's cache


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a source; its values are still in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Consecutive rows of the tensor, together all of it; a tensor without dimensions is one block.

        A block may be a view of a mapped file at any byte: use values_in_order before computing with it.
        """

    def describe(self) -> dict[str, Any]:
        """The manifest's entry about the source, without paths: the same model has the same manifest."""


def values_in_order(rows: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """All values in `dtype`, flat, in parts of at most CHUNK_BYTES; no part is empty.

    A part shares the memory of `rows` if it has its dtype, else it is an aligned copy.
    """
    import torch

    for part in rows.contiguous().reshape(-1).split(CHUNK_BYTES // rows.dtype.itemsize):
        if not part.numel():
            continue
        if part.dtype == dtype:
            yield part
            continue
        if part.data_ptr() % part.itemsize:
            aligned = _new_memory(part.numel(), part.dtype)
            aligned.view(torch.uint8).copy_(part.view(torch.uint8))
            part = aligned
        yield _new_memory(part.numel(), dtype).copy_(part)


def _new_memory(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that returns to the system with its last reader; malloc would keep what other threads free."""
    import torch

    memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
