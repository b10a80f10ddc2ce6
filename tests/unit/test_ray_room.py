"""Waiting for a Ray cluster or its resources is logged, limited and interruptible."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dapo_core.cluster import placement, room
from dapo_core.errors import ConfigError, WorkerDied
from tasks.processes.supervisor import descendants
from tests.sources import Clock

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import logging, sys
from dapo_core.cluster.room import ask_cluster
from dapo_core.machine.stopping import StopRequest
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with StopRequest():
    print("asking", flush=True)
    ask_cluster("127.0.0.1:1")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_waiting_for_a_cluster(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asking\n"
        started = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=300)
    assert time.monotonic() - started < room.ANSWER_SECONDS / 2


@pytest.mark.slow
def test_the_querying_child_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, stdout=subprocess.PIPE) as process:
        while not (below := descendants(process.pid)):
            assert process.poll() is None
            time.sleep(0.01)
        [child] = below
        end = os.pidfd_open(child)
        while "_raylet" not in Path(f"/proc/{child}/maps").read_text():  # it has started
            time.sleep(0.01)
        os.kill(child, signal.SIGSTOP)  # it can no longer exit by itself
        process.kill()
    assert select.select([end], [], [], 60)[0]
    os.close(end)
    command = [sys.executable, "-m", "dapo_core.cluster.room", "127.0.0.1:1", str(os.getppid())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", ""), (
        "its parent ended before it could register with the kernel"
    )


@pytest.mark.slow
def test_resources_are_returned_and_failures_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    popen = subprocess.Popen

    def answer(code: str) -> None:
        monkeypatch.setattr(
            room.subprocess,
            "Popen",
            lambda _, **options: popen([sys.executable, "-c", code], **options),
        )

    answer("""print('{"total": {"CPU": 4}, "free": {"CPU": 1}, "nodes": []}')""")
    assert room.ask_cluster("auto") == ({"CPU": 4}, {"CPU": 1}, [])
    answer("import sys; print('ConnectionError: none runs'); sys.exit(1)")
    with pytest.raises(
        WorkerDied, match=r"train\.ray_address=auto does not answer: ConnectionError: none runs"
    ):
        room.ask_cluster("auto")
    answer("import time; time.sleep(60)")
    monkeypatch.setattr(room, "LOG_SECONDS", 0.0)
    caplog.set_level("INFO")
    with pytest.raises(WorkerDied, match=r"did not answer within 0\.5 s"):
        room.ask_cluster("auto", max_seconds=0.5)
    assert "waiting for the Ray cluster at train.ray_address=auto to answer (" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("is_left", [False, True])
def test_auto_without_a_ray_explains_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_left: bool
) -> None:
    if is_left:  # the address file of a Ray that has ended
        (tmp_path / "ray").mkdir()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            (tmp_path / "ray" / "ray_current_cluster").write_text(
                f"127.0.0.1:{closed.getsockname()[1]}"
            )
    popen = subprocess.Popen
    code = """
import sys
from ray._private import services
from dapo_core.cluster.room import main
services.psutil.process_iter = lambda *_: []  # hide other Ray instances on this machine
sys.exit(main("auto"))
"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        room.subprocess,
        "Popen",
        lambda _, **options: popen([sys.executable, "-c", code], cwd=ROOT, **options),
    )
    with pytest.raises(
        ConfigError, match=r"none runs; start one .* `dapo cluster up` .*or unset train.ray_address"
    ):
        room.ask_cluster("auto")


class Group:
    """A placement group that is never placed; each wait advances the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self, seconds: float) -> bool:
        self.clock.now += seconds
        return False


def test_waiting_for_resources_is_logged_every_ten_seconds_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    resources: dict[str, Any] = {"CPU": 2.0}
    monkeypatch.setattr(placement.time, "monotonic", clock)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(placement.ray, "available_resources", dict)
    caplog.set_level("INFO")
    with pytest.raises(
        ConfigError, match=r"Ray has no free resources for 4 workers of .* after 300 s"
    ):
        placement._wait_until_placed(Group(clock), placement.Demand(4, {"CPU": 1}), 300.0)  # type: ignore[arg-type]
    assert len(caplog.messages) == 29
    assert caplog.messages[0].startswith(
        "waiting for Ray resources for 4 workers of {'CPU': 1} (10 s so far): total {'CPU'"
    )
