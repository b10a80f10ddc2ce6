"""The rules on labelled rows: accuracy, false positives and negatives, rows a second, beside math-verify alone.

    python bench/grading.py FILE [--show 20] [--rules exact,aisbench,math-verify] [--finish-reason stop]

FILE is .jsonl, .csv, .tsv (no quoting) or .parquet with the columns prediction (a whole response, or an answer on
one line, which is put in a box), gold and label (1/0, true/false, right/wrong); a column finish_reason is used
where it is there. One process each; `exact` is MathGrader as `dapo eval` uses it, without the start of
its process.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.answers.aisbench import extract_aisbench, is_equal_aisbench
from eval.answers.extraction import extract_answer
from eval.answers.grading import MathGrader

MAX_BARE_CHARS = 300
LABELS = {"1": True, "true": True, "right": True, "0": False, "false": False, "wrong": False}


class LabelledRow(NamedTuple):
    """A response with the verdict that it should get."""

    response: str
    gold: str
    is_right: bool
    finish_reason: str | None


class Measured(NamedTuple):
    """What a rule did on all rows."""

    false_positives: list[LabelledRow]
    false_negatives: list[LabelledRow]
    errors: int
    seconds: float
    slowest: float


def read_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The file's rows by column."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8", newline="" if path.suffix == ".csv" else None) as file:
        if path.suffix == ".jsonl":
            yield from map(json.loads, filter(str.strip, file))
        elif path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".tsv":
            yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            sys.exit(f"{path} ends in {path.suffix!r}; .jsonl, .csv, .tsv or .parquet is read")


def labelled(fields: dict[str, Any], finish_reason: str | None) -> LabelledRow:
    """A row; a bare answer is put in a box, as the model was asked to do."""
    missing = {"prediction", "gold", "label"} - fields.keys()
    if missing:
        sys.exit(f"a row lacks {', '.join(sorted(missing))}; it has {', '.join(fields)}")
    label = LABELS.get(str(fields["label"]).strip().lower())
    if label is None:
        sys.exit(f"label {fields['label']!r} is none of {', '.join(LABELS)}")
    response = str(fields["prediction"])
    if (
        len(response) <= MAX_BARE_CHARS
        and "\n" not in response.strip()
        and extract_answer(response) in (None, response)
    ):
        response = f"\\boxed{{{response}}}"
    return LabelledRow(response, str(fields["gold"]), label, fields.get("finish_reason") or finish_reason)


def measure(rows: list[LabelledRow], is_right: Callable[[LabelledRow], bool | None]) -> Measured:
    """Verdicts on all rows; None is an error and counts as wrong."""
    positives: list[LabelledRow] = []
    negatives: list[LabelledRow] = []
    errors = 0
    slowest = 0.0
    started = time.perf_counter()
    for row in rows:
        before = time.perf_counter()
        verdict = is_right(row)
        slowest = max(slowest, time.perf_counter() - before)
        errors += verdict is None
        if bool(verdict) != row.is_right:
            (positives if verdict else negatives).append(row)
    return Measured(positives, negatives, errors, time.perf_counter() - started, slowest)


def exact(rows: list[LabelledRow]) -> Measured:
    """The headline rule, in the grader with its process."""
    with MathGrader() as grader:
        grader.grade("\\boxed{\\sqrt{2}}", "stop", "1.5")  # starts the process
        measured = measure(
            rows, lambda row: grader.grade(row.response, row.finish_reason, row.gold).verdict == "right"
        )
        return measured._replace(errors=grader.num_killed)


def aisbench(rows: list[LabelledRow]) -> Measured:
    """AISBench's string rule."""
    return measure(rows, lambda row: is_equal_aisbench(extract_aisbench(row.response)[0], row.gold))


def math_verify(rows: list[LabelledRow]) -> Measured:
    """math-verify alone, with the extraction that its own metric uses for LaTeX golds."""
    import logging

    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.disable(logging.CRITICAL)
    metric = math_metric(
        gold_extraction_target=(LatexExtractionConfig(), ExprExtractionConfig()),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )

    def verdict(row: LabelledRow) -> bool | None:
        try:
            return bool(metric([f"\\boxed{{{row.gold}}}"], [row.response])[0])
        except Exception:  # noqa: BLE001 - the peer may raise anything, which is counted
            return None

    return measure(rows, verdict)


RULES: dict[str, Callable[[list[LabelledRow]], Measured]] = {
    "exact": exact,
    "aisbench": aisbench,
    "math-verify": math_verify,
}


def show(title: str, rows: list[LabelledRow], limit: int) -> None:
    for row in rows[:limit]:
        print(f"  {title}: gold {row.gold!r}, response ends {row.response[-120:]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", type=int, default=0, help="list so many wrong verdicts of each kind")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument(
        "--finish-reason", help="where the file has none; unset: unknown, and the text decides whether it was cut"
    )
    arguments = parser.parse_args()
    rows = [labelled(fields, arguments.finish_reason) for fields in read_rows(arguments.file)]
    if not rows:
        sys.exit(f"{arguments.file} has no rows")
    print(f"{len(rows)} rows, {sum(row.is_right for row in rows)} labelled right")
    print(f"{'rule':12} {'accuracy':>9} {'false +':>8} {'false -':>8} {'errors':>7} {'rows/s':>8} {'slowest':>9}")
    for name in arguments.rules.split(","):
        found = RULES[name](rows)
        wrong = len(found.false_positives) + len(found.false_negatives)
        print(
            f"{name:12} {1 - wrong / len(rows):9.2%} "
            f"{len(found.false_positives):8} {len(found.false_negatives):8} "
            f"{found.errors:7} {len(rows) / found.seconds:8.0f} {1000 * found.slowest:6.1f} ms"
        )
        show("false +", found.false_positives, arguments.show)
        show("false -", found.false_negatives, arguments.show)


if __name__ == "__main__":
    main()
