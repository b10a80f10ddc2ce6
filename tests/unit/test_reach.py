"""Asking hosts: what comes back from one that cannot answer, and which token a training takes."""

from __future__ import annotations

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
from typer.testing import CliRunner

from dapo_core.cluster.started import clusters_folder, token_environment
from flows.cli import app
from tasks.interfaces import INTERFACE_VARIABLES, is_virtual
from tasks.nodes import interface, launch, on_node, reach
from tasks.nodes.inventory import Inventory
from tasks.nodes.reach import Answer, ask
from tasks.processes import supervisor

ROOT = Path(__file__).resolve().parents[2]
BARE = str(Path(sys.executable).resolve())  # outside of the virtual environment


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def _ask(shell: str = "env DAPO_HOST={host} sh -c", **changes: Any) -> Answer:
    inventory = Inventory(hosts=("a",), device="cpu", devices=1, shell=shell, connect_seconds=1, **changes)
    return ask(inventory, {"a": {"verb": "status", "cluster": "a_1", "host": "a"}}, 200, must_be_equal=True)["a"]


def test_a_host_answers() -> None:
    answer = _ask()
    assert (answer.problem, answer.said) == ("", {"running": None})
    assert answer.versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_what_a_shell_prints_at_login_does_not_matter(tmp_path: Path) -> None:
    script = tmp_path / "shell"
    script.write_text('#!/bin/sh\necho "welcome to $1"; printf "no line end"\nexec sh -c "$2"\n')
    script.chmod(0o755)
    assert _ask(f"{script} {{host}}").said == {"running": None}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"project": "/none such"}, "it has no folder /none such: put the project there, or set project"),
        ({"project": "~/none"}, "it has no folder ~/none: "),
        ({"project": "/", "python": BARE}, "/ does not hold the project: set project"),
        ({"setup": "echo no CANN >&2; false"}, "setup ended with an error there: no CANN"),
        ({"python": ".venv/bin/none"}, "it has no interpreter .venv/bin/none (in "),
        ({"python": "/bin/false"}, "sh -c ... ended with status 1: it said nothing"),
        ({"shell": "dapo-no-such-command {host}"}, "there is no command dapo-no-such-command here: install"),
        ({"shell": "sh -c 'exec $1 </dev/null; sh -c \"$2\"' {host} env"}, "it ran the command without"),
    ],
)  # fmt: skip
def test_why_a_host_does_not_answer(changes: dict[str, str], problem: str) -> None:
    assert problem in _ask(**changes).problem


def test_setup_runs_first_and_takes_nothing_of_the_program(tmp_path: Path) -> None:
    answer = _ask(setup=f"export PYTHONPATH={tmp_path}; cat; echo said # and this")
    assert (answer.problem, answer.said) == ("", {"running": None})
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    _ask(setup=f"export PYTHONPATH={tmp_path}")
    assert (tmp_path / "ran").exists()  # what it exports reaches the interpreter, and Ray


@pytest.mark.slow
def test_a_host_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = Inventory(hosts=("a",), devices=1, shell="sh -c 'sleep 30' {host}", connect_seconds=1)
    answer = ask(inventory, {"a": {}}, work_seconds=0.2)["a"]
    assert answer.problem == "no answer within 1.2 s"


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_host_that_hangs_and_says_what_may_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")
    shell = f"sh -c 'echo now >{tmp_path}/hangs; exec sleep 600' {{host}}"
    values = {"hosts": ["a"], "device": "cpu", "devices": 1, "shell": shell, "connect_seconds": 600}
    (tmp_path / "nodes.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "flows.cli", "cluster", "up", "nodes.yaml", "--store", "store"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as up:
        try:
            assert (tmp_path / "hangs").read_text() == "now\n"
            up.send_signal(signal.SIGINT)
            said = up.communicate(timeout=60)[1]
        finally:
            up.kill()
    assert up.returncode == 130
    assert "where it was started; `dapo cluster down nodes.yaml --store store` stops it" in said


def test_an_interrupt_ends_a_command_that_starts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    others_are_killed, popen, kill = threading.Event(), subprocess.Popen, reach._Commands.kill

    def start(*words: Any, **given: Any) -> subprocess.Popen[str]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        others_are_killed.wait()
        return popen(*words, **given)

    def kill_others(commands: reach._Commands) -> None:
        kill(commands)
        others_are_killed.set()

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(reach._Commands, "kill", kill_others)
    start_time = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(
            Inventory(
                hosts=("a",), device="cpu", devices=1, shell="sh -c 'exec sleep 600' {host}", connect_seconds=600
            ),
            {"a": {}},
        )
    assert time.monotonic() - start_time < 300


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("ssh: connect to host a port 22: No route to host", "ssh: connect to host a port 22: No route to host"),
        ("me@a: Permission denied (publickey).", "give it your key: ssh-copy-id me@a"),
        ("Host key verification failed.", "type ssh me@a once and compare its key"),
    ],
)
def test_what_ssh_says_is_shown_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, problem: str
) -> None:
    (tmp_path / "ssh").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho "{said}" >&2\nexit 255\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert problem in _ask("ssh", user="me").problem
    assert (
        (tmp_path / "words")
        .read_text()
        .startswith(
            "-o BatchMode=yes -o ControlMaster=no -o ControlPath=none -o ConnectTimeout=1 -l me -- a exec "
        )
    )


