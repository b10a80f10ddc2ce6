"""A pod's preStop hook, with stand-ins for a run and an actor in a pod of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.nodes import leave

# A run and a training's supervisor record SIGTERM, and end once the actor has ended.
RUN = """
import pathlib, signal, sys, time
name = pathlib.Path(sys.argv[0]).stem
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(f"{name}-asked").touch())
pathlib.Path(f"{name}-ready").touch()
while not pathlib.Path("written").exists():
    time.sleep(0.1)
"""
POD = """
(exec -a ray::PolicyRank bash -c 'until ls *-asked; do sleep 0.1; done; sleep 0.5; touch written') &
(exec -a ray::IDLE sleep 600) &
{python} dapo run recipe.yaml &
{training}
until [ -e dapo-ready ]; do sleep 0.1; done
{python} -m tasks.nodes.leave && [ -e written ] && touch left
"""
TRAINING = """{python} -I -S supervisor.py {{}} {python} -m flows.cli train &
until [ -e supervisor-ready ]; do sleep 0.1; done
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_training", [True, False])
def test_the_hook_stops_the_training_or_the_run_and_waits_for_all(
    has_training: bool, tmp_path: Path
) -> None:
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine makes no namespaces of processes")
    for name in ("dapo", "supervisor.py"):
        (tmp_path / name).write_text(RUN)
    training = TRAINING.format(python=sys.executable) if has_training else ""
    pod = POD.format(python=sys.executable, training=training)
    done = subprocess.run([*alone, "bash", "-c", pod], cwd=tmp_path, capture_output=True, text=True)
    asked = {path.name for path in tmp_path.glob("*-asked")}
    assert (tmp_path / "left").exists(), done
    assert asked == {"supervisor-asked" if has_training else "dapo-asked"}


@pytest.mark.parametrize(
    ("words", "is_run", "is_at_work"),
    [
        (["/usr/bin/python3", "/usr/local/bin/dapo", "run", "r.yaml"], True, True),
        (["/bin/sh", "-c", "dapo run r.yaml"], False, False),  # Ray's shell around the run
        (
            ["/usr/bin/python3", "-I", "-S", "/dapo/tasks/processes/supervisor.py", "{}"],
            False,
            True,
        ),
        (["ray::PolicyRank.learn"], False, True),
        (["ray::IDLE"], False, False),
        (["ray::JobSupervisor"], False, False),
        (["ray::DashboardAgent"], False, False),
        (["ray::RuntimeEnvAgent"], False, False),
        (["bash", "-c", "--", "ulimit -n 65536; ray start --head"], False, False),
        ([""], False, False),  # a kernel thread, or a zombie
    ],
)
def test_ray_s_own_processes_are_not_waited_for(
    words: list[str], is_run: bool, is_at_work: bool
) -> None:
    """Command lines of Ray 2.60."""
    assert (leave.is_run(words), leave.is_at_work(words)) == (is_run, is_at_work)
