"""Reads a base model with an adapter as a merge source: merged in float32, tensor by tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint.state import read_state_without_groups
from dapo_core.errors import CheckpointError, ModelError
from dapo_core.merge.dcp import DcpSource
from dapo_core.merge.huggingface import HuggingFaceSource
from dapo_core.merge.sources import Readable, Source, StoredTensor
from dapo_core.model.folder import model_fingerprint
from dapo_core.model.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    Adapter,
    adapter_name,
    adapter_names,
    open_adapter,
    parameter_name,
    read_adapter,
    write_adapter,
)
from dapo_core.model.names import FilePiece, file_name

if TYPE_CHECKING:
    import torch

    from dapo_core.merge.writer import OutputTensor


logger = logging.getLogger(__name__)

LARGE_ERROR = 0.1


@dataclass(frozen=True)
class _Merged:
    """A weight with its adapter."""

    source: LoraSource
    name: str

    def read(self) -> Iterator[memoryview]:
        """Yield all values in float32."""
        values: Any = self.source.merged(self.name).numpy()
        yield memoryview(values).cast("B")


class LoraSource:
    """A base model and an adapter; implements Source."""

    def __init__(
        self,
        adapter: Adapter,
        tensors: Mapping[str, torch.Tensor],
        model_files: Path,
        description: Mapping[str, Any],
    ) -> None:
        """tensors: the adapter's parameters by name; model_files: configuration and tokenizer."""
        import torch

        self.label, self.model_files = str(adapter.folder), model_files
        self._adapter, self._parameters, self._description = adapter, tensors, description
        if bad := [name for name, each in tensors.items() if not each.isfinite().all()]:
            raise CheckpointError(
                f"{adapter_name(bad[0])} in {self.label} contains NaN or infinity: training "
                "diverged; merge an earlier checkpoint"
            )
        self._base = HuggingFaceSource(adapter.base)
        self._base.require_finite()
        self.tensors = dict(self._base.tensors)
        weights = {f"{name.partition('.lora_')[0]}.weight" for name in tensors}
        self._adapted_by = {file_name(name, self.tensors): adapter_names(name) for name in weights}
        self._adapted = {name for name in self.tensors if self._fits(name)}
        if not 0 < 2 * len(self._adapted) == len(tensors):
            raise CheckpointError(
                f"{self.label} has {len(tensors)} tensors, of which {2 * len(self._adapted)} fit "
                f"{adapter.base} as adapters of rank {adapter.lora.rank}; merge it with the model "
                f"that it was trained on, and with its own {ADAPTER_CONFIG}"
            )
        for name in self._adapted:
            self.tensors[name] = StoredTensor(self.tensors[name].shape, torch.float32)

    def pieces(self, name: str) -> list[FilePiece]:
        """The tensor itself: names are those of the base model's files."""
        return self._base.pieces(name)

    def blocks(self, name: str) -> Sequence[Readable]:
        """Values of the base model, or of a merged weight."""
        return [_Merged(self, name)] if name in self._adapted else self._base.blocks(name)

    def describe(self) -> dict[str, Any]:
        """Manifest entry."""
        lora = self._adapter.lora.model_dump(mode="json")
        return {**self._description, "base": model_fingerprint(self._adapter.base), "lora": lora}

    def merged(self, name: str) -> torch.Tensor:
        """Return a weight with its adapter, in float32."""
        return self._weight(name) + self._update(name)

    def rounding_error(self, outputs: Sequence[OutputTensor]) -> float:
        """Return the norm of what the outputs' precision loses, relative to the update's.

        A large one is logged.
        """
        lost = total = 0.0
        for output in outputs:
            if output.name in self._adapted:
                update = self._update(output.name)
                merged = self._weight(output.name) + update
                lost += float((merged.to(output.dtype).float() - merged).double().square().sum())
                total += float(update.double().square().sum())
        error = math.sqrt(lost / total) if total else 0.0
        if error > LARGE_ERROR:
            logger.warning(
                "the merged model's precision loses %.0f %% of what the adapter changes (norm of "
                "the rounding error): merge with dtype float32, or use the folder %s",
                100 * error,
                ADAPTER_FOLDER,
            )
        return error

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone as peft does."""
        lora, base = self._adapter.lora, self._adapter.base
        named = {adapter_name(name): tensor for name, tensor in self._parameters.items()}
        write_adapter(folder, named, lora, base, model_fingerprint(base))

    def _fits(self, name: str) -> bool:
        shape, rank = self.tensors[name].shape, self._adapter.lora.rank
        names = self._adapted_by.get(name, ())
        found = [self._parameters[each] for each in names if each in self._parameters]
        return [tuple(e.shape) for e in found] == [(rank, *shape[1:]), (*shape[:1], rank)]

    def _weight(self, name: str) -> torch.Tensor:
        return read_tensor(self._base, name).float()

    def _update(self, name: str) -> torch.Tensor:
        first, second = (self._parameters[each].float() for each in self._adapted_by[name])
        return self._adapter.lora.scale * second @ first


def read_tensor(source: Source, name: str) -> torch.Tensor:
    """Return a whole tensor of a source."""
    import torch

    stored, content = source.tensors[name], bytearray()
    for block in source.blocks(name):
        for part in block.read():
            content += part
    return torch.frombuffer(content, dtype=stored.dtype).view(stored.shape)


def with_base(source: DcpSource, base: Path | None) -> Source:
    """Return the source, on its base model if the checkpoint holds an adapter.

    Raises CheckpointError if the base model is missing or another one.
    """
    checkpoint = Path(source.label)
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        return source
    fingerprint = read_state_without_groups(checkpoint).identity.get("model", "")
    try:
        adapter = read_adapter(checkpoint, fingerprint, base)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    tensors = {name: read_tensor(source, name) for name in source.tensors}
    return LoraSource(adapter, tensors, source.model_files, source.describe())


def adapter_source(folder: Path, base: Path | None) -> LoraSource:
    """Open peft's folder of an adapter on its base model; raises ModelError like open_adapter."""
    from safetensors.torch import load_file

    adapter = open_adapter(folder, base)
    assert adapter is not None, f"{folder} has no adapter"
    tensors = {parameter_name(n): each for n, each in load_file(folder / ADAPTER_FILE).items()}
    return LoraSource(adapter, tensors, adapter.base, {"format": "peft"})
