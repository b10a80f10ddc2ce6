"""Training with another trainer, from the rendered command to the last checkpoint (`dapo train`).

    supervisor -> dapo train -> supervisor -> the trainer, or the client of a Ray job
                   |  ^------- its output, from trainer/trainer.log
                   +-- metrics.jsonl, progress: as in our own training

The trainer writes checkpoints below checkpoints/ and resumes from the newest by itself.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import CHECKPOINTS, step_folders
from dapo_core.checkpoint.identity import refuse_other_training, training_identity
from dapo_core.checkpoint.others import (
    NEWEST_FILE,
    OtherCheckpoint,
    newest_other,
    other_checkpoints,
)
from dapo_core.checkpoint.resume import lock_checkpoints, move_aside, require_resume
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.machine.digests import file_digest
from dapo_core.machine.stopping import StopRequest, raising_stopped
from dapo_core.metrics.log import METRICS_FILE, MetricsLog, format_step
from dapo_core.model.folder import copy_model_files, require_model_folder
from durable import read_json_lines, write_atomically
from interop.logs import LogParser, Record
from tasks.config import ChainConfig
from tasks.external.jobs import as_job
from tasks.external.launch import TRAINER_FOLDER, Inputs, Start, start_of
from tasks.processes.child import ChildProcessFailed, background_command

logger = logging.getLogger(__name__)

COMMAND_FILE, LOG_FILE = "command.sh", "trainer.log"
IDENTITY_FILE = "identity.json"  # beside the rendered files
MODEL_FILES_FOLDER = "model"  # the model's configuration and tokenizer, for converters
# The last line of a traceback, after Ray's or torch's prefix.
_REASON = re.compile(
    r"(?:^|[\s)\]])(?:\w+\.)*(?P<name>\w+(?:Error|Exception|Interrupt|MandatoryValue))\b(?!\()"
)
# Before the first step these errors are permanent.
_PERMANENT = re.compile(
    r"(Assertion|Attribute|FileNotFound|HFValidation|Import|InterpolationKey|Key|"
    r"ModuleNotFound|Name|NotImplemented|"
    r"Type|Validation)Error|MissingMandatoryValue|Config\w+"
)

OnStep = Callable[[int, dict[str, float]], None]
OnLine = Callable[[str], None]


def train_with_other(
    config: ChainConfig,
    inputs: Inputs,
    on_step: OnStep | None = None,
    on_line: OnLine | None = None,
) -> OtherCheckpoint:
    """Train with the trainer of train.backend and return its last checkpoint; outputs go to
    `inputs.output`.

    Resumes from the newest complete checkpoint there. Calls `on_step(step, metrics)` after each
    step and `on_line` with each other line of output. SIGTERM or SIGINT stops the trainer and
    raises TrainingStopped. Raises ConfigError before it starts, ChildProcessFailed with the last
    lines if it fails, and CheckpointError if it ends without the checkpoint of the last step.
    """
    folder, total = inputs.output / CHECKPOINTS, config.train.total_steps
    kept_steps = {*config.checkpoint.keep_steps, *config.checkpoint_steps}
    with StopRequest() as stop, raising_stopped(stop, lambda: _continued_from(folder, total)):
        require_resume(config.checkpoint.resume)
        require_model_folder(inputs.model)
        start = start_of(config, inputs)
        identity = identity_of(config, inputs)
        with lock_checkpoints(folder):
            if config.checkpoint.resume == "never":
                _set_aside(folder)
                start = start_of(config, inputs)  # the launch depends on existing checkpoints
            refuse_own_checkpoints(folder)
            done = _newest(folder, total)
            if done is not None:
                refuse_checkpoint_of_another(config, inputs, done.path, identity)
            log = MetricsLog(inputs.output, done.step if done else None)
            if done is None or done.step < total:
                record_identity(inputs, identity)

                def report(step: int, metrics: dict[str, float]) -> None:
                    log.append(step, None, metrics)
                    if on_step is not None:
                        on_step(step, metrics)
                    _tidy(folder, config.checkpoint.keep_last, kept_steps)

                _run(config, start, inputs, Progress(report, on_line))
            newest = _require_finished(config, inputs.output)
            _tidy(folder, 1, kept_steps)
    return newest


class Progress:
    """Turns the output lines of a trainer into steps.

    verl steps are reported at once; MindSpeed steps after the next line, since they may wrap over
    several lines.
    """

    def __init__(self, on_step: OnStep, on_line: OnLine | None = None) -> None:
        self.num_steps = 0
        self._on_step = on_step
        self._on_line = on_line or (lambda line: None)
        self._parser = LogParser()
        self._pending: Record | None = None

    def feed(self, line: str) -> None:
        """Process the next line; metrics of a step are passed on under our names."""
        record = self._parser.feed(line)
        if self._pending is not None and (record is None or record.step != self._pending.step):
            self.flush()
        self._pending = record
        if record is None:
            self._on_line(line)
        elif record.trainer == "verl":  # minutes may pass before its next line
            self.flush()

    def flush(self) -> None:
        """Report the pending step, if any."""
        if (record := self._pending) is not None:
            self._pending = None
            self.num_steps += record.step > 0
            self._on_line(format_step(record.step, record.metrics))
            self._on_step(record.step, record.metrics)


def _run(config: ChainConfig, start: Start, inputs: Inputs, progress: Progress) -> None:
    """Run the trainer to completion."""
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
                grace_seconds=config.flow.stop_seconds / 2,  # half of the stage's time
                cwd=config.external.source,
            ) as process,
        ):
            try:
                process.forward_lines_to(progress.feed)
            finally:
                progress.flush()
    except ChildProcessFailed as error:
        raise with_reason(error, progress.num_steps > 0) from None


def with_reason(error: ChildProcessFailed, has_started: bool) -> ChildProcessFailed:
    """Add the reason from the last lines to the error's summary; mark permanent errors."""
    lines = str(error).split("\n  | ")[1:]
    found = [(line, match["name"]) for line in lines if (match := _REASON.search(line))]
    if found:
        reason, name = found[-1]
        error.summary = f"{error.summary}: {reason.strip()}"
        error.is_lasting |= not has_started and (_PERMANENT.fullmatch(name) is not None)
    return error


