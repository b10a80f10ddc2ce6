"""Measures what a run costs beyond its stages' own work, on two cores: from nothing and fully
cached.

Covers `dapo run` with its own Prefect server, then a deployment and `dapo run` on the services of
`dapo up`.

Example: .venv/bin/python bench/overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from small_chain import CONFIG, SMALL

from flows.services import Services

ROOT = Path(__file__).resolve().parents[1]
NUM_CORES, NUM_CACHED_RUNS = 2, 3
TARGET_SECONDS = {"from nothing": 15.0, "all cached": 5.0}
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def main() -> None:
    """Measure each way and print its overhead, in seconds and as a share of the whole."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    print(f"{NUM_CORES} cores, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        alone, served = Site(Path(folder) / "alone"), Site(Path(folder) / "served")
        show("dapo run", "from nothing", [alone.overhead(alone.run)])
        show("dapo run", "all cached", [alone.overhead(alone.run) for _ in range(NUM_CACHED_RUNS)])
        served.dapo("up", "--store", str(served.store))
        try:
            show("deployment dapo-full", "from nothing", [served.overhead(served.deploy)])
            cached = [served.overhead(served.deploy) for _ in range(NUM_CACHED_RUNS)]
            show("deployment dapo-full", "all cached", cached)
            show(
                "dapo run beside dapo up",
                "all cached",
                [served.overhead(served.run) for _ in range(NUM_CACHED_RUNS)],
            )
        finally:
            served.dapo("down", "--store", str(served.store))


class Site:
    """The small chain with its own store and Prefect home."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.store = folder / "store"
        self.overrides = [f"store.path={self.store}", *SMALL]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
        }
        self.env = {**inherited, "PREFECT_HOME": str(folder / "prefect")}

    def dapo(self, *words: str) -> None:
        """Run `dapo WORDS` to completion."""
        command = [sys.executable, "-m", "flows.cli", *words]
        subprocess.run(command, cwd=ROOT, env=self.env, check=True, stdout=subprocess.DEVNULL)

    def run(self) -> None:
        """Run the chain with `dapo run`."""
        self.dapo("run", CONFIG, *(word for change in self.overrides for word in ("--set", change)))

    def deploy(self) -> None:
        """Run the chain through its deployment, from the request to the end of the flow run."""
        with httpx.Client(
            base_url=Services(self.store).api_url, timeout=60, trust_env=False
        ) as client:
            deployment = (
                client.get("/deployments/name/dapo-full/dapo-full").raise_for_status().json()["id"]
            )
            request = {"parameters": {"config": CONFIG, "overrides": self.overrides}}
            while (
                created := client.post(f"/deployments/{deployment}/create_flow_run", json=request)
            ).is_error:
                time.sleep(1.0)  # SQLite is locked
            flow_run = created.json()["id"]
            while (state := client.get(f"/flow_runs/{flow_run}").json()["state"])[
                "type"
            ] not in ENDED:
                time.sleep(0.2)
        if state["type"] != "COMPLETED":
            raise SystemExit(f"the flow run became {state['name']}: {state['message']}")

    def overhead(self, run: Callable[[], None]) -> tuple[float, float]:
        """Returns wall seconds of a run without the stages it built, and in total."""
        began = time.monotonic()
        run()
        seconds = time.monotonic() - began
        record = json.loads((max((self.store / "runs").iterdir()) / "run.json").read_text())
        built = sum(stage["seconds"] for stage in record["stages"].values() if not stage["cached"])
        return seconds - built, seconds


def show(label: str, case: str, measured: list[tuple[float, float]]) -> None:
    """Print the fastest run and the machine's load."""
    overhead, seconds = min(measured)
    verdict = "under" if overhead < TARGET_SECONDS[case] else "NOT under"
    share = f"of {seconds:.1f} s, {overhead / seconds:.0%}"
    target, load = f"{verdict} {TARGET_SECONDS[case]:.0f} s", f"load {os.getloadavg()[0]:.1f}"
    print(f"{label:<26}{case:<14}{overhead:>6.1f} s  {share:<18}{target:<15}{load}", flush=True)


if __name__ == "__main__":
    main()
