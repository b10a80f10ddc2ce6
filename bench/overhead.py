"""What a run costs beside its stages' own work, on two cores: from nothing and with everything cached.

Measures `dapo run` with its own Prefect server, and a deployment on server and worker of `dapo up`. CPU seconds
are those of the run's processes, its server included: on a busy machine they tell more than wall seconds.

Example: .venv/bin/python bench/overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from small_chain import CONFIG, SMALL

from flows.services import Services

ROOT = Path(__file__).resolve().parents[1]
NUM_CORES = 2
TARGET_SECONDS = {"from nothing": 15.0, "all cached": 5.0}
# What `dapo run` does until a line of its output matches.
PHASES = (
    ("interpreter, configuration, checks", re.compile(r".* (starting Prefect|every output is in the store: .*)$")),
    ("Prefect, its server where there is none", re.compile(r".* run \S+ of \S+ in ")),
    ("stages, less their own work", re.compile(r".*evaluate_after +(cached, )?built in ")),
    ("report, end of the flow", re.compile(r"# ")),
)
LAST_PHASE = "report on the terminal, exit"
FLOW_PHASES = (
    ("until the worker takes it", "PENDING"),
    ("process, imports", "RUNNING"),
    ("flow, less the stages' own work", "COMPLETED"),
)
STAGE_PHASES = {PHASES[2][0], FLOW_PHASES[2][0]}


@dataclass(frozen=True)
class Cost:
    """Seconds of a phase; CPU where it can be told."""

    phase: str
    wall: float
    cpu: float | None = None


def main() -> None:
    """Measure both ways and print a table of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached-runs", type=int, default=3, help="the fastest is shown")
    num_cached = parser.parse_args().cached_runs
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    os.sched_setaffinity(0, cores)
    print(f"cores {', '.join(map(str, cores))}, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = Measured(Path(folder) / "command")
        show("dapo run", "from nothing", command.run())
        show("dapo run", "all cached", min((command.run() for _ in range(num_cached)), key=total))
        deployed = Measured(Path(folder) / "deployed")
        with deployed.services():
            show("deployment dapo-full", "from nothing", deployed.deploy())
            show(
                "deployment dapo-full",
                "all cached",
                min((deployed.deploy() for _ in range(num_cached)), key=total),
            )
            show(
                "dapo run, services up", "all cached", min((deployed.run() for _ in range(num_cached)), key=total)
            )


class Measured:
    """Runs of the small chain in a store of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.store = folder / "store"
        self.overrides = [f"store.path={self.store}", *SMALL]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.env = {**inherited, "PREFECT_HOME": str(folder / "prefect"), "PYTHONUNBUFFERED": "1"}

    def run(self) -> list[Cost]:
        """The phases of one `dapo run`."""
        words = [word for change in self.overrides for word in ("--set", change)]
        command = [sys.executable, "-m", "flows.cli", "run", CONFIG, *words]
        marks = [(time.monotonic(), 0.0)]
        waiting = list(PHASES)
        with subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, text=True) as popen:
            assert popen.stdout is not None
            for line in popen.stdout:
                if waiting and waiting[0][1].match(line):
                    waiting.pop(0)
                    marks.append((time.monotonic(), cpu_seconds(popen.pid)))
        if popen.returncode != 0:
            raise SystemExit(f"dapo run ended with {popen.returncode}")
        names = [name for name, _ in PHASES]
        costs = [
            Cost(name, end[0] - start[0], end[1] - start[1])
            for name, start, end in zip(names, marks[:-1], marks[1:], strict=True)
        ]
        return self._without_stages([*costs, Cost(LAST_PHASE, time.monotonic() - marks[-1][0])])

    @contextmanager
    def services(self) -> Iterator[None]:
        """The store's server and worker, brought up and ended."""
        dapo = [sys.executable, "-m", "flows.cli"]
        subprocess.run(
            [*dapo, "up", "--store", self.store], cwd=ROOT, env=self.env, check=True, capture_output=True
        )
        try:
            yield
        finally:
            subprocess.run([*dapo, "down", "--store", self.store], cwd=ROOT, env=self.env, check=True)

    def deploy(self) -> list[Cost]:
        """The phases of one run of the deployment, by the times of its states on the server."""
        with httpx.Client(base_url=Services(self.store).api_url, timeout=60, trust_env=False) as client:
            deployment = client.get("/deployments/name/dapo-full/dapo-full").raise_for_status().json()["id"]
            parameters = {"config": CONFIG, "overrides": self.overrides}
            create = f"/deployments/{deployment}/create_flow_run"
            while (created := client.post(create, json={"parameters": parameters})).status_code == 503:
                time.sleep(1.0)  # SQLite is locked; Prefect's own client asks again, too
            flow_run = created.raise_for_status().json()["id"]
            while (state := client.get(f"/flow_runs/{flow_run}").json()["state"])["type"] != "COMPLETED":
                if state["type"] in ("FAILED", "CRASHED", "CANCELLED"):
                    raise SystemExit(f"the flow run became {state['name']}: {state['message']}")
                time.sleep(0.2)
            states = client.get("/flow_run_states/", params={"flow_run_id": flow_run}).raise_for_status().json()
        times = {state["type"]: datetime.fromisoformat(state["timestamp"]).timestamp() for state in states}
        marks = [times["SCHEDULED"], *(times[kind] for _, kind in FLOW_PHASES)]
        names = [name for name, _ in FLOW_PHASES]
        costs = [Cost(name, end - start) for name, start, end in zip(names, marks[:-1], marks[1:], strict=True)]
        return self._without_stages(costs)

    def _without_stages(self, costs: Sequence[Cost]) -> list[Cost]:
        record: dict[str, Any] = json.loads((max((self.store / "runs").iterdir()) / "run.json").read_text())
        own = sum(stage["seconds"] for stage in record["stages"].values() if not stage["cached"])
        return [
            Cost(cost.phase, cost.wall - own, None if own else cost.cpu) if cost.phase in STAGE_PHASES else cost
            for cost in costs
        ]


def cpu_seconds(pid: int) -> float:
    """CPU seconds so far of a process and of all below it, those that ended included."""
    process = psutil.Process(pid)
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            seconds += sum(each.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return seconds


def total(costs: Sequence[Cost]) -> float:
    """Wall seconds of all phases."""
    return sum(cost.wall for cost in costs)


def show(what: str, case: str, costs: Sequence[Cost]) -> None:
    """Print one run's table."""
    print(f"\n{what}, {case}{'wall s':>{44 - len(what) - len(case)}}{'CPU s':>8}")
    for cost in costs:
        print(f"  {cost.phase:<40}{cost.wall:>6.1f}{'' if cost.cpu is None else f'{cost.cpu:8.1f}'}")
    target = TARGET_SECONDS[case]
    verdict = "under" if total(costs) < target else "NOT under"
    print(f"  {'all but the stages':<40}{total(costs):>6.1f}  {verdict} {target:.0f} s", flush=True)


if __name__ == "__main__":
    main()
