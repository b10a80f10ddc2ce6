"""The clients of experiment trackers: TensorBoard, Weights & Biases, SwanLab and MLflow."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_core.machine.environment import set_defaults
from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS
from durable import leaves
from redaction import redact
from tasks.config import ChainConfig

logger = logging.getLogger(__name__)

TEXTS = {GENERATIONS: "val/generations", ROLLOUTS: "train/rollouts"}  # the first is verl's name
MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # read on import

Rows = Sequence[Mapping[str, Any]]  # of a step file


@dataclass
class Record:
    """A training's run in a tracker; a resumed training continues it."""

    tracker: str
    id: str = field(default_factory=lambda: secrets.token_hex(4))  # of the run
    url: str | None = None
    path: str | None = None  # on this machine
    began: float | None = None  # `wall_time` of the first line of metrics.jsonl
    last_step: int = -1  # repeated steps are not sent again
    results: dict[str, float] = field(default_factory=dict)  # the last sent

    @property
    def place(self) -> str | None:
        return self.url or self.path


class Client(ABC):
    """An open run in a tracker. Its methods raise whatever the client raises."""

    def __init__(self, record: Record, config: ChainConfig, shown: Mapping[str, Any]) -> None:
        train = config.train
        self.project, self.name = train.tracker_project, train.tracker_run or config.run.name
        self.folder = Path(train.tracker_folder).absolute()  # for local files
        self.open(record, shown)

    @abstractmethod
    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        """Start or continue the run, with the configuration `shown`; sets its url or path."""

    def _start(
        self, init: Callable[..., Any], record: Record, shown: Mapping[str, Any], **own: Any
    ) -> Any:
        """Start a run online; if that fails, offline, for a later sync."""
        given = {"project": self.project, "name": self.name, "id": record.id, "resume": "allow"}
        try:
            return init(**given, config=dict(shown), **own)
        except Exception as error:  # noqa: BLE001 - no login, no network: each client has its own
            message = "%s cannot start online (%s): it writes files for a later `%s sync`"
            logger.warning(message, record.tracker, redact(str(error)), record.tracker)
            return init(**given, config=dict(shown), **own, mode="offline")

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics, which must be finite."""

    @abstractmethod
    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        """Send responses; `kind` is one of TEXTS."""

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        """Send evaluation results, at the last step."""
        self.log(results, step)

    @abstractmethod
    def finish(self) -> None:
        """Send pending data and end the run."""


class TensorBoard(Client):
    """Event files in $TENSORBOARD_DIR, by default below the tracker folder."""

    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        parent = os.environ.get("TENSORBOARD_DIR") or self.folder / "tensorboard" / self.project
        is_new = record.path is None
        path = Path(record.path or Path(parent) / f"{self.name}-{record.id}").absolute()
        record.path = str(path)
        self._writer = SummaryWriter(record.path)
        if is_new:
            text = json.dumps(shown, indent=2, ensure_ascii=False)
            self._writer.add_text("config", _fenced(text), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        self._writer.add_text(TEXTS[kind], _as_markdown(rows), step)

    def finish(self) -> None:
        self._writer.close()


class WandB(Client):
    """A wandb run, online unless $WANDB_MODE says otherwise or there is no login."""

    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        # Output, code and package lists may contain secrets, and are in the run's folder anyway.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        folder = _made(os.environ.get("WANDB_DIR") or self.folder)
        self._run = self._start(wandb.init, record, shown, dir=folder, settings=settings)
        record.url = None if self._run.offline else self._run.url
        record.path = str(Path(self._run.dir).parent.absolute())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        data = [list(row.values()) for row in rows]
        table = self._wandb.Table(columns=[*rows[0]], data=data, allow_mixed_types=True)
        self._run.log({TEXTS[kind]: table}, step=step)

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        self._run.summary.update(dict(results))  # a resumed run rejects values for an earlier step

    def finish(self) -> None:
        self._run.finish()


class SwanLab(Client):
    """A SwanLab experiment, online unless $SWANLAB_MODE says otherwise or there is no login."""

    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        import swanlab

        self._swanlab = swanlab
        settings = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            probe={"runtime": False, "requirements": False, "git": False, "monitor": False},
        )
        folder = _made(os.environ.get("SWANLAB_LOG_DIR") or self.folder / "swanlog")
        self._run = self._start(swanlab.init, record, shown, log_dir=folder, settings=settings)
        record.url = self._run.url if self._run.mode == "online" else None
        record.path = folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        self._run.log({TEXTS[kind]: self._swanlab.Text(_as_markdown(rows))}, step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow(Client):
    """An MLflow run at $MLFLOW_TRACKING_URI, by default in a local database file."""

    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        set_defaults(MLFLOW)
        import mlflow

        self._mlflow = mlflow
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{_made(self.folder)}/mlflow.db"
        mlflow.set_tracking_uri(uri)
        if mlflow.get_experiment_by_name(self.project) is None:
            # Without a server, MLflow would write artifacts to the working directory.
            artifacts = (self.folder / "mlflow-artifacts").as_uri()
            is_local = uri.startswith("sqlite:")
            mlflow.create_experiment(self.project, artifacts if is_local else None)
        experiment_id = mlflow.set_experiment(self.project).experiment_id
        if record.place is not None:
            mlflow.start_run(run_id=record.id)
        else:
            record.id = mlflow.start_run(run_name=self.name).info.run_id
            values = {_mlflow_name(key): value for key, value in leaves(shown).items()}
            mlflow.log_params(values)
        if uri.startswith("http"):
            place = f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{record.id}"
            record.url = redact(place)  # the address may hold a password
        else:
            record.path = uri.removeprefix("sqlite:///").removeprefix("file:")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(
            {_mlflow_name(name): value for name, value in metrics.items()}, step
        )

    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._mlflow.log_text(text, f"{kind}/step_{step}.jsonl")

    def finish(self) -> None:
        self._mlflow.end_run()


# Name in train.trackers -> (client class, required modules, packages to install).
CLIENTS: dict[str, tuple[type[Client], tuple[str, ...], str]] = {
    "tensorboard": (TensorBoard, ("tensorboard",), "tensorboard"),
    "wandb": (WandB, ("wandb",), "wandb"),
    "swanlab": (SwanLab, ("swanlab",), "swanlab"),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic"), "mlflow-skinny sqlalchemy alembic"),
}


def _made(folder: str | Path) -> str:
    """The absolute path of a folder, which is created."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return str(Path(folder).absolute())


def _mlflow_name(name: str) -> str:
    """Return a valid MLflow name; mean@8 becomes mean_at_8, as in verl."""
    return re.sub(r"[^\w\-./ :]", "_", name.replace("@", "_at_"))


def _as_markdown(rows: Rows) -> str:
    parts = []
    for row in rows:
        texts = [row["prompt"], row["response"]]
        facts = {name: row[name] for name in row if name not in ("prompt", "response")}
        header = ", ".join(f"{name} {value}" for name, value in facts.items())
        parts += [f"**{header}**", *(_fenced(str(text)) for text in texts)]
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
