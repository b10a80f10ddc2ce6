"""Reads a Hugging Face folder as a merge source, for example from another trainer's converter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.errors import CheckpointError, ModelError
from dapo_core.merge.sources import DTYPE_CODES, Block, StoredTensor
from dapo_core.model.folder import require_model_folder
from dapo_core.model.names import FilePiece
from dapo_core.model.tensors import weight_files

MAX_HEADER_BYTES = 100 * 1024**2  # safetensors' own bound
# Without float8, for which torch has no isfinite.
_DTYPES = {code: name for name, code in DTYPE_CODES.items() if not name.startswith("float8")}


class HuggingFaceSource:
    """Tensors of a folder's safetensors files; implements Source."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for missing, truncated or damaged files; reads no values."""
        self.label = str(folder)
        self.model_files = folder
        try:
            require_model_folder(folder)
            places = weight_files(folder)
        except ModelError as error:
            raise CheckpointError(
                f"{folder} is not a complete model: {error}; convert it again"
            ) from error
        self._blocks: dict[str, Block] = {}
        self.tensors: dict[str, StoredTensor] = {}
        headers = {path: _read_header(path) for path in sorted(set(places.values()))}
        for name, path in places.items():
            if name not in headers[path]:
                raise CheckpointError(
                    f"{path} lacks {name}, which the index lists; convert the checkpoint again"
                )
            self.tensors[name], self._blocks[name] = headers[path][name]

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensor itself: names are kept."""
        return [FilePiece(name)]

    def blocks(self, name: str) -> list[Block]:
        """The tensor's bytes in its file."""
        return [block for block in [self._blocks[name]] if block.num_bytes]

    def describe(self) -> dict[str, Any]:
        """Manifest entry."""
        return {
            "format": "huggingface",
            "shards": len({block.path for block in self._blocks.values()}),
        }

    def require_finite(self) -> None:
        """Read all values; raises CheckpointError for NaN or infinity."""
        import torch

        for name, stored in self.tensors.items():
            if not stored.dtype.is_floating_point:
                continue
            parts = (
                torch.frombuffer(part, dtype=stored.dtype)
                for block in self.blocks(name)
                for part in block.read()
            )
            if not all(bool(part.isfinite().all()) for part in parts):
                raise CheckpointError(
                    f"{name} in {self._blocks[name].path} contains NaN or infinity: training "
                    "diverged or the "
                    "conversion is wrong; check actor/grad_norm and merge an earlier checkpoint"
                )


def _read_header(path: Path) -> Mapping[str, tuple[StoredTensor, Block]]:
    """Return shape, dtype and position of each tensor in a safetensors file."""
    import torch

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            entries = json.loads(file.read(length))
        start, size = 8 + length, path.stat().st_size
        tensors = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = getattr(torch, _DTYPES[entry["dtype"]]), tuple(entry["shape"])
            if (
                end - begin != math.prod(shape) * dtype.itemsize
                or not 0 <= begin <= end <= size - start
            ):
                raise ValueError(f"{name} has a wrong size or position: {end - begin:,} bytes")
            block = Block(path, start + begin, end - begin, start + begin, start + end, None)
            tensors[name] = StoredTensor(shape, dtype), block
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): it is truncated or damaged; write it again"
        ) from error
    return tensors
