"""safetensors files, written while the tensors are read: sizes are planned first, values pass through once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_core.errors import CheckpointError
from dapo_core.model_folder import INDEX_FILE
from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch

    from dapo_core.merge.sources import Source

T = TypeVar("T")
CHUNK_BYTES = 8 * 1024**2  # of a tensor at once; hashed and written while it is in the processor's cache
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
        """What safetensors calls its dtype; raises CheckpointError for one that it lacks."""
        name = str(self.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise CheckpointError(
                f"{self.name} is {name}, which safetensors files cannot hold; pass --dtype float32"
            )
        return _DTYPES[name]


@dataclass
class OutputFile:
    """A safetensors file and what it holds, in this order."""

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


def shard_name(number: int, num_shards: int) -> str:
    """The file name that transformers and vLLM expect of output shard `number`, counted from 1."""
    return "model.safetensors" if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def plan_files(tensors: Iterable[OutputTensor], max_shard_bytes: int) -> list[OutputFile]:
    """The tensors in files of at most `max_shard_bytes`; a larger tensor has a file of its own.

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


def write_files(
    folder: Path,
    files: Sequence[OutputFile],
    source: Source,
    on_file: Callable[[OutputFile, dict[str, str]], None],
) -> None:
    """Write the planned files; a second thread reads, converts and hashes ahead of the writing.

    `on_file` is called with each file when it is on its path and the sha256 of each of its tensors.
    """
    digests = {tensor.name: hashlib.sha256() for file in files for tensor in file.tensors}

    def hashed() -> Generator[memoryview, None, None]:
        for tensor, values in _chunks([tensor for file in files for tensor in file.tensors], source):
            digests[tensor.name].update(values)
            yield values

    with closing(_read_ahead(hashed())) as chunks:
        for file in files:
            with (folder / file.name).open("wb") as stream:
                stream.write(file.header())
                missing = file.num_bytes
                while missing:
                    missing -= stream.write(next(chunks))
            on_file(file, {tensor.name: digests[tensor.name].hexdigest() for tensor in file.tensors})


def write_index(folder: Path, files: Sequence[OutputFile]) -> None:
    """Write the index that says which file holds which tensor; one file alone has none."""
    if len(files) > 1:
        places = {tensor.name: file.name for file in files for tensor in file.tensors}
        index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def _chunks(tensors: Sequence[OutputTensor], source: Source) -> Iterator[tuple[OutputTensor, memoryview]]:
    """The values of all tensors in order; what a stored tensor becomes follows the order of its rows."""
    import torch

    parts: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.stored_name, []).append(tensor)
    for stored_name, outputs in parts.items():
        first_row = 0
        for block in source.blocks(stored_name):
            for output, rows in _in_block(outputs, block, first_row):
                for values in _split(rows):
                    converted = values.to(output.dtype).contiguous()
                    yield output, converted.reshape(-1).view(torch.uint8).numpy().data
            first_row += block.shape[0] if block.ndim else 1


def _in_block(
    outputs: Sequence[OutputTensor], block: torch.Tensor, first_row: int
) -> Iterator[tuple[OutputTensor, torch.Tensor]]:
    for output in outputs:
        if output.piece.expert is None or first_row <= output.piece.expert < first_row + block.shape[0]:
            yield output, output.piece.view(block, first_row)


def _split(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of about CHUNK_BYTES, and no empty one."""
    if not rows.ndim:
        yield rows
    elif rows.numel():
        yield from rows.split(max(CHUNK_BYTES // (rows.nbytes // rows.shape[0]), 1))


def _read_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The items, of which a thread makes the next one while the caller works on the present one."""
    with ThreadPoolExecutor(1, thread_name_prefix="merge-reader") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item


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
