"""Times the work on a training set before training: finding evaluation problems in it, and
tokenizing it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dapo_core.config.training import PromptsConfig
from dapo_core.draw.tokenizing import tokenized_prompts
from dapo_core.model.pretrained import load_tokenizer
from eval.problems.files import iterate_problems
from eval.problems.items import Problem
from eval.problems.registry import find_set
from eval.problems.rows import Unusable
from tasks.data.contamination import find_hits

EXAMPLE = """examples; each set is a local file:
  .venv/bin/python bench/data.py dapo-math-17k-clean=dapo.parquet math500=math500.jsonl
  .venv/bin/python bench/data.py dapo-math-17k-clean=dapo.parquet --model Qwen3-8B --copies 100
"""


def main() -> None:
    """Measure what the arguments name and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", help="NAME=FILE of a registered training set")
    parser.add_argument("held_out", nargs="*", help="NAME=FILE of registered evaluation sets")
    parser.add_argument(
        "--model", type=Path, help="model folder; its tokenizer is timed on the training set"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        help="tokenize this many copies of the training set (default: %(default)s)",
    )
    options = parser.parse_args()
    texts = list(dict.fromkeys(problem.text for problem in problems_of(options.train)))
    sets = {given.partition("=")[0]: list(problems_of(given)) for given in options.held_out}
    if sets:
        time_contamination(options.train.partition("=")[0], texts, sets)
    if options.model is not None:
        time_tokenizing(Path(options.train.partition("=")[2]), options.model, options.copies)


def problems_of(given: str) -> Iterator[Problem]:
    """Yields the usable problems of NAME=FILE."""
    name, _, path = given.partition("=")
    for _, _, problem in iterate_problems(Path(path), find_set(name).schemas):
        if not isinstance(problem, Unusable):
            yield problem


def time_contamination(train_set: str, texts: list[str], sets: dict[str, list[Problem]]) -> None:
    """Print a row per evaluation set: its problems, those found in the texts, and CPU seconds."""
    print(f"{len(texts):,} distinct problems of {train_set}\n")
    print("| evaluation set | problems | found | training rows | word for word | CPU s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, problems in sets.items():
        started = time.process_time()
        hits = find_hits(train_set, lambda: iter(texts), {name: problems})
        seconds = time.process_time() - started
        rows, equal = {hit.row for hit in hits}, {hit.row for hit in hits if hit.is_equal}
        found = len({hit.item for hit in hits})
        print(
            f"| {name} | {len(problems):,} | {found:,} | {len(rows):,} | {len(equal):,} | "
            f"{seconds:.1f} |"
        )


def time_tokenizing(path: Path, model: Path, copies: int) -> None:
    """Print prompts, seconds, CPU seconds, and the growth of the process's peak memory."""
    import pyarrow.parquet as pq

    tokenizer = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        table, train = pq.read_table(path), Path(folder) / "train.parquet"
        with pq.ParquetWriter(train, table.schema) as writer:
            for _ in range(copies):
                writer.write_table(table, row_group_size=1000)
        before, started, used = peak_bytes(), time.monotonic(), time.process_time()
        prompts = tokenized_prompts(
            train, model, tokenizer, Path(folder), PromptsConfig(too_long="drop")
        )
        seconds = time.monotonic() - started
        cpu_seconds = time.process_time() - used
        print(
            f"\n{len(prompts):,} prompts, {int(prompts.lengths.sum()):,} tokens: {seconds:.1f} s, ",
            end="",
        )
        print(f"{cpu_seconds:.1f} s of CPU, peak memory ", end="")
        print(f"{(peak_bytes() - before) / 1024**2:.0f} MiB higher")


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
