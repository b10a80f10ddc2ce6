"""Prefect's API for one run: the one that the user's settings name, that of the store's services, or a server of
our own that cannot outlive us.

Prefect starts a temporary server by itself, but leaves it running when its parent is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.services.daemons import SERVER, Services
from tasks.processes.child import SupervisedProcess, background_command
from tasks.serve_model.command import free_ports
from tasks.serve_model.failure import ServeError

HOST = "127.0.0.1"
STARTUP_SECONDS = 180.0
POLL_SECONDS = 0.1
TAIL_LINES = 20
SERVER_ENVIRONMENT = {
    # as Prefect starts its own temporary server
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # Prefect cannot run their hooks where uvicorn imports it, within an event loop
    "PREFECT_PLUGINS_ENABLED": "false",
}


def has_prefect_api(store: Path) -> bool:
    """Whether a setting or the store's services name a server, so that none needs to be started."""
    if os.environ.get("PREFECT_API_URL") or Services(store).read().running(SERVER):
        return True
    from prefect.settings import get_current_settings

    return bool(get_current_settings().api.url)


def provide_prefect_api(store: Path) -> Callable[[], None]:
    """Set PREFECT_API_URL where no setting names a server; returns what waits until that answers.

    Call it before Prefect and flows are imported: our server starts meanwhile. It ends when this process does, in
    any way.
    """
    if os.environ.get("PREFECT_API_URL"):
        return require_answer
    state = Services(store).read()
    daemon = state.running(SERVER)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)  # before Prefect's own exit functions are, so after their last messages
    is_running: Callable[[], bool]
    tail: Callable[[], str]
    if daemon:
        url, is_running, tail = state.api_url, lambda: daemon.is_running, daemon.tail
    else:
        port = free_ports(HOST)[0]
        url = f"http://{HOST}:{port}/api"
        server = stack.enter_context(_private_server(url, port))
        is_running, tail = lambda: server.poll() is None, lambda: _tail(server)
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings, temporary_settings

    if get_current_settings().api.url:  # by a profile or a file: known late, before ours has opened its database
        stack.close()
        return require_answer
    os.environ["PREFECT_API_URL"] = url
    refresh_global_settings_context()
    if not daemon:
        # Ours has no page, and ends with the run: nobody could miss heartbeats, whose thread takes 1 s to join.
        stack.enter_context(temporary_settings({"flows.heartbeat_frequency": None, "server.ui.enabled": False}))
    return lambda: wait_until_healthy(url, is_running, tail)


def require_answer() -> None:
    """Raise ServeError when the server that Prefect's settings name does not answer."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    if problem := get_client(sync_client=True).api_healthcheck():
        raise ServeError(
            f"the Prefect server at {get_current_settings().api.url} does not answer ({problem}); start it, or "
            "correct PREFECT_API_URL or the profile that names it; where none is named, a run has its own server"
        )


def wait_until_healthy(
    api_url: str,
    is_running: Callable[[], bool],
    tail: Callable[[], str],
    patience_seconds: float = STARTUP_SECONDS,
) -> None:
    """Return once the server answers; raises ServeError, with the last lines of its log, when it does not."""
    deadline = time.monotonic() + patience_seconds
    while is_running():
        if is_healthy(api_url):
            return
        if time.monotonic() > deadline:
            raise ServeError(
                f"Prefect's server at {api_url} does not answer after {patience_seconds:.0f} s; {tail()}\n"
                "See whether this machine is busy, or set PREFECT_API_URL to a server that runs"
            )
        time.sleep(POLL_SECONDS)
    raise ServeError(f"Prefect's server ended before it answered; correct what its log names: {tail()}")


def is_healthy(api_url: str) -> bool:
    """Whether a Prefect server answers at the address."""
    import httpx  # while our server starts

    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{api_url}/health", timeout=5.0, trust_env=False).is_success
    return False


@contextlib.contextmanager
def _private_server(api_url: str, port: int) -> Iterator[SupervisedProcess]:
    log_path = Path(os.environ["PREFECT_HOME"]).expanduser() / "servers" / f"{os.getpid()}.log"
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.prefect_app:create_app"]
    options = ["--host", HOST, "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    environment = {**SERVER_ENVIRONMENT, "PREFECT_API_URL": api_url}
    try:
        with background_command(
            [*command, *options], log_path=log_path, label="Prefect", env=environment
        ) as server:
            yield server
    finally:
        log_path.unlink(missing_ok=True)


def _tail(server: SupervisedProcess) -> str:
    lines = "\n".join(f"  | {line}" for line in server.tail(TAIL_LINES))
    return f"{server.log_path} ends:\n{lines}"
