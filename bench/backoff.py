"""Shows what sampler.backoff saves, and which groups it misses, over several epochs.

    .venv/bin/python bench/backoff.py [--steps 200] [--prompts 2000]

The order of prompts and the backoff are real; no model runs. A response is right with the log-odds
ease - 4.7 x difficulty, where difficulties are standard normal and the ease rises from 0 to --gain
over the steps, as a model learns. A step trains on the first 64 groups of 16 with signal. Missed:
skipped visits that would have given signal, as a share of all visits that do or would. The last
columns are the mean accuracy of the groups trained on, which backoff would shift if it chose
easier or harder prompts.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from dapo_core.draw.backoff import Backoff
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.model.inputs import ModelInput

TRAIN_PROMPTS, GROUP_SIZE = 64, 16
SLOPE = 4.7  # half of the groups have signal at first


@dataclass
class Counts:
    """Groups over all steps."""

    drawn: int = 0
    kept: int = 0
    missed: int = 0  # skipped, though they would have had signal
    accuracy: float = 0.0  # sum over kept groups


class Watched(Backoff):
    """Counts the skipped visits that would have given signal."""

    def __init__(self, task: Task, counts: Counts, is_on: bool) -> None:
        super().__init__()
        self.task, self.counts, self.is_on = task, counts, is_on

    def skips(self, prompt: int, epoch: int) -> bool:
        """Whether the prompt is passed over; never if off."""
        is_skipped = self.is_on and super().skips(prompt, epoch)
        if is_skipped:
            self.counts.missed += has_signal(self.task.respond(prompt))
        return is_skipped


class Task:
    """Prompts of different difficulty, and a model that learns."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.difficulties = self.random.standard_normal(num_prompts)
        self.ease = 0.0

    def respond(self, prompt: int) -> int:
        """Return how many of the group's responses are right."""
        odds = self.ease - SLOPE * self.difficulties[prompt]
        return int(self.random.binomial(GROUP_SIZE, 1 / (1 + math.exp(-odds))))


def has_signal(num_right: int) -> bool:
    """True if the group has both right and wrong responses."""
    return 0 < num_right < GROUP_SIZE


def simulate(num_steps: int, num_prompts: int, gain: float, is_on: bool, seed: int) -> Counts:
    """Train `num_steps` steps."""
    counts, task = Counts(), Task(num_prompts, seed)
    prompts = [Prompt(number, ModelInput(()), "simulated", "") for number in range(num_prompts)]
    backoff = Watched(task, counts, is_on)
    stream = PromptStream(prompts, seed, shuffle=True, backoff=backoff)
    for step in range(num_steps):
        task.ease = gain * step / num_steps
        num_kept = 0
        while num_kept < TRAIN_PROMPTS:
            [(_, prompt)] = stream.take(1)
            num_right = task.respond(prompt.index)
            is_kept = has_signal(num_right)
            backoff.record(prompt.index, is_kept)
            counts.drawn += 1
            num_kept += is_kept
            counts.accuracy += is_kept * num_right / GROUP_SIZE
        counts.kept += num_kept
    return counts


def main() -> None:
    """Simulate with and without backoff, and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    print("| the model's gain | backoff | groups drawn per group kept | missed | accuracy, kept |")
    print("|---|---|---|---|---|")
    for gain in (0.0, 3.0, 6.0):
        for is_on in (False, True):
            runs = [
                simulate(arguments.steps, arguments.prompts, gain, is_on, seed)
                for seed in range(arguments.seeds)
            ]
            kept = sum(run.kept for run in runs)
            missed = sum(run.missed for run in runs)
            print(
                f"| {gain} | {'on' if is_on else 'off'} | "
                f"{sum(run.drawn for run in runs) / kept:.2f} | {missed / (missed + kept):.1%} | "
                f"{sum(run.accuracy for run in runs) / kept:.1%} |"
            )


if __name__ == "__main__":
    main()
