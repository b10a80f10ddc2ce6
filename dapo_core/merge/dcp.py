"""Reads the model from a dapo train checkpoint (torch.distributed.checkpoint)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Literal

from dapo_core.checkpoint.archive import VALUES, Section, read_records
from dapo_core.checkpoint.folder import (
    CHECKPOINTS,
    HUGGINGFACE_FOLDER,
    NAMES_FILE,
    PARTIAL,
    accuracy_of,
    best_checkpoints,
    latest_checkpoint,
)
from dapo_core.checkpoint.manifest import MANIFEST_FILE, Manifest, require_files
from dapo_core.checkpoint.metadata import METADATA_FILE, read_metadata
from dapo_core.checkpoint.state import STATE_FILE, read_state_without_groups
from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import Part
from dapo_core.merge.sources import Block, StoredTensor
from dapo_core.model.names import FilePiece, file_pieces

CheckpointChoice = Literal["latest", "best"]  # which checkpoint of a training output
MODEL_PREFIX = "model."


class DcpSource:
    """A dapo train checkpoint; implements Source."""

    def __init__(self, checkpoint: Path, other_folders: Sequence[Path] = ()) -> None:
        """Open the checkpoint; `other_folders` are its copies or outputs on other nodes.

        Raises CheckpointError if the metadata cannot be read, or a shard or part of a tensor is
        missing.
        """
        self.label = str(checkpoint)
        self.model_files = checkpoint / HUGGINGFACE_FOLDER
        self._folders = [checkpoint]
        for folder in other_folders:
            self._folders += [
                folder,
                folder / checkpoint.name,
                folder / "checkpoints" / checkpoint.name,
            ]
        self._parts = _parts_by_place(require_files(checkpoint))
        self._metadata = read_metadata(checkpoint)
        self._shards = self._require_shards()
        self._chunks: dict[str, list[Any]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for key, stored in self._metadata.state_dict_metadata.items():
            if key.startswith(MODEL_PREFIX) and hasattr(stored, "chunks"):
                name = key.removeprefix(MODEL_PREFIX)
                self._chunks[name] = _in_row_order(name, stored, self.label)
                self.tensors[name] = StoredTensor(tuple(stored.size), stored.properties.dtype)
        self._file_names = _file_names(checkpoint)

    def pieces(self, name: str) -> list[FilePiece]:
        """Pieces named as in the files of the initial model."""
        pieces = file_pieces(name, self.tensors[name].shape, self._file_names)
        if not pieces:
            raise CheckpointError(
                f"{name} in {self.label} has no counterpart among the {len(self._file_names)} "
                f"names in {NAMES_FILE}, so one of the two was changed; merge another checkpoint"
            )
        return pieces

    def blocks(self, name: str) -> list[Block]:
        """The rows saved by each rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        blocks = []
        for chunk in self._chunks[name]:
            place = self._metadata.storage_data[MetadataIndex(MODEL_PREFIX + name, chunk.offsets)]
            blocks.append(self._block(name, chunk, place))
        return [block for block in blocks if block.num_bytes]

    def describe(self) -> dict[str, Any]:
        """Manifest entry with the training step and the validation accuracy, if measured."""
        checkpoint = Path(self.label)
        state = read_state_without_groups(checkpoint)
        return {
            "format": "dapo",
            "name": checkpoint.name,
            "shards": len(self._shards),
            "step": state.step,
            "validation_accuracy": accuracy_of(state.metrics),
        }

    def _block(self, name: str, chunk: Any, place: Any) -> Block:
        """Locate the values in the archive that torch.save wrote to the shard."""
        import torch

        path, stored = self._shards[place.relative_path], self.tensors[name]
        label = f"shard {place.relative_path} in {self.label} is damaged: its part of {name}"
        with path.open("rb") as file:
            records = read_records(file, label, place.offset, place.length, has_crc32s=False)
            section: Any = Section(file, place.offset, place.length)
            try:
                empty = torch.load(section, map_location="meta", weights_only=True)
            except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{label} cannot be read ({error})") from error
        values = [
            record for record_name, record in records.items() if record_name.startswith(VALUES)
        ]
        num_bytes = prod(chunk.sizes) * stored.dtype.itemsize
        if (
            not isinstance(empty, torch.Tensor)
            or (empty.shape, empty.dtype) != (chunk.sizes, stored.dtype)
            or not empty.is_contiguous()
            or len(values) != 1
            or values[0].num_bytes
            < (first := int(empty.storage_offset()) * empty.itemsize) + num_bytes
        ):
            raise CheckpointError(f"{label} is not {[*chunk.sizes]} {stored.dtype}")
        record = values[0]
        offset = record.offset + first
        length, digest = self._parts.get((place.relative_path, place.offset), (0, ""))
        if length != place.length:
            raise CheckpointError(
                f"{label} is not in {MANIFEST_FILE}, so the two belong to different checkpoints"
            )
        return Block(path, offset, num_bytes, place.offset, place.offset + length, digest)

    def _require_shards(self) -> dict[str, Path]:
        """Return the shards' paths; raises CheckpointError if one is missing or too short."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(
                ends.get(place.relative_path, 0), place.offset + place.length
            )
        shards = {}
        for name, end in sorted(ends.items()):
            path = next(
                (path for folder in self._folders if (path := folder / name).is_file()), None
            )
            if path is None or path.stat().st_size < end:
                state = (
                    "missing"
                    if path is None
                    else f"{path.stat().st_size} bytes long instead of {end}"
                )
                raise CheckpointError(
                    f"shard {name} of {len(ends)} in {self.label} is {state}; copy it from the "
                    "node that wrote it, or pass that node's folder as an additional source"
                )
            shards[name] = path
        return shards


def find_checkpoint(source: Path, choice: CheckpointChoice = "latest") -> Path:
    """Return `source` if it is a checkpoint, else the latest or best one in that training output.

    Raises CheckpointError if there is none.
    """
    candidates = [source, latest_checkpoint(source / CHECKPOINTS), latest_checkpoint(source)]
    if choice == "best":
        if (source / METADATA_FILE).is_file():
            raise CheckpointError(
                f"{source} is one checkpoint, so there is no best one to choose; pass the output "
                "of dapo train, or omit --checkpoint best"
            )
        candidates = [*best_checkpoints(source / CHECKPOINTS)]
        if not candidates:
            raise CheckpointError(
                f"no checkpoint in {source} was validated, so there is no best one; set "
                "validation.every and checkpoint.keep_best before training, or merge the latest"
            )
    for candidate in candidates:
        if candidate is not None and (candidate / METADATA_FILE).is_file():
            _require_complete(candidate)
            return candidate
    raise CheckpointError(
        f"{source} has no complete checkpoint: neither a step_NNNNNN folder with {METADATA_FILE} "
        "(dapo train) nor "
        "model_world_size_W_rank_R.pt (verl); train first, or pass the folder that contains it"
    )


def _require_complete(checkpoint: Path) -> None:
    if checkpoint.suffix == PARTIAL:
        raise CheckpointError(f"{checkpoint} is incomplete; use the previous checkpoint")
    needed = (STATE_FILE, HUGGINGFACE_FOLDER, NAMES_FILE)
    missing = [name for name in needed if not (checkpoint / name).exists()]
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {' and '.join(missing)}; it is not a dapo train checkpoint"
        )


def _parts_by_place(manifest: Manifest) -> dict[tuple[str, int], Part]:
    """Return the parts of all files by file name and offset."""
    return {
        (name, offset): part
        for name, parts in manifest.files.items()
        for offset, part in zip(
            accumulate((size for size, _ in parts), initial=0), parts, strict=False
        )
    }


def _file_names(checkpoint: Path) -> set[str]:
    try:
        names = json.loads((checkpoint / NAMES_FILE).read_text(encoding="utf-8"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it is not a list of names")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint / NAMES_FILE} cannot be read ({error}); copy it from another checkpoint "
            "of this training"
        ) from error
    return set(names)


def _in_row_order(name: str, stored: Any, label: str) -> list[Any]:
    """Return a tensor's chunks in row order; raises CheckpointError unless they cover all rows."""
    chunks = sorted(stored.chunks, key=lambda chunk: tuple(chunk.offsets))
    if not stored.size:
        return chunks[:1]
    chunks = [chunk for chunk in chunks if chunk.sizes[0]]
    row = 0
    for chunk in chunks:
        if (
            tuple(chunk.offsets) != (row, *[0] * (len(stored.size) - 1))
            or chunk.sizes[1:] != stored.size[1:]
        ):
            break
        row += chunk.sizes[0]
    if row != stored.size[0]:
        raise CheckpointError(
            f"{name} in {label} has {stored.size[0]} rows, but the shards hold only the first "
            f"{row}; merge another checkpoint"
        )
    return chunks
