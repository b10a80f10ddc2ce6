"""A checkpoint trained elsewhere as the output of the training stage (`dapo adopt`)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from dapo_core.merge.adoption import open_trained, require_weights, trained_files
from dapo_core.merge.outputs import step_of
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.folder import copy_model_files
from durable import link_or_copy, write_atomically
from interop.logs import Training, read_training
from tasks.artifacts.artifact import Artifact, sha256_of
from tasks.config import ChainConfig

logger = logging.getLogger(__name__)

WEIGHTS, SETTINGS = "weights", "settings"  # folders in the output


def adopted_files(config: ChainConfig) -> dict[str, str]:
    """The identity of the adopted weights by names, sizes and times; digests of log and settings.

    A plan cannot read all weights: the store hashes them once they are adopted. Raises ModelError,
    CheckpointError or ConfigError for a folder or file that cannot be adopted.
    """
    files = trained_files(require_weights(Path(str(config.adopt.folder))))
    identity = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    digests = {"adopted": hashlib.sha256(repr(identity).encode()).hexdigest()}
    for name in ("log", "config"):
        if (path := getattr(config.adopt, name)) is not None:
            try:
                digests[f"adopted {name}"] = sha256_of(Path(path))
            except OSError as error:
                raise ConfigError(
                    f"adopt.{name}={path} cannot be read: {error.strerror}; name a file"
                ) from None
    return digests


def adopt_checkpoint(config: ChainConfig, before: Path, output: Path) -> dict[str, Any]:
    """Link the weights into `output`, with the tokenizer of the model before; returns metrics.

    Raises CheckpointError or ModelError like `open_trained`, and ConfigError for a log without
    steps.
    """
    place, weights = require_weights(Path(str(config.adopt.folder))), output / WEIGHTS
    source = open_trained(place, before, config.model.trust_remote_code)
    # evaluated with the tokenizer and the chat template of the model before
    copy_model_files(before, weights / source.model_files.relative_to(place))
    for path in trained_files(place):
        target = weights / path.relative_to(place)
        target.unlink(missing_ok=True)
        link_or_copy(path.resolve(), target)
    step = step_of(place)
    if config.adopt.log is not None:
        training = _read_log(Path(config.adopt.log))
        _write_metrics(training, output)
        last = training.steps[-1]["step"]
        step = last if step is None else step
        if last < step:
            message = "adopt.log=%s ends at step %d, but the checkpoint is of step %d"
            logger.warning(message, config.adopt.log, last, step)
    if config.adopt.config is not None:
        (output / SETTINGS).mkdir()
        shutil.copy(config.adopt.config, output / SETTINGS)
    found = {"trained": "elsewhere", "source": str(place.absolute()), **source.describe()}
    return found if step is None else {**found, "step": step}


def adopted_weights(training: Artifact) -> Path:
    """The folder of adopted weights in the output of the training stage, or the output itself."""
    weights = Path(training.path) / WEIGHTS
    return weights if weights.is_dir() else Path(training.path)


def describe_adopted(training: Artifact) -> str:
    """The origin of an adopted checkpoint: source, step, digest and settings, if given."""
    metrics, settings = training.manifest()["metrics"], Path(training.path) / SETTINGS
    step = f", step {metrics['step']}" if "step" in metrics else ""
    names = [f", settings {path}" for path in sorted(settings.glob("*"))]
    return f"trained elsewhere: {metrics['source']}{step}, digest {training.digest}{''.join(names)}"


def _read_log(path: Path) -> Training:
    training = read_training(path)
    if not training.steps:
        raise ConfigError(
            f"adopt.log={path} has no training steps: neither `step:N - name:value` (verl), "
            "`iteration: N / M | name : value` (MindSpeed) nor JSON lines with a step; name the "
            "training's log, or leave adopt.log unset"
        )
    return training


def _write_metrics(training: Training, output: Path) -> None:
    """Write the steps as metrics.jsonl; non-finite numbers become null."""
    lines = [
        {name: value if math.isfinite(value) else None for name, value in step.items()}
        for step in training.steps
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_atomically(output / METRICS_FILE, text)
