"""metrics.jsonl and the console line of a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dapo_core.errors import CheckpointError
from durable import append_json_line, read_json_lines, write_atomically

METRICS_FILE = "metrics.jsonl"


def format_step(step: int, metrics: Mapping[str, float]) -> str:
    """Return the console line `step:N - key:value - ...`, the format of verl's log."""
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())])


class MetricsLog:
    """metrics.jsonl, one line per step; step 0 is the validation before training.

    Truncated to `last_step`, or emptied if None, without damaged lines. Raises CheckpointError if
    the file cannot be written.
    """

    def __init__(self, folder: Path, last_step: int | None) -> None:
        self.path = folder / METRICS_FILE
        last_step = -1 if last_step is None else last_step
        lines = [line for line in read_json_lines(self.path) if isinstance(line, dict)]
        kept = [line for line in lines if isinstance(line.get("step"), int)]
        kept = [line for line in kept if line["step"] <= last_step]
        with writing(self.path):
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Write one step's line to disk; non-finite numbers become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "wall_time": time.time(), "policy_version": policy_version, **finite}
        with writing(self.path):
            append_json_line(self.path, line)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSError into CheckpointError, which is not retried."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}; free disk space, or move --output or store.path "
            "to a larger disk. Training then resumes from its latest checkpoint"
        ) from error
