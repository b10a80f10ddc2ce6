"""Rows of problem files: the forms they are published in, and what makes a row unusable."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eval.answers.extraction import extract_boxed
from eval.problems.items import Problem
from eval.problems.prompts import Message

Row = Mapping[str, Any]


class Unusable(ValueError):
    """A row is no problem; the message is the reason in words, without the row's content."""


@dataclass(frozen=True)
class Schema:
    """One published form of rows, recognised by its columns.

    `read` is pure: it makes a problem from a row, whose id may be "" if the row has none, or raises Unusable.
    `others` are columns that it reads where the file has them.
    """

    columns: tuple[str, ...]
    read: Callable[[Row], Problem]
    others: tuple[str, ...] = ("index", "unique_id", "id", "idx", "subject", "level", "data_source")


def text_of(row: Row | None, *keys: str) -> str | None:
    """The value of the first key that is not blank, as text; None when all are."""
    for key in keys:
        value = None if row is None else row.get(key)
        if value is None:
            continue
        if isinstance(value, datetime.datetime) and value.time() == datetime.time():
            value = value.date()  # "2024-01-01", which pyarrow reads from JSON as a time
        if (text := str(value)).strip():
            return text
    return None


def needed(value: str | None, reason: str) -> str:
    """The value; raises Unusable with the reason if there is none."""
    if not value:
        raise Unusable(reason)
    return value


def problem_of(row: Row, text: str, gold: str, details: Row | None = None, **fields: Any) -> Problem:
    """A problem with the id, subject and level that its row has under their usual names."""
    details = row if details is None else details
    fields.setdefault("subject", text_of(details, "subject", "subfield", "type", "topic", "名称"))
    fields.setdefault("level", text_of(details, "level", "difficulty", "task"))
    identity = text_of(details, "index", "unique_id", "id", "idx") or ""
    return Problem(identity, text, gold, data_source=text_of(row, "data_source"), **fields)


def chat_of(value: Any) -> tuple[Message, ...] | None:
    """A list of {role, content}, or its JSON, as messages, the last of them not blank; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    is_chat = all(isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in value)
    if not is_chat or not value[-1]["content"].strip():
        return None
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def read_chat(row: Row, bare: Callable[[str], str] = str) -> Problem:
    """A row of DAPO-Math-17k: {data_source, prompt: [messages], reward_model: {ground_truth}, extra_info}.

    `bare` takes the problem out of the last message. A prepared file has the bare problem, the name of its set and
    that set's weight beside them.
    """
    messages = chat_of(row["prompt"])
    if messages is None:
        raise Unusable("an empty prompt or one that is not chat messages")
    model = row["reward_model"]
    gold = needed(
        text_of(model if isinstance(model, Mapping) else None, "ground_truth"), "no reward_model.ground_truth"
    )
    info = row.get("extra_info")
    try:
        json.dumps(info)
    except (TypeError, ValueError):
        info = ()
    if not isinstance(info, dict | None):
        raise Unusable("an extra_info that is not a struct of what JSON knows, which checkpoints are written in")
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
    """A row of MATH: {problem, solution or answer}; gold is the last box of the solution, else the answer.

    `choices` are the texts of options, for evaluations that weigh them.
    """
    text = needed(text_of(row, "problem"), "no problem")
    gold = extract_boxed(text_of(row, "solution") or "") or text_of(row, "answer")
    info = {"choices": row["choices"]} if row.get("choices") else {}
    return problem_of(row, text, needed(gold, "neither an answer nor a boxed solution"), extra_info=info)


# The schema of DAPO-Math-17k, which training reads; its extra_info may be left out.
CHAT = Schema(
    ("data_source", "prompt", "reward_model"),
    read_chat,
    ("extra_info", "problem", "dataset", "weight", "template", "grader"),
)
# What preparation writes: the same, with the set of each row and how it is asked and graded.
PREPARED = Schema((*CHAT.columns, "dataset", "template", "grader"), read_chat, CHAT.others)
SOLVED = Schema(("problem",), read_solved, (*Schema.others, "solution", "answer", "type", "subfield", "choices"))
