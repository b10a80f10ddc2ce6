"""A Prefect API for one run: of the user's settings, of the store's services, or a private server.

The private one exits with the run; Prefect's own temporary server survives a killed parent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dapo_core.machine.ports import free_ports
from flows.prefect_access import (
    AUTH_VARIABLES,
    ServicesError,
    configured_api,
    is_healthy,
    is_listening,
    require_server,
)
from flows.services import NUM_LOG_LINES, PREFECT, api_url, indented, wait_until
from tasks.processes.child import SupervisedProcess, background_command

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
STARTUP_SECONDS = 180.0
# A server for one run needs no UI, scheduler or automations, nor heartbeats (1 s to join).
OPTIONS = ("--host", HOST, "--log-level", "ERROR", "--no-ui", "--no-services")
SETTINGS = {"flows.heartbeat_frequency": None, "server.ui.enabled": False}


def named_api(store: Path) -> str | None:
    """Return the API address in Prefect's settings, else of the store's services, else None."""
    configured = configured_api()
    return configured[0] if configured else api_url(store)


def provide_prefect_api(store: Path) -> Callable[[], None]:
    """Point Prefect in this process to a server, starting one if needed; returns a wait function.

    Call this before importing flows, so that the server starts meanwhile. It always exits with this
    process.
    """
    url = named_api(store)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)  # registered before Prefect's handlers, so it runs after them
    settings: dict[str, Any] = {}
    if url is not None:
        wait = partial(require_server, url)
    else:
        logger.info("starting a Prefect server for this run")
        port, auth = free_ports(HOST)[0], f"dapo:{secrets.token_urlsafe()}"
        url, settings = f"http://{HOST}:{port}/api", {**SETTINGS, "api.auth_string": auth}
        server = stack.enter_context(_private_server(url, port, auth))
        wait = partial(wait_for_private_server, server, url, port)
        os.environ |= dict.fromkeys(AUTH_VARIABLES, auth)
    from prefect.settings import temporary_settings

    os.environ["PREFECT_API_URL"] = url  # for child processes
    stack.enter_context(temporary_settings({"api.url": url, **settings}))
    return wait


def wait_for_private_server(server: SupervisedProcess, url: str, port: int) -> None:
    """Wait until this server responds; raises ServicesError, also if another one has its port."""

    def is_ready() -> bool:  # another run may have taken the port since it was chosen
        return is_healthy(url) and is_listening(server.pid, port)

    wait_until(lambda: server.poll() is not None or is_ready(), STARTUP_SECONDS)
    if not is_ready():
        raise ServicesError(
            f"the Prefect server for this run does not respond at {url}; {server.log_path} ends:\n"
            + indented(server.tail(NUM_LOG_LINES))
        )


@contextlib.contextmanager
def _private_server(url: str, port: int, auth: str) -> Iterator[SupervisedProcess]:
    name = f"{platform.node()}-{os.getpid()}.log"  # containers may share a home
    log_path = Path(os.environ["PREFECT_HOME"]).expanduser() / "servers" / name
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServicesError(
            f"cannot use PREFECT_HOME={log_path.parents[1]}: {error}; set another one"
        ) from None
    command = [*PREFECT, "server", "start", "--port", str(port), *OPTIONS]
    # Children inherit no Prefect secrets, but the server needs them.
    env = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
    env |= {"PREFECT_API_URL": url, **dict.fromkeys(AUTH_VARIABLES, auth)}
    try:
        with background_command(command, log_path=log_path, label="Prefect", env=env) as server:
            yield server
    finally:
        log_path.unlink(missing_ok=True)
