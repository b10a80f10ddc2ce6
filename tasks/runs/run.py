"""One run of the chain: its folder, log links, and the record of each stage."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import time
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dapo_core.config.loading import dump_config
from dapo_core.errors import DapoError
from durable import locked, write_atomically
from redaction import redacted
from tasks.artifacts.artifact import Artifact, StoreError
from tasks.artifacts.references import forget_resolved
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH, StageKey
from tasks.artifacts.store import NO_FOLDER_ERRORS, ArtifactStore, Build
from tasks.config import ChainConfig
from tasks.links import Link, link_of
from tasks.preflight.environment import recorded
from tasks.runs.history import CONFIG_FILE, RECORD_FILE, StageRecord, run_lock_path

logger = logging.getLogger(__name__)

RECORD_SECONDS = 10.0  # at most between records of a run whose stages write lines

current_stage: ContextVar[str] = ContextVar("current_stage", default="")  # read by log formatters


class RunSkipped(DapoError, RuntimeError):
    """The run was skipped: it started too late, or another run holds a required lock."""


@dataclass
class Run:
    """A folder with links to artifacts, the resolved configuration, and run.json.

    As a context manager it records the outcome: completed, skipped, failed (with the error) or
    cancelled. A lock marks the run as in progress until then.
    """

    config: ChainConfig
    store: ArtifactStore
    folder: Path
    flow: str  # dapo-full, or the name of a single stage
    forced: frozenset[str] = frozenset()  # labels of stages to build even if stored
    stages: dict[str, StageRecord] = field(default_factory=dict)
    environment: list[dict[str, str]] = field(default_factory=list)  # as `recorded` returns it
    started_at: float = field(default_factory=time.time)
    outcome: dict[str, Any] = field(default_factory=lambda: {"state": "running"})
    recorded_at: float = 0.0
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    @staticmethod
    def start(config: ChainConfig, flow: str = "dapo-full", forced: Collection[str] = ()) -> Run:
        """Create a run in the store of the configuration; raises StoreError if it is unwritable."""
        forget_resolved()
        store = ArtifactStore(config.store.path)
        store.check_writable()
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        folder = store.root / "runs" / f"{now}Z-{os.getpid()}"
        run = Run(config, store, folder, flow, frozenset(forced))
        run.environment = recorded(os.environ, config)
        with store.disk_errors(NO_FOLDER_ERRORS):
            folder.mkdir(parents=True)
            run.config_path.write_text(dump_config(config), encoding="utf-8")
            run.lock.enter_context(locked(run_lock_path(folder)))
            run.record()
        logger.info("run %s of %s in %s", folder.name, config.run.name, folder)
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.lock:
            try:
                self.record(**_end(error))
            except OSError as problem:
                if error is None:
                    raise
                logger.error(
                    "the outcome of the run could not be recorded in %s: %s", self.folder, problem
                )

    @property
    def config_path(self) -> Path:
        return self.folder / CONFIG_FILE

    def config_of(self, link: Link) -> Path:
        """The configuration file for the stage of a link."""
        if link.config is self.config:
            return self.config_path
        path = self.folder / f"{link.label}.yaml"
        path.write_text(dump_config(link.config), encoding="utf-8")
        return path

    def produce(self, label: str, key: StageKey, build: Build) -> Artifact:
        """Return the artifact of the key, cached or built, and record and link it under `label`."""
        started = time.monotonic()
        is_forced = label in self.forced and label not in self.stages
        link = link_of(self.config, label)
        with _logging_as(label):
            is_kept = False
            while not is_kept:
                artifact, cached = self.store.produce(
                    key, build, resumable=link.stage.is_resumable, force=is_forced
                )
                seconds = time.monotonic() - started
                with self.store.in_use():
                    # garbage collection may just have removed it
                    is_kept = Path(artifact.path).exists()
                    if is_kept:
                        self._keep(label, artifact, cached, seconds)
            _log_stage(artifact, cached, seconds)
        return artifact

    def take(self, label: str) -> Artifact:
        """Return the stored artifact of a stage, recorded as cached. Raises StoreError."""
        link = link_of(self.config, label)
        key = link.key(*map(self.take, link.needs))
        with self.store.in_use():
            artifact = _require(self.store, link, key)
            if label in self.stages:
                return artifact
            self._keep(label, artifact, True, 0.0)
        with _logging_as(label):
            _log_stage(artifact, True, 0.0)
        return artifact

    def _keep(self, label: str, artifact: Artifact, cached: bool, seconds: float) -> None:
        """Record and link the artifact, so that garbage collection keeps it."""
        self.stages[label] = StageRecord(
            cached, seconds, artifact.path, artifact.key, artifact.digest
        )
        link = self.folder / label
        link.unlink(missing_ok=True)  # left by a removed attempt
        # relative, so that the store can be moved
        link.symlink_to(os.path.relpath(artifact.path, self.folder))
        self.record()

    def record_time(self) -> None:
        """Update the duration in run.json, which is all that remains of it after a kill."""
        if time.time() - self.recorded_at >= RECORD_SECONDS:
            try:
                self.record()
            except OSError as error:  # the stage may still end well
                logger.warning("the run's duration could not be recorded: %s", error)

    def record(self, **outcome: Any) -> None:
        """Update run.json, with the fields of `outcome` added."""
        self.recorded_at = time.time()
        self.outcome |= redacted(outcome)
        record = {
            "name": self.config.run.name,
            "flow": self.flow,
            "id": self.folder.name,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "seconds": self.recorded_at - self.started_at,
            "stages": {label: vars(stage) for label, stage in self.stages.items()},
            "environment": self.environment,
            **self.outcome,
        }
        write_atomically(self.folder / RECORD_FILE, json.dumps(record, indent=2))


def _log_stage(artifact: Artifact, cached: bool, seconds: float) -> None:
    if cached:
        manifest = artifact.manifest()
        logger.info("cached, built in %.1f s on %s", manifest["seconds"], manifest["ended_at"][:10])
    else:
        logger.info("built in %.1f s: %s", seconds, artifact.path)


@contextlib.contextmanager
def _logging_as(label: str) -> Iterator[None]:
    token = current_stage.set(label)
    try:
        yield
    finally:
        current_stage.reset(token)


def require_outputs(config: ChainConfig, labels: Iterable[str]) -> dict[str, Artifact]:
    """The stored outputs of these stages by label; raises StoreError if one is missing."""
    store = ArtifactStore(config.store.path)
    found: dict[str, Artifact] = {}
    for label in labels:
        link = link_of(config, label)
        key = link.key(*require_outputs(config, link.needs).values())
        found[label] = _require(store, link, key)
    return found


def _require(store: ArtifactStore, link: Link, key: StageKey) -> Artifact:
    artifact = store.lookup(key.stage, key.key)
    if artifact is None:
        raise StoreError(
            f"the store {store.root} has no output of {link.label} for this configuration (key "
            f"{key.key[:SHORT_KEY_LENGTH]}), which this stage needs; build it with {link.command}, "
            "or the whole chain with dapo run CONFIG; dapo plan CONFIG shows what the store has"
        )
    return artifact


def _end(error: BaseException | None) -> dict[str, str]:
    """The outcome to record for a run that ended with this error."""
    if error is None:
        return {"state": "completed"}
    if isinstance(error, RunSkipped):
        return {"state": "skipped", "reason": str(error)}
    if isinstance(error, Exception):
        return {"state": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"state": "cancelled", "error": type(error).__name__}
