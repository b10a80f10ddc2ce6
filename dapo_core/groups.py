"""Groups: a prompt's responses, as they are requested, sampled and scored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dapo_core.data import Prompt
from dapo_core.engines.base import FinishReason, Response, Sampling
from dapo_core.reward.scorers import Verdict

# (policy version, tokens sampled from its weights) of a response, in the order of its tokens.
VersionSpans = list[tuple[int, int]]


@dataclass(frozen=True)
class Rollout:
    """One scored response; its `reward`, which advantages compare, is score + overlong penalty."""

    response_ids: list[int]  # [R]
    rollout_log_probs: list[float]  # [R], from the engine that sampled
    finish_reason: FinishReason
    score: float
    overlong_penalty: float
    verdict: Verdict
    acc: float  # the scorer's accuracy, 1 right and 0 not unless it says otherwise
    versions: VersionSpans
    answer: str | None = None  # what the scorer read, None where it names none

    @property
    def reward(self) -> float:
        return self.score + self.overlong_penalty

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_scored(self) -> bool:
        """Whether the scorer gave a score."""
        return self.verdict not in ("error", "timeout")


@dataclass(frozen=True)
class Group:
    """The G siblings of a prompt, or the responses of a validation."""

    group_id: int  # GroupRequest.group_id
    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    def metric(self, name: str) -> list[float]:
        """The filter metric of each scored rollout: `acc`, `score`, or its reward for the other two."""
        scored = [rollout for rollout in self.rollouts if rollout.is_scored]
        if name == "acc":
            return [rollout.acc for rollout in scored]
        if name == "score":
            return [rollout.score for rollout in scored]
        return [rollout.reward for rollout in scored]


@dataclass(frozen=True)
class GroupRequest:
    """One group to sample: a fresh one, or one that an earlier step left unfinished."""

    group_id: int  # position of its prompt in the stream; below 0 outside the stream
    prompt: Prompt
    step: int  # training step that drew the prompt, also when a later one continues it
    responses: list[Response] = field(default_factory=list)  # [G]; those with finish reason `abort` continue
    versions: list[VersionSpans] = field(default_factory=list)  # [G], of `responses`
    sampling: Sampling | None = None  # None: the engine's
    num_samples: int | None = None  # None: G

    @property
    def num_response_tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(len(response.response_ids) for response in self.responses)

    def without_responses(self) -> GroupRequest:
        """The request as before sampling."""
        return replace(self, responses=[], versions=[])
