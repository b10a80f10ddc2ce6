"""Merges checkpoint shards into a model folder that transformers and vLLM load."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import CheckpointError
from dapo_core.merge.dcp import CheckpointChoice, DcpSource, find_checkpoint
from dapo_core.merge.huggingface import HuggingFaceSource
from dapo_core.merge.lora import LoraSource, adapter_source, with_base
from dapo_core.merge.outputs import weights_in
from dapo_core.merge.sources import Source
from dapo_core.merge.verification import (
    compare_logits,
    require_architecture,
    require_equal,
    require_on_disk,
)
from dapo_core.merge.verl import VerlSource, find_shards
from dapo_core.merge.writer import (
    ModelWriter,
    OnBytes,
    OutputFile,
    OutputTensor,
    output_tensors,
    plan_files,
    require_opens,
    write_index,
    write_manifest,
)
from dapo_core.model.folder import copy_model_files, read_config
from dapo_core.model.lora import ADAPTER_FOLDER, is_adapter_folder
from dapo_core.model.names import COMPUTED_BUFFERS, file_name, tied_names
from dapo_core.model.pretrained import empty_causal_lm
from durable import LockHeld, is_locked, locked, publish, read_holder

if TYPE_CHECKING:
    from torch import nn


def merge_checkpoint(
    sources: Sequence[Path],
    target: Path,
    dtype: str = "keep",
    max_shard_bytes: int = 5 * 1000**3,
    on_bytes: OnBytes | None = None,
    verify_logits: bool = False,
    checkpoint: CheckpointChoice = "latest",
    base: Path | None = None,
) -> dict[str, int]:
    """Write the model to `target` as a folder that transformers and vLLM load.

    `sources` is a dapo train checkpoint or training output (`checkpoint` selects latest or best), a
    verl FSDP checkpoint, a Hugging Face folder or a LoRA adapter; pass one folder per node if the
    shards are on several nodes. `dtype` "keep" preserves each tensor's dtype. Tied weights are
    stored once.
    Everything read is verified against the checkpoint's checksums, and merge_manifest.json records
    digests of everything written. `verify_logits` also reads the files back from disk and compares
    the logits of both models. Adapters are merged in float32 into their base model (`base`, else
    the one that they name), and also written to the folder `adapter`. Returns {"tensors",
    "parameters", "bytes", "shards"}.

    The target appears atomically once it is complete. Raises CheckpointError if a source is
    incomplete or belongs to another model, if the target is not empty, or if another merge is
    writing it, and ModelError if transformers cannot build the model.
    """
    target = target.absolute()  # "." has no name
    source = open_source(sources, checkpoint, base)
    _require_empty(target)
    if isinstance(source, HuggingFaceSource):
        source.require_finite()
    model = empty_causal_lm(source.model_files)
    tied = _stored_twice(model, source)
    files = _plan(source, model, tied, dtype, max_shard_bytes)
    outputs = [tensor for file in files for tensor in file.tensors]
    total = sum(file.num_bytes for file in files)
    with _published(target, total) as folder:
        with ModelWriter(folder, files, source) as writer:
            digests = writer.write(_dropped(source, tied, outputs), on_bytes)
            parts = writer.parts(digests)
        require_equal(tied, digests, source.label)
        for file in files:
            require_opens(folder / file.name, file)
        num_parameters = model.num_parameters()  # type: ignore[operator]
        write_index(folder, files, num_parameters)
        _copy_model_files(source.model_files, folder, outputs)
        description: dict[str, Any] = {"source": source.describe(), "dtype": dtype}
        if verify_logits:
            require_on_disk(folder, parts)
            description["logits"] = compare_logits(folder, source, outputs)
        if isinstance(source, LoraSource):
            source.write_adapter(folder / ADAPTER_FOLDER)
            description["rounding_error"] = source.rounding_error(outputs)
        write_manifest(folder, files, parts, digests, description)
    return {
        "tensors": len(outputs),
        "parameters": num_parameters,
        "bytes": total,
        "shards": len(files),
    }


def open_source(
    folders: Sequence[Path], checkpoint: CheckpointChoice = "latest", base: Path | None = None
) -> Source:
    """Open any trainer's checkpoint or a Hugging Face folder, which may have one folder per node.

    `checkpoint` selects one in a training output; `base` is an adapter's base model. Raises
    CheckpointError if there is none or a shard is missing.
    """
    if len(folders) == 1:
        if is_adapter_folder(folders[0]):
            return adapter_source(folders[0], base)
        folders = [weights_in(folders[0])]
        if (folders[0] / "config.json").is_file() and any(folders[0].glob("*.safetensors")):
            _refuse_best(checkpoint, folders[0])
            return HuggingFaceSource(folders[0])
    shards = find_shards(folders)
    if not shards:
        return with_base(DcpSource(find_checkpoint(folders[0], checkpoint), folders[1:]), base)
    _refuse_best(checkpoint, folders[0])
    return VerlSource(shards)


def _refuse_best(checkpoint: CheckpointChoice, folder: Path) -> None:
    if checkpoint == "best":
        raise CheckpointError(
            f"{folder} is one checkpoint, so there is no best one to choose; omit --checkpoint best"
        )


def _require_empty(target: Path) -> None:
    try:
        if target.is_dir() and not any(target.iterdir()):
            return
        is_taken = target.exists() or target.is_symlink()
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be read ({error}); merge into a new folder"
        ) from error
    if is_taken:
        problem = "is not empty" if target.is_dir() else "is not a folder"
        raise CheckpointError(f"{target} {problem}; merge into a new folder")


def _require_named(built: str, folder: Path) -> None:
    """Raise CheckpointError unless config.json names the class that transformers builds."""
    if (named := read_config(folder).get("architectures")) != [built]:
        raise CheckpointError(
            f"config.json in {folder} has architectures={named!r}, but transformers builds a "
            f"{built}; correct it, or merge with the version used for training"
        )


def _stored_twice(model: nn.Module, source: Source) -> dict[str, str]:
    """Return the aliases of tied parameters in the source, with the primary names there."""
    tied = tied_names(model).items()
    return {name: file_name(kept, source.tensors) for name, kept in tied if name in source.tensors}


def _plan(
    source: Source, model: nn.Module, tied: Collection[str], dtype: str, max_shard_bytes: int
) -> list[OutputFile]:
    """Plan the files; raises CheckpointError unless they match the architecture's tensors."""
    _require_named(type(model).__name__, source.model_files)
    files = plan_files(checked_outputs(source, model, tied, dtype), max_shard_bytes)
    for file in files:
        file.header()  # fail on an unsupported dtype before writing anything
    return files


