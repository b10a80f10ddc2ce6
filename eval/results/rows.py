"""The results folder: settings.json, results.jsonl (a row per sample) and summary.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from durable import UNSET, LockHeld, differences, iterate_json_lines, locked, write_atomically
from eval import EvaluationError, InputError
from eval.answers.grading import SCORER_RULES, VERDICTS, AISBench, MathGrader, Verdict
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import Item
from eval.problems.prompts import Prompt, Template, problem_of

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"
# Settings that affect verdicts but not responses: if they change, stored rows are graded again.
GRADING_SETTINGS = ("grader", "golds")
# who served which weights; not among the settings that must agree, see `eval.requests.identity`
SERVED = "served"

_TEXTS = ("prompt", "response", "reasoning", "details")  # not part of an evaluation's digest
RowKey = tuple[str, int]  # (item id, sample number)


class ResultsError(InputError):
    """A results folder lacks files or rows, or contains rows of another program."""


@dataclass  # not frozen, which would make construction five times slower
class Row:
    """One response to one item: a line of results.jsonl."""

    id: str  # of the item
    sample: int  # 0 to k - 1
    prompt: Prompt  # as sent: chat messages, or text to complete
    response: str | None  # without thinking; None if the request failed
    finish_reason: str | None
    response_tokens: int | None  # including thinking
    answer: str | None  # extracted by the exact grader
    gold: str
    verdict: Verdict  # of the set's grader
    attempts: int
    seconds: float
    subject: str | None
    level: str | None
    failure: str | None
    ended_at: float | None = None  # Unix time; None in imported logs
    reasoning: str | None = None  # thinking, with tags if it was part of the text; never graded
    reasoning_tokens: int | None = None  # counted by the server
    details: dict[str, Any] | None = None  # further grader results, such as a score
    aisbench: AISBench | None = None  # the second verdict, if AISBench's rule applies
    images: list[str] | None = None  # names of files in the folder `images`, one per `<image>`

    @property
    def key(self) -> RowKey:
        """Identifies the row within its evaluation."""
        return self.id, self.sample

    @property
    def text(self) -> str | None:
        """The text as the server sent it, including thinking in tags."""
        return f"{self.reasoning or ''}{self.response}" if self.is_inline else self.response

    @property
    def is_chat(self) -> bool:
        """True if the prompt is chat messages."""
        return not isinstance(self.prompt, str)

    @property
    def is_inline(self) -> bool:
        """True if the thinking was part of the text, in tags."""
        thinking = self.reasoning or ""
        return thinking.endswith("</think>") or (self.response == "" and "<think>" in thinking)

    @property
    def is_cut_while_thinking(self) -> bool:
        """True if thinking in the text is unclosed, whatever the finish reason."""
        return self.is_inline and not str(self.reasoning).endswith("</think>")

    @property
    def is_right(self) -> bool:
        """True if a finished response gave the gold answer."""
        return self.verdict == "right"

    @property
    def is_right_by_aisbench(self) -> bool:
        """True if AISBench's rule was applied and accepts the response."""
        return self.aisbench is not None and self.aisbench.is_right

    @property
    def problem(self) -> str:
        """The last message of the prompt, or its whole text."""
        return problem_of(self.prompt)

    @property
    def is_answered(self) -> bool:
        """False if the request failed, in which case the row says nothing about the model."""
        return self.verdict != "request_failed"

    @property
    def num_chars(self) -> tuple[int, int]:
        """Characters of the thinking and of the response."""
        return len(self.reasoning or ""), len(self.response or "")


@dataclass
class Outline(Row):
    """A row with only the ends of response and thinking, for reports. Never written."""

    chars: tuple[int, int] = (0, 0)

    @property
    def num_chars(self) -> tuple[int, int]:
        """Characters of the whole thinking and response."""
        return self.chars


