"""Accuracy over training steps; the best is chosen on half of the problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.report.suite_comparison import Paired
from eval.results.statistics import (
    Interval,
    PairedChange,
    Stratum,
    measure_pooled_change,
    pooled_mean,
    share_interval,
)


@dataclass(frozen=True)
class Share:
    """An accuracy with its 95 % interval."""

    accuracy: float
    interval: Interval


@dataclass(frozen=True)
class Best:
    """The step with the highest pooled accuracy on half of the problems; figures on the rest."""

    step: int
    num_chosen_on: int  # problems in the first half
    chosen_on: float  # its accuracy there; as a maximum it is biased upwards
    num_reported_on: int
    reported: Share
    last_step: int
    change: PairedChange  # from the last step to the best one, on the other half


@dataclass(frozen=True)
class Curve:
    """Accuracies over one training, by step; step 0 is the model before training."""

    steps: tuple[int, ...]
    pooled: tuple[Share, ...]
    benchmarks: dict[str, tuple[Share, ...]]
    best: Best | None  # None unless both halves have a problem of every benchmark


@dataclass(frozen=True)
class _Line:
    """One benchmark over the training: right responses per problem and step."""

    name: str
    weight: float
    num_samples: int
    right: dict[str, dict[int, int]]  # digest of a problem -> step -> right responses

    def half(self, is_second: bool) -> dict[str, dict[int, int]]:
        """The problems of one half, split by a digit of the digest and so the same in every run."""
        return {
            problem: found
            for problem, found in self.right.items()
            if int(problem[-1], 16) % 2 == is_second
        }

    def share(self, step: int, problems: Mapping[str, Mapping[int, int]]) -> Share:
        """Accuracy at a step on these problems."""
        values = [found[step] / self.num_samples for found in problems.values()]
        return Share(sum(values) / len(values), share_interval(values, 1 / self.num_samples))


def checkpoint_curve(points: Mapping[int, Sequence[Paired]]) -> Curve | None:
    """Accuracy curve from evaluations by step, each paired with the model before training.

    Only problems that every step answered count, each once. None for fewer than two steps after
    step 0.
    """
    if len(points) < 2:
        return None
    lines = _lines(points)
    steps = (0, *sorted(points))
    benchmarks = {
        line.name: tuple(line.share(step, line.right) for step in steps) for line in lines
    }
    pooled = tuple(
        _pooled([(line, benchmarks[line.name][place]) for line in lines])
        for place in range(len(steps))
    )
    return Curve(steps, pooled, benchmarks, _best(lines, steps))


def _lines(points: Mapping[int, Sequence[Paired]]) -> list[_Line]:
    lines, seen = [], set[str]()
    for pairs in zip(*points.values(), strict=True):
        by_step = dict(zip(points, (pair.right for pair in pairs), strict=True))
        shared = [
            problem
            for problem in pairs[0].right
            if all(problem in right for right in by_step.values())
        ]
        right = {
            problem: {
                0: pairs[0].right[problem][0],
                **{step: found[problem][1] for step, found in by_step.items()},
            }
            for problem in shared
            if problem not in seen
        }
        seen |= right.keys()
        row = pairs[0].row
        if right:
            lines.append(_Line(row.name, row.weight, row.num_samples, right))
    return lines


def _pooled(shares: Sequence[tuple[_Line, Share]]) -> Share:
    return Share(
        *pooled_mean([(share.accuracy, share.interval, line.weight) for line, share in shares])
    )


def _best(lines: Sequence[_Line], steps: Sequence[int]) -> Best | None:
    halves = [[(line, line.half(is_second)) for line in lines] for is_second in (False, True)]
    if not all(problems for half in halves for _, problems in half):
        return None
    first, second = halves

    def on(half: Sequence[tuple[_Line, dict[str, dict[int, int]]]], step: int) -> Share:
        return _pooled([(line, line.share(step, problems)) for line, problems in half])

    accuracies = {step: on(first, step).accuracy for step in steps}
    step, last = max(steps, key=lambda step: accuracies[step]), steps[-1]
    strata = [
        Stratum(
            [found[step] - found[last] for found in problems.values()],
            line.num_samples,
            line.weight,
        )
        for line, problems in second
    ]
    return Best(
        step=step,
        num_chosen_on=sum(len(problems) for _, problems in first),
        chosen_on=accuracies[step],
        num_reported_on=sum(len(problems) for _, problems in second),
        reported=on(second, step),
        last_step=last,
        change=measure_pooled_change(strata),
    )
