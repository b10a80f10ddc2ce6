"""Rendered scripts and batch files start Ray on two network namespaces, use it and clean up."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from tests.namespaces import FakeHost, NoNamespacesError, hosts
from tests.processes import wait_until

PORT = 6393
RECIPE = "configs/arith_cpu.yaml"
# Stands in for the interpreter: `-m flows.cli` prints its arguments and the cluster's resources;
# else Python.
INTERPRETER = """#!/bin/bash
if [ "$2" = flows.cli ]; then
  echo "dapo ${{*:3}}"
  address=${{@: -1:1}}
  [ "$3" = doctor ] || exec timeout 300 {python} -m dapo_core.cluster.room "${{address#*=}}"
  exit 0
fi
exec {python} "$@"
"""
# The same with a server instead of Ray, and a run that ends before its training has written the
# last checkpoint.
LEAVING = """#!/bin/bash
case "$2 $3" in
  "flows.cli run")
    setsid bash -c 'sleep 4; [ -s "$RAY_AUTH_TOKEN_PATH" ] && touch {checkpoint}' &
    trap exit TERM
    touch {started}
    while :; do sleep 0.1; done ;;
  flows.cli*|tasks.nodes.joined*) exit 0 ;;
  ray.scripts.scripts*) exec {python} -m http.server {port} ;;
esac
exec {python} "$@"
"""
# Stand in for SLURM: run a task on each host of the job; exit with the status of the last task that
# failed.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
tasks=() status=0
for host in {hosts}; do
  SLURMD_NODENAME=$host ip netns exec "$host" {on_host} "$@" &
  tasks+=("$!")
done
for task in "${{tasks[@]}}"; do wait "$task" || status=$?; done
exit "$status"
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames the-hosts" ] && printf '%s\\n' {hosts}
"""


@pytest.fixture(scope="module")
def network() -> Iterator[list[FakeHost]]:
    try:
        with hosts(2) as found:
            yield found
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture
def names(network: list[FakeHost], tmp_path: Path) -> Iterator[list[FakeHost]]:
    """The hosts, with each other's names in /etc/hosts."""
    text = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in network)
    files = [Path("/etc/netns") / host.name / "hosts" for host in network]
    for file in files:  # `ip netns exec` mounts it over /etc/hosts
        file.parent.mkdir(parents=True)
        file.write_text(text)
    yield network
    for pid in (pid for host in network for pid in _processes(host)):  # left by a failed test
        os.kill(int(pid), signal.SIGKILL)
    for file in files:
        file.unlink()
        file.parent.rmdir()


@pytest.fixture
def alone(names: list[FakeHost]) -> Iterator[FakeHost]:
    """A host whose own name resolves to loopback, as on Debian."""
    host = names[0]
    (Path("/etc/netns") / host.name / "hosts").write_text(
        f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n"
    )
    host.run(f"ip route add default dev {host.interface}")
    yield host
    host.run("ip route del default")


def _render(tmp_path: Path, found: list[FakeHost], python: str, *words: str) -> Path:
    tree = {
        "hosts": [h.name for h in found],
        "device": "cpu",
        "devices": 2,
        "port": PORT,
        "python": python,
    }
    (tmp_path / "inventory.yaml").write_text(yaml.safe_dump({**tree, "start_seconds": 300}))
    output = tmp_path / "rendered"
    words = ("cluster", "render", str(tmp_path / "inventory.yaml"), *words, "--output", str(output))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return output


