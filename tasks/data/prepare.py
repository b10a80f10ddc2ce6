"""Writes the training and held-out files of a recipe from its sets."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any

from dapo_core.errors import DataError
from dapo_core.reward.routing import require_scorers
from eval.problems import ProblemsError
from eval.problems.files import merge_repeats
from eval.problems.held_out import read_held_out
from eval.problems.items import Problem
from eval.problems.pictures import PictureStore
from eval.problems.rows import read_chat
from tasks.config import ChainConfig
from tasks.data.card import answer_kind, make_card, set_entry, write_card
from tasks.data.contamination import Hit, find_hits, rows_to_drop
from tasks.data.layout import BENCHMARKS, EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.data.reading import (
    CONTRADICTED,
    HELD_OUT,
    Seen,
    SetCount,
    advice_for,
    batched,
    here,
    iterate_source,
    to_row,
)
from tasks.data.sources import (
    Source,
    benchmark_sources,
    eval_sources,
    require_one_grader,
    train_sources,
)

BATCH_ROWS = 1000
logger = logging.getLogger(__name__)

Row = dict[str, Any]
Counted = tuple[Source, SetCount]


def build_dataset(config: ChainConfig, folder: Path) -> Mapping[str, Any]:
    """Write the problem files and the data card into the folder; returns row counts.

    Memory use is bounded by the held-out sets, a digest per training problem and one batch of rows.
    Raises DataError or ProblemsError for unusable rows, and whatever require_scorers raises.
    """
    pictures = PictureStore(folder, config.data.image_max_pixels)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        evaluated = {
            name: write_held_out(config, sources, Path(work) / name, pictures)
            for name, sources in held_out_files(config).items()
        }
        held_out = read_prepared([Path(work) / name for name in evaluated])
        trained, hits = write_training(config, Path(work) / TRAIN_FILE, held_out, pictures)
        pictures.keep(images_of([Path(work) / name for name in (TRAIN_FILE, *evaluated)]))
        counted = itertools.chain(trained, *evaluated.values())
        sets = [set_entry(source, count, pictures) for source, count in counted]
        write_card(make_card(sets, hits, config.data.contamination), folder)
        for name in (TRAIN_FILE, *evaluated):
            (folder / name).parent.mkdir(exist_ok=True)
            (Path(work) / name).replace(folder / name)
    return {
        "train_rows": sum(count.kept for _, count in trained),
        "eval_rows": sum(count.kept for _, count in evaluated[EVAL_FILE]),
        "benchmark_rows": {
            name: sum(count.kept for _, count in evaluated[benchmark_file(name)])
            for name in benchmark_sources(config)
        },
        "contaminated_rows": len({(hit.train_set, hit.row) for hit in hits}),
        "sets": {count.name: {"read": count.read, "kept": count.kept} for _, count in trained},
    }


def read_prepared(files: Sequence[Path]) -> dict[str, list[Problem]]:
    """The distinct problems of prepared held-out files by set; a benchmark may be in several."""
    found: dict[str, dict[tuple[str, ...], Problem]] = {}
    for file in files:
        for problem in read_held_out(file).problems:
            asked = (problem.text, *_digests(problem.images))
            found.setdefault(problem.dataset, {}).setdefault(asked, problem)
    return {name: list(problems.values()) for name, problems in found.items()}


def held_out_files(config: ChainConfig) -> dict[str, list[Source]]:
    """The sets of each held-out file: all of data.eval in one file, each benchmark in its own."""
    benchmarks = {
        benchmark_file(name): [source] for name, source in benchmark_sources(config).items()
    }
    return {EVAL_FILE: eval_sources(config), **benchmarks}


def write_held_out(
    config: ChainConfig, sources: Sequence[Source], path: Path, pictures: PictureStore
) -> list[Counted]:
    """Write all rows of the given evaluation sets to one file."""
    counts, rows = list[Counted](), list[Row]()
    path.parent.mkdir(exist_ok=True)
    sources = [here(config, source) for source in sources]
    require_one_grader(sources)
    for source in sources:
        count = SetCount(source.name)
        counts.append((source, count))
        usable = iterate_source(config, source, count, pictures)
        found = [to_row(source, *pair) for pair in usable]
        for row in found:
            if path.parent.name == BENCHMARKS and "images" in row:
                row["images"] = [f"../{name}" for name in row["images"]]
        count.answers.update(answer_kind(row["reward_model"]["ground_truth"]) for row in found)
        count.require_usable(
            0.0, "Evaluation sets must be complete: correct the rows or data.columns."
        )
        num_distinct = len(merge_repeats(source.path or source.name, list(map(read_chat, found))))
        if source.known.num_items not in (None, num_distinct):
            raise ProblemsError(
                f"{source.key}: {source.name} has {num_distinct} problems, but the complete set "
                f"has {source.known.num_items}: accuracy would not match published figures; use "
                "the complete file"
            )
        rows += found
    write_rows(iter([rows]), schema_of(iter([rows])), path)
    return counts


def write_training(
    config: ChainConfig,
    path: Path,
    held_out: Mapping[str, Sequence[Problem]],
    pictures: PictureStore,
) -> tuple[list[Counted], list[Hit]]:
    """Write the usable, distinct problems of data.train; returns counts and contamination hits."""
    counts, seen, data_sources, ends = list[Counted](), Seen(), set[str](), list[int]()
    with tempfile.TemporaryFile("w+", dir=path.parent, encoding="utf-8") as spool:
        owners = list[SetCount]()  # the set of each kept row
        for source in train_sources(config):
            source, count = here(config, source), SetCount(source.name)
            counts.append((source, count))
            for problem, row in iterate_source(config, source, count, pictures):
                if (reason := seen.add(problem, len(owners))) is not None:
                    count.remove(reason, f"{problem.id}: {problem.text}")
                    continue
                owners.append(count)
                prepared = to_row(source, problem, row)
                data_sources.add(prepared["data_source"])
                spool.write(json.dumps(prepared, ensure_ascii=False) + "\n")
            count.require_usable(config.data.max_refused_ratio, advice_for(config))
            ends.append(len(owners))
        require_scorers(data_sources, config.reward, config.custom_reward)
        for number in seen.contradicted:
            owners[number].remove(CONTRADICTED, f"row {number} of the distinct problems")
        hits, dropped = _find_held_out(config, spool, ends, counts, held_out, seen.contradicted)
        if len(dropped) == len(owners):
            read = describe([one for _, one in counts])
            raise DataError(f"no training problems are left in data.train: {read}")

        def kept(is_last: bool) -> Iterator[Row]:
            for number, row in _reread(spool):
                if number not in dropped:
                    owners[number].answers[answer_kind(row["reward_model"]["ground_truth"])] += (
                        is_last
                    )
                    yield row

        schema = schema_of(batched(kept(is_last=False), BATCH_ROWS))
        write_rows(batched(kept(is_last=True), BATCH_ROWS), schema, path)
    return counts, hits


def _find_held_out(
    config: ChainConfig,
    spool: IO[str],
    ends: Sequence[int],
    counts: Sequence[Counted],
    held_out: Mapping[str, Sequence[Problem]],
    left_out: Set[int],
) -> tuple[list[Hit], set[int]]:
    """Contamination hits, and the numbers of all dropped rows; `ends` are the sets' end rows."""
    hits, left_out = list[Hit](), set(left_out)
    for (source, count), (first, end) in zip(counts, itertools.pairwise([0, *ends]), strict=True):

        def texts(first: int = first, end: int = end) -> Iterator[str]:
            return (row["problem"] for _, row in _reread(spool, first, end))

        sets = dict(held_out)
        if source.is_generated:
            sets.pop(source.known.name, None)  # disjoint by construction
        found = find_hits(count.name, texts, sets) if sets and end > first else []
        found = _with_equal_pictures(found, spool, first, sets)
        rows, warning = rows_to_drop(found, end - first, config.data.contamination)
        dropped = {first + row for row in rows}
        if warning:
            logger.warning(warning)
        new = dropped - left_out
        for number, hit in {first + hit.row: hit for hit in found}.items():
            if number in new:
                count.remove(HELD_OUT, f"{hit.evaluation_set} {hit.item}: {hit.train_text}")
        hits += found
        left_out |= dropped
    return hits, left_out


