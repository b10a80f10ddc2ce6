"""Problem files of training and evaluation: which files, which schema. No row is lost silently."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from eval.problems import ProblemsError
from eval.problems.formats import FORMATS, rows_in
from eval.problems.items import Problem
from eval.problems.rows import Row, Schema, Split, Unusable

logger = logging.getLogger(__name__)

# Split names in file paths.
_SPLITS = {
    name: re.compile(rf"(?:^|[/_.-]){name}(?:[/_.-]|$)", re.IGNORECASE)
    for name in ("train", "test", "validation", "valid", "val", "dev")
}
_USES: dict[Split, str] = {"train": "train on", "test": "evaluate with"}
# Written beside the rows by `datasets`.
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


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
    path: Path, schemas: Sequence[Schema], split: Split = "test"
) -> Iterator[tuple[int, Row, Problem | Unusable]]:
    """Yield (row number, row, problem or why it is unusable), holding one batch in memory.

    A problem without an id gets `row-N`. Raises ProblemsError for a file that is unreadable or
    lacks columns.
    """
    yield from problems_of(path, iterate_rows(path, schemas, split), schemas)


def problems_of(
    path: Path, rows: Iterable[Row], schemas: Sequence[Schema]
) -> Iterator[tuple[int, Row, Problem | Unusable]]:
    """`iterate_problems` for rows already read from `path`."""
    schema = None
    for number, row in enumerate(rows):
        schema = schema or find_schema(path, row, schemas)
        problem: Problem | Unusable
        try:
            problem = schema.read(row)
            problem = problem if problem.id else replace(problem, id=f"row-{number}")
        except Unusable as reason:
            problem = reason
        yield number, row, problem
    if schema is None:
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


def columns_of(path: Path, split: Split = "test") -> list[str]:
    """Return the columns of a file or folder. Raises ProblemsError if it is unreadable."""
    return list(next(iterate_rows(path, split=split), {}))


def merge_repeats(path: Path | str, problems: Sequence[Problem]) -> list[Problem]:
    """Return distinct problems with row counts; rows with the same prompt are samples of one.

    Raises ProblemsError if such rows have different gold answers, or if different problems share an
    id, since results are paired by id.
    """
    rows: dict[Any, list[int]] = {}
    for number, problem in enumerate(problems):
        messages = problem.messages or ({"role": "user", "content": problem.text},)
        prompt = tuple((message["role"], message["content"].strip()) for message in messages)
        images = repr(problem.images) if problem.images else ""
        rows.setdefault((prompt, images), []).append(number)
    unequal = [
        numbers for numbers in rows.values() if len({problems[row].gold for row in numbers}) > 1
    ]
    if unequal:
        first = ", ".join(f"row {row}: {problems[row].gold!r}" for row in unequal[0][:3])
        raise ProblemsError(
            f"{path}: different gold answers for the same prompt ({first}; prompts in all: "
            f"{len(unequal)}); rows with the same prompt are samples of one problem, so correct "
            "the file"
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


def iterate_rows(
    path: Path, schemas: Sequence[Schema] = (), split: Split = "test"
) -> Iterator[Row]:
    """Yield the rows of a file, or of a split in a folder, as a stream.

    Of parquet files, only the columns of the matching schema are read. Raises ProblemsError.
    """
    for file in files_of(path, split):
        yield from rows_in(file, functools.partial(_columns_to_read, file, schemas))


def _columns_to_read(
    file: Path, schemas: Sequence[Schema], names: Sequence[str]
) -> list[str] | None:
    """Return the columns of the first matching schema, or None for all columns without schemas."""
    if not schemas:
        return None
    schema = find_schema(file, names, schemas)
    return [name for name in names if name in (*schema.columns, *schema.others)]


def files_of(path: Path, split: Split = "test") -> list[Path]:
    """Return the file, or a folder's files with rows of the split.

    Raises ProblemsError if there is none, or if the choice is ambiguous.
    """
    if path.is_dir():
        return [path / name for name in _chosen_in(path, split)]
    if not path.is_file():
        where = f" in {Path.cwd()}" if not path.is_absolute() else ""
        raise ProblemsError(
            f"{path} is not a file, nor a folder of problem files{where}; name a registered set "
            f"(dapo datasets), files that end in {', '.join(FORMATS)}, hf:ORG/NAME, "
            "modelscope:ORG/NAME or https://...#sha256=..."
        )
    if path.suffix.lower() not in FORMATS:
        raise ProblemsError(
            f"{path} ends in {path.suffix!r}; a problem file must end in one of "
            f"{', '.join(FORMATS)}"
        )
    return [path]


def _chosen_in(folder: Path, split: Split) -> list[str]:
    """Return the relative paths of `of_split`, and log them if there are others."""
    paths = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    names = sorted(path.as_posix() for path in visible)
    chosen = of_split(str(folder), names, split)
    if others := [name for name in names if is_rows(name) and name not in chosen]:
        use = f"{folder}: rows to {_USES[split]} from {_listed(chosen)}"
        log_once(logger.info, f"{use}; not from {_listed(others)}")
    return chosen


def is_rows(name: str) -> bool:
    """True if a file name is that of a problem file."""
    path = PurePosixPath(name)
    return path.suffix.lower() in FORMATS and path.name not in _METADATA


def of_split(source: str, names: Sequence[str], split: Split) -> list[str]:
    """Return the files of a folder or repository that hold the rows of a split.

    These are the parquet files, else the files of another format, whose paths name the split, else
    those that name no split. Raises ProblemsError if there is none, or if they have several formats
    or belong to several configurations.
    """
    rows = list(filter(is_rows, names))
    rows = [name for name in rows if name.lower().endswith(".parquet")] or rows
    chosen = [name for name in rows if _SPLITS[split].search(name)] or [
        name
        for name in rows
        if len(names) == 1 or not any(pattern.search(name) for pattern in _SPLITS.values())
    ]
    places: dict[str, list[str]] = {}  # of each file name that gives the split
    for path in map(PurePosixPath, chosen):
        if _SPLITS[split].search(path.name):
            places.setdefault(path.name, []).append(str(path.parent))
    repeated = next((found for found in places.values() if len(found) > 1), [])
    if repeated:
        fault = f"the files to {_USES[split]} in {len(repeated)} folders ({_listed(repeated)})"
    elif len({PurePosixPath(name).suffix.lower() for name in chosen}) > 1:
        fault = "files of several formats"
    elif not chosen:
        fault = f"no rows to {_USES[split]}"
    else:
        return chosen
    raise ProblemsError(
        f"{source} has {fault}: name one of its files or folders as {source}/NAME; it has "
        f"{_listed(names, 20)}"
    )


@functools.cache
def log_once(log: Callable[[str], None], text: str) -> None:
    """Log a text that several steps of a command would repeat."""
    log(text)


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def _describe_fault(reason: str, numbers: Sequence[int]) -> str:
    first = ", ".join(str(number) for number in numbers[:5])
    return f"{len(numbers)} with {reason} (rows {first}{', ...' if len(numbers) > 5 else ''})"
