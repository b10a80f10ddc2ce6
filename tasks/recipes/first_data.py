"""The sets of `dapo init`: recognizes data files by schema and columns, and converts them."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.filesize import decimal

from dapo_core.errors import ConfigError
from eval.problems.files import columns_of, files_of, iterate_problems, merge_repeats
from eval.problems.items import Problem
from eval.problems.recognition import find_layout, first_rows, published_as
from eval.problems.registry import SETS
from eval.problems.rows import CHAT, Row, Split
from tasks.config import ChainConfig
from tasks.config.data import ColumnsConfig
from tasks.data.benchmarks import benchmark_of
from tasks.data.reading import CONTRADICTED, SetCount, here, iterate_source, to_row
from tasks.data.sources import train_sources
from tasks.preflight.model import ModelFacts
from tasks.preflight.prompts import BENCHMARK_ADVICE, longest_prompt, prompt_tokens

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]
Found = tuple[int, Problem, Row]  # the row's number first
NO_COLUMNS: Mapping[str, Any] = {}
HELD_OUT_PART, MIN_HELD_OUT, MAX_HELD_OUT = 10, 8, 500  # a tenth, without a held-out set
MAX_SPLIT_BYTES = 64 * 1024**2
LARGE_FILE_BYTES = 4 * 1024**2  # reading takes seconds from here on
MIN_RESPONSE_TOKENS = 2  # after the longest prompt
BATCH_PROMPTS = 1000  # tokenized at once
MAX_LEFT_OUT_RATIO = 0.5  # more suggests wrong columns or a wrong model
_REMOTE = re.compile(r"(hf|modelscope|https?):")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def data_set(name: str, option: str, columns: Mapping[str, Any] = NO_COLUMNS) -> Any:
    """The value of data.train or data.eval for a name, a hub id, or a file with its schema."""
    if name in SETS or _REMOTE.match(name):
        return name
    path = Path(name)
    if not path.exists():
        if HUB_ID.fullmatch(name):
            return f"hf:{name}"
        raise ConfigError(
            f"--{option} {name} is not a file or folder here, a hub id or a registered set "
            f"({', '.join(SETS)})"
        )
    split: Split = "train" if option == "data" else "test"
    rows = first_rows(path, split)
    given = ColumnsConfig.model_validate(columns).layout
    if not columns and set(CHAT.columns) <= rows[0].keys():
        return name
    if not columns and (known := published_as(path, rows)) is not None:
        return [{"set": known.name, "path": name}]
    layout = find_layout(path, rows, split, given)
    if (layout.problem, layout.options, layout.answer) == (("problem",), (), "answer"):
        return name
    found = {name: value for name, value in asdict(layout).items() if value}
    return [{"set": name, "columns": ColumnsConfig(**found).model_dump(exclude_none=True)}]


def parse_columns(text: str | None) -> dict[str, Any]:
    """`problem=NAME,answer=NAME` as a dictionary; `A+B` are two columns. Raises ConfigError."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    try:
        named = {name: tuple(value.split("+")) for name, _, value in pairs}
        several = {name: value if len(value) > 1 else value[0] for name, value in named.items()}
        return ColumnsConfig.model_validate(several).model_dump(exclude_none=True)
    except ValidationError:
        keys = ", ".join(ColumnsConfig.model_fields)
        raise ConfigError(
            f"--columns {text} is not problem=NAME,answer=NAME, with the keys of data.columns "
            f"({keys}) and + between several columns"
        ) from None


