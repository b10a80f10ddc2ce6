"""Rows of problem files: published schemas, the sets they belong to, and unusable rows."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from eval.answers.extraction import extract_boxed
from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.prompts import IMAGE
from eval.problems.values import (
    MEDIA,
    Unusable,
    chat_of,
    images_in,
    images_in_chat,
    is_missing,
    num_places,
    text_in,
)

Row = Mapping[str, Any]
IMAGES, OTHER_MEDIA = ("images", "image"), ("videos", "video", "audios", "audio")  # verl's columns
IDS = ("index", "unique_id", "id", "idx")
SUBJECTS = ("subject", "subfield", "type", "topic", "category", "subject_name", "名称")
LEVELS = ("level", "difficulty", "task")
Hub = Literal["huggingface", "modelscope", "url"]
Split = Literal["train", "test"]
# In extra_info beside `choices`: the gold answer, a text, is an integer in the file; the problem
# without its options, whose gold answer is a letter.
INTEGER_ANSWER, QUESTION = "is_integer_answer", "question_without_options"

_PINNED = re.compile(r"#sha256=[0-9a-f]{64}$|@[0-9a-f]{40}(?:/|$)")


@dataclass(frozen=True)
class Schema:
    """A published row format, recognised by its columns.

    `read` turns a row into a problem, with id "" if the row has none, or raises Unusable. `others`
    are optional columns.
    """

    columns: tuple[str, ...]
    read: Callable[[Row], Problem]
    others: tuple[str, ...] = (*IDS, *SUBJECTS, *LEVELS, "data_source")
    is_common: bool = False  # any file may have these columns, so they suggest no set


@dataclass(frozen=True)
class ProblemSet:
    """A registered set. `train` and `test` map hubs to references, the default hub first.

    `scorer` rewards responses in training, `grader` judges them in evaluation. `template` is the
    prompt template; `given` uses the messages of the rows.
    """

    name: str
    about: str
    licence: str
    schemas: tuple[Schema, ...]
    train: Mapping[str, str] = field(default_factory=dict)
    test: Mapping[str, str] = field(default_factory=dict)
    num_items: int | None = None  # in the complete test split; None: not checked
    scorer: str = "exact"
    template: str = "aisbench"
    grader: GraderName = "mathematics"
    reading: str = ""  # of the user's own file: what its columns are taken for
    doubt: str = ""  # whether a part of the problems is missing

    def source(self, split: Split, hub: Hub | None = None) -> str:
        """Return the reference of a split, by default on the default hub. Raises ProblemsError."""
        sources = self.sources[split]
        if not sources:
            use, key = (
                ("train on", "data.train") if split == "train" else ("evaluate with", "data.eval")
            )
            raise ProblemsError(
                f"{self.name} has no rows to {use}; name a file in {key}, or another set"
            )
        if hub is None:
            return next(iter(sources.values()))
        if hub not in sources:
            raise ProblemsError(
                f"{self.name} is not registered on data.hub={hub}, only on {', '.join(sources)}; "
                "set data.hub to one of these, or name its id there"
            )
        return sources[hub]

    @property
    def sources(self) -> dict[Split, Mapping[str, str]]:
        """The references of each split, by hub."""
        return {"train": self.train, "test": self.test}

    @property
    def unpinned(self) -> tuple[Split, ...]:
        """The splits whose default source names a branch or no revision and so may change."""
        return tuple(
            split
            for split, sources in self.sources.items()
            if sources and not _PINNED.search(next(iter(sources.values())))
        )


def text_of(row: Row | None, *keys: str) -> str | None:
    """Return the first value that is not missing as text, else None. Raises Unusable."""
    texts = (text_in(row.get(key), key) for key in keys) if row is not None else ()
    return next((text for text in texts if text is not None), None)


def needed(value: str | None, reason: str) -> str:
    """Return the value, or raise Unusable with the reason if it is empty."""
    if not value:
        raise Unusable(reason)
    return value


def problem_of(
    row: Row, text: str, gold: str, details: Row | None = None, **fields: Any
) -> Problem:
    """Make a problem with the id, subject and level from `details`, by default the row."""
    details = row if details is None else details
    fields.setdefault("subject", _detail(details, *SUBJECTS))
    fields.setdefault("level", _detail(details, *LEVELS))
    identity = _detail(details, *IDS) or ""
    return Problem(identity, text, gold, data_source=text_of(row, "data_source"), **fields)


def with_images(problem: Problem, images: Sequence[Any]) -> Problem:
    """Return the problem with its pictures, and an `<image>` for each of them in its prompt.

    Without any, they come first. Raises Unusable if the prompt has places for another number.
    """
    chat = problem.messages or ({"role": "user", "content": problem.text},)
    places = sum(num_places(message["content"]) for message in chat)
    if places not in (0, len(images)):
        raise Unusable(f"{places} {IMAGE} in its text, but {len(images)} pictures")
    if not images:
        return problem
    text = IMAGE * (len(images) - num_places(problem.text)) + problem.text
    last = {**chat[-1], "content": IMAGE * (len(images) - places) + chat[-1]["content"]}
    messages = problem.messages and (*chat[:-1], last)
    return replace(problem, text=text, messages=messages, images=tuple(images))


def _detail(row: Row, *keys: str) -> str | None:
    """Return the first of these values that is a text, else None."""
    for key in keys:
        with contextlib.suppress(Unusable):
            if (text := text_of(row, key)) is not None:
                return text
    return None


def read_chat(row: Row, bare: Callable[[str], str] = str) -> Problem:
    """Read DAPO-Math-17k: {data_source, prompt: [...], reward_model: {ground_truth}, extra_info}.

    `bare` extracts the problem from the last message. Prepared files add the bare problem, the name
    of its set and the weight of that set.
    """
    messages = chat_of(row["prompt"])
    if messages is None:
        raise Unusable("an empty prompt or one that is not chat messages")
    if messages[-1]["role"] == "assistant":
        raise Unusable("a prompt that ends with an answer of the assistant")
    if any(not is_missing(row.get(name)) for name in OTHER_MEDIA):
        raise Unusable(MEDIA)
    model = row["reward_model"]
    gold = needed(
        text_of(model if isinstance(model, Mapping) else None, "ground_truth"),
        "no reward_model.ground_truth",
    )
    info = row.get("extra_info")
    try:
        json.dumps(info)
    except (TypeError, ValueError):
        info = ()
    if not isinstance(info, dict | None):
        raise Unusable(
            "an extra_info that is not a JSON object, the form in which checkpoints store it"
        )
    if info and info.get("choices") and type(model.get("ground_truth")) is int:
        info = {**info, INTEGER_ANSWER: True}
    problem = problem_of(
        row,
        text_of(row, "problem") or bare(messages[-1]["content"]),
        gold,
        info or {},
        messages=messages,
        extra_info=info or {},
        dataset=text_of(row, "dataset") or "",
        weight=float(row.get("weight") or 1.0),
        template=text_of(row, "template"),
        grader=text_of(row, "grader"),
    )
    return with_images(problem, images_in(row, IMAGES) or images_in_chat(row["prompt"]))


def read_solved(row: Row) -> Problem:
    """Read MATH: {problem, solution or answer}. Gold: the solution's last box, else the answer."""
    text = needed(text_of(row, "problem"), "no problem")
    gold = extract_boxed(text_of(row, "solution") or "") or text_of(row, "answer")
    return problem_of(row, text, needed(gold, "neither an answer nor a boxed solution"))


# DAPO-Math-17k's schema, which training reads; extra_info is optional.
CHAT = Schema(
    ("data_source", "prompt", "reward_model"),
    read_chat,
    ("extra_info", "problem", "dataset", "weight", "template", "grader", *IMAGES, *OTHER_MEDIA),
)
# What `dapo prepare-data` writes: the same with each row's set, template and grader.
PREPARED = Schema((*CHAT.columns, "dataset", "template", "grader"), read_chat, CHAT.others)
SOLVED = Schema(
    ("problem",),
    read_solved,
    (*Schema.others, "solution", "answer"),
    is_common=True,
)
