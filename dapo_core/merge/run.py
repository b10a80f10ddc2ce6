"""A merge from its sources to a folder that transformers and vLLM load."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.others import OtherCheckpoint, checkpoint_at, newest_other
from dapo_core.errors import CheckpointError
from dapo_core.merge.dcp import CheckpointChoice, DcpSource, find_checkpoint
from dapo_core.merge.huggingface import HuggingFaceSource
from dapo_core.merge.sources import Source
from dapo_core.merge.verification import (
    compare_logits,
    empty_model,
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
from dapo_core.model_folder import copy_model_files
from dapo_core.parameter_names import COMPUTED_BUFFERS, tied_names
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
) -> dict[str, int]:
    """Write the sources' model to `target` as a folder that transformers and vLLM load.

    `sources` are a checkpoint of dapo train or its output, of which `checkpoint` is taken, or an FSDP checkpoint
    of verl; several folders hold the shards of several nodes. `dtype` "keep" leaves each tensor as it was
    trained. Tied weights are stored once. What is read is compared with the checksums of the checkpoint, and
    merge_manifest.json gets digests of what is written. `verify_logits` also reads the files back from the disk
    and runs both models. Returns {"tensors", "parameters", "bytes", "shards"}.

    Raises CheckpointError for a source that is incomplete or of another model, for a target that holds files and
    for one that another merge writes. The target appears in one step, when all of it is written.
    """
    target = target.absolute()  # "." has no name
    _require_empty(target)
    source = open_source(sources, checkpoint)
    model = empty_model(source.model_files)
    tied = {name: kept for name, kept in tied_names(model).items() if name in source.tensors}
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
        description = {"source": source.describe(), "dtype": dtype}
        if verify_logits:
            require_on_disk(folder, parts)
            description["logits"] = compare_logits(folder, source, outputs)
        write_manifest(folder, files, parts, digests, description)
    return {"tensors": len(outputs), "parameters": num_parameters, "bytes": total, "shards": len(files)}


def open_source(folders: Sequence[Path], checkpoint: CheckpointChoice = "latest") -> Source:
    """The checkpoint of dapo train or of another trainer in the folders: one, or one of each node.

    `checkpoint` chooses among those of a training output. A Hugging Face folder is a source too. Raises
    CheckpointError when there is none, or when it is incomplete, naming the shard.
    """
    if len(folders) == 1:
        folders = [weights_in(folders[0], checkpoint)]
        if (folders[0] / "config.json").is_file() and any(folders[0].glob("*.safetensors")):
            return HuggingFaceSource(folders[0])
    shards = find_shards(folders)
    if not shards:
        return DcpSource(find_checkpoint(folders[0], checkpoint), folders[1:])
    _refuse_best(checkpoint, folders[0], "one checkpoint of verl")
    return VerlSource(shards)


def weights_in(folder: Path, checkpoint: CheckpointChoice = "latest") -> Path:
    """What to merge of another trainer's output or checkpoint: its shards, or the model folder that it wrote.

    Any other folder is returned as it is. Raises CheckpointError for a form that must be converted first.
    """
    other = other_in(folder)
    if other is None:
        return folder
    is_output = checkpoint_at(folder) is None
    _refuse_best(
        checkpoint, folder, "of another trainer, which ranks none" if is_output else "one checkpoint of verl"
    )
    form = other.form
    if form in ("distributed", "iteration"):
        raise CheckpointError(
            f"{other.actor} holds Megatron's distributed weights, which its own trainer converts: dapo merge with "
            "--config RECIPE, whose external.python (verl) or external.source (MindSpeed) has the converter"
        )
    return other.model_folder or other.actor if form == "model" else other.actor


def _refuse_best(checkpoint: CheckpointChoice, folder: Path, what: str) -> None:
    if checkpoint == "best":
        raise CheckpointError(
            f"{folder} is {what}, so there is no best one to choose; leave out --checkpoint best"
        )


def other_in(folder: Path) -> OtherCheckpoint | None:
    """The checkpoint of another trainer that the folder is, or the newest one in the training output."""
    return newest_other(folder / CHECKPOINTS) or newest_other(folder) or checkpoint_at(folder)


def _require_empty(target: Path) -> None:
    try:
        if target.is_dir() and not any(target.iterdir()):
            return
        is_taken = target.exists() or target.is_symlink()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be read ({error}); merge into a new folder") from error
    if is_taken:
        what = "is not empty" if target.is_dir() else "is no folder"
        raise CheckpointError(f"{target} {what}; merge into a new folder")


def _plan(
    source: Source, model: nn.Module, tied: Collection[str], dtype: str, max_shard_bytes: int
) -> list[OutputFile]:
    """The files to write; raises CheckpointError unless they hold what the model's configuration asks for."""
    computed = {name for name in source.tensors if COMPUTED_BUFFERS.search(name)}
    outputs = output_tensors(source, dtype, leave_out={*tied, *computed})
    require_architecture(model, {tensor.name: tensor for tensor in outputs}, source.label)
    files = plan_files(outputs, max_shard_bytes)
    for file in files:
        file.header()  # a dtype that safetensors lacks is found before anything is written
    return files


def _dropped(source: Source, tied: Mapping[str, str], outputs: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Tied tensors to compare with what is kept, in its dtype; one at the same place in the source is equal."""
    kept = {tensor.name: tensor for tensor in outputs}
    return [
        dataclasses.replace(kept[other], name=name, stored_name=name)
        for name, other in tied.items()
        if source.blocks(name) != source.blocks(other)
    ]


def remove_leftovers(folder: Path) -> None:
    """Remove what killed merges to targets in this folder left behind, but not what a merge is writing."""
    for working in folder.glob(".*.merging"):
        if (working / "lock").exists() and not is_locked(working / "lock"):
            shutil.rmtree(working, ignore_errors=True)


@contextmanager
def _published(target: Path, num_bytes: int) -> Iterator[Path]:
    """A folder that becomes `target` when the block ends, and is removed when the block fails.

    It lies in `.TARGET.merging`, which only one merge at a time may use. Raises CheckpointError when another one
    does, and when the disk lacks the room.
    """
    working = target.with_name(f".{target.name}.merging")
    lock, folder = working / "lock", working / "model"
    try:
        if working.is_dir() and not lock.exists() and any(working.iterdir()):
            raise CheckpointError(f"{working} holds other files, and the merge needs that name; move it away")
        working.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            try:
                if folder.exists():
                    shutil.rmtree(folder)  # of a merge that was killed
                free = shutil.disk_usage(working).free
                if free < num_bytes:
                    raise CheckpointError(
                        f"the merged model needs {num_bytes:,} bytes, and {free:,} are free at {target}; make "
                        "room, or name a target on another disk"
                    )
                folder.mkdir()
                yield folder
                publish(folder, target)
            finally:
                shutil.rmtree(working, ignore_errors=True)
    except LockHeld:
        raise CheckpointError(
            f"{target} is being written by another merge, {read_holder(lock)}; wait for it, or name another target"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}; {num_bytes:,} bytes were needed"
        ) from error


def _copy_model_files(model_files: Path, folder: Path, outputs: Sequence[OutputTensor]) -> None:
    """Everything but weights; config.json names the dtype of the first parameter, as transformers does."""
    copy_model_files(model_files, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    dtypes = [tensor.dtype for tensor in outputs if tensor.dtype.is_floating_point]
    config[key] = str(dtypes[0]).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
