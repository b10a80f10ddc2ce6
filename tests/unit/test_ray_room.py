"""Waiting for a Ray cluster: it says what for, and a signal ends it at once."""

from __future__ import annotations

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
from dapo_core.stopping import StopRequest
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with StopRequest():
    print("asking", flush=True)
    ask_cluster("127.0.0.1:1")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_cluster_that_does_not_answer(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"asking\n"
        began = time.monotonic()
        one.send_signal(number)
        one.communicate(timeout=300)
    assert time.monotonic() - began < room.ANSWER_SECONDS / 2


def test_who_asks_a_cluster_ends_with_the_process_that_wants_to_know() -> None:
    with subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, stdout=subprocess.PIPE) as one:
        while not (below := descendants(one.pid)):
            assert one.poll() is None
            time.sleep(0.01)
        [asking] = below
        end = os.pidfd_open(asking)
        while "_raylet" not in Path(f"/proc/{asking}/maps").read_text():  # it has begun
            time.sleep(0.01)
        os.kill(asking, signal.SIGSTOP)  # it does nothing by itself any more
        one.kill()
    assert select.select([end], [], [], 60)[0]
    os.close(end)
    command = [sys.executable, "-m", "dapo_core.cluster.room", "127.0.0.1:1", str(os.getppid())]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (asked.stdout, asked.stderr) == ("", ""), "its parent has ended before it could say so to the kernel"


@pytest.mark.slow
def test_what_a_cluster_has_and_why_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    popen = subprocess.Popen

    def answer(code: str) -> None:
        monkeypatch.setattr(
            room.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", code], **options)
        )

    answer("""print('{"total": {"CPU": 4}, "free": {"CPU": 1}, "nodes": []}')""")
    assert room.ask_cluster("auto") == ({"CPU": 4}, {"CPU": 1}, [])
    answer("import sys; print('ConnectionError: none runs'); sys.exit(1)")
    with pytest.raises(WorkerDied, match=r"train\.ray_address=auto does not answer: ConnectionError: none runs"):
        room.ask_cluster("auto")
    answer("import time; time.sleep(60)")
    monkeypatch.setattr(room, "WORD_SECONDS", 0.0)
    caplog.set_level("INFO")
    with pytest.raises(WorkerDied, match=r"nothing came within 0\.5 s"):
        room.ask_cluster("auto", max_seconds=0.5)
    assert "for the Ray cluster at train.ray_address=auto to answer" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("is_left", [False, True])
def test_auto_without_a_ray_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_left: bool
) -> None:
    if is_left:  # the address of a Ray that has ended
        (tmp_path / "ray").mkdir()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed.getsockname()[1]}")
    popen = subprocess.Popen
    code = """
import sys
from ray._private import services
from dapo_core.cluster.room import main
services.psutil.process_iter = lambda *_: []  # the Rays of others on this machine
sys.exit(main("auto"))
"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        room.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", code], cwd=ROOT, **options)
    )
    with pytest.raises(
        ConfigError, match=r"none runs; start one .* `dapo cluster up` .*or unset train.ray_address"
    ):
        room.ask_cluster("auto")


class Group:
    """A placement group that never has room; each look takes a second of the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self, seconds: float) -> bool:
        self.clock.now += seconds
        return False


def test_waiting_for_room_says_every_ten_seconds_what_for_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    resources: dict[str, Any] = {"CPU": 2.0}
    monkeypatch.setattr(placement.time, "monotonic", clock)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(placement.ray, "available_resources", dict)
    caplog.set_level("INFO")
    with pytest.raises(ConfigError, match="Ray has no room for 4 workers of 1 CPU within 300 s"):
        placement._wait_for_room(Group(clock), "4 workers of 1 CPU", 300.0)  # type: ignore[arg-type]
    assert len(caplog.messages) == 29
    assert caplog.messages[0].startswith(
        "waiting since 10 s for room in Ray for 4 workers of 1 CPU: it has {'CPU'"
    )
