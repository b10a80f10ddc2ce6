"""What a merge reads: a model in shards, by the names and rows of its whole tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dapo_core.errors import CheckpointError
from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch


CheckpointChoice = Literal["latest", "best"]  # of a training output
CHUNK_BYTES = 1024**2  # of a tensor at once; read, hashed and written while it is in the processor's cache


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a source, whose values are still in its files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint, found complete when it was opened."""

    @property
    def label(self) -> str:
        """What errors call it."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By the names that the ranks used, in the order of the model."""

    @property
    def model_files(self) -> Path:
        """Folder with the model's configuration and tokenizer."""

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensors of a model's files that the tensor becomes, in the order of its rows."""

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Consecutive rows of the tensor, which together are all of it; a tensor without dimensions is one.

        They may lie in a mapped file, at any byte: use values_in_order before computing with them.
        """

    def describe(self) -> dict[str, Any]:
        """Where the model comes from, for the manifest; no path, since the same model has the same manifest."""


def open_source(folders: Sequence[Path], checkpoint: CheckpointChoice = "latest") -> Source:
    """The checkpoint of ours, or of verl, whose shards lie in the folders: one, or one of each node.

    `checkpoint` chooses among those of a training output. Raises CheckpointError when there is none, or when it is
    incomplete, naming the shard.
    """
    from dapo_core.merge.dcp import DcpSource, find_checkpoint
    from dapo_core.merge.verl import VerlSource, find_shards

    shards = find_shards(folders)
    if shards and checkpoint == "best":
        raise CheckpointError(
            f"{folders[0]} is one checkpoint of verl, so there is no best one to choose; "
            "leave out --checkpoint best"
        )
    return VerlSource(shards) if shards else DcpSource(find_checkpoint(folders[0], checkpoint), folders[1:])


def values_in_order(rows: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """All values in `dtype`, flat, in parts of at most CHUNK_BYTES; no part is empty.

    A part shares the memory of `rows` where the dtype is theirs, and has its own, aligned memory otherwise.
    """
    import torch

    for part in rows.contiguous().reshape(-1).split(CHUNK_BYTES // rows.dtype.itemsize):
        if part.dtype == dtype and part.numel():
            yield part
        elif part.numel():
            if part.data_ptr() % part.itemsize:
                aligned = _own(part.numel(), part.dtype)
                aligned.view(torch.uint8).copy_(part.view(torch.uint8))
            else:
                aligned = part
            yield _own(part.numel(), dtype).copy_(aligned)


def _own(count: int, dtype: torch.dtype) -> torch.Tensor:
    """New memory, gone with its last reader; what other threads give back to malloc, malloc would keep."""
    import torch

    memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
