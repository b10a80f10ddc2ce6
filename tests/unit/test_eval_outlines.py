"""Rows without texts give the same statistics as complete rows, in a fraction of the memory."""

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.report.compare import compare_evaluations
from eval.results.rows import load_evaluation, read_rows, write_rows
from tests.evaluations import write_results


def thinking_results(folder: Path, outcomes: str, model: str) -> Path:
    write_results(folder, outcomes, model=model)
    rows = [
        replace(
            row,
            response=None if row.response is None else "long " * 4000,
            reasoning="<think>hm</think>",
        )
        for row in read_rows(folder).values()
    ]
    write_rows(folder, rows)
    return folder


def figures_of(*folders: Path, max_chars: int | None) -> dict[str, Any]:
    fields = asdict(
        compare_evaluations(*(load_evaluation(folder, max_chars) for folder in folders))
    )
    for flip in (*fields["lost"], *fields["gained"]):
        for side in ("before", "after"):
            response, num_left_out = flip[side].pop("response"), flip[side].pop("num_left_out")
            assert (len(response or ""), num_left_out) in (
                (0, 0),
                (max_chars, 20_000 - (max_chars or 0)),
                (6000, 14_000),
            )
    return fields


def test_outlines_give_the_statistics_of_complete_rows(tmp_path: Path) -> None:
    folders = (
        thinking_results(tmp_path / "a", "rwntf rrrr", "m"),
        thinking_results(tmp_path / "b", "wrrrr rrww", "n"),
    )
    assert (
        figures_of(*folders, max_chars=0)
        == figures_of(*folders, max_chars=9)
        == figures_of(*folders, max_chars=None)
    )
    digests = [load_evaluation(folders[0], max_chars).digest for max_chars in (None, 0)]
    assert digests[0] == digests[1] != load_evaluation(folders[1], max_chars=0).digest


def test_outlines_take_little_memory(tmp_path: Path) -> None:
    folder = thinking_results(tmp_path / "a", "r" * 400, "m")  # 400 responses of 20 kB: 8 MB
    tracemalloc.start()
    try:
        load_evaluation(folder, max_chars=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
