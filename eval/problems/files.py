"""Rows of an evaluation file as problems, with nothing dropped silently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.problems import BenchmarkError
from eval.problems.items import Problem
from eval.problems.prompts import Message, read_utf8

Row = Mapping[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class Schema:
    """How a row becomes a problem; a row whose `problem` or `gold` gives None is counted as a fault."""

    columns: tuple[str, ...]  # by which the schema is recognised
    problem: Callable[[Row], str | None]
    gold: Callable[[Row], str | None]
    no_problem: str  # the fault in words
    no_gold: str
    messages: Callable[[Row], tuple[Message, ...] | None] = lambda row: None
    details: Callable[[Row], Row] = lambda row: row  # where id, subject and level stand


def read_problems(path: Path, schemas: Sequence[Schema]) -> list[Problem]:
    """All problems of a file, in its order, by the first schema whose columns the file has.

    Raises BenchmarkError with counts when columns, problems or gold answers are missing, text is not UTF-8, or an
    id is used twice.
    """
    rows = read_file(path)
    _require(path, len(rows), {"the file has no rows": int(not rows)})
    columns = {name for row in rows for name in row}
    schema = next((schema for schema in schemas if columns.issuperset(schema.columns)), None)
    if schema is None:
        known = " or ".join(", ".join(s.columns) for s in schemas)
        missing = ", ".join(name for name in schemas[0].columns if name not in columns)
        raise BenchmarkError(
            f"{path} lacks the columns {missing} (it has {', '.join(sorted(columns))}); what can be read: {known}"
        )
    texts, golds = [schema.problem(row) for row in rows], [schema.gold(row) for row in rows]
    pairs = list(zip(texts, golds, strict=True))
    _require(
        path,
        len(rows),
        {
            schema.no_problem: sum(text is None for text in texts),
            schema.no_gold: sum(gold is None for gold in golds),
            "a lone surrogate, which is no text": sum(not _is_text(pair) for pair in pairs),
        },
    )
    problems = [
        _problem(schema, number, row, str(text), str(gold))
        for number, (row, (text, gold)) in enumerate(zip(rows, pairs, strict=True))
    ]
    repeated = [identity for identity, count in Counter(problem.id for problem in problems).items() if count > 1]
    if repeated:
        raise BenchmarkError(
            f"{path}: {len(repeated)} ids are used more than once (first: {repeated[0]!r}); results are paired "
            f"by id, so extra_info.index (or unique_id, id, idx) must be unique"
        )
    return problems


def read_file(path: Path) -> list[Row]:
    """The rows of a .parquet, a .jsonl, or a .json: a list, or rows by their index as in AISBench's file."""
    if not path.is_file():
        raise BenchmarkError(
            f"{path} is not a file; an evaluation set must be a file that ends in {', '.join(SUFFIXES)}, or the "
            f"source of one: hf:ORG/NAME/FILE, modelscope:ORG/NAME/FILE or https://..., each with #sha256=..."
        )
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return list(pq.read_table(path).to_pylist())
        except (pa.ArrowInvalid, OSError) as error:
            raise BenchmarkError(f"{path} cannot be read as parquet: {error}") from None
    if path.suffix == ".jsonl":
        lines = read_utf8(path).split("\n")
        return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".json":
        return _json_rows(path)
    raise BenchmarkError(
        f"{path} ends in {path.suffix!r}; an evaluation set must end in one of {', '.join(SUFFIXES)}"
    )


def text_of(row: Row | None, *keys: str) -> str | None:
    """The first of the keys that says something, as text; None when none does."""
    for key in keys:
        value = None if row is None else row.get(key)
        if value is not None and str(value).strip():
            return str(value)
    return None


def chat_of(row: Row) -> tuple[Message, ...] | None:
    """The column `prompt` as messages whose last one says something; None when it is something else."""
    prompt = row["prompt"]
    if not isinstance(prompt, list) or not prompt:
        return None
    is_chat = all(isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in prompt)
    if not is_chat or not prompt[-1]["content"].strip():
        return None
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def last_of_chat(row: Row) -> str | None:
    """What the last message of the column `prompt` says."""
    messages = chat_of(row)
    return messages[-1]["content"] if messages else None


def _problem(schema: Schema, number: int, row: Row, text: str, gold: str) -> Problem:
    details = schema.details(row)
    return Problem(
        id=text_of(details, "index", "unique_id", "id", "idx") or f"row-{number}",
        text=text,
        gold=gold,
        subject=text_of(details, "subject", "subfield", "type", "名称"),
        level=text_of(details, "level", "task"),
        messages=schema.messages(row),
    )


def _json_rows(path: Path) -> list[Row]:
    content = _load(read_utf8(path), str(path))
    rows = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BenchmarkError(f"{path}: a list of JSON objects is needed, or an object of them by index")
    return rows


def _parse(line: str, place: str) -> Row:
    row = _load(line, place)
    if not isinstance(row, dict):
        raise BenchmarkError(f"{place}: a JSON object is needed, not {type(row).__name__}")
    return row


def _load(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"{place}: not JSON ({error})") from error


def _is_text(parts: Sequence[str | None]) -> bool:
    return not any("\ud800" <= character <= "\udfff" for part in parts if part for character in part)


def _require(path: Path, num_rows: int, faults: Mapping[str, int]) -> None:
    found = [f"{count} with {what}" if num_rows else what for what, count in faults.items() if count]
    if found:
        raise BenchmarkError(
            f"{path}: of {num_rows} rows, {' and '.join(found)}. No row is dropped silently: mend the file."
        )
