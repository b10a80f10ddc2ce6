"""Converts Megatron weights to a Hugging Face folder with the converter of their trainer."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo_core.checkpoint.others import NEWEST_FILE, OtherCheckpoint
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.merge.run import other_in
from dapo_core.model.folder import copy_model_files
from tasks.config import ChainConfig
from tasks.external.environment import interpreter, trainer_env
from tasks.external.launch import TRAINER_FOLDER
from tasks.external.training import MODEL_FILES_FOLDER
from tasks.processes.child import background_command

logger = logging.getLogger(__name__)

# From the guides; layers and sizes depend on the training.
_EXAMPLES = {
    "mindspeed-rl": "python convert_ckpt.py --use-mcore-models --model-type GPT "
    "--load-model-type mg --save-model-type hf --target-tensor-parallel-size 1 "
    "--target-pipeline-parallel-size 1 --load-dir {checkpoint} --save-dir {model}, with the "
    "model's own flags of examples/ckpt",
    "mindspeed-mm": "mm-convert Qwen2_5_VLConverter mm_to_hf --cfg.mm_dir {checkpoint} "
    "--cfg.hf_config.hf_dir {model} --cfg.save_hf_dir {output}, with --cfg.parallel_config of the "
    "training",
}


@contextmanager
def converted(
    config: ChainConfig,
    sources: Sequence[Path],
    target: Path,
    on_line: Callable[[str], None] | None = None,
) -> Iterator[list[Path]]:
    """Yield the folders to merge: the sources themselves, or the converted folder for Megatron
    weights.

    The converted folder is created beside `target`, takes as much space, and is removed at the end.
    Raises ConfigError if no converter is known, and ChildProcessFailed with its last lines if it
    fails.
    """
    other = other_in(sources[0]) if len(sources) == 1 else None
    if other is None or other.form not in ("distributed", "iteration"):
        yield list(sources)
        return
    folder = target.absolute().with_name(f".{target.name}.converting")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed merge
    folder.mkdir(parents=True)
    external = config.external
    try:
        command = converter_command(config, other, folder)
        logger.info("converting %s: %s", other.path, shlex.join(command))
        env, log_path = trainer_env(external), folder / "converter.log"
        with background_command(
            command, log_path=log_path, label="converter", env=env, cwd=external.source
        ) as process:
            process.forward_lines_to(on_line)
        yield [_converted_folder(other, folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def converter_command(config: ChainConfig, other: OtherCheckpoint, folder: Path) -> list[str]:
    """The command that converts a checkpoint into `folder`/output: external.converter, or verl's
    merger.
    """
    external, backend = config.external, config.train.backend
    output, model, checkpoint = folder / "output", folder / "model", folder / "checkpoint"
    if external.converter is None and other.form == "distributed":
        command = [
            interpreter(external),
            "-m",
            "verl.model_merger",
            "merge",
            "--backend",
            "megatron",
        ]
        command += ["--local_dir", str(other.actor.absolute()), "--target_dir", str(output)]
        return [*command, "--trust-remote-code"] if config.model.trust_remote_code else command
    if external.converter is None:
        raise ConfigError(
            f"{other.path} holds Megatron weights of {backend}, whose converter depends on the "
            "model: set "
            "external.converter to its command, such as "
            f"{_EXAMPLES.get(backend, _EXAMPLES['mindspeed-rl'])}. "
            "{checkpoint}, {model} and {output} are replaced, and it runs in external.source"
        )
    checkpoint.mkdir()  # the layout converters expect: the step folder, and the file that names it
    (checkpoint / other.path.name).symlink_to(other.path.absolute())
    (checkpoint / NEWEST_FILE).write_text(str(other.step), encoding="ascii")
    model.mkdir()
    _copy_model_files(other, model)
    places = {"{checkpoint}": str(checkpoint), "{model}": str(model), "{output}": str(output)}
    words = shlex.split(external.converter)
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    return [interpreter(external), *words[1:]] if words[0] in ("python", "python3") else words


def _converted_folder(other: OtherCheckpoint, folder: Path) -> Path:
    """The folder with safetensors that the converter wrote, completed with configuration and
    tokenizer.
    """
    places = {
        Path(root)
        for root, _, names in os.walk(folder)
        if any(name.endswith(".safetensors") for name in names)
    }
    if len(places) != 1:
        raise CheckpointError(
            f"the converter of {other.path} succeeded but left {len(places)} folders with "
            "safetensors in "
            f"{folder}, not one; correct external.converter"
        )
    [found] = places
    if not (found / "config.json").is_file() or not any(found.glob("tokenizer*")):
        _copy_model_files(other, found)
    return found


def _copy_model_files(other: OtherCheckpoint, folder: Path) -> None:
    """Copy configuration and tokenizer of the trained model into a folder without overwriting JSON
    files.
    """
    source = other.path.parent.parent / TRAINER_FOLDER / MODEL_FILES_FOLDER
    if not source.is_dir():
        raise CheckpointError(
            f"{source} with the model's configuration and tokenizer is missing: merge the training "
            "output, "
            "not a checkpoint that was moved out of it"
        )
    existing = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    copy_model_files(source, folder)
    for name, content in existing.items():
        (folder / name).write_bytes(content)
