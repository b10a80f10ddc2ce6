"""Rows of problem files: published schemas, the sets they belong to, and unusable rows."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eval.answers.extraction import extract_boxed
from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.prompts import Message

Row = Mapping[str, Any]
# Usual names of the user's own columns, the likeliest first.
PROBLEM_COLUMNS = (
    "problem question query prompt instruction input messages conversation text".split()
)
ANSWER_COLUMNS = (
    "answer final_answer gold ground_truth expected target label solution output".split()
)
Hub = Literal["huggingface", "modelscope", "url"]
Split = Literal["train", "test"]
# In extra_info beside `choices`, because gold answers are texts.
INTEGER_ANSWER = "is_integer_answer"

_PINNED = re.compile(r"#sha256=[0-9a-f]{64}$|@[0-9a-f]{40}(?:/|$)")


class Unusable(ValueError):
    """A row is not a problem. The message gives the reason without the row's content."""


@dataclass(frozen=True)
class Schema:
    """A published row format, recognised by its columns.

    `read` turns a row into a problem, with id "" if the row has none, or raises Unusable. `others`
    are optional columns.
    """

    columns: tuple[str, ...]
    read: Callable[[Row], Problem]
    others: tuple[str, ...] = ("index", "unique_id", "id", "idx", "subject", "level", "data_source")


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
    """Return the first value that is not blank as text, else None."""
    for key in keys:
        value = None if row is None else row.get(key)
        if value is None:
            continue
        if isinstance(value, datetime.datetime) and value.time() == datetime.time():
            value = value.date()  # pyarrow reads "2024-01-01" in JSON as a timestamp
        if (text := str(value)).strip():
            return text
    return None


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
    fields.setdefault("subject", text_of(details, "subject", "subfield", "type", "topic", "名称"))
    fields.setdefault("level", text_of(details, "level", "difficulty", "task"))
    identity = text_of(details, "index", "unique_id", "id", "idx") or ""
    return Problem(identity, text, gold, data_source=text_of(row, "data_source"), **fields)


def chat_of(value: Any) -> tuple[Message, ...] | None:
    """Parse a list of {role, content}, or its JSON. None if it is none or ends blank."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    is_chat = all(
        isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in value
    )
    if not is_chat or not value[-1]["content"].strip():
        return None
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def read_chat(row: Row, bare: Callable[[str], str] = str) -> Problem:
    """Read DAPO-Math-17k: {data_source, prompt: [...], reward_model: {ground_truth}, extra_info}.

    `bare` extracts the problem from the last message. Prepared files add the bare problem, the name
    of its set and the weight of that set.
    """
    messages = chat_of(row["prompt"])
    if messages is None:
        raise Unusable("an empty prompt or one that is not chat messages")
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
    if info and "choices" in info:
        info = {**info, **_options(info["choices"], model.get("ground_truth"))}
    return problem_of(
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


def read_solved(row: Row) -> Problem:
    """Read MATH: {problem, solution or answer}. Gold is the solution's last box, else the answer.

    `choices` holds option texts for evaluate.mode=loglikelihood.
    """
    text = needed(text_of(row, "problem"), "no problem")
    gold = extract_boxed(text_of(row, "solution") or "") or text_of(row, "answer")
    info = _options(row.get("choices"), row.get("answer"))
    return problem_of(
        row, text, needed(gold, "neither an answer nor a boxed solution"), extra_info=info
    )


def _options(choices: Any, answer: Any) -> dict[str, Any]:
    """Return the options as stored in extra_info, and whether the answer is an integer."""
    if not choices:
        return {}
    return {"choices": choices} | ({INTEGER_ANSWER: True} if type(answer) is int else {})


# DAPO-Math-17k's schema, which training reads; extra_info is optional.
CHAT = Schema(
    ("data_source", "prompt", "reward_model"),
    read_chat,
    ("extra_info", "problem", "dataset", "weight", "template", "grader"),
)
# What `dapo prepare-data` writes: the same with each row's set, template and grader.
PREPARED = Schema((*CHAT.columns, "dataset", "template", "grader"), read_chat, CHAT.others)
SOLVED = Schema(
    ("problem",), read_solved, (*Schema.others, "solution", "answer", "type", "subfield", "choices")
)


def guess_columns(
    names: Collection[str], given: Mapping[str, str] | None = None
) -> tuple[str | None, str | None]:
    """Return the columns with problem and answer: as `given`, else by name, else None."""
    given = given or {}
    by_word = {name.lower().strip(): name for name in names if name not in given.values()}
    problem = given.get("problem") or next(
        (by_word[word] for word in PROBLEM_COLUMNS if word in by_word), None
    )
    answers = (
        by_word[word] for word in ANSWER_COLUMNS if word in by_word and by_word[word] != problem
    )
    return problem, given.get("answer") or next(answers, None)


def schema_with(problem: str, answer: str) -> Schema:
    """Return the schema of rows with problem (text or chat) and answer in these columns."""

    def read(row: Row) -> Problem:
        messages = chat_of(row[problem])
        text = (
            messages[-1]["content"] if messages else needed(text_of(row, problem), f"no {problem}")
        )
        gold = needed(text_of(row, answer), f"no {answer}").strip()
        return problem_of(row, text, gold, messages=messages)

    return Schema((problem, answer), read)
