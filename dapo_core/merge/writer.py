"""Plans the files of a merged model, then writes and hashes them in one pass over the source."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from dapo_core.errors import CheckpointError
from dapo_core.machine.digests import Part, content_part, digest_of, file_digest, num_threads
from dapo_core.merge.sources import DTYPE_CODES, Readable, Source
from dapo_core.model.folder import INDEX_FILE, MERGE_MANIFEST
from dapo_core.model.names import FilePiece

if TYPE_CHECKING:
    import torch

# The kernel allocates page cache in blocks of the write's size. On a virtual machine, free blocks
# of 128 KiB and more may return to the host, which is slow to give them back.
WRITE_BYTES = 64 * 1024
FLUSH_BYTES = 16 * 1024**2  # writeback granularity, so that little is left for the final fsync
# Python has no sync_file_range, and posix_fadvise would also drop the pages
_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
OnBytes = Callable[[int, int], None]  # bytes written, total bytes


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write to the merged folder."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_name: str  # name of the source tensor
    piece: FilePiece  # part of the source tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in its file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The safetensors code of the dtype; raises CheckpointError if it has none."""
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPE_CODES:
            raise CheckpointError(
                f"{self.name} is {name}, which safetensors does not support; pass --dtype float32"
            )
        return DTYPE_CODES[name]


@dataclass
class OutputFile:
    """A safetensors file and its tensors, in file order."""

    name: str
    tensors: list[OutputTensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """Return the header: length and JSON, padded so that values start at a multiple of 8."""
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


def output_tensors(source: Source, dtype: str, leave_out: set[str]) -> list[OutputTensor]:
    """Return the tensors to write; `dtype` is "keep" or that of all floating-point tensors."""
    import torch

    outputs = []
    for name, stored in source.tensors.items():
        if name in leave_out:
            continue
        target = (
            stored.dtype
            if dtype == "keep" or not stored.dtype.is_floating_point
            else getattr(torch, dtype)
        )
        whole = torch.empty(stored.shape, device="meta")
        outputs += [
            OutputTensor(piece.file_name, tuple(piece.view(whole).shape), target, name, piece)
            for piece in source.pieces(name)
        ]
    return outputs


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name that transformers and vLLM expect for shard `number`, counted from 1."""
    return (
        "model.safetensors"
        if num_shards == 1
        else f"model-{number:05d}-of-{num_shards:05d}.safetensors"
    )


def plan_files(tensors: Iterable[OutputTensor], max_shard_bytes: int) -> list[OutputFile]:
    """Distribute the tensors over files of at most `max_shard_bytes`, or of one larger tensor.

    Wider dtypes come first, so each tensor is aligned to its element size.
    """
    groups: list[list[OutputTensor]] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        if not groups or filled + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    return [
        OutputFile(shard_name(number, len(groups)), group)
        for number, group in enumerate(groups, start=1)
    ]


class ModelWriter:
    """Writes and hashes the files in one pass over the source, several tensors in parallel."""

    def __init__(self, folder: Path, files: Sequence[OutputFile], source: Source) -> None:
        """Create the files in the folder and write their headers."""
        self._source = source
        self._files = {file.name: file for file in files}
        self._places: dict[str, tuple[int, int]] = {}  # descriptor and offset of each tensor
        self._outputs: dict[str, list[OutputTensor]] = {}  # by source tensor
        self._headers: dict[str, bytes] = {}
        self._descriptors: dict[str, int] = {}
        for file in files:
            header = self._headers[file.name] = file.header()
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._descriptors[file.name] = descriptor
            os.truncate(descriptor, len(header) + file.num_bytes)
            _write(descriptor, memoryview(header), 0)
            offset = len(header)
            for tensor in file.tensors:
                self._places[tensor.name] = descriptor, offset
                self._outputs.setdefault(tensor.stored_name, []).append(tensor)
                offset += tensor.num_bytes

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def write(self, dropped: Sequence[OutputTensor], on_bytes: OnBytes | None) -> dict[str, str]:
        """Write and fsync all tensors; returns their digests, including those of `dropped` tensors.

        Dropped tensors are read but not written. Raises CheckpointError if the source is damaged.
        """
        jobs = [*self._outputs.values(), *([tensor] for tensor in dropped)]
        jobs.sort(key=lambda outputs: -sum(tensor.num_bytes for tensor in outputs))
        digests: dict[str, str] = {}
        done, total = 0, sum(file.num_bytes for file in self._files.values())
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="merge") as pool:
            running = {pool.submit(self._copy, outputs): outputs for outputs in jobs}
            try:
                for finished in as_completed(running):
                    digests |= finished.result()
                    done += sum(
                        tensor.num_bytes
                        for tensor in running[finished]
                        if tensor.name in self._places
                    )
                    if on_bytes is not None:
                        on_bytes(done, total)
                list(pool.map(os.fsync, self._descriptors.values()))
            finally:
                pool.shutdown(cancel_futures=True)
        return digests

    def parts(self, digests: Mapping[str, str]) -> dict[str, list[Part]]:
        """Return the parts of each file: its header and its non-empty tensors."""
        return {
            name: [
                content_part(self._headers[name]),
                *(
                    (tensor.num_bytes, digests[tensor.name])
                    for tensor in file.tensors
                    if tensor.num_bytes
                ),
            ]
            for name, file in self._files.items()
        }

    def _copy(self, outputs: Sequence[OutputTensor]) -> dict[str, str]:
        """Copy a source tensor to its output tensors, which are consecutive parts of it."""
        digests = {}
        values = _Values(self._source, outputs[0])
        for output in outputs:
            digest = blake3()
            descriptor, offset = self._places.get(output.name, (None, 0))
            unflushed = offset
            for part in values.take(output.num_bytes):
                digest.update(part)
                if descriptor is not None:
                    _write(descriptor, part, offset)
                    offset += len(part)
                    if offset - unflushed >= FLUSH_BYTES:
                        unflushed = _start_writeback(descriptor, unflushed, offset)
            digests[output.name] = digest.hexdigest()
        return digests


def require_opens(path: Path, file: OutputFile) -> None:
    """Raise CheckpointError unless safetensors can open the file and finds the planned tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened_file:
            names = opened_file.keys()
            slices = [opened_file.get_slice(name) for name in names]
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} cannot be opened: {error}; check the disk for errors"
        ) from error
    found = [
        (name, part.get_dtype(), tuple(part.get_shape()))
        for name, part in zip(names, slices, strict=True)
    ]
    if sorted(found) != sorted(
        (tensor.name, tensor.dtype_name, tensor.shape) for tensor in file.tensors
    ):
        raise CheckpointError(
            f"{path.name} does not contain the tensors written to it; check the disk for errors"
        )


