"""Checks of another trainer (train.backend): installed in the right version, able to do what the recipe says."""

from __future__ import annotations

from dapo_core.config.fields import known_fields
from dapo_core.config.training import TrainingConfig
from durable import leaves
from tasks.config import ChainConfig
from tasks.external.environment import describe, trainer_versions
from tasks.external.launch import planned_start
from tasks.preflight.finding import OK, WARN, Findings

# What the stage does with any trainer.
_STAGES = ("run.name", "model.", "checkpoint.", "train.tracker", "train.backend", "train.device_model")


def check_trainer(config: ChainConfig, findings: Findings) -> None:
    """The trainer, its command, and the keys of the recipe that it has no word for."""
    backend = config.train.backend
    with findings.catching("trainer"):
        findings.add("trainer", OK, describe(trainer_versions(config)))
    with findings.catching("command"):
        start = planned_start(config)
        findings.add("command", OK, f"{len(start.argv)} words for {backend}; dapo plan shows them")
        if names := [name for name in changed_keys(config) if name not in start.said]:
            findings.add(
                "keys",
                WARN,
                f"{backend} has no counterpart of {', '.join(names)}: they do nothing in this recipe",
                "remove them, or set train.backend=own",
            )


def changed_keys(config: ChainConfig) -> list[str]:
    """The keys of a training that the recipe changes, but for those that the stage itself reads."""
    fields, values = known_fields(TrainingConfig), leaves(config.model_dump(mode="json"))
    return [
        name
        for name, field in fields.items()
        if not name.startswith(_STAGES)
        and name in values
        and values[name] != field.get_default(call_default_factory=True, validated_data={})
    ]
