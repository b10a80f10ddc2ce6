"""Runs calls in killable processes with time and memory limits; exceeding one kills only that
process.

Each process has a thread that sends one call at a time and waits for the reply, so a pool can be
used from any thread. The processes load only what their function imports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from durable import end_with

START_SECONDS = 120.0  # a user's file may load a library as large as torch
END_SECONDS = 5.0
MAX_TRACEBACK_CHARACTERS = 4000
_ROOT = Path(__file__).resolve().parents[2]
_START = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {__name__} import main; main()"


class CallFailed(Exception):
    """The call raised, or its process ended."""


class CallTimedOut(CallFailed):
    """The call took longer than the pool's limit."""


class StartFailed(Exception):
    """A process did not start. `exit_code` is None if it still ran; `failure` is a traceback."""

    def __init__(
        self, message: str, exit_code: int | None = None, failure: str | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.failure = failure


class Pool:
    """Processes that run the function that `maker` ("module:function") returns."""

    def __init__(
        self,
        maker: str,
        arguments: tuple[str, ...] = (),
        *,
        num_processes: int = 1,
        timeout_seconds: float,
        memory_bytes: int | None = None,
    ) -> None:
        limit = "" if memory_bytes is None else str(memory_bytes)
        self._processes = [
            _Process((limit, maker, *arguments), timeout_seconds) for _ in range(num_processes)
        ]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pool")

    @property
    def pids(self) -> set[int]:
        """The ids of the running processes, which start with the first calls."""
        return {process.popen.pid for process in self._processes if process.popen is not None}

    def start(self) -> None:
        """Start all processes now. Raises StartFailed."""
        starts = [self._threads.submit(process.start) for process in self._processes]
        for start in starts:
            start.result()

    def submit(self, *call: Any) -> Future[Any]:
        """Submit a call with picklable arguments and a JSON result; it may raise CallFailed."""
        return self._threads.submit(self._run, call)

    def close(self) -> None:
        """Kill the processes and their children. Waiting calls are cancelled, running ones fail."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    def _run(self, call: tuple[Any, ...]) -> Any:
        process = self._idle.get_nowait()  # one per thread, so never empty
        try:
            return process.call(call)
        finally:
            self._idle.put(process)


class _Process:
    """A process and its pipe, started by a call if it is not running."""

    def __init__(self, arguments: tuple[str, ...], timeout_seconds: float) -> None:
        self.arguments = arguments
        self.timeout_seconds = timeout_seconds
        self.popen: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_closed = False

    def call(self, call: tuple[Any, ...]) -> Any:
        if self.popen is None or self.popen.poll() is not None:
            self.start()
        assert self._pipe is not None
        try:
            self._pipe.send(call)
            reply = self._reply(self.timeout_seconds)
        except (EOFError, OSError):
            raise CallFailed(f"ended its process (exit code {self._ended()})") from None
        if reply is None:
            self.end()
            raise CallTimedOut(f"took longer than {self.timeout_seconds:g} s")
        value, failure = reply
        if failure is not None:
            raise CallFailed(f"raised an exception\n{failure}")
        return value

    def start(self) -> None:
        self.end()
        self._pipe, child_end = Pipe()
        arguments = (str(_ROOT), str(os.getpid()), str(child_end.fileno()), *self.arguments)
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-u", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # prints go to the log
                pass_fds=(child_end.fileno(),),
                # killable as a group, and out of reach of Ctrl-C in a terminal
                start_new_session=True,
            )
        finally:
            child_end.close()
        if self._is_closed:
            self.end()
            raise StartFailed("was closed")
        try:
            reply = self._reply(START_SECONDS)
        except (EOFError, OSError):
            exit_code = self._ended()
            raise StartFailed(f"ended (exit code {exit_code})", exit_code) from None
        if reply is None:
            self.end()
            raise StartFailed(f"was not ready within {START_SECONDS:g} s")
        if reply[1] is not None:
            self.end()
            raise StartFailed("could not load its function", failure=reply[1])

    def close(self) -> None:
        """Kill the process and prevent restarts; callable from any thread."""
        self._is_closed = True
        self._kill()

    def end(self) -> int | None:
        """Kill the process, if any, and return its exit code."""
        self._kill()
        popen, self.popen = self.popen, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        return None if popen is None else popen.wait()

    def _ended(self) -> int | None:
        """Return the exit code of a process that closed its pipe and is about to end."""
        if self.popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(END_SECONDS)
        return self.end()

    def _kill(self) -> None:
        popen = self.popen
        if popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)

    def _reply(self, seconds: float) -> list[Any] | None:
        """Return [value, traceback], or None after `seconds` without a reply."""
        assert self._pipe is not None
        if not self._pipe.poll(seconds):
            return None
        reply: list[Any] = json.loads(self._pipe.recv_bytes())
        return reply


def main() -> None:
    """Entry point of a pool process: PARENT_PID FD MEMORY_BYTES MODULE:FUNCTION [ARGUMENT...]."""
    parent_pid, fd = (int(argument) for argument in sys.argv[1:3])
    limit, maker, *arguments = sys.argv[3:]
    end_with(parent_pid)
    os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    pipe = Connection(fd)
    try:
        module, _, name = maker.partition(":")
        function = getattr(importlib.import_module(module), name)(*arguments)
    except Exception:  # noqa: BLE001 - a user's file may raise anything
        pipe.send_bytes(json.dumps([None, _traceback()]).encode())
        return
    pipe.send_bytes(b"[null, null]")
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            reply = json.dumps([function(*call), None])
        except Exception:  # noqa: BLE001 - the function may raise anything, including MemoryError
            reply = json.dumps([None, _traceback()])
        pipe.send_bytes(reply.encode())


def _traceback() -> str:
    return traceback.format_exc()[-MAX_TRACEBACK_CHARACTERS:]
