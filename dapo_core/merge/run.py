"""From FSDP shards to a Hugging Face folder, streaming: at most one output file in memory."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint import HUGGINGFACE_FOLDER, NAMES_FILE, STATE_FILE, latest_checkpoint
from dapo_core.errors import CheckpointError
from dapo_core.model_folder import INDEX_FILE
from dapo_core.parameter_names import FilePiece, file_pieces

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MODEL_PREFIX = "model."
OnShard = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class _Written:
    """A tensor of the merged folder."""

    place: str  # its file
    shape: tuple[int, ...]
    digest: str


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
    tied = _tied(checkpoint, metadata)
    parameters = {name: stored for name, stored in _parameters(metadata).items() if name not in tied}
    pieces = _pieces(checkpoint, parameters)
    _require_shards(checkpoint, metadata)
    target.mkdir(parents=True, exist_ok=True)
    plan = list(_plan_shards(parameters, dtype, max_shard_bytes))
    total = sum(_num_bytes(stored, dtype) for stored in parameters.values())
    written: dict[str, _Written] = {}
    done = 0
    for number, names in enumerate(plan, start=1):
        wholes = _load(checkpoint, {name: parameters[name] for name in names}, dtype)
        part = {piece.file_name: piece.view(wholes[name]) for name in names for piece in pieces[name]}
        place = shard_name(number, len(plan))
        _save(target / place, part)
        written |= {name: _Written(place, tuple(tensor.shape), _digest(tensor)) for name, tensor in part.items()}
        done += sum(tensor.nbytes for tensor in part.values())
        if on_shard is not None:
            on_shard(done, total)
    if len(plan) > 1:
        _write_index(target, written, total)
    shutil.copytree(checkpoint / HUGGINGFACE_FOLDER, target, dirs_exist_ok=True)
    _record_dtype(target, parameters, dtype)
    _verify(target, written)
    num_parameters = sum(stored.size.numel() for stored in parameters.values())
    return {"tensors": len(written), "parameters": num_parameters, "bytes": total, "shards": len(plan)}


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
    needed = (STATE_FILE, HUGGINGFACE_FOLDER, NAMES_FILE)
    missing = [name for name in needed if not (checkpoint / name).exists()]
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


def _parameters(metadata: Any) -> dict[str, Any]:
    """Shape and dtype of each parameter by its name in transformers."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name.removeprefix(MODEL_PREFIX): value
        for name, value in metadata.state_dict_metadata.items()
        if name.startswith(MODEL_PREFIX) and isinstance(value, TensorStorageMetadata)
    }


def _pieces(checkpoint: Path, parameters: Mapping[str, Any]) -> dict[str, list[FilePiece]]:
    """What each parameter becomes under the names that the trained model's files had."""
    names = set(json.loads((checkpoint / NAMES_FILE).read_text(encoding="utf-8")))
    pieces = {name: file_pieces(name, stored.size, names) for name, stored in parameters.items()}
    unknown = sorted(name for name in pieces if not pieces[name])
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} parameters of {checkpoint}, such as {unknown[0]}, have no counterpart among the "
            f"{len(names)} names in {NAMES_FILE}; was the file changed? Merge another checkpoint"
        )
    return pieces


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


def _plan_shards(parameters: Mapping[str, Any], dtype: str, max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, stored in parameters.items():
        size = _num_bytes(stored, dtype)
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


def _write_index(target: Path, written: Mapping[str, _Written], total: int) -> None:
    places = {name: tensor.place for name, tensor in written.items()}
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


def _verify(target: Path, written: Mapping[str, _Written]) -> None:
    """Read the folder back and compare names, shapes and values' digests with what was written."""
    from safetensors import safe_open

    seen: set[str] = set()
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                seen.add(name)
                if _Written(path.name, tuple(tensor.shape), _digest(tensor)) != written[name]:
                    raise CheckpointError(
                        f"{path.name}: {name} read back differs from the checkpoint; is the disk sound?"
                    )
    if seen != set(written):
        raise CheckpointError(f"{target} lacks the tensors {sorted(set(written) - seen)[:5]} after the merge")
