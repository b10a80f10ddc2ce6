"""JSON lines files of single steps in a training's output: responses as text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_core.metrics.log import writing
from durable import iterate_json_lines, publish

ROLLOUTS = "rollouts"  # responses that were trained on
GENERATIONS = "generations"  # responses of validations
NUM_SHOWN_PROMPTS = 2  # of ROLLOUTS, in pages and trackers
_FIELDS = {"set", "prompt", "response", "answer", "gold", "score", "verdict", "truncated"}
_NAME = re.compile(r"step_(\d+)\.jsonl")


def step_file(output: Path, kind: str, step: int) -> Path:
    """Return the path of a step's file, whether or not it exists."""
    return output / kind / f"step_{step}.jsonl"


def saved_steps(output: Path, kind: str) -> list[int]:
    """Return the steps that have a file, in order."""
    names = (_NAME.fullmatch(path.name) for path in (output / kind).glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the responses in a file; skips damaged lines."""
    for row in iterate_json_lines(path):
        if isinstance(row, dict) and row.keys() >= _FIELDS:
            yield row


def shown_rows(output: Path, kind: str, step: int) -> list[Mapping[str, Any]]:
    """Return the responses of a step to show: all of GENERATIONS, some of ROLLOUTS; [] without."""
    rows = read_rows(step_file(output, kind, step))
    return list(rows) if kind == GENERATIONS else contrasting(rows, NUM_SHOWN_PROMPTS)


def contrasting(rows: Iterable[Mapping[str, Any]], num_prompts: int) -> list[Mapping[str, Any]]:
    """Return the first right and the first other response to each of the first prompts.

    `rows` are those of ROLLOUTS; no more of them are read than needed.
    """
    found: list[Mapping[str, Any]] = []
    by_prompt = itertools.groupby(rows, key=lambda row: row.get("prompt_number"))
    for _, siblings in itertools.islice(by_prompt, num_prompts):
        outcomes: dict[bool, Mapping[str, Any]] = {}
        for row in siblings:
            outcomes.setdefault(row["verdict"] == "right", row)
        found += outcomes.values()
    return found


class StepFiles:
    """The files of one kind, each written once its step is over."""

    def __init__(self, output: Path, kind: str) -> None:
        self.output = output
        self.kind = kind

    def begin(self, last_step: int | None) -> None:
        """Delete the files after `last_step`, or all if None: those steps are to be trained again.

        Files that were being written are deleted as well.
        """
        for partial in (self.output / self.kind).glob("*.partial"):
            partial.unlink()
        for step in saved_steps(self.output, self.kind):
            if last_step is None or step > last_step:
                step_file(self.output, self.kind, step).unlink()

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a step's file atomically, one row at a time. Raises CheckpointError."""
        path = step_file(self.output, self.kind, step)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                for row in rows:
                    line = json.dumps(row, ensure_ascii=False) + "\n"
                    file.write(line.encode(errors="surrogatepass"))
            publish(partial, path)
