"""From FSDP shards to a Hugging Face folder, streaming: at most one output shard in memory."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint import HUGGINGFACE_FOLDER, STATE_FILE, latest_checkpoint
from dapo_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MODEL_PREFIX = "model."
INDEX_FILE = "model.safetensors.index.json"
OnShard = Callable[[int, int], None]  # bytes done, bytes in all


def merge_checkpoint(
    source: Path, target: Path, dtype: str, max_shard_bytes: int, on_shard: OnShard | None = None
) -> dict[str, int]:
    """Write the checkpoint's model to `target` as a folder that transformers and vLLM load.

    `source` is a checkpoint, or a training output, of which the newest checkpoint is taken. `dtype` "keep" leaves
    each tensor as it was trained. Tied weights are stored once. Afterwards names, shapes and values' digests in
    the folder are compared with what was written. Returns {"tensors", "parameters", "bytes", "shards"}.

    Raises CheckpointError for an incomplete source or a target that already holds files, before writing.
    """
    checkpoint = find_checkpoint(source)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; merge into a new folder")
    metadata = _read_metadata(checkpoint)
    tensors = {name: size for name, size in _tensors(metadata).items() if name not in _tied(checkpoint, metadata)}
    _require_shards(checkpoint, metadata)
    target.mkdir(parents=True, exist_ok=True)
    plan = list(_plan_shards(tensors, dtype, max_shard_bytes))
    total = sum(_num_bytes(tensors[name], dtype) for name in tensors)
    digests: dict[str, str] = {}
    done = 0
    for number, names in enumerate(plan, start=1):
        part = _load(checkpoint, {name: tensors[name] for name in names}, dtype)
        file_name = shard_name(number, len(plan))
        _save(target / file_name, part)
        digests |= {name: _digest(tensor) for name, tensor in part.items()}
        done += sum(tensor.nbytes for tensor in part.values())
        if on_shard is not None:
            on_shard(done, total)
    if len(plan) > 1:
        _write_index(target, plan, total)
    shutil.copytree(checkpoint / HUGGINGFACE_FOLDER, target, dirs_exist_ok=True)
    _record_dtype(target, tensors, dtype)
    _verify(target, tensors, digests)
    num_parameters = sum(size.size.numel() for size in tensors.values())
    return {"tensors": len(tensors), "parameters": num_parameters, "bytes": total, "shards": len(plan)}


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that `source` is, or the newest one in the training output that it is."""
    for candidate in (source, latest_checkpoint(source / "checkpoints"), latest_checkpoint(source)):
        if candidate is not None and (candidate / ".metadata").is_file():
            _require_complete(candidate)
            return candidate
    raise CheckpointError(
        f"{source} holds no complete checkpoint (a folder step_NNNNNN with .metadata); train first, or pass the "
        "folder that dapo train wrote"
    )


def _require_complete(checkpoint: Path) -> None:
    if checkpoint.suffix == ".partial":
        raise CheckpointError(f"{checkpoint} was not written to its end; use the checkpoint before it")
    missing = [name for name in (STATE_FILE, HUGGINGFACE_FOLDER) if not (checkpoint / name).exists()]
    if missing:
        raise CheckpointError(f"{checkpoint} lacks {' and '.join(missing)}; it is not a checkpoint of dapo train")


def _read_metadata(checkpoint: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(checkpoint).read_metadata()
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f".metadata in {checkpoint} cannot be read ({error}), so no shard can be found; copy it from the node "
            "that wrote it, or merge another checkpoint"
        ) from error


def _tensors(metadata: Any) -> dict[str, Any]:
    """Shape and dtype of each model tensor by Hugging Face name."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name.removeprefix(MODEL_PREFIX): value
        for name, value in metadata.state_dict_metadata.items()
        if name.startswith(MODEL_PREFIX) and isinstance(value, TensorStorageMetadata)
    }


def _tied(checkpoint: Path, metadata: Any) -> set[str]:
    """Names of tensors that the model's configuration declares to be copies of another."""
    config = json.loads((checkpoint / HUGGINGFACE_FOLDER / "config.json").read_text(encoding="utf-8"))
    is_tied = config.get("tie_word_embeddings", False) and f"{MODEL_PREFIX}lm_head.weight" in (
        metadata.state_dict_metadata
    )
    return {"lm_head.weight"} if is_tied else set()


def _require_shards(checkpoint: Path, metadata: Any) -> None:
    """Raise CheckpointError when a shard file that the metadata names is missing or too short."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            state = "missing" if size is None else f"{size} bytes long instead of {end}"
            raise CheckpointError(
                f"shard {name} of {len(ends)} in {checkpoint} is {state}; copy it from the node that wrote it, or "
                "merge another checkpoint"
            )


def _target_dtype(stored: torch.dtype, dtype: str) -> torch.dtype:
    import torch

    return stored if dtype == "keep" or not stored.is_floating_point else getattr(torch, dtype)


def _num_bytes(tensor: Any, dtype: str) -> int:
    return tensor.size.numel() * _target_dtype(tensor.properties.dtype, dtype).itemsize


def _plan_shards(tensors: Mapping[str, Any], dtype: str, max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = _num_bytes(tensor, dtype)
        if names and filled + size > max_shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def _load(checkpoint: Path, tensors: Mapping[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {
        MODEL_PREFIX + name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in tensors.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {
        name.removeprefix(MODEL_PREFIX): tensor.to(_target_dtype(tensor.dtype, dtype)).contiguous()
        for name, tensor in state.items()
    }


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def shard_name(number: int, num_shards: int) -> str:
    """The file name that transformers and vLLM expect of output shard `number`, counted from 1."""
    return "model.safetensors" if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def _write_index(target: Path, plan: list[list[str]], total: int) -> None:
    places = {name: shard_name(number, len(plan)) for number, names in enumerate(plan, start=1) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def _record_dtype(target: Path, tensors: Mapping[str, Any], dtype: str) -> None:
    """Write the weights' precision into config.json, which loaders take as the default."""
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    largest = max(tensors.values(), key=lambda tensor: tensor.size.numel())
    name = str(_target_dtype(largest.properties.dtype, dtype)).removeprefix("torch.")
    config["dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"] = name
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _digest(tensor: torch.Tensor) -> str:
    import hashlib

    import torch

    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _verify(target: Path, tensors: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Read the folder back and compare names, shapes and values with what the checkpoint gave."""
    from safetensors import safe_open

    seen: set[str] = set()
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                seen.add(name)
                if tuple(tensor.shape) != tuple(tensors[name].size) or _digest(tensor) != digests[name]:
                    raise CheckpointError(
                        f"{path.name}: {name} read back differs from the checkpoint; is the disk sound?"
                    )
    if seen != set(tensors):
        raise CheckpointError(f"{target} lacks the tensors {sorted(set(tensors) - seen)[:5]} after the merge")
