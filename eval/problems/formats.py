"""Reads the rows of parquet, json, csv and arrow files as a stream, with values as written."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from durable import is_lfs_pointer
from eval.problems import ProblemsError
from eval.problems.prompts import read_utf8
from eval.problems.rows import Row

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1000
CHUNK_CHARACTERS = 1024**2
MAX_TOKEN_CHARACTERS = 16  # of JSON, besides strings: a chunk may end within one
_BETWEEN_OBJECTS = re.compile(r"[\s,\[\]]*")
_ROW_LISTS = ("data", "rows", "examples", "instances")  # {"data": [...rows...]}
_DELIMITERS = ",;\t|"

ChooseColumns = Callable[[Sequence[str]], Sequence[str] | None]  # None: all


def rows_in(file: Path, choose: ChooseColumns = lambda _: None) -> Iterator[Row]:
    """Yield the rows of a file, each with all columns seen so far; `choose` selects of parquet.

    Raises ProblemsError for a file that is unreadable.
    """
    import pyarrow as pa

    suffix = file.suffix.lower()
    try:
        if is_lfs_pointer(file):
            raise ProblemsError(
                f"{file} is a Git LFS pointer, not the rows themselves; fetch them with `git lfs "
                "pull`, or download the file from its page"
            )
        if suffix == ".parquet":
            yield from _parquet(file, choose)
        elif suffix == ".arrow":
            yield from _arrow(file)
        else:
            with file.open(encoding="utf-8-sig", newline="") as text:
                yield from _alike(_TEXT_READERS[suffix](text))
    except ProblemsError:
        raise
    except UnicodeDecodeError:
        read_utf8(file)  # raises with the position in the file
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ProblemsError(
            f"{file} cannot be read as {suffix[1:]}: {error}; correct the file"
        ) from None


def _alike(rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Yield the rows with None for missing values, a batch at a time."""
    rows, columns = iter(rows), dict[str, None]()
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        for row in batch:
            if not row.keys() <= columns.keys():
                columns |= dict.fromkeys(row)
        for row in batch:
            yield row if len(row) == len(columns) else {**columns, **row}


def _parquet(file: Path, choose: ChooseColumns) -> Iterator[Row]:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    columns = choose(parquet.schema_arrow.names)
    for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.to_pylist()


def _arrow(file: Path) -> Iterator[Row]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        for batch in _record_batches(source):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()


def _record_batches(source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    try:
        opened = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        yield from pa.ipc.open_stream(source)
    else:
        yield from map(opened.get_batch, range(opened.num_record_batches))


def _csv(text: TextIO) -> Iterator[dict[str, Any]]:
    """Yield rows of texts, separated by whatever divides the first line into most columns."""
    csv.field_size_limit(2**31 - 1)
    first = text.readline()
    text.seek(0)
    counts = {sign: len(next(csv.reader([first], delimiter=sign), [])) for sign in _DELIMITERS}
    rows = csv.reader(text, delimiter=max(counts, key=counts.__getitem__), strict=True)
    try:
        yield from _named_cells(next(rows, []), rows)
    except csv.Error as error:
        raise ValueError(f"{error} in line {rows.line_num}") from None


def _named_cells(columns: Sequence[str], rows: Any) -> Iterator[dict[str, Any]]:
    if repeated := {name for name in columns if columns.count(name) > 1}:
        raise ValueError(f"several columns are named {', '.join(map(repr, sorted(repeated)))}")
    for cells in filter(None, rows):
        if any(cells[len(columns) :]):
            raise ValueError(
                f"line {rows.line_num} has {len(cells)} cells, but the first line names "
                f"{len(columns)} columns (quote texts that contain the delimiter)"
            )
        yield dict(itertools.zip_longest(columns, cells[: len(columns)]))


def _json(text: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines or a list, or the rows within a single object."""
    values = _json_values(text)
    head = list(itertools.islice(values, 2))
    if len(head) == 1 and isinstance(head[0], dict):
        head = _rows_within(head[0])
    for number, row in enumerate(itertools.chain(head, values)):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {json.dumps(row)[:80]}, not a JSON object")
        yield row


def _json_values(text: TextIO) -> Iterator[Any]:
    """Decode consecutive values while holding little more than one chunk and one value."""
    decode = json.JSONDecoder().raw_decode
    buffer, start, line = "", 0, 1
    while True:
        match = _BETWEEN_OBJECTS.match(buffer, start)
        start = match.end() if match else start
        try:
            value, end = decode(buffer, start)
        except json.JSONDecodeError as error:
            is_cut = error.pos + MAX_TOKEN_CHARACTERS > len(buffer) or "Untermin" in error.msg
            if is_cut and (more := text.read(max(CHUNK_CHARACTERS, len(buffer) - start))):
                line += buffer.count("\n", 0, start)
                buffer, start = buffer[start:] + more, 0
                continue
            if start == len(buffer):
                return
            line += buffer.count("\n", 0, error.pos)
            raise ValueError(f"JSON parse error in line {line}: {error.msg}") from None
        if buffer.find("\\ud", start, end) >= 0 or buffer.find("\\uD", start, end) >= 0:
            _require_text(value)
        start = end
        yield value


def _require_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has a lone surrogate, which is not text") from None


def _rows_within(content: dict[str, Any]) -> list[Any]:
    """Return the rows of an object: AISBench's rows by index, columns, {"data": [...]}, or one."""
    values = list(content.values())
    if values and all(isinstance(value, dict) for value in values):
        if not all("".join(value).isdecimal() for value in values):
            return values
        values = [list(value.values()) for value in values]  # pandas: cells by index
    are_columns = len(values) > 1 and all(
        isinstance(value, list) and not any(isinstance(cell, dict) for cell in value)
        for value in values
    )
    if are_columns and len(set(map(len, values))) == 1:
        return [dict(zip(content, cells, strict=True)) for cells in zip(*values, strict=True)]
    lists = [content[name] for name in _ROW_LISTS if isinstance(content.get(name), list)]
    return lists[0] if len(lists) == 1 and lists[0] else [content]


_TEXT_READERS = {".jsonl": _json, ".json": _json, ".csv": _csv, ".tsv": _csv}
FORMATS = (".parquet", *_TEXT_READERS, ".arrow")
