"""A training by another trainer, from its rendered command to its last checkpoint: `dapo train` of such a recipe.

    supervisor -> dapo train -> supervisor -> the trainer, or the client of a Ray job
                   |  ^------- its lines, from trainer/trainer.log
                   +-- metrics.jsonl, trackers, progress: as of a training of our own

The trainer writes its checkpoints below checkpoints/ and continues from the newest by itself.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import CHECKPOINTS, step_folders
from dapo_core.checkpoint.others import NEWEST_FILE, OtherCheckpoint, newest_other, other_checkpoints
from dapo_core.checkpoint.resume import lock_checkpoints, move_aside, require_resume
from dapo_core.digests import file_digest
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.identity import refuse_other_training, training_identity
from dapo_core.metrics import METRICS_FILE, MetricsLog, format_step
from dapo_core.model_folder import copy_model_files, require_model_folder
from dapo_core.stopping import StopRequest, raising_stopped
from dapo_core.trackers import TRACKERS_FILE, require_trackers, tracking
from durable import read_json_lines, write_atomically
from interop.logs import LogParser, Record
from tasks.config import ChainConfig
from tasks.external.jobs import as_job
from tasks.external.launch import TRAINER_FOLDER, Inputs, Start, start_of
from tasks.processes.child import ChildProcessFailed, background_command

logger = logging.getLogger(__name__)

COMMAND_FILE, LOG_FILE = "command.sh", "trainer.log"
IDENTITY_FILE = "identity.json"  # beside what was rendered for the trainer
MODEL_FILES_FOLDER = "model"  # configuration and tokenizer of the model, for a converter
# The line of a traceback that says what happened, behind Ray's or torch's prefix.
_REASON = re.compile(r"(?:^|[\s)\]])(?:\w+\.)*(?P<name>\w+(?:Error|Exception|Interrupt|MandatoryValue))\b(?!\()")
# A trainer that ends with one of these before its first step would do so again.
_LASTING = re.compile(
    r"(Assertion|Attribute|FileNotFound|HFValidation|Import|InterpolationKey|Key|ModuleNotFound|Name|NotImplemented|"
    r"Type|Validation)Error|MissingMandatoryValue|Config\w+"
)

OnStep = Callable[[int, dict[str, float]], None]
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class OtherResult:
    """Where training ended."""

    checkpoint: Path
    steps: int


def train_with_other(
    config: ChainConfig, inputs: Inputs, on_step: OnStep | None = None, on_line: OnLine | None = None
) -> OtherResult:
    """Have the trainer of train.backend train; metrics.jsonl and checkpoints are in `inputs.output`.

    It continues from its newest complete checkpoint there. `on_step(step, metrics)` is called after each step,
    `on_line` with each line that it writes. On SIGTERM or SIGINT it is ended, and TrainingStopped raised. Raises
    ConfigError before it starts, ChildProcessFailed with its last lines when it fails, and CheckpointError when it
    ends before its last step's checkpoint.
    """
    folder, total = inputs.output / CHECKPOINTS, config.train.total_steps
    kept_steps = {*config.checkpoint.keep_steps, *config.checkpoint_steps}
    with StopRequest() as stop, raising_stopped(stop, lambda: _continued_from(folder, total)):
        require_resume(config.checkpoint.resume)
        require_trackers(config.train.trackers)
        require_model_folder(inputs.model)
        start = start_of(config, inputs)
        identity = identity_of(config, inputs)
        with lock_checkpoints(folder):
            if config.checkpoint.resume == "never":
                _set_aside(folder)
                start = start_of(config, inputs)  # what is rendered depends on the checkpoints that are there
            refuse_own_checkpoints(folder)
            done = _newest(folder, total)
            if done is not None:
                refuse_checkpoint_of_another(config, inputs, done.path, identity)
            log = MetricsLog(inputs.output, done.step if done else None)
            if done is None or done.step < total:
                record_identity(inputs, identity)
                with tracking(config, inputs.output, done is not None) as trackers:

                    def report(step: int, metrics: dict[str, float]) -> None:
                        log.append(step, None, metrics)
                        trackers.on_step(step, metrics)
                        if on_step is not None:
                            on_step(step, metrics)
                        _tidy(folder, config.checkpoint.keep_last, kept_steps)

                    _run(config, start, inputs, Progress(report, on_line))
            newest = _require_finished(config, inputs.output)
            _tidy(folder, 1, kept_steps)
    return OtherResult(newest.path, newest.step)


class Progress:
    """The lines of a trainer as steps.

    A step of verl's is reported at once; one of MindSpeed's when another line follows it, since it may be wrapped
    and grow with each line.
    """

    def __init__(self, on_step: OnStep, on_line: OnLine | None = None) -> None:
        self.num_steps = 0
        self._on_step = on_step
        self._on_line = on_line or (lambda line: None)
        self._parser = LogParser()
        self._held: Record | None = None

    def feed(self, line: str) -> None:
        """Take the next line; of a step's line, the numbers go on under our names."""
        record = self._parser.feed(line)
        if self._held is not None and (record is None or record.step != self._held.step):
            self.flush()
        self._held = record
        if record is None:
            self._on_line(line)
        elif record.trainer == "verl":  # minutes may pass before its next line
            self.flush()

    def flush(self) -> None:
        """Report the step whose line came last."""
        if (record := self._held) is not None:
            self._held = None
            self.num_steps += record.step > 0
            self._on_line(format_step(record.step, record.metrics))
            self._on_step(record.step, record.metrics)


