"""The trainer's own state in a checkpoint: counters, metrics, identity and carried-over groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from dapo_core.draw.groups import Group, GroupRequest, Rollout, VersionSpans
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import NO_IDS, NO_LOG_PROBS, Response
from dapo_core.errors import CheckpointError
from dapo_core.model.inputs import ImageReference, ModelInput
from dapo_core.model.routers import NO_ROUTING

STATE_FILE = "trainer_state.json"
GROUPS_FILE = (
    "carried_groups.json"  # separate, so that reading metrics of many checkpoints stays cheap
)
TOKENS_FILE = "carried_tokens.safetensors"  # tokens of their responses, concatenated

_NO_TOKENS = {"response_ids": NO_IDS, "rollout_log_probs": NO_LOG_PROBS, "routing": NO_ROUTING}

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs besides the shards to resume."""

    step: int  # training steps done
    policy_version: int
    prompt_position: int  # prompts taken from the stream
    surplus: list[Group]
    unfinished: list[GroupRequest]  # to resume
    kl_coefficient: float  # of the KL term in the reward
    metrics: dict[str, float]  # of the step, in case a kill kept them out of metrics.jsonl
    identity: dict[str, Any]  # settings and data shared by all attempts of the training
    visits: list[list[int]] = field(default_factory=list)  # prompt, then Backoff.visits of it


def state_files(state: TrainerState) -> dict[str, bytes]:
    """Return the state as file contents by file name."""
    values = asdict(replace(state, surplus=[], unfinished=[]))
    del values["surplus"], values["unfinished"]
    files = groups_files(state.surplus, state.unfinished)
    return {STATE_FILE: json.dumps(values).encode(), **files}


def groups_files(surplus: Sequence[Group], unfinished: Sequence[GroupRequest]) -> dict[str, bytes]:
    """Return groups as file contents by file name."""
    groups = {"surplus": surplus, "unfinished": unfinished}
    return {
        GROUPS_FILE: json.dumps(groups, default=_without_tokens).encode(),
        TOKENS_FILE: _tokens_file(_responses(surplus, unfinished)),
    }


def read_state(checkpoint: Path) -> TrainerState:
    """Return a checkpoint's trainer state; raises CheckpointError if it cannot be read."""
    surplus, unfinished = read_groups(checkpoint)
    return replace(read_state_without_groups(checkpoint), surplus=surplus, unfinished=unfinished)


def read_groups(folder: Path) -> tuple[list[Group], list[GroupRequest]]:
    """Return the groups of `groups_files`; raises CheckpointError if they cannot be read."""
    surplus, unfinished = _read(folder / GROUPS_FILE, lambda text: _carried(json.loads(text)))
    responses = _responses(surplus, unfinished)
    _read(folder / TOKENS_FILE, lambda content: _fill(responses, load(content)))
    return surplus, unfinished


def read_state_without_groups(checkpoint: Path) -> TrainerState:
    """Return the state without the carried groups, which may be gigabytes."""
    return _read(
        checkpoint / STATE_FILE,
        lambda text: TrainerState(surplus=[], unfinished=[], **json.loads(text)),
    )


def _read(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); remove the folder {path.parent.name} "
            "to continue from the previous checkpoint"
        ) from error


def _responses(surplus: Sequence[Group], unfinished: Sequence[GroupRequest]) -> list[list[Any]]:
    """Return the responses of each group in the order of their tokens in the file."""
    return [group.rollouts for group in surplus] + [request.responses for request in unfinished]


