"""Shows which groups are trained on: runs the sampler over simulated engines with realistic
response lengths.

    .venv/bin/python bench/selection.py [--steps 200] [--slots 256]

The sampler is real; engines and clock are simulated, and no model runs. Lengths are log-normal with
the published mean and share of responses at the limit (7,385 tokens, 3.9 % at 20,480). Half of the
variance of their logs lies between prompts. Prompts with longer responses are harder, and a
truncated response is wrong. In a tick an engine decodes one token in each slot. The table compares
the mean length of responses trained on with that of all drawn groups with signal, and gives the
share of slots without a response while a step is drawn.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from dapo_core.config.sampler import SamplerConfig
from dapo_core.draw.account import Draw
from dapo_core.draw.groups import Group, GroupRequest, Rollout
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.draw.report import DrawProgress
from dapo_core.draw.sampler import Sampler
from dapo_core.engines.base import NO_LOG_PROBS, FinishReason, Response
from dapo_core.model.inputs import ModelInput
from dapo_core.reward.scorers import Verdict

LIMIT, MEAN, CUT_SHARE = 20_480, 7_385, 0.039  # tokens of a response
LOG_SIGMA = 0.6926  # of the log-normal with this mean and this share above the limit
LOG_MEAN = math.log(LIMIT) - 1.7624 * LOG_SIGMA  # 1.7624: standard normal quantile of 1 - 0.039
BETWEEN_PROMPTS = 0.5  # share of the variance of log-lengths between prompts
DIFFICULTY_SLOPE = (
    2.0  # logits of a wrong response per standard deviation of the prompt's mean log-length
)
GROUP_SIZE, TRAIN_PROMPTS, NUM_ENGINES = 16, 64, 8


@cache
def outcomes(group_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a group's response lengths and which are right; the same under every setting."""
    draw = np.random.default_rng([7, group_id])
    difficulty = draw.standard_normal()
    noise = math.sqrt(1 - BETWEEN_PROMPTS) * draw.standard_normal(GROUP_SIZE)
    lengths = np.exp(LOG_MEAN + LOG_SIGMA * (math.sqrt(BETWEEN_PROMPTS) * difficulty + noise))
    is_right = draw.random(GROUP_SIZE) < 1 / (1 + math.exp(DIFFICULTY_SLOPE * difficulty))
    return lengths.clip(1, LIMIT).astype(np.int64), is_right & (lengths < LIMIT)


def has_signal(group_id: int) -> bool:
    """True if the group has both right and wrong responses."""
    return 0 < outcomes(group_id)[1].sum() < GROUP_SIZE


@dataclass
class _Open:
    request: GroupRequest
    num_tokens: list[int]  # of each response so far
    num_left: int = GROUP_SIZE  # responses


