"""What every flow of ours has beside Prefect's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As a flow run's process, whose lines its worker reads through a pipe.
TALKS_TO_NOBODY = """
import logging, sys
import prefect.main
import flows.recipe_flow
sys.stdin.readline()
for number in range(3):
    logging.getLogger("prefect.flow_runs").warning("line %d", number)
    logging.getLogger("tasks").warning("line %d", number)
print("goes on", file=open(sys.argv[1], "w"))
"""


def test_a_flow_whose_worker_is_killed_goes_on_talking(tmp_path: Path) -> None:
    script = [sys.executable, "-c", TALKS_TO_NOBODY, str(tmp_path / "said")]
    process = subprocess.Popen(
        script, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    process.wait(60)
    assert (tmp_path / "said").read_text() == "goes on\n"
