"""Which training the checkpoints of another trainer belong to, so that no other training continues them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import step_folders
from dapo_core.digests import file_digest
from dapo_core.errors import CheckpointError
from dapo_core.identity import refuse_other_training, training_identity
from durable import write_atomically
from tasks.config import ChainConfig
from tasks.external.launch import Inputs

logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity.json"  # beside what was rendered for the trainer


def identity_of(config: ChainConfig, inputs: Inputs) -> dict[str, Any]:
    """The values that all attempts of one training share: those of a training of our own, and the trainer's."""
    external = config.external
    rows = {name: getattr(external, name) for name in ("train_rows", "held_out_rows")}
    return {
        **training_identity(config, file_digest(inputs.data), inputs.model),
        "external.strategy": external.strategy,
        "external.overrides": list(external.overrides),
        **{f"external.{name}": _content(Path(path)) for name, path in rows.items() if path is not None},
    }


def refuse_checkpoint_of_another(
    config: ChainConfig, inputs: Inputs, checkpoint: Path, identity: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if the output's checkpoint is of another training than `identity`.

    checkpoint.allow_changed names what may differ. A checkpoint without a record was put there by a person.
    """
    record = inputs.folder / IDENTITY_FILE
    if not record.is_file():
        return
    before = json.loads(record.read_text(encoding="utf-8"))
    for change in refuse_other_training(checkpoint, before, identity, config.checkpoint.allow_changed):
        logger.warning("checkpoint.allow_changed: continuing from %s with %s", checkpoint.name, change)


def refuse_own_checkpoints(folder: Path) -> None:
    """Raise CheckpointError if the folder has checkpoints of our own trainer, which no other one continues."""
    if own := step_folders(folder):
        raise CheckpointError(
            f"{folder} has {len(own)} checkpoints of our own trainer, the newest {own[-1].name}, and another "
            "trainer would start from the model beside them; name another --output, set train.backend=own to go "
            "on, or checkpoint.resume=never to set them aside"
        )


def record_identity(inputs: Inputs, identity: Mapping[str, Any]) -> None:
    """Write what `refuse_checkpoint_of_another` compares with."""
    inputs.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(inputs.folder / IDENTITY_FILE, json.dumps(identity, indent=2))


def _content(path: Path) -> str:
    """The digest of a file; the path of a folder."""
    return file_digest(path) if path.is_file() else str(path)
