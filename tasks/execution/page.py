"""Prefect artifacts of a run: progress, recent training steps, stages with their inputs, report.

Artifact keys begin with the recipe's name, so that Prefect keeps a version history per recipe.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from dapo_core.metrics.log import METRICS_FILE
from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS, saved_steps, shown_rows
from eval.report.report import REPORT_MARKDOWN, REPORT_PAGE
from redaction import redacted
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH
from tasks.data.card import CARD_MARKDOWN
from tasks.execution.progress import Progress, Row, StepProgress
from tasks.links import link_of
from tasks.runs.run import Run

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 10.0
REQUEST_SECONDS = 10.0
RETRY_SECONDS, PATIENCE_SECONDS = 5.0, 60.0  # while the server is unreachable
NUM_STEPS = 10
SHOWN_CHARACTERS = 2000  # at each end of a response
KINDS = {GENERATIONS: "Validation responses", ROLLOUTS: "Responses trained on"}
STEP_COLUMNS = {
    "step": "step",
    "accuracy": "sampler/accuracy",
    "response tokens": "response_length/mean",
    "entropy": "actor/entropy",
    "KL": "actor/ppo_kl",
    "clip fraction": "actor/pg_clipfrac",
    "seconds": "perf/time_per_step",
    "engines idle": "perf/engine_idle_ratio",
    "tokens/s per device": "perf/throughput",
}

# Stages never wait for the server; the flow run waits for this thread at its end.
sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefect-page")
_give_up_at = math.inf  # on an unreachable server, once the flow run waits


def artifact_key(recipe: str, name: str) -> str:
    """The Prefect key of an artifact: lower-case letters, digits and dashes.

    If this changes more than the case and underscores of the recipe's name, a digest keeps the key
    unique.
    """
    plain = recipe.lower().replace("_", "-")
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    digest = "" if slug == plain else hashlib.sha256(recipe.encode()).hexdigest()[:6]
    return "-".join(part for part in (slug, digest, name.lower().replace("_", "-")) if part)


def show_stage(run: Run, label: str, artifact: Artifact) -> None:
    """Show a finished stage: path of its output, cached or built, metrics and inputs."""
    manifest, record = artifact.manifest(), run.stages[label]
    built = f"built in {manifest['seconds']:.1f} s on {manifest['ended_at'][:10]}"
    how = f"cached, {built}" if record.cached else built
    facts = {"output": _code(artifact.path), "state": how, "key": _short(artifact.key)}
    facts |= {"content": _short(artifact.digest), "host": manifest["host"]}
    facts |= {"run": _code(str(run.folder))}
    metrics = {
        name: _number(value)
        for name, value in manifest["metrics"].items()
        if not isinstance(value, list)
    }
    needs = [need for need in link_of(run.config, label).needs if need in run.stages]
    inputs = [f"- {_link(run, need)}: {_short(run.stages[need].digest)}" for need in needs]
    text = [f"# {label}", _table(facts)]
    text += ["## Numbers", _table(metrics)] if metrics else []
    text += ["## Made from", "\n".join(inputs)] if inputs else []
    card = Path(artifact.path) / CARD_MARKDOWN
    if card.is_file():
        text.append(unwrapped(card.read_text(encoding="utf-8")).replace("# ", "## "))
    PageArtifact(run, label, "markdown", how).show("\n\n".join(text))


def show_report(run: Run, folder: Path, verdict: str) -> None:
    """Show the report, with links to the stages and the path of report.html with the plots."""
    report = unwrapped((folder / REPORT_MARKDOWN).read_text(encoding="utf-8"))
    stages = ", ".join(_link(run, label) for label in run.stages)
    place = f"With plots: {_code(str(folder / REPORT_PAGE))}"
    text = f"{place}\n\n{report}\n\nStages on this page: {stages}\n"
    PageArtifact(run, "report", "markdown", verdict).show(text)


def wait_until_sent() -> None:
    """Wait until everything has been sent; Prefect's client cannot send while Python shuts down.

    An unreachable server is retried for PATIENCE_SECONDS in all.
    """
    global _give_up_at
    _give_up_at = time.monotonic() + PATIENCE_SECONDS
    sender.submit(lambda: None).result()
    _give_up_at = math.inf


def unwrapped(markdown: str) -> str:
    """The text with each paragraph and list item on one line, since Prefect renders line breaks."""
    lines: list[str] = []
    for line in markdown.splitlines():
        begins = not line.strip() or line.startswith(("|", "#", "- "))
        if begins or not lines or not lines[-1] or lines[-1].startswith(("|", "#")):
            lines.append(line)
        else:
            lines[-1] += " " + line.strip()
    return "\n".join(lines)


class StageProgress:
    """A progress bar for a stage, updated at most every 10 s and at the end."""

    def __init__(self, run: Run, label: str) -> None:
        description = f"{label} of {run.config.run.name}"
        self._bar = PageArtifact(run, f"{label}-progress", "progress", description)
        self._update_at = 0.0

    def on_progress(self, done: int, total: int) -> None:
        """Update the bar if it is due."""
        self.update(done, total)

    def update(self, done: int, total: int) -> bool:
        """Update the bar if it is due; returns whether it was."""
        is_due = time.monotonic() >= self._update_at or done >= total
        if is_due:
            self._bar.show(round(100 * done / max(total, 1), 1))
            self._update_at = time.monotonic() + UPDATE_SECONDS
        return is_due


class CommandProgress:
    """The progress that a command writes to a file of JSON lines: log lines, and a bar."""

    def __init__(self, run: Run, label: str, path: Path) -> None:
        self.path = path
        self._page = StageProgress(run, label)

    def on_rows(self, rows: Sequence[Row]) -> list[Progress]:
        """Show new lines of the file; returns those to log."""
        found = [Progress(**row) for row in rows]
        self._page.on_progress(found[-1].done, found[-1].total)
        return found


class TrainingProgress:
    """A training's progress from its metrics.jsonl, with recent steps and validation responses."""

    def __init__(self, run: Run, label: str, folder: Path) -> None:
        name = run.config.run.name
        self.path = folder / METRICS_FILE
        self._page = StageProgress(run, label)
        self._table = PageArtifact(run, f"{label}-steps", "table", f"Recent steps of {name}")
        self._texts = {
            kind: PageArtifact(run, f"{label}-{kind}", "markdown", f"{title} of {name}")
            for kind, title in KINDS.items()
        }
        self._shown = dict.fromkeys(KINDS, -1)  # the last step of each kind
        self._steps = StepProgress(run.config.train.total_steps)
        self._rows: list[Row] = []
        self._began = time.time()

    def on_rows(self, rows: Sequence[Row]) -> list[Progress]:
        """Show new lines of the file; returns the steps of this attempt, to be logged."""
        for row in rows:  # a step that is trained again replaces what followed it
            self._rows = [known for known in self._rows if known["step"] < row["step"]]
            self._rows = [*self._rows, row][-NUM_STEPS:]
        last_step = self._rows[-1]["step"]
        if self._page.update(last_step, self._steps.total_steps):
            table = [
                {name: _number(row.get(key)) for name, key in STEP_COLUMNS.items()}
                for row in self._rows[::-1]
            ]
            self._table.show(json.dumps(table))
            self._show_texts(last_step)
        fresh = [row for row in rows if row.get("wall_time", 0.0) >= self._began]
        return [self._steps.after(row["step"], row) for row in fresh]

    def _show_texts(self, last_step: int) -> None:
        """Show responses of the latest validation, and of the latest step that saved its own."""
        for kind, page in self._texts.items():
            steps = saved_steps(self.path.parent, kind)
            fresh = [step for step in steps if self._shown[kind] < step <= last_step]
            for step in reversed(fresh):
                if rows := shown_rows(self.path.parent, kind, step):
                    page.show(texts_page(f"{KINDS[kind]}, training step {step}", rows))
                    self._shown[kind] = step
                    break


