"""Why a server ended, from what it wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

# vLLM prefixes lines of its processes: "(EngineCore pid=71) ERROR 11-21 18:54:53 [core.py:1113] ValueError: ..."
_PREFIX = re.compile(r"^(\([\w ]+ pid=\d+\) ?)?((ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?")
_REFUSAL = re.compile(r"^vllm( \w+)?: error: ")  # argparse
_RAISED = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b: ")
# What a process raises because another one failed.
_SECONDHAND = re.compile(r"root cause|EngineDeadError")
_PORT_TAKEN = re.compile(r"Address already in use|EADDRINUSE")
_MOST_CHARS = 1000


def refused_argument(lines: Sequence[str]) -> str | None:
    """vLLM's own line about an argument that it does not take; None when it ended for another reason."""
    return next((line for line in map(_bare, reversed(lines)) if _REFUSAL.match(line)), None)


def raised_error(lines: Sequence[str]) -> str | None:
    """The last error that was raised at first hand, with the indented lines that belong to it."""
    bare = [_bare(line) for line in lines]
    for number in range(len(bare) - 1, -1, -1):
        if _RAISED.match(bare[number]) and not _SECONDHAND.search(bare[number]):
            rest = bare[number + 1 :]
            end = next((place for place, line in enumerate(rest) if not line.startswith("  ")), len(rest))
            details = [line for line in rest[:end] if not line.lstrip().startswith(("File ", "For further"))]
            return "\n".join([bare[number], *details])[:_MOST_CHARS]
    return None


def is_port_taken(lines: Sequence[str]) -> bool:
    """Whether the server ended because something else has its port."""
    return any(_PORT_TAKEN.search(line) for line in lines)


def _bare(line: str) -> str:
    return line[_PREFIX.match(line).end() :]  # type: ignore[union-attr]  # it matches every line, if with nothing
