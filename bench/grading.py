"""Measures accuracy, errors and speed of the grading rules on labelled rows.

    python bench/grading.py FILE [--show 20] [--rules exact,aisbench] [--finish-reason stop]

FILE is .tsv (no quoting), .jsonl, .json or .parquet with the columns prediction (a whole response,
or an answer on one line, which is boxed), gold, label (1 or 0) and optionally finish_reason.
`exact` is MathGrader as in `dapo eval`, without the time to start its process; the third rule is
`mathruler`. tests/answers/mathruler.tsv has mathruler's own verdicts as labels.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.answers.aisbench import extract_aisbench, is_equal_aisbench
from eval.answers.extraction import find_answer
from eval.answers.grading import MathGrader, by_mathruler
from eval.problems.files import iterate_rows

MAX_BARE_CHARS = 300


class LabelledRow(NamedTuple):
    """A response with its label."""

    response: str
    gold: str
    is_right: bool
    finish_reason: str | None


Rule = Callable[[LabelledRow], bool | None]  # None: the rule failed


def read_rows(path: Path, finish_reason: str | None) -> list[LabelledRow]:
    """Read the rows of a file. Bare answers are boxed, as models are asked to do."""
    if path.suffix == ".tsv":
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    else:
        rows = list(map(dict, iterate_rows(path)))
    labelled = []
    for row in rows:
        response = str(row["prediction"])
        is_short = len(response) <= MAX_BARE_CHARS and "\n" not in response.strip()
        if is_short and find_answer(response).answers[:1] in ((), (response,)):
            response = f"\\boxed{{{response}}}"
        reason = row.get("finish_reason") or finish_reason
        labelled.append(LabelledRow(response, str(row["gold"]), bool(int(row["label"])), reason))
    return labelled


def exact(grader: MathGrader) -> Rule:
    """The exact rule, with its process."""
    return lambda row: grader.grade(row.response, row.finish_reason, row.gold).verdict == "right"


def aisbench(row: LabelledRow) -> bool:
    """AISBench's string rule."""
    return is_equal_aisbench(extract_aisbench(row.response)[0], row.gold)


def mathruler(row: LabelledRow) -> bool:
    """mathruler's rule, without sympy."""
    return by_mathruler(row.response, row.gold).is_right


def measure(name: str, rule: Rule, rows: Sequence[LabelledRow], num_shown: int) -> None:
    """Print a rule's table row and the first rows that it gets wrong."""
    verdicts, seconds = [], []
    for row in rows:
        started = time.perf_counter()
        verdicts.append(rule(row))
        seconds.append(time.perf_counter() - started)
    graded = list(zip(rows, verdicts, strict=True))
    wrong = {
        "false +": [row for row, verdict in graded if verdict and not row.is_right],
        "false -": [row for row, verdict in graded if not verdict and row.is_right],
    }
    num_wrong = sum(map(len, wrong.values()))
    print(
        f"{name:12} {1 - num_wrong / len(rows):9.2%} {len(wrong['false +']):8} "
        f"{len(wrong['false -']):8} "
        f"{verdicts.count(None):7} {len(rows) / sum(seconds):8.0f} {1000 * max(seconds):6.1f} ms"
    )
    for kind, found in wrong.items():
        for row in found[:num_shown]:
            print(f"  {kind}: gold {row.gold!r}, response ends {row.response[-120:]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--show", type=int, default=0, help="print up to this many wrong verdicts of each kind"
    )
    parser.add_argument("--rules", default="exact,aisbench")
    parser.add_argument(
        "--finish-reason",
        help="for rows without one; unset: the text decides whether it is truncated",
    )
    arguments = parser.parse_args()
    rows = read_rows(arguments.file, arguments.finish_reason)
    print(f"{len(rows)} rows, {sum(row.is_right for row in rows)} labelled right")
    print(
        f"{'rule':12} {'accuracy':>9} {'false +':>8} {'false -':>8} {'errors':>7} {'rows/s':>8} "
        f"{'slowest':>9}"
    )
    with MathGrader() as grader:
        grader.grade("\\boxed{\\sqrt{2}}", "stop", "1.5")  # starts the process
        rules = {
            "exact": lambda: exact(grader),
            "aisbench": lambda: aisbench,
            "mathruler": lambda: mathruler,
        }
        for name in arguments.rules.split(","):
            measure(name, rules[name](), rows, arguments.show)


if __name__ == "__main__":
    main()
