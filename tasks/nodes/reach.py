"""Send requests to the hosts of an inventory in parallel, over ssh or the inventory's command."""

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
from subprocess import PIPE, Popen
from typing import Any

from dapo_core.errors import DapoError
from tasks.nodes import probe
from tasks.nodes.inventory import PROJECT, SSH, Host, Inventory

MAX_CONNECTIONS = 64  # at a time
ANSWER_SECONDS = 60.0  # beyond the time to connect, unless the work takes longer
NO_FOLDER, NO_PYTHON, NO_SETUP = 71, 72, 73  # exit statuses of the command on the host
MAX_SHOWN = 300  # characters of an error
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ./_~=:,;|&<>(){}-]")


class ClusterError(DapoError, RuntimeError):
    """Hosts cannot be reached, do not match, or do not start Ray; the message has each reason."""


@dataclass(frozen=True)
class Answer:
    """A host's reply, or what prevented it; versions are known once its interpreter runs."""

    reply: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    versions: dict[str, Any] = field(default_factory=dict)


def ask(
    inventory: Inventory,
    requests: Mapping[str, Mapping[str, Any]],
    work_seconds: float = ANSWER_SECONDS,
    must_be_equal: bool = False,
) -> dict[str, Answer]:
    """Send each host its request; returns the answers, failures included, in the requests' order.

    With `must_be_equal`, a host with different code replies with its versions only.
    """
    shared = {"digest": own_digest(), "must_be_equal": must_be_equal}
    hosts = {host.name: host for host in inventory.hosts}
    commands: list[Popen[str]] = []
    is_cancelled = threading.Event()

    def ask_one(name: str) -> Answer:
        request = {**requests[name], **shared}
        return _ask(inventory, hosts[name], request, work_seconds, commands, is_cancelled)

    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        try:
            return dict(zip(requests, pool.map(ask_one, requests), strict=True))
        except BaseException:  # under srun, or if only we are signalled, the commands are not
            pool.shutdown(wait=False, cancel_futures=True)
            is_cancelled.set()
            for command in commands:
                command.kill()
            raise


@functools.cache
def own_digest() -> str:
    """Return the digest of this machine's code."""
    return probe.code_digest(str(PROJECT))


def _ask(
    inventory: Inventory,
    host: Host,
    request: Mapping[str, Any],
    work_seconds: float,
    commands: list[Popen[str]],
    is_cancelled: threading.Event,
) -> Answer:
    source = Path(probe.__file__).read_text(encoding="utf-8")
    program = f"{source}\n\nanswer(json.loads({json.dumps(request)!r}))\n"
    command = inventory.command(host, _line_on_host(inventory))
    seconds = inventory.connect_seconds + work_seconds
    try:
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, errors="replace")
    except FileNotFoundError:
        return Answer(problem=f"there is no command {command[0]} here: install it, or set shell")
    except OSError as error:
        fault = f"the command {command[0]} cannot be run here: {error.strerror}; set shell"
        return Answer(problem=fault)
    commands.append(process)
    if is_cancelled.is_set():
        process.kill()
    with process:
        try:
            output, errors = process.communicate(program, seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return Answer(problem=f"no answer within {seconds:g} s")
    lines = [line for line in output.splitlines() if line.startswith(probe.MARK)]
    if process.returncode or not lines:
        return Answer(problem=_why_silent(inventory, host, process.returncode, errors))
    return _parse(inventory, json.loads(lines[-1].removeprefix(probe.MARK)))


def _line_on_host(inventory: Inventory) -> str:
    """Return the line that runs a program from standard input in the host's project folder."""
    folder, python = (_quoted(text) for text in (inventory.project, inventory.python))
    has_python = f"command -v {python} >/dev/null 2>&1 || exit {NO_PYTHON}"
    setup = ""
    if inventory.setup:  # it must not read the program, nor write into the reply
        setup = f"{{ {inventory.setup}\n}} </dev/null >&2 || exit {NO_SETUP}; "
    return _in_bash(f"cd {folder} || exit {NO_FOLDER}; {setup}{has_python}; exec {python} -")


def _in_bash(line: str) -> str:
    """Return a command that runs a line in bash, and that csh and fish read as bash does.

    Shells disagree about quotes, backslashes, `!` and line ends: these are sent as octal numbers.
    """
    numbers = _NOT_PLAIN.sub(
        lambda found: f"\\0{ord(found[0]):03o}", line.encode().decode("latin-1")
    )
    # the login shell has read ~/.bashrc
    return f'exec bash --norc -c \'eval "$(printf %b "{numbers}")"\''


def _quoted(path: str) -> str:
    """Quote a path for a shell, with a leading ~ left to the host's shell."""
    home, separator, rest = path.partition("/")
    return f"{home}/{shlex.quote(rest)}" if home == "~" and separator else shlex.quote(path)


def _parse(inventory: Inventory, reply: dict[str, Any]) -> Answer:
    versions = {name: reply[name] for name in ("python", "ray", "digest")}
    if reply["digest"] is None:
        problem = f"{reply['cwd']} does not contain the project: set project"
    elif reply["ray"] is None:
        problem = f"{reply['interpreter']} has no ray: set python to the environment's interpreter"
    elif "answer" in reply:
        return Answer(reply["answer"], reply["answer"].get("problem", ""), versions)
    else:
        problem = (
            f"its code in {reply['cwd']} differs from the code here (digest "
            f"{reply['digest'][:12]}, here {own_digest()[:12]}): update both to the same commit"
        )
    return Answer(problem=problem, versions=versions)


def _why_silent(inventory: Inventory, host: Host, status: int, errors: str) -> str:
    """Explain a missing reply, from the exit status and the last line of the errors."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no output"]
    last = lines[-1][:MAX_SHOWN]
    if status == NO_FOLDER:
        return f"it has no folder {inventory.project}: put the project there, or set project"
    if status == NO_PYTHON:
        return f"it has no interpreter {inventory.python} (in {inventory.project}): set python"
    if status == NO_SETUP:
        return f"setup failed there: {last}"
    if status == 0:
        return "the command did not run our program: shell must pass on its input (docker exec -i)"
    if Path(inventory.command(host, "")[0]).name == SSH and status == 255:
        place = f"{inventory.user}@{host.reached_at}" if inventory.user else host.reached_at
        advice = {
            "Permission denied": f"; install your key: ssh-copy-id {place}",
            "Host key verification failed": f"; run ssh {place} once and compare its key",
        }
        hint = next((hint for words, hint in advice.items() if words in errors), "")
        return last.rstrip(".") + hint
    return f"{shlex.join(inventory.command(host, '...'))} exited with status {status}: {last}"
