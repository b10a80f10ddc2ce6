"""Several responses to each item: an evaluation's rows by item, and avg@k, pass@k and maj@k of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from eval.answers.grading import Grade
from eval.results import ResultsError, Row, load_results
from eval.statistics import bootstrap_mean, paired_bootstrap, wilson_interval

Samples = tuple[Row, ...]  # the k rows of one item, by sample number
IsSame = Callable[[str, str], bool]  # of two answers


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its settings, and k rows for each item."""

    settings: dict[str, Any]
    items: dict[str, Samples]
    num_samples: int  # k

    @staticmethod
    def of(settings: dict[str, Any], rows: Iterable[Row]) -> Evaluation:
        """Rows by item. Raises ResultsError when not every item has the samples 0 to k - 1."""
        items: dict[str, list[Row]] = {}
        for row in rows:
            items.setdefault(row.id, []).append(row)
        num_samples = max((len(group) for group in items.values()), default=1)
        uneven = [
            identity
            for identity, group in items.items()
            if sorted(row.sample for row in group) != list(range(num_samples))
        ]
        if uneven:
            raise ResultsError(
                f"{len(uneven)} of {len(items)} items have not the samples 0 to {num_samples - 1} (first: "
                f"{uneven[0]!r}): the evaluation did not finish. Run it again; it asks only for what is missing."
            )
        by_sample = {
            identity: tuple(sorted(group, key=lambda row: row.sample)) for identity, group in items.items()
        }
        return Evaluation(settings, by_sample, num_samples)


@dataclass(frozen=True)
class MetricChange:
    """avg@k, pass@k or maj@k of both sides, with 95 % bootstrap intervals over items."""

    before: float
    before_interval: tuple[float, float]
    after: float
    after_interval: tuple[float, float]
    difference: float
    ci95: tuple[float, float]  # paired


def load_evaluation(directory: str | Path) -> Evaluation:
    """The finished evaluation in a results directory; raises what `load_results` raises."""
    settings, rows = load_results(directory)
    return Evaluation.of(settings, rows.values())


def num_right(samples: Samples) -> int:
    """How many of an item's responses are right."""
    return sum(row.is_right for row in samples)


def is_answered(samples: Samples) -> bool:
    """True when every request for the item was answered."""
    return all(row.is_answered for row in samples)


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for the chance that k new samples do (Chen et al., arXiv:2107.03374, eq. 1).
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_share(samples: Samples, is_same: IsSame) -> float:
    """1 when the answer given most often is right, 0 when it is not; of m answers given equally often, 1/m.

    Answers that `is_same` finds equal count as one; a response without an answer, or cut short, has no vote.
    The fair share of a tie is what drawing one of the m by lot gives on average.
    """
    right = num_right(samples)
    wrong = Counter(row.answer for row in samples if row.verdict == "wrong" and row.answer is not None)
    if not right or max(wrong.values(), default=0) > right:
        return 0.0  # merging equal wrong answers can only add to their votes
    if sum(wrong.values()) < right:
        return 1.0
    votes = _merged(wrong, is_same)
    return 0.0 if max(votes) > right else 1 / (1 + votes.count(right))


def same_answer_by(grade: Callable[[str, str, str], Grade]) -> IsSame:
    """`is_same(answer, other)`: whether the exact ruler accepts one answer where the other is gold."""

    @functools.cache
    def is_same(answer: str, other: str) -> bool:
        return grade(f"\\boxed{{{answer}}}", "stop", other).verdict == "right"

    return is_same


def item_metrics(items: Sequence[Samples], is_same: IsSame) -> dict[str, list[float]]:
    """{avg@k, pass@2, pass@4, ..., pass@k, maj@k: one value per item}, k being the samples per item."""
    k = len(items[0])
    sizes = sorted({size for size in (2**power for power in range(1, k.bit_length())) if size < k} | {k})
    return {
        f"avg@{k}": [num_right(samples) / k for samples in items],
        **{f"pass@{size}": [pass_at(size, k, num_right(samples)) for samples in items] for size in sizes},
        f"maj@{k}": [majority_share(samples, is_same) for samples in items],
    }


def compare_metrics(
    before: Sequence[Samples], after: Sequence[Samples], is_same: IsSame
) -> dict[str, MetricChange]:
    """avg@k, pass@k and maj@k of both sides over the same items."""
    values = item_metrics(before, is_same), item_metrics(after, is_same)
    return {
        name: MetricChange(
            before=_mean(x),
            before_interval=bootstrap_mean(x),
            after=_mean(values[1][name]),
            after_interval=bootstrap_mean(values[1][name]),
            difference=_mean(values[1][name]) - _mean(x),
            ci95=paired_bootstrap(x, values[1][name]),
        )
        for name, x in values[0].items()
    }


def accuracy_interval(right: Sequence[int], num_samples: int) -> tuple[float, float]:
    """95 % interval of an accuracy from each item's right responses.

    One sample per item: Wilson's. Several: bootstrap over items, or Wilson's over as many items where the items do
    not differ and a bootstrap would have no width.
    """
    if num_samples == 1 or len(set(right)) == 1:
        return wilson_interval(round(sum(right) / num_samples), len(right))
    return bootstrap_mean([count / num_samples for count in right])


def _merged(votes: Counter[str], is_same: IsSame) -> list[int]:
    """Votes after answers that are the same have been put together."""
    merged: dict[str, int] = {}
    for answer, count in votes.most_common():
        known = next((other for other in merged if is_same(answer, other)), answer)
        merged[known] = merged.get(known, 0) + count
    return list(merged.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
