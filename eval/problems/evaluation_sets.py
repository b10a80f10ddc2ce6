"""Makes evaluation sets: items as they are sent to a model, also with options to rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from eval.problems import ProblemsError
from eval.problems.held_out import HeldOut, read_held_out
from eval.problems.items import EvaluationSet, Item, Problem
from eval.problems.options import (
    LETTERS,
    AnswerAs,
    Options,
    decide,
    listed_in,
    options_in,
    readings,
)
from eval.problems.pictures import PictureStore
from eval.problems.prompts import DEFAULT, IMAGE, PLACE, Api, Template, find_template, make_prompt
from eval.problems.registry import find_set
from eval.problems.rows import INTEGER_ANSWER, QUESTION
from eval.problems.sources import fetch
from eval.problems.values import Unusable

Mode = Literal["generate", "loglikelihood"]

_OPTIONS_TEMPLATE = Template("loglikelihood", PLACE + "\nAnswer:")


def load_set(
    source: str | Path | None,
    benchmark: str | None = None,
    prompt: str = DEFAULT,
    api: Api = "chat",
    system_prompt: str | None = None,
    mode: Mode = "generate",
    pictures: Path | None = None,
) -> EvaluationSet:
    """Load the items of an evaluation file as they are sent to the model.

    `source` is anything `fetch` accepts; None uses the benchmark's default. `prompt` is a template
    name or file. The mode `loglikelihood` ignores `api` and prepares options to be compared by
    their log-probs. The pictures of a file that is not prepared are stored in the folder
    `pictures`, which must outlast the evaluation. Raises ProblemsError, and DownloadError for
    pictures at a URL.
    """
    if source is None and benchmark is None:
        raise ProblemsError(
            "no evaluation set is named; name a known one with --dataset, or a file with --data"
        )
    path = fetch(source or find_set(str(benchmark)).source("test"))
    held_out = read_held_out(path, benchmark)
    if num_pictured := sum(bool(problem.images) for problem in held_out.problems):
        if api == "completions" or mode == "loglikelihood":
            raise ProblemsError(
                f"{path}: {num_pictured} of {len(held_out.problems)} problems have pictures, which "
                "only chat requests can hold; set evaluate.api=chat and evaluate.mode=generate"
            )
        held_out = _with_files(path, held_out, pictures)
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
            images=one.images,
        )
        for one in held_out.problems
    )
    _require_places(template, items)
    return EvaluationSet(items, held_out.name, template, held_out.grader, held_out.num_repeats)


def _with_files(path: Path, held_out: HeldOut, folder: Path | None) -> HeldOut:
    """Replace the pictures of the problems by their files, in `folder` unless prepared."""
    if held_out.is_prepared:
        problems = [
            replace(one, images=tuple(path.parent / name for name in one.images))
            for one in held_out.problems
        ]
        return replace(held_out, problems=tuple(problems))
    if folder is None:
        raise ProblemsError(f"{path} has pictures: prepare it with dapo prepare-data")
    store, problems = PictureStore(folder), []
    for one in held_out.problems:
        stored = store.stored(one, path)
        if isinstance(stored, Unusable):
            raise ProblemsError(
                f"{path}: {one.id} has {stored}; an evaluation needs every problem: correct the row"
            )
        problems.append(replace(stored, images=tuple(folder / name for name in stored.images)))
    return replace(held_out, problems=tuple(problems))


def _require_places(template: Template, items: Sequence[Item]) -> None:
    """Raise ProblemsError if a prompt does not have a place for each of its pictures."""
    for item in items:
        contents = [one["content"] for one in item.prompt if not isinstance(one, str)]
        num_places = sum(content.count(IMAGE) for content in contents)
        if item.images and num_places != len(item.images):
            raise ProblemsError(
                f"the prompt of {item.id} has {num_places} {IMAGE}, but {len(item.images)} "
                f"pictures; remove {IMAGE} from the template {template.name} (evaluate.prompt) and "
                "from evaluate.system_prompt"
            )


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