def _newest(folder: Path, total: int) -> OtherCheckpoint | None:
    """The checkpoint to resume from; corrects the trainer's pointer file if its checkpoint is
    missing.
    """
    found = newest_other(folder)
    if found is None:
        return None
    if found.step > total:
        raise ConfigError(
            f"{found.path} is from step {found.step}, beyond train.total_steps={total}: raise it, "
            "or name "
            "another --output"
        )
    newest = folder / NEWEST_FILE
    if newest.read_text(encoding="ascii").strip() != str(found.step):
        logger.warning(
            "the checkpoint named in %s is missing; training resumes from %s",
            newest,
            found.path.name,
        )
        write_atomically(newest, str(found.step))
    return found


def _require_finished(config: ChainConfig, output: Path) -> OtherCheckpoint:
    """The checkpoint of the last step; raises CheckpointError if it or all metrics are missing."""
    backend, total = config.train.backend, config.train.total_steps
    newest = newest_other(output / CHECKPOINTS)
    if newest is None or newest.step < total:
        log = output / TRAINER_FOLDER / LOG_FILE
        if newest is None:
            raise CheckpointError(
                f"{backend} ended with exit code 0 but wrote no checkpoint up to "
                f"train.total_steps={total}; its "
                f"log is {log}"
            )
        raise CheckpointError(
            f"{backend} ended with exit code 0, but its last checkpoint is from step "
            f"{newest.step}, before "
            f"train.total_steps={total}: lower it to the trained steps (verl ends with its last "
            "epoch), "
            f"or check {log}"
        )
    if not read_json_lines(output / METRICS_FILE):
        raise CheckpointError(
            f"{backend} wrote no recognizable metrics (verl: step:N - name:value - ...), so the "
            "report "
            "would be empty: keep its console logger on, and check "
            f"{output / TRAINER_FOLDER / LOG_FILE}"
        )
    return newest


def _tidy(folder: Path, keep_last: int, kept_steps: set[int]) -> None:
    """Remove complete checkpoints except the newest and those to keep."""
    for other in other_checkpoints(folder)[:-keep_last]:
        if other.step not in kept_steps:
            logger.info("removing checkpoint %s", other.path.name)
            shutil.rmtree(other.path, ignore_errors=True)  # the trainer may be removing it too


def _set_aside(folder: Path) -> None:
    """Move old checkpoints and metrics aside; metrics last."""
    old = [path for path in folder.iterdir() if path.name != "lock"]
    metrics = folder.parent / METRICS_FILE
    old += [metrics] if metrics.exists() else []
    move_aside(folder, old)


def _continued_from(folder: Path, total: int) -> str | None:
    if (newest := newest_other(folder)) is None:
        return None
    return (
        f"; its newest checkpoint is {newest.path} of {total} steps; the same command resumes from "
        "there"
    )


def identity_of(config: ChainConfig, inputs: Inputs) -> dict[str, Any]:
    """The values shared by all attempts of one training: those of our own training, and the
    trainer's.
    """
    external = config.external
    rows = {name: getattr(external, name) for name in ("train_rows", "held_out_rows")}
    return {
        **training_identity(config, file_digest(inputs.data), inputs.model),
        "external.strategy": external.strategy,
        "external.overrides": list(external.overrides),
        **{
            f"external.{name}": _content(Path(path))
            for name, path in rows.items()
            if path is not None
        },
    }


def refuse_checkpoint_of_another(
    config: ChainConfig, inputs: Inputs, checkpoint: Path, identity: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if the checkpoint belongs to another training than `identity`.

    Keys in checkpoint.allow_changed may differ. A checkpoint without a record was put there by the
    user.
    """
    record = inputs.folder / IDENTITY_FILE
    if not record.is_file():
        return
    before = json.loads(record.read_text(encoding="utf-8"))
    for change in refuse_other_training(
        checkpoint, before, identity, config.checkpoint.allow_changed
    ):
        logger.warning(
            "checkpoint.allow_changed: continuing from %s with %s", checkpoint.name, change
        )


def refuse_own_checkpoints(folder: Path) -> None:
    """Raise CheckpointError if the folder has checkpoints of our own trainer, which others cannot
    resume.
    """
    if own := step_folders(folder):
        raise CheckpointError(
            f"{folder} has {len(own)} checkpoints of our own trainer, the newest {own[-1].name}, "
            "which another "
            "trainer cannot resume; name another --output, set train.backend=own to resume, or "
            "checkpoint.resume=never to move them aside"
        )


def record_identity(inputs: Inputs, identity: Mapping[str, Any]) -> None:
    """Write the record that `refuse_checkpoint_of_another` compares with."""
    inputs.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(inputs.folder / IDENTITY_FILE, json.dumps(identity, indent=2))


def _content(path: Path) -> str:
    """The digest of a file, or the path of a folder."""
    return file_digest(path) if path.is_file() else str(path)
