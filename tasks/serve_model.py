"""A real `vllm serve` process as a context: free port, API key, health, log, and an end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from dapo_core.config import ServeConfig
from dapo_core.errors import ServeError
from dapo_core.model_folder import require_model_folder
from tasks.process import SupervisedProcess, background_command

logger = logging.getLogger(__name__)

SERVED_NAME = "policy"
API_KEY_VARIABLE = "VLLM_API_KEY"
POLL_SECONDS = 0.25
TAIL_LINES = 20


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    base_url: str
    model: str  # the served name
    api_key: str


@contextlib.contextmanager
def serve_model(model_path: str | Path, settings: ServeConfig, log_path: Path) -> Iterator[Server]:
    """Yield a healthy server of the model; it is gone, with all its processes, when the block is left.

    Healthy means: its model list names our model and one token was completed. Raises ModelError for an
    incomplete folder before anything starts, and ServeError, with the server's last lines, when there is no free
    port, the server ends, or it is not healthy within serve.startup_seconds.
    """
    require_model_folder(model_path)
    port = settings.port or free_port(settings.host)
    require_free_port(settings.host, port)
    command = serve_command(model_path, settings, port)
    api_key = secrets.token_urlsafe(24)
    env = {**serve_environment(settings), API_KEY_VARIABLE: api_key}
    with background_command(command, log_path=log_path, label="vllm serve", env=env) as process:
        server = Server(f"http://{_connect_host(settings.host)}:{port}", SERVED_NAME, api_key)
        wait_until_healthy(server, process, settings.startup_seconds)
        yield server


def serve_command(model_path: str | Path, settings: ServeConfig, port: int) -> list[str]:
    """The `vllm serve` command line; the API key travels in the environment, where `ps` does not show it."""
    num_bytes = settings.memory_gigabytes and int(settings.memory_gigabytes * 1024**3)
    memory = ["--kv-cache-memory-bytes", str(num_bytes)] if num_bytes else []
    return [
        sys.executable,
        "-m",
        "dapo_core.engines.vllm_command",
        "serve",
        str(model_path),
        "--served-model-name",
        SERVED_NAME,
        "--host",
        settings.host,
        "--port",
        str(port),
        "--dtype",
        settings.dtype,
        "--max-model-len",
        str(settings.max_model_len),
        "--max-num-seqs",
        str(settings.max_num_seqs),
        "--generation-config",
        "vllm",
        *memory,
        *(["--enforce-eager"] if settings.eager else []),
        *settings.extra_args,
    ]


def serve_environment(settings: ServeConfig) -> dict[str, str]:
    """Environment of the server: it reports nothing to anyone, and compiles nothing when eager."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    # --enforce-eager leaves the sampler compiled, which needs a C++ compiler on a CPU
    return {**quiet, "TORCHDYNAMO_DISABLE": "1"} if settings.eager else quiet


def wait_until_healthy(server: Server, process: SupervisedProcess, startup_seconds: float) -> None:
    """Return once the server lists our model and completes a token; raises ServeError otherwise."""
    deadline = time.monotonic() + startup_seconds
    while process.poll() is None:
        if _is_healthy(server):
            return
        if time.monotonic() > deadline:
            raise ServeError(
                f"the server is not healthy after serve.startup_seconds={startup_seconds:g}; raise it, or see "
                f"{process.log_path}, whose last lines are:\n{_tail(process)}"
            )
        time.sleep(POLL_SECONDS)
    raise ServeError(
        f"{process.failure()}\nThe server ended before it was healthy; correct serve.* or the model folder"
    )


def _is_healthy(server: Server) -> bool:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    try:
        with httpx.Client(base_url=server.base_url, headers=headers, timeout=30.0, trust_env=False) as client:
            models = client.get("/v1/models").raise_for_status().json()
            if server.model not in [model["id"] for model in models["data"]]:
                return False
            request = {"model": server.model, "prompt": "1", "max_tokens": 1}
            return client.post("/v1/completions", json=request).is_success
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def _tail(process: SupervisedProcess) -> str:
    return "\n".join(process.tail(TAIL_LINES))


def free_port(host: str) -> int:
    """A port that is free on the host now."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise ServeError(f"serve.host={host} has no free port to bind: {error}; set serve.host") from None


def require_free_port(host: str, port: int) -> None:
    """Raise ServeError when something else listens on the port."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ServeError(
            f"port {port} on {host} cannot be bound: {error.strerror}; set serve.port=0 to take a free one"
        ) from None


def _connect_host(host: str) -> str:
    return "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host


def exec_server(model_path: str | Path, settings: ServeConfig, environment: Mapping[str, str]) -> None:
    """Become the server process; never returns. Without a VLLM_API_KEY a fresh key is made and logged."""
    port = settings.port or free_port(settings.host)
    require_free_port(settings.host, port)
    command = serve_command(model_path, settings, port)
    logger.info("%s", " ".join(command[3:]))
    api_key = environment.get(API_KEY_VARIABLE) or secrets.token_urlsafe(24)
    if API_KEY_VARIABLE not in environment:
        logger.info("%s=%s  # made for this server; set your own to keep it", API_KEY_VARIABLE, api_key)
    os.execvpe(command[0], command, {**environment, **serve_environment(settings), API_KEY_VARIABLE: api_key})
