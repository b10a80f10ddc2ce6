"""Reads rows of a file as problems and drops none silently. Training and evaluation share it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.prompts import Message, read_utf8

Row = Mapping[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class Schema:
    """How a row becomes a problem; a `problem` or `gold` of None is a fault, as are `other_faults`."""

    columns: tuple[str, ...]  # by which the schema is recognised
    problem: Callable[[Row], str | None]
    gold: Callable[[Row], str | None]
    no_problem: str  # the fault in words
    no_gold: str
    messages: Callable[[Row], tuple[Message, ...] | None] = lambda row: None
    details: Callable[[Row], Row] = lambda row: row  # where id, subject and level are
    other_faults: Mapping[str, Callable[[Row], bool]] = field(default_factory=dict)


def read_problems(path: Path, schemas: Sequence[Schema]) -> list[Problem]:
    """All problems of a file, in its order, by the first schema whose columns the file has.

    Raises ProblemsError for a file that cannot be read or lacks columns, and for rows without a problem or a gold
    answer or with text that is not UTF-8, with their count and first row numbers.
    """
    rows = read_file(path)
    if not rows:
        raise ProblemsError(f"{path} has no rows; name another file, or fix it")
    schema = find_schema(path, {name for row in rows for name in row}, schemas)
    faults: dict[str, Callable[[Row], bool]] = {
        schema.no_problem: lambda row: schema.problem(row) is None,
        schema.no_gold: lambda row: schema.gold(row) is None,
        "a lone surrogate, which is not text": lambda row: not _is_text(schema.problem(row), schema.gold(row)),
        **schema.other_faults,
    }
    found = [
        _describe_fault(what, [number for number, row in enumerate(rows) if is_bad(row)])
        for what, is_bad in faults.items()
    ]
    if any(found):
        raise ProblemsError(
            f"{path}: of {len(rows)} rows, {' and '.join(filter(None, found))}. No row is dropped silently: fix "
            "the file"
        )
    return [_problem(schema, number, row) for number, row in enumerate(rows)]


def find_schema(path: Path, columns: Collection[str], schemas: Sequence[Schema]) -> Schema:
    """The first schema whose columns the file has. Raises ProblemsError that names what is missing."""
    for schema in schemas:
        if set(columns).issuperset(schema.columns):
            return schema
    known = " or ".join(", ".join(schema.columns) for schema in schemas)
    missing = ", ".join(name for name in schemas[0].columns if name not in columns)
    raise ProblemsError(
        f"{path} lacks the columns {missing} (it has {', '.join(sorted(columns))}); what can be read: {known}"
    )


def require_columns(path: Path, schema: Schema) -> None:
    """Raise ProblemsError unless the file is a parquet with the schema's columns; reads only its footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise ProblemsError(f"{path} cannot be read as parquet: {error}") from None
    find_schema(path, names, (schema,))


def merge_repeats(path: Path, problems: Sequence[Problem]) -> list[Problem]:
    """The distinct problems with their number of rows; rows with the same prompt are samples of one problem.

    Raises ProblemsError when such rows have different gold answers, or different problems the same id: results are
    paired by id.
    """
    rows: dict[Any, list[int]] = {}
    for number, problem in enumerate(problems):
        messages = problem.messages or ({"content": problem.text},)
        key = tuple(tuple((name, text.strip()) for name, text in message.items()) for message in messages)
        rows.setdefault(key, []).append(number)
    unequal = [numbers for numbers in rows.values() if len({problems[row].gold for row in numbers}) > 1]
    if unequal:
        first = ", ".join(f"row {row}: {problems[row].gold!r}" for row in unequal[0][:3])
        raise ProblemsError(
            f"{path}: {len(unequal)} problems have rows with different gold answers ({first}); rows with the same "
            f"prompt are samples of one problem, so correct the file"
        )
    distinct = [replace(problems[numbers[0]], num_rows=len(numbers)) for numbers in rows.values()]
    repeated = [identity for identity, count in Counter(problem.id for problem in distinct).items() if count > 1]
    if repeated:
        raise ProblemsError(
            f"{path}: {len(repeated)} ids are used for several problems (first: {repeated[0]!r}); results are "
            f"paired by id, so extra_info.index (or unique_id, id, idx) must be unique"
        )
    return distinct


def read_file(path: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, a .jsonl, or a .json: a list, or rows by their index as in AISBench's file."""
    if not path.is_file():
        raise ProblemsError(
            f"{path} is not a file; problems come from a file that ends in {', '.join(SUFFIXES)}, or the "
            f"source of one: hf:ORG/NAME/FILE, modelscope:ORG/NAME/FILE or https://..., each with #sha256=..."
        )
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return list(pq.read_table(path).to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise ProblemsError(f"{path} cannot be read as parquet: {error}") from None
    if path.suffix == ".jsonl":
        lines = read_utf8(path).split("\n")
        return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".json":
        return _json_rows(path)
    raise ProblemsError(
        f"{path} ends in {path.suffix!r}; a file of problems must end in one of {', '.join(SUFFIXES)}"
    )


def text_of(row: Row | None, *keys: str) -> str | None:
    """The value of the first key that is not blank, as text; None when all are."""
    for key in keys:
        value = None if row is None else row.get(key)
        if value is not None and str(value).strip():
            return str(value)
    return None


def chat_of(row: Row) -> tuple[Message, ...] | None:
    """The column `prompt` as messages, the last of them not blank; None for anything else."""
    prompt = row["prompt"]
    if not isinstance(prompt, list) or not prompt:
        return None
    is_chat = all(isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in prompt)
    if not is_chat or not prompt[-1]["content"].strip():
        return None
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def last_of_chat(row: Row) -> str | None:
    """The content of the last message of the column `prompt`."""
    messages = chat_of(row)
    return messages[-1]["content"] if messages else None


def _problem(schema: Schema, number: int, row: Row) -> Problem:
    details = schema.details(row)
    return Problem(
        id=text_of(details, "index", "unique_id", "id", "idx") or f"row-{number}",
        text=str(schema.problem(row)),
        gold=str(schema.gold(row)),
        subject=text_of(details, "subject", "subfield", "type", "名称"),
        level=text_of(details, "level", "task"),
        messages=schema.messages(row),
        data_source=text_of(row, "data_source"),
        extra_info=row.get("extra_info") or {},
    )


def _json_rows(path: Path) -> list[dict[str, Any]]:
    content = _load(read_utf8(path), str(path))
    rows = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProblemsError(f"{path}: a list of JSON objects is needed, or an object of them by index")
    return rows


def _parse(line: str, place: str) -> dict[str, Any]:
    row = _load(line, place)
    if not isinstance(row, dict):
        raise ProblemsError(f"{place}: a JSON object is needed, not {type(row).__name__}")
    return row


def _load(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ProblemsError(f"{place}: not JSON ({error})") from error


def _is_text(*parts: str | None) -> bool:
    return not any("\ud800" <= character <= "\udfff" for part in parts if part for character in part)


def _describe_fault(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    first = ", ".join(str(number) for number in numbers[:5])
    return f"{len(numbers)} with {what} (rows {first}{', ...' if len(numbers) > 5 else ''})"
