"""Recorded draws: the groups that each training step trained on, to train on them again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo_core.checkpoint.state import groups_files, read_groups
from dapo_core.draw.account import Draw, TokenAccount
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.metrics.log import writing
from durable import publish

DRAWS = "draws"


def record_draw(output: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the step's groups, with tokens, log-probs, scores and versions, in place of earlier.

    Raises CheckpointError if the disk does not take them.
    """
    folder = _folder(output, step)
    partial = folder.with_suffix(".partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in groups_files(groups, []).items():
            (partial / name).write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        publish(partial, folder)


class RecordedDraws:
    """The draws of another training, in place of a Sampler: engines sample nothing."""

    def __init__(self, output: Path, num_steps: int) -> None:
        """Raise ConfigError unless the training in `output` recorded all of these steps."""
        self._output = output
        self.surplus: list[Group] = []
        self.unfinished: list[GroupRequest] = []
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in (output / DRAWS).glob("step_*"))
        recorded = {int(name[1]) for name in names if name}
        if missing := sorted(set(range(1, num_steps + 1)) - recorded):
            raise ConfigError(
                f"{output / DRAWS} has the draws of {len(recorded)} steps, and not that of step "
                f"{missing[0]}, but train.total_steps={num_steps}: record all with "
                "train.record_draws=true, or lower train.total_steps"
            )

    def draw(self, step: int, while_waiting: Callable[[], None]) -> Draw:
        """Return the recorded groups of the step; raises CheckpointError if they are damaged."""
        while_waiting()
        folder = _folder(self._output, step)
        try:
            groups, _ = read_groups(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"the recorded draw {folder} cannot be read ({error.__cause__!r}); record it "
                f"again, or end before it with train.total_steps={step - 1}"
            ) from error
        account = TokenAccount()
        for group in groups:
            account.add_finished(group)
            account.add("kept", group.rollouts)
        return Draw(groups, len(groups), account)

    def pause(self) -> None:
        """Do nothing: no group is in flight."""

    def redraw(
        self, step: int, surplus: Sequence[Group], unfinished: Sequence[GroupRequest]
    ) -> None:
        """Do nothing: the recorded draws have the groups that were sampled again."""


def _folder(output: Path, step: int) -> Path:
    return output / DRAWS / f"step_{step:06d}"