Samples = tuple[Row, ...]  # the k rows of one item, by sample number


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its settings, and k rows for each item."""

    settings: dict[str, Any]
    items: dict[str, Samples]
    num_samples: int  # k
    folder: Path | None = None  # of its results, with their pictures

    @staticmethod
    def of(settings: dict[str, Any], rows: Iterable[Row]) -> Evaluation:
        """Group rows by item. Raises ResultsError unless every item has the samples 0 to k - 1."""
        items: dict[str, list[Row]] = {}
        for row in sorted(rows, key=attrgetter("sample")):
            items.setdefault(row.id, []).append(row)
        k = max(map(len, items.values()), default=1)
        numbers = list(range(k))
        uneven = [
            identity
            for identity, group in items.items()
            if [row.sample for row in group] != numbers
        ]
        if uneven:
            raise ResultsError(
                f"{len(uneven)} of {len(items)} items do not have the samples 0 to {k - 1} (first: "
                f"{uneven[0]!r}): the evaluation did not finish. Run it again; only missing "
                "requests are sent."
            )
        return Evaluation(
            settings, {identity: tuple(group) for identity, group in items.items()}, k
        )

    def by_problem(self) -> Evaluation:
        """Merge items with the same prompt, as imported logs may have, into one.

        Problems have equal weight: if some have more samples than others, the surplus is dropped
        with a warning.
        """
        merged: dict[str, list[Row]] = {}
        for row in self.rows:
            merged.setdefault(
                json.dumps([row.prompt, row.images, row.gold], sort_keys=True), []
            ).append(row)
        if len(merged) == len(self.items):
            return self
        k = min(map(len, merged.values()))
        if num_surplus := sum(len(rows) - k for rows in merged.values()):
            logger.warning(
                "dropping %d surplus responses to repeated prompts: %d per prompt", num_surplus, k
            )
        rows = [
            replace(row, id=rows[0].id, sample=number)
            for rows in merged.values()
            for number, row in enumerate(rows[:k])
        ]
        return replace(Evaluation.of(self.settings, rows), folder=self.folder)

    @property
    def rows(self) -> list[Row]:
        """All rows, item by item."""
        return [row for samples in self.items.values() for row in samples]

    @property
    def right(self) -> dict[str, int | None]:
        """Number of right responses per item; None if a request failed."""
        return {
            identity: num_right(samples) if is_answered(samples) else None
            for identity, samples in self.items.items()
        }

    @property
    def has_aisbench(self) -> bool:
        """True if AISBench's rule graded the responses too."""
        return any(row.aisbench is not None for row in self.rows)

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that comparable evaluations share: all but the model."""
        return {key: value for key, value in self.settings.items() if key not in ("model", SERVED)}

    @property
    def digest(self) -> str:
        """SHA-256 of settings and rows, unique to a measurement: rows contain request times."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        for row in self.rows:
            fields = {**vars(row), **dict.fromkeys(_TEXTS), "chars": row.num_chars}
            digest.update(json.dumps(fields, default=vars).encode())
        return digest.hexdigest()


def load_evaluation(directory: str | Path, max_chars: int | None = None) -> Evaluation:
    """Load a finished evaluation, one item per problem. Raises ResultsError like `read_evaluation`.

    With `max_chars` the rows are outlines with this much of each text; 0 takes a hundredth of the
    memory.
    """
    return read_evaluation(directory, max_chars).by_problem()


def read_evaluation(directory: str | Path, max_chars: int | None = None) -> Evaluation:
    """Load a finished evaluation as stored. Raises ResultsError if it is missing or unfinished."""
    directory = Path(directory)
    settings = read_settings(directory)
    if settings is None or not _is_complete(settings):
        fault = f"has no readable {SETTINGS_FILE}" if directory.is_dir() else "is not a folder"
        raise ResultsError(
            f"{directory} {fault}: it is not a results folder of `dapo eval`; name the folder "
            "given as --output"
        )
    rows = read_rows(directory, max_chars)
    expected = settings["num_items"] * settings["sampling"]["num_samples"]
    if len(rows) > expected:
        last = next(reversed(rows.values()))
        raise ResultsError(
            f"{directory / RESULTS_FILE} has {len(rows)} rows, but the evaluation has {expected} "
            f"responses: remove the {len(rows) - expected} added rows (the last row is item "
            f"{last.id!r}, sample {last.sample})"
        )
    if len(rows) < expected:
        raise ResultsError(
            f"{directory} holds {len(rows)} of {expected} responses: the evaluation did not "
            "finish, or lines were lost since. Run the same evaluation again; only missing "
            "requests are sent."
        )
    return replace(Evaluation.of(settings, rows.values()), folder=directory)


def _is_complete(settings: Mapping[str, Any]) -> bool:
    """True if the settings contain everything needed to read the rows."""
    sampling = settings.get("sampling")
    counts = (
        settings.get("num_items"),
        sampling.get("num_samples") if isinstance(sampling, dict) else None,
    )
    return settings.keys() >= {"model", "grader"} and all(
        isinstance(count, int) for count in counts
    )


def num_right(samples: Samples) -> int:
    """Return the number of right responses to an item."""
    return sum(row.is_right for row in samples)


def is_answered(samples: Samples) -> bool:
    """True if no request for the item failed."""
    return all(row.is_answered for row in samples)


