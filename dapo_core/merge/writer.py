"""safetensors files, written while the tensors are read: sizes are planned first, values pass through once."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_core.errors import CheckpointError
from dapo_core.merge.checked_file import CheckedFile
from dapo_core.merge.sources import values_in_order
from dapo_core.model_folder import INDEX_FILE
from dapo_core.parameter_names import FilePiece

if TYPE_CHECKING:
    import torch

    from dapo_core.merge.sources import Source

Chunk = TypeVar("Chunk")

_MAX_WAITING = 3  # chunks
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


@dataclass(frozen=True)
class FileDigests:
    """sha256 of what was written, and of each tensor by its name."""

    file: str
    tensors: dict[str, str]


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


def write_file(path: Path, file: OutputFile, source: Source) -> FileDigests:
    """Write a planned file and return what is in it, when all of it is on the disk and safetensors opens it.

    Reading and converting, hashing for the file, hashing for the tensor, and writing each have a thread.
    Raises CheckpointError when the file has not become what was written to it.
    """
    of_file, of_tensors = hashlib.sha256(), {tensor.name: hashlib.sha256() for tensor in file.tensors}

    def hash_file(part: _Part) -> None:
        of_file.update(part.values)

    def hash_tensor(part: _Part) -> None:
        of_tensors[part.tensor].update(part.values)

    with CheckedFile(path) as output:

        def write(part: _Part) -> None:
            output.append(part.values, part.tensor)

        header = memoryview(file.header())
        of_file.update(header)
        output.append(header, "the header")
        with _Workers(3) as workers:
            for part in _parts(file.tensors, source):
                workers.put(part, hash_file, write, hash_tensor)
            workers.finish()
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
    """Write the index that says which file holds which tensor; one file alone has none."""
    if len(files) > 1:
        places = {tensor.name: file.name for file in files for tensor in file.tensors}
        index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True)
class _Part:
    """Consecutive bytes of a tensor, in a mapped file unless they were converted."""

    tensor: str
    values: memoryview


def _parts(tensors: Sequence[OutputTensor], source: Source) -> Iterator[_Part]:
    """All bytes of the tensors, in order; what one stored tensor becomes follows the order of its rows."""
    import torch

    becomes: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        becomes.setdefault(tensor.stored_name, []).append(tensor)
    for stored_name, outputs in becomes.items():
        first_row = 0
        for block in source.blocks(stored_name):
            for output, rows in _in_block(outputs, block, first_row):
                for values in values_in_order(rows, output.dtype):
                    yield _Part(output.name, values.view(torch.uint8).numpy().data)
            first_row += block.shape[0] if block.ndim else 1


def _in_block(
    outputs: Sequence[OutputTensor], block: torch.Tensor, first_row: int
) -> Iterator[tuple[OutputTensor, torch.Tensor]]:
    for output in outputs:
        if output.piece.expert is None or first_row <= output.piece.expert < first_row + block.shape[0]:
            yield output, output.piece.view(block, first_row)


class _Workers:
    """Threads, each of which takes every chunk in order; the slowest is at most _MAX_WAITING chunks behind."""

    def __init__(self, count: int) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="merge") for _ in range(count)]
        self._waiting: deque[list[Future[object]]] = deque()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def put(self, chunk: Chunk, *actions: Callable[[Chunk], object]) -> None:
        """Have each thread do its action; raises what an earlier one has raised."""
        while len(self._waiting) >= _MAX_WAITING:
            self._wait()
        pairs = zip(self._threads, actions, strict=False)
        self._waiting.append([thread.submit(action, chunk) for thread, action in pairs])

    def finish(self) -> None:
        """Wait for all of it."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        for action in self._waiting.popleft():
            action.result()


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
