"""The training and held-out files of a recipe, from the sets that it names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dapo_core.errors import DataError
from dapo_core.reward.routing import require_scorers
from eval.problems import ProblemsError
from eval.problems.registry import read_held_out
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE
from tasks.data.reading import CONTRADICTED, Seen, SetCount, advice_for, batched, iterate_source, to_row
from tasks.data.sources import eval_sources, train_sources

BATCH_ROWS = 1000

Row = dict[str, Any]


def build_dataset(config: ChainConfig, folder: Path) -> Mapping[str, Any]:
    """Write the two files into the folder; returns their row counts.

    Memory is that of the held-out sets, a digest of each training problem and one batch of rows. Raises DataError
    or ProblemsError for unusable rows of the user's files, and what require_scorers raises.
    """
    with tempfile.TemporaryDirectory(dir=folder) as work:
        files = [Path(work) / name for name in (EVAL_FILE, TRAIN_FILE)]
        num_eval, counts = write_held_out(config, files[0]), write_training(config, files[1])
        for file in files:
            file.replace(folder / file.name)
    return {
        "train_rows": sum(count.kept for count in counts),
        "eval_rows": num_eval,
        "sets": {count.name: {"read": count.read, "kept": count.kept} for count in counts},
    }


def write_held_out(config: ChainConfig, path: Path) -> int:
    """Write the sets of data.eval as one file, every row of them; returns how many problems they have."""
    counts, rows = [], list[Row]()
    for source in eval_sources(config):
        counts.append(SetCount(source.name))
        found = [to_row(source, *pair) for pair in iterate_source(config, source, counts[-1])]
        counts[-1].require_usable(0.0, "An evaluation set is complete: correct the rows or data.columns.")
        num_distinct = len({json.dumps(row["prompt"]) for row in found})
        if source.known.num_items not in (None, num_distinct):
            raise ProblemsError(
                f"{source.key}: {source.name} has {num_distinct} problems, but {source.known.num_items} when "
                "complete: accuracy would not compare with published figures; use the complete file"
            )
        rows += found
    write_rows(iter([rows]), schema_of(iter([rows])), path)
    return len(read_held_out(path).problems)


def write_training(config: ChainConfig, path: Path) -> list[SetCount]:
    """Write the usable, distinct problems of data.train; returns what became of each set's rows."""
    counts, seen, data_sources = [], Seen(), set[str]()
    with tempfile.TemporaryFile("w+", dir=path.parent, encoding="utf-8") as spool:
        owners = list[SetCount]()  # of each kept row
        for source in train_sources(config):
            count = SetCount(source.name)
            counts.append(count)
            for problem, row in iterate_source(config, source, count):
                if (reason := seen.add(problem, len(owners))) is not None:
                    count.remove(reason, f"{problem.id}: {problem.text}")
                    continue
                owners.append(count)
                prepared = to_row(source, problem, row)
                data_sources.add(prepared["data_source"])
                spool.write(json.dumps(prepared, ensure_ascii=False) + "\n")
            count.require_usable(config.data.max_refused_ratio, advice_for(config))
        require_scorers(data_sources, config.reward, config.custom_reward)
        for number in seen.contradicted:
            owners[number].remove(CONTRADICTED, f"row {number} of the distinct problems")
        if len(seen.contradicted) == len(owners):
            raise DataError(f"no training problem is left of data.train: {describe(counts)}")

        def kept() -> Iterator[list[Row]]:
            return batched(_reread(spool, lambda number: number not in seen.contradicted), BATCH_ROWS)

        write_rows(kept(), schema_of(kept()), path)
    return counts


def describe(counts: list[SetCount]) -> str:
    """What became of the rows of each set, on one line."""
    return "; ".join(
        f"{one.name}: {one.read} rows read, {one.kept} kept"
        + "".join(f", {number} with {reason}" for reason, number in (one.refused + one.removed).items())
        for one in counts
    )


def schema_of(batches: Iterator[list[Row]]) -> Any:
    """The Arrow schema that holds all rows. Raises DataError when two have a column of different types."""
    import pyarrow as pa

    schemas: list[Any] = []
    for batch in batches:
        try:
            schema = pa.Table.from_pylist(batch).schema
            schemas = [pa.unify_schemas([*schemas, schema], promote_options="permissive")]
        except pa.ArrowException as error:
            raise DataError(
                f"rows of data.train or data.eval have an extra_info of different types: {error}; correct them"
            ) from None
    return schemas[0]


def write_rows(batches: Iterator[list[Row]], schema: Any, path: Path) -> None:
    """Write batches of rows as one parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _reread(spool: IO[str], is_kept: Callable[[int], bool]) -> Iterator[Row]:
    spool.seek(0)
    for number, line in enumerate(spool):
        if is_kept(number):
            yield json.loads(line)