def test_a_project_with_other_code_or_without_ray_is_refused(tmp_path: Path) -> None:
    for name in ("tasks", "dapo_core", "downloads"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    answer = _ask(project=str(tmp_path))
    assert (
        f"its code in {tmp_path} is not the code here (digest {answer.versions['digest'][:12]}" in answer.problem
    )
    assert answer.said == {}
    assert "has no ray: set python to the environment's" in _ask(project=str(tmp_path), python=BARE).problem
    assert _ask(python=f"{BARE} -S").problem.startswith("it has no interpreter")  # one word, not a line of shell


def test_hosts_that_do_not_fit_the_head() -> None:
    inventory = Inventory(hosts=("a", "b", "c", "d"), device="npu", devices=16)
    versions = {"python": "3.11.1", "ray": "2.60.0"}

    def answer(address: str, devices: int = 16, **changed: str) -> Answer:
        said = {"interface": {"address": address}, "num_devices": devices, "running": None}
        return Answer(said, versions={**versions, **changed})

    found = {"a": answer("10.0.0.1"), "b": answer("10.0.0.2", python="3.11.2"), "c": answer("10.0.0.3", 8)}
    found["d"] = answer("10.0.0.3")
    problems = launch._misfits(inventory, found, found["a"])
    assert problems["b"] == "it has python 3.11.2, the head 3.11.1: Ray joins equal versions only"
    assert problems["c"].startswith("it has the address 10.0.0.3, as another host")
    assert problems["d"] == problems["c"]
    found["d"].said["running"] = {"address": "10.9.9.9", "interface": "eth1"}
    found["d"].said["interface"] = {"address": "10.0.0.4"}
    problems = launch._misfits(inventory, found, found["a"])
    assert problems["d"].startswith("its Ray runs at 10.9.9.9 on eth1, the inventory now leads to 10.0.0.4; `dapo")
    del found["d"]
    assert launch._misfits(inventory, found, found["a"])["c"] == "it has 8 of 16 devices (npu): set its devices"


def test_a_training_takes_the_token_of_its_cluster_alone() -> None:
    folder = clusters_folder() / "node1_6379"
    folder.mkdir(parents=True)
    (folder / "address").write_text("10.0.0.1:6379")
    token = folder / "token"
    token.write_text("secret")
    token.chmod(0o600)
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert token_environment("10.0.0.1:6379", {}) == found
    assert token_environment("10.0.0.2:6379", {}) == {}
    assert token_environment("10.0.0.1:6380", {}) == {}
    assert token_environment("auto", {}) == {}
    (folder / "address").write_text("127.0.0.1:6379")
    assert token_environment("localhost:6379", {}) == found
    assert token_environment("no-such-host.invalid:6379", {}) == {}
    (folder / "address").write_text("10.0.0.1:6379")
    assert token_environment("10.0.0.1:6379", {"RAY_AUTH_TOKEN": "mine"}) == {}
    token.chmod(0o640)  # others may have read it
    assert token_environment("10.0.0.1:6379", {}) == {}
    token.unlink()
    assert token_environment("10.0.0.1:6379", {}) == {}


def test_of_several_clusters_at_an_address_the_newest_has_the_token() -> None:
    for age, name in enumerate(("10.0.0.1_6379", "node1_6379", "head_6379")):
        folder = clusters_folder() / name
        folder.mkdir(parents=True)
        (folder / "address").write_text("10.0.0.1:6379")
        os.utime(folder / "address", (0, 1_000_000 - (age - 1) ** 2))  # the second is the newest
        (folder / "token").touch(0o600)
    found = token_environment("10.0.0.1:6379", {})["RAY_AUTH_TOKEN_PATH"]
    assert found == str(clusters_folder() / "node1_6379" / "token")


def test_the_addresses_of_a_name_in_the_resolver_s_order_with_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["fd00::2", "10.0.0.9", "fd00::1", "10.0.0.2", "10.0.0.9"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: [(0, 0, 0, "", (each, 0)) for each in given])
    assert interface.addresses_of("node1") == ["10.0.0.9", "10.0.0.2", "fd00::2", "fd00::1"]


def test_each_kind_of_device_gets_the_variables_of_the_table() -> None:
    import yaml

    from tasks.preflight.environment import TABLE

    rows = [row for row in yaml.safe_load(TABLE.read_text()) if row.get("is") == "interface"]
    for device, variables in INTERFACE_VARIABLES.items():
        assert set(variables) == {row["name"] for row in rows if device in row.get("devices", (device,))}


def test_an_address_with_colons_and_the_digest_of_this_code() -> None:
    assert launch._join("fd00::1", 6379) == "[fd00::1]:6379"
    assert len(reach.own_digest()) == 64


def test_a_name_of_this_machine_in_loopback_finds_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_core.cluster import started

    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: [entry])
    assert started._is_same("node1:6379", "127.0.0.1:6379")  # an address of this machine
    assert not started._is_same("node1:6379", "192.0.2.7:6379")