def _run(config: ChainConfig, start: Start, inputs: Inputs, progress: Progress) -> None:
    """Run the trainer to its end."""
    place, backend = inputs.folder, config.train.backend
    start.write_files(inputs)
    copy_model_files(inputs.model, place / MODEL_FILES_FOLDER)
    write_atomically(place / COMMAND_FILE, f"exec {shlex.join(start.argv)}\n")
    try:
        with (
            as_job(config.external, start, place / COMMAND_FILE) as (argv, env),
            background_command(
                argv,
                log_path=place / LOG_FILE,
                label=backend,
                env=env,
                grace_seconds=config.flow.stop_seconds / 2,  # of the stage's own
                cwd=config.external.source,
            ) as process,
        ):
            try:
                process.hand_lines_to(progress.feed)
            finally:
                progress.flush()
    except ChildProcessFailed as error:
        raise explained(error, progress.num_steps > 0) from None


def explained(error: ChildProcessFailed, has_begun: bool) -> ChildProcessFailed:
    """The error, its summary with the reason among its last lines; lasting where the next attempt would end so."""
    lines = str(error).split("\n  | ")[1:]
    found = [(line, match["name"]) for line in lines if (match := _REASON.search(line))]
    if found:
        reason, name = found[-1]
        error.summary = f"{error.summary}: {reason.strip()}"
        error.is_lasting |= not has_begun and (_LASTING.fullmatch(name) is not None)
    return error


def _newest(folder: Path, total: int) -> OtherCheckpoint | None:
    """The checkpoint that the trainer continues from; its file names the newest that is there."""
    found = newest_other(folder)
    if found is None:
        return None
    if found.step > total:
        raise ConfigError(
            f"{found.path} is of training step {found.step}, and train.total_steps={total}: raise it, or name "
            "another --output"
        )
    newest = folder / NEWEST_FILE
    if newest.read_text(encoding="ascii").strip() != str(found.step):
        logger.warning("the checkpoint that %s names is gone; training continues from %s", newest, found.path.name)
        write_atomically(newest, str(found.step))
    return found


