"""Rendered scripts and batch files, run: Ray on two network namespaces comes up, is used and goes away."""

from __future__ import annotations

import os
import secrets
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

PORT = 6393
RECIPE = "configs/arith_cpu.yaml"
# Stands in for the interpreter: `-m flows.cli` says its words and what the cluster has; all else is Python's.
INTERPRETER = """#!/bin/bash
if [ "$2" = flows.cli ]; then
  echo "dapo ${{*:3}}"
  address=${{@: -1:1}}
  [ "$3" = doctor ] || exec timeout 300 {python} -m dapo_core.cluster.room "${{address#*=}}"
  exit 0
fi
exec {python} "$@"
"""
# Stand in for SLURM: a task on each host of the job.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for host in {hosts}; do
  SLURMD_NODENAME=$host ip netns exec "$host" "$@" &
done
wait
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames two-hosts" ] && printf '%s\\n' {hosts}
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
    """The hosts, which know each other by name as in /etc/hosts."""
    text = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in network)
    files = [Path("/etc/netns") / host.name / "hosts" for host in network]
    for file in files:  # `ip netns exec` mounts it over /etc/hosts
        file.parent.mkdir(parents=True)
        file.write_text(text)
    yield network
    for pid in (pid for host in network for pid in _processes(host)):  # of a test that failed
        os.kill(int(pid), signal.SIGKILL)
    for file in files:
        file.unlink()
        file.parent.rmdir()


def _render(tmp_path: Path, found: list[FakeHost], python: str, *words: str) -> Path:
    tree = {"hosts": [h.name for h in found], "device": "cpu", "devices": 2, "port": PORT, "python": python}
    (tmp_path / "inventory.yaml").write_text(yaml.safe_dump({**tree, "start_seconds": 300}))
    output = tmp_path / "rendered"
    words = ("cluster", "render", str(tmp_path / "inventory.yaml"), *words, "--output", str(output))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return output


def _processes(host: FakeHost) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()


def test_scripts_start_and_stop_ray_on_two_hosts(names: list[FakeHost], tmp_path: Path) -> None:
    folder = _render(tmp_path, names, sys.executable, "--scripts")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "DAPO_STATE": str(tmp_path / "state"),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }

    def script(host: FakeHost, verb: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", host.name, "bash", str(folder / f"{host.name}.sh"), verb]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    head, other = names
    try:
        starting = [script(host, "start") for host in (other, head)]  # the other one waits for the head
        said = [each.communicate(timeout=400)[0] for each in starting]
        assert [each.returncode for each in starting] == [0, 0], said
        assert f"Ray starts at {other.address} ({other.interface})" in said[0]  # and none of the decoys
        assert f"2 nodes have joined {head.name}:{PORT} with 4 CPU" in said[1]
        again = script(head, "start").communicate(timeout=400)[0]
        assert "Ray runs" in again
    finally:
        ended = [script(host, "stop").communicate(timeout=200)[0] for host in (other, head)]
    assert all("Ray has ended" in each for each in ended), ended
    assert [_processes(host) for host in names] == [[], []]
    assert "no Ray of this script runs" in script(head, "stop").communicate(timeout=200)[0]


def test_a_start_without_a_token_says_how_to_make_one(names: list[FakeHost], tmp_path: Path) -> None:
    folder = _render(tmp_path, names, sys.executable, "--scripts")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = ["bash", str(folder / f"{names[0].name}.sh"), "start"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ray get-auth-token --generate" in done.stderr


def test_the_batch_file_runs_the_recipe_on_two_hosts(names: list[FakeHost], tmp_path: Path) -> None:
    words, bin_folder = " ".join(host.name for host in names), tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in {
        "python": INTERPRETER.format(python=sys.executable),
        "srun": SRUN.format(hosts=words),
        "scontrol": SCONTROL.format(hosts=words),
        "mktemp": f'#!/bin/sh\n/usr/bin/mktemp "$@" | tee -a {tmp_path}/made\n',
    }.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    changes = ("--set", "run.name=two", "--set", "train.num_ranks=2")
    folder = _render(tmp_path, names, str(bin_folder / "python"), "--slurm", "--config", RECIPE, *changes)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": f"test{os.getpid()}",
        "SLURM_JOB_NODELIST": "two-hosts",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": names[0].name,
    }
    command = ["ip", "netns", "exec", names[0].name, "bash", str(folder / "two.sbatch")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = f"{RECIPE} --set run.name=two --set train.num_ranks=2 --set train.ray_address={names[0].name}:{PORT}"
    assert (
        f"2 nodes have joined {names[0].name}:{PORT} with 4 CPU\ndapo doctor {asked}\ndapo run {asked}\n"
        in done.stdout
    )
    assert '"CPU": 4.0' in done.stdout  # what the stand-in of `dapo run` finds with the job's token
    assert [_processes(host) for host in names] == [[], []]
    assert not list(Path.cwd().glob(f".dapo/ray-test{os.getpid()}-*"))  # with the job's token
    made = [Path(line) for line in (tmp_path / "made").read_text().splitlines()]
    assert any(path.name.startswith("dapo-ray-") for path in made)
    assert not any(path.exists() for path in made)
