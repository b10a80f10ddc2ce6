"""One run of the chain: its folder, its log files, and the record of what each stage did."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_core.checkpoint import require_resume
from dapo_core.config import Config, dump_config
from dapo_core.data import require_columns
from dapo_core.model_folder import require_model_folder
from dapo_core.reward import require_scorers
from tasks.artifacts import Artifact, ArtifactStore, StageKey
from tasks.stages import prepare_data_inputs

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


@dataclass
class Run:
    """A folder of links to artifacts, the resolved configuration, and run.json, kept current as stages finish."""

    config: Config
    store: ArtifactStore
    folder: Path
    stages: dict[str, StageRecord] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    @staticmethod
    def start(config: Config) -> Run:
        """A new run under the store of the configuration; raises what `check_start` raises."""
        check_start(config)
        store = ArtifactStore(config.store.path)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        folder = runs_folder(config) / f"{now}Z-{os.getpid()}"
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        logger.info("run %s of %s in %s", folder.name, config.run.name, folder.absolute())
        return Run(config, store, folder.absolute())

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
            artifact, cached = self.store.produce(key, build, resumable=resumable)
            seconds = time.monotonic() - started
            self._tell(artifact, cached, seconds)
        finally:
            current_stage.reset(token)
        self.stages[label] = StageRecord(cached, seconds, artifact.path, artifact.key)
        (self.folder / label).symlink_to(os.path.relpath(artifact.path, self.folder))
        self.write_record()
        return artifact

    def _tell(self, artifact: Artifact, cached: bool, seconds: float) -> None:
        if not cached:
            logger.info("built in %.1f s: %s", seconds, artifact.path)
            return
        manifest = artifact.manifest()
        logger.info("cached, built in %.1f s on %s", manifest["seconds"], manifest["ended_at"][:10])

    def write_record(self, **outcome: Any) -> None:
        """Bring run.json up to date; `outcome` adds to it."""
        record = {
            "name": self.config.run.name,
            "id": self.folder.name,
            "started_at": self.started_at,
            "seconds": time.time() - self.started_at,
            "stages": {label: vars(stage) for label, stage in self.stages.items()},
            **outcome,
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
