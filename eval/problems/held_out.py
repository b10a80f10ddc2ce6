"""Reads evaluation files: prepared ones, those of registered sets, and the user's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.files import columns_of, merge_repeats, read_problems
from eval.problems.items import Problem
from eval.problems.recognition import recognize
from eval.problems.registry import OWN, SETS, find_set
from eval.problems.rows import PREPARED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Distinct problems to evaluate with, and their default template and grader."""

    problems: tuple[Problem, ...]
    name: str | None  # of the registered set; None: the user's own file
    template: str
    grader: GraderName
    num_repeats: int  # rows per problem
    is_prepared: bool


def read_held_out(path: Path, name: str | None = None) -> HeldOut:
    """Read an evaluation file: prepared, of the registered set `name`, or the user's own.

    Raises ProblemsError for unusable rows, and for a file that is not the complete set.
    """
    is_prepared = path.suffix == ".parquet" and set(PREPARED.columns).issubset(columns_of(path))
    known = find_set(name) if name is not None else OWN if is_prepared else recognize(path)
    problems = merge_repeats(
        path, read_problems(path, (PREPARED,) if is_prepared else known.schemas)
    )
    prepared = {problem.dataset for problem in problems if problem.grader}
    if prepared and name is not None and prepared != {name}:
        raise ProblemsError(
            f"{path} was prepared from {', '.join(sorted(prepared))}, not from {name}; name that "
            "set, or none"
        )
    if len(prepared) == 1:
        known = SETS.get(next(iter(prepared)), known)
    if known.num_items not in (None, len(problems)):
        raise ProblemsError(
            f"{path} has {len(problems)} problems, but {known.name} has exactly {known.num_items}: "
            "accuracy would not be comparable with published figures. Use the complete file, or "
            "name no benchmark."
        )
    template, grader = known.template, known.grader
    if prepared:
        templates = {problem.template or "given" for problem in problems}
        template = templates.pop() if len(templates) == 1 else "given"
        grader = problems[0].grader or grader
    elif any(problem.messages for problem in problems):
        template = "given"
    if len(prepared) > 1:  # the report groups by set, and ids of different sets may collide
        problems = [
            replace(one, id=f"{one.dataset}/{one.id}", subject=one.dataset) for one in problems
        ]
    return HeldOut(
        tuple(problems),
        None if known.name == OWN.name else known.name,
        template,
        grader,
        _num_repeats(", ".join(sorted(prepared)) or path.name, problems),
        is_prepared,
    )


def _num_repeats(source: str, problems: Sequence[Problem]) -> int:
    """Return the rows per problem, or 1 with a warning if the counts differ."""
    counts = [problem.num_rows for problem in problems]
    if len(set(counts)) == 1:
        return counts[0]
    logger.warning(
        "%s: %d of %d problems are on several rows (up to %d), the others on fewer: each problem "
        "is one item, sampled evaluate.num_samples times",
        source,
        sum(count > 1 for count in counts),
        len(counts),
        max(counts),
    )
    return 1