def _with_equal_pictures(
    hits: Sequence[Hit], spool: IO[str], first: int, sets: Mapping[str, Sequence[Problem]]
) -> list[Hit]:
    """The hits whose problems have the same pictures; `first` is the set's first row."""
    rows = {first + hit.row for hit in hits}
    end = max(rows, default=first - 1) + 1
    reread = _reread(spool, first, end)
    shown = {number: row.get("images") for number, row in reread if number in rows}
    asked = {(name, one.id): one.images for name, problems in sets.items() for one in problems}
    return [
        hit
        for hit in hits
        if _digests(shown[first + hit.row]) == _digests(asked[hit.evaluation_set, hit.item])
    ]


def _digests(images: Sequence[str] | None) -> list[str]:
    return [Path(name).stem for name in images or ()]


def describe(counts: list[SetCount]) -> str:
    """Row counts of each set, on one line."""
    return "; ".join(
        f"{one.name}: {one.read} rows read, {one.kept} kept"
        + "".join(
            f", {number} with {reason}" for reason, number in (one.refused + one.removed).items()
        )
        for one in counts
    )


def schema_of(batches: Iterator[list[Row]]) -> Any:
    """The Arrow schema for all rows. Raises DataError if a column has conflicting types."""
    import pyarrow as pa

    schemas: list[Any] = []
    for batch in batches:
        names = {name: None for row in batch for name in row}
        try:
            schema = pa.Table.from_pylist([{**names, **row} for row in batch]).schema
            schemas = [pa.unify_schemas([*schemas, schema], promote_options="permissive")]
        except pa.ArrowException as error:
            raise DataError(
                "the rows of data.train or data.eval have conflicting types in extra_info: "
                f"{error}; correct them"
            ) from None
    return schemas[0]


def write_rows(batches: Iterator[list[Row]], schema: Any, path: Path) -> None:
    """Write batches of rows to one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def images_of(files: Sequence[Path]) -> set[str]:
    """The names of all pictures in prepared files."""
    import pyarrow.parquet as pq

    found = set[str]()
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS):
            if "images" in batch.schema.names:
                found |= {name for names in batch["images"].to_pylist() for name in names or ()}
    return {name.removeprefix("../") for name in found}


def _reread(spool: IO[str], first: int = 0, end: int | None = None) -> Iterator[tuple[int, Row]]:
    spool.seek(0)
    for number, line in enumerate(itertools.islice(spool, first, end), start=first):
        yield number, json.loads(line)
