"""Simulated rollout workers: continuous batching in virtual time, for the real sampler."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from dapo_core.draw.groups import Group, GroupRequest, Rollout
from dapo_core.engines.base import (
    DRAFT_TOKENS,
    NO_LOG_PROBS,
    WIDE_BATCH,
    FinishReason,
    Response,
)
from dapo_core.simulation.workload import Workload, outcomes

CLOSE = 1e-6  # tokens


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of an engine's work; a pass decodes a token of each sequence in its batch."""

    fixed: float  # of a pass
    weights: float = 0.0  # reading them in a pass
    context: float = 0.0  # reading the KV cache of one token
    sequence: float = 0.0  # operations of one token
    prefill: float = 0.0  # of one token
    num_slots: int = 256
    cache_tokens: float = inf  # of all sequences in the KV cache
    tokens_per_pass: float | None = None  # of a sequence with drafts; None: no drafts

    def token_seconds(self, width: int, context: float) -> float:
        """Return the time per token of each of `width` sequences with `context` tokens together.

        A pass is limited by memory or by operations.
        """
        drafts = DRAFT_TOKENS if self.tokens_per_pass and width <= WIDE_BATCH else 0
        reading = self.weights + self.context * context
        seconds = self.fixed + max(reading, self.sequence * width * (1 + drafts))
        return seconds / (self.tokens_per_pass or 1.0) if drafts else seconds

    def scaled(self, factor: float) -> EngineCosts:
        """Return the costs of an engine that takes `factor` times as long."""
        names = ("fixed", "weights", "context", "sequence", "prefill")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(eq=False)
class _Open:
    """A group in flight."""

    request: GroupRequest
    engine: _Engine
    responses: list[_Response] = field(default_factory=list)
    num_left: int = 0
    is_prefilled: bool = False  # its prompt


@dataclass(eq=False)
class _Response:
    """A response in flight."""

    group: _Open
    length: int
    num_tokens: float  # so far; of a running one, when it got its slot
    began: float = 0.0  # progress of the engine at that time


class _Engine:
    """One engine: its state at `now`, and the time `due` of its next event."""

    def __init__(self, costs: EngineCosts, workload: Workload) -> None:
        self.costs = costs
        self.prompt_tokens = workload.prompt_tokens
        self.mean_context = workload.mean_context
        self.now, self.due = 0.0, inf
        self.groups: list[_Open] = []
        self.waiting: deque[_Response] = deque()
        self.running: dict[_Response, float] = {}  # in order of admission; progress at its end
        self.busy = self.idle = 0.0  # slots x seconds with a response, and without
        self.prefilling = 0.0  # seconds
        self._ends: list[tuple[float, int, _Response]] = []  # heap; of preempted ones, too
        self._num_admitted = 0
        self._progress = 0.0  # tokens that a sequence running all the time would have got
        self._pace = 0.0  # seconds per token
        self._context = 0.0  # tokens in the KV cache
        self._stall = 0.0  # seconds of prefill ahead of decoding

    @property
    def free_slots(self) -> float:
        """Responses that could decode besides, if the cache held their mean context."""
        room = max(self.costs.cache_tokens - self._context, 0.0) / self.mean_context
        return min(self.costs.num_slots - len(self.running), room)

    def run_to(self, time: float) -> None:
        """Decode until `time`, which is not after `due`."""
        seconds, self.now = time - self.now, time
        self.idle += self.free_slots * seconds
        if not self.running:
            return
        width = len(self.running)
        stall = min(self._stall, seconds)
        self._stall -= stall
        self.prefilling += stall
        num_tokens = (seconds - stall) / self._pace
        self._progress += num_tokens
        self._context += width * num_tokens
        self.busy += width * seconds

    def take(self) -> list[_Response]:
        """Remove responses that end now, and give their slots to waiting ones."""
        done = []
        while self._ends and self._ends[0][0] <= self._progress + CLOSE:
            end, _, response = heapq.heappop(self._ends)
            if self.running.get(response) == end:
                self._leave(response)
                response.num_tokens = response.length
                done.append(response)
        is_full = self._context > self.costs.cache_tokens - CLOSE * len(self.running)
        if is_full and len(self.running) > 1 and not done:
            youngest = next(reversed(self.running))
            self._leave(youngest)
            self.waiting.appendleft(youngest)  # its keys are computed again
        self.admit()
        return done

    def admit(self) -> None:
        """Give free slots to waiting responses, and find the time of the next event."""
        free = 0.99 * self.costs.cache_tokens - self._context
        while self.waiting and len(self.running) < self.costs.num_slots:
            size = self.prompt_tokens + self.waiting[0].num_tokens
            if size > free and self.running:
                break
            response = self.waiting.popleft()
            free -= size
            self._context += size
            own_prompt = 0 if response.group.is_prefilled else self.prompt_tokens
            response.group.is_prefilled = True
            self._stall += self.costs.prefill * (own_prompt + response.num_tokens)
            response.began = self._progress
            end = self._progress + response.length - response.num_tokens
            self.running[response] = end
            self._num_admitted += 1
            heapq.heappush(self._ends, (end, self._num_admitted, response))
        self._plan()

    def clear(self) -> None:
        """Abort everything."""
        for response in list(self.running):
            self._leave(response)
        self.groups, self._ends, self._context, self._stall = [], [], 0.0, 0.0
        self.waiting.clear()
        self._plan()

    def _leave(self, response: _Response) -> None:
        del self.running[response]
        response.num_tokens += self._progress - response.began
        self._context -= self.prompt_tokens + response.num_tokens

    def _plan(self) -> None:
        """Find the pace, and when the next response ends or the cache is full."""
        while self._ends and self.running.get(self._ends[0][2]) != self._ends[0][0]:
            heapq.heappop(self._ends)  # of a preempted response
        if not self.running:
            self.due = inf
            return
        width = len(self.running)
        num_tokens = self._ends[0][0] - self._progress
        if width > 1:
            room = (self.costs.cache_tokens - self._context) / width
            num_tokens = min(num_tokens, max(room, 0.0))
        self._pace = self.costs.token_seconds(width, self._context + width * num_tokens / 2)
        self.due = self.now + self._stall + num_tokens * self._pace


