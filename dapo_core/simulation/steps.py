"""Simulates training steps: the sampler draws from simulated engines, then ranks take over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dapo_core.draw.account import NO_SIGNAL, Draw
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.draw.report import DrawProgress
from dapo_core.draw.sampler import Sampler
from dapo_core.model.inputs import ModelInput
from dapo_core.simulation.costs import ANCHOR, GENERATE, OTHER, PUBLISH, UPDATE, Costs
from dapo_core.simulation.engines import SimulatedEngines
from dapo_core.simulation.workload import Workload

if TYPE_CHECKING:
    from dapo_core.config.sampler import SamplerConfig

NUM_PROMPTS = 20_000  # of the data
Span = tuple[str, float, float]  # phase, start, end


@dataclass(frozen=True)
class Setup:
    """What a simulation runs with: of `num_parts` equal parts of prompts and engines, one."""

    workload: Workload
    costs: Costs
    sampler: SamplerConfig
    train_prompts: int
    num_engines: int
    is_asynchronous: bool = False
    num_parts: int = 1


@dataclass
class Simulated:
    """Statistics over the simulated steps, without the first ones, which fill the engines."""

    seconds: dict[str, float]  # mean by phase; engines may decode in all but `publish` and `other`
    trained_tokens: float  # of a step: prompts and responses
    idle_share: float  # of the engines' slots, as far as their cache has room
    prefill_share: float  # of the engines' time
    waste_ratio: float  # share of response tokens that no step trains on
    mean_age: float  # steps between a group's draw and its training
    max_age: int
    draws: list[Draw] = field(repr=False)
    spans: list[Span] = field(repr=False)
    occupied: list[tuple[float, float]] = field(repr=False)  # from a time on, share of slots

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens trained on per second."""
        return self.trained_tokens / self.step_seconds


class _Silent(DrawProgress):
    """Logs nothing, since the time is not real."""

    def show(self, *_: Any) -> None:
        pass

    def end(self, num_ready: int) -> None:
        pass


def simulate(setup: Setup, num_steps: int, num_skipped: int = 0) -> Simulated:
    """Simulate `num_skipped` steps, then `num_steps` that count; raises what a draw raises."""
    engines = SimulatedEngines(setup.workload, setup.costs.engine, setup.num_engines)
    prompt = Prompt(0, ModelInput((0,) * setup.workload.prompt_tokens), "simulated", "")
    settings = setup.sampler.model_copy(update={"max_seconds_without_kept": float("inf")})
    progress = _Silent(setup.train_prompts, lambda ids: f"{len(ids)} tokens", lambda: engines.now)
    ahead: dict[str, Any] = {"runs_ahead": True} if setup.is_asynchronous else {}
    stream = PromptStream([prompt] * NUM_PROMPTS, 0, shuffle=False)
    sampler = Sampler(engines, stream, settings, progress, **ahead)
    draws, spans = list[Draw](), list[Span]()
    ages = list[int]()
    began, usage = 0.0, engines.usage()
    for step in range(1, num_skipped + num_steps + 1):
        if step == num_skipped + 1:
            began, usage = engines.now, engines.usage()
            draws, spans, ages = [], [], []
        start = engines.now
        draws.append(sampler.draw(step))
        ages += [step - engines.drawn[group.group_id] for group in draws[-1].groups]
        spans += [(GENERATE, start, engines.now), *_train(setup, sampler, engines, draws[-1])]
    seconds = engines.now - began
    busy, idle, prefilling = engines.usage() - usage
    phases = {name: 0.0 for name in (GENERATE, ANCHOR, UPDATE, PUBLISH, OTHER)}
    for name, start, end in spans:
        phases[name] += (end - start) / num_steps
    tokens = {
        fate: sum(draw.account.tokens[fate] for draw in draws) for fate in ("kept", *NO_SIGNAL)
    }
    return Simulated(
        seconds=phases,
        trained_tokens=setup.num_parts * sum(map(_num_trained, draws)) / num_steps,
        idle_share=idle / (busy + idle),
        prefill_share=prefilling / (setup.num_engines * seconds),
        waste_ratio=1 - tokens["kept"] / max(sum(tokens.values()), 1),
        mean_age=sum(ages) / max(len(ages), 1),
        max_age=max(ages, default=0),
        draws=draws,
        spans=spans,
        occupied=[(time, share) for time, share in engines.occupied if time >= began],
    )


def _train(setup: Setup, sampler: Sampler, engines: SimulatedEngines, draw: Draw) -> Iterator[Span]:
    """Let the ranks' time pass, and yield their phases."""
    costs, num_tokens = setup.costs, setup.num_parts * _num_trained(draw)
    for name, seconds in ((ANCHOR, costs.anchor * num_tokens), (UPDATE, costs.update * num_tokens)):
        start = engines.now
        engines.run(seconds)  # synchronous: nothing is in flight
        yield name, start, engines.now
    if setup.is_asynchronous:
        sampler.pause()
    for name, seconds in ((PUBLISH, costs.publish), (OTHER, costs.other)):
        start = engines.now
        engines.wait(seconds)
        yield name, start, engines.now


def _num_trained(draw: Draw) -> int:
    """Return the prompt and response tokens that a step trains on."""
    return sum(
        group.num_response_tokens + len(group.rollouts) * len(group.prompt.input.token_ids)
        for group in draw.groups
    )
