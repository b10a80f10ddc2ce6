"""Where a training begins, and that only one writes to an output."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from dapo_core.checkpoint.folder import CHECKPOINTS, LATEST_FILE, PARTIAL, latest_checkpoint, step_folders
from dapo_core.checkpoint.state import STATE_FILE
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.metrics import METRICS_FILE

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
