"""Reads problem files for training and evaluation. No row is dropped silently."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.problems import ProblemsError
from eval.problems.items import Problem
from eval.problems.prompts import not_utf8, read_utf8
from eval.problems.rows import Row, Schema, Unusable

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".arrow": "arrow",
}
BATCH_ROWS = 1000


def read_problems(path: Path, schemas: Sequence[Schema]) -> list[Problem]:
    """Read all problems of a file or folder, with the first schema whose columns it has.

    Raises ProblemsError for a file that is unreadable or lacks columns, and for unusable rows, with
    their count and first row numbers.
    """
    problems, faults = [], dict[str, list[int]]()
    for number, _, problem in iterate_problems(path, schemas):
        if isinstance(problem, Unusable):
            faults.setdefault(str(problem), []).append(number)
        else:
            problems.append(problem)
    refuse_faults(path, faults, len(problems) + sum(map(len, faults.values())))
    return problems


def refuse_faults(path: Path, faults: Mapping[str, Sequence[int]], num_rows: int) -> None:
    """Raise ProblemsError if any row is unusable; `faults` maps reasons to row numbers."""
    if faults:
        found = " and ".join(_describe_fault(reason, numbers) for reason, numbers in faults.items())
        raise ProblemsError(
            f"{path}: of {num_rows} rows, {found}. No row is dropped silently: fix the file"
        )


def iterate_problems(
    path: Path, schemas: Sequence[Schema]
) -> Iterator[tuple[int, Row, Problem | Unusable]]:
    """Yield (row number, row, problem or why it is unusable), holding one batch in memory.

    A problem without an id gets `row-N`. Raises ProblemsError for a file that is unreadable or
    lacks columns.
    """
    yield from problems_of(path, iterate_rows(path, schemas), schemas)


def problems_of(
    path: Path, batches: Iterable[Sequence[Row]], schemas: Sequence[Schema]
) -> Iterator[tuple[int, Row, Problem | Unusable]]:
    """`iterate_problems` for rows already read from `path`."""
    number, schema = 0, None
    for rows in batches:
        schema = schema or find_schema(path, rows[0], schemas)
        for row in rows:
            problem: Problem | Unusable
            try:
                problem = schema.read(row)
                problem = problem if problem.id else replace(problem, id=f"row-{number}")
            except Unusable as reason:
                problem = reason
            yield number, row, problem
            number += 1
    if not number:
        raise ProblemsError(f"{path} has no rows; name another file, or fix it")


def find_schema(path: Path, columns: Collection[str], schemas: Sequence[Schema]) -> Schema:
    """Return the first schema whose columns the file has. Raises ProblemsError without one."""
    for schema in schemas:
        if set(columns).issuperset(schema.columns):
            return schema
    known = " or ".join(", ".join(schema.columns) for schema in schemas)
    missing = ", ".join(name for name in schemas[0].columns if name not in columns)
    raise ProblemsError(
        f"{path} lacks the columns {missing} (it has {', '.join(sorted(columns))}); readable "
        f"schemas: {known}. Map other names with data.columns, for example "
        "data.columns.problem=question and data.columns.answer=result"
    )


def columns_of(path: Path) -> list[str]:
    """Return the columns of a file or folder. Raises ProblemsError if it is unreadable."""
    return list(next(iterate_rows(path), [{}])[0])


def merge_repeats(path: Path, problems: Sequence[Problem]) -> list[Problem]:
    """Return distinct problems with row counts; rows with the same prompt are samples of one.

    Raises ProblemsError if such rows have different gold answers, or if different problems share an
    id, since results are paired by id.
    """
    rows: dict[Any, list[int]] = {}
    for number, problem in enumerate(problems):
        messages = problem.messages or ({"role": "user", "content": problem.text},)
        prompt = tuple((message["role"], message["content"].strip()) for message in messages)
        rows.setdefault(prompt, []).append(number)
    unequal = [
        numbers for numbers in rows.values() if len({problems[row].gold for row in numbers}) > 1
    ]
    if unequal:
        first = ", ".join(f"row {row}: {problems[row].gold!r}" for row in unequal[0][:3])
        raise ProblemsError(
            f"{path}: {len(unequal)} problems have rows with different gold answers ({first}); "
            "rows with the same prompt are samples of one problem: correct the file"
        )
    distinct = [replace(problems[numbers[0]], num_rows=len(numbers)) for numbers in rows.values()]
    counts = Counter((problem.dataset, problem.id) for problem in distinct)
    repeated = [identity for (_, identity), count in counts.items() if count > 1]
    if repeated:
        raise ProblemsError(
            f"{path}: {len(repeated)} ids are used for several problems (first: {repeated[0]!r}); "
            "results are paired by id, so extra_info.index (or unique_id, id, idx) must be unique"
        )
    return distinct


def iterate_rows(path: Path, schemas: Sequence[Schema] = ()) -> Iterator[list[Row]]:
    """Yield non-empty batches of rows from a file, or from a folder's files of one format.

    pyarrow reads parquet, only the columns of the matching schema. `datasets` streams other formats
    without leaving files in the user's cache, except for AISBench's JSON object of rows by index.
    Raises ProblemsError.
    """
    files = files_of(path)
    if files[0].suffix == ".parquet":
        yield from filter(None, _parquet_rows(files, schemas))
        return
    if files[0].suffix == ".json" and (rows := _rows_by_index(files[0])) is not None:
        yield rows
        return
    for columns in _batches(path, files):
        names = list(columns)
        if columns and (count := len(columns[names[0]])):
            yield [{name: columns[name][row] for name in names} for row in range(count)]


def files_of(path: Path) -> list[Path]:
    """Return the file, or a folder's files. Raises ProblemsError for none or several formats."""
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in FORMATS and file.is_file()
        )
    if not files or not files[0].is_file():
        where = f" in {Path.cwd()}" if not path.is_absolute() else ""
        raise ProblemsError(
            f"{path} is not a file, nor a folder of problem files{where}; name a registered set "
            f"(dapo datasets), files that end in {', '.join(FORMATS)}, hf:ORG/NAME, "
            "modelscope:ORG/NAME or https://...#sha256=..."
        )
    if files[0].suffix not in FORMATS:
        raise ProblemsError(
            f"{path} ends in {path.suffix!r}; a problem file must end in one of "
            f"{', '.join(FORMATS)}"
        )
    if len({file.suffix for file in files}) > 1:
        raise ProblemsError(
            f"{path} has files of several formats ({', '.join(sorted({f.suffix for f in files}))})"
        )
    return files


