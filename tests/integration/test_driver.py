"""A dead driver is restarted; signals and exit codes pass between it and its parent."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.artifacts.stage_key import PROJECT_ROOT
from tests.processes import DEADLINE_SECONDS, start_time_of, wait_until
from tests.trainings import World, settings

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dapo_core.errors import WorkerDied
from dapo_core.machine.stopping import StopRequest
from flows.console import print_messages
from tasks.processes.driver import forked_driver
from tests.configs import make_config

folder, body = Path(sys.argv[1]), sys.argv[2]
print_messages()
config = make_config(train={"max_restarts": 2, "restart_delay_seconds": float(sys.argv[3])})
assert len(os.listdir("/proc/self/task")) == 1  # a thread, as of numpy, would take signals
with forked_driver(config, folder) as restarts:
    number = len(list(folder.glob("driver-*"))) + 1
    exec(body)
"""
READY = '(folder / f"driver-{number}").write_text(str(os.getpid()))'


class Command:
    """A parent process whose drivers run the body."""

    def __init__(self, folder: Path, body: str, delay_seconds: float = 0.0) -> None:
        self.folder = folder
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                folder,
                textwrap.dedent(body).replace("READY", READY),
                str(delay_seconds),
            ],
            cwd=PROJECT_ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def drivers(self) -> list[int]:
        return [int(path.read_text() or 0) for path in sorted(self.folder.glob("driver-*"))]

    def ready(self) -> int:
        """The pid of the first driver, once it runs."""
        wait_until(lambda: any(self.drivers()), "the driver")
        return self.drivers()[0]

    def end(self) -> tuple[int, str]:
        output, _ = self.popen.communicate(timeout=DEADLINE_SECONDS)
        return self.popen.returncode, output


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.popen.kill()
        command.popen.communicate()


def test_a_dead_driver_is_restarted_after_its_processes_are_gone(tmp_path: Path) -> None:
    body = """
    left = folder / "left"
    if number > 1:
        assert not Path("/proc", left.read_text()).exists()
    READY
    left.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
    if number == 1:
        os._exit(1)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(int(left.read_text()), signal.SIGKILL)
    sys.exit(7)
    """
    command = Command(tmp_path, body)
    exit_code, output = command.end()
    assert (exit_code, len(command.drivers())) == (7, 3), output
    first, second, _ = command.drivers()
    restarts = (
        "training restarts in 0 s from the beginning (restart {} of at most 2 without a new "
        "checkpoint)"
    )
    assert output.splitlines() == [
        f"the training's driver (pid {first}) ended with exit code 1 without reporting an error; "
        + restarts.format(1),
        f"the training's driver (pid {second}) was killed by SIGKILL (not by us; most often the "
        "kernel does this "
        "when memory runs out) without reporting an error; " + restarts.format(2),
    ]


def test_restarts_inside_the_driver_count_towards_the_limit(tmp_path: Path) -> None:
    body = """
    READY
    if number == 1:
        restarts.pause(WorkerDied("a rank died"), None)
    os._exit(1)
    """
    command = Command(tmp_path, body)
    exit_code, output = command.end()
    assert (exit_code, len(command.drivers())) == (1, 2)
    assert "a rank died; training restarts in 0 s" in output
    assert "giving up after 2 restarts without a new checkpoint" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_reaches_the_driver_once(
    tmp_path: Path, number: signal.Signals, started: list[Command]
) -> None:
    body = """
    with StopRequest() as stop:
        try:
            READY
            time.sleep(600)
        except KeyboardInterrupt:
            assert not signal.sigpending()
            sys.exit(128 + stop.signal)
    """
    started.append(command := Command(tmp_path, body))
    driver = command.ready()
    os.killpg(command.popen.pid, number)
    assert command.end() == (128 + number, "")
    assert (start_time_of(driver), len(command.drivers())) == (None, 1)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", ""),
        (
            "signal.signal(signal.SIGTERM, lambda *_: os._exit(1))",
            "training was stopped before its first checkpoint",
        ),
    ],
    ids=["imports", "is ended by Ray"],
)
def test_a_stopped_driver_is_not_restarted(
    tmp_path: Path, before: str, said: str, started: list[Command]
) -> None:
    started.append(command := Command(tmp_path, f"{before}\nREADY\ntime.sleep(600)"))
    command.ready()
    command.popen.send_signal(signal.SIGTERM)
    exit_code, output = command.end()
    assert said in output
    assert len(command.drivers()) == 1
    assert exit_code == (1 if said else 143)  # this script does not print errors, as `dapo` does


def test_a_signal_ends_the_restart_pause(tmp_path: Path, started: list[Command]) -> None:
    started.append(command := Command(tmp_path, "READY\nos._exit(1)", delay_seconds=600.0))
    assert command.popen.stdout is not None
    assert "training restarts in 600 s" in command.popen.stdout.readline()
    command.popen.send_signal(signal.SIGINT)
    assert "training was stopped before its first checkpoint" in command.end()[1]
    assert len(command.drivers()) == 1


def test_a_driver_ends_with_its_parent(tmp_path: Path, started: list[Command]) -> None:
    started.append(command := Command(tmp_path, "READY\ntime.sleep(600)"))
    driver = command.ready()
    command.popen.kill()
    wait_until(lambda: start_time_of(driver) is None, "the driver's end")


@pytest.mark.timeout(1800)  # three starts of Ray, on two busy cores
def test_a_dead_raylet_causes_a_restart(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During startup and in a step; Ray kills the driver unless it notices the death of its ranks
    first.
    """
    monkeypatch.syspath_prepend(str(PROJECT_ROOT / "bench"))
    crash = importlib.import_module("crash")
    recipe = tmp_path / "recipe.yaml"
    train = {"total_steps": 4, "num_ranks": 1, "restart_delay_seconds": 0.0}
    recipe.write_text(yaml.safe_dump(settings(train=train)))
    training = crash.Training(recipe, world.data, world.model, tmp_path / "output")
    assert (
        crash.train_through_kills(training, [crash.Moment("raylet", step, 0.0) for step in (0, 2)])
        == 2
    )
    assert training.num_steps() == 4
    log = training.log_path.read_text(errors="replace")
    begun = re.findall(r"; training restarts in 0 s from (?:the )?(beginning|checkpoint)", log)
    assert begun[0] == "beginning"
    assert begun[-1] == "checkpoint"
