"""Send requests to the hosts of an inventory in parallel, over ssh or the inventory's own command."""

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
    """Hosts cannot be reached, do not match, or do not start Ray; the message has the reason for
    each host.
    """


@dataclass(frozen=True)
class Answer:
    """A host's reply, or the problem that prevented it; versions are known once its interpreter
    runs.
    """

    reply: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    versions: dict[str, Any] = field(default_factory=dict)


def ask(
    inventory: Inventory,
    requests: Mapping[str, Mapping[str, Any]],
    work_seconds: float = ANSWER_SECONDS,
    must_be_equal: bool = False,
) -> dict[str, Answer]:
    """Send each host its request; returns the answers by name, in the requests' order. Failures are
    answers too.

    With `must_be_equal`, a host with different code replies with its versions only.
    """
    shared = {"digest": own_digest(), "must_be_equal": must_be_equal}
    hosts = [host for host in inventory.hosts if host.name in requests]
    commands: list[Popen[str]] = []
    is_cancelled = threading.Event()
    with ThreadPoolExecutor(min(MAX_CONNECTIONS, max(len(hosts), 1))) as pool:
        try:
            waiting = {
                host.name: pool.submit(
                    _ask,
                    inventory,
                    host,
                    {**requests[host.name], **shared},
                    work_seconds,
                    commands,
                    is_cancelled,
                )
                for host in hosts
            }
            return {name: waiting[name].result() for name in requests}
        except (
            BaseException
        ):  # under srun, or if only this process is signalled, the commands get no signal
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
    command = inventory.command(host, line_on_host(inventory))
    seconds = inventory.connect_seconds + work_seconds
    try:
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, errors="replace")
    except FileNotFoundError:
        return Answer(problem=f"there is no command {command[0]} here: install it, or set shell")
    except OSError as error:
        return Answer(
            problem=f"the command {command[0]} cannot be run here: {error.strerror}; set shell"
        )
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


def line_on_host(inventory: Inventory) -> str:
    """Return the line that runs a program from standard input in the host's project folder, in any
    login shell.
    """
    folder, python = (_quoted(text) for text in (inventory.project, inventory.python))
    has_python = f"command -v {python} >/dev/null 2>&1 || exit {NO_PYTHON}"
    # setup must not read the program from standard input, nor write into the reply
    setup = (
        f"{{ {inventory.setup}\n}} </dev/null >&2 || exit {NO_SETUP}; " if inventory.setup else ""
    )
    return in_bash(f"cd {folder} || exit {NO_FOLDER}; {setup}{has_python}; exec {python} -")


def in_bash(line: str) -> str:
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
        return Answer(
            problem=f"{reply['cwd']} does not contain the project: set project", versions=versions
        )
    if reply["ray"] is None:
        problem = f"{reply['interpreter']} has no ray: set python to the environment's interpreter"
        return Answer(problem=problem, versions=versions)
    if "answer" not in reply:
        problem = (
            f"its code in {reply['cwd']} differs from the code here (digest "
            f"{reply['digest'][:12]}, here {own_digest()[:12]}): update both to the same commit"
        )
        return Answer(problem=problem, versions=versions)
    return Answer(reply["answer"], reply["answer"].get("problem", ""), versions=versions)


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
        return (
            "the command did not run our program: shell must pass on standard input, as docker "
            "exec -i does"
        )
    if Path(inventory.command(host, "")[0]).name == SSH and status == 255:
        user = f"{inventory.user}@" if inventory.user else ""
        advice = {
            "Permission denied": f"; install your key: ssh-copy-id {user}{host.reached_at}",
            "Host key verification failed": f"; run ssh {user}{host.reached_at} once and compare its key",
        }
        hint = next((hint for words, hint in advice.items() if words in errors), "")
        return last.rstrip(".") + hint
    return f"{shlex.join(inventory.command(host, '...'))} exited with status {status}: {last}"
