"""Reads a Hugging Face folder as a merge source, for example from another trainer's converter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dapo_core.errors import CheckpointError, ModelError
from dapo_core.machine.digests import CHUNK_BYTES
from dapo_core.merge.sources import DTYPE_CODES, StoredTensor
from dapo_core.model.folder import require_model_folder
from dapo_core.model.names import FilePiece
from dapo_core.model.tensors import read_headers

# Without float8, for which torch has no isfinite.
_DTYPES = {code: name for name, code in DTYPE_CODES.items() if not name.startswith("float8")}


@dataclass(frozen=True)
class _Values:
    """A tensor in a safetensors file."""

    path: Path
    name: str

    def read(self) -> Iterator[memoryview]:
        """Yield the values in parts."""
        import torch
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            content = file.get_tensor(self.name).reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), CHUNK_BYTES):
                yield content[start : start + CHUNK_BYTES]


class HuggingFaceSource:
    """Tensors of a folder's safetensors files; implements Source."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for missing, truncated or damaged files; reads no values."""
        import torch

        self.label = str(folder)
        self.model_files = folder
        try:
            require_model_folder(folder)
            self._headers = read_headers(folder)
        except ModelError as error:
            raise CheckpointError(
                f"{folder} is not a complete model: {error}; convert it again"
            ) from error
        self.tensors: dict[str, StoredTensor] = {}
        for name, header in self._headers.items():
            if header.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} in {header.path} is {header.dtype}, which cannot be merged; convert "
                    "the checkpoint with weights in BF16, F16 or F32"
                )
            dtype = getattr(torch, _DTYPES[header.dtype])
            self.tensors[name] = StoredTensor(header.shape, dtype)

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensor itself: names are kept."""
        return [FilePiece(name)]

    def blocks(self, name: str) -> list[_Values]:
        """The tensor's values in its file."""
        header = self._headers[name]
        return [_Values(header.path, name)] if prod(header.shape) else []

    def describe(self) -> dict[str, Any]:
        """Manifest entry."""
        return {
            "format": "huggingface",
            "shards": len({header.path for header in self._headers.values()}),
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
                    f"{name} in {self._headers[name].path} contains NaN or infinity: training "
                    "diverged or the "
                    "conversion is wrong; check actor/grad_norm and merge an earlier checkpoint"
                )
