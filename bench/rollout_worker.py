"""Measures how much of its time an engine decodes in a rollout worker, against the same engine in a bare loop.

The worker is a Ray actor that scores, driven as by a training in stream order: a group is submitted for each that
finished. The bare loop does the same inside the actor, without Ray and without scoring.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.engines.base import Engine, Response
    from dapo_core.groups import GroupRequest


@dataclass(frozen=True)
class Pass:
    """All groups once."""

    num_tokens: int
    seconds: float
    idle_seconds: float = 0.0  # between two steps of an engine that had requests, and did not take in others

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    """Build the model, measure both kinds of passes in turn, print the table."""
    load = _parser().parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # as in rollout workers
    with tempfile.TemporaryDirectory() as folder:
        if load.model is None:
            from engines import build_recipe_model

            load.model = build_recipe_model(Path(folder) / "model", load.warm_steps)
        print(table(*measure(load), load))


def measure(load: Namespace) -> tuple[list[Pass], list[Pass]]:
    """Passes of the bare loop and of the worker, in turn; the first of each is left out."""
    from engines import _prompts

    from dapo_core.cluster.actors import Actors
    from dapo_core.cluster.connection import connected_to_ray
    from dapo_core.cluster.placement import Demand, reserve
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.data import Prompt
    from dapo_core.engines.base import EnginePart
    from dapo_core.groups import GroupRequest
    from flows.config import resolve_config

    rollout = {
        "engine": load.engine,
        "group_size": load.group_size,
        "max_response_tokens": load.response_tokens,
        "max_num_seqs": load.max_num_seqs,
        "threads_per_worker": 1,
        "dtype": "float32",
    }
    data = {"train": "arithmetic", "eval": "arithmetic", "max_prompt_tokens": 96}
    reward = {"overlong": {"buffer_tokens": 8}}
    config = resolve_config({"data": data, "model": {"source": "recipe"}, "rollout": rollout, "reward": reward})
    requests = [
        GroupRequest(number, Prompt(number, tuple(ids), "arithmetic", "1"), 1)
        for number, ids in enumerate(_prompts(load.model, load.groups))
    ]
    bare, through = [], []
    with connected_to_ray(config.train, num_cpus=2):
        (place,) = reserve(Demand(1, {"CPU": 1}), [])
        worker = place.start(_measured_worker())
        actors = Actors()
        actors.add("rollout worker", [worker])
        actors.get(worker.start.remote(str(load.model), config, EnginePart(0, ""), []))
        group = RolloutGroup([worker], 600.0, actors)
        for _ in range(load.rounds + 1):
            bare.append(actors.get(worker.run_bare.remote(requests, load.open_groups)))
            num_tokens, seconds = _run(group, requests, load.open_groups)
            through.append(Pass(num_tokens, seconds, actors.get(worker.take_idle_seconds.remote())))
    return bare[1:], through[1:]


def _measured_worker() -> type:
    from dapo_core.cluster.start import _RolloutRank
    from dapo_core.engines.base import GenerationRequest

    class Measured(_RolloutRank):
        """A rollout worker that records when its engine's steps begin and end."""

        def start(self, *arguments: Any) -> None:
            super().start(*arguments)
            self.bare: Engine = self.engine.run(lambda engine: engine)
            self.step, self.take_in = self.bare.step, self.bare.submit
            self.bare.step, self.bare.submit = self._timed_step, self._timed_submit  # type: ignore[method-assign]
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
            self.take_in(requests)
            if self.ended is not None:
                self.idle_seconds -= time.perf_counter() - began

        def take_idle_seconds(self) -> float:
            seconds, self.idle_seconds = self.idle_seconds, 0.0
            return seconds

        def run_bare(self, requests: Sequence[GroupRequest], num_open: int) -> Pass:
            return self.engine.run(lambda engine: self._run_bare(engine, requests, num_open))

        def _run_bare(self, engine: Engine, requests: Sequence[GroupRequest], num_open: int) -> Pass:
            began, num_tokens, left = time.perf_counter(), 0, list(requests)
            while left or engine.num_unfinished():
                while left and engine.num_unfinished() <= (num_open - 1) * self.group_size:
                    group, seeds = left.pop(0), range(self.group_size)
                    ids = group.prompt.prompt_ids
                    self.take_in([GenerationRequest(f"{group.group_id}/{seed}", ids, seed) for seed in seeds])
                num_tokens += sum(len(response.response_ids) for response in self.step())
            return Pass(num_tokens, time.perf_counter() - began)

    return Measured


def _run(group: RolloutGroup, requests: Sequence[GroupRequest], num_open: int) -> tuple[int, float]:
    """Tokens and seconds of the groups through the worker."""
    began, num_tokens, num_done, left = time.perf_counter(), 0, 0, list(requests)
    while num_done < len(requests):
        num_free = num_open - group.num_in_flight
        if left and num_free:
            group.submit(left[:num_free])
            del left[:num_free]
        finished = group.finished()
        num_tokens += sum(one.num_response_tokens for one in finished)
        num_done += len(finished)
    return num_tokens, time.perf_counter() - began


def table(bare: list[Pass], through: list[Pass], load: Namespace) -> str:
    """The figures as text; the ratio is of passes that followed each other."""
    ratios = [one.tokens_per_second / other.tokens_per_second for one, other in zip(through, bare, strict=True)]
    idle = median(one.idle_seconds / one.seconds for one in through)
    return "\n".join(
        [
            f"{load.groups} groups of {load.group_size}, {load.open_groups} open and {load.max_num_seqs} rows "
            f"decoded at once, at most {load.response_tokens} tokens each; medians of {load.rounds} rounds",
            f"bare loop {median(one.tokens_per_second for one in bare):8.0f} tokens/s",
            f"worker    {median(one.tokens_per_second for one in through):8.0f} tokens/s, engine idle {idle:.1%}",
            f"ratio     {median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--model", type=Path, help="a model folder instead of the recipe's model")
    for name, default, what in (
        ("--groups", 96, "groups of a round"),
        ("--open-groups", 16, "groups in flight"),
        ("--group-size", 8, "responses per prompt"),
        ("--response-tokens", 64, "length limit"),
        ("--max-num-seqs", 64, "responses decoded at once"),
        ("--rounds", 5, "measured rounds"),
        ("--warm-steps", 100, "warm-up steps of the recipe's model"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{what} (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
