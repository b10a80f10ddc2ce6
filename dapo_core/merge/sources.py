"""What a merge reads: a model in shards, by the names and rows of its whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch


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
        """Consecutive rows of the tensor, which together are all of it; a tensor without dimensions is one."""

    def describe(self) -> dict[str, Any]:
        """Where the model comes from, for the manifest; no path, since the same model has the same manifest."""


def open_source(folders: Sequence[Path]) -> Source:
    """The checkpoint of ours, or of verl, whose shards lie in the folders: one, or one of each node.

    Raises CheckpointError when it is incomplete, naming the shard.
    """
    from dapo_core.merge.dcp import DcpSource, find_checkpoint
    from dapo_core.merge.verl import VerlSource, find_shards

    shards = find_shards(folders)
    return VerlSource(shards) if shards else DcpSource(find_checkpoint(folders[0]), folders[1:])
