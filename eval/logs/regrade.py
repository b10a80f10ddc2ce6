"""Regrades the rows of a results folder without asking the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.answers.grading import GRADERS, grader_of
from eval.requests.recorder import regrade_row
from eval.results.rows import (
    RESULTS_FILE,
    SETTINGS_FILE,
    Evaluation,
    Row,
    exclusive,
    read_evaluation,
    write_json,
    write_rows,
)
from eval.results.summary import Summary, write_summary


@dataclass(frozen=True)
class Regraded:
    """The changes of a regrading: (before, after) -> number of rows, for each rule."""

    directory: Path
    grader_before: str
    verdicts: dict[tuple[str, str], int]
    aisbench: dict[tuple[str, str], int]
    num_killed: int
    summary: Summary


def regrade(path: str | Path) -> Regraded:
    """Regrade a finished results folder (or its results.jsonl) and rewrite its files.

    Each file is replaced atomically, the rows before the settings that name their grader, so that
    an interrupted regrading can be repeated. Raises ResultsError if the folder is not a finished
    evaluation.
    """
    directory = Path(path)
    if directory.name == RESULTS_FILE:
        directory = directory.parent
    evaluation = read_evaluation(directory)
    settings, before = evaluation.settings, evaluation.rows
    kind = GRADERS[grader_of(str(settings["grader"]))]
    regraded_settings: dict[str, Any] = {**settings, "grader": kind.rule}
    with exclusive(directory), kind() as grader:
        after = [regrade_row(row, grader) for row in before]
        num_killed = grader.num_killed
        write_rows(directory, after)
        write_json(directory / SETTINGS_FILE, regraded_settings)
        regraded = Evaluation.of(regraded_settings, after).by_problem()
        summary = write_summary(directory, regraded, grader.grade)
    return Regraded(
        directory=directory,
        grader_before=str(settings.get("grader")),
        verdicts=_transitions((row.verdict for row in before), (row.verdict for row in after)),
        aisbench=_transitions(map(_aisbench_verdict, before), map(_aisbench_verdict, after)),
        num_killed=num_killed,
        summary=summary,
    )


def describe(regraded: Regraded) -> str:
    """Describe the changes for a terminal."""
    grader = regraded.summary.settings["grader"]
    lines = [
        f"{regraded.directory}: {regraded.summary.num_items} items, {regraded.grader_before} -> "
        f"{grader}"
    ]
    by_rule = {"exact": regraded.verdicts, "aisbench": regraded.aisbench}
    if regraded.summary.aisbench is None:
        by_rule = {"verdicts": regraded.verdicts}
    for rule, transitions in by_rule.items():
        changes = [
            f"{count} {before} -> {after}" for (before, after), count in sorted(transitions.items())
        ]
        lines.append(f"{rule}: {', '.join(changes) or 'no verdict changed'}")
    if regraded.num_killed:
        lines.append(
            f"{regraded.num_killed} rows exceeded the time or memory limit and count as wrong"
        )
    lines.append(f"accuracy {regraded.summary.accuracy:.1%} of {regraded.summary.n}")
    return "\n".join(lines)


def _aisbench_verdict(row: Row) -> str:
    if row.aisbench is None:
        return "none"
    return "right" if row.aisbench.is_right else "wrong"


def _transitions(before: Iterable[str], after: Iterable[str]) -> dict[tuple[str, str], int]:
    return dict(Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]))
