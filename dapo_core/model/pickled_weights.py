"""Converts pytorch_model.bin files to safetensors without executing their pickles."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from dapo_core.errors import ModelError
from dapo_core.model.folder import INDEX_FILE, PICKLE_INDEX


def convert_pickles(folder: Path) -> None:
    """Convert pickled weights to safetensors, one file in memory at a time, and delete them.

    Raises ModelError for a pickle that contains anything but named tensors.
    """
    sources = sorted(folder.glob("pytorch_model*.bin"))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for source in sources:
        target = folder / f"{source.stem.replace('pytorch_model', 'model')}.safetensors"
        tensors = {name: tensor.clone().contiguous() for name, tensor in _read(source).items()}
        save_file(tensors, target, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, target.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(sources) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for path in (*sources, folder / PICKLE_INDEX):
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, torch.Tensor]:
    is_mapped = zipfile.is_zipfile(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        message = f"{path.name} contains more than tensors, so it is not loaded: {error}"
        raise ModelError(message) from error
    values = tensors.values() if isinstance(tensors, dict) else [tensors]
    if not isinstance(tensors, dict) or not all(isinstance(it, torch.Tensor) for it in values):
        raise ModelError(
            f"{path.name} contains something other than named tensors; use a model with safetensors"
        )
    return tensors