def test_a_folder_of_the_inventory_that_is_too_long_is_refused_by_name() -> None:
    request = {"cluster": "c", "host": "h", "is_head": True, "environment": {"RAY_TMPDIR": "/" + "x" * 30}}
    assert "RAY_TMPDIR=/xxx" in on_node.answer({"verb": "start", **request})["problem"]


def test_a_start_that_failed_before_ray_leaves_no_token_after_down() -> None:
    folder = clusters_folder() / "left_6379"
    (folder / "h").mkdir(parents=True)
    (folder / "token").write_text("secret")
    assert on_node.answer({"verb": "stop", "cluster": folder.name, "host": "h"}) == {"ended": None}
    assert not folder.exists()


START = "import json, sys; from tasks.nodes import on_node; print(on_node.answer(json.load(sys.stdin)))"


@pytest.mark.slow
def test_an_end_waits_for_a_start_that_is_at_work() -> None:
    request = {"verb": "stop", "cluster": "c_6379", "host": "h"}
    folder = on_node.folder_of(request)
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(["sleep", "600"]) as ray:
        try:
            with on_node._alone(folder):
                ending = pool.submit(on_node.answer, request)
                with pytest.raises(TimeoutError):  # it would have found nothing, and a Ray would be left
                    ending.result(1.0)
                folder.mkdir(parents=True)
                start_time, boot = supervisor.stat_fields(ray.pid)[19], on_node.BOOT.read_text().strip()
                record = {
                    "pid": ray.pid,
                    "start_time": start_time,
                    "boot": boot,
                    "folder": "/none",
                    "hostname": "h",
                }
                (folder / "record.json").write_text(json.dumps({**record, "started_at": 1.0}))
            assert ending.result()["ended"] == 1.0
            assert ray.poll() is not None
        finally:
            ray.kill()
    assert list(clusters_folder().iterdir()) == []


@pytest.mark.slow
def test_a_start_whose_command_was_interrupted_starts_nothing(tmp_path: Path) -> None:
    request = {
        **{"verb": "start", "cluster": "c_6379", "host": "h", "is_head": True, "start_seconds": 60, "token": "t"},
        **{"head_address": "127.0.0.1:6379", "address": "127.0.0.1", "interface": "lo"},
        **{"environment": {}, "options": ["--head", "--port=6379"]},
    }
    folder = on_node.folder_of(request)
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as start:
        assert start.stdin is not None
        assert start.stdout is not None
        with on_node._alone(folder):  # as `down` has it
            start.stdin.write(json.dumps(request))
            start.stdin.close()
            start.stdout.close()  # as when ssh ends
            with pytest.raises(subprocess.TimeoutExpired):
                start.wait(1.0)
            assert not folder.exists()
    assert not (folder / "record.json").exists()
    assert on_node.answer({**request, "verb": "stop"}) == {"ended": None}


def test_down_says_how_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text("{hosts: [a], device: cpu, devices: 1, shell: \"sh -c 'exit 7' {host}\"}")
    typed = ["cluster", "down", f"{tmp_path}/nodes.yaml", "--store", f"{tmp_path}/store"]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 1
    assert f"run `dapo {' '.join(typed)}` again once they are reachable" in result.output


def test_bridges_of_containers_are_virtual_and_a_site_s_are_not() -> None:
    assert is_virtual("br-0123456789ab")
    assert is_virtual("docker0")
    assert not is_virtual("br-lan")
