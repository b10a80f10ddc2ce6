"""A suite folder: one model's results on several benchmarks.

FOLDER/suite.json   the benchmarks in order, with weight and key, and the headline
FOLDER/NAME/        the results folder of a benchmark: settings.json, results.jsonl, summary.json

A folder that contains settings.json is a suite of one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.results.rows import SETTINGS_FILE, ResultsError, read_settings, write_json

SUITE_FILE = "suite.json"
OWN = "own"  # the name of a single benchmark from the user's own file


@dataclass(frozen=True)
class Member:
    """A benchmark of a suite."""

    name: str
    weight: float = 1.0
    key: str | None = None  # digest of everything its answers depend on; None outside a store


@dataclass(frozen=True)
class Suite:
    """The benchmarks of a folder in order."""

    members: tuple[Member, ...]
    headline: str  # the member that decides the verdict


def read_suite(folder: str | Path) -> dict[str, Path]:
    """Return the results folder of each benchmark by name, in order. Raises ResultsError."""
    folder, members = Path(folder), describe_suite(folder).members
    return {one.name: folder if is_single(folder) else folder / one.name for one in members}


def describe_suite(folder: str | Path) -> Suite:
    """Read the benchmarks of a folder. Raises ResultsError if it is not a complete suite."""
    folder = Path(folder)
    if is_single(folder):
        name = str((read_settings(folder) or {}).get("benchmark") or OWN)
        return Suite((Member(name),), name)
    path = folder / SUITE_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        suite = Suite(tuple(Member(**one) for one in stored["benchmarks"]), stored["headline"])
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(
            f"{folder} has no {SETTINGS_FILE} and no {SUITE_FILE}: it is not a folder of `dapo "
            "eval`; name the folder given as --output"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{path} cannot be read ({error!r}): run the same evaluation again"
        ) from None
    missing = [
        one.name for one in suite.members if not (folder / one.name / SETTINGS_FILE).is_file()
    ]
    if missing or suite.headline not in [one.name for one in suite.members]:
        lacking = ", ".join(missing) or f"its headline {suite.headline}"
        raise ResultsError(f"{folder} lacks {lacking}: the evaluation did not finish; run it again")
    return suite


def is_single(folder: Path) -> bool:
    """True if the folder is the results folder of a single benchmark."""
    return (folder / SETTINGS_FILE).is_file()


def require_single(folder: Path) -> None:
    """Raise ResultsError if the folder holds a suite."""
    if (folder / SUITE_FILE).is_file():
        raise ResultsError(f"{folder} holds a suite; choose another --output for one benchmark")


def write_suite(folder: Path, members: Sequence[Member], headline: str) -> None:
    """Write suite.json. Raises ResultsError if the folder holds a single benchmark."""
    if is_single(folder):
        raise ResultsError(
            f"{folder} holds the evaluation of one benchmark; choose another --output for a suite"
        )
    write_json(
        folder / SUITE_FILE, {"headline": headline, "benchmarks": [asdict(one) for one in members]}
    )
