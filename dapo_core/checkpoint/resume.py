"""Where a training starts, and the lock that gives it its checkpoints alone."""

from __future__ import annotations

import datetime
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dapo_core.checkpoint.folder import (
    CHECKPOINTS,
    DAMAGED,
    LATEST_FILE,
    PARTIAL,
    checkpoint_folders,
    latest_checkpoint,
    step_folders,
    tidy,
)
from dapo_core.checkpoint.manifest import verify_checkpoint
from dapo_core.checkpoint.others import NEWEST_FILE, other_checkpoints
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state_without_groups
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.identity import refuse_other_training
from dapo_core.metrics import METRICS_FILE, MetricsLog
from dapo_core.trackers import TRACKERS_FILE
from dapo_core.validation import GENERATIONS_FOLDER
from durable import LockHeld, locked, read_holder, read_json_lines, write_atomically

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
MODES = ("auto", "never")  # of checkpoint.resume, beside a path
OnDamage = Literal["previous", "stop"]


@contextmanager
def lock_checkpoints(folder: Path) -> Iterator[None]:
    """Keep other processes away from a training's checkpoints; raises CheckpointError at once if one has them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except LockHeld:
            raise CheckpointError(
                f"{folder} is in use by {read_holder(path)}: two trainings would overwrite each other's "
                "checkpoints; wait until it ends, stop it, or name another --output"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be locked ({error}), and without a lock two trainings could write to it; name "
                "another --output"
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # the output's digest must not depend on who trained it


def require_resume(resume: str) -> None:
    """Raise ConfigError when checkpoint.resume names a path that does not exist."""
    if resume not in MODES and not Path(resume).is_dir():
        raise ConfigError(
            f"checkpoint.resume={resume} is not a folder; name a checkpoint step_NNNNNN or the output of a "
            "training, or set auto or never"
        )


def resume_digest(resume: str) -> str | None:
    """Identifies the checkpoint that checkpoint.resume names; None for auto and never.

    Raises CheckpointError when there is none.
    """
    if resume in MODES:
        return None
    checkpoint = _checkpoint_at(Path(resume))
    digest = hashlib.sha256((checkpoint / STATE_FILE).read_bytes())
    for path in sorted(checkpoint.glob("*.distcp")):
        digest.update(repr((path.name, path.stat().st_size, path.stat().st_mtime_ns)).encode())
    return digest.hexdigest()


def find_start(folder: Path, resume: str, on_damage: OnDamage = "previous") -> Path | None:
    """The checkpoint that a training with its checkpoints in `folder` continues from; None: from the beginning.

    `resume` is checkpoint.resume: auto; never, which moves the output's checkpoints and metrics aside; or a
    checkpoint or training output to begin from, unless the output has a checkpoint already. Every byte is compared
    with its digest. `on_damage` is checkpoint.on_damage: continue from the newest older checkpoint that is sound,
    or stop. Raises CheckpointError for damage, and when that path holds no complete checkpoint.
    """
    if resume == "never":
        _supersede(folder)
        return None
    own = _newest_sound(folder, on_damage)
    if own is None:
        _refuse_checkpoints_of_others(folder)
    else:
        _set_aside_after(own)
    if resume == "auto":
        return own
    if own is not None:
        logger.info("continuing from %s of this output, not from checkpoint.resume=%s", own.name, resume)
        return own
    start = _checkpoint_at(Path(resume))
    if start != Path(resume):
        return _newest_sound(start.parent, on_damage)
    verify_checkpoint(start)
    return start


def _refuse_checkpoints_of_others(folder: Path) -> None:
    others = other_checkpoints(folder)
    if others:
        raise CheckpointError(
            f"{folder} has {len(others)} checkpoints of another trainer, the newest {others[-1].path.name}, "
            "which our own cannot continue; name another --output, set train.backend to that trainer to go on, or "
            "checkpoint.resume=never to begin again"
        )


def _set_aside_after(checkpoint: Path) -> None:
    """Take newer checkpoints, which are damaged, out of the count; they stay until the training ends."""
    folders = checkpoint_folders(checkpoint.parent)
    damaged = folders[folders.index(checkpoint) + 1 :]
    for path in damaged:
        path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{DAMAGED}"))
    if damaged:
        write_atomically(checkpoint.parent / LATEST_FILE, f"{checkpoint.name}\n")
        logger.warning("continuing from %s; %d damaged checkpoints are set aside", checkpoint.name, len(damaged))


def _newest_sound(folder: Path, on_damage: OnDamage) -> Path | None:
    """The newest complete checkpoint without damage, None when there is no checkpoint."""
    damage = ""
    for checkpoint in reversed(checkpoint_folders(folder)):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            damage = damage or str(error)
            if on_damage == "stop":
                break
            logger.error("%s; looking for an older checkpoint (checkpoint.on_damage=previous)", error)
        else:
            return checkpoint
    if damage:
        way_on = "set checkpoint.on_damage=previous" if on_damage == "stop" else "no older checkpoint is sound"
        raise CheckpointError(
            f"{damage}; copy the file from where it was written, {way_on}, or begin again with "
            "checkpoint.resume=never"
        )
    return None


def require_same_training(config: TrainingConfig, start: Path, folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another training's checkpoint, ConfigError when it leaves no step to train.

    The last checkpoint of the output's own training is fine: see finish_if_done.
    """
    state, total_steps = read_state_without_groups(start), config.train.total_steps
    for change in refuse_other_training(start, state.identity, identity, config.checkpoint.allow_changed):
        logger.warning("checkpoint.allow_changed: continuing from %s with %s", start.name, change)
    if state.step > total_steps or (state.step == total_steps and start.parent != folder):
        raise ConfigError(
            f"{start} is of training step {state.step}, so that train.total_steps={total_steps} leaves no step to "
            f"train: raise it above {state.step}, or name another checkpoint or --output"
        )


