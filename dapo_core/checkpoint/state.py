"""What the trainer needs beside the shards to continue where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dapo_core.data import Prompt
from dapo_core.engines.base import Response
from dapo_core.errors import CheckpointError
from dapo_core.rollout import Group, GroupRequest, Rollout, VersionSpans

STATE_FILE = "trainer_state.json"
GROUPS_FILE = "carried_groups.json"  # separate, so that metrics of many checkpoints are read without it
CARRIED = ("surplus", "unfinished")  # the fields in it

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs beside the shards to continue where it stopped."""

    step: int  # training steps done
    policy_version: int
    prompt_position: int  # prompts taken from the stream
    surplus: list[tuple[int, Group]]  # (step that sampled its oldest token, group)
    unfinished: list[tuple[int, GroupRequest]]  # (the same step, a group to be continued)
    kl_coefficient: float  # of KL in the reward
    metrics: dict[str, float]  # of the step, in case a kill keeps them out of metrics.jsonl
    identity: dict[str, Any]  # settings and data that all attempts at the training share


def state_files(state: TrainerState) -> dict[str, str]:
    """The state as texts of files, by file name."""
    values = dataclasses.asdict(state)
    groups = {name: values.pop(name) for name in CARRIED}
    return {STATE_FILE: json.dumps(values), GROUPS_FILE: json.dumps(groups)}


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state of a checkpoint; raises CheckpointError when it cannot be read."""
    surplus, unfinished = _read(checkpoint / GROUPS_FILE, _carried)
    return _read(
        checkpoint / STATE_FILE, lambda values: TrainerState(surplus=surplus, unfinished=unfinished, **values)
    )


def read_step_metrics(checkpoint: Path) -> dict[str, float]:
    """Metrics of a checkpoint's step; raises CheckpointError when they cannot be read."""
    return _read(checkpoint / STATE_FILE, lambda values: dict(values["metrics"]))


def read_step(checkpoint: Path) -> int:
    """Training steps done at a checkpoint; raises CheckpointError when that cannot be read."""
    return _read(checkpoint / STATE_FILE, lambda values: int(values["step"]))


def _read(path: Path, parse: Callable[[Any], Parsed]) -> Parsed:
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); remove the folder {path.parent.name} "
            "to continue from the checkpoint before it"
        ) from error


def _carried(values: dict[str, Any]) -> tuple[list[tuple[int, Group]], list[tuple[int, GroupRequest]]]:
    surplus = [(step, _group(group)) for step, group in values["surplus"]]
    return surplus, [(step, _group_request(request)) for step, request in values["unfinished"]]


def _group(values: dict[str, Any]) -> Group:
    rollouts = [Rollout(**{**rollout, "versions": _spans(rollout["versions"])}) for rollout in values["rollouts"]]
    return Group(**{**values, "prompt": _prompt(values["prompt"]), "rollouts": rollouts})


def _group_request(values: dict[str, Any]) -> GroupRequest:
    responses = [Response(**response) for response in values["responses"]]
    versions = [_spans(spans) for spans in values["versions"]]
    return GroupRequest(
        **{**values, "prompt": _prompt(values["prompt"]), "responses": responses, "versions": versions}
    )


def _spans(values: list[list[int]]) -> VersionSpans:
    return [(version, num_tokens) for version, num_tokens in values]


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(**{**values, "prompt_ids": tuple(values["prompt_ids"])})
