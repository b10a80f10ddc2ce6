"""Rollout worker: samples groups on one engine and scores them in its own processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dapo_core.config.compat import Compat
from dapo_core.draw.groups import Group, GroupRequest, Rollout, VersionSpans
from dapo_core.engines.base import (
    NO_IDS,
    NO_LOG_PROBS,
    Engine,
    GenerationRequest,
    Response,
    Sequences,
)
from dapo_core.engines.engine_thread import EngineThread, Usage
from dapo_core.machine.device import device_for
from dapo_core.reward.pool import RewardPool, ScoreRequest
from dapo_core.reward.scorers import Score, overlong_penalty

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import TrainingConfig
    from dapo_core.weights.links import Link
    from dapo_core.weights.plan import WeightPlan
    from dapo_core.weights.proof import Loaded


NOT_BEGUN = Response("", NO_IDS, NO_LOG_PROBS, "abort")


@dataclass(frozen=True)
class Progress:
    """Result of polling a rollout worker."""

    groups: list[Group]  # newly finished
    num_open_tokens: int  # response tokens of unfinished groups so far
    reward_seconds: float  # the engine was idle; only scoring was pending


@dataclass
class _OpenGroup:
    request: GroupRequest
    num_samples: int
    policy_version: int  # of the engine's weights, which do not change while groups are open
    responses: dict[int, Response] = field(default_factory=dict)  # finished responses by sample
    scores: dict[int, Score] = field(default_factory=dict)

    def versions(self, sample: int, response: Response) -> VersionSpans:
        """Return the policy versions that sampled this response, earlier ones first."""
        spans = list(self.request.versions[sample]) if self.request.versions else []
        num_new = len(response.response_ids) - sum(count for _, count in spans)
        if spans and spans[-1][0] == self.policy_version:
            num_new += spans.pop()[1]
        return [*spans, (self.policy_version, num_new)] if num_new else spans


class RolloutWorker:
    """One engine and its scoring processes: takes prompts and returns groups as they finish.

    The engine decodes on its own thread, also between calls and during scoring. Its errors are
    raised by the next call.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        tokenizer: PreTrainedTokenizerBase,
        config: TrainingConfig,
    ) -> None:
        """`build_engine` runs on the engine thread."""
        self._has_results = threading.Event()  # a response finished or a score arrived
        self.engine = EngineThread(build_engine, self._has_results.set)
        self.config = config
        self.compat = Compat.of(config.algorithm)
        self.group_size = config.rollout.group_size
        self.pool = RewardPool(
            config.reward, config.custom_reward, tokenizer, self.compat, self._has_results.set
        )
        self._open: dict[int, _OpenGroup] = {}
        self._num_scored = 0
        self._scoring: dict[str, tuple[int, int]] = {}  # pool key -> (group id, sample)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. A response's seed is set by (run seed, drawing step, group id, sample)."""
        unfinished = []
        for request in requests:
            num_samples = request.num_samples or self.group_size
            group = _OpenGroup(request, num_samples, self.engine.policy_version)
            self._open[request.group_id] = group
            for sample, so_far in enumerate(request.responses or [NOT_BEGUN] * num_samples):
                if so_far.finish_reason == "abort":
                    unfinished.append(self._generation_request(request, sample, so_far))
                else:
                    self._collect(so_far)
        self.engine.submit(unfinished)

    def poll(self, max_seconds: float) -> Progress:
        """Score responses until a group finishes, no group is open, or `max_seconds` pass."""
        deadline = time.monotonic() + max_seconds
        finished: list[Group] = []
        reward_seconds = 0.0
        while self._open and not finished and (now := time.monotonic()) < deadline:
            self._has_results.clear()  # before looking, so that later results set it again
            for response in self.engine.take():
                self._collect(response)
            finished = self._take_scores()
            if not finished:
                is_idle = not self.engine.num_unfinished()
                self._has_results.wait(max(deadline - time.monotonic(), 0.0))
                reward_seconds += is_idle * (time.monotonic() - now)
        return Progress(finished, self._num_open_tokens(), reward_seconds)

    def suspend(self) -> list[GroupRequest]:
        """Abort all unfinished groups and return requests that resume them on any worker.

        Finished responses that are not scored yet are scored again on resumption.
        """
        unfinished = [
            _request_id(group_id, sample)
            for group_id, group in self._open.items()
            for sample in range(group.num_samples)
            if sample not in group.responses
        ]
        aborted = self.engine.run(lambda engine: engine.abort(unfinished))
        by_id = {response.request_id: response for response in [*aborted, *self.engine.take()]}
        requests = []
        for group_id, group in self._open.items():
            responses = [
                group.responses.get(sample) or by_id[_request_id(group_id, sample)]
                for sample in range(group.num_samples)
            ]
            versions = [group.versions(*numbered) for numbered in enumerate(responses)]
            resumed = replace(group.request, responses=responses, versions=versions)
            requests.append(resumed if resumed.num_response_tokens else resumed.without_responses())
        self._open.clear()
        self._scoring.clear()
        return requests

    def sleep(self) -> None:
        """Free the engine's device memory."""
        self.engine.run(lambda engine: engine.sleep())

    def wake(self, names: Collection[str]) -> None:
        """Allocate device memory again for the engine's weights or its KV cache."""
        self.engine.run(lambda engine: engine.wake(names))

    def connect(self, link: Link, plan: WeightPlan) -> None:
        """Open the channel for weights; collective with all that meet at the link's address."""
        from dapo_core.weights.inbox import open_inbox  # torch

        device = device_for(self.config.train.device)

        def open_channel(engine: Engine) -> None:
            engine.inbox = open_inbox(link, plan, device)

        self.engine.run(open_channel)

    def receive_weights(self, policy_version: int) -> None:
        """Load the weights that policy ranks send; later tokens are recorded with this version."""
        self.engine.run(lambda engine: engine.receive_weights(policy_version))

    def loaded_weights(self) -> Loaded:
        """Return what the engine's loader took in the last sync."""
        return self.engine.run(lambda engine: engine.loaded)

    def take_usage(self) -> Usage:
        """Return how much of the engine was used since the last call."""
        return self.engine.take_usage()

    def log_probs(self, sequences: Sequences) -> list[list[float]]:
        """Return the engine's log-probs of (prompt, response_ids) pairs at temperature 1."""
        return self.engine.run(lambda engine: engine.log_probs(sequences))

    def close(self) -> None:
        """End the scoring processes and free the engine."""
        self.pool.close()
        self.engine.close()

    def _generation_request(
        self, request: GroupRequest, sample: int, so_far: Response
    ) -> GenerationRequest:
        return GenerationRequest(
            _request_id(request.group_id, sample),
            request.prompt.input,
            sample_seed(self.config.run.seed, request.step, request.group_id, sample),
            so_far.response_ids,
            so_far.rollout_log_probs,
            so_far.routing,
            request.sampling,
        )

    def _num_open_tokens(self) -> int:
        done = [each for group in self._open.values() for each in group.responses.values()]
        return self.engine.num_unfinished_tokens() + sum(len(each.response_ids) for each in done)

    def _collect(self, response: Response) -> None:
        """Record a finished response and queue it for scoring."""
        group_id, sample = _parse_request_id(response.request_id)
        group = self._open[group_id]
        group.responses[sample] = response
        prompt = group.request.prompt
        self._num_scored += 1
        # after a suspend, the same response may come again
        key = f"{response.request_id}#{self._num_scored}"
        self._scoring[key] = (group_id, sample)
        ids = response.response_ids.tolist()
        fields = prompt.data_source, ids, prompt.ground_truth, prompt.extra_info
        self.pool.submit(key, ScoreRequest(*fields, prompt.input.token_ids))

    def _take_scores(self) -> list[Group]:
        """Record new scores; returns the groups that they complete."""
        finished = []
        for key, score in self.pool.finished():
            if key not in self._scoring:  # the group was suspended meanwhile
                continue
            group_id, sample = self._scoring.pop(key)
            group = self._open[group_id]
            group.scores[sample] = score
            if len(group.scores) == group.num_samples:
                del self._open[group_id]
                rollouts = [self._rollout(group, sample) for sample in range(group.num_samples)]
                finished.append(Group(group_id, group.request.prompt, rollouts))
        return finished

    def _rollout(self, group: _OpenGroup, sample: int) -> Rollout:
        response, score = group.responses[sample], group.scores[sample]
        return Rollout(
            response_ids=response.response_ids,
            rollout_log_probs=response.rollout_log_probs,
            routing=response.routing,
            finish_reason=response.finish_reason,
            score=score.value,
            overlong_penalty=overlong_penalty(
                len(response.response_ids),
                self.config.rollout.max_response_tokens,
                self.config.reward.overlong,
                is_clamped=not self.compat.overlong_beyond_limit,
            ),
            verdict=score.verdict,
            acc=score.acc,
            versions=group.versions(sample, response),
            answer=score.answer,
        )


def _request_id(group_id: int, sample: int) -> str:
    return f"{group_id}/{sample}"


def _parse_request_id(request_id: str) -> tuple[int, int]:
    group_id, _, sample = request_id.partition("/")
    return int(group_id), int(sample)


def sample_seed(run_seed: int, step: int, group_id: int, sample: int) -> int:
    """Return the seed of one response, in [0, 2**31). `step` is the one that drew the prompt."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{group_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
