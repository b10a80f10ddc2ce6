"""Groups of scored responses, and the worker that produces them on one engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dapo_core.data import Prompt
from dapo_core.engines import Engine, FinishReason, GenerationRequest, Response
from dapo_core.reward import Verdict, overlong_penalty, scorer_for

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config import RewardConfig


@dataclass(frozen=True)
class Rollout:
    """One scored response.

    `score` is the scorer's value, `reward` what the advantage is made of: score + overlong penalty.
    """

    response_ids: list[int]  # [R]
    rollout_log_probs: list[float]  # [R], from the engine that sampled
    finish_reason: FinishReason
    score: float
    overlong_penalty: float
    verdict: Verdict
    acc: float  # the scorer's accuracy, 1 right and 0 not unless it says otherwise

    @property
    def reward(self) -> float:
        return self.score + self.overlong_penalty

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """The G siblings of a prompt, and the weights that produced them."""

    prompt: Prompt
    rollouts: list[Rollout]
    policy_version: int  # of the weights the engine held when the group was submitted

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    def metric(self, name: str) -> list[float]:
        """The filter metric of each rollout: `acc`, `score`, or `seq_reward` and `seq_final_reward` (the reward)."""
        if name == "acc":
            return [rollout.acc for rollout in self.rollouts]
        if name == "score":
            return [rollout.score for rollout in self.rollouts]
        return [rollout.reward for rollout in self.rollouts]


@dataclass
class _OpenGroup:
    prompt: Prompt
    policy_version: int
    responses: dict[int, Response] = field(default_factory=dict)


class RolloutWorker:
    """One engine and the reward: takes prompts, hands back groups as they finish."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardConfig,
        group_size: int,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.reward = reward
        self.group_size = group_size
        self.max_response_tokens = max_response_tokens
        self.seed = seed
        self._open: dict[str, _OpenGroup] = {}

    def submit(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """Queue groups of responses, one for each (group id, prompt).

        A response's seed derives from (run seed, group id, sample), so it does not depend on history.
        """
        for group_id, prompt in prompts:
            self._open[group_id] = _OpenGroup(prompt, self.engine.policy_version)
            self.engine.submit(
                [
                    GenerationRequest(
                        f"{group_id}/{sample}", prompt.prompt_ids, sample_seed(self.seed, group_id, sample)
                    )
                    for sample in range(self.group_size)
                ]
            )

    def poll(self, max_seconds: float) -> list[Group]:
        """Groups that finished: runs the engine until at least one did, all is done, or the time is over."""
        deadline = time.monotonic() + max_seconds
        finished: list[Group] = []
        while self._open and not finished and time.monotonic() < deadline:
            for response in self.engine.step():
                group = self._collect(response)
                if group is not None:
                    finished.append(group)
        return finished

    def abort(self) -> tuple[int, int]:
        """Drop every unfinished group; returns their number and the response tokens they had produced."""
        num_groups = len(self._open)
        num_tokens = sum(
            len(response.response_ids) for group in self._open.values() for response in group.responses.values()
        )
        unfinished = [
            f"{group_id}/{sample}"
            for group_id, group in self._open.items()
            for sample in range(self.group_size)
            if sample not in group.responses
        ]
        num_tokens += self.engine.abort(unfinished)
        self._open.clear()
        return num_groups, num_tokens

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> int:
        """Replace the engine's weights; everything submitted from here on carries the version it returns."""
        self.engine.load_weights(weights, policy_version)
        return self.engine.policy_version

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The engine's log-probs of given (prompt_ids, response_ids) pairs at temperature 1."""
        return self.engine.log_probs(sequences)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _collect(self, response: Response) -> Group | None:
        group_id, _, sample = response.request_id.rpartition("/")
        group = self._open[group_id]
        group.responses[int(sample)] = response
        if len(group.responses) < self.group_size:
            return None
        del self._open[group_id]
        rollouts = [self._score(group.prompt, group.responses[sample]) for sample in range(self.group_size)]
        return Group(group.prompt, rollouts, group.policy_version)

    def _score(self, prompt: Prompt, response: Response) -> Rollout:
        text = str(self.tokenizer.decode(response.response_ids, skip_special_tokens=True))
        score = scorer_for(prompt.data_source)(text, prompt.ground_truth)
        return Rollout(
            response_ids=response.response_ids,
            rollout_log_probs=response.rollout_log_probs,
            finish_reason=response.finish_reason,
            score=score.value,
            overlong_penalty=overlong_penalty(
                len(response.response_ids), self.max_response_tokens, self.reward.overlong
            ),
            verdict=score.verdict,
            acc=score.acc,
        )


def sample_seed(run_seed: int, group_id: str, sample: int) -> int:
    """A seed in [0, 2**31) for one response, from the run's seed, its group and its number alone."""
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
