"""Whatever dies, nothing is orphaned, the run's state becomes right, and the next run goes on.

what happens                                    state of the run       what is left of it
SIGKILL of the flow's process                   Crashed, by worker     nothing
SIGKILL of a stage's command                    Failed                 nothing
cancelled on the page                           Cancelled              nothing
SIGKILL of the worker, then of the server,      Completed              its flow goes on, and is done
  which comes back on the same port and files
SIGTERM of the worker while training            Crashed, by automation the training, which the next run attaches to
SIGINT or SIGKILL of `dapo run`                 -, its server is gone  nothing
SIGKILL of everything at once                   test_deployment.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.small_chain import CONFIG, SMALL
from flows.services.daemons import SERVER, WORKER
from tests.operated import ROOT, Site, describe
from tests.postgres_servers import started_postgres
from tests.webhooks import started_receiver

# Heartbeats come every 30 s, which Prefect lets nobody shorten.
HEARTBEAT_PATIENCE_SECONDS = 60
pytestmark = pytest.mark.timeout(1500)  # on two busy cores
GONE_SECONDS = 40.0
STATE_SECONDS = 120.0
START_SECONDS = 180.0
BUSY_CPU_SECONDS = 8.0
HOURS = "model.recipe.num_steps=100000"
STEPS = ("train.total_steps=8", "checkpoint.save_every=1")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Services on PostgreSQL: at such moments Prefect's writers find SQLite locked for minutes."""
    with started_postgres() as database:
        site = Site(tmp_path_factory.mktemp("site"), database=database)
        try:
            site.up()
            shorten_patience(site)
            yield site
            site.down()
        finally:
            site.end_everything()


def shorten_patience(site: Site) -> None:
    [automation] = site.ask("POST", "/automations/filter")
    automation["trigger"]["within"] = HEARTBEAT_PATIENCE_SECONDS
    fields = ("name", "description", "enabled", "trigger", "actions")
    site.ask("PUT", f"/automations/{automation['id']}", **{name: automation[name] for name in fields})


def command_of(
    site: Site, flow_run: str, word: str, but_for: psutil.Process | None = None
) -> psutil.Process | None:
    """The stage's command that a flow run waits for, once the real program runs."""
    process = site.flow_process(flow_run)
    for child in process.children(recursive=True) if process else ():
        try:
            if child.cmdline()[1:4] == ["-m", "flows.cli", word] and child != but_for:
                return child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def tree_of(site: Site, flow_run: str) -> list[psutil.Process]:
    process = site.flow_process(flow_run)
    assert process is not None
    return [process, *process.children(recursive=True)]


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert describe([each for each in alive if each.status() != psutil.STATUS_ZOMBIE]) == []


def test_of_a_run_that_is_killed_or_cancelled_nothing_is_left(site: Site) -> None:
    runs = {what: site.run_deployment("dapo-full", HOURS, f"run.seed={seed}") for seed, what in enumerate(ENDS)}
    commands = {}
    for what, flow_run in runs.items():
        commands[what] = site.wait_for(
            f"{what}: the model is being built",
            lambda flow_run=flow_run: command_of(site, flow_run, "fetch-model"),
            START_SECONDS,
        )
    trees = [process for flow_run in runs.values() for process in tree_of(site, flow_run)]
    assert len(trees) >= 3 * len(runs)  # flow, supervisor, command
    flow_process = site.flow_process(runs["flow killed"])
    assert flow_process is not None
    flow_process.kill()
    site.ask("POST", f"/flow_runs/{runs['cancelled']}/set_state", state={"type": "CANCELLING"})
    killed = commands["command killed"]
    killed.kill()
    again = site.wait_for(
        "the next attempt", lambda: command_of(site, runs["command killed"], "fetch-model", killed), START_SECONDS
    )
    assert any("killed by SIGKILL" in message for message in site.log_messages(runs["command killed"]))
    site.ask("POST", f"/flow_runs/{runs['command killed']}/set_state", state={"type": "CANCELLING"})
    for what, flow_run in runs.items():
        state = site.wait_until_final(flow_run, STATE_SECONDS)
        assert (what, state["type"]) == (what, ENDS[what])
    assert_all_gone([*trees, again])
    states = [record["state"] for record in run_records(site)]
    assert states.count("cancelled") == 2
    assert all(site.state().running(name) for name in (SERVER, WORKER))


ENDS = {"flow killed": "CRASHED", "cancelled": "CANCELLED", "command killed": "CANCELLED"}


@pytest.fixture(scope="module")
def model(site: Site) -> None:
    """A model, built while first the worker and then the server are away."""
    flow_run = site.run_deployment("prepare-data")
    assert site.wait_until_final(flow_run, START_SECONDS)["type"] == "COMPLETED"
    flow_run = site.run_deployment("fetch-model")
    site.wait_for("the model is built", lambda: command_of(site, flow_run, "fetch-model"), START_SECONDS)
    port = site.state().port
    tree = tree_of(site, flow_run)
    kill(site, WORKER)
    kill(site, SERVER)
    # Its next question to the server finds none: Prefect's client asks 5 times more, within 62 s.
    site.wait_for("the model is there", lambda: [*site.store.glob("fetch_model/*/manifest.json")], START_SECONDS)
    site.up()
    assert site.state().port == port
    state = site.wait_until_final(flow_run, STATE_SECONDS)
    assert state["type"] == "COMPLETED", state
    assert_all_gone(tree)


