"""Digests of what each stage reads: artifacts of earlier stages, and files named in the recipe."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.checkpoint.resume import resume_digest
from dapo_core.errors import ConfigError
from dapo_core.model.folder import require_model_folder
from dapo_core.model.lora import open_adapter
from dapo_core.reward.routing import require_scorers
from downloads import Unreachable
from eval.problems.prompts import DEFAULT, TEMPLATES
from tasks.artifacts.artifact import MANIFEST_NAME, Artifact, sha256_of
from tasks.artifacts.references import earlier_inputs
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.evaluation.settings import scorer_file
from tasks.fetched_model import fetched_inputs
from tasks.stages import FETCH_MODEL

if TYPE_CHECKING:
    from tasks.evaluation.served_model import ServedModel


def model_inputs(config: ChainConfig, data: Artifact | None = None) -> dict[str, str]:
    """The training rows used by a recipe's warm start; empty for fetched models."""
    return {} if data is None else {"train_data": file_digest(data, TRAIN_FILE)}


def model_files(config: ChainConfig) -> dict[str, str]:
    """The identity of a model: its commit and file digests, or that of the folder model.path.

    A local folder is identified by names, sizes and modification times, because hashing would read
    all weights for every plan; the artifact made from it is hashed. Empty for model.recipe. Raises
    DownloadError and ModelError.
    """
    if config.model.source == "recipe":
        return {}
    template, tokens = config.model.chat_template, config.model.stop_tokens
    added = {"stop_tokens": " ".join(tokens)} if tokens else {}
    if template is not None:
        added["chat_template"] = _file_digest("model.chat_template", template)
    if config.model.source != "path":
        try:
            return {**fetched_inputs(config.model), **added}
        except Unreachable as error:
            known = FETCH_MODEL.config_slice(config)
            return {**earlier_inputs(config.store.path, FETCH_MODEL.name, known, error), **added}
    return {"model_folder": _folder_digest(str(config.model.path), "model.path"), **added}


def _folder_digest(path: str, key: str) -> str:
    """Digest of the names, sizes and modification times in a model folder; raises ModelError."""
    folder = Path(path)
    if (adapter := open_adapter(folder)) is None:
        require_model_folder(folder, key)
    identity: list[object] = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    ]
    if adapter is not None:
        identity.append(_folder_digest(str(adapter.base), key))
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def train_policy_inputs(config: ChainConfig, data: Artifact, model: Artifact) -> dict[str, str]:
    """Digests of the training rows, the model, and the held-out rows if training validates."""
    inputs = {"train_data": file_digest(data, TRAIN_FILE), "model": model.digest}
    if validates(config):
        inputs["held_out"] = file_digest(data, EVAL_FILE)
    return inputs


def adopted_inputs(config: ChainConfig, data: Artifact, model: Artifact) -> dict[str, str]:
    """The digest of the model before, with which an adopted checkpoint is compared."""
    return {"model": model.digest}


def validates(config: ChainConfig) -> bool:
    """True if training gets the held-out rows."""
    return config.validation.every > 0


def training_files(config: ChainConfig) -> dict[str, str]:
    """Digests of the files in the configuration: scorer, loss, reference model, checkpoint.

    Raises ConfigError, ModelError or CheckpointError if one is missing or unusable.
    """
    require_scorers((), config.reward, config.custom_reward)
    inputs = {}
    if (checkpoint := resume_digest(config.checkpoint.resume)) is not None:
        inputs["checkpoint"] = checkpoint
    if (reference := config.algorithm.kl.reference_path) is not None:
        inputs["kl_reference"] = _folder_digest(reference, "algorithm.kl.reference_path")
    files = {
        "custom_reward": ("custom_reward.path", config.custom_reward.path),
        "custom_loss": ("algorithm.custom_loss.path", config.algorithm.custom_loss.path),
    }
    return inputs | {
        name: _file_digest(key, path) for name, (key, path) in files.items() if path is not None
    }


def evaluate_model_inputs(
    config: ChainConfig, data: Artifact, model: Artifact | ServedModel
) -> dict[str, str]:
    """Digests of the held-out rows and the model; training rows do not affect an evaluation."""
    files = {name: file_digest(data, file) for name, file in benchmark_files(config).items()}
    return {
        **{problems_input(name): digest for name, digest in files.items()},
        "model": model.digest,
    }


def problems_input(benchmark: str) -> str:
    """The input name for a benchmark's problems; "" stands for data.eval without a suite."""
    return f"eval_data {benchmark}".strip()


def benchmark_files(config: ChainConfig) -> dict[str, str]:
    """The prepared file of each benchmark by name; without a suite, that of data.eval under ""."""
    return {name: benchmark_file(name) for name in config.evaluate.named} or {"": EVAL_FILE}


def evaluation_files(config: ChainConfig) -> dict[str, str]:
    """Digests of the prompt and scorer files; for a suite, of each benchmark."""
    if config.evaluate.benchmarks:
        return {
            f"{key} {name}": digest
            for name, benchmark in config.evaluate.named.items()
            for key, digest in evaluation_files(config.for_benchmark(benchmark)).items()
        }
    files = {}
    if config.evaluate.prompt not in (DEFAULT, *TEMPLATES):
        files["prompt_template"] = _file_digest("evaluate.prompt", config.evaluate.prompt)
    if (scorer := scorer_file(config.evaluate)) is not None:
        files["scorer"] = _file_digest("evaluate.scorer", str(scorer[0]))
    return files


def file_digest(artifact: Artifact, name: str) -> str:
    """sha256 of one file of an artifact, from its manifest."""
    return next(entry["sha256"] for entry in artifact.manifest()["files"] if entry["path"] == name)


def _file_digest(key: str, path: str) -> str:
    try:
        return sha256_of(Path(path))
    except OSError as error:
        raise ConfigError(
            f"{key}={path} cannot be read: {error.strerror}; set it to an existing file"
        ) from None
