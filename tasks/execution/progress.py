"""Progress of a stage's command, from the lines that it appends to a JSON lines file."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from durable import JsonLinesFollower

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 0.5
STEP_PARTS = {
    "sampler/accuracy": "right {:.1%}",
    "response_length/mean": "length {:.0f} tokens",
    "sampler/kept_groups": "kept {:.0f} groups",
    "timing_s/step": "{:.1f} s",
}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """How far something is; the console shows it as a bar on a terminal, else as a line."""

    what: str
    done: int
    total: int
    state: str

    def __str__(self) -> str:
        return f"{self.what} {self.done}/{self.total}: {self.state}"

    def log(self, send_to_api: bool = True) -> None:
        """Log it; `send_to_api`: also to the Prefect UI."""
        logger.info("%s", self, extra={"progress": self, "send_to_api": send_to_api})


class StepProgress:
    """The progress of a training after each of its steps."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._first_step: int | None = None
        self._began = 0.0

    def after(self, step: int, metrics: Row) -> Progress:
        """The progress after a step with these metrics, a line of metrics.jsonl or its content;
        step 0 is the validation before training.
        """
        known = {name: value for name, value in metrics.items() if value is not None}
        if step == 0:
            accuracy = known.get("validation/accuracy")
            state = "validated before training"
            if accuracy is not None:
                state = f"accuracy {accuracy:.1%} on held-out problems before training"
            return self._at(0, state)
        parts = [text.format(known[name]) for name, text in STEP_PARTS.items() if name in known]
        now = known.get("wall_time", time.time())
        if self._first_step is None or step <= self._first_step:  # resumed from a checkpoint
            self._first_step, self._began = step, now
        else:
            pace = (now - self._began) / (step - self._first_step)
            parts.append(f"about {pace * (self.total_steps - step):.0f} s left")
        return self._at(step, ", ".join(parts))

    def _at(self, step: int, state: str) -> Progress:
        return Progress("training step", step, self.total_steps, state)


@contextmanager
def following(path: Path, on_rows: Callable[[list[Any]], None]) -> Iterator[None]:
    """Call `on_rows` in a thread with the new lines of a JSON lines file, until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        log, is_over = JsonLinesFollower(path), False
        while not is_over:
            is_over = ended.wait(FOLLOW_SECONDS)  # before reading: the last lines count
            if rows := log.read():
                on_rows(rows)
        log.close()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
