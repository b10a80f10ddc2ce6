"""A run that is killed, interrupted or cancelled in the middle of a stage leaves no process behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from flows.prefect_settings import prefect_settings
from tests.prefect_servers import started_process, started_server, wait_for

CONFIG = "configs/arith_cpu.yaml"
GONE_SECONDS = 30.0
BUSY_CPU_SECONDS = 8.0  # past its imports, which take about 5


def long_stage(folder: Path) -> list[str]:
    """Changes that make building the model last for hours."""
    return [
        f"store.path={folder / 'store'}",
        "data.arithmetic.num_train=128",
        "data.arithmetic.num_eval=24",
        "model.recipe.num_steps=100000",
    ]


def building(ancestor: int) -> list[psutil.Process]:
    """Every process below `ancestor` once the stage's command is busy, else nothing."""
    found = psutil.Process(ancestor).children(recursive=True)
    for child in found:
        try:
            command, times = child.cmdline(), child.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        is_stage = command[1:4] == ["-m", "flows.cli", "fetch-model"]
        if is_stage and times.user + times.system > BUSY_CPU_SECONDS:
            return found
    return []


def flow_run_tree(runner: int) -> list[psutil.Process]:
    """The process that executes the flow run and all below it; the runner's own helpers have nothing below."""
    trees = [[child, *child.children(recursive=True)] for child in psutil.Process(runner).children()]
    tree = max(trees, key=len)
    assert any("fetch-model" in child.cmdline() for child in tree)
    return tree


def left_over(found: list[psutil.Process]) -> list[str]:
    """Commands among the processes that still run when the time to go is over."""
    _, alive = psutil.wait_procs(found, timeout=GONE_SECONDS)
    left = []
    for child in alive:
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            left.append(" ".join(child.cmdline()))
            child.kill()
    return left


@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGINT])
def test_stopping_dapo_run_leaves_no_orphan(tmp_path: Path, stop_signal: signal.Signals) -> None:
    overrides = [word for change in long_stage(tmp_path) for word in ("--set", change)]
    log = tmp_path / "run.log"
    settings = prefect_settings(tmp_path / "prefect")
    with started_process(tmp_path, "run", "-m", "flows.cli", "run", CONFIG, *overrides, **settings) as run:
        found = wait_for("the model is being built", lambda: building(run.pid), 120, log)
        run.send_signal(stop_signal)
        run.wait(GONE_SECONDS)
    assert left_over(found) == []
    assert run.returncode not in (0, None)
    assert "Traceback" not in log.read_text()


def test_cancelling_the_flow_run_stops_the_child_tree(tmp_path: Path) -> None:
    serve = "from flows.dapo_full import dapo_full; dapo_full.serve(name='test', pause_on_shutdown=False)"
    with started_server(tmp_path) as server, server.client() as client:
        more = {**server.environment, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
        with started_process(tmp_path, "serve", "-c", serve, **more) as runner:
            log = tmp_path / "serve.log"
            path = "/deployments/name/dapo-full/test"
            wait_for("the deployment is there", lambda: client.get(path).is_success, 60, log)
            deployment = client.get(path).json()["id"]
            parameters = {"config": CONFIG, "overrides": long_stage(tmp_path)}
            created = client.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": parameters})
            flow_run = f"/flow_runs/{created.raise_for_status().json()['id']}"
            wait_for("the model is being built", lambda: building(runner.pid), 120, log)
            found = flow_run_tree(runner.pid)
            client.post(f"{flow_run}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()

            def is_cancelled() -> bool:
                return client.get(flow_run).raise_for_status().json()["state"]["type"] == "CANCELLED"

            wait_for("the run is cancelled", is_cancelled, 60, log)
            assert left_over(found) == []
            assert runner.poll() is None  # cancelling ended the run, not those who serve it
