"""Scores of responses: read from arrays and tables, whatever made them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval import InputError

# Fields of a response, with the columns that may hold them: the first one present is read.
COLUMNS = {
    "item": ("item", "item_id", "id", "doc_id", "question_id", "problem_idx"),
    "score": ("score", "correct", "is_correct", "acc", "accuracy", "exact_match", "reward"),
    "sample": ("sample", "sample_id", "repeat", "epoch"),
    "benchmark": ("subset", "benchmark", "task", "dataset"),
    "problem": ("problem", "question", "prompt", "input"),
    "gold": ("gold", "target", "expected_answer"),
    "response": ("response", "model_response", "prediction", "output"),
}
_TRUTH = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "right": 1.0, "wrong": 0.0}


class ScoresError(InputError):
    """Scores cannot be read, or not be paired with others."""


@dataclass(frozen=True)
class Response:
    """The score of one response to an item. Texts are shown where an item changed."""

    item: str
    score: float | None  # None: not scored, such as a failed request
    benchmark: str = ""  # "" if there is only one, without a name
    sample: str | None = None  # None: numbered in order
    problem: str | None = None  # equal on both sides, if known
    gold: str | None = None  # too
    response: str | None = None


def read_responses(scores: Any, label: str = "scores") -> list[Response]:
    """Return the responses in `scores`, which is one of

    - an array [n] of scores, one per item in the same order on both sides, or [n, k] for k samples;
    - {benchmark: array};
    - a table with the columns `item`, `score` and optionally `sample`, `subset`, `problem`, `gold`
      and `response` (see COLUMNS for other names): a list of dicts, a dict of columns, or a data
      frame of pandas, polars or pyarrow;
    - a list of `Response`.

    A score is a number or a truth value; None, NaN and empty texts are responses without a score.
    `label` names the scores in errors. Raises ScoresError.
    """
    if is_table(scores):
        found = list(_of_rows(_rows_of(scores, label), label))
    elif isinstance(scores, Mapping):
        found = [
            one for name, array in scores.items() for one in _of_array(array, str(name), label)
        ]
    else:
        found = _of_array(scores, "", label)
    if not found:
        raise ScoresError(f"{label}: no scores")
    return found


def is_table(scores: Any) -> bool:
    """True for a table or a list of `Response`, False for arrays, whose items have no names."""
    if isinstance(scores, Mapping):
        names = {str(name).strip().lower() for name in scores}
        return all(names & {*COLUMNS[field]} for field in ("item", "score"))
    if isinstance(scores, Sequence):
        return bool(scores) and isinstance(scores[0], Mapping | Response)
    return hasattr(scores, "columns")  # a data frame


def _rows_of(table: Any, label: str) -> Sequence[Any]:
    if isinstance(table, Mapping):
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            raise ScoresError(f"{label}: columns of different lengths: {lengths}")
        cells = zip(*table.values(), strict=True)
        return [dict(zip(table, row, strict=True)) for row in cells]
    for method in ("to_pylist", "to_dicts"):  # pyarrow, polars
        if hasattr(table, method):
            return list(getattr(table, method)())
    return list(table.to_dict("records") if hasattr(table, "columns") else table)  # pandas, or rows


def _of_array(array: Any, benchmark: str, label: str) -> list[Response]:
    label = f"{label}, {benchmark}" if benchmark else label
    try:
        values = np.asarray(array, dtype=float)
    except (TypeError, ValueError):
        raise ScoresError(
            f"{label}: neither an array of numbers nor a table with item and score (files are read "
            "by eval.logs.scored.compare_logs)"
        ) from None
    if values.ndim not in (1, 2):
        raise ScoresError(
            f"{label}: an array of {values.ndim} dimensions; scores have the shape [items] or "
            "[items, samples]"
        )
    rows = values.reshape(len(values), -1).tolist() if values.size else []
    return [
        Response(str(item), score_in(value, f"{label}, item {item}"), benchmark, str(sample))
        for item, samples in enumerate(rows)
        for sample, value in enumerate(samples)
    ]


def _of_rows(rows: Sequence[Any], label: str) -> Iterator[Response]:
    if isinstance(rows[0], Response):
        yield from rows
        return
    columns = columns_of(rows[0], label)
    for number, row in enumerate(rows, 1):
        values = {name: row.get(column) for name, column in columns.items()}
        place = f"{label}, row {number}"
        texts = {name: text_of(value) for name, value in values.items() if name != "score"}
        if texts["item"] is None:
            raise ScoresError(f"{place}: no {columns['item']}; every row needs its item")
        texts["benchmark"] = texts.get("benchmark") or ""
        yield Response(score=score_in(values["score"], place), **texts)  # type: ignore[arg-type]


def columns_of(row: Mapping[str, Any], label: str) -> dict[str, str]:
    """Return {field: column} for the fields of a response that a row has. Raises ScoresError."""
    known = {str(column).strip().lower(): column for column in row}
    columns = {
        name: known[found[0]]
        for name, names in COLUMNS.items()
        if (found := [one for one in names if one in known])
    }
    for name in ("item", "score"):
        if name not in columns:
            raise ScoresError(
                f"{label} has no column {name} (or {', '.join(COLUMNS[name][1:])}); its columns "
                f"are {', '.join(map(str, row))}. Rename the one that holds the "
                + ("name of the item" if name == "item" else "score")
            )
    return columns


def text_of(value: Any) -> str | None:
    """A cell as text, a list's values joined; None if it is empty."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, list):
        return ", ".join(map(str, value))
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def score_in(value: Any, place: str) -> float | None:
    """A score as a number; None without one. Raises ScoresError for anything else."""
    if isinstance(value, str):
        value = value.strip()
        value = _TRUTH.get(value.lower(), value)
    if value is None or value == "":
        return None
    try:
        score = float(value)
    except (TypeError, ValueError):
        shown = f"{value!r:.60}"
        raise ScoresError(f"{place}: the score {shown} is no number and no truth value") from None
    if math.isinf(score):
        raise ScoresError(f"{place}: the score is infinite")
    return None if math.isnan(score) else score
