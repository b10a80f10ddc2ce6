"""The registered sets by name, and evaluation sets ready to be sent to a model."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from downloads.nearest import nearest
from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.files import (
    columns_of,
    find_schema,
    iterate_rows,
    merge_repeats,
    problems_of,
    read_problems,
)
from eval.problems.items import EvaluationSet, Item, Problem
from eval.problems.prompts import DEFAULT, PLACE, Api, Template, find_template, make_prompt
from eval.problems.rows import (
    CHAT,
    INTEGER_ANSWER,
    PREPARED,
    SOLVED,
    ProblemSet,
    Row,
    guess_columns,
    schema_with,
)
from eval.problems.sets.mathematics import ARITHMETIC, BENCHMARKS, TRAINING_SETS
from eval.problems.sets.multiple_choice import CFLUE, CHOICE, GPQA_DIAMOND
from eval.problems.sources import fetch

logger = logging.getLogger(__name__)

Mode = Literal["generate", "loglikelihood"]

_SETS = (*TRAINING_SETS, CFLUE, ARITHMETIC, CHOICE, *BENCHMARKS, GPQA_DIAMOND)
SETS: dict[str, ProblemSet] = {known.name: known for known in _SETS}
SUITES: dict[str, tuple[str, ...]] = {
    "math": ("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva")
}
POOLED = "pooled"  # names all benchmarks of a suite together
# The default for the user's own files: DAPO-Math-17k's schema, or {problem, answer}.
OWN = ProblemSet("own", "your own file", "yours", (CHAT, SOLVED))

NUM_TRIED = 50  # rows used to recognize the schema of a file
_LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTIONS_TEMPLATE = Template("loglikelihood", PLACE + "\nAnswer:")
_LISTED = re.compile(r"^\s*\(?([A-Z])[.):．、：]\s*\S", re.MULTILINE)


def find_set(name: str) -> ProblemSet:
    """Return the registered set of that name. Raises ProblemsError with the closest match."""
    if name not in SETS:
        raise ProblemsError(f"the registry has no set {name}{nearest(name, tuple(SETS))}")
    return SETS[name]


def find_suite(name: str) -> tuple[str, ...]:
    """Return the names of a suite's sets. Raises ProblemsError with the known suites."""
    if name not in SUITES:
        raise ProblemsError(
            f"{name!r} is not a suite; known: {', '.join(SUITES)}. To evaluate a single set, use "
            "--dataset"
        )
    return SUITES[name]


def read_as(
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
        not {problem.text, problem.gold} <= {str(value) for value in row.values()}
        for row, problem in found
    )


def published_as(path: Path, rows: Sequence[Row]) -> ProblemSet | None:
    """Return the registered set whose special schema reads all rows; None without one."""
    for known in SETS.values():
        if known.name != "choice" and _is_unmistakable(read_as(path, rows, known)):
            return known
    return None


def recognize(path: Path) -> ProblemSet:
    """Return how to read the user's own file: OWN, a registered set's schema, or usual names."""
    rows = list(itertools.islice(iterate_rows(path), NUM_TRIED))
    if not rows or any(read_as(path, [row], OWN) for row in rows):
        return OWN
    if (known := published_as(path, rows)) is not None:
        advice = f"--dataset {known.name} checks that the set is complete"
        logger.info("%s: rows as in %s; %s", path, known.name, advice)
        return replace(known, name=OWN.name, num_items=None)
    problem, answer = guess_columns(rows[0])
    if problem is None or answer is None:
        return OWN
    places = f"the problem is in column {problem} and the answer in {answer}"
    logger.info("%s: %s, by their names", path, places)
    return replace(OWN, schemas=(schema_with(problem, answer),))


@dataclass(frozen=True)
class HeldOut:
    """Distinct problems to evaluate with, and their default template and grader."""

    problems: tuple[Problem, ...]
    name: str | None  # of the registered set; None: the user's own file
    template: str
    grader: GraderName
    num_repeats: int  # rows per problem


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
    )


def load_set(
    source: str | Path | None,
    benchmark: str | None = None,
    prompt: str = DEFAULT,
    api: Api = "chat",
    system_prompt: str | None = None,
    mode: Mode = "generate",
) -> EvaluationSet:
    """Load the items of an evaluation file as they are sent to the model.

    `source` is anything `fetch` accepts; None uses the benchmark's default. `prompt` is a template
    name or file. The mode `loglikelihood` ignores `api` and prepares options to be compared by
    their log-probs. Raises ProblemsError.
    """
    if source is None and benchmark is None:
        raise ProblemsError(
            "no evaluation set is named; name a known one with --dataset, or a file with --data"
        )
    path = fetch(source or find_set(str(benchmark)).source("test"))
    held_out = read_held_out(path, benchmark)
    if mode == "loglikelihood":
        template = _OPTIONS_TEMPLATE if prompt == DEFAULT else find_template(prompt, DEFAULT)
        template = replace(template, system=system_prompt)
        with_options = _items_with_options(held_out.problems, template)
        return EvaluationSet(
            with_options, held_out.name, template, "loglikelihood", held_out.num_repeats
        )
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


