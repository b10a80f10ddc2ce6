"""The worker that samples and scores groups, on one engine and its scoring processes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dapo_core.compat import Compat
from dapo_core.device import device_for
from dapo_core.engines.base import Engine, GenerationRequest, Response
from dapo_core.engines.engine_thread import EngineThread
from dapo_core.groups import Group, GroupRequest, Rollout, VersionSpans
from dapo_core.reward.pool import RewardPool, ScoreRequest
from dapo_core.reward.scorers import Score, overlong_penalty

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import TrainingConfig
    from dapo_core.weight_transfer.links import Link
    from dapo_core.weight_transfer.plan import WeightPlan
    from dapo_core.weight_transfer.proof import Loaded


@dataclass(frozen=True)
class Progress:
    """What happened on a rollout worker during a poll."""

    groups: list[Group]  # that finished
    num_open_tokens: int  # response tokens of the unfinished groups so far
    reward_seconds: float  # the engine was idle; only scoring was pending


@dataclass
class _OpenGroup:
    request: GroupRequest
    num_samples: int
    policy_version: int  # of the engine's weights, which stay while groups are open
    responses: dict[int, Response] = field(default_factory=dict)  # finished ones by sample
    scores: dict[int, Score] = field(default_factory=dict)

    def versions(self, sample: int, response: Response) -> VersionSpans:
        """The weights that sampled the response's tokens: those it came with, then the engine's."""
        spans = list(self.request.versions[sample]) if self.request.versions else []
        num_new = len(response.response_ids) - sum(count for _, count in spans)
        if spans and spans[-1][0] == self.policy_version:
            num_new += spans.pop()[1]
        return [*spans, (self.policy_version, num_new)] if num_new else spans


class RolloutWorker:
    """One engine and its scoring processes: takes prompts, hands back groups as they finish.

    The engine decodes on a thread of its own: between the calls of this worker, and while it scores. A group is
    finished when all siblings have scores. An error of the engine is raised by the next call.
    """

    def __init__(
        self, build_engine: Callable[[], Engine], tokenizer: PreTrainedTokenizerBase, config: TrainingConfig
    ) -> None:
        """`build_engine` is called on the engine's thread."""
        self._news = threading.Event()  # a response finished, or a score is there
        self.engine = EngineThread(build_engine, self._news.set)
        self.config = config
        self.compat = Compat.of(config.algorithm)
        self.group_size = config.rollout.group_size
        self.pool = RewardPool(config.reward, config.custom_reward, tokenizer, self.compat, self._news.set)
        self._open: dict[int, _OpenGroup] = {}
        self._num_scored = 0
        self._scoring: dict[str, tuple[int, int]] = {}  # the pool's key -> (group id, sample), of open groups

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. A response's seed depends on (run seed, drawing step, group id, sample) alone."""
        unfinished = []
        for request in requests:
            group = _OpenGroup(request, request.num_samples or self.group_size, self.engine.policy_version)
            self._open[request.group_id] = group
            for sample in range(group.num_samples):
                so_far = request.responses[sample] if request.responses else Response("", [], [], "abort")
                if so_far.finish_reason == "abort":
                    unfinished.append(self._generation_request(request, sample, so_far))
                else:
                    self._collect(so_far)
        self.engine.submit(unfinished)

    def poll(self, max_seconds: float) -> Progress:
        """Score until a group finished, nothing is left, or the time is over."""
        deadline = time.monotonic() + max_seconds
        finished: list[Group] = []
        reward_seconds = 0.0
        while self._open and not finished and (now := time.monotonic()) < deadline:
            self._news.clear()  # before looking, so that what comes afterwards is news
            for response in self.engine.take():
                self._collect(response)
            finished = self._take_scores()
            if not finished:
                is_idle = not self.engine.num_unfinished()
                self._news.wait(max(deadline - time.monotonic(), 0.0))
                reward_seconds += is_idle * (time.monotonic() - now)
        return Progress(finished, self._num_open_tokens(), reward_seconds)

    def suspend(self) -> list[GroupRequest]:
        """Stop every unfinished group; returns the requests that continue them, here or on another worker.

        A finished response without a score yet is scored again there.
        """
        unfinished = [
            _request_id(group_id, sample)
            for group_id, group in self._open.items()
            for sample in range(group.num_samples)
            if sample not in group.responses
        ]
        aborted = self.engine.run(lambda engine: engine.abort(unfinished))
        stopped = {response.request_id: response for response in [*aborted, *self.engine.take()]}
        requests = []
        for group_id, group in self._open.items():
            responses = [
                group.responses.get(sample) or stopped[_request_id(group_id, sample)]
                for sample in range(group.num_samples)
            ]
            versions = [group.versions(sample, response) for sample, response in enumerate(responses)]
            begun = replace(group.request, responses=responses, versions=versions)
            requests.append(begun if begun.num_response_tokens else begun.without_responses())
        self._open.clear()
        self._scoring.clear()
        return requests

    def sleep(self) -> None:
        """Give the memory of the engine's device back."""
        self.engine.run(lambda engine: engine.sleep())

    def wake(self, what: Collection[str]) -> None:
        """Take memory for the engine's weights or its keys and values again."""
        self.engine.run(lambda engine: engine.wake(what))

    def connect(self, link: Link, plan: WeightPlan) -> None:
        """Open the way on which weights come; collective with those that meet at the link's address."""
        from dapo_core.weight_transfer.inbox import open_inbox  # torch

        device = device_for(self.config.train.device)

        def open_way(engine: Engine) -> None:
            engine.inbox = open_inbox(link, plan, device)

        self.engine.run(open_way)

    def receive_weights(self, policy_version: int) -> None:
        """Load the weights that policy ranks send into the engine; groups carry the version from now on."""
        self.engine.run(lambda engine: engine.receive_weights(policy_version))

    def loaded_weights(self) -> Loaded:
        """What the engine's loader took in the last sync."""
        return self.engine.run(lambda engine: engine.loaded)

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The engine's log-probs of given (prompt_ids, response_ids) pairs at temperature 1."""
        return self.engine.run(lambda engine: engine.log_probs(sequences))

    def close(self) -> None:
        """End the scoring processes and free the engine."""
        self.pool.close()
        self.engine.close()

    def _generation_request(self, request: GroupRequest, sample: int, so_far: Response) -> GenerationRequest:
        return GenerationRequest(
            _request_id(request.group_id, sample),
            request.prompt.prompt_ids,
            sample_seed(self.config.run.seed, request.step, request.group_id, sample),
            so_far.response_ids,
            so_far.rollout_log_probs,
            request.sampling,
        )

    def _num_open_tokens(self) -> int:
        responses = (response for group in self._open.values() for response in group.responses.values())
        return self.engine.num_unfinished_tokens() + sum(len(response.response_ids) for response in responses)

    def _collect(self, response: Response) -> None:
        """Record a finished response and queue it for scoring."""
        group_id, sample = _parse_request_id(response.request_id)
        group = self._open[group_id]
        group.responses[sample] = response
        prompt = group.request.prompt
        self._num_scored += 1
        key = f"{response.request_id}#{self._num_scored}"  # a stopped response may come a second time
        self._scoring[key] = (group_id, sample)
        answered = prompt.data_source, response.response_ids, prompt.ground_truth, prompt.extra_info
        self.pool.submit(key, ScoreRequest(*answered, prompt.prompt_ids))

    def _take_scores(self) -> list[Group]:
        """The groups that the scores so far finish."""
        finished = []
        for key, score in self.pool.finished():
            if key not in self._scoring:  # its group was stopped meanwhile
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
    """A seed in [0, 2**31) for one response, from the step that drew its prompt, its group and its number."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{group_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
