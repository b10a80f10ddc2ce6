"""Metrics over several responses per prompt, under verl's names: mean@N, std@N, best@n, worst@n and maj@n.

best@n, worst@n and maj@n are the mean and std over n responses drawn with replacement from a prompt's N, averaged
over prompts, for n = 2, 4, 8 ... N. verl draws 1,000 times; here best and worst are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapo_core.groups import Rollout

CORE = "acc"  # its mean, best and maj at N are verl's core metrics
VALUES = (CORE, "score", "reward")
NUM_DRAWS, DRAW_SEED = 1000, 42  # of maj@n, as in verl


def sample_metrics(name: str, prompts: Sequence[Sequence[Rollout]], num_samples: int) -> dict[str, float]:
    """Return the metrics of the set `name` from the scored responses to its prompts, 1 to N per prompt."""
    votes = any(rollout.answer is not None for rollouts in prompts for rollout in rollouts)
    metrics: dict[str, float] = {}
    for value in VALUES:
        each = [_of_prompt(rollouts, value, num_samples, votes) for rollouts in prompts]
        for metric in each[0]:
            is_core = value == CORE and metric.startswith(("mean@", "best@", "maj@")) and _n(metric) == num_samples
            section = "val-core" if is_core else "val-aux"
            metrics[f"{section}/{name}/{value}/{metric}"] = float(np.mean([one[metric] for one in each]))
    return metrics


def _of_prompt(rollouts: Sequence[Rollout], value: str, num_samples: int, votes: bool) -> dict[str, float]:
    values = np.array([getattr(rollout, value) for rollout in rollouts], dtype=float)
    metrics = {f"mean@{num_samples}": float(values.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values.std())
    for n in _sizes(num_samples):
        best, worst = _best(values, n), _best(-values, n)
        pairs = {"best": best, "worst": (-worst[0], worst[1])}
        if votes:
            drawn = values[_majorities([rollout.answer for rollout in rollouts], n)]
            pairs["maj"] = (float(drawn.mean()), float(drawn.std()))
        for name, (mean, std) in pairs.items():
            metrics |= {f"{name}@{n}/mean": mean, f"{name}@{n}/std": std}
    return metrics


def _n(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _sizes(num_samples: int) -> list[int]:
    powers = [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples]
    return [*powers, num_samples]


def _best(values: np.ndarray, n: int) -> tuple[float, float]:
    """Return mean and std of the maximum of n draws with replacement: P(maximum <= k-th of K) = (k / K)^n."""
    probabilities = np.diff((np.arange(len(values) + 1) / len(values)) ** n)
    ordered = np.sort(values)
    mean = float(probabilities @ ordered)
    return mean, float(np.sqrt(probabilities @ (ordered - mean) ** 2))


def _majorities(answers: Sequence[str | None], n: int) -> np.ndarray:
    """Return the index of the majority response in each of NUM_DRAWS draws of n.

    Ties go to the answer drawn first. "No answer" counts as an answer, as in verl.
    """
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    votes = np.array([numbers[answer] for answer in answers])
    drawn = np.random.default_rng(DRAW_SEED).integers(len(answers), size=(NUM_DRAWS, n))
    counts = (votes[drawn][:, :, None] == votes[drawn][:, None, :]).sum(axis=2)  # occurrences of each answer
    return drawn[np.arange(NUM_DRAWS), counts.argmax(axis=1)]  # argmax takes the first maximum