def data_sets(
    new_files: NewFiles,
    train: str,
    held_out: str | None,
    columns: Mapping[str, Any] = NO_COLUMNS,
    facts: ModelFacts | None = None,
) -> tuple[dict[str, Any], SetCount]:
    """data.train and data.eval: two sets, a set with a test split, or two files split from one.

    Written files omit unusable rows. If a prompt is too long for the model, they also omit all
    prompts longer than half of its positions. The returned count includes both. Raises ConfigError
    if a set without held-out problems must be fetched or is too large or small to split, and
    DataError if more than half of the rows are omitted.
    """
    if held_out is None and train in SETS and SETS[train].test:
        return {"train": train, "eval": train}, SetCount(train)
    value, path = data_set(train, "data", columns), Path(train)
    if held_out is not None and path.is_file() and _is_same(path, Path(held_out)):
        raise ConfigError(
            f"--eval {held_out} is the file of --data, and accuracy on trained problems says "
            "little: leave out --eval to hold out a part of it, or name other problems"
        )
    if held_out is None and path.is_dir() and files_of(path, "test") != files_of(path, "train"):
        held_out = train
    parts = {
        "train": value,
        "eval": value if held_out is None else _held_out(new_files, held_out, columns),
    }
    if not path.is_file() or path.stat().st_size > MAX_SPLIT_BYTES:
        if held_out is None:
            raise ConfigError(f"--data {train} has no held-out set; name one with --eval")
        return parts, SetCount(train)
    count = SetCount(train)
    kept = _usable_rows(path, value, facts, count)
    one = value[0] if isinstance(value, list) else {"set": value}
    texts = list(dict.fromkeys(problem.text for _, problem, _ in kept))
    if (benchmark := benchmark_of(one["set"], texts)) is not None:
        logger.warning(
            "%s has problems of the benchmark %s: %s", train, benchmark, BENCHMARK_ADVICE
        )
    if one["set"] in SETS:  # a part must not use the name of the set: accuracy would not compare
        rows = _solved(problem for _, problem, _ in kept)
        one = {"set": train}
    else:
        rows = [dict(row) for _, _, row in kept]
    written = {"train": rows} if count.refused else {}
    if held_out is None:
        written = _split(train, [_identity(problem) for _, problem, _ in kept], rows)
    if written and any(problem.images for _, problem, _ in kept):
        raise ConfigError(
            f"{train} has pictures and {'unusable rows' if count.refused else 'no held-out set'}, "
            "and files with pictures are not written here: correct the rows, and name a held-out "
            "set with --eval"
        )
    for name, part in written.items():
        file = new_files.write(name, part)
        parts[name] = [{**one, "set": file}] if len(one) > 1 else file
    return parts, count


def _is_same(path: Path, other: Path) -> bool:
    return other.exists() and path.samefile(other)


def _usable_rows(path: Path, value: Any, facts: ModelFacts | None, count: SetCount) -> list[Found]:
    """The rows of a file that a recipe can use; the others are counted as refused."""
    data = {"train": value, "eval": value}
    config = ChainConfig.model_validate({"data": data, "model": {"source": "recipe"}})
    source = here(config, train_sources(config)[0])
    if (size := path.stat().st_size) > LARGE_FILE_BYTES:
        logger.info("reading all of %s (%s); this may take a minute", path, decimal(size))
    found = [(count.read - 1, *pair) for pair in iterate_source(config, source, count)]
    found = _without(found, _contradicted(found), CONTRADICTED, count)
    if facts is not None and facts.tokenizer is not None and facts.positions:
        prompts = [to_row(source, problem, row)["prompt"] for _, problem, row in found]
        if longest_prompt(facts, prompts) > facts.positions - MIN_RESPONSE_TOKENS:
            limit = facts.positions // 2
            reason = f"a prompt of more than {limit:,} tokens"
            found = _without(found, _too_long(facts, prompts, found, limit), reason, count)
    count.require_usable(
        MAX_LEFT_OUT_RATIO, "Correct the rows, or name other columns with --columns."
    )
    merge_repeats(path, [problem for _, problem, _ in found])  # messages name the user's file
    return found


def _without(
    found: Sequence[Found], numbers: Set[int], reason: str, count: SetCount
) -> list[Found]:
    """The other rows; those with these numbers are counted as refused."""
    for number, _, row in found:
        if number in numbers:
            count.refuse(number, reason, row)
    return [one for one in found if one[0] not in numbers]


