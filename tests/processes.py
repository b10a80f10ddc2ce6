"""Shared helpers for tests of child processes."""

import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from tasks.processes import supervisor

DEADLINE_SECONDS = 200.0  # on two busy cores


def start_time_of(pid: int) -> str | None:
    fields = supervisor.stat_fields(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for: {what}"
        time.sleep(0.02)


def python(code: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code), *map(str, arguments)]


def folder_of(pid: int, variable: str = "PLACE") -> Path:
    """The path in an environment variable of a process."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    [value] = [entry.partition("=")[2] for entry in entries if entry.startswith(f"{variable}=")]
    return Path(value)
