"""Measures how much of the time an engine decodes in a rollout worker, next to the same engine in a
bare loop.

The worker is a Ray actor that scores, driven like a training in stream order: each finished group
is followed by a new one. The bare loop does the same inside the actor, without Ray or scoring.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from engines import build_recipe_model, recipe_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.draw.groups import GroupRequest
    from dapo_core.engines.base import Engine, Response


NUM_GROUPS, NUM_OPEN, GROUP_SIZE, MAX_RESPONSE_TOKENS, MAX_NUM_SEQS = (
    96,
    16,
    8,
    64,
    64,
)  # the load of a round
NUM_ROUNDS = 5  # measured, after one warm-up


@dataclass(frozen=True)
class Pass:
    """One round over all groups."""

    num_tokens: int
    seconds: float
    idle_seconds: float = (
        0.0  # between engine steps with requests pending, less the time to submit new ones
    )

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    """Build the model, alternate both kinds of passes, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", choices=["vllm", "hf"], default="vllm", help="(default: %(default)s)"
    )
    engine = parser.parse_args().engine
    with tempfile.TemporaryDirectory() as folder:
        print(table(*measure(engine, build_recipe_model(Path(folder) / "model"))))


def measure(engine: str, model_path: Path) -> tuple[list[Pass], list[Pass]]:
    """Alternate passes of the bare loop and the worker; drop the first of each."""
    from dapo_core.cluster.actors import Actors
    from dapo_core.cluster.connection import connected_to_ray
    from dapo_core.cluster.placement import Demand, reserve
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.draw.groups import GroupRequest
    from dapo_core.draw.prompts import Prompt
    from dapo_core.engines.base import EnginePart
    from flows.config import resolve_config

    rollout = {
        "engine": engine,
        "group_size": GROUP_SIZE,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "threads_per_worker": 1,
        "dtype": "float32",
    }
    data = {"train": "arithmetic", "eval": "arithmetic", "max_prompt_tokens": 96}
    reward = {"overlong": {"buffer_tokens": 8}}
    config = resolve_config(
        {"data": data, "model": {"source": "recipe"}, "rollout": rollout, "reward": reward}
    )
    requests = [
        GroupRequest(number, Prompt(number, prompt, "arithmetic", "1"), 1)
        for number, prompt in enumerate(recipe_prompts(model_path, NUM_GROUPS))
    ]
    bare, worked = [], []
    with connected_to_ray(config.train, num_cpus=2):
        (place,) = reserve(Demand(1, {"CPU": 1}), [])
        worker = place.start(_measured_worker())
        actors = Actors()
        actors.add("rollout worker", [worker])
        actors.get(worker.start.remote(str(model_path), config, EnginePart(0, ""), []))
        group = RolloutGroup([worker], 600.0, actors)
        for _ in range(NUM_ROUNDS + 1):
            bare.append(actors.get(worker.run_bare.remote(requests)))
            num_tokens, seconds = _run(group, requests)
            worked.append(Pass(num_tokens, seconds, actors.get(worker.take_idle_seconds.remote())))
    return bare[1:], worked[1:]


def _measured_worker() -> type:
    from dapo_core.cluster.roles import RolloutRank
    from dapo_core.engines.base import GenerationRequest

    class Measured(RolloutRank):
        """A rollout worker that times the gaps between its engine's steps."""

        def start(self, *arguments: Any) -> None:
            super().start(*arguments)
            self.bare: Engine = self.engine.run(lambda engine: engine)
            self.step, self.submit_requests = self.bare.step, self.bare.submit
            self.bare.step = self._timed_step  # type: ignore[method-assign]
            self.bare.submit = self._timed_submit  # type: ignore[method-assign]
            self.idle_seconds = 0.0
            self.ended: float | None = None

        def _timed_step(self) -> list[Response]:
            if self.ended is not None:
                self.idle_seconds += time.perf_counter() - self.ended
            responses = self.step()
            self.ended = time.perf_counter() if self.bare.num_unfinished() else None
            return responses

        def _timed_submit(self, requests: Sequence[GenerationRequest]) -> None:
            began = time.perf_counter()
            self.submit_requests(requests)
            if self.ended is not None:
                self.idle_seconds -= time.perf_counter() - began

        def take_idle_seconds(self) -> float:
            seconds, self.idle_seconds = self.idle_seconds, 0.0
            return seconds

        def run_bare(self, requests: Sequence[GroupRequest]) -> Pass:
            return self.engine.run(lambda engine: self._run_bare(engine, requests))

        def _run_bare(self, engine: Engine, requests: Sequence[GroupRequest]) -> Pass:
            began, num_tokens, left = time.perf_counter(), 0, list(requests)
            while left or engine.num_unfinished():
                while left and engine.num_unfinished() <= (NUM_OPEN - 1) * self.group_size:
                    group, seeds = left.pop(0), range(self.group_size)
                    prompt = group.prompt.input
                    self.submit_requests(
                        [GenerationRequest(f"{group.group_id}/{n}", prompt, n) for n in seeds]
                    )
                num_tokens += sum(len(response.response_ids) for response in self.step())
            return Pass(num_tokens, time.perf_counter() - began)

    return Measured


def _run(group: RolloutGroup, requests: Sequence[GroupRequest]) -> tuple[int, float]:
    """Send all groups through the worker; returns response tokens and seconds."""
    began, num_tokens, num_done, left = time.perf_counter(), 0, 0, list(requests)
    while num_done < len(requests):
        num_free = NUM_OPEN - group.num_in_flight
        if left and num_free:
            group.submit(left[:num_free])
            del left[:num_free]
        finished = group.finished()
        num_tokens += sum(one.num_response_tokens for one in finished)
        num_done += len(finished)
    return num_tokens, time.perf_counter() - began


def table(bare: list[Pass], worked: list[Pass]) -> str:
    """The figures as text; ratios compare consecutive passes."""
    ratios = [
        one.tokens_per_second / other.tokens_per_second
        for one, other in zip(worked, bare, strict=True)
    ]
    idle = median(one.idle_seconds / one.seconds for one in worked)
    return "\n".join(
        [
            f"{NUM_GROUPS} groups of {GROUP_SIZE}, {NUM_OPEN} in flight and {MAX_NUM_SEQS} "
            "responses decoded at "
            f"once, at most {MAX_RESPONSE_TOKENS} tokens each; medians of {NUM_ROUNDS} rounds",
            f"bare loop {median(one.tokens_per_second for one in bare):8.0f} tokens/s",
            f"worker    {median(one.tokens_per_second for one in worked):8.0f} tokens/s, engine "
            f"idle {idle:.1%}",
            f"ratio     {median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
    )


if __name__ == "__main__":
    main()
