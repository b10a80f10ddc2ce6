"""Recognises how the user's own file is to be read: as a published set, or by its columns."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.answers.choice import are_options, option_letters
from eval.problems import ProblemsError
from eval.problems.columns import Layout, answered, complete, schema_of, unused_besides
from eval.problems.files import find_schema, iterate_problems, iterate_rows, log_once, problems_of
from eval.problems.items import Problem
from eval.problems.options import NUM_DECIDING, decide, lists_options, names_option
from eval.problems.registry import OWN, SETS
from eval.problems.rows import CHAT, ProblemSet, Row, Split
from eval.problems.sets.multiple_choice import CHOICE
from eval.problems.values import MEDIA, Unusable, text_in

logger = logging.getLogger(__name__)

OWN_READING = "columns of DAPO-Math-17k"
NOTHING_GIVEN = Layout()
NUM_TRIED = 50  # rows used to recognize the schema of a file


def _read_as(
    path: Path, rows: Sequence[Row], known: ProblemSet
) -> list[tuple[dict[str, Any], Problem]]:
    """The first rows and problems as read by a registered set; empty if a row does not fit."""
    try:
        tried = list(problems_of(path, rows, known.schemas))
    except ProblemsError:
        return []
    schema = find_schema(path, rows[0], known.schemas)
    read = rows[0].keys() & {*schema.columns, *schema.others}
    found = [
        ({name: row[name] for name in read}, problem)
        for _, row, problem in tried
        if isinstance(problem, Problem)
    ]
    return found if len(found) == len(tried) else []


def _is_unmistakable(found: Sequence[tuple[Row, Problem]]) -> bool:
    """True if the schema does more than name columns, as with answers inside texts, or options."""
    return any(
        not {problem.text, problem.gold} <= {_text_or_none(value) for value in row.values()}
        for row, problem in found
    )


def _text_or_none(value: Any) -> str | None:
    with contextlib.suppress(Unusable):
        return text_in(value)
    return None


def published_as(path: Path, rows: Sequence[Row]) -> ProblemSet | None:
    """Return the registered set whose special schema reads all rows; None without one."""
    for known in SETS.values():
        is_common = known.name == CHOICE.name or any(schema.is_common for schema in known.schemas)
        found = [] if is_common else _read_as(path, rows, known)
        if _is_unmistakable(found) and not unused_besides(rows, tuple(found[0][0]))[1]:
            return known
    return None


def find_layout(path: Path, rows: Sequence[Row], split: Split, given: Layout) -> Layout:
    """Return the layout of the user's own file: columns as `given`, the others recognised.

    `rows` are its first rows. Raises ProblemsError.
    """
    layout = complete(path, rows, given)
    if not layout.options or layout.answer_as is not None:
        return layout
    schema = schema_of(layout, tuple(rows[0]))
    pairs = answered(iterate_rows(path, (schema,), split), layout)
    return replace(layout, answer_as=decide(path, pairs))


def recognize(path: Path, split: Split = "test", given: Layout = NOTHING_GIVEN) -> ProblemSet:
    """Return how to read the user's own file: DAPO-Math-17k's schema, a registered set's, or the
    columns that are `given` and those with usual names. Raises ProblemsError.
    """
    rows = first_rows(path, split)
    if not given.names_columns and set(CHAT.columns) <= rows[0].keys():
        used, answer = (*CHAT.columns, *CHAT.others, "ability", *given.elsewhere), None
        known = replace(OWN, reading=OWN_READING)
    elif not given.names_columns and (published := published_as(path, rows)) is not None:
        reading = f"rows as in {published.name}"
        advice = f"--dataset {published.name} checks that the set is complete"
        log_once(logger.info, f"{path}: {reading}; {advice}")
        return replace(published, name=OWN.name, num_items=None, reading=reading)
    else:
        layout = find_layout(path, rows, split, given)
        schema = schema_of(layout, tuple(rows[0]))
        used, answer = (*layout.columns, *schema.others), layout.answer
        known = replace(OWN, schemas=(schema,), reading=layout.describe())
    _require_readable(path, rows, known)
    names, parts = unused_besides(rows, used, answer, given.options is not None)
    if names:
        known = replace(known, reading=f"{known.reading}; not used: {', '.join(names)}")
    known = _as_choice(path, split, known)
    known = replace(known, doubt=_doubt(path, rows, known, parts))
    is_plain = {*rows[0]} == {"problem", "answer"} or known.reading == OWN_READING
    if not given.names_columns and not is_plain:
        log_once(logger.info, f"{path}: {known.reading}")
    if known.doubt:
        log_once(logger.warning, f"{path}: {known.doubt}")
    return known


def _doubt(path: Path, rows: Sequence[Row], known: ProblemSet, unused: Sequence[str]) -> str:
    """Return what seems to be missing in the problems, if anything."""
    if unused:
        return (
            f"{', '.join(unused)} may belong to the problem, but is not used "
            "(data.columns.problem, data.columns.options or data.columns.system would use it)"
        )
    problems = [one for *_, one in problems_of(path, rows, known.schemas)]
    texts = [one.text for one in problems if isinstance(one, Problem)]
    if known.grader == CHOICE.grader and not any(map(lists_options, texts)):
        return "the answers are letters of options, but the problems list none"
    return ""


def first_rows(path: Path, split: Split) -> list[Row]:
    """Return the rows that a file is recognised by. Raises ProblemsError if there are none."""
    rows = list(itertools.islice(iterate_rows(path, split=split), NUM_TRIED))
    if not rows:
        raise ProblemsError(f"{path} has no rows; name another file, or fix it")
    return rows


def _require_readable(path: Path, rows: Sequence[Row], known: ProblemSet) -> None:
    """Raise ProblemsError if most of the first rows have videos or sounds."""
    read = problems_of(path, rows, known.schemas)
    numbers = [str(number) for number, _, problem in read if str(problem) == MEDIA]
    if len(numbers) > len(rows) / 2:
        raise ProblemsError(
            f"{path}: of the first {len(rows)} rows, {len(numbers)} have {MEDIA} (rows "
            f"{', '.join(numbers[:5])}{', ...' if numbers[5:] else ''}): remove these rows, or use "
            "another set"
        )


def scorer_of(golds: Iterable[str]) -> str:
    """Return the scorer of the user's own gold answers: `choice` if all are letters of options."""
    return CHOICE.scorer if are_options(golds) else OWN.scorer


def _as_choice(path: Path, split: Split, known: ProblemSet) -> ProblemSet:
    """Return the set as multiple choice if all of its gold answers are letters of options."""
    template = None
    rows = itertools.islice(iterate_problems(path, known.schemas, split), NUM_DECIDING)
    for _, _, problem in rows:
        if isinstance(problem, Problem):
            if not names_option(problem.gold, problem.text):
                return known
            is_several = len(option_letters(problem.gold)) > 1 or template == "choices"
            template = "choices" if is_several else "choice"
    if template is None:
        return known
    return replace(known, scorer=CHOICE.scorer, grader=CHOICE.grader, template=template)
