"""Where a training begins, and that only one writes to an output."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint.folder import CHECKPOINTS, LATEST_FILE, PARTIAL, latest_checkpoint, step_folders
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state
from dapo_core.checkpoint.writer import tidy
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.identity import refuse_other_training
from dapo_core.metrics import METRICS_FILE, MetricsLog, read_metrics

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
MODES = ("auto", "never")  # of checkpoint.resume, beside a path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have a training's checkpoints to oneself; raises CheckpointError at once while another process has them.

    A kernel lock, which ends with its holder however that dies: child processes do not inherit the descriptor.
    It is on a file, for on NFS a lock on the folder itself would hold on one host only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    while True:
        with path.open("a+b", buffering=0) as file:
            _lock(file, folder)
            if not _is_at(file, path):
                continue  # its holder removed it after we had opened it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def require_resume(resume: str) -> None:
    """Raise ConfigError when checkpoint.resume names a path that is not there."""
    if resume not in MODES and not Path(resume).is_dir():
        raise ConfigError(
            f"checkpoint.resume={resume} is not a folder; name a checkpoint step_NNNNNN or the output of a "
            "training, or set auto or never"
        )


def resume_digest(resume: str) -> str | None:
    """What tells the checkpoint that checkpoint.resume names from others; None for auto and never.

    Raises CheckpointError when there is none.
    """
    if resume in MODES:
        return None
    checkpoint = _checkpoint_at(Path(resume))
    digest = hashlib.sha256((checkpoint / STATE_FILE).read_bytes())
    for path in sorted(checkpoint.glob("*.distcp")):
        digest.update(repr((path.name, path.stat().st_size, path.stat().st_mtime_ns)).encode())
    return digest.hexdigest()


def find_start(folder: Path, resume: str) -> Path | None:
    """The checkpoint that a training with its checkpoints in `folder` goes on from; None: from the beginning.

    `resume` is checkpoint.resume: auto; never, which moves the output's checkpoints and metrics aside; or a
    checkpoint or training output to begin from, unless the training has begun already.
    Raises CheckpointError when that holds no complete checkpoint.
    """
    if resume == "never":
        _supersede(folder)
        return None
    own = latest_checkpoint(folder)
    if resume == "auto":
        return own
    if own is not None:
        logger.info("going on from %s of this output, not from checkpoint.resume=%s", own.name, resume)
        return own
    return _checkpoint_at(Path(resume))


def require_same_training(config: TrainingConfig, start: Path, folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another training's checkpoint, ConfigError for one without a step to follow.

    The last one of the training's own output is no error: its end is only told again.
    """
    state, total_steps = read_state(start), config.train.total_steps
    for change in refuse_other_training(start, state.identity, identity, config.checkpoint.allow_changed):
        logger.warning("checkpoint.allow_changed: going on from %s with %s", start.name, change)
    if state.step > total_steps or (state.step == total_steps and start.parent != folder):
        raise ConfigError(
            f"{start} is of training step {state.step}, so that train.total_steps={total_steps} leaves no step to "
            f"train: raise it above {state.step}, or name another checkpoint or --output"
        )


def resume_metrics(output: Path, state: TrainerState, is_own: bool = True) -> MetricsLog:
    """The log of a training that goes on from the state: the state's step is the last one told.

    Unless the state `is_own`, of a checkpoint of this output, the lines there are of another training.
    """
    log = MetricsLog(output, state.step if is_own else 0)
    told = read_metrics(log.path)
    if not told or told[-1]["step"] < state.step:
        log.append(state.step, state.policy_version, state.metrics)
    return log


def end_again(config: TrainingConfig, start: Path, output: Path) -> TrainerState | None:
    """The state of the output's training if it has done its last step, and is left as one that ended; else None.

    It may have been killed in its end; or it ended well, and nobody was there to see that.
    """
    state = read_state(start)
    if state.step < config.train.total_steps:
        return None
    resume_metrics(output, state)
    tidy(start.parent, 1, config.checkpoint.keep_best)
    logger.info("training has done its %d steps: there is nothing left to train", state.step)
    return state


def _checkpoint_at(path: Path) -> Path:
    if path.suffix != PARTIAL:
        if (path / STATE_FILE).is_file():
            return path
        found = latest_checkpoint(path / CHECKPOINTS) or latest_checkpoint(path)
        if found is not None:
            return found
    raise CheckpointError(
        f"checkpoint.resume={path} holds no complete checkpoint: neither is it a folder step_NNNNNN with "
        f"{STATE_FILE}, nor the output of a training with one; name another, or set auto or never"
    )


def _supersede(folder: Path) -> None:
    """Move checkpoints and metrics into a folder of their own beside them; the lock stays."""
    metrics = folder.parent / METRICS_FILE
    # What a kill leaves behind is a training: metrics go last, the oldest checkpoint first.
    old = [*step_folders(folder), folder / LATEST_FILE, metrics]
    old = [path for path in old if path.exists()]
    if not old:
        return
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = folder.parent / f"superseded-{now}"
    (aside / folder.name).mkdir(parents=True)
    for path in old:
        path.rename(aside / path.relative_to(folder.parent))
    logger.info("checkpoint.resume=never: what %s held is in %s", folder.parent, aside.name)


def _lock(file: FileIO, folder: Path) -> None:
    """Take the lock and leave a word in the file for those who find it taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()}".encode())
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode(errors="replace") or "another process"
        raise CheckpointError(
            f"{folder} is in use by {holder}: two trainings would overwrite each other's checkpoints; wait for "
            "its end, end it, or name another --output"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be locked ({error}), and without a lock two trainings could write to it; name "
            "another --output"
        ) from error


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
