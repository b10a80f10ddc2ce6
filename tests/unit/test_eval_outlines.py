"""Rows without their texts give every figure that whole rows give, in a fraction of the memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.compare import compare_evaluations
from eval.results import load_evaluation, read_rows, write_rows
from tests.evaluations import write_results


def thinking_results(folder: Path, outcomes: str, model: str) -> Path:
    write_results(folder, outcomes, model=model)
    rows = [
        replace(row, response=None if row.response is None else "long " * 4000, reasoning="<think>hm</think>")
        for row in read_rows(folder).values()
    ]
    write_rows(folder, rows)
    return folder


def figures_of(*folders: Path, with_texts: bool) -> dict[str, Any]:
    fields = asdict(compare_evaluations(*(load_evaluation(folder, with_texts) for folder in folders)))
    for flip in (*fields["lost"], *fields["gained"]):
        assert (flip["after"].pop("response") is not None) is with_texts
        flip["before"].pop("response")
    return fields


def test_outlines_give_the_figures_of_whole_rows(tmp_path: Path) -> None:
    folders = (
        thinking_results(tmp_path / "a", "rwntf rrrr", "m"),
        thinking_results(tmp_path / "b", "wrrrr rrww", "n"),
    )
    assert figures_of(*folders, with_texts=False) == figures_of(*folders, with_texts=True)
    digests = [load_evaluation(folders[0], with_texts).digest for with_texts in (True, False)]
    assert digests[0] == digests[1] != load_evaluation(folders[1], with_texts=False).digest


def test_outlines_take_little_memory(tmp_path: Path) -> None:
    folder = thinking_results(tmp_path / "a", "r" * 400, "m")  # 400 responses of 20 kB: 8 MB
    tracemalloc.start()
    try:
        load_evaluation(folder, with_texts=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