class SimulatedEngines:
    """The sampler's source of groups. Time passes in `finished`, `run` and `wait`."""

    def __init__(self, workload: Workload, costs: EngineCosts, num_engines: int) -> None:
        self.workload = workload
        self.now = 0.0  # seconds
        self.drawn: dict[int, int] = {}  # step that drew each group, by id
        self.occupied = [(0.0, 0.0)]  # time, share of slots with a response from then on
        self._engines = [_Engine(costs, workload) for _ in range(num_engines)]
        self._ready: list[Group] = []
        self._tokens = np.zeros(workload.limit, np.int32)  # only their number matters

    @property
    def num_in_flight(self) -> int:
        return sum(len(engine.groups) for engine in self._engines) + len(self._ready)

    @property
    def num_tokens_in_flight(self) -> int:
        return 0

    def usage(self) -> np.ndarray:
        """Return slots x seconds with and without a response, and seconds of prefill, so far."""
        for engine in self._engines:
            engine.run_to(self.now)
        return np.sum([(one.busy, one.idle, one.prefilling) for one in self._engines], axis=0)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send each group to the engine with the fewest groups."""
        self.usage()  # up to now
        for request in requests:
            self.drawn.setdefault(request.group_id, request.step)
            engine = min(self._engines, key=lambda engine: len(engine.groups))
            lengths, _ = outcomes(self.workload, request.group_id)
            group = _Open(request, engine)
            so_far = [len(response.response_ids) for response in request.responses]
            group.responses = [
                _Response(group, int(length), count)
                for length, count in zip(lengths, so_far or [0] * len(lengths), strict=True)
            ]
            left = [each for each in group.responses if each.num_tokens < each.length]
            group.num_left = len(left)
            engine.groups.append(group)
            engine.waiting.extend(left)
        for engine in self._engines:
            engine.admit()
        self._note()

    def finished(self) -> list[Group]:
        """Run until the next group finishes, and return it; empty if nothing is in flight."""
        while not self._ready and self._advance(inf):
            pass
        found, self._ready = self._ready, []
        return found

    def run(self, seconds: float) -> None:
        """Let engines decode for a time; groups that finish are kept for `finished`."""
        end = self.now + seconds
        while self._advance(end):
            pass
        self.now = end

    def wait(self, seconds: float) -> None:
        """Let time pass while nothing is in flight."""
        assert not self.num_in_flight, "engines would decode meanwhile"
        self.now += seconds

    def suspend(self) -> tuple[list[Group], list[GroupRequest]]:
        """Return groups that have finished, and requests that resume the others."""
        self.run(0.0)
        late, self._ready = self._ready, []
        requests = []
        self.usage()  # up to now
        for engine in self._engines:
            groups = engine.groups
            engine.clear()
            requests += [self._resumed(group) for group in groups]
        self._note()
        return late, sorted(requests, key=lambda request: request.group_id)

    def take_reward_seconds(self) -> float:
        return 0.0

    def _advance(self, end: float) -> bool:
        """Run to the next event; False if it is after `end`, or never."""
        engine = min(self._engines, key=lambda engine: engine.due)
        if engine.due > end or engine.due == inf:
            return False
        self.now = max(engine.due, self.now)
        engine.run_to(engine.due)
        for response in engine.take():
            group = response.group
            group.num_left -= 1
            if not group.num_left:
                engine.groups.remove(group)
                self._ready.append(self._whole(group.request))
        self._note()
        return True

    def _note(self) -> None:
        width = sum(len(engine.running) for engine in self._engines)
        free = sum(engine.free_slots for engine in self._engines)
        self.occupied.append((self.now, width / (width + free)))

    def _whole(self, request: GroupRequest) -> Group:
        rollouts = [
            Rollout(
                response_ids=self._tokens[:length],
                rollout_log_probs=NO_LOG_PROBS,
                finish_reason="length" if length == self.workload.limit else "stop",
                score=float(is_right),
                overlong_penalty=0.0,
                verdict="right" if is_right else "wrong",
                acc=float(is_right),
                versions=[],
            )
            for length, is_right in zip(*outcomes(self.workload, request.group_id), strict=True)
        ]
        return Group(request.group_id, request.prompt, rollouts)

    def _resumed(self, group: _Open) -> GroupRequest:
        responses = []
        for one in group.responses:
            num_tokens = int(one.num_tokens + CLOSE)
            reason: FinishReason = "abort" if num_tokens < one.length else "stop"
            responses.append(Response("", self._tokens[:num_tokens], NO_LOG_PROBS, reason))
        resumed = replace(group.request, responses=responses)
        return resumed if resumed.num_response_tokens else resumed.without_responses()
