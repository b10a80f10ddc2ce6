"""Serving errors, and the reason why a server ended, found in its output."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import takewhile

from dapo_core.errors import DapoError
from tasks.processes.child import ChildProcessFailed, describe_exit

# vLLM prefixes lines of its processes: "(EngineCore pid=71) ERROR 11-21 18:54:53 [core.py:1113]
# ValueError: ..."
_PREFIX = re.compile(
    r"^(\([\w ]+ pid=\d+\) ?)?((ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
_REFUSAL = re.compile(r"^vllm( \w+)?: error: ")  # argparse
_RAISED = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b: ")
# Raised only because another process failed.
_SECONDHAND = re.compile(r"root cause|EngineDeadError")
# The parent reports a killed process before any errors that follow from it.
_DIED = re.compile(
    r"(Worker proc|Process|Engine core process) .*died .*exit ?code:? (?P<code>-?\d+)"
)
_PORT_TAKEN = re.compile(r"Address already in use|EADDRINUSE")
_MOST_CHARS = 1000


class ServeError(DapoError, RuntimeError):
    """A server could not be started, or ended before it was healthy."""

    summary: str = ""  # the message without the server's last lines


class ServerUnreachable(ServeError):
    """A server that runs elsewhere does not answer."""


class ServerDied(ServeError):
    """A server was killed, lost its port to another process, or ended after it was healthy."""

    is_lasting = False


def failure_of(
    ended: ChildProcessFailed, lines: Sequence[str], meaning: str, kind: type[ServeError]
) -> ServeError:
    """The error for a server that ended with these last lines; ServerDied if a retry may help."""
    is_killed = ended.exit_code is not None and ended.exit_code < 0
    if is_killed or any(_PORT_TAKEN.search(line) for line in lines):  # taken since it was chosen
        kind = ServerDied
    refusal = refused_argument(lines)
    if refusal is not None:
        advice = "Correct serve.extra_args; `vllm serve --help=all` lists all arguments"
        return kind(f"{ended.summary}\nvLLM reports: {refusal}\n{advice}")
    cause = death_of_process(lines) or raised_error(lines)
    report = f"vLLM reports: {cause}\n" if cause else ""
    error = kind(f"{report}{ended}\n{meaning}")
    error.summary = f"{report}{ended.summary}\n{meaning}"
    return error


def refused_argument(lines: Sequence[str]) -> str | None:
    """vLLM's error about an unsupported argument; None if it ended for another reason."""
    return next((line for line in map(_bare, reversed(lines)) if _REFUSAL.match(line)), None)


def death_of_process(lines: Sequence[str]) -> str | None:
    """The first report that a vLLM process was killed, with its meaning; None if there is none."""
    for line in map(_bare, lines):
        match = _DIED.search(line)
        if match and int(match["code"]) < 0:
            return f"{line}\n{describe_death(int(match['code']))}"
    return None


def describe_death(exit_code: int) -> str:
    """The meaning of a negative exit code, and a fix if known."""
    if -exit_code == signal.SIGILL:
        return (
            "SIGILL: this CPU lacks an instruction that a kernel uses, such as one for bfloat16; "
            "set serve.dtype=float32 (and rollout.dtype=float32)"
        )
    return f"the process {describe_exit(exit_code)}"


def raised_error(lines: Sequence[str]) -> str | None:
    """The last original error with its indented continuation lines."""
    bare = [_bare(line) for line in lines]
    for number in range(len(bare) - 1, -1, -1):
        if _RAISED.match(bare[number]) and not _SECONDHAND.search(bare[number]):
            rest = bare[number + 1 :]
            details = [*takewhile(lambda line: line.startswith("  "), rest)]
            hidden = ("File ", "For further")
            shown = [line for line in details if not line.lstrip().startswith(hidden)]
            return "\n".join([bare[number], *shown])[:_MOST_CHARS]
    return None


def _bare(line: str) -> str:
    return _PREFIX.sub("", line, count=1)