def _require_finished(config: ChainConfig, output: Path) -> OtherCheckpoint:
    """The checkpoint of the last step; raises CheckpointError where the trainer left none, or no metrics."""
    backend, total = config.train.backend, config.train.total_steps
    newest = newest_other(output / CHECKPOINTS)
    if newest is None or newest.step < total:
        log = output / TRAINER_FOLDER / LOG_FILE
        if newest is None:
            raise CheckpointError(
                f"{backend} ended with exit code 0 and no checkpoint before train.total_steps={total}; its "
                f"lines are in {log}"
            )
        raise CheckpointError(
            f"{backend} ended with exit code 0 and its last checkpoint after step {newest.step}, not after "
            f"train.total_steps={total}: lower it to what it trains (verl ends with its last epoch), "
            f"or look at {log}"
        )
    if not read_json_lines(output / METRICS_FILE):
        raise CheckpointError(
            f"{backend} wrote no line of metrics that is known (verl: step:N - name:value - ...), so that a "
            f"report would show nothing of it: leave its console logger on, and look at "
            f"{output / TRAINER_FOLDER / LOG_FILE}"
        )
    return newest


def _tidy(folder: Path, keep_last: int, kept_steps: set[int]) -> None:
    """Remove complete checkpoints but the newest and those to keep."""
    for other in other_checkpoints(folder)[:-keep_last]:
        if other.step not in kept_steps:
            logger.info("checkpoint %s is removed", other.path.name)
            shutil.rmtree(other.path, ignore_errors=True)  # the trainer may be removing it as well


def _set_aside(folder: Path) -> None:
    """Move checkpoints, metrics and the record of trackers beside the new ones; metrics go last."""
    old = [path for path in folder.iterdir() if path.name != "lock"]
    others = [folder.parent / name for name in (TRACKERS_FILE, METRICS_FILE)]
    old += [path for path in others if path.exists()]
    move_aside(folder, old)


def _continued_from(folder: Path, total: int) -> str | None:
    if (newest := newest_other(folder)) is None:
        return None
    return f"; its newest checkpoint is {newest.path} of {total} steps; the same command continues from there"


@dataclass(frozen=True)
class _Rows:
    digest: str


def identity_of(config: ChainConfig, inputs: Inputs) -> dict[str, Any]:
    """The values that all attempts of one training share: those of a training of our own, and the trainer's."""
    external = config.external
    rows = {name: getattr(external, name) for name in ("train_rows", "held_out_rows")}
    return {
        **training_identity(config, _Rows(file_digest(inputs.data)), inputs.model),
        "external.strategy": external.strategy,
        "external.overrides": list(external.overrides),
        **{f"external.{name}": _content(Path(path)) for name, path in rows.items() if path is not None},
    }


def refuse_checkpoint_of_another(
    config: ChainConfig, inputs: Inputs, checkpoint: Path, identity: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if the output's checkpoint is of another training than `identity`.

    checkpoint.allow_changed names what may differ. A checkpoint without a record was put there by a person.
    """
    record = inputs.folder / IDENTITY_FILE
    if not record.is_file():
        return
    before = json.loads(record.read_text(encoding="utf-8"))
    for change in refuse_other_training(checkpoint, before, identity, config.checkpoint.allow_changed):
        logger.warning("checkpoint.allow_changed: continuing from %s with %s", checkpoint.name, change)


def refuse_own_checkpoints(folder: Path) -> None:
    """Raise CheckpointError if the folder has checkpoints of our own trainer, which no other one continues."""
    if own := step_folders(folder):
        raise CheckpointError(
            f"{folder} has {len(own)} checkpoints of our own trainer, the newest {own[-1].name}, and another "
            "trainer would start from the model beside them; name another --output, set train.backend=own to go "
            "on, or checkpoint.resume=never to set them aside"
        )


def record_identity(inputs: Inputs, identity: Mapping[str, Any]) -> None:
    """Write what `refuse_checkpoint_of_another` compares with."""
    inputs.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(inputs.folder / IDENTITY_FILE, json.dumps(identity, indent=2))


def _content(path: Path) -> str:
    """The digest of a file; the path of a folder."""
    return file_digest(path) if path.is_file() else str(path)
