"""The responses that a run's training saved as text, for `dapo runs show --rollouts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_core.metrics.step_files import ROLLOUTS, contrasting, read_rows, saved_steps, step_file
from tasks.artifacts.artifact import StoreError
from tasks.runs.history import RecordedRun, training_folder

NUM_NAMED = 12  # steps


@dataclass
class Sample:
    """Some of a step's responses, and counts of all in its file."""

    path: Path
    step: int
    steps: list[int]  # that have a file
    shown: list[Mapping[str, Any]] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    num_damaged: int = 0  # lines

    @property
    def named_steps(self) -> str:
        """The steps, without those in the middle if there are many."""
        return _named(self.steps)


def _named(steps: Sequence[int]) -> str:
    names = [str(step) for step in steps]
    if len(names) > NUM_NAMED:
        names = [*names[: NUM_NAMED - 1], "...", names[-1]]
    return ", ".join(names)


def read_sample(run: RecordedRun, step: int | None, num_prompts: int) -> Sample:
    """Read a right and another response to each of some prompts; `step` None: the last saved one.

    Reads the file once, a line at a time. Raises StoreError if there is no such file.
    """
    folder = training_folder(run)
    steps = saved_steps(folder, ROLLOUTS)
    if not steps:
        raise StoreError(
            f"the training of run {run.id} has saved no responses in {folder / ROLLOUTS}: no step "
            "is over, it is of another trainer, or train.save_rollouts_every=0"
        )
    if step is not None and step not in steps:
        raise StoreError(
            f"the training of run {run.id} saved no responses of step {step}; it has steps "
            f"{_named(steps)} (train.save_rollouts_every)"
        )
    step = steps[-1] if step is None else step
    sample = Sample(step_file(folder, ROLLOUTS, step), step, steps)

    def counted() -> Iterator[dict[str, Any]]:
        for row in read_rows(sample.path):
            sample.verdicts[row["verdict"]] += 1
            yield row

    rows = counted()
    sample.shown = contrasting(rows, num_prompts)
    for _ in rows:
        pass
    with sample.path.open("rb") as file:
        sample.num_damaged = sum(1 for _ in file) - sample.verdicts.total()
    return sample
