"""A merge from its sources to a folder that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from math import prod
from pathlib import Path

from dapo_core.checkpoint.folder import PARTIAL
from dapo_core.errors import CheckpointError
from dapo_core.merge.dcp import CheckpointChoice, DcpSource, find_checkpoint
from dapo_core.merge.sources import Source
from dapo_core.merge.verification import (
    compare_logits,
    empty_model,
    require_architecture,
    require_equal,
)
from dapo_core.merge.verl import VerlSource, find_shards
from dapo_core.merge.writer import (
    FileDigests,
    OutputFile,
    OutputTensor,
    output_tensors,
    plan_files,
    write_file,
    write_index,
    write_manifest,
)
from dapo_core.model_folder import copy_model_files
from dapo_core.parameter_names import COMPUTED_BUFFERS, tied_names
from durable import publish

_MAX_FILES_AT_ONCE = 4
OnFile = Callable[[int, int], None]  # bytes done, bytes in all


def merge_checkpoint(
    sources: Sequence[Path],
    target: Path,
    dtype: str = "keep",
    max_shard_bytes: int = 5 * 1000**3,
    on_file: OnFile | None = None,
    verify_logits: bool = False,
    checkpoint: CheckpointChoice = "latest",
) -> dict[str, int]:
    """Write the sources' model to `target` as a folder that transformers and vLLM load, and verify it.

    `sources` are a checkpoint of dapo train or its output, of which `checkpoint` is taken, or an FSDP checkpoint
    of verl; several folders hold the shards of several nodes. `dtype` "keep" leaves each tensor as it was
    trained. Tied weights are stored once. Everything written is read back and compared; merge_manifest.json keeps
    the digests. `verify_logits` also runs both models. Returns {"tensors", "parameters", "bytes", "shards"}.

    Raises CheckpointError for a source that is incomplete or of another model and for a target that holds files,
    before anything is written. The target appears in one step, when all of it is verified.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty; merge into a new folder")
    source = open_source(sources, checkpoint)
    files = _plan(source, dtype, max_shard_bytes)
    outputs = [tensor for file in files for tensor in file.tensors]
    total = sum(file.num_bytes for file in files)
    with _published(target, total) as folder:
        written = _write(folder, files, source, on_file)
        write_index(folder, files)
        _copy_model_files(source.model_files, folder, outputs)
        description = {"source": source.describe(), "dtype": dtype}
        if verify_logits:
            description["logits"] = compare_logits(folder, source, outputs)
        write_manifest(folder, written, description)
    stored = {tensor.stored_name: source.tensors[tensor.stored_name].shape for tensor in outputs}
    num_parameters = sum(prod(shape) for shape in stored.values())
    return {"tensors": len(outputs), "parameters": num_parameters, "bytes": total, "shards": len(files)}


def open_source(folders: Sequence[Path], checkpoint: CheckpointChoice = "latest") -> Source:
    """The checkpoint of dapo train or of verl in the folders: one, or one of each node.

    `checkpoint` chooses among those of a training output. Raises CheckpointError when there is none, or when it is
    incomplete, naming the shard.
    """
    shards = find_shards(folders)
    if not shards:
        return DcpSource(find_checkpoint(folders[0], checkpoint), folders[1:])
    if checkpoint == "best":
        raise CheckpointError(
            f"{folders[0]} is one checkpoint of verl, so there is no best one to choose; "
            "leave out --checkpoint best"
        )
    return VerlSource(shards)


def _plan(source: Source, dtype: str, max_shard_bytes: int) -> list[OutputFile]:
    """The files to write; raises CheckpointError unless they hold what the model's configuration asks for."""
    model = empty_model(source.model_files)
    tied = {name: kept for name, kept in tied_names(model).items() if name in source.tensors}
    for name, kept in tied.items():
        require_equal(source, name, kept)
    computed = {name for name in source.tensors if COMPUTED_BUFFERS.search(name)}
    outputs = output_tensors(source, dtype, leave_out={*tied, *computed})
    require_architecture(model, {tensor.name: tensor for tensor in outputs}, source.label)
    files = plan_files(outputs, max_shard_bytes)
    for file in files:
        file.header()  # a dtype that safetensors lacks is found before anything is written
    return files


def _write(
    folder: Path, files: Sequence[OutputFile], source: Source, on_file: OnFile | None
) -> list[tuple[OutputFile, FileDigests]]:
    """Write the files, several at once, since a file's digest takes longest and cannot be shared among cores."""
    total = sum(file.num_bytes for file in files)
    done = 0
    files_at_once = min(_MAX_FILES_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(files_at_once, thread_name_prefix="merge-file") as pool:
        running = {pool.submit(write_file, folder / file.name, file, source): file for file in files}
        try:
            for finished in as_completed(running):
                finished.result()
                done += running[finished].num_bytes
                if on_file is not None:
                    on_file(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return [(file, future.result()) for future, file in running.items()]


@contextmanager
def _published(target: Path, num_bytes: int) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends, and is removed when the block fails.

    Raises CheckpointError when the disk lacks the room.
    """
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)  # of a merge that was killed
    partial.mkdir(parents=True)
    try:
        free = shutil.disk_usage(partial).free
        if free < num_bytes:
            raise CheckpointError(
                f"the merged model needs {num_bytes:,} bytes, and {free:,} are free at {target}; make room, or "
                "name a target on another disk"
            )
        yield partial
        publish(partial, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}; {num_bytes:,} bytes were needed"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well


def _copy_model_files(model_files: Path, folder: Path, outputs: Sequence[OutputTensor]) -> None:
    """Everything but weights; config.json names the dtype of the largest tensor."""
    copy_model_files(model_files, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    config[key] = str(max(outputs, key=lambda tensor: tensor.num_bytes).dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
