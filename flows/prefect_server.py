"""Prefect's API for one run: the one that the user's settings name, or a server of our own that cannot outlive us.

Prefect starts a temporary server by itself, but leaves it running when its parent is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from dapo_core.errors import ServeError
from tasks.process import SupervisedProcess, background_command
from tasks.serve_model import free_ports

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
STARTUP_SECONDS = 180.0
POLL_SECONDS = 0.1
TAIL_LINES = 20
# As Prefect starts its own temporary server.
SERVER_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def provide_prefect_api() -> Callable[[], None]:
    """Set PREFECT_API_URL where no setting names a server; returns what waits until that answers.

    Call it before Prefect and flows are imported: our server starts meanwhile. It ends when this process does, in
    any way.
    """
    if os.environ.get("PREFECT_API_URL"):
        return lambda: None
    stack = contextlib.ExitStack()
    atexit.register(stack.close)  # before Prefect's own exit functions are, so after their last messages
    api = f"http://{HOST}:{free_ports(HOST)[0]}/api"
    server = stack.enter_context(_private_server(api))
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings, temporary_settings

    if get_current_settings().api.url:  # by a profile or a file: known late, before ours has opened its database
        stack.close()
        return lambda: None
    os.environ["PREFECT_API_URL"] = api
    refresh_global_settings_context()
    # Nobody could miss them: the server ends with the run. Their thread takes a second to join.
    stack.enter_context(temporary_settings({"flows.heartbeat_frequency": None}))
    return lambda: _wait_until_healthy(server, f"{api}/health")


@contextlib.contextmanager
def _private_server(api: str) -> Iterator[SupervisedProcess]:
    log_path = Path(os.environ["PREFECT_HOME"]).expanduser() / "servers" / f"{os.getpid()}.log"
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.prefect_app:create_app"]
    options = ["--host", HOST, "--port", str(urlsplit(api).port), "--log-level", "error", "--lifespan", "on"]
    environment = {**SERVER_ENVIRONMENT, "PREFECT_API_URL": api}
    try:
        with background_command(
            [*command, *options], log_path=log_path, label="Prefect", env=environment
        ) as server:
            yield server
    finally:
        log_path.unlink(missing_ok=True)


def _wait_until_healthy(server: SupervisedProcess, url: str) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    client = httpx.Client(timeout=5.0, trust_env=False)
    while server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if client.get(url).is_success:
                return
        if time.monotonic() > deadline:
            lines = "\n".join(server.tail(TAIL_LINES))
            raise ServeError(
                f"Prefect's server does not answer after {STARTUP_SECONDS:.0f} s. Start one with `prefect server "
                f"start` and set PREFECT_API_URL, or see its last lines:\n{lines}"
            )
        time.sleep(POLL_SECONDS)
    raise ServeError(
        f"{server.failure()}\nPrefect's server ended before it answered; correct the PREFECT_ settings"
    )
