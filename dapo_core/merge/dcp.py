"""Checkpoints of dapo train: the model's part of what torch.distributed.checkpoint wrote.

Values stay in the shards, memory-mapped. torch's own dcp.load copies each tensor twice, which for 0.56 GB took 1.7
times as long and 300 MiB instead of 4, and reads .metadata with a pickle that may run code.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from dapo_core.checkpoint.folder import (
    CHECKPOINTS,
    HUGGINGFACE_FOLDER,
    NAMES_FILE,
    PARTIAL,
    accuracy_of,
    best_checkpoints,
    latest_checkpoint,
)
from dapo_core.checkpoint.state import STATE_FILE, read_step, read_step_metrics
from dapo_core.errors import CheckpointError
from dapo_core.merge.sources import StoredTensor
from dapo_core.parameter_names import FilePiece, file_pieces

if TYPE_CHECKING:
    import torch

CheckpointChoice = Literal["latest", "best"]  # of a training output
METADATA_FILE = ".metadata"
MODEL_PREFIX = "model."
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
}
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: skips to the lengths of its name and of its extra field


class DcpSource:
    """A checkpoint of dapo train; implements Source."""

    def __init__(self, checkpoint: Path, other_folders: Sequence[Path] = ()) -> None:
        """`other_folders` are the same checkpoint, or its training's output, on other nodes.

        Raises CheckpointError when the metadata cannot be read, or a shard or part of a tensor is missing.
        """
        self.label = str(checkpoint)
        self.model_files = checkpoint / HUGGINGFACE_FOLDER
        self._folders = [checkpoint]
        for folder in other_folders:
            self._folders += [folder, folder / checkpoint.name, folder / "checkpoints" / checkpoint.name]
        self._metadata = _read_metadata(checkpoint)
        self._shards = self._require_shards()
        self._chunks: dict[str, list[Any]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for key, stored in self._metadata.state_dict_metadata.items():
            if key.startswith(MODEL_PREFIX) and hasattr(stored, "chunks"):
                name = key.removeprefix(MODEL_PREFIX)
                self._chunks[name] = _in_row_order(name, stored, self.label)
                self.tensors[name] = StoredTensor(tuple(stored.size), stored.properties.dtype)
        self._file_names = set(json.loads((checkpoint / NAMES_FILE).read_text(encoding="utf-8")))

    def pieces(self, name: str) -> list[FilePiece]:
        """Named as in the files of the model from which training began."""
        pieces = file_pieces(name, self.tensors[name].shape, self._file_names)
        if not pieces:
            raise CheckpointError(
                f"{name} of {self.label} has no counterpart among the {len(self._file_names)} names in "
                f"{NAMES_FILE}, so one of the two was changed; merge another checkpoint"
            )
        return pieces

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The rows that each rank saved."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        for chunk in self._chunks[name]:
            place = self._metadata.storage_data[MetadataIndex(MODEL_PREFIX + name, chunk.offsets)]
            try:
                with self._shards[place.relative_path].open("rb") as file:
                    block = _read(_Section(file, place.offset, place.length))
            except (RuntimeError, OSError, ValueError, struct.error, BadZipFile, pickle.UnpicklingError) as error:
                raise CheckpointError(_damaged(place.relative_path, name, self.label, error)) from error
            if block.shape != chunk.sizes or block.dtype != self.tensors[name].dtype:
                raise CheckpointError(
                    _damaged(place.relative_path, name, self.label, f"other than {[*chunk.sizes]}")
                )
            yield block

    def describe(self) -> dict[str, Any]:
        """With the training step and the validation accuracy, None when it was not measured."""
        checkpoint = Path(self.label)
        return {
            "format": "dapo",
            "name": checkpoint.name,
            "shards": len(self._shards),
            "step": read_step(checkpoint),
            "validation_accuracy": accuracy_of(read_step_metrics(checkpoint)),
        }

    def _require_shards(self) -> dict[str, Path]:
        """Each shard file in the metadata; raises CheckpointError for one that is missing or too short."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        shards = {}
        for name, end in sorted(ends.items()):
            path = next((path for folder in self._folders if (path := folder / name).is_file()), None)
            if path is None or path.stat().st_size < end:
                state = "missing" if path is None else f"{path.stat().st_size} bytes long instead of {end}"
                raise CheckpointError(
                    f"shard {name} of {len(ends)} in {self.label} is {state}; copy it from the node that wrote "
                    "it, or name that node's folder as a further source"
                )
            shards[name] = path
        return shards