def _parquet_rows(files: Sequence[Path], schemas: Sequence[Schema]) -> Iterator[list[Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        try:
            parquet = pq.ParquetFile(file)
            columns = _columns_to_read(file, parquet.schema_arrow.names, schemas)
            for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
                yield batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ProblemsError(f"{file} cannot be read as parquet: {error}") from None


def _columns_to_read(
    file: Path, names: Sequence[str], schemas: Sequence[Schema]
) -> list[str] | None:
    """Return the columns of the first matching schema, or None for all columns without schemas."""
    if not schemas:
        return None
    schema = find_schema(file, names, schemas)
    return [name for name in names if name in (*schema.columns, *schema.others)]


def _batches(path: Path, files: Sequence[Path]) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of up to BATCH_ROWS rows at a time."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = (
        False  # otherwise each file read here is reported to the hub
    )
    builder, options = FORMATS[files[0].suffix], dict[str, Any]()
    before = datasets.utils.logging.get_verbosity()
    try:
        # errors are raised anyway
        datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
        if builder == "csv":  # keep values as text: 0027 and NA are answers
            import pandas

            names = pandas.read_csv(files[0], nrows=0, encoding="utf-8-sig").columns
            texts = datasets.Features({str(name): datasets.Value("string") for name in names})
            options = {"features": texts, "na_filter": False, "encoding": "utf-8-sig"}
        with tempfile.TemporaryDirectory() as folder:
            rows = datasets.load_dataset(
                builder,
                data_files=[str(file) for file in files],
                split="train",
                streaming=True,
                cache_dir=folder,
                **options,
            )
            yield from rows.iter(BATCH_ROWS)
    except StopIteration:
        return
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    except Exception as error:  # errors of pyarrow, pandas and datasets share no base class
        if isinstance(error, ProblemsError):
            raise
        raise ProblemsError(
            f"{path} cannot be read as {files[0].suffix[1:]}: {error}; correct the file"
        ) from None
    finally:
        datasets.utils.logging.set_verbosity(before)


def _rows_by_index(path: Path) -> list[Row] | None:
    """Read a JSON object of objects, AISBench's format of MATH-500; None for anything else."""
    text = read_utf8(path)
    if not text.lstrip().startswith("{"):
        return None
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return None  # JSON lines, or not JSON, for which `datasets` has the better message
    if not content or not all(isinstance(row, dict) for row in content.values()):
        return None
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ProblemsError(
            f"{path} has a lone surrogate, which is not text; correct the file"
        ) from None
    return list(content.values())


def _describe_fault(reason: str, numbers: Sequence[int]) -> str:
    first = ", ".join(str(number) for number in numbers[:5])
    return f"{len(numbers)} with {reason} (rows {first}{', ...' if len(numbers) > 5 else ''})"