def _tokens_file(groups: Sequence[list[Any]]) -> bytes:
    """Return the responses' tokens in the safetensors format.

    They are gigabytes: joined here they are copied once, by safetensors.numpy.save four times.
    """
    responses = list(chain.from_iterable(groups))
    ids = [np.asarray(each.response_ids, np.int32) for each in responses]
    log_probs = [np.asarray(each.rollout_log_probs, np.float32) for each in responses]
    num_tokens = np.array([len(each) for each in ids], dtype=np.int64)
    routing = [np.ascontiguousarray(each.routing) for each in responses]
    shapes = np.array([each.shape for each in routing], dtype=np.int64).reshape(-1)
    entries, end = {}, 0
    for name, dtype, parts in (
        ("num_tokens", "I64", [num_tokens]),
        ("routing_shapes", "I64", [shapes]),
        ("response_ids", "I32", ids),
        ("rollout_log_probs", "F32", log_probs),
        ("routing", "U8", routing),
    ):
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = [sum(part.size for part in parts)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    arrays: list[np.ndarray] = [num_tokens, shapes, *ids, *log_probs, *routing]
    contents = [each.data for each in arrays if each.size]
    return b"".join([len(header).to_bytes(8, "little"), header, *contents])


def _without_tokens(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass except arrays."""
    return {name: each for name, each in vars(value).items() if not isinstance(each, np.ndarray)}


def _fill(groups: Sequence[list[Any]], tokens: dict[str, np.ndarray]) -> None:
    """Fill in the responses' tokens; raises ValueError if the tokens do not match the responses."""
    num_tokens, ids = tokens["num_tokens"], tokens["response_ids"]
    log_probs = tokens["rollout_log_probs"]
    num_responses = sum(map(len, groups))
    has_lengths = {len(ids), len(log_probs)} == {int(num_tokens.sum())}
    if len(num_tokens) != num_responses or (num_tokens < 0).any() or not has_lengths:
        raise ValueError(
            f"{len(ids)} tokens for {len(num_tokens)} responses, but {num_responses} are carried"
        )
    shapes, experts = tokens["routing_shapes"].reshape(-1, 3), tokens["routing"]
    sizes = shapes.prod(axis=1)
    if len(shapes) != num_responses or (shapes < 0).any() or len(experts) != sizes.sum():
        raise ValueError(f"{len(experts)} experts for {len(shapes)} responses do not match")
    places = pairwise(accumulate(num_tokens.tolist(), initial=0))
    routings = zip(pairwise(accumulate(sizes.tolist(), initial=0)), shapes, strict=True)
    for responses in groups:
        for number, response in enumerate(responses):
            start, end = next(places)
            (first, last), shape = next(routings)
            responses[number] = replace(
                response,
                response_ids=ids[start:end].copy(),
                rollout_log_probs=log_probs[start:end].copy(),
                routing=experts[first:last].reshape(shape).copy(),
            )


def _carried(values: dict[str, Any]) -> tuple[list[Group], list[GroupRequest]]:
    surplus = [_group(group) for group in values["surplus"]]
    return surplus, [_group_request(request) for request in values["unfinished"]]


def _group(values: dict[str, Any]) -> Group:
    rollouts = [
        Rollout(**{**rollout, **_NO_TOKENS, "versions": _spans(rollout["versions"])})
        for rollout in values["rollouts"]
    ]
    return Group(**{**values, "prompt": _prompt(values["prompt"]), "rollouts": rollouts})


def _group_request(values: dict[str, Any]) -> GroupRequest:
    responses = [Response(**{**response, **_NO_TOKENS}) for response in values["responses"]]
    versions = [_spans(spans) for spans in values["versions"]]
    parsed = {"prompt": _prompt(values["prompt"]), "responses": responses, "versions": versions}
    return GroupRequest(**{**values, **parsed})


def _spans(values: list[list[int]]) -> VersionSpans:
    return [(version, num_tokens) for version, num_tokens in values]


def _prompt(values: dict[str, Any]) -> Prompt:
    given = values["input"]
    images = [
        ImageReference(**{**image, "grid_thw": tuple(image["grid_thw"])})
        for image in given["images"]
    ]
    return Prompt(**{**values, "input": ModelInput(tuple(given["token_ids"]), tuple(images))})
