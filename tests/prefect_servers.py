"""A real Prefect server, and processes that talk to it, for the length of a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.prefect_settings import apply_prefect_settings

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
STARTUP_SECONDS = 120.0


@dataclass(frozen=True)
class PrefectServer:
    """Where a server answers; its files and the output of its processes are in `folder`."""

    folder: Path
    api: str
    environment: dict[str, str]  # what a process needs, beside ours, to talk to it

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """The command, run to its end as a person types it in the project directory."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **self.environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def client(self) -> httpx.Client:
        """A client of its REST interface; use it as a context."""
        return httpx.Client(base_url=self.api, timeout=30, trust_env=False)


@contextmanager
def started_server(folder: Path, **settings: str) -> Iterator[PrefectServer]:
    """A server on a free port with a database of its own; `settings` are further PREFECT_ variables of it."""
    port = free_port()
    api = f"http://{HOST}:{port}/api"
    environment = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": api, **settings}
    apply_prefect_settings(environment)
    start = ("-m", "prefect", "server", "start", "--host", HOST, "--port", str(port))
    with started_process(folder, "server", *start, **environment):
        wait_for("Prefect's server is up", lambda: is_up(api), STARTUP_SECONDS, folder / "server.log")
        yield PrefectServer(folder, api, environment)


@contextmanager
def started_process(folder: Path, name: str, *command: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """The running `python COMMAND`, its output in FOLDER/NAME.log; afterwards it and all below it are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.log", "ab") as log:
        popen = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield popen
    finally:
        end_process_tree(popen)


def end_process_tree(popen: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and after 15 s make it and all below it."""
    if popen.poll() is not None:
        return
    tree = [psutil.Process(popen.pid), *psutil.Process(popen.pid).children(recursive=True)]
    popen.terminate()
    _, left = psutil.wait_procs(tree, timeout=15)
    for straggler in left:
        straggler.kill()
    popen.wait(15)


def wait_for(what: str, check: Callable[[], Any], seconds: float, *logs: Path) -> Any:
    """The first true answer of `check`; fails the test with the ends of the logs when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(0.2)
    tails = "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists())
    pytest.fail(f"{what}: not within {seconds:.0f} s\n{tails}")


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_up(api: str) -> bool:
    """Whether a server answers at this address."""
    try:
        return httpx.get(f"{api}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False
