"""The numbers of one evaluation, as in summary.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.results import Row, group_by, mean_response_tokens, rate
from eval.samples import Evaluation, IsSame, is_answered, item_metrics
from eval.statistics import bootstrap_mean


@dataclass(frozen=True)
class Summary:
    """What came of an evaluation.

    A failed request says nothing about the model: `n`, `accuracy`, the groups and the no-answer and truncated
    rates count answered rows only; `request_failed_rate` is over all rows. With several samples of each item,
    `n` counts samples and `accuracy` is their mean.
    """

    accuracy: float  # exact ruler
    n: int
    num_items: int
    num_samples: int  # of each item
    by_level: dict[str, dict[str, float]]  # level -> {n, right, accuracy}
    by_subject: dict[str, dict[str, float]]
    no_answer_rate: float
    truncated_rate: float
    request_failed_rate: float
    mean_response_tokens: float | None
    aisbench: dict[str, float]  # {accuracy, raises: rows on which AISBench itself would have raised}
    agreement: dict[str, int]  # of the two rulers over answered rows, see _agreement
    disagreements: list[dict[str, Any]]  # the rows that one ruler alone calls right
    samples: dict[str, dict[str, Any]] | None  # avg@k, pass@k, maj@k -> {value, ci95}; None for one sample
    repeats: dict[str, float] | None  # of greedy samples, see _repeats; None without repeats
    settings: dict[str, Any]


def summarise(rows: Sequence[Row], settings: dict[str, Any], is_same: IsSame) -> Summary:
    """The summary of all rows of an evaluation; `is_same` says whether two answers count as one (maj@k)."""
    answered = [row for row in rows if row.is_answered]
    sampling = settings["sampling"]
    is_repeated = sampling["num_samples"] > 1 and sampling["temperature"] == 0
    return Summary(
        accuracy=rate(answered, lambda row: row.is_right),
        n=len(answered),
        num_items=settings["num_items"],
        num_samples=sampling["num_samples"],
        by_level=_accuracy_by(answered, "level"),
        by_subject=_accuracy_by(answered, "subject"),
        no_answer_rate=rate(answered, lambda row: row.verdict == "no_answer"),
        truncated_rate=rate(answered, lambda row: row.verdict == "truncated"),
        request_failed_rate=rate(rows, lambda row: not row.is_answered),
        mean_response_tokens=mean_response_tokens(answered),
        aisbench={
            "accuracy": rate(answered, lambda row: row.aisbench_right),
            "raises": sum(row.aisbench_raises for row in answered),
        },
        agreement=_agreement(answered),
        disagreements=[_disagreement(row) for row in answered if row.is_right != row.aisbench_right],
        samples=_samples(rows, settings, is_same) if sampling["num_samples"] > 1 else None,
        repeats=_repeats(answered) if is_repeated else None,
        settings=settings,
    )


def _accuracy_by(rows: Sequence[Row], field: str) -> dict[str, dict[str, float]]:
    return {
        key: {
            "n": len(group),
            "right": sum(row.is_right for row in group),
            "accuracy": rate(group, lambda row: row.is_right),
        }
        for key, group in group_by(rows, field).items()
    }


def _samples(rows: Sequence[Row], settings: dict[str, Any], is_same: IsSame) -> dict[str, dict[str, Any]]:
    """Over the items of which every sample was answered, with bootstrap intervals over items."""
    items = [samples for samples in Evaluation.of(settings, rows).items.values() if is_answered(samples)]
    metrics = item_metrics(items, is_same) if items else {}
    return {
        name: {"value": sum(values) / len(values), "ci95": bootstrap_mean(values)}
        for name, values in metrics.items()
    }


def _agreement(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by which ruler calls them right."""
    return {
        "both": sum(row.is_right and row.aisbench_right for row in rows),
        "exact_only": sum(row.is_right and not row.aisbench_right for row in rows),
        "aisbench_only": sum(row.aisbench_right and not row.is_right for row in rows),
        "neither": sum(not row.is_right and not row.aisbench_right for row in rows),
    }


def _disagreement(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "sample": row.sample,
        "gold": row.gold,
        "answer": row.answer,
        "verdict": row.verdict,
        "aisbench_answer": row.aisbench_answer,
        "aisbench_right": row.aisbench_right,
    }


def _repeats(rows: Sequence[Row]) -> dict[str, float]:
    """Of the items answered more than once, the shares whose repeats differ; greedy ones should not at all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.id, []).append(row)
    repeated = [group for group in groups.values() if len(group) > 1]

    def share_differing(value: Callable[[Row], Any]) -> float:
        return (
            sum(len({value(row) for row in group}) > 1 for group in repeated) / len(repeated) if repeated else 0.0
        )

    return {
        "num_items": len(repeated),
        "differing_responses": share_differing(lambda row: row.response),
        "differing_answers": share_differing(lambda row: row.answer),
        "differing_verdicts": share_differing(lambda row: row.verdict),
    }
