"""A results directory: settings.json, results.jsonl (a row for each sample of each item) and summary.json."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval import EvaluationError, InputError
from eval.answers.grading import GRADER, VERDICTS, Verdict
from eval.client import Endpoint, Sampling
from eval.problems.items import Item
from eval.problems.prompts import Prompt, Template

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"
# Settings that verdicts depend on and responses do not: rows with others are graded again, not asked again.
GRADING_SETTINGS = ("grader", "golds")

RowKey = tuple[str, int]  # (id of the item, number of the sample)


class ResultsError(InputError):
    """A results directory is missing files or rows, or holds rows of another program."""


@dataclass(frozen=True)
class Row:
    """One item's outcome, as it stands on one line of results.jsonl."""

    id: str  # of the item
    sample: int  # 0 to k - 1, of k responses to the item
    prompt: Prompt  # as sent: messages of a chat, or the text to complete
    response: str | None  # None: the request failed, `failure` says why
    finish_reason: str | None
    response_tokens: int | None
    answer: str | None  # exact ruler
    gold: str
    verdict: Verdict  # exact ruler
    aisbench_answer: str | None
    aisbench_right: bool
    aisbench_raises: bool
    attempts: int
    seconds: float
    subject: str | None
    level: str | None
    failure: str | None

    @property
    def key(self) -> RowKey:
        """What tells this row from the others of an evaluation."""
        return self.id, self.sample

    @property
    def is_right(self) -> bool:
        """True when a finished response gave the gold answer."""
        return self.verdict == "right"

    @property
    def problem(self) -> str:
        """What was asked: the last message of a chat, or the whole text."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def is_answered(self) -> bool:
        """False when no response came, so that the model cannot be judged on this item."""
        return self.verdict != "request_failed"

    def to_line(self) -> str:
        """The row as a line of results.jsonl."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def parse_row(line: str) -> Row | None:
    """The row on a line of results.jsonl, or None when the line is torn or not ours."""
    try:
        fields = json.loads(line)
        prompt = fields["prompt"]
        row = Row(**{**fields, "prompt": prompt if isinstance(prompt, str) else tuple(prompt)})
    except (ValueError, TypeError, KeyError):
        return None
    return row if row.verdict in VERDICTS else None


def read_rows(directory: Path) -> dict[RowKey, Row]:
    """Rows in file order; of several for one sample of an item the last counts, an unreadable line none."""
    path = directory / RESULTS_FILE
    if not path.is_file():
        return {}
    rows: dict[RowKey, Row] = {}
    torn = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = parse_row(line)
            if row is None:
                torn += 1
            else:
                rows[row.key] = row
    if torn:
        logger.warning("%s: %d unreadable lines (a write cut short); those rows count as missing", path, torn)
    return rows


def write_rows(directory: Path, rows: Iterable[Row]) -> None:
    """Replace results.jsonl by these rows, atomically."""
    write_atomically(directory / RESULTS_FILE, "".join(row.to_line() for row in rows))


def read_settings(directory: Path) -> dict[str, Any] | None:
    """The settings that a results directory was made with; None when it holds none that can be read."""
    try:
        settings = json.loads((directory / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def make_folder(path: str | Path) -> Path:
    """The folder, made where there is none. Raises ResultsError when it cannot be, as where a file is."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ResultsError(
            f"{path} cannot be a folder: a file has that name; name another with --output"
        ) from None
    except OSError as error:
        raise ResultsError(f"{path} cannot be made: {error.strerror}; name another with --output") from None
    return path


def load_results(directory: str | Path) -> tuple[dict[str, Any], dict[RowKey, Row]]:
    """(settings, rows) of a finished evaluation. Raises ResultsError when it is not one, or not finished."""
    directory = Path(directory)
    settings = read_settings(directory)
    if settings is None or not _is_ours(settings):
        fault = f"has no readable {SETTINGS_FILE}" if directory.is_dir() else "is not a folder"
        raise ResultsError(
            f"{directory} {fault}: it is not a results directory of `dapo eval`; name the one of its --output"
        )
    rows = read_rows(directory)
    expected = settings["num_items"] * settings["sampling"]["num_samples"]
    if len(rows) != expected:
        raise ResultsError(
            f"{directory} holds {len(rows)} of {expected} responses: the evaluation did not finish. "
            f"Run the same evaluation again; it asks only for what is missing."
        )
    return settings, rows


def _is_ours(settings: dict[str, Any]) -> bool:
    """True when what a reader of the rows needs is there."""
    sampling = settings.get("sampling")
    counts = (settings.get("num_items"), sampling.get("num_samples") if isinstance(sampling, dict) else None)
    return settings.keys() >= {"model", "grader"} and all(isinstance(count, int) for count in counts)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other evaluations out of the directory. Raises EvaluationError when one is writing to it."""
    path = directory / ".lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # its owner removed it: the next one locks a new file
                raise BlockingIOError
        except BlockingIOError:
            raise EvaluationError(
                f"another evaluation is writing to {directory}; wait for it, or name another folder with --output"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def make_settings(
    items: Sequence[Item],
    endpoint: Endpoint,
    sampling: Sampling,
    model_digest: str | None,
    *,
    benchmark: str | None = None,
    template: Template | None = None,
    grader: str = GRADER,
) -> dict[str, Any]:
    """What the rows of a results directory depend on; equal settings mean that stored rows can be kept.

    The model is its content digest where known, else its served name; the URL and the patience of the
    client do not change an answer and are left out.
    """
    return {
        "benchmark": benchmark,
        "model": model_digest or endpoint.model,
        "api": "completions" if isinstance(items[0].prompt, str) else "chat/completions",
        "prompt_template": {"name": template.name, "text": template.text} if template else None,
        "grader": grader,
        "sampling": {**asdict(sampling), "stop": list(sampling.stop)},
        "num_items": len(items),
        "prompts": _digest([(item.id, item.prompt) for item in items]),
        "golds": _digest([(item.id, item.gold, item.subject, item.level) for item in items]),
    }


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """One phrase per setting that differs, e.g. "sampling.max_tokens: 512 before, 256 after"."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        prefix = f"{name}." if name else ""
        return [
            phrase for key in keys for phrase in differences(before.get(key), after.get(key), f"{prefix}{key}")
        ]
    return [] if before == after else [f"{name}: {before} before, {after} after"]


def rate(rows: Sequence[Row], is_counted: Callable[[Row], bool]) -> float:
    """Share of the rows that are counted; 0 without rows."""
    return sum(map(is_counted, rows)) / len(rows) if rows else 0.0


def group_by(rows: Iterable[Row], field: str) -> dict[str, list[Row]]:
    """Rows by `level` or `subject`, in natural order (2 before 10); rows without one are left out."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = getattr(row, field)
        if key is not None:
            groups.setdefault(key, []).append(row)
    return {key: groups[key] for key in sorted(groups, key=_natural)}


def mean_response_tokens(rows: Iterable[Row]) -> float | None:
    """Mean over the rows whose tokens the server counted; None when it counted none."""
    counts = [row.response_tokens for row in rows if row.response_tokens is not None]
    return sum(counts) / len(counts) if counts else None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _natural(key: str) -> tuple[int, float, str]:
    try:
        return 0, float(key), key
    except ValueError:
        return 1, 0.0, key


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
