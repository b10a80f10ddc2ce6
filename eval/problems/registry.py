"""The registered sets by name, and evaluation sets ready to be sent to a model."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from downloads.nearest import nearest
from eval.answers.choice import are_options, option_letters
from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.columns import (
    Layout,
    answered,
    complete,
    schema_of,
    unused_besides,
)
from eval.problems.files import (
    columns_of,
    find_schema,
    iterate_problems,
    iterate_rows,
    log_once,
    merge_repeats,
    problems_of,
    read_problems,
)
from eval.problems.items import EvaluationSet, Item, Problem
from eval.problems.options import (
    LETTERS,
    NUM_DECIDING,
    AnswerAs,
    Options,
    decide,
    listed_in,
    lists_options,
    names_option,
    options_in,
    readings,
)
from eval.problems.prompts import DEFAULT, PLACE, Api, Template, find_template, make_prompt
from eval.problems.rows import (
    CHAT,
    INTEGER_ANSWER,
    PREPARED,
    QUESTION,
    ProblemSet,
    Row,
    Split,
)
from eval.problems.sets.mathematics import ARITHMETIC, BENCHMARKS, TRAINING_SETS
from eval.problems.sets.multiple_choice import CFLUE, CHOICE, GPQA_DIAMOND
from eval.problems.sources import fetch
from eval.problems.values import PICTURE, Unusable, text_in

logger = logging.getLogger(__name__)

Mode = Literal["generate", "loglikelihood"]

_SETS = (*TRAINING_SETS, CFLUE, ARITHMETIC, CHOICE, *BENCHMARKS, GPQA_DIAMOND)
SETS: dict[str, ProblemSet] = {known.name: known for known in _SETS}
SUITES: dict[str, tuple[str, ...]] = {
    "math": ("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva")
}
POOLED = "pooled"  # names all benchmarks of a suite together
OWN = ProblemSet("own", "your own file", "yours", (CHAT,))
OWN_READING = "columns of DAPO-Math-17k"
NOTHING_GIVEN = Layout()

NUM_TRIED = 50  # rows used to recognize the schema of a file
_OPTIONS_TEMPLATE = Template("loglikelihood", PLACE + "\nAnswer:")


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
        found = [] if is_common else read_as(path, rows, known)
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
    schema = schema_of(layout, tuple(rows[0]), has_usual_details=False)
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
        schema = schema_of(layout, tuple(rows[0]), has_usual_details=not given.names_columns)
        used, answer = (*layout.columns, *schema.others), layout.answer
        known = replace(OWN, schemas=(schema,), reading=layout.describe())
    _require_text(path, rows, known)
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


def _require_text(path: Path, rows: Sequence[Row], known: ProblemSet) -> None:
    """Raise ProblemsError if most of the first rows have pictures."""
    read = problems_of(path, rows, known.schemas)
    numbers = [str(number) for number, _, problem in read if str(problem) == PICTURE]
    if len(numbers) > len(rows) / 2:
        raise ProblemsError(
            f"{path}: of the first {len(rows)} rows, {len(numbers)} have {PICTURE} (rows "
            f"{', '.join(numbers[:5])}{', ...' if numbers[5:] else ''}): remove these rows, or use "
            "a set of texts"
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
    asked = {problem.id: _options_of(problem) for problem in problems}
    by_set: dict[str, list[Problem]] = {}  # the sets of one file may differ
    for problem in problems:
        by_set.setdefault(problem.dataset, []).append(problem)
    meanings = {name: _meaning(name, members, asked) for name, members in by_set.items()}
    items = []
    for problem in problems:
        question, options = asked[problem.id]
        letters = readings(options, _answer(problem)).get(meanings[problem.dataset], "")
        if len(letters) != 1:
            raise ProblemsError(
                f"{problem.id}: evaluate.mode=loglikelihood needs one right option of several, but "
                f"this problem has {len(options.texts)} options and the answer {problem.gold!r}; "
                "correct it, or set evaluate.mode=generate"
            )
        items.append(
            Item(
                problem.id,
                system + template.render(question),
                options.texts[LETTERS.index(letters)],
                problem.subject,
                problem.level,
                options.texts,
            )
        )
    return tuple(items)


def _options_of(problem: Problem) -> tuple[str, Options]:
    """Return the problem without options and a last paragraph asking for a box, and its options."""
    question, _, last = problem.text.rpartition("\n\n")
    question = question if question and "\\boxed" in last else problem.text
    if given := problem.extra_info.get("choices"):
        question = problem.extra_info.get(QUESTION, question)
        with contextlib.suppress(Unusable):
            return question, options_in({"choices": given})
    listed = listed_in(question)
    if len(listed) < 2:
        raise ProblemsError(
            f"{problem.id}: evaluate.mode=loglikelihood needs one right option of several, but "
            f"this problem has {len(listed)} options and the answer {problem.gold!r}; list options "
            "as lines A., B., ... or in a column `choices`, or set evaluate.mode=generate"
        )
    return question, Options(listed, listed)


def _meaning(
    name: str, problems: Sequence[Problem], asked: Mapping[str, tuple[str, Options]]
) -> AnswerAs:
    """Return what the gold answers of a set are of its options."""
    if all(QUESTION in problem.extra_info for problem in problems):
        return "letter"
    pairs = [(asked[problem.id][1], _answer(problem)) for problem in problems]
    return decide(name or "evaluate.mode=loglikelihood", pairs)


def _answer(problem: Problem) -> Any:
    """Return the gold answer as it is in the file, an integer if it is one there."""
    return int(problem.gold) if problem.extra_info.get(INTEGER_ANSWER) else problem.gold
