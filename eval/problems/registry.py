"""The registered sets by name, and evaluation sets as they are asked."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.files import columns_of, merge_repeats, read_problems
from eval.problems.items import EvaluationSet, Item, Problem
from eval.problems.options import find_weighed_template, make_weighed_item
from eval.problems.problem_set import ProblemSet
from eval.problems.prompts import DEFAULT, Api, find_template, make_prompt
from eval.problems.rows import CHAT, PREPARED, SOLVED
from eval.problems.sets import (
    aime24,
    aime25,
    amc23,
    arithmetic,
    cflue,
    choice,
    dapo_math_17k,
    dapo_math_17k_clean,
    deepmath_103k,
    geometry3k,
    gpqa_diamond,
    gsm8k,
    math,
    math500,
    minerva,
    olympiadbench,
)

logger = logging.getLogger(__name__)

Mode = Literal["generate", "loglikelihood"]

_MODULES = (
    *(dapo_math_17k, dapo_math_17k_clean, deepmath_103k, math, gsm8k, geometry3k, cflue, arithmetic, choice),
    *(math500, aime24, aime25, amc23, olympiadbench, minerva, gpqa_diamond),
)
SETS: dict[str, ProblemSet] = {module.SET.name: module.SET for module in _MODULES}
# Benchmarks that are asked together, by the suite's name.
SUITES: dict[str, tuple[str, ...]] = {
    "math": ("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva"),
}
POOLED = "pooled"  # all benchmarks of a suite together, where a name of one is expected
# What files of the user's own hold when nothing else is said: DAPO-Math-17k's schema, or {problem, answer}.
OWN = ProblemSet("own", "your own file", "yours", (CHAT, SOLVED), scorer="math_verify")


def find_set(name: str) -> ProblemSet:
    """The registered set of that name. Raises ProblemsError with the nearest one."""
    if name in SETS:
        return SETS[name]
    close = difflib.get_close_matches(name, SETS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SETS)}"
    raise ProblemsError(f"{name!r} is not a registered set; {hint}")


def find_suite(name: str) -> tuple[str, ...]:
    """The sets of the suite of that name. Raises ProblemsError with the known ones."""
    if name not in SUITES:
        raise ProblemsError(
            f"{name!r} is not a suite; known: {', '.join(SUITES)}. One set is asked with --dataset"
        )
    return SUITES[name]


@dataclass(frozen=True)
class HeldOut:
    """Distinct problems to evaluate with, and how they are asked and graded unless something else is said."""

    problems: tuple[Problem, ...]
    name: str | None  # of the registered set; None: the user's own
    template: str
    grader: GraderName
    num_repeats: int  # rows of each problem


def read_held_out(path: Path, name: str | None = None) -> HeldOut:
    """The problems of an evaluation file: a prepared one, one of the registered set `name`, or the user's own.

    Raises ProblemsError for unusable rows, and for a file that is not the complete set of that name.
    """
    known = OWN if name is None else find_set(name)
    is_prepared = path.suffix == ".parquet" and set(PREPARED.columns).issubset(columns_of(path))
    problems = merge_repeats(path, read_problems(path, (PREPARED,) if is_prepared else known.schemas))
    prepared = {problem.dataset for problem in problems if problem.grader}
    if prepared and name is not None and prepared != {name}:
        raise ProblemsError(f"{path} was prepared from {', '.join(sorted(prepared))}, not from {name}; name these")
    if len(prepared) == 1:
        known = SETS.get(next(iter(prepared)), known)
    if known.num_items not in (None, len(problems)):
        raise ProblemsError(
            f"{path} has {len(problems)} problems, but {known.name} has exactly {known.num_items}: accuracy on "
            f"it would not compare with published figures. Use the complete file, or name no benchmark."
        )
    template, grader = known.template, known.grader
    if prepared:
        templates = {problem.template or "given" for problem in problems}
        template = templates.pop() if len(templates) == 1 else "given"
        grader = problems[0].grader or grader
    elif any(problem.messages for problem in problems):
        template = "given"
    if len(prepared) > 1:
        problems = [_of_several(problem) for problem in problems]
    return HeldOut(
        tuple(problems), None if known is OWN else known.name, template, grader, _num_repeats(path, problems)
    )


def load_set(
    source: str | Path | None,
    benchmark: str | None = None,
    prompt: str = DEFAULT,
    api: Api = "chat",
    system_prompt: str | None = None,
    mode: Mode = "generate",
) -> EvaluationSet:
    """The items of an evaluation file, as they are sent to the model.

    With the mode `loglikelihood` options are weighed, without a chat whatever `api` says. `source` is what `fetch`
    takes; None stands for the benchmark's own. `prompt` is what find_template takes. Raises ProblemsError.
    """
    from eval.problems.sources import fetch  # loads httpx, which scoring processes do without

    if source is None and benchmark is None:
        raise ProblemsError("no evaluation set is named; name a known one with --dataset, or a file with --data")
    path = fetch(source or find_set(str(benchmark)).source("test"))
    held_out = read_held_out(path, benchmark)
    if mode == "loglikelihood":
        template = replace(find_weighed_template(prompt), system=system_prompt)
        weighed = tuple(make_weighed_item(one, template) for one in held_out.problems)
        return EvaluationSet(weighed, held_out.name, template, "loglikelihood", held_out.num_repeats)
    template = replace(find_template(prompt, held_out.template), system=system_prompt)
    items = tuple(
        Item(
            one.id,
            make_prompt(template, api, one.text, one.messages),
            one.gold,
            one.subject,
            one.level,
            data_source=one.data_source or held_out.name,
            extra_info=one.extra_info,
        )
        for one in held_out.problems
    )
    return EvaluationSet(items, held_out.name, template, held_out.grader, held_out.num_repeats)


def _of_several(problem: Problem) -> Problem:
    """A problem of one of several sets: the report groups by set, and ids of different sets may be equal."""

    return replace(problem, id=f"{problem.dataset}/{problem.id}", subject=problem.dataset)


def _num_repeats(path: Path, problems: Sequence[Problem]) -> int:
    """Rows of each problem; 1, with a warning, where some have more than others."""
    counts = [problem.num_rows for problem in problems]
    if len(set(counts)) == 1:
        return counts[0]
    logger.warning(
        "%s: %d of %d problems are on several rows, up to %d, and others on fewer: each is one item, asked "
        "evaluate.num_samples times", path.name, sum(count > 1 for count in counts), len(counts), max(counts),
    )  # fmt: skip
    return 1
