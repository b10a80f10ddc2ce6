"""The process in which answers are compared: reads a line of JSON [answers, gold], writes true or false.

It ends when its input does, when a comparison raises (the traceback is in the log), when memory runs out, and by its
own timer should nobody be left to kill it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from eval.grading.verdict import any_equal_exact


def main() -> None:
    """Entry point: MEMORY_BYTES SECONDS."""
    memory_bytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    any_equal_exact(["\\sqrt{2}"], "\\sqrt{3}")  # loads mpmath before the first row's time runs
    _write("ready")
    for line in sys.stdin.buffer:
        answers, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = any_equal_exact(answers, gold)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _write(json.dumps(verdict))


def _write(line: str) -> None:
    """A line to the judge: standard output is its pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
