"""Paired comparison of two evaluations of the same items: did the model get better?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eval import InputError
from eval.answers.grading import grade
from eval.report import breakdown
from eval.report.breakdown import Graders, GroupChange, Lengths, MetricChange, Pair, Part, Speed
from eval.requests.identity import describe_weights, show_same_weights
from eval.results.rows import (
    SERVED,
    Evaluation,
    Row,
    Samples,
    describe_differences,
    is_answered,
    load_evaluation,
    num_right,
)
from eval.results.statistics import SIGNIFICANCE, PairedChange, measure_change
from eval.results.summary import (
    Budget,
    Rates,
    by_limit,
    measure_rates,
    rate,
    same_answer_by,
)

GROUP_FIELDS = ("level", "subject")
# Settings that may differ: the model is being compared; the others are checked item by item.
_NOT_COMPARED = ("model", SERVED, "num_items", "prompts", "golds")
MAX_RESPONSE_CHARS = 6000  # of a response or thinking in a report


class ComparisonError(InputError):
    """Two evaluations cannot be paired: items, prompts, sampling settings or graders differ."""


@dataclass(frozen=True)
class Side(Rates):
    """Results of one of the two models, over the paired items."""

    model: str
    name: str | None  # served name
    url: str | None  # of the server
    weights: str  # description of what identifies them
    engine: str | None  # version and settings, as reported by the server
    evaluation: str  # digest of the measurement; copies share it
    sampling: Mapping[str, Any]  # as in settings.json
    n: int
    right: int
    interval: tuple[float, float]
    num_finished: int  # right or wrong responses: neither truncated nor without an answer
    finished_accuracy: float | None  # over those; None without any
    speed: Speed


@dataclass(frozen=True)
class Flip:
    """An item with more or fewer right samples after than before."""

    id: str
    level: str | None
    subject: str | None
    problem: str  # the last message of the prompt
    gold: str
    # {verdict, answer, response: its end, num_left_out: characters, num_right}
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True)
class Unpaired:
    """Items left out because a request failed, with bounds on the difference over all items."""

    num_items: int
    before: int  # items with a failed request before
    after: int
    difference_range: tuple[float, float]  # for any possible answers to the failed requests


@dataclass(frozen=True)
class Comparison(PairedChange):
    """A paired comparison over `n` items, answered `num_samples` times on both sides.

    `difference` = after - before, of mean accuracy. `b` counts items that got worse (lost), `c`
    items that got better (gained): with one sample each, difference = (c - b) / n.
    `transitions[x][y]` counts items with verdict x before and y after.
    """

    before: Side
    after: Side
    num_samples: int
    is_same_model: bool  # proven, see eval.requests.identity.show_same_weights
    unpaired: Unpaired
    test: Literal["exact McNemar", "exact sign-flip"]
    b: int
    c: int
    groups: dict[str, dict[str, GroupChange]]
    gain: dict[str, Part]
    transitions: dict[str, dict[str, float]]
    lengths: Lengths
    by_limit: list[tuple[Budget, ...]]  # both sides under simulated lower token limits
    graders: Graders | None  # None unless AISBench's rule graded the responses too
    metrics: dict[str, MetricChange]
    lost: tuple[Flip, ...]
    gained: tuple[Flip, ...]
    # right responses before and after, None if a request failed
    items: dict[str, tuple[int | None, int | None]]
    settings: dict[str, Any]  # shared by both sides

    @property
    def is_one_evaluation(self) -> bool:
        """True when both sides are copies of one measurement."""
        return self.before.evaluation == self.after.evaluation

    @property
    def is_significant(self) -> bool:
        """True when the exact test rejects "no change" at the 5 % level."""
        return self.p < SIGNIFICANCE


def compare(before_dir: str | Path, after_dir: str | Path) -> Comparison:
    """Load and compare two results directories. Raises ResultsError if one is unfinished."""
    return compare_evaluations(load_evaluation(before_dir), load_evaluation(after_dir))


def compare_evaluations(before: Evaluation, after: Evaluation) -> Comparison:
    """Pair two evaluations by item id. Raises ComparisonError if more than the model differs."""
    _require_comparable(before, after)
    pairs = [(samples, after.items[identity]) for identity, samples in before.items.items()]
    paired = [(x, y) for x, y in pairs if is_answered(x) and is_answered(y)]
    if not paired:
        raise ComparisonError(
            f"none of the {len(pairs)} items was answered on both sides: nothing can be compared"
        )
    k = before.num_samples
    sides = [x for x, _ in paired], [y for _, y in paired]
    changes = breakdown.changes_of(paired)
    change = measure_change(changes, k)
    lost = [pair for pair, count in zip(paired, changes, strict=True) if count < 0]
    gained = [pair for pair, count in zip(paired, changes, strict=True) if count > 0]
    right_after = after.right
    return Comparison(
        before=_side(before, sides[0]),
        after=_side(after, sides[1]),
        **vars(change),
        num_samples=k,
        is_same_model=_is_same_model(before.settings, after.settings),
        unpaired=_unpaired(pairs),
        test="exact McNemar" if k == 1 else "exact sign-flip",
        b=len(lost),
        c=len(gained),
        groups=breakdown.group_changes(paired, GROUP_FIELDS),
        gain=breakdown.gain_parts(paired),
        transitions=breakdown.transitions_of(paired),
        lengths=breakdown.length_change(_rows(sides[0]), _rows(sides[1])),
        by_limit=by_limit(
            before.settings["sampling"].get("max_tokens"), _rows(sides[0]), _rows(sides[1])
        ),
        graders=breakdown.compare_graders(paired)
        if before.has_aisbench and after.has_aisbench
        else None,
        metrics=breakdown.compare_metrics(*sides, same_answer_by(grade)) if k > 1 else {},
        lost=_flips(lost, is_gain=False),
        gained=_flips(gained, is_gain=True),
        items={
            identity: (right, right_after[identity]) for identity, right in before.right.items()
        },
        settings=before.shared_settings,
    )


def _require_comparable(before: Evaluation, after: Evaluation) -> None:
    reasons = describe_differences(_comparable_settings(before), _comparable_settings(after))
    hint = (
        " Grade both by the same rule with `dapo grade`." if "grader:" in "; ".join(reasons) else ""
    )
    if before.num_samples != after.num_samples:
        reasons.append(
            f"responses per item: {before.num_samples} before, {after.num_samples} after"
        )
    for label, side, other in (("before", before, after), ("after", after, before)):
        only = [identity for identity in side.items if identity not in other.items]
        if only:
            reasons.append(
                f"{len(only)} of {len(side.items)} items are only in {label} (first: {only[0]!r})"
            )
    shared = [identity for identity in before.items if identity in after.items]
    for field in ("prompt", "images", "gold", "level", "subject"):
        changed = [
            i
            for i in shared
            if getattr(before.items[i][0], field) != getattr(after.items[i][0], field)
        ]
        if changed:
            reasons.append(
                f"{field.removesuffix('s')}s: {len(changed)} of {len(shared)} shared items differ "
                f"(first: {changed[0]!r})"
            )
    if reasons:
        raise ComparisonError(
            f"the two evaluations cannot be compared: {'; '.join(reasons)}. A difference in "
            "accuracy would not be due to the model alone: evaluate both with the same evaluate.* "
            f"settings.{hint}"
        )


def _comparable_settings(side: Evaluation) -> dict[str, Any]:
    """Settings that must be equal; sampling values from generation_config.json may differ."""
    settings = {key: value for key, value in side.settings.items() if key not in _NOT_COMPARED}
    sampling = settings["sampling"]
    if sampling.get("source") == "model":
        from_model = ("temperature", "top_p", "top_k", "extra_body")
        settings["sampling"] = {
            key: value for key, value in sampling.items() if key not in from_model
        }
    return settings


def _is_same_model(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return bool(before["model"] == after["model"]) and show_same_weights(
        before.get(SERVED), after.get(SERVED)
    )


def _unpaired(pairs: Sequence[Pair]) -> Unpaired:
    left_out = [(x, y) for x, y in pairs if not (is_answered(x) and is_answered(y))]
    num_failed = [[sum(not row.is_answered for row in side) for side in pair] for pair in pairs]
    known = sum(num_right(y) - num_right(x) for x, y in pairs)
    num_responses = len(pairs[0][0]) * len(pairs)
    return Unpaired(
        num_items=len(left_out),
        before=sum(not is_answered(x) for x, _ in left_out),
        after=sum(not is_answered(y) for _, y in left_out),
        difference_range=(
            (known - sum(before for before, _ in num_failed)) / num_responses,
            (known + sum(after for _, after in num_failed)) / num_responses,
        ),
    )


def _side(evaluation: Evaluation, items: Sequence[Samples]) -> Side:
    served = evaluation.settings.get(SERVED) or {}
    rows = _rows(items)
    finished = [row for row in rows if row.verdict in ("right", "wrong")]
    return Side(
        **vars(measure_rates(rows, evaluation)),
        model=str(evaluation.settings["model"]),
        name=served.get("name"),
        url=served.get("url"),
        weights=describe_weights(served),
        engine=served.get("engine"),
        evaluation=evaluation.digest,
        sampling=evaluation.settings["sampling"],
        n=len(items),
        right=sum(row.is_right for row in rows),
        interval=breakdown.accuracy_of(items)[1],
        num_finished=len(finished),
        finished_accuracy=rate(finished, lambda row: row.is_right) if finished else None,
        speed=breakdown.measure_speed(rows),
    )


def _rows(items: Sequence[Samples]) -> list[Row]:
    return [row for samples in items for row in samples]


def _flips(pairs: Sequence[Pair], is_gain: bool) -> tuple[Flip, ...]:
    """Flips, largest first, each with one sample that shows the change."""
    ordered = sorted(pairs, key=lambda pair: -abs(num_right(pair[1]) - num_right(pair[0])))
    flips = []
    for before, after in ordered:
        first = before[0]
        sides = _sample_fields(before, right=not is_gain), _sample_fields(after, right=is_gain)
        flips.append(Flip(first.id, first.level, first.subject, first.problem, first.gold, *sides))
    return tuple(flips)


def shown_sample(samples: Samples, right: bool) -> int:
    """Index of the first sample whose is_right equals `right`; 0 if there is none."""
    return next((number for number, row in enumerate(samples) if row.is_right == right), 0)


def _sample_fields(samples: Samples, right: bool) -> dict[str, Any]:
    row = samples[shown_sample(samples, right)]
    response = row.response and row.response[-MAX_RESPONSE_CHARS:]
    return {
        "verdict": row.verdict,
        "answer": row.answer,
        "response": response,
        "num_left_out": row.num_chars[1] - len(response or ""),
        "num_right": num_right(samples),
    }
