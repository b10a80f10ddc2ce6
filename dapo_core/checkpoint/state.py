"""What the trainer needs beside the shards to continue where it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.data import Prompt
from dapo_core.engines import Response
from dapo_core.errors import CheckpointError
from dapo_core.rollout import Group, GroupRequest, Rollout

STATE_FILE = "trainer_state.json"


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs beside the shards to continue where it stopped."""

    step: int  # training steps done
    policy_version: int
    prompt_position: int  # prompts taken from the stream
    surplus: list[tuple[int, Group]]  # (step that sampled its oldest token, group)
    unfinished: list[tuple[int, GroupRequest]]  # likewise, of groups to be continued
    kl_coefficient: float  # of KL in the reward
    metrics: dict[str, float]  # of the step, in case the process ends before metrics.jsonl has them
    identity: dict[str, Any]  # settings and data that every attempt at the training must share


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state of a checkpoint; raises CheckpointError when it cannot be read."""
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        surplus = [(born, _group(group)) for born, group in values.pop("surplus")]
        unfinished = [(born, _group_request(request)) for born, request in values.pop("unfinished")]
        return TrainerState(surplus=surplus, unfinished=unfinished, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} cannot be read ({error!r}); remove the folder {checkpoint.name} "
            "to continue from the checkpoint before it"
        ) from error


def _group(values: dict[str, Any]) -> Group:
    rollouts = [Rollout(**rollout) for rollout in values["rollouts"]]
    return Group(**{**values, "prompt": _prompt(values["prompt"]), "rollouts": rollouts})


def _group_request(values: dict[str, Any]) -> GroupRequest:
    responses = [Response(**response) for response in values["responses"]]
    return GroupRequest(**{**values, "prompt": _prompt(values["prompt"]), "responses": responses})


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(**{**values, "prompt_ids": tuple(values["prompt_ids"])})
