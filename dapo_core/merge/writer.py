"""The files of a merged model: planned first, then hashed, written and read back while the tensors are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import CheckpointError
from dapo_core.merge.sources import Source, values_in_order
from dapo_core.model_folder import INDEX_FILE, MERGE_MANIFEST
from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch

# The kernel takes page cache in blocks as large as the write. In a virtual machine, free blocks of 128 KiB and
# more may go back to the host, which is slow to return them.
WRITE_BYTES = 64 * 1024
FLUSH_BYTES = 16 * 1024**2  # handed to the disk at once, so that little is left for the final fsync
_DTYPES = {  # as safetensors calls them
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
class OutputTensor:
    """A tensor of the merged folder, before its values are read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_name: str  # of the source's tensor
    piece: FilePiece  # the part of it

    @property
    def num_bytes(self) -> int:
        """In its file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype as safetensors calls it; raises CheckpointError for one that it lacks."""
        name = str(self.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise CheckpointError(
                f"{self.name} is {name}, which safetensors files cannot hold; pass --dtype float32"
            )
        return _DTYPES[name]


@dataclass
class OutputFile:
    """A safetensors file and its tensors, in this order."""

    name: str
    tensors: list[OutputTensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """The file's first bytes: length and JSON, padded so that values begin at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            start, end = end, end + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": tensor.dtype_name,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class FileDigests:
    """sha256 of a written file, and of each tensor in it by name."""

    file: str
    tensors: dict[str, str]


def output_tensors(source: Source, dtype: str, leave_out: set[str]) -> list[OutputTensor]:
    """What the source's tensors become; `dtype` is "keep" or applies to floating point."""
    import torch

    outputs = []
    for name, stored in source.tensors.items():
        if name in leave_out:
            continue
        target = stored.dtype if dtype == "keep" or not stored.dtype.is_floating_point else getattr(torch, dtype)
        whole = torch.empty(stored.shape, device="meta")
        outputs += [
            OutputTensor(piece.file_name, tuple(piece.view(whole).shape), target, name, piece)
            for piece in source.pieces(name)
        ]
    return outputs


def shard_name(number: int, num_shards: int) -> str:
    """The file name that transformers and vLLM expect of output shard `number`, counted from 1."""
    return "model.safetensors" if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def plan_files(tensors: Iterable[OutputTensor], max_shard_bytes: int) -> list[OutputFile]:
    """The tensors in files of at most `max_shard_bytes`; a larger tensor gets its own file.

    Wider dtypes come first, so that each tensor begins at a multiple of its element.
    """
    groups: list[list[OutputTensor]] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        if not groups or filled + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    return [OutputFile(shard_name(number, len(groups)), group) for number, group in enumerate(groups, start=1)]


def write_file(path: Path, file: OutputFile, source: Source) -> FileDigests:
    """Write a planned file; returns its digests once it is read back, on the disk, and opened by safetensors.

    Raises CheckpointError when the file does not hold what was written to it.
    """
    of_file, of_tensors = hashlib.sha256(), {tensor.name: hashlib.sha256() for tensor in file.tensors}
    with _CheckedFile(path) as output, ThreadPoolExecutor(2, thread_name_prefix="merge-digest") as pool:
        header = memoryview(file.header())
        of_file.update(header)
        output.append(header, "the header")
        for name, values in _parts(file.tensors, source):
            hashing = [pool.submit(digest.update, values) for digest in (of_file, of_tensors[name])]
            output.append(values, name)
            for digest in hashing:
                digest.result()
        output.sync()
    require_opens(path, file)
    return FileDigests(of_file.hexdigest(), {name: digest.hexdigest() for name, digest in of_tensors.items()})


def require_opens(path: Path, file: OutputFile) -> None:
    """Raise CheckpointError unless safetensors opens the file and finds the planned tensors in it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened_file:
            names = opened_file.keys()
            slices = [opened_file.get_slice(name) for name in names]
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be opened: {error}; is the disk sound?") from error
    found = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in zip(names, slices, strict=True)]
    if sorted(found) != sorted((tensor.name, tensor.dtype_name, tensor.shape) for tensor in file.tensors):
        raise CheckpointError(f"{path.name} has other tensors than were written to it; is the disk sound?")


def write_index(folder: Path, files: Sequence[OutputFile]) -> None:
    """Write the index that says which file holds which tensor; a single file needs none."""
    if len(files) > 1:
        places = {tensor.name: file.name for file in files for tensor in file.tensors}
        index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def write_manifest(
    folder: Path, written: Sequence[tuple[OutputFile, FileDigests]], description: Mapping[str, Any]
) -> None:
    """Write merge_manifest.json: the description, size and sha256 of every file, sha256 of every tensor."""
    files = {file.name: digests.file for file, digests in written}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    tensors = {
        tensor.name: {
            "file": file.name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": digests.tensors[tensor.name],
        }
        for file, digests in written
        for tensor in file.tensors
    }
    sizes = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in sorted(files.items())
    }
    text = json.dumps({**description, "files": sizes, "tensors": tensors}, indent=1)
    (folder / MERGE_MANIFEST).write_text(text + "\n", encoding="utf-8")


class _CheckedFile:
    """A new file that is read back as it is written."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._num_bytes = self._num_flushed = 0
        self._read_back = bytearray(WRITE_BYTES)

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def append(self, values: memoryview, what: str) -> None:
        """Write bytes and read them back; raises CheckpointError, which names `what`, when they differ."""
        for start in range(0, len(values), WRITE_BYTES):
            part = values[start : start + WRITE_BYTES]
            written = 0
            while written < len(part):
                written += os.pwrite(self._descriptor, part[written:], self._num_bytes + written)
            if self._read(len(part)) != part:
                raise CheckpointError(
                    f"{self._name}: {what} read back differs from the checkpoint; is the disk sound?"
                )
            self._num_bytes += len(part)
        if self._num_bytes - self._num_flushed >= FLUSH_BYTES:
            # The kernel begins to write these pages, and forgets those that are on the disk already.
            start, count = self._num_flushed, self._num_bytes - self._num_flushed
            os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)
            self._num_flushed = self._num_bytes

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        os.fsync(self._descriptor)

    def _read(self, count: int) -> memoryview:
        """The file's next `count` bytes, fewer at its end."""
        read, view = 0, memoryview(self._read_back)[:count]
        while more := os.preadv(self._descriptor, [view[read:]], self._num_bytes + read):
            read += more
        return view[:read]


def _parts(tensors: Sequence[OutputTensor], source: Source) -> Iterator[tuple[str, memoryview]]:
    """All bytes of the tensors in order, with the tensor's name; in a mapped file unless they were converted.

    What one stored tensor becomes is consecutive, in the order of its rows.
    """
    import torch

    by_stored_name: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        by_stored_name.setdefault(tensor.stored_name, []).append(tensor)
    for stored_name, outputs in by_stored_name.items():
        first_row = 0
        for block in source.blocks(stored_name):
            for output, rows in _in_block(outputs, block, first_row):
                for values in values_in_order(rows, output.dtype):
                    yield output.name, values.view(torch.uint8).numpy().data
            first_row += block.shape[0] if block.ndim else 1


def _in_block(
    outputs: Sequence[OutputTensor], block: torch.Tensor, first_row: int
) -> Iterator[tuple[OutputTensor, torch.Tensor]]:
    for output in outputs:
        if output.piece.expert is None or first_row <= output.piece.expert < first_row + block.shape[0]:
            yield output, output.piece.view(block, first_row)
