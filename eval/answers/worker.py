"""The process in which answers are compared: reads a line of JSON [found, gold], writes true or false.

It ends when its input does, when a comparison raises (the traceback is in the log), when memory runs out, and by
its own timer should nobody be left to kill it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from eval.answers.extraction import Found
from eval.answers.grading import is_gold_exact


def main() -> None:
    """Entry point: MEMORY_BYTES SECONDS."""
    memory_bytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.tracebacklimit = 20  # of a comparison that raises
    is_gold_exact(
        Found(("\\sqrt{2}",), (), (), False), "\\sqrt{3}"
    )  # loads mpmath before the first row's time runs
    _write("ready")
    for line in sys.stdin.buffer:
        found, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = is_gold_exact(Found(*found), gold)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _write(json.dumps(verdict))


def _write(line: str) -> None:
    """A line to the judge: standard output is its pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