def checked_outputs(
    source: Source,
    model: nn.Module,
    tied: Collection[str] | None = None,
    dtype: str = "keep",
    origin: str = "in its config.json",
) -> list[OutputTensor]:
    """Return the tensors to write; raises CheckpointError unless they are exactly the model's.

    `origin` says where the model's architecture comes from. Tied tensors are left out.
    """
    tied = _stored_twice(model, source) if tied is None else tied
    computed = {name for name in source.tensors if COMPUTED_BUFFERS.search(name)}
    outputs = output_tensors(source, dtype, leave_out={*tied, *computed})
    require_architecture(model, {tensor.name: tensor for tensor in outputs}, source.label, origin)
    return outputs


def _dropped(
    source: Source, tied: Mapping[str, str], outputs: Sequence[OutputTensor]
) -> list[OutputTensor]:
    """Return the tied tensors to compare with the kept ones, unless both are stored as one."""
    kept = {tensor.name: tensor for tensor in outputs}
    return [
        dataclasses.replace(kept[other], name=name, stored_name=name)
        for name, other in tied.items()
        if source.blocks(name) != source.blocks(other)
    ]


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed merges in this folder, but not those of a running merge."""
    for working in folder.glob(".*.merging"):
        if (working / "lock").exists() and not is_locked(working / "lock"):
            shutil.rmtree(working, ignore_errors=True)


@contextmanager
def _published(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` on success and removed on failure.

    The folder is in `.TARGET.merging`, which is locked. Raises CheckpointError if another merge
    holds the lock or disk space is short.
    """
    working = target.with_name(f".{target.name}.merging")
    lock, folder = working / "lock", working / "model"
    try:
        if working.is_dir() and not lock.exists() and any(working.iterdir()):
            raise CheckpointError(
                f"{working} contains other files, but the merge needs that name; move it away"
            )
        working.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            try:
                if folder.exists():
                    shutil.rmtree(folder)  # left by a killed merge
                free = shutil.disk_usage(working).free
                if free < num_bytes:
                    raise CheckpointError(
                        f"the merged model needs {num_bytes:,} bytes, but only {free:,} are free "
                        f"at {target}; free some space or choose a target on another disk"
                    )
                folder.mkdir()
                yield folder
                publish(folder, target)
            finally:
                shutil.rmtree(working, ignore_errors=True)
    except LockHeld:
        raise CheckpointError(
            f"{target} is being written by another merge, {read_holder(lock)}; wait for it or "
            "choose another target"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}; {num_bytes:,} bytes were needed"
        ) from error


def _copy_model_files(model_files: Path, folder: Path, outputs: Sequence[OutputTensor]) -> None:
    """Copy the model files; like transformers, config.json names the first parameter's dtype."""
    copy_model_files(model_files, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    dtypes = [tensor.dtype for tensor in outputs if tensor.dtype.is_floating_point]
    config[key] = str(dtypes[0]).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
