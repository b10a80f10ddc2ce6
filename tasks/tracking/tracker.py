"""Sends a training's metrics.jsonl to one tracker, until the training ends (`dapo track`)."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.resume import LOCK_FILE
from dapo_core.config.training import TrainingConfig
from dapo_core.errors import DapoError
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.metrics.step_files import shown_rows
from durable import JsonLinesFollower, is_locked, write_atomically
from redaction import redacted
from tasks.artifacts.store import stage_log_of
from tasks.config import ChainConfig
from tasks.tracking.clients import CLIENTS, TEXTS, Client, Record

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
NOT_METRICS = ("step", "wall_time", "policy_version")


class TrackerError(DapoError, RuntimeError):
    """A tracker cannot be opened, or refused some of what was sent."""


def record_path(folder: Path, tracker: str) -> Path:
    """The record of a training's run in a tracker, beside the log of its process.

    `folder` is the training's output. In a store both are beside the log of the stage, because an
    artifact never changes.
    """
    log = stage_log_of(folder) or folder / "trackers.log"
    return log.with_name(f"{log.stem}-{tracker}.json")


def following_lock(folder: Path) -> Path:
    """The lock that `dapo train` holds as long as trackers shall follow."""
    return record_path(folder, "following").with_suffix(".lock")


def read_record(folder: Path, tracker: str) -> Record:
    """The record of an earlier process, or that of a new run."""
    path = record_path(folder, tracker)
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Record(tracker)
    except (ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%r): starting a new run", path, error)
        return Record(tracker)


def tracked_runs(folder: Path) -> list[str]:
    """The runs of a training in trackers, each as "TRACKER URL-OR-PATH"."""
    records = [read_record(folder, tracker) for tracker in CLIENTS]
    return [f"{record.tracker} {record.place}" for record in records if record.place]


def tracked_config(config: ChainConfig) -> dict[str, Any]:
    """The configuration that trackers receive: the training sections, without secrets."""
    values = config.model_dump(mode="json")
    return {name: redacted(values[name]) for name in TrainingConfig.model_fields}


def send_training(
    config: ChainConfig, tracker: str, folder: Path, results: Mapping[str, float]
) -> None:
    """Send the metrics in a training's output `folder` to a tracker, then evaluation `results`.

    Follows a training in progress until it ends. Raises TrackerError if the tracker cannot be
    opened, and at the end if calls failed.
    """
    locks = (following_lock(folder), folder / CHECKPOINTS / LOCK_FILE)
    log, is_over = JsonLinesFollower(folder / METRICS_FILE), False
    run = TrackedRun(config, tracker, folder)
    while not is_over:
        is_over = not any(map(is_locked, locks))  # before reading, so that no line is missed
        for row in log.read():
            run.send(row)
        if not is_over:
            time.sleep(POLL_SECONDS)
    run.send_results(results)
    run.finish()


class TrackedRun:
    """A training's run in a tracker. It is opened when there is something to send."""

    def __init__(self, config: ChainConfig, tracker: str, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.record = read_record(folder, tracker)
        self._last_seen: int | None = None
        self._client: Client | None = None
        self._failures: list[str] = []

    def send(self, row: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl and responses of its step, unless it repeats a step. If the
        file begins with another line than before, a new run begins.
        """
        step = row["step"]
        is_first = self._last_seen is None or step <= self._last_seen
        if is_first and self.record.began != row.get("wall_time"):
            self._begin(row.get("wall_time"))
        self._last_seen = step
        if step <= self.record.last_step:
            return
        client = self._open()
        self.record.last_step = step
        self._save()  # before sending, so that a kill in between does not send it twice
        self._try(lambda: client.log(finite(row), step))
        for kind in TEXTS:
            if rows := shown_rows(self.folder, kind, step):
                self._try(partial(client.log_texts, kind, rows, step))

    def send_results(self, results: Mapping[str, float]) -> None:
        """Send evaluation results at the last step, unless they were the last sent."""
        numbers = finite(results)
        if numbers and numbers != self.record.results:
            client = self._open()
            self.record.results = numbers
            self._save()
            self._try(lambda: client.log_results(numbers, self.record.last_step))

    def finish(self) -> None:
        """Close the run; raises TrackerError if calls failed."""
        self._close()
        if self._failures:
            count, name = len(self._failures), self.record.tracker
            raise TrackerError(f"{count} calls to {name} failed, the first: {self._failures[0]}")

    def _begin(self, began: float | None) -> None:
        if self.record.began is not None:
            self._close()
            self.record = Record(self.record.tracker)
        self.record.began = began

    def _open(self) -> Client:
        if self._client is None:
            record, config = self.record, self.config
            try:
                self._client = CLIENTS[record.tracker][0](record, config, tracked_config(config))
            except Exception as error:
                raise TrackerError(f"{record.tracker}: {type(error).__name__}: {error}") from error
            self._save()
            logger.info("tracked by %s: %s", record.tracker, record.place)
        return self._client

    def _close(self) -> None:
        if self._client is not None:
            self._try(self._client.finish)
            self._client = None

    def _save(self) -> None:
        path = record_path(self.folder, self.record.tracker)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self.record), indent=2) + "\n")

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a client may raise anything; later steps are still sent
            self._failures.append(f"{type(error).__name__}: {error}")
            logger.exception("%s failed", self.record.tracker)


def finite(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line that are finite numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_METRICS and value is not None and math.isfinite(value)
    }
