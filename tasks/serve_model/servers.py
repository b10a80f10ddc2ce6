"""Starts `vllm serve` processes, waits until all are healthy, and stops them together."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from eval import EvaluationError
from eval.endpoint import Endpoint
from redaction import add_secret, is_secret
from tasks.config.serve import ServeConfig
from tasks.processes.child import SupervisedProcess, background_command
from tasks.processes.supervisor import STOP
from tasks.serve_model.checks import require_servable
from tasks.serve_model.command import (
    API_KEY_VARIABLE,
    SERVED_NAME,
    SOCKETS_VARIABLE,
    base_url,
    choose_ports,
    serve_command,
    serve_environments,
    shell_line,
    with_supported_dtype,
    without_chunked_prefill,
)
from tasks.serve_model.failure import ServeError, ServerDied, failure_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
REQUEST_SECONDS = 30.0
TAIL_LINES = 20
CAUSE_LINES = 2000


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
    model_path: str | Path, settings: ServeConfig, log_path: Path, name: str = SERVED_NAME
) -> Iterator[tuple[Server, ...]]:
    """Yield serve.num_servers healthy servers that serve the model as `name`; all are stopped after
    the block.

    A server is healthy once it lists the model and has completed one token. The first server logs
    to `log_path`, the others beside it with their number. Raises ModelError before starting if the
    folder cannot be served. Raises ServeError, quoting the server's output, if there is no free
    port or device, a server ends, or one is not healthy within serve.startup_seconds; ServerDied if
    one was killed, or an evaluation in the block failed because one ended.
    """
    require_servable(model_path, settings, os.environ)
    settings = without_chunked_prefill(with_supported_dtype(settings, model_path))
    with _run_servers(model_path, settings, log_path, name, secrets.token_urlsafe(24)) as running:
        try:
            yield tuple(one.server for one in running)
        except EvaluationError as error:
            ended = next((one for one in running if one.process.poll() is not None), None)
            if ended is None:
                raise
            raise ended.failure(f"It answered before it ended: {error}", ServerDied) from None


def serve_until_interrupted(
    model_path: str | Path, settings: ServeConfig, log_path: Path, environment: Mapping[str, str]
) -> None:
    """Serve in the foreground. Without VLLM_API_KEY a new key is generated and logged.

    A single server replaces this process, so the call never returns. Several servers are monitored;
    ServeError is raised if one ends.
    """
    require_servable(model_path, settings, environment, key="MODEL")
    settings = without_chunked_prefill(with_supported_dtype(settings, model_path))
    api_key = environment.get(API_KEY_VARIABLE)
    if not api_key:
        api_key = secrets.token_urlsafe(24)
        logger.info(
            "%s=%s  # generated for this server; set your own to keep it", API_KEY_VARIABLE, api_key
        )
    if settings.num_servers == 1:
        command = serve_command(model_path, settings, choose_ports(settings)[0])
        [place] = serve_environments(settings, environment)
        logger.info("%s", shell_line(command, place))
        os.execvpe(command[0], command, {**environment, **place, API_KEY_VARIABLE: api_key})
    with _run_servers(model_path, settings, log_path, SERVED_NAME, api_key) as running:
        logger.info(
            "%d servers answer: %s", len(running), " ".join(one.server.base_url for one in running)
        )
        while all(one.process.poll() is None for one in running):
            time.sleep(POLL_SECONDS)
        ended = next(one for one in running if one.process.poll() is not None)
        raise ended.failure("The other servers are stopped")


@dataclass(frozen=True)
class _Running:
    """A running server, healthy or still starting."""

    server: Server
    process: SupervisedProcess
    is_healthy: threading.Event

    def failure(self, meaning: str, kind: type[ServeError] = ServeError) -> ServeError:
        """The error for a server that ended; ServerDied if a retry may help."""
        return failure_of(self.process.failure(), self.process.tail(CAUSE_LINES), meaning, kind)


@contextlib.contextmanager
def _run_servers(
    model_path: str | Path, settings: ServeConfig, log_path: Path, name: str, api_key: str
) -> Iterator[list[_Running]]:
    """Yield the servers once all are healthy. Raises ServeError if one ends first, or at the
    deadline.
    """
    deadline = time.monotonic() + settings.startup_seconds
    add_secret(api_key)
    # Servers get no secrets except their key and Ray's, since serve.extra_args may use a Ray
    # cluster.
    secret_env = dict.fromkeys(
        name
        for name, value in os.environ.items()
        if is_secret(name, value) and not name.startswith("RAY_")
    )
    secret_env[API_KEY_VARIABLE] = api_key
    places = serve_environments(settings, os.environ)
    running: list[_Running] = []
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        try:
            for number, port in enumerate(choose_ports(settings), start=1):
                label, log = "vllm serve", log_path
                if settings.num_servers > 1:
                    label += f" {number} of {settings.num_servers}"
                if number > 1:
                    log = log_path.with_name(f"{log_path.stem}-{number}{log_path.suffix}")
                place = places[number - 1]
                command = serve_command(model_path, settings, port, name)
                logger.info("%s: %s", label, shell_line(command, place))
                process = stack.enter_context(
                    background_command(
                        command,
                        log_path=log,
                        label=label,
                        env=place | secret_env,
                        folder_variable=SOCKETS_VARIABLE,
                    )
                )
                portable = [
                    "python",
                    *("MODEL" if word == str(model_path) else word for word in command[1:]),
                ]
                line = shell_line(portable, place)
                server = Server(base_url(settings.host, port), name, api_key, line, process)
                running.append(_Running(server, process, _watch_health(server, is_over)))
            while pending := [one for one in running if not one.is_healthy.is_set()]:
                if ended := [one for one in pending if one.process.poll() is not None]:
                    raise ended[0].failure(
                        "It ended before it was healthy; correct serve.* or the model folder"
                    )
                if time.monotonic() >= deadline:
                    raise _too_late(pending, settings)
                time.sleep(POLL_SECONDS)
            yield running
        finally:
            is_over.set()
            for one in running:  # in parallel; the stack then waits for each
                if one.process.poll() is None:
                    one.process.request(STOP)


def _watch_health(server: Server, is_over: threading.Event) -> threading.Event:
    """Start a thread that sets the returned event once the server lists the model and completes a
    token.

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


def _too_late(pending: Sequence[_Running], settings: ServeConfig) -> ServeError:
    tails = [
        "\n".join([f"{one.process.label}, {one.process.log_path}:", *one.process.tail(TAIL_LINES)])
        for one in pending
    ]
    return ServeError(
        f"{len(pending)} of {settings.num_servers} servers not healthy after serve.startup_seconds="
        f"{settings.startup_seconds:g}; raise it, or see their last lines:\n" + "\n".join(tails)
    )
