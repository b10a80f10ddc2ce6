"""Sends step metrics, validation responses and evaluation results to experiment trackers, in the
background.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.checkpoint.folder import TRACKERS_FILE, generations_file
from dapo_core.errors import ConfigError
from dapo_core.tracker_clients import CLIENTS, Client, Place, Record, finite
from durable import read_json_lines, write_atomically
from redaction import redact, redacted

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # queued calls per tracker; more are dropped
CLOSE_SECONDS = 60.0  # time for queued calls when training ends

Call = Callable[[Client], None]


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers whose client is not installed, with the command to install it."""
    missing = [
        name
        for name in names
        if any(importlib.util.find_spec(part) is None for part in CLIENTS[name][1])
    ]
    if missing:
        packages = " ".join(CLIENTS[name][2] for name in missing)
        raise ConfigError(
            f"train.trackers includes {', '.join(missing)}, but the client is not installed: pip "
            "install "
            f"{packages} (or '.[trackers]' in the project folder for all), or remove it from "
            "train.trackers"
        )


@contextmanager
def tracking(config: TrainingConfig, folder: Path, is_continued: bool) -> Iterator[Trackers]:
    """Yield the trackers in train.trackers for a training in `folder`; trackers.json stores their
    runs.

    A resumed training continues the runs in that file; a new one starts new runs. Tracker failures
    are logged once and counted; they never end training.
    """
    train = config.train
    place = Place(
        train.tracker_project,
        train.tracker_run or config.run.name,
        Path(train.tracker_folder).absolute(),
    )
    known = _read(folder).records if is_continued and train.trackers else {}
    records = [
        known.get(name) or Record(name, secrets.token_hex(4))
        for name in dict.fromkeys(train.trackers)
    ]
    trackers = Trackers(place, records, tracked_config(config), folder)
    try:
        yield trackers
    finally:
        trackers.close()


def send_results(folder: Path, results: Mapping[str, float], step: int) -> None:
    """Send evaluation results to the runs of a finished training in `folder`, without changing its
    files.
    """
    saved = _read(folder)
    trackers = Trackers(saved.place, list(saved.records.values()), {}, None)
    trackers.send(lambda client: client.log_results(finite(results), step))
    trackers.close()


def tracked_runs(folder: Path) -> list[str]:
    """Return the tracked runs of a training in `folder`, each as tracker name and URL or path."""
    return [
        f"{one.name} {one.url or one.path}"
        for one in _read(folder).records.values()
        if one.url or one.path
    ]


def tracked_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the configuration that trackers receive: the training sections, without secrets."""
    from dapo_core.config.training import TrainingConfig

    values = config.model_dump(mode="json")
    return {name: redacted(values[name]) for name in TrainingConfig.model_fields}


@dataclass(frozen=True)
class _Saved:
    place: Place
    records: dict[str, Record]


def _read(folder: Path) -> _Saved:
    try:
        saved = json.loads((folder / TRACKERS_FILE).read_text(encoding="utf-8"))
        place = Place(saved["project"], saved["run"], Path(saved["folder"]))
        return _Saved(place, {values["name"]: Record(**values) for values in saved["trackers"]})
    except FileNotFoundError:
        return _Saved(Place("", "", folder), {})
    except (ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be read (%r): starting new tracker runs", folder / TRACKERS_FILE, error
        )
        return _Saved(Place("", "", folder), {})


class Trackers:
    """The runs of a training in its trackers, each fed by its own thread."""

    def __init__(
        self,
        place: Place,
        records: Sequence[Record],
        config: Mapping[str, Any],
        folder: Path | None,
    ) -> None:
        """trackers.json is written to `folder`, unless it is None."""
        self.place = place
        self.folder = folder
        self._lock = threading.Lock()
        self._feeds = [_Feed(place, record, config, self._save) for record in records]
        if folder is not None and not records:
            (folder / TRACKERS_FILE).unlink(missing_ok=True)  # of an earlier attempt

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step's metrics and validation responses; returns immediately."""
        assert self.folder is not None
        rows = (
            read_json_lines(generations_file(self.folder, step))
            if "validation/accuracy" in metrics
            else []
        )
        fresh = [feed for feed in self._feeds if feed.record.last_step < step]
        for feed in fresh:
            feed.record.last_step = (
                step  # saved before sending, so that a kill in between does not send it twice
            )
        if fresh:
            self._save()
        for feed in fresh:
            feed.put(lambda client: client.log(finite(metrics), step))
            if rows:
                feed.put(lambda client: client.log_generations(rows, step))

    def send(self, call: Call) -> None:
        """Queue a call for every tracker."""
        for feed in self._feeds:
            feed.put(call)

    def close(self) -> None:
        """Wait for queued calls, at most CLOSE_SECONDS in total."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(deadline - time.monotonic(), 0.0))
        if self._feeds:
            self._save()

    def _save(self) -> None:
        if self.folder is None:
            return
        with self._lock:
            place = {
                "project": self.place.project,
                "run": self.place.run,
                "folder": str(self.place.folder),
            }
            runs = [asdict(feed.record) for feed in self._feeds]
            text = json.dumps({**place, "trackers": runs}, indent=2) + "\n"
            try:
                write_atomically(self.folder / TRACKERS_FILE, text)
            except (
                OSError
            ) as error:  # if the disk is full, the next write of metrics.jsonl ends training
                logger.warning("%s cannot be written: %s", self.folder / TRACKERS_FILE, error)


class _Feed:
    """Calls to one tracker, made in order on its own thread, where its client is also opened."""

    def __init__(
        self, place: Place, record: Record, config: Mapping[str, Any], save: Callable[[], None]
    ) -> None:
        self.record = record
        self._open = lambda: CLIENTS[record.name][0](place, record, config)
        self._save = save
        self._client: Client | None = None
        self._calls: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(
            target=self._run, name=f"tracker-{record.name}", daemon=True
        )
        self._is_failing = False

    def put(self, call: Call | None) -> None:
        if not self._thread.ident:
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"{MAX_WAITING} calls are queued")

    def end(self) -> None:
        if self._thread.ident:
            self.put(None)

    def join(self, seconds: float) -> None:
        if not self._thread.ident:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(
                f"the last {self._calls.qsize()} calls did not finish within {CLOSE_SECONDS:.0f} s"
            )
        if self.record.num_failed:
            logger.warning("%s: %d calls failed", self.record.name, self.record.num_failed)

    def _run(self) -> None:
        self._try(self._begin)
        while (call := self._calls.get()) is not None:
            self._try(self._with_client, call)
        if self._client is not None:
            self._try(self._client.finish)

    def _begin(self) -> None:
        self._client = self._open()
        self._save()
        logger.info("tracked by %s: %s", self.record.name, self.record.url or self.record.path)

    def _with_client(self, call: Call) -> None:
        if self._client is None:
            self._fail("the client is not open")
        else:
            call(self._client)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - a client may raise anything, and training must continue
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        """Count a failure; the first one is logged."""
        self.record.num_failed += 1
        if not self._is_failing:
            self._is_failing = True
            message = (
                "tracker %s failed (%s); training continues, further failures are only counted"
            )
            logger.warning(message, self.record.name, redact(reason))