def read_rows(directory: Path, max_chars: int | None = None) -> dict[RowKey, Row]:
    """Read rows or outlines in file order. Torn lines are skipped; the last row per sample counts.

    Raises ResultsError for a line written by another version.
    """
    rows = (
        _parse_row(directory, fields, max_chars)
        for fields in iterate_json_lines(directory / RESULTS_FILE)
    )
    return {row.key: row for row in rows}


def _parse_row(directory: Path, fields: Any, max_chars: int | None) -> Row:
    try:
        if not isinstance(fields["prompt"], str):
            fields["prompt"] = tuple(fields["prompt"])
        if fields.get("aisbench"):
            fields["aisbench"] = AISBench(**fields["aisbench"])
        row = Row(**fields)
        if row.verdict not in VERDICTS:
            raise ValueError(f"verdict {row.verdict!r}")
    except (TypeError, KeyError, ValueError) as error:
        raise ResultsError(
            f"{directory} has a row of another version or program ({error}): use that version, or "
            "another folder"
        ) from None
    if max_chars is None:
        return row
    texts = {"response": row.response, "reasoning": row.reasoning} if max_chars else {}
    ends = {name: text and text[-max_chars:] for name, text in texts.items()}
    return Outline(
        **{**vars(row), "response": None, "reasoning": None, **ends}, chars=row.num_chars
    )


def join_lines(rows: Iterable[Row]) -> bytearray:
    """Return rows as lines of results.jsonl."""
    lines = bytearray()  # takes half the time of a join, which keeps orjson's oversized buffers
    for row in rows:
        lines += orjson.dumps(vars(row), option=orjson.OPT_APPEND_NEWLINE)
    return lines


def write_rows(directory: Path, rows: Iterable[Row]) -> None:
    """Replace results.jsonl atomically."""
    write_atomically(directory / RESULTS_FILE, join_lines(rows))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace settings.json or summary.json atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_settings(directory: Path) -> dict[str, Any] | None:
    """Read the settings of a results folder; None if they are missing or unreadable."""
    try:
        settings = json.loads((directory / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def make_folder(path: str | Path) -> Path:
    """Create the folder if missing. Raises ResultsError if it cannot."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(
            f"{path} cannot be created: {error.strerror}; choose another --output"
        ) from None
    return path


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Lock the folder. Raises EvaluationError if another evaluation is writing to it."""
    path = directory / ".lock"
    try:
        with locked(path):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except LockHeld as error:
        raise EvaluationError(
            f"another evaluation is writing to {directory} ({error}); wait for it, or choose "
            "another --output"
        ) from None


def make_settings(
    items: Sequence[Item],
    endpoint: Endpoint,
    sampling: Sampling,
    model_digest: str | None,
    *,
    benchmark: str | None = None,
    template: Template | None = None,
    grader: str = MathGrader.rule,
) -> dict[str, Any]:
    """Return everything that stored rows depend on. Rows with equal settings can be reused.

    The model is its content digest if known, else its served name. The client's limits do not
    affect an answer and are omitted. The server is recorded later, under SERVED.
    """
    return {
        "benchmark": benchmark,
        "model": model_digest or endpoint.model,
        "api": _api_of(items[0]),
        "prompt_template": template.to_json() if template else None,
        "grader": grader,
        "sampling": sampling.to_json(),
        "num_items": len(items),
        "prompts": _digest(
            [(item.id, item.prompt, *item.options, *item.image_names) for item in items]
        ),
        "golds": _digest(
            [
                (item.id, item.gold, item.subject, item.level, *_scorer_fields(item, grader))
                for item in items
            ]
        ),
    }


def _api_of(item: Item) -> str:
    if item.options:
        return "completions, log-probs of options"
    return "completions" if isinstance(item.prompt, str) else "chat/completions"


def _scorer_fields(item: Item, rule: str) -> tuple[Any, ...]:
    """The fields that only scorers read."""
    return (item.data_source, dict(item.extra_info)) if rule.startswith(SCORER_RULES) else ()


def describe_differences(
    before: Mapping[str, Any], after: Mapping[str, Any], left: str = "before", right: str = "after"
) -> list[str]:
    """Describe each setting that differs, e.g. "sampling.max_tokens: 512 before, 256 after"."""
    return [
        f"{key}: {_shown(old)} {left}, {_shown(new)} {right}"
        for key, old, new in differences(before, after)
        if not all(value is UNSET or value is None for value in (old, new))
    ]


def _shown(value: Any) -> str:
    return "unset" if value is UNSET else str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
