"""Starts `vllm serve`, waits until it is healthy, and stops it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx

from dapo_core.machine.environment import READY_VARIABLE, SOCKETS_VARIABLE
from dapo_core.model.folder import read_config, weight_paths
from dapo_core.model.lora import full_model
from eval import EvaluationError
from eval.endpoint import Endpoint
from heartbeat import heartbeat
from redaction import add_secret, is_secret, redact
from tasks.config.serve import ServeConfig
from tasks.processes.child import SupervisedProcess, background_command, new_socket_folder
from tasks.serve_model.checks import require_servable
from tasks.serve_model.command import (
    API_KEY_VARIABLE,
    SERVED_NAME,
    base_url,
    choose_port,
    on_this_device,
    serve_command,
    serve_environment,
    shell_line,
)
from tasks.serve_model.failure import ServeError, ServerDied, failure_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
REQUEST_SECONDS = 30.0
TAIL_LINES = 20
CAUSE_LINES = 2000
# The default of serve.startup_seconds, for weights read from a shared file system.
STARTUP_SECONDS, STARTUP_BYTES = 900.0, 200e6  # at least, and per second


@dataclass(frozen=True)
class Server(Endpoint):
    """A healthy server."""

    command: str = ""  # shell command with MODEL for the folder; "" if not started by us
    process: SupervisedProcess | None = field(default=None, compare=False, repr=False)

    def has_ended(self) -> bool:
        """True if its process has ended; it is not restarted."""
        return self.process is not None and self.process.poll() is not None


@contextlib.contextmanager
def serve_model(
    model_path: str | Path,
    settings: ServeConfig,
    log_path: Path,
    name: str = SERVED_NAME,
    num_pictures: int | None = None,
) -> Iterator[Server]:
    """Yield a healthy server that serves the model as `name`; it is stopped after the block.

    `num_pictures` as in `on_this_device`.

    A server is healthy once it lists the model and has completed one token. Raises ModelError
    before starting if the folder cannot be served. Raises ServeError, quoting the server's output,
    if there is no free port, or the server ends or is not healthy within `startup_limit`;
    ServerDied if it was killed, or an evaluation in the block failed because it ended.
    """
    require_servable(model_path, settings, os.environ)
    settings = on_this_device(settings, read_config(full_model(model_path)), num_pictures)
    seconds, limit = startup_limit(model_path, settings)
    deadline = time.monotonic() + seconds
    api_key = secrets.token_urlsafe(24)
    add_secret(api_key)
    port, place = choose_port(settings), serve_environment(settings, os.environ)
    command = serve_command(model_path, settings, port, name)
    logger.info("vllm serve: %s", shell_line(command, place))
    words = ["MODEL" if word == str(model_path) else word for word in command[1:]]
    line = shell_line(["python", *words], place)
    with background_command(
        command,
        log_path=log_path,
        label="vllm serve",
        env=place | _own_secrets(api_key),
        folder_variable=SOCKETS_VARIABLE,
    ) as process:
        server = Server(base_url(settings.host, port), name, api_key, line, process)
        with heartbeat(lambda: _last_line(process)):
            _await_health(server, process, deadline, limit)
        try:
            yield server
        except EvaluationError as error:
            if process.poll() is None:
                raise
            raise _failure(process, f"It answered before it ended: {error}", ServerDied) from None


def serve_until_interrupted(
    model_path: str | Path, settings: ServeConfig, environment: Mapping[str, str]
) -> NoReturn:
    """Replace this process by a server. Without VLLM_API_KEY a new key is generated and logged.

    The server prints how to evaluate it once it is healthy.
    """
    require_servable(model_path, settings, environment, key="MODEL")
    settings = on_this_device(settings, read_config(full_model(model_path)))
    api_key = environment.get(API_KEY_VARIABLE)
    if not api_key:
        api_key = secrets.token_urlsafe(24)
        logger.info(
            "%s=%s  # generated for this server; set your own to keep it", API_KEY_VARIABLE, api_key
        )
    port = choose_port(settings)
    command, url = serve_command(model_path, settings, port), base_url(settings.host, port)
    place = serve_environment(settings, environment)
    logger.info("%s", shell_line(command, place))
    sockets = new_socket_folder()  # the server removes it
    own = {API_KEY_VARIABLE: api_key, SOCKETS_VARIABLE: sockets.name}
    own[READY_VARIABLE] = (
        f"{url} ready: {SERVED_NAME} at {url}; with its {API_KEY_VARIABLE} in another terminal: "
        f"dapo eval --base-url {url} --dataset math500 --output results"
    )
    os.execvpe(command[0], command, {**environment, **place, **own})


def _own_secrets(api_key: str) -> dict[str, str | None]:
    """Variables that take all secrets from a server except its key and Ray's.

    A server may use a Ray cluster through serve.extra_args.
    """
    hidden: dict[str, str | None] = {
        name: None
        for name, value in os.environ.items()
        if is_secret(name, value) and not name.startswith("RAY_")
    }
    return hidden | {API_KEY_VARIABLE: api_key}


def _failure(
    process: SupervisedProcess, meaning: str, kind: type[ServeError] = ServeError
) -> ServeError:
    """The error for a server that ended; ServerDied if a retry may help."""
    return failure_of(process.failure(), process.tail(CAUSE_LINES), meaning, kind)


def startup_limit(model_path: str | Path, settings: ServeConfig) -> tuple[float, str]:
    """Return the seconds that a server has to become healthy, and where they come from."""
    if settings.startup_seconds is not None:
        return settings.startup_seconds, f"serve.startup_seconds={settings.startup_seconds:g}"
    num_bytes = sum(path.stat().st_size for path in weight_paths(full_model(model_path)))
    seconds = STARTUP_SECONDS + num_bytes / STARTUP_BYTES
    return seconds, f"{seconds:.0f} s, for {num_bytes / 1e9:.1f} GB of weights"


def _await_health(server: Server, process: SupervisedProcess, deadline: float, limit: str) -> None:
    """Return once the server is healthy. Raises ServeError if it ends first, or at the deadline."""
    is_over = threading.Event()
    is_healthy = _watch_health(server, is_over)
    try:
        while not is_healthy.is_set():
            if process.poll() is not None:
                advice = "It ended before it was healthy; correct serve.* or the model folder"
                raise _failure(process, advice)
            if time.monotonic() >= deadline:
                tail = "\n".join([f"{process.log_path}:", *process.tail(TAIL_LINES)])
                raise ServeError(
                    f"vllm serve is not healthy after {limit}; raise serve.startup_seconds, or "
                    f"see its last lines, from {tail}"
                )
            time.sleep(POLL_SECONDS)
    finally:
        is_over.set()


def _last_line(process: SupervisedProcess) -> str:
    return f"vllm serve is starting: {redact((process.tail(1) or ['no output yet'])[-1])}"


def _watch_health(server: Server, is_over: threading.Event) -> threading.Event:
    """Start a thread that sets the event once the server lists the model and gives a token.

    A thread, because another process on the port could accept a request and never answer.
    """
    is_healthy = threading.Event()

    def watch() -> None:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        with httpx.Client(headers=headers, timeout=REQUEST_SECONDS, trust_env=False) as client:
            while not is_over.is_set():
                if _answers(client, server):
                    is_healthy.set()
                    return
                is_over.wait(POLL_SECONDS)

    threading.Thread(target=watch, daemon=True).start()
    return is_healthy


def _answers(client: httpx.Client, server: Server) -> bool:
    try:
        models = client.get(server.url("models")).raise_for_status().json()
        if server.model not in [entry["id"] for entry in models["data"]]:
            return False
        body = {"model": server.model, "prompt": "1", "max_tokens": 1}
        return client.post(server.url("completions"), json=body).is_success
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