def _items_with_options(problems: Sequence[Problem], template: Template) -> tuple[Item, ...]:
    """Make items whose options are `choices` in extra_info, else the letters in the problem.

    The gold answer becomes one of the options. Raises ProblemsError unless exactly one of several
    is right.
    """
    system = f"{template.system}\n\n" if template.system else ""
    options = [_options_of(problem) for problem in problems]
    golds: dict[str, int] = {}
    # the sets of one file may differ
    for dataset in {problem.dataset: None for problem in problems}:
        members = [
            pair for pair in zip(problems, options, strict=True) if pair[0].dataset == dataset
        ]
        golds |= _gold_indices(members)
    return tuple(
        Item(
            problem.id,
            system + template.render(one.question),
            one.texts[golds[problem.id]],
            problem.subject,
            problem.level,
            one.texts,
        )
        for problem, one in zip(problems, options, strict=True)
    )


class _Options(NamedTuple):
    question: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    has_integer_labels: bool = False


def _options_of(problem: Problem) -> _Options:
    """Return the options of a problem, and its text without a last paragraph asking for a box."""
    question, _, last = problem.text.rpartition("\n\n")
    question = question if question and "\\boxed" in last else problem.text
    given = problem.extra_info.get("choices")
    # ARC's {text: [...], label: [...]}
    texts = given.get("text") if isinstance(given, Mapping) else given
    labels = given.get("label") if isinstance(given, Mapping) else None
    if not isinstance(texts, list | tuple) or not texts:
        listed = list(dict.fromkeys(_LISTED.findall(question)))
        texts = labels = listed if "".join(listed) == _LABELS[: len(listed)] else ()
    if len(texts) < 2:
        raise ProblemsError(
            f"{problem.id}: evaluate.mode=loglikelihood needs one right option of several, but "
            f"this problem has {len(texts)} options and the answer {problem.gold!r}; list options "
            "as lines A., B., ... or as `choices`, or set evaluate.mode=generate"
        )
    labels = labels or _LABELS[: len(texts)]
    is_integer = all(type(label) is int for label in labels)
    return _Options(question, tuple(map(str, texts)), tuple(map(str, labels)), is_integer)


def _gold_indices(members: Sequence[tuple[Problem, _Options]]) -> dict[str, int]:
    """Return the index of each problem's right option; a set's golds are read in one way.

    They are all labels, all texts or all indices from 0. Raises ProblemsError if none of these fits
    all of them, or if several do and differ.
    """
    found = [_readings(*member) for member in members]
    complete = [name for name in _READINGS if all(name in one for one in found)]
    if not complete:
        counts = {name: sum(name in one for one in found) for name in _READINGS}
        most = max(_READINGS, key=counts.__getitem__)
        problem, options = next(
            pair for pair, one in zip(members, found, strict=True) if most not in one
        )
        fits = ", ".join(f"{counts[name]} are {name}" for name in _READINGS)
        raise ProblemsError(
            "evaluate.mode=loglikelihood needs one right option of several, named in one way by "
            f"all rows: of {len(members)} answers, {fits}. {problem.id} has {len(options.texts)} "
            f"options and the answer {problem.gold!r}: correct the answers, or set "
            "evaluate.mode=generate"
        )
    unclear = [
        problem
        for (problem, _), one in zip(members, found, strict=True)
        if len({one[name] for name in complete}) > 1
    ]
    if unclear:
        first = ", ".join(f"{problem.id}: {problem.gold!r}" for problem in unclear[:3])
        raise ProblemsError(
            f"all {len(members)} answers can be read as {' and as '.join(complete)} of the "
            f"options, and {len(unclear)} then mean different options ({first}): write the key "
            "`answer` as the option's letter (A, B, ...) or as its index from 0, a JSON integer "
            "without quotes"
        )
    return {problem.id: one[complete[0]] for (problem, _), one in zip(members, found, strict=True)}


_READINGS = ("labels", "texts", "indices")


def _readings(problem: Problem, options: _Options) -> dict[str, int]:
    """Return the right option's index under each reading that fits; integers never name texts."""
    names = {
        "labels": options.labels,
        "texts": options.texts,
        "indices": tuple(map(str, range(len(options.texts)))),
    }
    if problem.extra_info.get(INTEGER_ANSWER):
        kept = "labels" if options.has_integer_labels else "indices"
        names = {kept: names[kept]}
    gold = problem.gold.strip()
    return {name: known.index(gold) for name, known in names.items() if gold in known}
