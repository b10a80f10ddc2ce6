"""The options of multiple-choice questions, to be weighed by their log-probs as lm-eval does for base models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eval.problems import ProblemsError
from eval.problems.items import Item, Problem
from eval.problems.prompts import DEFAULT, PLACE, Template, find_template

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ANSWER = Template("loglikelihood", PLACE + "\nAnswer:")  # unless evaluate.prompt names another
_LISTED = re.compile(r"^\s*\(?([A-Z])[.):．、：]\s*\S", re.MULTILINE)


def find_weighed_template(name: str) -> Template:
    """The template of that name or file; by default the question and `Answer:`."""
    return ANSWER if name == DEFAULT else find_template(name, DEFAULT)


def make_weighed_item(problem: Problem, template: Template) -> Item:
    """The item whose options are weighed: texts of `choices` in extra_info, else the letters that its text lists.

    The gold answer becomes one of these. A last paragraph that asks for a box is left
    out: a base model is not asked to reason. Raises ProblemsError for a problem without options, or with another
    number of right ones than one.
    """
    choices, labels = _choices(problem.extra_info.get("choices"))
    question, _, last = problem.text.rpartition("\n\n")
    question = question if question and "\\boxed" in last else problem.text
    if not choices:
        listed = list(dict.fromkeys(_LISTED.findall(question)))
        choices = labels = tuple(listed) if "".join(listed) == LABELS[: len(listed)] else ()
    gold = _gold_of(problem.gold.strip(), choices, labels)
    if len(choices) < 2 or gold is None:
        raise ProblemsError(
            f"{problem.id}: evaluate.mode=loglikelihood needs one right option of several, and this problem has "
            f"{len(choices)} options and the answer {problem.gold!r}; list them as lines A., B., ... or as "
            "`choices`, or set evaluate.mode=generate"
        )
    system = f"{template.system}\n\n" if template.system else ""
    return Item(
        problem.id, system + template.render(question), choices[gold], problem.subject, problem.level, choices
    )


def _choices(given: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts, labels) of a list of texts, or of ARC's {text: [...], label: [...]}."""
    texts = given.get("text") if isinstance(given, Mapping) else given
    if not isinstance(texts, list | tuple):
        return (), ()
    labels = given.get("label") if isinstance(given, Mapping) else None
    return tuple(map(str, texts)), tuple(map(str, labels or LABELS[: len(texts)]))


def _gold_of(gold: str, choices: tuple[str, ...], labels: tuple[str, ...]) -> int | None:
    """The number of the right option, which its label, its text or that number names."""
    for names in (labels, choices, tuple(map(str, range(len(choices))))):
        if gold in names:
            return names.index(gold)
    return None