def test_a_run_goes_on_without_worker_and_server(model: None) -> None:
    """What the fixture asserts."""


@pytest.fixture
def told_of_crashes(site: Site, tmp_path: Path) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What a webhook gets by the automation of docs/notifications.md, made as it says there."""
    words = (ROOT / "docs/notifications.md").read_text().split("## Runs that end unseen")[1].split("\n## ")[0]
    code, automation = re.findall(r"```(?:python|yaml)\n(.*?)```", words, re.DOTALL)
    environment = {**os.environ, **site.environment, "PREFECT_API_URL": site.state().api_url}

    def run(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    with started_receiver() as receiver:
        block = run("-c", code.replace("https://hooks.example.org/...", receiver.url()))
        (tmp_path / "unseen-crashes.yaml").write_text(automation.replace("BLOCK_ID", block.strip()))
        run("-m", "prefect", "automation", "create", "--from-file", "unseen-crashes.yaml")
        yield receiver.received


def test_a_training_outlives_its_worker_and_the_next_run_attaches_to_it(
    site: Site, model: None, told_of_crashes: list[tuple[str, dict[str, Any]]]
) -> None:
    flow_run = site.run_deployment("train-policy", *STEPS)
    site.wait_for("training steps", lambda: len(steps(site)) >= 2, START_SECONDS)
    flow_process = site.flow_process(flow_run)
    training = command_of(site, flow_run, "train")
    assert flow_process is not None
    assert training is not None
    training.suspend()  # so that it is still there when the next run is
    worker = site.state().running(WORKER)
    assert worker is not None
    os.kill(worker.pid, signal.SIGTERM)
    assert_all_gone([flow_process, psutil.Process(worker.pid)])
    assert training.is_running()
    site.up()
    again = site.run_deployment("train-policy", *STEPS)
    site.wait_for(
        "it attaches", lambda: any("attached to" in line for line in site.log_messages(again)), START_SECONDS
    )
    training.resume()
    for run, end in ((again, "COMPLETED"), (flow_run, "CRASHED")):
        state = site.wait_until_final(run, STATE_SECONDS)
        assert state["type"] == end, state
    site.wait_for("the webhook is told", lambda: told_of_crashes, STATE_SECONDS)
    [(_, told)] = told_of_crashes
    assert told["event"] == "crashed"
    assert told["reason"] == state["message"]
    assert told["flow_run"]["url"].endswith(flow_run)
    [folder] = site.store.glob("train_policy/*")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    [log] = site.store.glob(".logs/train_policy-*.log")
    assert log.read_text().count("Ray is up") == 1  # it was never started again
    assert_all_gone([training])


def is_building(site: Site) -> bool:
    """Whether the stage's command is past its imports, which take about 5 CPU seconds."""
    try:
        commands = [each for each in site.processes("fetch-model") if each.cmdline()[1:2] == ["-m"]]
        return any(sum(each.cpu_times()[:2]) > BUSY_CPU_SECONDS for each in commands)
    except psutil.NoSuchProcess:
        return False


def steps(site: Site) -> list[str]:
    return [line for path in site.store.glob(".work/train_policy-*/metrics.jsonl") for line in path.open()]


def run_records(site: Site) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in site.store.glob("runs/*/run.json")]


def kill(site: Site, service: str) -> None:
    daemon = site.state().running(service)
    assert daemon is not None
    process = psutil.Process(daemon.pid)
    process.kill()
    psutil.wait_procs([process], timeout=GONE_SECONDS)


@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGINT])
def test_stopping_dapo_run_leaves_no_orphan(tmp_path: Path, stop_signal: signal.Signals) -> None:
    site = Site(tmp_path, (*SMALL, HOURS))
    overrides = [word for change in site.changes() for word in ("--set", change)]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", CONFIG, *overrides],
            cwd=ROOT,
            env={**os.environ, **site.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        site.wait_for(
            "the model is being built",
            lambda: is_building(site) or run.poll() is not None,
            START_SECONDS,
        )
        assert run.poll() is None, log.read_text()
        assert "Traceback" not in (site.folder / "prefect" / "servers" / f"{run.pid}.log").read_text()
        processes = site.processes()
        run.send_signal(stop_signal)
        run.wait(GONE_SECONDS)
        assert_all_gone(processes)
        assert describe(site.processes()) == []
        assert run.returncode != 0
        assert "Traceback" not in log.read_text()
        is_said = "stopped; the same command continues from what is done" in log.read_text()
        assert is_said == (stop_signal == signal.SIGINT)
    finally:
        site.end_everything()
        run.wait(GONE_SECONDS)
