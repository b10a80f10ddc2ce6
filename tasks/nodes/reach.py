"""Asks hosts of an inventory, all at once, to do something: over ssh, or the command that the inventory has."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

from dapo_core.errors import DapoError
from tasks.nodes import probe
from tasks.nodes.inventory import PROJECT, SSH, Host, Inventory

MAX_AT_ONCE = 64
ANSWER_SECONDS = 60.0  # beyond the time to connect, unless the work takes longer
NO_FOLDER, NO_PYTHON, NO_SETUP = 71, 72, 73  # exit statuses of the line that is sent
MAX_SHOWN = 300  # characters of an error
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ./_~=:,;|&<>(){}-]")


class ClusterError(DapoError, RuntimeError):
    """Hosts of a cluster cannot be reached, do not fit together, or do not start Ray; each with its reason."""


@dataclass(frozen=True)
class Answer:
    """What a host said, or the problem in its way; versions wherever it has the project's interpreter."""

    said: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    versions: dict[str, Any] = field(default_factory=dict)


def ask(
    inventory: Inventory,
    requests: Mapping[str, Mapping[str, Any]],
    work_seconds: float = ANSWER_SECONDS,
    must_be_equal: bool = False,
) -> dict[str, Answer]:
    """The answer of each host, by name, in the requests' order; no host's silence is an error here.

    `must_be_equal` has a host with other code than this machine's answer with its versions only.
    """
    shared = {"digest": own_digest(), "must_be_equal": must_be_equal}
    hosts = [host for host in inventory.hosts if host.name in requests]
    commands = _Commands()
    with ThreadPoolExecutor(min(MAX_AT_ONCE, max(len(hosts), 1))) as pool:
        try:
            waiting = {
                host.name: pool.submit(
                    _ask, inventory, host, {**requests[host.name], **shared}, work_seconds, commands
                )
                for host in hosts
            }
            return {name: waiting[name].result() for name in requests}
        except BaseException:  # an interrupt, which srun and a signal to us alone do not pass on
            pool.shutdown(wait=False, cancel_futures=True)
            commands.kill()
            raise


class _Commands:
    """The commands that run, and those that begin to while the others are killed."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._are_killed = threading.Event()

    def add(self, command: subprocess.Popen[str]) -> None:
        self._running.append(command)
        if self._are_killed.is_set():
            command.kill()

    def kill(self) -> None:
        self._are_killed.set()
        for command in self._running:
            command.kill()


@functools.cache
def own_digest() -> str:
    """The digest of this machine's code."""
    return probe.code_digest(str(PROJECT))


def _ask(
    inventory: Inventory,
    host: Host,
    request: Mapping[str, Any],
    work_seconds: float,
    commands: _Commands,
) -> Answer:
    source = Path(probe.__file__).read_text(encoding="utf-8")
    program = f"{source}\n\nanswer(json.loads({json.dumps(request)!r}))\n"
    command = inventory.command(host, line_on_host(inventory))
    seconds = inventory.connect_seconds + work_seconds
    try:
        running = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, errors="replace")
    except FileNotFoundError:
        return Answer(problem=f"there is no command {command[0]} here: install it, or set shell")
    except OSError as error:
        return Answer(problem=f"the command {command[0]} cannot be run here: {error.strerror}; set shell")
    commands.add(running)
    with running:
        try:
            output, errors = running.communicate(program, seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            return Answer(problem=f"no answer within {seconds:g} s")
    done = subprocess.CompletedProcess(command, running.returncode, output, errors)
    lines = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if done.returncode or not lines:
        return Answer(problem=_why_silent(inventory, host, done))
    return _understood(inventory, json.loads(lines[-1].removeprefix(probe.MARK)))


def line_on_host(inventory: Inventory) -> str:
    """The line that runs a program from standard input in the project's folder of a host, for any login shell."""
    folder, python = (_quoted(text) for text in (inventory.project, inventory.python))
    has_python = f"command -v {python} >/dev/null 2>&1 || exit {NO_PYTHON}"
    # standard input is the program's, standard output the answer's
    setup = f"{{ {inventory.setup}\n}} </dev/null >&2 || exit {NO_SETUP}; " if inventory.setup else ""
    return in_bash(f"cd {folder} || exit {NO_FOLDER}; {setup}{has_python}; exec {python} -")


def in_bash(line: str) -> str:
    """The command that has bash run a line, written so that csh and fish read it as bash does.

    Quotes, backslashes, `!` and line ends mean something else to each: they are sent as octal numbers.
    """
    numbers = _NOT_PLAIN.sub(lambda found: f"\\0{ord(found[0]):03o}", line.encode().decode("latin-1"))
    return f'exec bash --norc -c \'eval "$(printf %b "{numbers}")"\''  # ~/.bashrc is the login shell's to read


def _quoted(path: str) -> str:
    """A path for a shell, with ~ for the home of the user there."""
    home, separator, rest = path.partition("/")
    return f"{home}/{shlex.quote(rest)}" if home == "~" and separator else shlex.quote(path)


def _understood(inventory: Inventory, said: dict[str, Any]) -> Answer:
    versions = {name: said[name] for name in ("python", "ray", "digest")}
    if said["digest"] is None:
        return Answer(problem=f"{said['cwd']} does not hold the project: set project", versions=versions)
    if said["ray"] is None:
        problem = f"{said['interpreter']} has no ray: set python to the environment's interpreter"
        return Answer(problem=problem, versions=versions)
    if "answer" not in said:
        problem = (
            f"its code in {said['cwd']} is not the code here (digest {said['digest'][:12]}, here "
            f"{own_digest()[:12]}): bring both to one state"
        )
        return Answer(problem=problem, versions=versions)
    return Answer(said["answer"], said["answer"].get("problem", ""), versions=versions)


def _why_silent(inventory: Inventory, host: Host, done: subprocess.CompletedProcess[str]) -> str:
    """Why a host gave no answer, from the exit status and the last line of the errors."""
    errors = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    last = errors[-1][:MAX_SHOWN]
    if done.returncode == NO_FOLDER:
        return f"it has no folder {inventory.project}: put the project there, or set project"
    if done.returncode == NO_PYTHON:
        return f"it has no interpreter {inventory.python} (in {inventory.project}): set python"
    if done.returncode == NO_SETUP:
        return f"setup ended with an error there: {last}"
    if done.returncode == 0:
        return "it ran the command without our program: shell must pass standard input on, as docker exec -i does"
    if Path(inventory.command(host, "")[0]).name == SSH and done.returncode == 255:
        user = f"{inventory.user}@" if inventory.user else ""
        advice = {
            "Permission denied": f"; give it your key: ssh-copy-id {user}{host.reached_at}",
            "Host key verification failed": f"; type ssh {user}{host.reached_at} once and compare its key",
        }
        hint = next((hint for words, hint in advice.items() if words in done.stderr), "")
        return last.rstrip(".") + hint
    return f"{shlex.join(inventory.command(host, '...'))} ended with status {done.returncode}: {last}"
