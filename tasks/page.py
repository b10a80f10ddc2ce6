"""What Prefect's page shows of a run: progress, newest training steps, stages with their lineage, the report.

Keys of artifacts begin with the recipe's name, so that the page keeps a history of versions for each recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.runtime import flow_run, task_run

from dapo_core.metrics import METRICS_FILE
from eval.report import REPORT_MARKDOWN, REPORT_PAGE
from tasks.artifacts import SHORT_KEY_LENGTH, Artifact
from tasks.poster import poster
from tasks.runs.run import Run
from tasks.stages import LINKS

UPDATE_SECONDS = 10.0
NUM_STEPS = 10
TAIL_BYTES = 256 * 1024  # of metrics.jsonl: a line has about 3 KiB
STEP_LINE = re.compile(r"[a-z ]+ step (?P<done>\d+)(?:/| of )(?P<total>\d+)\b.*")
STEP_COLUMNS = {
    "step": "step",
    "accuracy": "sampler/accuracy",
    "response tokens": "response_length/mean",
    "entropy": "actor/entropy",
    "KL": "actor/ppo_kl",
    "clip fraction": "actor/pg_clipfrac",
    "seconds": "perf/time_per_step",
    "tokens/s per device": "perf/throughput",
}


def artifact_key(recipe: str, name: str) -> str:
    """The key of an artifact on the page: lower-case letters, digits and dashes.

    A recipe's name that this alters by more than case and underscores gets a digest, to stay apart from others.
    """
    plain = recipe.lower().replace("_", "-")
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    parts = [
        slug,
        "" if slug == plain else hashlib.sha256(recipe.encode()).hexdigest()[:6],
        name.replace("_", "-"),
    ]
    return "-".join(part for part in parts if part)


def show_stage(run: Run, label: str, artifact: Artifact) -> None:
    """Put a finished stage on the page: where its output is, how it came about, its numbers, its inputs."""
    manifest, record = artifact.manifest(), run.stages[label]
    built = f"built in {manifest['seconds']:.1f} s on {manifest['ended_at'][:10]}"
    how = f"cached, {built}" if record.cached else built
    facts = {"output": _code(artifact.path), "state": how, "key": _short(artifact.key)}
    facts |= {"content": _short(artifact.digest), "host": manifest["host"], "run": _code(str(run.folder))}
    metrics = {name: _number(value) for name, value in manifest["metrics"].items() if not isinstance(value, list)}
    inputs = [f"- {_link(run, need)}: {_short(run.stages[need].digest)}" for need in _needs(run, label)]
    text = [f"# {label}", _table(("", ""), facts)]
    text += ["## Numbers", _table(("", ""), metrics)] if metrics else []
    text += ["## Made from", "\n".join(inputs)] if inputs else []
    _create(run, label, "markdown", "\n\n".join(text), how)


def show_report(run: Run, folder: Path, verdict: str) -> None:
    """Put the report on the page, with the path of report.html, which has the plots, and links to the stages."""
    report = unwrapped((folder / REPORT_MARKDOWN).read_text(encoding="utf-8"))
    stages = ", ".join(_link(run, label) for label in run.stages)
    place = f"With plots: {_code(str(folder / REPORT_PAGE))}"
    _create(run, "report", "markdown", f"{place}\n\n{report}\n\nStages on this page: {stages}\n", verdict)


def unwrapped(markdown: str) -> str:
    """The text with each paragraph and list item in one line: Prefect's page breaks where a line ends."""
    lines: list[str] = []
    for line in markdown.splitlines():
        begins = not line.strip() or line.startswith(("|", "#", "- "))
        if begins or not lines or not lines[-1] or lines[-1].startswith(("|", "#")):
            lines.append(line)
        else:
            lines[-1] += " " + line.strip()
    return "\n".join(lines)


class StageProgress:
    """How far a stage is, as a bar on the page; of a training, beside it, a table of its newest steps."""

    def __init__(self, run: Run, label: str, folder: Path | None = None) -> None:
        self._bar = _LiveArtifact(run, f"{label}-progress", "progress", f"{label} of {run.config.run.name}")
        self._table = _LiveArtifact(run, f"{label}-steps", "table", f"Newest steps of {run.config.run.name}")
        self._metrics_path = None if folder is None else folder / METRICS_FILE
        self._update_at = 0.0

    def on_line(self, line: str) -> None:
        """Take notice of a line that a child wrote, if it tells of a step."""
        if match := STEP_LINE.fullmatch(line.strip()):
            self.on_progress(int(match["done"]), int(match["total"]))

    def on_progress(self, done: int, total: int) -> None:
        """Bring the page up to date, at most every 10 s and at the end."""
        if time.monotonic() < self._update_at and done < total:
            return
        self._update_at = time.monotonic() + UPDATE_SECONDS
        self._bar.show(round(100 * done / max(total, 1), 1))
        if self._metrics_path is not None and (steps := newest_steps(self._metrics_path)):
            self._table.show(json.dumps([_step_row(step) for step in steps]))


def newest_steps(path: Path) -> list[dict[str, Any]]:
    """The last lines of a metrics.jsonl that may be being written, newest first."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    whole = lines[1 if start else 0 : -1]
    return [json.loads(line) for line in reversed(whole[-NUM_STEPS:])]


class _LiveArtifact:
    """One artifact that is created once and then changed: a new version each time would fill the database."""

    def __init__(self, run: Run, name: str, kind: str, description: str) -> None:
        self._request = ArtifactCreate(
            key=artifact_key(run.config.run.name, name), type=kind, description=description, **_run_ids()
        )
        self._id: UUID | None = None

    def show(self, data: Any) -> None:
        poster.post(f"{self._request.key} of {id(self)}", lambda client: self._send(client, data))

    def _send(self, client: SyncPrefectClient, data: Any) -> None:
        if self._id is None:
            self._id = client.create_artifact(self._request.model_copy(update={"data": data})).id
        else:
            client.update_artifact(self._id, ArtifactUpdate(data=data))


def _create(run: Run, name: str, kind: str, data: str, description: str) -> None:
    key = artifact_key(run.config.run.name, name)
    request = ArtifactCreate(key=key, type=kind, data=data, description=description, **_run_ids())
    poster.post(f"{key} of {run.folder.name}", lambda client: _send_new(client, request))


def _send_new(client: SyncPrefectClient, request: ArtifactCreate) -> None:
    client.create_artifact(request)


def _run_ids() -> dict[str, Any]:
    return {"flow_run_id": flow_run.id, "task_run_id": task_run.id}


def _needs(run: Run, label: str) -> Sequence[str]:
    return [need for need in LINKS[label].needs if need in run.stages]


def _link(run: Run, label: str) -> str:
    return f"[{label}](/artifacts/key/{artifact_key(run.config.run.name, label)})"


def _step_row(step: Mapping[str, Any]) -> dict[str, Any]:
    return {column: _number(step.get(name)) for column, name in STEP_COLUMNS.items()}


def _number(value: Any) -> Any:
    """A number with four significant digits, from 1000 on a whole one; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    short = round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
    return int(short) if short == int(short) else short


def _short(digest: str) -> str:
    return _code(digest[:SHORT_KEY_LENGTH])


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _table(header: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [header, ("---", "---"), *rows.items()]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)