def write_index(folder: Path, files: Sequence[OutputFile], num_parameters: int) -> None:
    """Write the transformers index from tensors to files; a single file needs none."""
    if len(files) > 1:
        places = {tensor.name: file.name for file in files for tensor in file.tensors}
        sizes = {
            "total_parameters": num_parameters,
            "total_size": sum(file.num_bytes for file in files),
        }
        text = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")


def write_manifest(
    folder: Path,
    files: Sequence[OutputFile],
    parts: Mapping[str, Sequence[Part]],
    tensor_digests: Mapping[str, str],
    description: Mapping[str, Any],
) -> None:
    """Write merge_manifest.json: the description, and size and digest of every file and tensor."""
    digests = {name: digest_of(file_parts) for name, file_parts in parts.items()}
    rows = {
        (name := path.relative_to(folder).as_posix()): {
            "bytes": path.stat().st_size,
            "blake3": digests.get(name) or file_digest(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    tensors = {
        tensor.name: {
            "file": file.name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "blake3": tensor_digests[tensor.name],
        }
        for file in files
        for tensor in file.tensors
    }
    text = json.dumps({**description, "files": rows, "tensors": tensors}, indent=1)
    (folder / MERGE_MANIFEST).write_text(text + "\n", encoding="utf-8")


class _Values:
    """Streams a source tensor's values in row-major order, converted to the output dtype."""

    def __init__(self, source: Source, output: OutputTensor) -> None:
        stored_dtype = source.tensors[output.stored_name].dtype
        self._dtypes = None if stored_dtype == output.dtype else (stored_dtype, output.dtype)
        self._parts = self._read(source.blocks(output.stored_name))
        if output.piece.is_turned:
            self._parts = _transposed(
                self._parts, source.tensors[output.stored_name].shape, output.dtype
            )
        self._rest = memoryview(b"")

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the next `num_bytes` bytes in parts, each valid until the next one is requested."""
        while num_bytes:
            if not self._rest:
                self._rest = next(self._parts)
            part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            num_bytes -= len(part)
            yield part
        if not self._rest:
            # at the end of the last block, this verifies its checksum
            self._rest = next(self._parts, self._rest)

    def _read(self, blocks: Sequence[Readable]) -> Iterator[memoryview]:
        import torch

        for block in blocks:
            for part in block.read():
                if self._dtypes is not None:
                    stored, dtype = self._dtypes
                    yield (
                        torch.frombuffer(part, dtype=stored)
                        .to(dtype)
                        .view(torch.uint8)
                        .numpy()
                        .data
                    )
                else:
                    yield part


def _transposed(
    parts: Iterator[memoryview], shape: Sequence[int], dtype: torch.dtype
) -> Iterator[memoryview]:
    """Yield the values of transposed matrices [..., rows, columns]; two are in memory."""
    import torch

    num_bytes = shape[-2] * shape[-1] * dtype.itemsize
    matrix = bytearray()
    for part in parts:
        while part:
            count = min(num_bytes - len(matrix), len(part))
            matrix += part[:count]
            part = part[count:]
            if len(matrix) == num_bytes:
                transposed = (
                    torch.frombuffer(matrix, dtype=dtype).view(*shape[-2:]).t().contiguous()
                )
                yield transposed.view(-1).view(torch.uint8).numpy().data
                matrix = bytearray()


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    for start in range(0, len(content), WRITE_BYTES):
        part = content[start : start + WRITE_BYTES]
        while part:
            count = os.pwrite(descriptor, part, offset)
            part, offset = part[count:], offset + count


def _start_writeback(descriptor: int, start: int, end: int) -> int:
    """Start writing these bytes from the page cache to disk; returns `end`."""
    _LIBC.sync_file_range(
        descriptor, ctypes.c_int64(start), ctypes.c_int64(end - start), _SYNC_FILE_RANGE_WRITE
    )
    return end
