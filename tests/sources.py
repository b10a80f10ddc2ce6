"""A scripted source of groups, for tests of sampling."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from dapo_core.config.compat import OURS, Compat
from dapo_core.config.sampler import SamplerConfig
from dapo_core.draw.account import Draw
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.draw.report import DrawProgress
from dapo_core.draw.sampler import Sampler
from dapo_core.engines.base import FinishReason, Response
from dapo_core.model.inputs import ModelInput
from tests.batches import make_group

RIGHT, WRONG, MIXED = [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]
TOKENS_PER_GROUP = 6  # two responses of three tokens
PROMPTS = [Prompt(index, ModelInput((index + 5,)), "arithmetic", "1") for index in range(7)]


class ScriptedSource:
    """Groups whose rewards come from a script by group id, handed out `burst` at a time.

    When it is stopped, up to `num_late` groups in flight turn out to be finished; each of the
    others has sampled `partial_tokens` more response tokens.
    """

    def __init__(
        self,
        script: Sequence[list[float]],
        burst: int,
        num_late: int = 0,
        partial_tokens: int = 0,
        order: random.Random | None = None,
    ) -> None:
        self.script = script
        self.burst = burst
        self.num_late = num_late
        self.partial_tokens = partial_tokens
        self.order = order  # of finishing; None: as submitted
        self.in_flight: dict[int, GroupRequest] = {}
        self.fresh: list[int] = []  # group ids submitted without responses
        self.continued: list[GroupRequest] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    @property
    def num_tokens_in_flight(self) -> int:
        return sum(request.num_response_tokens for request in self.in_flight.values())

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            assert request.group_id not in self.in_flight
            self.in_flight[request.group_id] = request
            if request.responses:
                self.continued.append(request)
            else:
                self.fresh.append(request.group_id)

    def finished(self) -> list[Group]:
        return self._finish(self.burst)

    def suspend(self) -> tuple[list[Group], list[GroupRequest]]:
        late, stopped = self._finish(self.num_late), list(self.in_flight.values())
        self.in_flight = {}
        return late, [self._suspended(request) for request in stopped]

    def take_reward_seconds(self) -> float:
        return 0.5

    def _finish(self, count: int) -> list[Group]:
        group_ids = list(self.in_flight)
        if self.order is not None:
            self.order.shuffle(group_ids)
        return [self._whole(self.in_flight.pop(group_id)) for group_id in group_ids[:count]]

    def _whole(self, request: GroupRequest) -> Group:
        rewards = self.script[request.group_id % len(self.script)]
        return replace(make_group(rewards, request.prompt.index), group_id=request.group_id)

    def _suspended(self, request: GroupRequest) -> GroupRequest:
        """The group's first tokens: those it came with and `partial_tokens` more, the first
        response's first.
        """
        left = min(request.num_response_tokens + self.partial_tokens, TOKENS_PER_GROUP)
        responses: list[Response] = []
        for sample, rollout in enumerate(self._whole(request).rollouts):
            count = min(left, len(rollout.response_ids))
            left -= count
            reason: FinishReason = "stop" if count == len(rollout.response_ids) else "abort"
            so_far = (rollout.response_ids[:count], rollout.rollout_log_probs[:count])
            responses.append(Response(f"{request.group_id}/{sample}", *so_far, reason))
        begun = replace(
            request,
            responses=responses,
            versions=[[(0, len(one.response_ids))] for one in responses],
        )
        return begun if begun.num_response_tokens else request.without_responses()


class Clock:
    """Seconds that pass only when a test adds them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LateSource(ScriptedSource):
    """The groups of some ids finish only when nothing else is in flight, one at a time."""

    def __init__(
        self, script: Sequence[list[float]], late: set[int], partial_tokens: int = 0
    ) -> None:
        super().__init__(script, burst=1, partial_tokens=partial_tokens)
        self.late = late

    def _finish(self, count: int) -> list[Group]:
        held = {
            group_id: self.in_flight.pop(group_id) for group_id in self.late & set(self.in_flight)
        }
        finished = super()._finish(count)
        self.in_flight = held | self.in_flight
        return finished or super()._finish(count)


class SlowSource(ScriptedSource):
    """Each wait takes `seconds` and brings groups only every `pause` waits."""

    def __init__(
        self, script: Sequence[list[float]], clock: Clock, seconds: float, pause: int
    ) -> None:
        super().__init__(script, burst=1)
        self.clock = clock
        self.seconds = seconds
        self.waits = itertools.cycle([False] * (pause - 1) + [True])

    def finished(self) -> list[Group]:
        self.clock.now += self.seconds
        return super().finished() if next(self.waits) else []


def make_sampler(
    source: ScriptedSource,
    train_prompts: int,
    compat: Compat = OURS,
    is_deterministic: bool = False,
    clock: Clock | None = None,
    runs_ahead: bool = False,
    **settings: object,
) -> Sampler:
    """A sampler of PROMPTS in order: four at a time, at most five times that in a step."""
    values = {"gen_prompts": 4, "max_num_gen_batches": 5, "max_staleness": 1, **settings}
    stream = PromptStream(PROMPTS, seed=0, shuffle=False)
    sampler_settings = SamplerConfig.model_validate(values)
    progress = DrawProgress(train_prompts, str, clock or time.monotonic)
    modes = is_deterministic, runs_ahead
    return Sampler(source, stream, sampler_settings, progress, compat, *modes)


def booked(draw: Draw) -> dict[str, int]:
    """Groups by fate, those with any."""
    return {fate: count for fate, count in draw.account.groups.items() if count}