def resume_metrics(output: Path, state: TrainerState, is_own: bool = True) -> MetricsLog:
    """The output's log, truncated to the state's step; that step's line is added if it is missing.

    Unless the state `is_own`, from a checkpoint of this output, existing lines belong to another training and go.
    """
    log = MetricsLog(output, state.step if is_own else None)
    lines = read_json_lines(log.path)
    if not lines or lines[-1]["step"] < state.step:
        log.append(state.step, state.policy_version, state.metrics)
    return log


def finish_if_done(config: TrainingConfig, start: Path, output: Path) -> TrainerState | None:
    """The state, without its groups, of a training that has done its last step; None while steps are left.

    Completes what a kill after that step may have cut short: the metrics and the removal of old checkpoints.
    """
    state = read_state_without_groups(start)
    if state.step < config.train.total_steps:
        return None
    resume_metrics(output, state)
    tidy(start.parent, 1, config.checkpoint.keep_best, config.checkpoint.keep_steps)
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
        f"checkpoint.resume={path} holds no complete checkpoint: it is neither a folder step_NNNNNN with "
        f"{STATE_FILE} nor the output of a training with one; name another, or set auto or never"
    )


def _supersede(folder: Path) -> None:
    """Move checkpoints, another trainer's too, and responses, trackers and metrics beside them; the lock stays."""
    others = [folder.parent / name for name in (GENERATIONS_FOLDER, TRACKERS_FILE, METRICS_FILE)]
    # A kill on the way must leave a training that can continue: metrics go last, the oldest checkpoint first.
    of_others = [*(one.path for one in other_checkpoints(folder)), folder / NEWEST_FILE]
    candidates = (*of_others, *step_folders(folder), folder / LATEST_FILE, *others)
    old = [path for path in candidates if path.exists()]
    move_aside(folder, old)


def move_aside(folder: Path, old: Sequence[Path]) -> None:
    """Move what lies in a folder of checkpoints, or beside it, to `superseded-TIME` there, in this order."""
    if not old:
        return
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = folder.parent / f"superseded-{now}"
    (aside / folder.name).mkdir(parents=True)
    for path in old:
        path.rename(aside / path.relative_to(folder.parent))
    logger.info(
        "checkpoint.resume=never: the checkpoints and metrics of %s are now in %s", folder.parent, aside.name
    )