def find_checkpoint(source: Path, choice: CheckpointChoice = "latest") -> Path:
    """The checkpoint that `source` is, or the newest or best one in the training output that it is.

    Raises CheckpointError when there is none.
    """
    candidates = [source, latest_checkpoint(source / CHECKPOINTS), latest_checkpoint(source)]
    if choice == "best":
        if (source / METADATA_FILE).is_file():
            raise CheckpointError(
                f"{source} is one checkpoint, so there is no best one to choose; name the output of dapo train, "
                "or leave out --checkpoint best"
            )
        candidates = [*best_checkpoints(source / CHECKPOINTS)]
        if not candidates:
            raise CheckpointError(
                f"no checkpoint of {source} was validated, so none is the best; set validation.every and "
                "checkpoint.keep_best before training, or merge the latest"
            )
    for candidate in candidates:
        if candidate is not None and (candidate / METADATA_FILE).is_file():
            _require_complete(candidate)
            return candidate
    raise CheckpointError(
        f"{source} holds no complete checkpoint: neither a folder step_NNNNNN with {METADATA_FILE}, as dapo train "
        "writes it, nor model_world_size_W_rank_R.pt, as verl does; train first, or pass the folder that holds it"
    )


def _require_complete(checkpoint: Path) -> None:
    if checkpoint.suffix == PARTIAL:
        raise CheckpointError(f"{checkpoint} was not finished; use the checkpoint before it")
    needed = (STATE_FILE, HUGGINGFACE_FOLDER, NAMES_FILE)
    missing = [name for name in needed if not (checkpoint / name).exists()]
    if missing:
        raise CheckpointError(f"{checkpoint} lacks {' and '.join(missing)}; it is not a checkpoint of dapo train")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of .metadata and nothing else: it runs no code, unlike torch's reader."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if name in _METADATA_CLASSES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def _read_metadata(checkpoint: Path) -> Any:
    try:
        with (checkpoint / METADATA_FILE).open("rb") as file:
            return _MetadataUnpickler(file).load()
    except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{METADATA_FILE} in {checkpoint} cannot be read ({error}), so no shard can be found; copy it from "
            "the node that wrote it, or merge another checkpoint"
        ) from error


def _in_row_order(name: str, stored: Any, label: str) -> list[Any]:
    """The parts of a tensor in the order of their rows; raises CheckpointError unless they are all of it."""
    chunks = sorted(stored.chunks, key=lambda chunk: tuple(chunk.offsets))
    if not stored.size:
        return chunks[:1]
    chunks = [chunk for chunk in chunks if chunk.sizes[0]]
    row = 0
    for chunk in chunks:
        if tuple(chunk.offsets) != (row, *[0] * (len(stored.size) - 1)) or chunk.sizes[1:] != stored.size[1:]:
            break
        row += chunk.sizes[0]
    if row != stored.size[0]:
        raise CheckpointError(
            f"{name} in {label} has {stored.size[0]} rows, of which the shards hold {row} in a row; "
            "merge another checkpoint"
        )
    return chunks


def _damaged(shard: str, name: str, label: str, what: object) -> str:
    return (
        f"shard {shard} in {label} is damaged: its part of {name} is {what}; copy the shard from the node that "
        "wrote it, or merge another checkpoint"
    )


def _read(section: _Section) -> torch.Tensor:
    """The tensor that torch.save wrote into the section, mapped at any byte, or copied if it must be."""
    import torch

    empty = torch.load(section, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    place = _plain_values(section)
    if not isinstance(empty, torch.Tensor) or not empty.is_contiguous() or place is None:
        section.seek(0)
        return torch.load(section, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    start, num_bytes = place
    first = int(empty.storage_offset()) * empty.itemsize
    if first + empty.nbytes > num_bytes:
        raise ValueError(f"{num_bytes} bytes, too few for {list(empty.shape)}")
    if not empty.nbytes:
        return torch.empty(empty.shape, dtype=empty.dtype)
    before = (start + first) % mmap.ALLOCATIONGRANULARITY
    # A private mapping, as torch.load makes it: torch warns of buffers that cannot be written to.
    mapped = mmap.mmap(
        section.fileno(), before + empty.nbytes, access=mmap.ACCESS_COPY, offset=start + first - before
    )
    values = torch.frombuffer(mapped, dtype=empty.dtype, count=empty.numel(), offset=before)
    return values.reshape(empty.shape)


def _plain_values(section: _Section) -> tuple[int, int] | None:
    """Offset in the file, and size, of the section's only storage; None unless its bytes are those of memory."""
    with ZipFile(section) as archive:
        records = archive.infolist()
        storages = [record for record in records if Path(record.filename).parent.name == "data"]
        orders = [archive.read(record) for record in records if Path(record.filename).name == "byteorder"]
        if len(storages) != 1 or storages[0].compress_type != ZIP_STORED or orders != [sys.byteorder.encode()]:
            return None
    section.seek(storages[0].header_offset)
    header = section.read(_LOCAL_HEADER.size)
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header or b"")
    return section.start + section.tell() + name_bytes + extra_bytes, storages[0].file_size


class _Section(io.RawIOBase):
    """A read-only file that shows one part of an open file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.start = start
        self._file, self._length, self._position = file, length, 0

    def fileno(self) -> int:
        return self._file.fileno()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self.start + self._position)
        view = memoryview(buffer).cast("B")
        count = self._file.readinto(view[: max(self._length - self._position, 0)])  # type: ignore[attr-defined]
        self._position += count
        return count
