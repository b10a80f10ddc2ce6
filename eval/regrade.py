"""Grade the rows of a results directory again, without asking the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eval.grading import GRADER, Judge
from eval.results import (
    RESULTS_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Row,
    load_results,
    write_atomically,
    write_rows,
)


@dataclass(frozen=True)
class Regraded:
    """What grading again changed: transitions (before, after) -> rows, for each ruler."""

    directory: Path
    grader_before: str
    verdicts: dict[tuple[str, str], int]
    aisbench: dict[tuple[str, str], int]
    num_killed: int
    num_rows: int
    num_answered: int
    accuracy: float


def regrade_rows(rows: Iterable[Row], judge: Judge) -> list[Row]:
    """The rows with the verdicts of this version's rulers."""
    regraded = []
    for row in rows:
        graded = judge.grade(row.response, row.finish_reason, row.gold)
        regraded.append(
            replace(
                row,
                answer=graded.answer,
                verdict=graded.verdict,
                aisbench_answer=graded.aisbench_answer,
                aisbench_right=graded.aisbench_right,
                aisbench_raises=graded.aisbench_raises,
            )
        )
    return regraded


def regrade(path: str | Path) -> Regraded:
    """Grade a finished results directory, or its results.jsonl, again and rewrite rows, settings and summary.

    Each file is replaced atomically, the rows before the settings that name their grader: what is interrupted can
    be graded again. Raises ResultsError when the directory is not one of `dapo eval`, or not finished.
    """
    from eval.run import summarise  # which continues directories with regrade_rows

    directory = Path(path)
    if directory.name == RESULTS_FILE:
        directory = directory.parent
    settings, rows = load_results(directory)
    before = list(rows.values())
    with Judge() as judge:
        after = regrade_rows(before, judge)
        num_killed = judge.num_killed
    regraded_settings: dict[str, Any] = {**settings, "grader": GRADER}
    summary = summarise(after, regraded_settings)
    write_rows(directory, after)
    write_atomically(directory / SETTINGS_FILE, json.dumps(regraded_settings, indent=2) + "\n")
    write_atomically(directory / SUMMARY_FILE, json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n")
    return Regraded(
        directory=directory,
        grader_before=str(settings.get("grader")),
        verdicts=_transitions((row.verdict for row in before), (row.verdict for row in after)),
        aisbench=_transitions(map(_aisbench_verdict, before), map(_aisbench_verdict, after)),
        num_killed=num_killed,
        num_rows=summary.num_items,
        num_answered=summary.n,
        accuracy=summary.accuracy,
    )


def describe(regraded: Regraded) -> str:
    """The changes as lines for a terminal."""
    lines = [f"{regraded.directory}: {regraded.num_rows} rows, {regraded.grader_before} -> {GRADER}"]
    for ruler, transitions in (("exact", regraded.verdicts), ("aisbench", regraded.aisbench)):
        changes = [f"{count} {before} -> {after}" for (before, after), count in sorted(transitions.items())]
        lines.append(f"{ruler}: {', '.join(changes) or 'no verdict changed'}")
    if regraded.num_killed:
        lines.append(f"{regraded.num_killed} rows went beyond the limits of time or memory and count as wrong")
    lines.append(f"accuracy {regraded.accuracy:.1%} of {regraded.num_answered}")
    return "\n".join(lines)


def _aisbench_verdict(row: Row) -> str:
    return "right" if row.aisbench_right else "wrong"


def _transitions(before: Iterable[str], after: Iterable[str]) -> dict[tuple[str, str], int]:
    return dict(Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]))
