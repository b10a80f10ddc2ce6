"""What a pod does before it ends, with stand-ins for a run and an actor in a pod of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.nodes import leave

# The run ends the actor as its last act. Both say so in their order.
RUN = """
import pathlib, signal, time
def end(*_):
    pathlib.Path("asked").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
while True:
    time.sleep(60)
"""
POD = """
(exec -a ray::Rank.step bash -c 'until [ -e asked ]; do sleep 0.1; done; sleep 0.5; touch written') &
(exec -a ray::IDLE sleep 600) &
{python} dapo run recipe.yaml &
until [ -e ready ]; do sleep 0.1; done
{python} -m tasks.nodes.leave && [ -e written ] && touch left
"""


def test_a_run_is_asked_to_end_and_its_actors_are_awaited(tmp_path: Path) -> None:
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine makes no namespaces of processes")
    (tmp_path / "dapo").write_text(RUN)
    pod = POD.format(python=sys.executable)
    done = subprocess.run([*alone, "bash", "-c", pod], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "left").exists(), done


@pytest.mark.parametrize(
    ("words", "is_run", "is_at_work"),
    [
        (["/usr/bin/python3", "/usr/local/bin/dapo", "run", "r.yaml"], True, True),
        (["/bin/sh", "-c", "dapo run r.yaml"], False, False),  # Ray's, around it
        (["/usr/bin/python3", "-I", "-S", "/dapo/tasks/processes/supervisor.py", "{}"], False, True),
        (["ray::PolicyRank.learn"], False, True),
        (["ray::IDLE"], False, False),
        (["ray::JobSupervisor"], False, False),
        (["ray::DashboardAgent"], False, False),
        (["ray::RuntimeEnvAgent"], False, False),
        (["bash", "-c", "--", "ulimit -n 65536; ray start --head"], False, False),
        ([""], False, False),  # of the kernel, or a zombie
    ],
)
def test_what_is_at_work(words: list[str], is_run: bool, is_at_work: bool) -> None:
    """Command lines as Ray 2.60 has them."""
    assert (leave.is_run(words), leave.is_at_work(words)) == (is_run, is_at_work)
