"""Servers as a context: started together, watched until each is healthy, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from dapo_core.errors import ServeError, ServerDied
from eval import EvaluationError
from eval.dispatch import run_in_thread
from tasks.processes.child import SupervisedProcess, background_command
from tasks.serve_model.checks import require_servable
from tasks.serve_model.command import (
    API_KEY_VARIABLE,
    SERVED_NAME,
    SOCKETS_VARIABLE,
    base_url,
    choose_ports,
    free_ports,
    require_free_port,
    serve_command,
    serve_environments,
    shell_line,
)
from tasks.serve_model.config import ServeConfig
from tasks.serve_model.failure import is_port_taken, raised_error, refused_argument

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
REQUEST_SECONDS = 30.0
TAIL_LINES = 20
CAUSE_LINES = 2000


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    base_url: str
    model: str  # the served name
    api_key: str
    command: str = ""  # as one would type it, MODEL being the folder; "" for a server that others started


@contextlib.contextmanager
def serve_model(
    model_path: str | Path, settings: ServeConfig, log_path: Path, api_key: str | None = None
) -> Iterator[tuple[Server, ...]]:
    """Yield serve.num_servers healthy servers of the model; all are gone when the block is left in any way.

    Healthy means: its model list names our model and one token was completed. The first server logs to `log_path`,
    the others beside it with their number. Raises ModelError for a folder that cannot be served before anything
    starts, and ServeError, with the server's own words, when there is no free port or device, a server ends, or
    one is not healthy within serve.startup_seconds; ServerDied when one was killed, or when an evaluation in the
    block failed because one ended.
    """
    require_servable(model_path, settings, os.environ)
    with _run_servers(model_path, settings, log_path, api_key) as running:
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
    """Serve in the foreground. Without a VLLM_API_KEY a fresh key is made and logged.

    A single server replaces this process, which never returns; several are watched, and raise ServeError when one
    ends.
    """
    require_servable(model_path, settings, environment)
    api_key = environment.get(API_KEY_VARIABLE)
    if not api_key:
        api_key = secrets.token_urlsafe(24)
        logger.info("%s=%s  # made for this server; set your own to keep it", API_KEY_VARIABLE, api_key)
    if settings.num_servers == 1:
        command = serve_command(model_path, settings, choose_ports(settings)[0])
        [own] = serve_environments(settings, environment)
        logger.info("%s", shell_line(command, own))
        os.execvpe(command[0], command, {**environment, **own, API_KEY_VARIABLE: api_key})
    with _run_servers(model_path, settings, log_path, api_key) as running:
        logger.info("%d servers answer: %s", len(running), " ".join(one.server.base_url for one in running))
        while all(one.process.poll() is None for one in running):
            time.sleep(POLL_SECONDS)
        raise next(one for one in running if one.process.poll() is not None).failure("The other servers are ended")


class _Launch:
    """One server on its way to being healthy; `start` may be called again after it ended."""

    def __init__(
        self,
        label: str,
        model_path: str | Path,
        settings: ServeConfig,
        log_path: Path,
        environment: Mapping[str, str],
        stack: contextlib.ExitStack,
    ) -> None:
        self._label = label
        self._model_path = model_path
        self._settings = settings
        self._log_path = log_path
        self._environment = environment
        self._stack = stack
        self._processes: list[SupervisedProcess] = []
        self._port = 0
        self.server: Server

    def start(self, port: int) -> None:
        """Start it; the stack ends it."""
        self._port = port
        command = serve_command(self._model_path, self._settings, port)
        logger.info("%s: %s", self._label, shell_line(command, self._environment))
        process = self._stack.enter_context(
            background_command(
                command,
                log_path=self._log_path,
                label=self._label,
                env=self._environment,
                folder_variable=SOCKETS_VARIABLE,
            )
        )
        self._processes.append(process)
        url = base_url(self._settings.host, port)
        portable = ["python", *("MODEL" if word == str(self._model_path) else word for word in command[1:])]
        line = shell_line(portable, self._environment)
        self.server = Server(url, SERVED_NAME, self._environment[API_KEY_VARIABLE], line)

    @property
    def process(self) -> SupervisedProcess:
        """The latest one."""
        return self._processes[-1]

    def ask_to_end(self) -> None:
        """Send SIGTERM, and do not wait."""
        for process in self._processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)

    async def become_healthy(self) -> None:
        """Return once it lists our model and completes a token. Raises ServeError when it ends first.

        Whoever takes a port between our looking and vLLM's binding makes it end: it is started once more then.
        """
        is_first = True
        while not await self._is_healthy_before_it_ends():
            if not (is_first and is_port_taken(self.process.tail(CAUSE_LINES))):
                raise self.failure("The server ended before it was healthy; correct serve.* or the model folder")
            logger.warning("%s: its port was taken meanwhile, starting it again", self._label)
            is_first = False
            self.start(self._port_again())

    def _port_again(self) -> int:
        if self._settings.port == 0:
            return free_ports(self._settings.host)[0]
        require_free_port(self._settings.host, self._port)
        return self._port

    async def _is_healthy_before_it_ends(self) -> bool:
        # Beside the requests: whoever else has the port may take them and never answer.
        answers = asyncio.create_task(self._answer())
        try:
            while self.process.poll() is None:
                done, _ = await asyncio.wait({answers}, timeout=POLL_SECONDS)
                if done:
                    answers.result()
                    return True
            return False
        finally:
            answers.cancel()

    async def _answer(self) -> None:
        """Return once it is healthy."""
        headers = {"Authorization": f"Bearer {self.server.api_key}"}
        url = self.server.base_url
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False
        ) as client:
            while not await _is_healthy(client, self.server.model):
                await asyncio.sleep(POLL_SECONDS)

    def failure(self, meaning: str, kind: type[ServeError] = ServeError) -> ServeError:
        """What to raise for a server that ended: of this kind, or ServerDied when a signal killed it."""
        lines, ended = self.process.tail(CAUSE_LINES), self.process.failure()
        if ended.exit_code is not None and ended.exit_code < 0:
            kind = ServerDied
        refusal = refused_argument(lines)
        if refusal is not None:
            return kind(
                f"{ended.summary}\nvLLM says: {refusal}\nCorrect serve.extra_args; `vllm serve --help=all` lists "
                "what it takes"
            )
        cause = raised_error(lines)
        said = f"vLLM says: {cause}\n" if cause else ""
        error = kind(f"{said}{ended}\n{meaning}")
        error.summary = f"{said}{ended.summary}\n{meaning}"
        return error

    def tail(self) -> str:
        """Its last lines, under its name."""
        return "\n".join([f"{self._label}, {self.process.log_path}:", *self.process.tail(TAIL_LINES)])


async def _is_healthy(client: httpx.AsyncClient, model: str) -> bool:
    try:
        models = (await client.get("/v1/models")).raise_for_status().json()
        if model not in [entry["id"] for entry in models["data"]]:
            return False
        return (
            await client.post("/v1/completions", json={"model": model, "prompt": "1", "max_tokens": 1})
        ).is_success
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _run_servers(
    model_path: str | Path, settings: ServeConfig, log_path: Path, api_key: str | None
) -> Iterator[list[_Launch]]:
    deadline = time.monotonic() + settings.startup_seconds
    own = {API_KEY_VARIABLE: api_key or secrets.token_urlsafe(24)}
    environments = [{**place, **own} for place in serve_environments(settings, os.environ)]
    ports = choose_ports(settings)
    with contextlib.ExitStack() as stack:
        launches = [
            _Launch(
                _label(number, settings), model_path, settings, _log_path(log_path, number), environment, stack
            )
            for number, environment in enumerate(environments)
        ]
        try:
            for launch, port in zip(launches, ports, strict=True):
                launch.start(port)
            stop = asyncio.Event()
            run_in_thread(_become_healthy(launches, deadline, settings.startup_seconds, stop), stop.set)
            yield launches
        finally:
            # All at once; the stack then waits for each.
            for launch in launches:
                launch.ask_to_end()


async def _become_healthy(
    launches: Sequence[_Launch], deadline: float, startup_seconds: float, stop: asyncio.Event
) -> None:
    """Return once all are healthy, or told to stop; raises ServeError when one ended, or at the deadline."""
    waits = {asyncio.create_task(launch.become_healthy()): launch for launch in launches}
    pending = set(waits)
    while pending and not stop.is_set():
        if time.monotonic() >= deadline:
            tails = "\n".join(launch.tail() for task, launch in waits.items() if task in pending)
            raise ServeError(
                f"{len(pending)} of {len(launches)} servers not healthy after serve.startup_seconds="
                f"{startup_seconds:g}; raise it, or see their last lines:\n{tails}"
            )
        done, pending = await asyncio.wait(pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


def _label(number: int, settings: ServeConfig) -> str:
    """How a server is called in messages."""
    return "vllm serve" if settings.num_servers == 1 else f"vllm serve {number + 1} of {settings.num_servers}"


def _log_path(first: Path, number: int) -> Path:
    return first if number == 0 else first.with_name(f"{first.stem}-{number + 1}{first.suffix}")
