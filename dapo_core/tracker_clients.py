"""Experiment tracker clients behind one interface: TensorBoard, Weights & Biases, SwanLab and
MLflow.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.machine.environment import MLFLOW, set_defaults
from durable import leaves
from redaction import redact

logger = logging.getLogger(__name__)

GENERATIONS = "val/generations"  # verl's name for validation responses
MLFLOW_BATCH = 100  # parameters per request
MLFLOW_VALUE_CHARACTERS = 500

Rows = Sequence[Mapping[str, Any]]  # of a generations file


@dataclass
class Record:
    """A run in a tracker, as stored in trackers.json."""

    name: str  # of the tracker
    id: str  # of the run; a resumed training continues it
    url: str | None = None
    path: str | None = None  # on this machine
    last_step: int = -1  # last step queued; repeated steps are not sent again
    num_failed: int = 0  # failed calls


@dataclass(frozen=True)
class Place:
    """Project, run and local folder of a tracked training."""

    project: str
    run: str
    folder: Path  # for local files of the clients


class Client(ABC):
    """An open run in a tracker. Its methods raise whatever the client raises."""

    @abstractmethod
    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        """Start or continue the run; sets the record's url or path."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics, which must be finite."""

    @abstractmethod
    def log_generations(self, rows: Rows, step: int) -> None:
        """Send validation responses."""

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        """Send evaluation results, at the last step."""
        self.log(results, step)

    @abstractmethod
    def finish(self) -> None:
        """Send pending data and end the run."""


class TensorBoard(Client):
    """Event files in $TENSORBOARD_DIR, by default below the tracker folder."""

    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        parent = os.environ.get("TENSORBOARD_DIR") or place.folder / "tensorboard" / place.project
        path = Path(record.path or Path(parent) / f"{place.run}-{record.id}")
        is_new = record.path is None
        record.path = str(path.absolute())
        self._writer = SummaryWriter(record.path)
        if is_new:
            self._writer.add_text(
                "config", _fenced(json.dumps(config, indent=2, ensure_ascii=False)), 0
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: Rows, step: int) -> None:
        self._writer.add_text(GENERATIONS, _as_markdown(rows), step)

    def finish(self) -> None:
        self._writer.close()


class WandB(Client):
    """A wandb run, online unless $WANDB_MODE says otherwise or there is no login."""

    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        folder = Path(os.environ.get("WANDB_DIR") or place.folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Do not send output, code or package lists: they may contain secrets, and are in the run
        # folder anyway.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            silent=True,
            quiet=True,
        )
        self._run = _online_or_offline(
            "wandb",
            wandb.init,
            project=place.project,
            name=place.run,
            id=record.id,
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=dict(config),
            settings=settings,
        )
        record.url = None if self._run.offline else self._run.url
        record.path = str(Path(self._run.dir).parent.absolute())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        table = self._wandb.Table(
            columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True
        )
        self._run.log({GENERATIONS: table}, step=step)

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        self._run.summary.update(dict(results))  # a resumed run rejects values for an earlier step

    def finish(self) -> None:
        self._run.finish()


class SwanLab(Client):
    """A SwanLab experiment, online unless $SWANLAB_MODE says otherwise or there is no login."""

    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        import swanlab

        self._swanlab = swanlab
        folder = Path(os.environ.get("SWANLAB_LOG_DIR") or place.folder / "swanlog")
        folder.mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            probe={"runtime": False, "requirements": False, "git": False, "monitor": False},
        )
        self._run = _online_or_offline(
            "swanlab",
            swanlab.init,
            project=place.project,
            name=place.run,
            id=record.id,
            resume="allow",
            log_dir=str(folder),
            config=dict(config),
            settings=settings,
        )
        record.url = self._run.url if self._run.mode == "online" else None
        record.path = str(folder.absolute())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        self._run.log({GENERATIONS: self._swanlab.Text(_as_markdown(rows))}, step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow(Client):
    """An MLflow run at $MLFLOW_TRACKING_URI, by default in a local database file."""

    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        set_defaults(MLFLOW)
        from mlflow import MlflowClient

        place.folder.mkdir(parents=True, exist_ok=True)
        database = place.folder.absolute() / "mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(place.project)
        # Without a server, MLflow would write artifacts to the working directory.
        artifacts = (
            database.with_name("mlflow-artifacts").as_uri() if uri.startswith("sqlite:") else None
        )
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(place.project, artifacts)
        )
        if record.path is None and record.url is None:
            record.id = self._client.create_run(experiment_id, run_name=place.run).info.run_id
            self._log_config(record.id, config)
        else:
            self._client.update_run(record.id, status="RUNNING")
        self._id = record.id
        if uri.startswith("http"):
            record.url = f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{record.id}"
        else:
            record.path = uri.removeprefix("sqlite:///").removeprefix("file:")

    def _log_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = [
            Param(_mlflow_name(key), str(value)[:MLFLOW_VALUE_CHARACTERS])
            for key, value in leaves(config).items()
        ]
        for first in range(0, len(values), MLFLOW_BATCH):
            self._client.log_batch(run_id, params=values[first : first + MLFLOW_BATCH])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_generations(self, rows: Rows, step: int) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._client.log_text(self._id, text, f"generations/step_{step}.jsonl")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


# Name in train.trackers -> (client class, required modules, packages to install).
CLIENTS: dict[str, tuple[type[Client], tuple[str, ...], str]] = {
    "tensorboard": (TensorBoard, ("tensorboard",), "tensorboard"),
    "wandb": (WandB, ("wandb",), "wandb"),
    "swanlab": (SwanLab, ("swanlab",), "swanlab"),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic"), "mlflow-skinny sqlalchemy alembic"),
}


def _online_or_offline(tracker: str, start: Any, **arguments: Any) -> Any:
    """Start a run online; if that fails, offline, for a later sync."""
    try:
        return start(**arguments)
    except Exception as error:  # noqa: BLE001 - no login, no network, a refusal: each client has its own
        folder = arguments.get("dir") or arguments.get("log_dir")
        logger.warning(
            "%s cannot start online (%s): it writes to %s instead; send the files later with `%s "
            "sync`",
            *(tracker, redact(str(error)), folder, tracker),
        )
        return start(**arguments, mode="offline")


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with finite values."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _mlflow_name(name: str) -> str:
    """Return a valid MLflow name; mean@8 becomes mean_at_8, as in verl."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))


def _as_markdown(rows: Rows) -> str:
    parts = []
    for row in rows:
        header = ", ".join(
            f"{name} {value}" for name, value in row.items() if name not in ("prompt", "response")
        )
        parts += [f"**{header}**", _fenced(str(row["prompt"])), _fenced(str(row["response"]))]
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
