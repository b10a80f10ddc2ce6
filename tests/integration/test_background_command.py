"""A command beside us for the time of a block: it ends with the block, with its supervisor, and not before."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from tasks.processes import supervisor
from tasks.processes.child import background_command
from tests.processes import folder_of, python, start_time_of, wait_until


def test_a_server_that_dies_says_so(tmp_path: Path) -> None:
    code = "import sys; print('address in use'); sys.exit(9)"
    with background_command(python(code), log_path=tmp_path / "log", label="server") as server:
        wait_until(lambda: server.poll() is not None, "the server to die")
        assert server.poll() == 9
        assert "server ended with exit code 9" in str(server.failure())
        assert "  | address in use" in str(server.failure())


def test_a_server_is_torn_down_when_the_block_fails(tmp_path: Path) -> None:
    before = set(supervisor.descendants(os.getpid()))
    with (
        pytest.raises(ZeroDivisionError),
        background_command(
            python("import time; time.sleep(600)"), log_path=tmp_path / "log", label="server"
        ) as server,
    ):
        raise ZeroDivisionError
    # ended by our SIGTERM, which a sleeping command does not handle
    assert server.poll() == -signal.SIGTERM
    assert supervisor.descendants(os.getpid()).keys() <= before


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    # The parent-death signal also comes when only the starting thread ends; that must not end the server.
    context = background_command(python("import time; time.sleep(600)"), log_path=tmp_path / "log", label="server")
    servers = []
    starter = threading.Thread(target=lambda: servers.append(context.__enter__()))
    starter.start()
    starter.join()
    try:
        time.sleep(2 * supervisor.PARENT_POLL_SECONDS)
        assert servers[0].poll() is None
    finally:
        context.__exit__(None, None, None)
    assert servers[0].poll() == -signal.SIGTERM


def test_a_supervisor_that_is_killed_takes_the_command_with_it(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with background_command(
        python(code), log_path=tmp_path / "log", label="server", folder_variable="PLACE"
    ) as server:
        wait_until(lambda: len(server.tail(1)) == 1, "the command to start")
        command_pid = int(server.tail(1)[0])
        place = folder_of(command_pid)
        assert place.is_dir()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: start_time_of(command_pid) is None, "the command to end")
        assert server.poll() == -signal.SIGKILL
    assert not place.exists()


def test_the_path_of_a_socket_fits_however_long_that_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    log_path = tmp_path / "log"
    run = background_command(
        python("import os, time; print(os.environ['PLACE'], flush=True); time.sleep(600)"),
        log_path=log_path,
        label="server",
        folder_variable="PLACE",
    )
    with run as server, socket.socket(socket.AF_UNIX) as listener:
        wait_until(lambda: len(server.tail(1)) == 1, "the command to start")
        listener.bind(f"{server.tail(1)[0]}/{uuid.uuid4()}")