def _processes(host: FakeHost) -> list[str]:
    return subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True
    ).stdout.split()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class Scripts:
    """The rendered scripts, and running them on their hosts."""

    def __init__(self, tmp_path: Path, found: list[FakeHost]) -> None:
        self.folder = _render(tmp_path, found, sys.executable, "--scripts")
        self.state = tmp_path / "state"
        self.environment = {
            **_environment(),
            "DAPO_STATE": str(self.state),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def type(self, host: FakeHost, verb: str) -> subprocess.Popen[str]:
        command = [
            "ip",
            "netns",
            "exec",
            host.name,
            "bash",
            str(self.folder / f"{host.name}.sh"),
            verb,
        ]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def said(self, host: FakeHost, verb: str) -> str:
        return self.type(host, verb).communicate(timeout=400)[0]

    def started(self, host: FakeHost) -> tuple[int, Path]:
        """The pid of Ray's first process, and Ray's folder."""
        pid, _, folder = (self.state / f"{host.name}-{PORT}" / "process").read_text().split()
        return int(pid), Path(folder)


def test_scripts_start_and_stop_ray_on_two_hosts(names: list[FakeHost], tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, names)
    head, other = names
    try:
        starting = [
            scripts.type(host, "start") for host in (other, head)
        ]  # the other host waits for the head
        said = [each.communicate(timeout=400)[0] for each in starting]
        assert [each.returncode for each in starting] == [0, 0], said
        assert (
            f"starting Ray at {other.address} ({other.interface})" in said[0]
        )  # and none of the decoys
        assert f"2 nodes have joined {head.name}:{PORT} with 4 CPU" in said[1]
        assert "Ray is already running" in scripts.said(head, "start")
        folders = [scripts.started(host)[1] for host in names]
        os.kill(scripts.started(other)[0], signal.SIGKILL)
    finally:
        ended = [scripts.said(host, "stop") for host in (other, head)]
    assert all("Ray has ended" in each for each in ended), ended
    assert [_processes(host) for host in names] == [[], []]
    assert not any(folder.exists() for folder in folders)
    assert "this script has no Ray running" in scripts.said(head, "stop")


def test_a_single_host_s_name_may_resolve_to_loopback(alone: FakeHost, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, [alone])
    try:
        said = scripts.said(alone, "start")
    finally:
        ended = scripts.said(alone, "stop")
    assert f"starting Ray at {alone.address} ({alone.interface})" in said
    assert f"1 nodes have joined {alone.address}:{PORT}" in said
    assert said.endswith(f"dapo run CONFIG --set train.ray_address={alone.address}:{PORT}\n")
    assert "Ray has ended" in ended


def test_a_start_without_a_token_says_how_to_make_one(
    names: list[FakeHost], tmp_path: Path
) -> None:
    folder = _render(tmp_path, names, sys.executable, "--scripts")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = ["bash", str(folder / f"{names[0].name}.sh"), "start"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ray get-auth-token --generate" in done.stderr


def _submit(
    tmp_path: Path, found: list[FakeHost], on_host: str = "", python: str = INTERPRETER
) -> subprocess.Popen[str]:
    """Start the batch file on the first host; `on_host` prefixes the command line of each task."""
    words, bin_folder = " ".join(host.name for host in found), tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in {
        "python": python.format(
            python=sys.executable,
            port=PORT,
            checkpoint=tmp_path / "checkpoint",
            started=tmp_path / "started",
        ),
        "srun": SRUN.format(hosts=words, on_host=on_host),
        "scontrol": SCONTROL.format(hosts=words),
        "mktemp": f'#!/bin/sh\n/usr/bin/mktemp "$@" | tee -a {tmp_path}/made\n',
    }.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    folder = _render(
        tmp_path,
        found,
        str(bin_folder / "python"),
        "--slurm",
        "--config",
        RECIPE,
        *_changes(tmp_path),
    )
    environment = {
        **_environment(),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": f"test{os.getpid()}",
        "SLURM_JOB_NODELIST": "the-hosts",
        "SLURM_JOB_NUM_NODES": str(len(found)),
        "SLURMD_NODENAME": found[0].name,
    }
    command = ["ip", "netns", "exec", found[0].name, "bash", str(folder / "two.sbatch")]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _changes(tmp_path: Path) -> list[str]:
    changes = ("run.name=two", "train.num_ranks=2", f"store.path={tmp_path}/the store")
    return [word for change in changes for word in ("--set", change)]


def test_the_batch_file_runs_the_recipe_on_two_hosts(names: list[FakeHost], tmp_path: Path) -> None:
    job = _submit(tmp_path, names)
    said, complaints = job.communicate(timeout=500)
    assert job.returncode == 0, said + complaints
    address = f"{names[0].name}:{PORT}"
    asked = f"{RECIPE} {' '.join(_changes(tmp_path))} --set train.ray_address={address}"
    joined = f"2 nodes have joined {address} with 4 CPU"
    assert f"{joined}\ndapo doctor {asked}\ndapo run {asked}\n" in said
    assert '"CPU": 4.0' in said  # printed by the stand-in of `dapo run`, with the job's token
    assert [_processes(host) for host in names] == [[], []]
    assert list((tmp_path / "the store" / ".clusters").iterdir()) == []  # the job's token is gone
    made = [Path(line) for line in (tmp_path / "made").read_text().splitlines()]
    assert any(path.name.startswith("dapo-ray-") for path in made)
    assert not any(path.exists() for path in made)


def test_a_node_without_the_store_is_named_before_ray_starts(
    names: list[FakeHost], tmp_path: Path
) -> None:
    head, other = names
    hide = f'mount -t tmpfs none "{tmp_path}/the store"'  # for this task only
    script = f'''[ "$SLURMD_NODENAME" = {head.name} ] || {hide}; exec "$@"'''
    job = _submit(tmp_path, names, f"bash -c {shlex.quote(script)} task")
    said, complaints = job.communicate(timeout=500)
    assert job.returncode == 1, said + complaints
    [reason] = complaints.splitlines()
    folder = f"{tmp_path}/the store/.clusters/test{os.getpid()}-"
    assert reason.startswith(f"{other.name}: {folder}")
    assert reason.endswith(
        f"created by {head.name}, is not visible on {other.name}: put store.path on storage that "
        "all nodes share"
    )
    assert list((tmp_path / "the store" / ".clusters").iterdir()) == []
    assert [_processes(host) for host in names] == [[], []]


def test_a_stopped_job_keeps_ray_until_its_last_checkpoint_is_written(
    names: list[FakeHost], tmp_path: Path
) -> None:
    job = _submit(tmp_path, names, python=LEAVING)
    wait_until((tmp_path / "started").exists, "the run")
    job.send_signal(signal.SIGTERM)
    said, complaints = job.communicate(timeout=200)
    assert (tmp_path / "checkpoint").exists(), said + complaints
    assert list((tmp_path / "the store" / ".clusters").iterdir()) == []  # only then
    assert [_processes(host) for host in names] == [[], []]
