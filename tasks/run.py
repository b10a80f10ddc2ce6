"""One run of the chain: its folder, its log files, and the record of what each stage did."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dapo_core.checkpoint import require_resume
from dapo_core.config import Config, dump_config
from dapo_core.data import require_columns
from dapo_core.errors import RunSkipped, StoreError
from dapo_core.model_folder import require_model_folder
from dapo_core.reward import require_scorers
from tasks.artifacts import SHORT_KEY_LENGTH, Artifact, ArtifactStore, StageKey
from tasks.retries import describe
from tasks.stages import LINKS, prepare_data_inputs

logger = logging.getLogger(__name__)

current_stage: ContextVar[str] = ContextVar("current_stage", default="")  # for those who show log lines

RECORD_FILE = "run.json"
CONFIG_FILE = "config.yaml"


@dataclass
class StageRecord:
    """What happened to one stage in a run."""

    cached: bool
    seconds: float
    artifact: str  # path
    key: str
    digest: str


@dataclass
class Run:
    """A folder of links to artifacts, the resolved configuration, and run.json, kept current as stages finish.

    As a context it records how the run ended: completed, skipped, failed with the error, or cancelled.
    """

    config: Config
    store: ArtifactStore
    folder: Path
    flow: str  # dapo-full, or the name of the one stage that is run
    forced: frozenset[str] = frozenset()  # labels of stages that are built although the store has them
    stages: dict[str, StageRecord] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    outcome: dict[str, Any] = field(default_factory=lambda: {"state": "running"})

    @staticmethod
    def start(config: Config, flow: str = "dapo-full", forced: Collection[str] = ()) -> Run:
        """A new run under the store of the configuration; raises what `check_start` raises."""
        check_start(config)
        store = ArtifactStore(config.store.path)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        folder = runs_folder(config) / f"{now}Z-{os.getpid()}"
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        logger.info("run %s of %s in %s", folder.name, config.run.name, folder.absolute())
        run = Run(config, store, folder.absolute(), flow, frozenset(forced))
        run.record()
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.record(state="completed")
        elif isinstance(error, RunSkipped):
            self.record(state="skipped", reason=str(error))
        elif isinstance(error, Exception):
            self.record(state="failed", error=describe(error))
        else:  # an interrupt, or Prefect's TerminationSignal
            self.record(state="cancelled", error=type(error).__name__)

    @property
    def config_path(self) -> Path:
        return self.folder / CONFIG_FILE

    def produce(
        self,
        label: str,
        key: StageKey,
        build: Callable[[Path], Mapping[str, Any]],
        *,
        resumable: bool = False,
    ) -> Artifact:
        """The artifact of the key, from the store or built now, recorded and linked under `label`."""
        started = time.monotonic()
        token = current_stage.set(label)
        try:
            artifact, cached = self.store.produce(key, build, resumable=resumable, replace=label in self.forced)
            seconds = time.monotonic() - started
            self._tell(artifact, cached, seconds)
        finally:
            current_stage.reset(token)
        self._keep(label, artifact, cached, seconds)
        return artifact

    def take(self, label: str) -> Artifact:
        """The artifact of a stage that ran before, recorded as cached; raises StoreError when it is not there."""
        link = LINKS[label]
        key = link.key(self.config, {need: self.take(need) for need in link.needs})
        artifact = self.store.lookup(key.stage, key.key)
        if artifact is None:
            raise StoreError(
                f"the store {self.store.root} has no output of {label} for this configuration (key "
                f"{key.key[:SHORT_KEY_LENGTH]}), which this stage begins from; make it with dapo stage, or all of "
                "the chain with dapo run; dapo plan shows what is there"
            )
        if label not in self.stages:
            self._keep(label, artifact, True, 0.0)
        return artifact

    def _keep(self, label: str, artifact: Artifact, cached: bool, seconds: float) -> None:
        self.stages[label] = StageRecord(cached, seconds, artifact.path, artifact.key, artifact.digest)
        (self.folder / label).symlink_to(os.path.relpath(artifact.path, self.folder))
        self.record()

    def _tell(self, artifact: Artifact, cached: bool, seconds: float) -> None:
        if not cached:
            logger.info("built in %.1f s: %s", seconds, artifact.path)
            return
        manifest = artifact.manifest()
        logger.info("cached, built in %.1f s on %s", manifest["seconds"], manifest["ended_at"][:10])

    def record(self, **outcome: Any) -> None:
        """Bring run.json up to date; `outcome` adds to it."""
        self.outcome |= outcome
        record = {
            "name": self.config.run.name,
            "flow": self.flow,
            "id": self.folder.name,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "seconds": time.time() - self.started_at,
            "stages": {label: vars(stage) for label, stage in self.stages.items()},
            **self.outcome,
        }
        partial = self.folder / (RECORD_FILE + ".partial")
        partial.write_text(json.dumps(record, indent=2), encoding="utf-8")
        partial.rename(self.folder / RECORD_FILE)


def check_inputs(config: Config) -> None:
    """Raise ConfigError, DataError or ModelError when data, model or scorers are named that a run cannot use."""
    prepare_data_inputs(config)
    require_scorers((), config.reward, config.custom_reward)
    require_resume(config.checkpoint.resume)
    if config.data.source == "path":
        require_columns(str(config.data.train_path))
    if config.model.source == "path":
        require_model_folder(str(config.model.path))


def check_start(config: Config) -> None:
    """Raise, before any work, what would end a run: what `check_inputs` raises, or StoreError."""
    check_inputs(config)
    ArtifactStore(config.store.path).check_writable()


def runs_folder(config: Config) -> Path:
    """Where runs are recorded."""
    return Path(config.store.path) / "runs"


def read_runs(config_store: Path) -> Iterator[dict[str, Any]]:
    """Records of the runs under a store, newest first; folders whose record was never written are left out."""
    for folder in sorted((config_store / "runs").glob("*Z-*"), reverse=True):
        path = folder / RECORD_FILE
        if path.is_file():
            yield json.loads(path.read_text(encoding="utf-8"))
