"""All rollout workers behind one interface."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_core.draw.groups import Group, GroupRequest, Rollout
from dapo_core.draw.rollout import Progress
from dapo_core.engines.base import Response, Sequences
from dapo_core.errors import RolloutError

if TYPE_CHECKING:
    from dapo_core.cluster.calls import Calls
    from dapo_core.config.rollout import RolloutConfig
    from dapo_core.engines.engine_thread import Usage

POLL_SECONDS = 0.25  # after which a worker reports its progress
SILENCE_SECONDS = 1.0  # after which `finished` returns nothing

Sampled = TypeVar("Sampled", Rollout, Response)


class RolloutGroup:
    """Distributes requests over all rollout workers and returns scored groups.

    A worker answers within one engine step; RolloutError is raised after `max_seconds`. Waiting for
    groups also raises WorkerDied for dead policy ranks.
    """

    def __init__(self, workers: Sequence[Any], max_seconds: float, actors: Calls) -> None:
        self.workers = workers
        self.max_seconds = max_seconds
        self.actors = actors
        self._in_flight = [0] * len(workers)  # groups by worker
        self._tokens = [0] * len(workers)  # their response tokens as of the last poll
        self._reward_seconds = [0.0] * len(workers)
        self._polls: dict[Any, int] = {}  # reference of a running poll -> worker number

    @property
    def num_in_flight(self) -> int:
        """Number of groups neither returned nor suspended."""
        return sum(self._in_flight)

    @property
    def num_tokens_in_flight(self) -> int:
        """Response tokens of the groups in flight as of each worker's last poll."""
        return sum(self._tokens)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send each request to the worker with the fewest groups."""
        shares: list[list[GroupRequest]] = [[] for _ in self.workers]
        for request in requests:
            number = self._in_flight.index(min(self._in_flight))
            shares[number].append(request)
            self._in_flight[number] += 1
        calls = zip(self.workers, shares, strict=True)
        self._get([worker.submit.remote(share) for worker, share in calls if share])

    def finished(self) -> list[Group]:
        """Return finished groups; empty if there are none within about a second."""
        self.actors.check()
        for number, worker in enumerate(self.workers):
            if self._in_flight[number] and number not in self._polls.values():
                self._polls[worker.poll.remote(POLL_SECONDS)] = number
        if not self._polls:
            return []
        ready = self.actors.wait(list(self._polls), SILENCE_SECONDS)
        return [finished for reference in ready for finished in self._take(reference)]

    def suspend(self) -> tuple[list[Group], list[GroupRequest]]:
        """Suspend all workers; returns groups that just finished, and requests for the others."""
        late = [group for reference in list(self._polls) for group in self._take(reference)]
        busy = [
            worker for worker, count in zip(self.workers, self._in_flight, strict=True) if count
        ]
        self._in_flight = [0] * len(self.workers)
        self._tokens = [0] * len(self.workers)
        requests = chain(*self._get([worker.suspend.remote() for worker in busy]))
        own = [replace(request, responses=owned(request.responses)) for request in requests]
        return late, sorted(own, key=lambda request: request.group_id)

    def take_reward_seconds(self) -> float:
        """Return the most seconds since the last call that a worker waited only for scores."""
        most = max(self._reward_seconds)
        self._reward_seconds = [0.0] * len(self.workers)
        return most

    def usage_metrics(self, rollout: RolloutConfig) -> dict[str, float]:
        """Return how much of the engines was used since the last call.

        engine_idle_ratio is the share of time in which an engine had nothing to decode;
        engine_idle_slot_ratio the share of rollout.max_num_seqs sequences that it did not decode.
        With speculation, tokens_per_pass is the mean number of tokens from decoding a sequence.
        """
        usages: list[Usage] = self.actors.get([each.take_usage.remote() for each in self.workers])
        seconds = sum(usage.seconds for usage in usages)
        num_passes = sum(usage.num_passes for usage in usages)
        used = sum(usage.sequence_seconds for usage in usages) / (seconds * rollout.max_num_seqs)
        metrics = {
            "perf/engine_idle_ratio": 1 - sum(usage.step_seconds for usage in usages) / seconds,
            "perf/engine_idle_slot_ratio": 1 - used,
        }
        if rollout.speculation != "off" and num_passes:
            num_decoded = sum(usage.num_decoded for usage in usages)
            metrics["rollout/tokens_per_pass"] = num_decoded / num_passes
        return metrics

    def sleep(self) -> None:
        """Free all engines' device memory; no group may be in flight."""
        self.actors.get([worker.sleep.remote() for worker in self.workers])

    def wake(self, states: Collection[str]) -> None:
        """Allocate device memory for weights or KV cache again on all engines."""
        self.actors.get([worker.wake.remote(states) for worker in self.workers])

    def log_probs(self, sequences: Sequences) -> list[list[list[float]]]:
        """Return each engine's log-probs of (prompt, response_ids) pairs at temperature 1."""
        return self.actors.get([worker.log_probs.remote(sequences) for worker in self.workers])

    def _take(self, reference: Any) -> list[Group]:
        number = self._polls.pop(reference)
        progress: Progress = self._get(reference)
        self._in_flight[number] -= len(progress.groups)
        self._tokens[number] = progress.num_open_tokens
        self._reward_seconds[number] += progress.reward_seconds
        return [replace(group, rollouts=owned(group.rollouts)) for group in progress.groups]

    def _get(self, references: Any) -> Any:
        try:
            return self.actors.get(references, self.max_seconds)
        except TimeoutError as error:
            raise RolloutError(
                f"a rollout worker did not answer within {self.max_seconds:g} s: its engine hangs "
                "(try another rollout.engine) or an engine step takes longer (raise "
                "sampler.max_seconds_without_kept)"
            ) from error


def owned(responses: Sequence[Sampled]) -> list[Sampled]:
    """Return copies of responses from Ray, whose arrays would keep its object store full."""
    return [
        replace(
            response,
            response_ids=response.response_ids.copy(),
            rollout_log_probs=response.rollout_log_probs.copy(),
            routing=response.routing.copy(),
        )
        for response in responses
    ]
