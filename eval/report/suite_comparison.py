"""A suite before and after: each benchmark paired, with Holm's method, and the pooled change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.problems.prompts import PLACE
from eval.report.breakdown import GroupChange
from eval.report.compare import Comparison, Side
from eval.report.gates import ACCURACY, Metrics
from eval.results.rows import Evaluation
from eval.results.statistics import (
    SIGNIFICANCE,
    PairedChange,
    Stratum,
    holm,
    measure_pooled_change,
)
from eval.results.suite import Member


@dataclass(frozen=True)
class BenchmarkChange(GroupChange):
    """One row of a suite's table. `n` counts items that were answered on both sides."""

    name: str
    weight: float
    num_samples: int
    num_elsewhere: int  # items whose problem the pool counts under an earlier benchmark
    before_metrics: Metrics
    after_metrics: Metrics

    @property
    def direction(self) -> str:
        """`up` or `down` if the raw p is below 0.05, so that no adjustment hides a regression."""
        return ("up" if self.difference > 0 else "down") if self.p < SIGNIFICANCE else ""


@dataclass(frozen=True)
class PooledChange(PairedChange):
    """The weighted mean over benchmarks. `n` counts problems, each once."""

    before: float
    after: float


@dataclass(frozen=True)
class SuiteComparison:
    """Two models on a suite."""

    benchmarks: tuple[BenchmarkChange, ...]
    pooled: PooledChange
    is_one_evaluation: bool  # both sides are copies of one measurement, in every benchmark
    is_same_model: bool  # proven in every benchmark


@dataclass(frozen=True)
class Paired:
    """One benchmark's comparison without its responses."""

    row: BenchmarkChange
    right: dict[str, tuple[int, int]]  # problem digest -> right responses (before, after)
    is_one_evaluation: bool
    is_same_model: bool

    @staticmethod
    def of(member: Member, comparison: Comparison, evaluation: Evaluation) -> Paired:
        """Summarize a comparison; `evaluation` is either side and provides the problems."""
        problems, before, after = problem_digests(evaluation), comparison.before, comparison.after
        row = BenchmarkChange(
            name=member.name,
            weight=member.weight,
            num_samples=comparison.num_samples,
            n=comparison.n,
            difference=comparison.difference,
            ci95=comparison.ci95,
            p=comparison.p,
            mid_p=comparison.mid_p,
            detectable=comparison.detectable,
            before=before.accuracy,
            before_interval=before.interval,
            after=after.accuracy,
            after_interval=after.interval,
            p_holm=comparison.p,
            gained=comparison.c,
            lost=comparison.b,
            num_elsewhere=0,
            before_metrics=_metrics_of(before),
            after_metrics=_metrics_of(after),
        )
        right = {
            problems[i]: (x, y)
            for i, (x, y) in comparison.items.items()
            if x is not None and y is not None
        }
        return Paired(row, right, comparison.is_one_evaluation, comparison.is_same_model)


def _metrics_of(side: Side) -> dict[str, float | None]:
    """The metrics that gates may name, in percent or tokens."""
    return {
        ACCURACY: 100 * side.accuracy,
        "finished": None if side.finished_accuracy is None else 100 * side.finished_accuracy,
        "truncated": 100 * side.truncated_rate,
        "no_answer": 100 * side.no_answer_rate,
        "request_failed": 100 * side.request_failed_rate,
        "tokens": side.mean_response_tokens,
    }


def compare_suite(pairs: Sequence[Paired]) -> SuiteComparison:
    """Compare a suite from its benchmarks in order; needs at least one.

    p-values are adjusted over the benchmarks. The pool is stratified by benchmark and paired. A
    problem in several benchmarks counts once, in the first of them, to keep the strata independent.
    """
    adjusted = holm([pair.row.p for pair in pairs])
    counted = _counted_once(pairs)
    rows = tuple(
        replace(pair.row, p_holm=p_holm, num_elsewhere=len(pair.right) - len(items))
        for pair, p_holm, items in zip(pairs, adjusted, counted, strict=True)
    )
    pooled = _pooled([(row, items) for row, items in zip(rows, counted, strict=True) if items])
    return SuiteComparison(
        rows,
        pooled,
        is_one_evaluation=all(pair.is_one_evaluation for pair in pairs),
        is_same_model=all(pair.is_same_model for pair in pairs),
    )


def problem_digests(evaluation: Evaluation) -> dict[str, str]:
    """{item: digest of its problem and pictures, without the template and with normalized white
    space}.
    """
    text = (evaluation.settings.get("prompt_template") or {"text": PLACE})["text"]
    before, _, after = text.partition(PLACE)
    found = {}
    for identity, (row, *_) in evaluation.items.items():
        words = row.problem.removeprefix(before).removesuffix(after).split()
        asked = " ".join([*words, *(row.images or ())])
        found[identity] = hashlib.sha256(asked.encode(errors="replace")).hexdigest()
    return found


def _counted_once(pairs: Sequence[Paired]) -> list[list[tuple[int, int]]]:
    """Per benchmark, the items whose problem no earlier benchmark has."""
    seen: set[str] = set()
    counted = []
    for pair in pairs:
        counted.append([counts for problem, counts in pair.right.items() if problem not in seen])
        seen |= pair.right.keys()
    return counted


def _pooled(strata: Sequence[tuple[BenchmarkChange, Sequence[tuple[int, int]]]]) -> PooledChange:
    change = measure_pooled_change(
        [Stratum([y - x for x, y in items], row.num_samples, row.weight) for row, items in strata]
    )
    total = sum(row.weight for row, _ in strata)
    before, after = (
        sum(
            row.weight
            / total
            * sum(counts[side] for counts in items)
            / (row.num_samples * len(items))
            for row, items in strata
        )
        for side in (0, 1)
    )
    return PooledChange(**vars(change), before=before, after=after)