def texts_page(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Responses as Markdown; long ones are cut in the middle."""
    parts = [f"# {title}"]
    for row in rows:
        about = (
            f"{row['set']}: {row['verdict']}, score {_number(row['score'])}, answer "
            f"{row['answer']!r}"
        )
        parts.append(f"## {about}, gold {row['gold']!r}".replace("\n", " "))
        for name in ("prompt", "response"):
            text = row[name]
            if len(text) > 2 * SHOWN_CHARACTERS:
                text = f"{text[:SHOWN_CHARACTERS]}\n[...]\n{text[-SHOWN_CHARACTERS:]}"
            parts.append(f"{name}:\n\n" + "".join(f"    {line}\n" for line in text.splitlines()))
    return "\n\n".join(parts)


class PageArtifact:
    """A Prefect artifact that is updated in place: each new one would stay in the database."""

    def __init__(self, run: Run, name: str, kind: str, description: str) -> None:
        key = artifact_key(run.config.run.name, name)
        ids: dict[str, Any] = {"flow_run_id": flow_run.id, "task_run_id": task_run.id}
        self._request = ArtifactCreate(key=key, type=kind, description=description, **ids)
        self._id: UUID | None = None
        self._unsent: deque[Any] = deque(maxlen=1)  # a newer content replaces one in line

    def show(self, data: Any) -> None:
        """Send the content to this flow run's API in the background; nothing outside a flow run."""
        if self._request.flow_run_id is None:
            # a client without a server address would start a server that outlives this process
            return
        self._unsent.append(redacted(data))
        sender.submit(contextvars.copy_context().run, self._send)

    def _send(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        data = self._unsent.pop() if self._unsent else None
        while data is not None:
            try:
                return self._send_once(data)
            except (httpx.HTTPError, PrefectException, RuntimeError) as error:
                is_away = isinstance(error, httpx.TransportError)
                if not is_away or time.monotonic() > min(deadline, _give_up_at):
                    logger.warning(
                        "cannot show %s in the Prefect UI: %s: %s",
                        self._request.key,
                        type(error).__name__,
                        error,
                    )
                    return
                time.sleep(RETRY_SECONDS)

    def _send_once(self, data: Any) -> None:
        # Prefect's own retries would delay later updates for minutes.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": REQUEST_SECONDS}, sync_client=True) as client,
        ):
            if self._id is None:
                self._id = client.create_artifact(
                    self._request.model_copy(update={"data": data})
                ).id
            else:
                client.update_artifact(self._id, ArtifactUpdate(data=data))


def _link(run: Run, label: str) -> str:
    return f"[{label}](/artifacts/key/{artifact_key(run.config.run.name, label)})"


def _number(value: Any) -> Any:
    """A number rounded to four significant digits, or to an integer from 1000."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    short = round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
    return int(short) if short == int(short) else short


def _short(digest: str) -> str:
    return _code(digest[:SHORT_KEY_LENGTH])


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _table(rows: Mapping[str, Any]) -> str:
    return "\n".join(
        f"| {name} | {value} |" for name, value in {"": "", "---": "---", **rows}.items()
    )