def _contradicted(found: Sequence[Found]) -> set[int]:
    """The numbers of rows with the same problem and different gold answers."""
    by_problem: dict[str, list[tuple[int, str]]] = {}
    for number, problem, _ in found:
        by_problem.setdefault(_identity(problem), []).append((number, problem.gold))
    unequal = (same for same in by_problem.values() if len({gold for _, gold in same}) > 1)
    return {number for same in unequal for number, _ in same}


def _identity(problem: Problem) -> str:
    """Equal for rows with the same problem."""
    return json.dumps(problem.messages or problem.text.strip()) + repr(problem.images)


def _split(name: str, identities: Sequence[str], rows: Rows) -> dict[str, Rows]:
    """Rows of training problems, and a row of each held-out problem, drawn at random.

    Raises ConfigError if there are too few problems.
    """
    rows_of: dict[str, Rows] = {}
    for identity, row in zip(identities, rows, strict=True):
        rows_of.setdefault(identity, []).append(row)
    problems = list(rows_of.values())
    if len(problems) < 2 * MIN_HELD_OUT:
        raise ConfigError(
            f"{name} has {len(problems)} different problems, too few to split; name a held-out set "
            "with --eval"
        )
    num_held_out = min(max(len(problems) // HELD_OUT_PART, MIN_HELD_OUT), MAX_HELD_OUT)
    held_out = {*random.Random(0).sample(range(len(problems)), num_held_out)}
    trained = [same for at, same in enumerate(problems) if at not in held_out]
    return {
        "train": [row for same in trained for row in same],
        "eval": [problems[at][0] for at in sorted(held_out)],
    }


def _solved(problems: Iterable[Problem]) -> Rows:
    return [
        {"id": str(at), "problem": one.text, "answer": one.gold} for at, one in enumerate(problems)
    ]


def _too_long(
    facts: ModelFacts, prompts: Sequence[Any], found: Sequence[Found], limit: int
) -> set[int]:
    """The numbers of rows whose prompts have more tokens than the limit."""
    logger.info("a prompt is too long for the model: counting the tokens of all %d", len(prompts))
    too_long = set[int]()
    for at in range(0, len(prompts), BATCH_PROMPTS):
        tokens = prompt_tokens(facts, prompts[at : at + BATCH_PROMPTS])
        rows = found[at : at + BATCH_PROMPTS]
        too_long |= {row[0] for row, num in zip(rows, tokens, strict=True) if num > limit}
    return too_long


def _held_out(new_files: NewFiles, held_out: str, columns: Mapping[str, Any]) -> Any:
    """The value of data.eval; a part of a registered set is written to a file without its name.

    --columns is ignored for files that have none of these columns.
    """
    path = Path(held_out)
    if columns and path.exists():
        named = ColumnsConfig.model_validate(columns).layout.columns
        columns = columns if {*named} & {*columns_of(path)} else NO_COLUMNS
    value = data_set(held_out, "eval", columns)
    known = value[0]["set"] if isinstance(value, list) else ""
    if known not in SETS or SETS[known].num_items is None:
        return value
    tried = iterate_problems(path, SETS[known].schemas)
    problems = [problem for _, _, problem in tried if isinstance(problem, Problem)]
    if len({problem.text for problem in problems}) == SETS[known].num_items:
        return value
    return new_files.write("eval", _solved(problems))


class NewFiles:
    """Writes files beside a recipe; they and new folders are removed if the block raises."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe
        self._folders = [folder for folder in recipe.parents if not folder.exists()]
        self._written = set[Path]()

    def write(self, part: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Write rows to RECIPE.PART.jsonl; returns its path, raises ConfigError if it exists."""
        path = self._recipe.with_name(f"{self._recipe.stem}.{part}.jsonl")
        if path.exists() and path not in self._written:
            raise ConfigError(
                f"{path} exists, but the recipe needs to write this file: give the recipe another "
                "name"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._written.add(path)
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for path in self._written:
                path.unlink(missing_ok=True)
            for folder in self._folders if self._written else ():
                folder.rmdir()
