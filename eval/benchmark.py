"""Evaluation sets: files on disk to `Item`s, with nothing dropped silently."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import BenchmarkError
from eval.grading import extract_boxed

Message = dict[str, str]  # {"role": ..., "content": ...}

# AISBench, task math_prm800k_500_0shot_cot_gen
AISBENCH_ZERO_SHOT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."

PARQUET_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclass(frozen=True)
class Item:
    """One question: the chat messages sent as they are, and the gold answer that grades the response.

    `level` and `subject` are free text that the report groups by; None where the file has none.
    """

    id: str
    messages: tuple[Message, ...]
    gold: str
    subject: str | None = None
    level: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """A named evaluation set: how its file is read, and how many rows it must have."""

    name: str
    read: Callable[[Path], list[Item]]
    num_items: int


def load_items(path: str | Path, benchmark: str | None = None) -> list[Item]:
    """All items of an evaluation file, in file order.

    `.parquet` is read in the DAPO-Math-17k schema, `.jsonl` in the MATH-500 one; a named benchmark decides
    its own format and asserts its row count. Raises BenchmarkError with counts when a column, prompt or gold
    answer is missing, an id is used twice, or the row count is not the benchmark's.
    """
    path = Path(path)
    if not path.is_file():
        raise BenchmarkError(f"{path} is not a file; an evaluation set must be a .parquet or .jsonl file")
    if benchmark is not None:
        items = _known(benchmark).read(path)
        expected = BENCHMARKS[benchmark].num_items
        if len(items) != expected:
            raise BenchmarkError(
                f"{path} has {len(items)} rows, but {benchmark} has exactly {expected}: accuracy on it would "
                f"not compare with published figures. Use the complete file, or name no benchmark."
            )
    else:
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise BenchmarkError(
                f"{path} ends in {path.suffix!r}; an evaluation set must end in one of {', '.join(_READERS)}"
            )
        items = reader(path)
    _require(path, len(items), {"the file has no rows": int(not items)})
    repeated = [identity for identity, count in Counter(item.id for item in items).items() if count > 1]
    if repeated:
        raise BenchmarkError(
            f"{path}: {len(repeated)} ids are used more than once (first: {repeated[0]!r}); results are paired "
            f"by id, so extra_info.index (or unique_id) must be unique"
        )
    return items


def read_parquet(path: Path) -> list[Item]:
    """Items of a parquet file in the DAPO-Math-17k schema; the prompt's messages are kept as they are."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    missing = [column for column in PARQUET_COLUMNS if column not in table.column_names]
    if missing:
        raise BenchmarkError(
            f"{path} lacks the columns {', '.join(missing)} (it has {', '.join(table.column_names)}); "
            f"evaluation needs the DAPO-Math-17k schema: {', '.join(PARQUET_COLUMNS)}"
        )
    rows = table.to_pylist()
    _require(
        path,
        len(rows),
        {
            "an empty prompt": sum(not _has_content(row["prompt"]) for row in rows),
            "no reward_model.ground_truth": sum(
                _text(row["reward_model"], "ground_truth") is None for row in rows
            ),
        },
    )
    items = []
    for number, row in enumerate(rows):
        extra = row["extra_info"] or {}
        items.append(
            Item(
                id=_text(extra, "index") or f"row-{number}",
                messages=tuple({"role": m["role"], "content": m["content"]} for m in row["prompt"]),
                gold=str(row["reward_model"]["ground_truth"]),
                subject=_text(extra, "subject"),
                level=_text(extra, "level"),
            )
        )
    return items


def read_jsonl(path: Path) -> list[Item]:
    """Items of a MATH-500 style jsonl (problem, solution and/or answer, subject, level, unique_id).

    The gold answer is the last box of `solution`, as AISBench takes it, or `answer` where there is no box.
    """
    rows = list(_json_lines(path))
    golds = [extract_boxed(str(row.get("solution") or "")) or _text(row, "answer") for row in rows]
    _require(
        path,
        len(rows),
        {
            "no problem": sum(_text(row, "problem") is None for row in rows),
            "neither an answer nor a boxed solution": sum(gold is None for gold in golds),
        },
    )
    return [
        Item(
            id=_text(row, "unique_id") or f"row-{number}",
            messages=({"role": "user", "content": AISBENCH_ZERO_SHOT.format(problem=row["problem"])},),
            gold=str(gold),
            subject=_text(row, "subject"),
            level=_text(row, "level"),
        )
        for number, (row, gold) in enumerate(zip(rows, golds, strict=True))
    ]


_READERS: dict[str, Callable[[Path], list[Item]]] = {".parquet": read_parquet, ".jsonl": read_jsonl}

BENCHMARKS: dict[str, Benchmark] = {
    "math500": Benchmark(name="math500", read=read_jsonl, num_items=500),
}


def _known(name: str) -> Benchmark:
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    close = difflib.get_close_matches(name, BENCHMARKS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(BENCHMARKS)}"
    raise BenchmarkError(f"{name!r} is not a benchmark; {hint}")


def _json_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BenchmarkError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise BenchmarkError(f"{path}, line {number}: a JSON object is needed, not {type(row).__name__}")
            yield row


def _has_content(prompt: Any) -> bool:
    """True when the prompt is a list of {role, content} whose last message says something."""
    if not isinstance(prompt, list) or not prompt:
        return False
    is_chat = all(isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in prompt)
    return is_chat and bool(prompt[-1]["content"].strip())


def _text(row: Mapping[str, Any] | None, key: str) -> str | None:
    value = None if row is None else row.get(key)
    return None if value is None or not str(value).strip() else str(value)


def _require(path: Path, num_rows: int, faults: Mapping[str, int]) -> None:
    found = [f"{count} with {what}" if num_rows else what for what, count in faults.items() if count]
    if found:
        raise BenchmarkError(
            f"{path}: of {num_rows} rows, {' and '.join(found)}. No row is dropped silently: mend the file."
        )
