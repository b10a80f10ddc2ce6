"""Clusters of simulated hosts: an inventory, `dapo cluster` commands, a training and a preflight on
them.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from tests.namespaces import FakeHost
from tests.trainings import World

ROOT = Path(__file__).resolve().parents[1]
PORT = 6391
# A training with two ranks and two engines that share one device on each of two nodes.
TRAINING = """
import sys
from pathlib import Path
from dapo_core.training import train
from tests.trainings import config_of

address, data, model, output = sys.argv[1:]
changes = {
    "train": {"ray_address": address, "num_ranks": 2, "placement": "colocated", "total_steps": 1},
    "rollout": {"num_workers": 2},
}
print("RESULT", train(config_of(**changes), Path(data), Path(model), Path(output)).steps)
"""
# Prints the findings of the cluster preflight as JSON.
PREFLIGHT = """
import json, sys
from dataclasses import asdict
from tasks.preflight.cluster import check_cluster
from tasks.preflight.finding import Findings
from tests.trainings import config_of

address, store, *whole = sys.argv[1:]
findings = Findings()
train = {"ray_address": address, "num_ranks": 2, "placement": "colocated"}
config = config_of(train=train, rollout={"num_workers": 2}, store={"path": store})
check_cluster(config, None, is_whole=bool(whole), findings=findings)
print("FOUND", json.dumps([asdict(finding) for finding in findings]))
"""


@dataclass
class Site:
    """An inventory of hosts, and the commands that use it."""

    inventory: Path
    store: Path
    names: list[str]

    def type(self, command: str, *options: str) -> Result:
        return CliRunner().invoke(app, ["cluster", command, str(self.inventory), *options])

    def up(self) -> Result:
        return self.type("up", "--store", str(self.store))

    def down(self) -> Result:
        return self.type("down", "--store", str(self.store))

    def status(self) -> dict[str, dict[str, Any]]:
        return {host["host"]: host for host in json.loads(self.type("status", "--json").stdout)}


def make_site(folder: Path, network: list[FakeHost] | str, **changes: Any) -> Site:
    """Write the hosts' inventory into a folder; without namespaces, use two loopback addresses."""
    if isinstance(network, str):
        listed = [
            {"name": f"loop{n}", "address": f"127.0.0.{n}", "interface": "lo"} for n in (2, 3)
        ]
        shell = "env DAPO_HOST={host} sh -c"
    else:
        listed = [{"name": host.name, "address": host.address} for host in network]
        shell = "ip netns exec {host} sh -c"
    values = {"hosts": listed, "device": "cpu", "devices": 1, "port": PORT, "shell": shell}
    values |= {"start_seconds": 300, **changes}  # busy test machines are slow
    folder.mkdir(exist_ok=True)
    (folder / "nodes.yaml").write_text(yaml.safe_dump(values))
    return Site(folder / "nodes.yaml", folder / "store", [host["name"] for host in listed])


def train(host: FakeHost, head: FakeHost, world: World, output: Path) -> str:
    """Run a one-step training on the cluster from a host; returns its standard error."""
    done = _run(
        host, TRAINING, f"{head.address}:{PORT}", str(world.data), str(world.model), str(output)
    )
    assert "RESULT 1" in done.stdout, f"{done.stdout}{done.stderr}"
    assert (output / "metrics.jsonl").read_text().count("\n") == 1
    return done.stderr


def preflight(
    host: FakeHost, head: FakeHost, store: Path, is_whole: bool = True
) -> dict[tuple[str, str], dict[str, Any]]:
    """Run the cluster's preflight from a host, also of its nodes if `is_whole`; findings by check
    and status.
    """
    done = _run(
        host, PREFLIGHT, f"{head.address}:{PORT}", str(store), *(["whole"] if is_whole else [])
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [
        done.stderr
    ]
    return {
        (each["check"], each["status"]): each for each in json.loads(line.removeprefix("FOUND "))
    }


def _run(host: FakeHost, *program: str) -> subprocess.CompletedProcess[str]:
    command = ["ip", "netns", "exec", host.name, sys.executable, "-c", *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
