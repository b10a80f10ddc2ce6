"""Chooses the checkpoint a training starts from, and locks its checkpoint folder."""

from __future__ import annotations

import datetime
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
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
from dapo_core.checkpoint.identity import refuse_other_training
from dapo_core.checkpoint.recorded import DRAWS
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state_without_groups
from dapo_core.errors import CheckpointError, ConfigError, counted
from dapo_core.metrics.log import METRICS_FILE, MetricsLog
from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS
from durable import LockHeld, locked, read_holder, read_json_lines, write_atomically

if TYPE_CHECKING:
    from dapo_core.config.training import CheckpointConfig, TrainingConfig

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
MODES = ("auto", "never")  # values of checkpoint.resume other than a path
OnDamage = Literal["previous", "stop"]
Verify = Callable[[Path], None]  # raises CheckpointError for damage


@contextmanager
def lock_checkpoints(folder: Path) -> Iterator[None]:
    """Lock a checkpoint folder; raises CheckpointError at once if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except LockHeld:
            raise CheckpointError(
                f"{folder} is in use by {read_holder(path)}: two trainings would overwrite each "
                "other's checkpoints; wait until it ends, stop it, or choose another --output"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be locked ({error}), and without a lock two trainings could "
                "write to it; choose another --output"
            ) from error
        try:
            yield
        finally:
            # it names this process, which must not affect the output's digest
            path.unlink(missing_ok=True)


def require_resume(resume: str) -> None:
    """Raise ConfigError if checkpoint.resume is a path that does not exist."""
    if resume not in MODES and not Path(resume).is_dir():
        raise ConfigError(
            f"checkpoint.resume={resume} is not a folder; set it to a checkpoint step_NNNNNN, the "
            "output of a training, auto or never"
        )


def resume_digest(resume: str) -> str | None:
    """Return a digest of the checkpoint that checkpoint.resume names; None for auto and never.

    Raises CheckpointError if the path has no checkpoint.
    """
    if resume in MODES:
        return None
    checkpoint = _checkpoint_at(Path(resume))
    digest = hashlib.sha256((checkpoint / STATE_FILE).read_bytes())
    for path in sorted(checkpoint.glob("*.distcp")):
        digest.update(repr((path.name, path.stat().st_size, path.stat().st_mtime_ns)).encode())
    return digest.hexdigest()


def find_start(folder: Path, resume: str, on_damage: OnDamage, verify: Verify) -> Path | None:
    """Return the checkpoint to continue from, or None to start from the beginning.

    `folder` holds the training's own checkpoints. `resume` is checkpoint.resume: auto; never, which
    moves existing checkpoints and metrics aside; or a checkpoint or training output to start from
    if `folder` has no checkpoint. `on_damage` is checkpoint.on_damage: fall back to the newest
    checkpoint that `verify` accepts, or stop. Raises CheckpointError for damage, and if the path
    holds no complete checkpoint.
    """
    if resume == "never":
        _supersede(folder)
        return None
    newest = _newest_intact(folder, on_damage, verify)
    if newest is not None:
        _set_aside_after(newest)
    if resume == "auto":
        return newest
    if newest is not None:
        message = "continuing from %s in this output instead of checkpoint.resume=%s"
        logger.info(message, newest.name, resume)
        return newest
    start = _checkpoint_at(Path(resume))
    if start != Path(resume):
        return _newest_intact(start.parent, on_damage, verify)
    verify(start)
    return start


def intact_start(
    start: Path | None, folder: Path, config: CheckpointConfig, verify: Verify
) -> Path | None:
    """Return `start`, or what find_start returns instead if `verify` finds damage in it."""
    if start is not None:
        try:
            verify(start)
        except CheckpointError:
            source = "auto" if start.parent == folder else config.resume
            return find_start(folder, source, config.on_damage, verify)
    return start


def _set_aside_after(checkpoint: Path) -> None:
    """Rename newer, damaged checkpoints, so that they do not count; the last step removes them."""
    folders = checkpoint_folders(checkpoint.parent)
    damaged = folders[folders.index(checkpoint) + 1 :]
    for path in damaged:
        path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{DAMAGED}"))
    if damaged:
        write_atomically(checkpoint.parent / LATEST_FILE, f"{checkpoint.name}\n")
        aside = counted(len(damaged), "damaged checkpoint")
        logger.warning("continuing from %s; set aside %s", checkpoint.name, aside)


def _newest_intact(folder: Path, on_damage: OnDamage, verify: Verify) -> Path | None:
    """Return the newest complete checkpoint without damage, or None if there is no checkpoint."""
    damage = ""
    for checkpoint in reversed(checkpoint_folders(folder)):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            damage = damage or str(error)
            if on_damage == "stop":
                break
            logger.error("%s; checkpoint.on_damage=previous: looking for an older one", error)
        else:
            return checkpoint
    if damage:
        advice = "no older checkpoint is intact;"
        if on_damage == "stop":
            advice = "set checkpoint.on_damage=previous to continue from an older checkpoint,"
        raise CheckpointError(
            f"{damage}; {advice} copy the file again from where it was written, or start over with "
            "checkpoint.resume=never"
        )
    return None


def require_same_training(
    config: TrainingConfig, start: Path, folder: Path, identity: Mapping[str, Any]
) -> None:
    """Raise CheckpointError for another training's checkpoint, ConfigError if no steps are left.

    The final checkpoint of this output is accepted: see finish_if_done.
    """
    state, total_steps = read_state_without_groups(start), config.train.total_steps
    allowed = config.checkpoint.allow_changed
    for change in refuse_other_training(start, state.identity, identity, allowed):
        logger.warning("checkpoint.allow_changed: continuing from %s with %s", start.name, change)
    if state.step > total_steps or (state.step == total_steps and start.parent != folder):
        raise ConfigError(
            f"{start} is at training step {state.step}, so train.total_steps={total_steps} leaves "
            f"no step to train: raise it above {state.step}, or choose another --output"
        )


def resume_metrics(output: Path, state: TrainerState, is_own: bool = True) -> MetricsLog:
    """Return the metrics log, truncated to the state's step, whose line is added if missing.

    If the state is not from a checkpoint of this output (`is_own`), existing lines are removed:
    they belong to another training.
    """
    log = MetricsLog(output, state.step if is_own else None)
    lines = read_json_lines(log.path)
    if not lines or lines[-1]["step"] < state.step:
        log.append(state.step, state.policy_version, state.metrics)
    return log


def finish_if_done(config: TrainingConfig, start: Path, output: Path) -> TrainerState | None:
    """Return the state without groups if the last step is done; None while steps are left.

    Completes what a kill after the last step may have skipped: metrics and removal of old
    checkpoints.
    """
    state = read_state_without_groups(start)
    if state.step < config.train.total_steps:
        return None
    resume_metrics(output, state)
    tidy(start.parent, 1, config.checkpoint.keep_best, config.checkpoint.keep_steps)
    logger.info("all %d training steps are done; nothing is left to train", state.step)
    return state


def _checkpoint_at(path: Path) -> Path:
    if path.suffix != PARTIAL:
        if (path / STATE_FILE).is_file():
            return path
        found = latest_checkpoint(path / CHECKPOINTS) or latest_checkpoint(path)
        if found is not None:
            return found
    raise CheckpointError(
        f"checkpoint.resume={path} has no complete checkpoint: it is neither a step_NNNNNN folder "
        f"with {STATE_FILE} nor a training output with one; set another path, auto or never"
    )


def _supersede(folder: Path) -> None:
    """Move checkpoints, draws, responses and metrics to `superseded-TIME`; the lock stays."""
    beside = [folder.parent / name for name in (DRAWS, GENERATIONS, ROLLOUTS, METRICS_FILE)]
    # A kill in between must leave a training that can continue: oldest checkpoint first, metrics
    # last.
    candidates = (*step_folders(folder), folder / LATEST_FILE, *beside)
    paths = [path for path in candidates if path.exists()]
    if not paths:
        return
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = folder.parent / f"superseded-{now}"
    (aside / folder.name).mkdir(parents=True)
    for path in paths:
        path.rename(aside / path.relative_to(folder.parent))
    message = "checkpoint.resume=never: moved checkpoints and metrics of %s to %s"
    logger.info(message, folder.parent, aside.name)
