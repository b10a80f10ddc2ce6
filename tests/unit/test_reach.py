"""Requests to hosts: why one does not answer, what a start refuses, which token is found."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_core.cluster import started
from dapo_core.cluster.started import clusters_folder, token_environment
from tasks.nodes import launch, on_node, reach
from tasks.nodes.inventory import Inventory
from tasks.nodes.reach import Answer, ask
from tasks.preflight.environment import TABLE
from tasks.preflight.interfaces import INTERFACE_VARIABLES, is_virtual
from tasks.processes import supervisor

ROOT = Path(__file__).resolve().parents[2]
BARE = str(Path(sys.executable).resolve())  # outside the virtual environment


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def _ask(shell: str = "env DAPO_HOST={host} sh -c", **changes: Any) -> Answer:
    values = {"device": "cpu", "devices": 1, "shell": shell, "connect_seconds": 1, **changes}
    request = {"verb": "status", "cluster": "a_1", "host": "a"}
    return ask(Inventory(hosts=("a",), **values), {"a": request}, 200, must_be_equal=True)["a"]


def test_a_host_answers_whatever_its_shell_prints_at_login(tmp_path: Path) -> None:
    script = tmp_path / "shell"
    script.write_text('#!/bin/sh\necho "welcome to $1"; printf "no line end"\nexec sh -c "$2"\n')
    script.chmod(0o755)
    answer = _ask(f"{script} {{host}}")
    assert (answer.problem, answer.reply) == ("", {"running": None})
    assert answer.versions["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"project": "~/none such"}, "it has no folder ~/none such: put the project there, or"),
        ({"project": "/", "python": BARE}, "/ does not contain the project: set project"),
        ({"setup": "echo no CANN >&2; false"}, "setup failed there: no CANN"),
        ({"python": ".venv/bin/none"}, "it has no interpreter .venv/bin/none (in "),
        ({"python": f"{BARE} -S"}, "it has no interpreter"),  # one word, not a line of shell
        ({"python": "/bin/false"}, "sh -c ... exited with status 1: no output"),
        ({"shell": "dapo-none {host}"}, "there is no command dapo-none here: install"),
        ({"shell": "sh -c 'exec $1 </dev/null' {host} env"}, "the command did not run our program"),
    ],
)
def test_a_host_that_does_not_answer_says_why(changes: dict[str, str], problem: str) -> None:
    assert problem in _ask(**changes).problem


def test_setup_runs_before_the_interpreter_and_cannot_read_the_program(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    answer = _ask(setup=f"export PYTHONPATH={tmp_path}; cat; echo said # and this")
    assert (answer.problem, answer.reply) == ("", {"running": None})
    assert (tmp_path / "ran").exists()  # its exports reach the interpreter, and so Ray


@pytest.mark.slow
def test_a_host_that_hangs_is_given_up_in_time() -> None:
    shell = "sh -c 'sleep 30' {host}"
    inventory = Inventory(hosts=("a",), devices=1, shell=shell, connect_seconds=1)
    assert ask(inventory, {"a": {}}, work_seconds=0.2)["a"].problem == "no answer within 1.2 s"


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_host_that_hangs_and_says_how_to_stop_the_rest(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "hangs")
    shell = f"sh -c 'echo now >{tmp_path}/hangs; exec sleep 600' {{host}}"
    values = {"hosts": ["a"], "device": "cpu", "devices": 1, "shell": shell, "connect_seconds": 600}
    (tmp_path / "nodes.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "flows.cli", "cluster", "up", "nodes.yaml", "--store", "store"]
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **place) as up:
        try:
            assert (tmp_path / "hangs").read_text() == "now\n"
            up.send_signal(signal.SIGINT)
            errors = up.communicate(timeout=60)[1]
        finally:
            up.kill()
    assert up.returncode == 130
    assert "`dapo cluster down nodes.yaml --store store` stops it" in errors


def test_an_interrupt_kills_a_command_that_starts_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask_one, cancelled = reach._ask, list[threading.Event]()

    def ask_and_keep(*arguments: Any) -> Answer:
        cancelled.append(arguments[-1])
        return ask_one(*arguments)

    def start(*words: Any, **given: Any) -> subprocess.Popen[str]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        cancelled[0].wait()
        return subprocess.Popen(*words, **given)

    monkeypatch.setattr(reach, "_ask", ask_and_keep)
    monkeypatch.setattr(reach, "Popen", start)
    values = {"devices": 1, "shell": "sh -c 'exec sleep 600' {host}", "connect_seconds": 600}
    inventory, started_at = Inventory(hosts=("a",), **values), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(inventory, {"a": {}})
    assert time.monotonic() - started_at < 300


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("ssh: No route to host", "ssh: No route to host"),
        ("me@a: Permission denied (publickey).", "install your key: ssh-copy-id me@a"),
        ("Host key verification failed.", "run ssh me@a once and compare its key"),
    ],
)
def test_an_error_of_ssh_is_shown_with_the_command_that_fixes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, problem: str
) -> None:
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho "{error}" >&2\nexit 255\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert problem in _ask("ssh", user="me").problem
    words = (tmp_path / "words").read_text()
    assert words.startswith("-o BatchMode=yes -o ControlMaster=no ")
    assert " -l me -- a exec " in words


def test_a_host_with_other_code_or_without_ray_is_refused(tmp_path: Path) -> None:
    for name in ("tasks", "dapo_core", "downloads"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    answer = _ask(project=str(tmp_path))
    digest = answer.versions["digest"][:12]
    assert f"its code in {tmp_path} differs from the code here (digest {digest}" in answer.problem
    assert answer.reply == {}
    assert (
        "has no ray: set python to the environment's"
        in _ask(project=str(tmp_path), python=BARE).problem
    )


def test_hosts_that_do_not_match_the_head_are_refused() -> None:
    inventory = Inventory(hosts=("a", "b", "c", "d"), device="npu", devices=16)
    versions = {"python": "3.11.1", "ray": "2.60.0"}

    def answer(address: str, devices: int = 16, **changed: str) -> Answer:
        reply = {"interface": {"address": address}, "num_devices": devices, "running": None}
        return Answer(reply, versions={**versions, **changed})

    found = {"a": answer("10.0.0.1"), "b": answer("10.0.0.2", python="3.11.2")}
    found |= {"c": answer("10.0.0.3", 8), "d": answer("10.0.0.3")}
    problems = launch._mismatches(inventory, found)
    assert problems["b"] == "python 3.11.2 differs from the head's 3.11.1: Ray needs equal versions"
    assert problems["c"].startswith("its address 10.0.0.3 is also another host's")
    assert problems["d"] == problems["c"]
    found["d"].reply["running"] = {"address": "10.9.9.9", "interface": "eth1"}
    found["d"].reply["interface"] = {"address": "10.0.0.4"}
    problems = launch._mismatches(inventory, found)
    assert problems["c"] == "it has 8 npu devices, the inventory lists 16: set its devices"
    assert "Ray is running at 10.9.9.9 on eth1, but the inventory now leads to" in problems["d"]


def _cluster(name: str, address: str) -> Path:
    """The folder of a cluster on this node, with a private token."""
    folder = clusters_folder() / name
    folder.mkdir(parents=True)
    (folder / "address").write_text(address)
    (folder / "token").touch(0o600)
    return folder


def test_a_training_finds_the_private_token_of_its_own_cluster() -> None:
    folder = _cluster("node1_6379", "10.0.0.1:6379")
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    assert token_environment("10.0.0.1:6379", {}) == found
    for other in ("10.0.0.2:6379", "10.0.0.1:6380", "auto"):
        assert token_environment(other, {}) == {}
    (folder / "address").write_text("127.0.0.1:6379")
    assert token_environment("localhost:6379", {}) == found
    assert token_environment("no-such-host.invalid:6379", {}) == {}
    (folder / "address").write_text("10.0.0.1:6379")
    assert token_environment("10.0.0.1:6379", {"RAY_AUTH_TOKEN": "mine"}) == {}
    (folder / "token").chmod(0o640)  # others may have read it
    assert token_environment("10.0.0.1:6379", {}) == {}
    (folder / "token").unlink()
    assert token_environment("10.0.0.1:6379", {}) == {}


def test_the_newest_of_several_clusters_at_an_address_has_the_token() -> None:
    for age, name in enumerate(("10.0.0.1_6379", "node1_6379", "head_6379")):
        folder = _cluster(name, "10.0.0.1:6379")
        os.utime(folder / "address", (0, 1_000_000 - (age - 1) ** 2))  # the second is the newest
    found = token_environment("10.0.0.1:6379", {})["RAY_AUTH_TOKEN_PATH"]
    assert found == str(clusters_folder() / "node1_6379" / "token")


def test_a_host_name_that_resolves_to_loopback_finds_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: [entry])
    assert started._is_same("node1:6379", "127.0.0.1:6379")  # an address of this machine
    assert not started._is_same("node1:6379", "192.0.2.7:6379")


def test_each_device_kind_gets_the_interface_variables_of_the_table() -> None:
    rows = [row for row in yaml.safe_load(TABLE.read_text()) if row.get("must_be") == "interface"]
    for device, variables in INTERFACE_VARIABLES.items():
        named = {row["name"] for row in rows if device in row.get("devices", (device,))}
        assert set(variables) == named


def test_an_ipv6_address_is_joined_with_its_port_in_brackets() -> None:
    assert launch._join("fd00::1", 6379) == "[fd00::1]:6379"


def test_a_ray_tmpdir_that_is_too_long_is_refused_by_name() -> None:
    request = {"cluster": "c", "host": "h", "environment": {"RAY_TMPDIR": "/" + "x" * 30}}
    assert "RAY_TMPDIR=/xxx" in on_node.answer({"verb": "start", **request})["problem"]


def test_down_removes_the_token_of_a_start_that_failed_before_ray() -> None:
    folder = clusters_folder() / "left_6379"
    (folder / "h").mkdir(parents=True)
    (folder / "token").write_text("secret")
    assert on_node.answer({"verb": "stop", "cluster": folder.name, "host": "h"}) == {"ended": None}
    assert not folder.exists()


@pytest.mark.slow
def test_down_waits_for_a_start_in_progress() -> None:
    request = {"verb": "stop", "cluster": "c_6379", "host": "h"}
    folder = on_node.folder_of(request)
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(["sleep", "600"]) as ray:
        try:
            with on_node._locked(folder):
                ending = pool.submit(on_node.answer, request)
                with pytest.raises(TimeoutError):  # else it would leave a Ray behind
                    ending.result(1.0)
                folder.mkdir(parents=True)
                record = {"pid": ray.pid, "started_at": 1.0, "folder": "/none", "hostname": "h"}
                record["start_time"] = supervisor.stat_fields(ray.pid)[19]
                record["boot"] = on_node.BOOT.read_text().strip()
                (folder / "record.json").write_text(json.dumps(record))
            assert ending.result()["ended"] == 1.0
            assert ray.poll() is not None
        finally:
            ray.kill()
    assert list(clusters_folder().iterdir()) == []


@pytest.mark.slow
def test_a_start_whose_command_was_interrupted_starts_nothing() -> None:
    request: dict[str, Any] = {"verb": "start", "cluster": "c_6379", "host": "h", "is_head": True}
    request |= {"head_address": "127.0.0.1:6379", "address": "127.0.0.1", "interface": "lo"}
    request |= {"environment": {}, "options": ["--head", "--port=6379"], "token": "t"}
    request |= {"start_seconds": 60}
    folder, pipe = on_node.folder_of(request), subprocess.PIPE
    program = (
        "import json, sys; from tasks.nodes import on_node; "
        "print(on_node.answer(json.load(sys.stdin)))"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as start:
        assert start.stdin is not None
        assert start.stdout is not None
        with on_node._locked(folder):  # as `down` does
            start.stdin.write(json.dumps(request))
            start.stdin.close()
            start.stdout.close()  # as when ssh ends
            with pytest.raises(subprocess.TimeoutExpired):
                start.wait(1.0)
            assert not folder.exists()
    assert not (folder / "record.json").exists()
    assert on_node.answer({**request, "verb": "stop"}) == {"ended": None}


def test_container_bridges_are_virtual_but_a_site_s_own_bridge_is_not() -> None:
    assert is_virtual("br-0123456789ab")
    assert is_virtual("docker0")
    assert not is_virtual("br-lan")