@dataclass
class SimulatedEngines:
    """Rollout group stand-in for the sampler. Time passes in `finished()`, one tick per token."""

    num_engines: int
    num_slots: int  # per engine
    now: int = 0
    busy: int = 0  # slots x ticks with a response
    _open: dict[int, _Open] = field(default_factory=dict)
    _queues: list[deque[tuple[int, int]]] = field(
        default_factory=list
    )  # (group id, sample) waiting for a slot
    _running: list[tuple[int, int, int, int]] = field(
        default_factory=list
    )  # (end, group id, sample, engine)
    _in_flight: list[int] = field(default_factory=list)  # groups per engine
    _free: list[int] = field(default_factory=list)  # slots per engine

    def __post_init__(self) -> None:
        self._queues = [deque() for _ in range(self.num_engines)]
        self._free = [self.num_slots] * self.num_engines
        self._in_flight = [0] * self.num_engines

    @property
    def num_in_flight(self) -> int:
        return len(self._open)

    @property
    def num_tokens_in_flight(self) -> int:
        return 0

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send each group to the engine with the fewest groups."""
        for request in requests:
            engine = self._in_flight.index(min(self._in_flight))
            lengths, _ = outcomes(request.group_id)
            num_tokens = [len(response.response_ids) for response in request.responses] or [
                0
            ] * GROUP_SIZE
            group = self._open[request.group_id] = _Open(request, num_tokens)
            self._in_flight[engine] += 1
            unfinished = [
                sample for sample in range(GROUP_SIZE) if num_tokens[sample] < lengths[sample]
            ]
            group.num_left = len(unfinished)
            self._queues[engine].extend((request.group_id, sample) for sample in unfinished)
            self._start(engine)

    def finished(self) -> list[Group]:
        """Run until the next group finishes, and return it."""
        while self._running:
            if finished := self._advance():
                return finished
        return []

    def suspend(self) -> tuple[list[Group], list[GroupRequest]]:
        """Return groups that finished in this tick, and requests that resume the others."""
        late = []
        while self._running and self._running[0][0] == self.now:
            late += self._advance()
        for end, group_id, sample, engine in self._running:
            self._open[group_id].num_tokens[sample] = int(outcomes(group_id)[0][sample]) - (
                end - self.now
            )
            self._free[engine] += 1
        requests = [_begun(group) for _, group in sorted(self._open.items())]
        self._open.clear()
        self._running.clear()
        self._in_flight = [0] * self.num_engines
        for queue in self._queues:
            queue.clear()
        return late, requests

    def take_reward_seconds(self) -> float:
        return 0.0

    def _advance(self) -> list[Group]:
        """Run to the end of the next response; returns its group if it was the last one."""
        end, group_id, sample, engine = heapq.heappop(self._running)
        self.busy += (len(self._running) + 1) * (end - self.now)
        self.now = end
        self._free[engine] += 1
        group = self._open[group_id]
        group.num_tokens[sample] = int(outcomes(group_id)[0][sample])
        group.num_left -= 1
        self._start(engine)
        if group.num_left:
            return []
        del self._open[group_id]
        self._in_flight[engine] -= 1
        return [_whole(group.request)]

    def _start(self, engine: int) -> None:
        """Give free slots to waiting responses."""
        while self._free[engine] and self._queues[engine]:
            group_id, sample = self._queues[engine].popleft()
            left = outcomes(group_id)[0][sample] - self._open[group_id].num_tokens[sample]
            heapq.heappush(self._running, (self.now + int(left), group_id, sample, engine))
            self._free[engine] -= 1


def _whole(request: GroupRequest) -> Group:
    rollouts = []
    for length, is_right in zip(*outcomes(request.group_id), strict=True):
        tokens: Any = range(length)  # only their number matters
        finish: FinishReason = "length" if length == LIMIT else "stop"
        verdict: Verdict = "right" if is_right else "wrong"
        rollouts.append(
            Rollout(tokens, NO_LOG_PROBS, finish, 0.0, 0.0, verdict, float(is_right), [])
        )
    return Group(request.group_id, request.prompt, rollouts)


def _begun(group: _Open) -> GroupRequest:
    lengths, _ = outcomes(group.request.group_id)
    responses = []
    for length, count in zip(lengths, group.num_tokens, strict=True):
        tokens: Any = range(count)
        responses.append(Response("", tokens, NO_LOG_PROBS, "abort" if count < length else "stop"))
    begun = replace(group.request, responses=responses)
    return begun if begun.num_response_tokens else begun.without_responses()


@dataclass(frozen=True)
class Selection:
    """Statistics over the simulated steps."""

    kept_length: float  # mean tokens of responses trained on
    signal_length: float  # mean tokens of responses of all drawn groups with signal
    cut_share: float  # truncated share of responses trained on
    idle_share: float  # share of slots without a response while groups are drawn
    ticks_per_step: float
    waste_ratio: float  # share of tokens that no step learns from
    mean_age: float  # steps between a group's draw and its training
    max_age: int

    @property
    def difference(self) -> float:
        """Relative difference between kept and signal length."""
        return self.kept_length / self.signal_length - 1


def simulate(
    settings: SamplerConfig, num_steps: int, train_prompts: int, num_engines: int, num_slots: int
) -> Selection:
    """Draw `num_steps` steps with the sampler."""
    engines: Any = SimulatedEngines(num_engines, num_slots)
    prompts = [Prompt(0, ModelInput(()), "simulated", "")]
    progress = DrawProgress(train_prompts, str, clock=lambda: engines.now)
    sampler = Sampler(engines, PromptStream(prompts, 0, False), settings, progress)
    draws, drawn_in, ages = list[Draw](), dict[int, int](), list[int]()
    for step in range(1, num_steps + 1):
        drawn = sampler.stream.position
        draws.append(sampler.draw(step))
        drawn_in |= dict.fromkeys(range(drawn, sampler.stream.position), step)
        ages += [step - drawn_in[group.group_id] for group in draws[-1].groups]
    kept = [rollout for draw in draws for group in draw.groups for rollout in group.rollouts]
    with_signal = [group_id for group_id in range(sampler.stream.position) if has_signal(group_id)]
    generated = sum(draw.account.generated_tokens for draw in draws)
    kept_tokens = sum(len(rollout.response_ids) for rollout in kept)
    left = draws[-1].account.tokens["surplus"] + draws[-1].account.carried_out_tokens
    return Selection(
        kept_length=kept_tokens / len(kept),
        signal_length=float(np.mean([outcomes(group_id)[0].mean() for group_id in with_signal])),
        cut_share=sum(rollout.is_truncated for rollout in kept) / len(kept),
        idle_share=1 - engines.busy / (engines.now * num_engines * num_slots),
        ticks_per_step=engines.now / num_steps,
        waste_ratio=1 - kept_tokens / (generated - left),
        mean_age=float(np.mean(ages)),
        max_age=max(ages),
    )


def compared_settings() -> dict[str, SamplerConfig]:
    """Settings to compare, by name. 3 P prompts are open, as in the default recipe."""
    base: dict[str, Any] = {"gen_prompts": 3 * TRAIN_PROMPTS, "max_seconds_without_kept": 1e12}
    ahead = {**base, "gen_prompts": 5 * TRAIN_PROMPTS, "max_staleness": 4}
    return {
        "the defaults: `window: 0.3`, `max_staleness: 3`": SamplerConfig(**base),
        "`window: 0`, strict order": SamplerConfig(**base, window=0),
        "`window: 0.1`": SamplerConfig(**base, window=0.1),
        "`window: 1`": SamplerConfig(**base, window=1),
        "`max_staleness: 2`": SamplerConfig(**base, max_staleness=2),
        "`max_staleness: 1`": SamplerConfig(**base, max_staleness=1),
        "`max_staleness: 0`": SamplerConfig(**base, max_staleness=0),
        "`max_staleness: 4`, 5 P open": SamplerConfig(**ahead),
        "`max_staleness: 4`, 5 P open, `window: 0`": SamplerConfig(**ahead, window=0),
    }


def main() -> None:
    """Simulate each setting and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=256,
        help="responses an engine decodes at once (default: %(default)s)",
    )
    arguments = parser.parse_args()
    sample = range(20_000)
    lengths = np.concatenate([outcomes(group_id)[0] for group_id in sample])
    print(
        f"{arguments.steps} steps of {TRAIN_PROMPTS} x {GROUP_SIZE} responses; all responses: mean "
        f"{lengths.mean():,.0f} tokens, {np.mean(lengths == LIMIT):.1%} cut; "
        f"{np.mean([has_signal(group_id) for group_id in sample]):.0%} of groups have signal"
    )
    columns = (
        "kept | with signal | difference | kept ones cut | idle slots | ticks a step | wasted | "
        "steps waited"
    )
    print(f"| setting | {columns} |\n|---|{'---|' * columns.count('|')}---|")
    for name, settings in compared_settings().items():
        found = simulate(settings, arguments.steps, TRAIN_PROMPTS, NUM_ENGINES, arguments.slots)
        print(
            f"| {name} | {found.kept_length:,.0f} | {found.signal_length:,.0f} | "
            f"{found.difference:+.2%} | "
            f"{found.cut_share:.1%} | {found.idle_share:.0%} | {found.ticks_per_step:,.0f} | "
            f"{found.waste_ratio:.0%} | {found.mean_age:.2f} (at most {found.max_age}) |"
        )


if __name__ == "__main__":
    main()
