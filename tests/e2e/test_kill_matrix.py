"""Whatever dies leaves no process behind and gets the right state, and the next run continues from what is there.

what happens, and while what                 state of the run        what goes on
SIGKILL of the flow's process, building      Crashed, by worker      a run that waited builds
cancelled on the page, building              Cancelled               a run that waited builds
SIGKILL of a stage's command                 Running                 its next attempt
cancelled on the page, evaluating            Cancelled               the next run asks what is missing
SIGTERM of the worker, training              Crashed, by automation  training, to which the next run attaches
cancelled on the page, training              Cancelled               the next run, from the last step
cancelled on the page, waiting to train      Cancelled               the training that it waited for
SIGKILL of worker and flow, training         Crashed, by automation  training for flow.unwatched_minutes; then the
                                                                     next run, from the last step
SIGKILL of worker and server, away for 40 s  Completed               its flow
SIGKILL or SIGINT of `dapo run`              -, its server is gone   a run that waited builds
SIGKILL of everything at once                test_deployment.py

One scenario, whose steps are fixtures: several rows are under way at a time, each begins with what others left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.small_chain import SMALL
from durable import find_holder
from tasks.execution.training_lock import TRAINING_LOCK
from tasks.processes.detached import read_record
from tasks.processes.supervisor import REQUESTED, UNWATCHED
from tests.operated import GONE_SECONDS, Site, assert_all_gone, find_command
from tests.postgres_servers import started_postgres

pytestmark = pytest.mark.timeout(1500)  # on two busy cores
AWAY_SECONDS = 40.0
PATIENCE_SECONDS = 240.0
NUM_ITEMS, NUM_STEPS = 24, 12
SLOW_EVALUATION = "evaluate.requests_per_second=0.3"  # changes no result, so no key; not done in a minute
# Only the last step is due to be saved.
TRAINING = (f"train.total_steps={NUM_STEPS}", "checkpoint.save_every=100", "validation.every=0")
HOURS = "model.recipe.num_steps=100000"


@dataclass(frozen=True)
class Builds:
    """Three runs of the chain, of which each in turn built the model, named by what became of them."""

    killed: str
    cancelled: str
    command_killed: str  # which goes on


@dataclass(frozen=True)
class Stopped:
    """A flow run that was stopped, and the lines of its results.jsonl or metrics.jsonl when it had ended."""

    flow_run: str
    lines: list[str]


@dataclass(frozen=True)
class Paused:
    """A training whose driver gets no processor, so that it is not done before we are."""

    site: Site
    flow_run: str
    log: Path
    driver: psutil.Process
    processes: list[psutil.Process]  # its supervisor, its command, itself, Ray's

    def end(self, reason: str) -> list[str]:
        """Go on as soon as it is being stopped for this reason; returns its metrics when nothing of it is left."""
        self.site.wait_for(f"the end, {reason}", lambda: self._is_stopped(reason), PATIENCE_SECONDS)
        self.driver.resume()
        assert_all_gone(self.processes)
        return metrics(self.site)

    def _is_stopped(self, reason: str) -> bool:
        record = read_record(self.log)
        return record is not None and record.stopping == reason


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Services on PostgreSQL: at such moments Prefect's writers find SQLite locked for minutes."""
    with started_postgres() as database:
        site = Site(tmp_path_factory.mktemp("site"), database=database)
        try:
            site.up()
            yield site
            site.down()
        finally:
            site.end_everything()


@pytest.fixture(scope="module")
def builds(site: Site) -> Builds:
    """Each gets its fate as soon as it builds the model, which the others wait for."""
    waiting = {site.create_run("dapo-full", SLOW_EVALUATION) for _ in range(3)}

    def find_builder() -> tuple[str, psutil.Process] | None:
        for flow_run in waiting:
            if command := command_of(site, flow_run, "fetch-model"):
                return flow_run, command
        return None

    stopped = []
    for stop in (kill_flow, Site.cancel):
        flow_run, _ = site.wait_for("one builds the model", find_builder, PATIENCE_SECONDS)
        waiting.remove(flow_run)
        processes = site.tree(flow_run)
        assert len(processes) >= 3  # flow, supervisor, command
        stop(site, flow_run)
        assert_all_gone(processes)
        stopped.append(flow_run)
    last, command = site.wait_for("the third one builds the model", find_builder, PATIENCE_SECONDS)
    command.kill()
    site.wait_for("its next attempt", lambda: command_of(site, last, "fetch-model", command), PATIENCE_SECONDS)
    return Builds(*stopped, last)


@pytest.fixture(scope="module")
def training(site: Site, builds: Builds) -> Paused:
    """A run that trains while another one evaluates."""
    site.wait_for("the model", lambda: [*site.store.glob("fetch_model/*/[0-9]/manifest.json")], PATIENCE_SECONDS)
    return paused(site, site.create_run("train-policy", *TRAINING), 2)


@pytest.fixture(scope="module")
def evaluation(site: Site, builds: Builds, training: Paused) -> Stopped:
    """The run whose command was killed, cancelled while it evaluates."""
    flow_run = builds.command_killed
    site.wait_for("answers", lambda: len(answers(site)) >= 2, PATIENCE_SECONDS)
    processes = site.tree(flow_run)
    assert any("serve" in process.cmdline() for process in processes)
    site.cancel(flow_run)
    assert_all_gone(processes)
    assert_state(site, flow_run, "CANCELLED")
    return Stopped(flow_run, answers(site))


@pytest.fixture(scope="module")
def attached(site: Site, training: Paused, evaluation: Stopped) -> Stopped:
    """A run that attached to the training after its worker had ended, cancelled."""
    worker, flow_process = site.service("worker"), site.tree(training.flow_run)[0]
    os.kill(worker.pid, signal.SIGTERM)
    assert_all_gone([worker, flow_process])
    assert [process for process in training.processes if not process.is_running()] == []
    site.up()
    flow_run = site.create_run("train-policy", *TRAINING)
    wait_for_log(site, flow_run, "attached to")
    processes = site.tree(flow_run)
    site.cancel(flow_run)
    lines = training.end(REQUESTED)
    assert_all_gone(processes)
    assert_state(site, flow_run, "CANCELLED")
    return Stopped(flow_run, lines)


@pytest.fixture(scope="module")
def resumed_evaluation(site: Site, evaluation: Stopped, attached: Stopped) -> str:
    """A run of the evaluation alone."""
    return site.create_run("evaluate-model", SLOW_EVALUATION, side="before")


@pytest.fixture(scope="module")
def unwatched(site: Site, attached: Stopped, resumed_evaluation: str) -> Paused:
    """A training that continues, and ends soon if it is not watched; a run that waited for it is cancelled."""
    lock = site.store / ".locks" / TRAINING_LOCK
    flow_run = site.create_run("train-policy", *TRAINING, "flow.unwatched_minutes=0.1")
    holder = site.wait_for("the training's lock", lambda: find_holder(lock), PATIENCE_SECONDS)
    waiting = site.create_run("train-policy", "train.total_steps=1")
    training = paused(site, flow_run, len(attached.lines) + 1)
    wait_for_log(site, waiting, "waiting for run ")
    processes = site.tree(waiting)
    site.cancel(waiting)
    assert_all_gone(processes)
    assert_state(site, waiting, "CANCELLED")
    assert find_holder(lock) == holder
    return training


@dataclass(frozen=True)
class Away:
    """What worker and server left when they went away."""

    processes: list[psutil.Process]  # of the evaluation
    metrics: list[str]  # of the training that was not watched, in the end
    dapo_runs: Future[None]  # stopped meanwhile


@pytest.fixture(scope="module")
def away(site: Site, evaluation: Stopped, resumed_evaluation: str, unwatched: Paused) -> Away:
    """Worker and server are killed, and the flow of that training; 40 s later they are there again."""
    site.wait_for("more answers", lambda: len(answers(site)) > len(evaluation.lines), PATIENCE_SECONDS)
    processes, port = site.tree(resumed_evaluation), site.services.server.read()["port"]
    kill(site.service("worker"))
    kill_flow(site, unwatched.flow_run)
    kill(site.service("server"))
    back_at = time.monotonic() + AWAY_SECONDS
    with ThreadPoolExecutor() as beside:
        dapo_runs = beside.submit(stop_dapo_runs, site.folder / "runs")
        lines = unwatched.end(UNWATCHED)
        assert find_holder(site.store / ".locks" / TRAINING_LOCK) is None
        site.wait_for("40 s", lambda: time.monotonic() >= back_at, AWAY_SECONDS)
        site.up()
        assert site.services.server.read()["port"] == port
        return Away(processes, lines, dapo_runs)


@pytest.fixture(scope="module")
def finished(site: Site, away: Away) -> Path:
    """The training's output, by a run after all of that."""
    assert_state(site, site.create_run("train-policy", *TRAINING), "COMPLETED")
    [folder] = site.store.glob("train_policy/*/1")
    return folder


def test_a_model_is_built_after_its_builders_were_stopped(site: Site, builds: Builds) -> None:
    state = assert_state(site, builds.killed, "CRASHED")
    assert "No heartbeat" not in state["message"]
    assert_state(site, builds.cancelled, "CANCELLED")
    assert any("killed by SIGKILL" in line for line in site.log_messages(builds.command_killed))


def test_a_training_that_outlived_its_worker_and_was_cancelled_goes_on(attached: Stopped, finished: Path) -> None:
    assert 2 <= len(attached.lines) < NUM_STEPS
    assert lines_of(finished / "metrics.jsonl")[: len(attached.lines)] == attached.lines


def test_an_unwatched_training_is_continued_by_the_next_run(attached: Stopped, away: Away, finished: Path) -> None:
    assert len(attached.lines) < len(away.metrics) < NUM_STEPS
    lines = lines_of(finished / "metrics.jsonl")
    assert lines[: len(away.metrics)] == away.metrics
    assert [json.loads(line)["step"] for line in lines] == list(range(1, NUM_STEPS + 1))


def test_training_began_once_for_each_stop(site: Site, finished: Path) -> None:
    """Not for the run that attached to it."""
    log = site.store / ".logs" / f"train_policy-{finished.parent.name}.log"
    assert log.read_text().count("Ray is up") == 3


def test_an_evaluation_goes_on_after_a_cancellation_and_without_a_server(
    site: Site, evaluation: Stopped, resumed_evaluation: str, away: Away
) -> None:
    assert_state(site, resumed_evaluation, "COMPLETED")
    assert_all_gone(away.processes)
    [results] = site.store.glob("evaluate_model/*/1/results.jsonl")
    lines = lines_of(results)
    assert len(lines) == NUM_ITEMS > len(evaluation.lines)
    assert set(evaluation.lines) <= set(lines)  # time stamps and all


def test_stopping_dapo_run_leaves_no_orphan(away: Away) -> None:
    away.dapo_runs.result()


def test_runs_that_lost_their_process_and_worker_become_crashed(
    site: Site, training: Paused, unwatched: Paused, away: Away
) -> None:
    for flow_run in (training.flow_run, unwatched.flow_run):
        assert "No heartbeat" in assert_state(site, flow_run, "CRASHED")["message"]


def stop_dapo_runs(place: Path) -> None:
    """Two at once, of which one builds the model that the other one waits for."""
    site = Site(place, (*SMALL, HOURS))
    runs: dict[subprocess.Popen[bytes], Path] = {}
    for name in ("one", "other"):  # each with Prefect's files and a server of its own
        home = place / name
        home.mkdir()
        run = site.start(home / "run.log", *site.chain("run"), PREFECT_HOME=str(home))
        runs[run] = home

    def find_builder() -> subprocess.Popen[bytes] | None:
        assert [run.returncode for run in runs if run.poll() is not None] == []
        builders = (run for run in runs if find_command(psutil.Process(run.pid), "fetch-model"))
        return next(builders, None)

    try:
        for stop_signal in (signal.SIGKILL, signal.SIGINT):
            run = site.wait_for("one builds the model", find_builder, PATIENCE_SECONDS)
            home = runs.pop(run)
            processes = psutil.Process(run.pid).children(recursive=True)
            assert "Traceback" not in (home / "servers" / f"{run.pid}.log").read_text()
            run.send_signal(stop_signal)
            assert run.wait(GONE_SECONDS) != 0
            assert_all_gone(processes)
            assert "Traceback" not in (home / "run.log").read_text()
        assert_all_gone(site.processes())
    finally:
        site.end_everything()


def paused(site: Site, flow_run: str, num_steps: int) -> Paused:
    """The training of a run, once that many steps are done."""
    site.wait_for(f"{num_steps} steps", lambda: len(metrics(site)) >= num_steps, PATIENCE_SECONDS)
    command = command_of(site, flow_run, "train")
    assert command is not None
    driver, supervisor = find_command(command, "train"), command.parent()
    assert driver is not None
    assert supervisor is not None
    driver.suspend()
    folder = Path(command.cmdline()[command.cmdline().index("--output") + 1])
    log = site.store / ".logs" / f"train_policy-{folder.parent.name}.log"
    return Paused(site, flow_run, log, driver, [supervisor, *supervisor.children(recursive=True)])


def metrics(site: Site) -> list[str]:
    return [line for path in site.store.glob("train_policy/*/*.partial/metrics.jsonl") for line in lines_of(path)]


def answers(site: Site) -> list[str]:
    paths = site.store.glob("evaluate_model/*/*.partial/results.jsonl")
    return [line for path in paths for line in lines_of(path)]


def lines_of(path: Path) -> list[str]:
    """Whole lines only."""
    return path.read_text().rpartition("\n")[0].splitlines()


def command_of(
    site: Site, flow_run: str, word: str, but_for: psutil.Process | None = None
) -> psutil.Process | None:
    """The stage's command that a flow run waits for, once the real program runs."""
    process = site.flow_process(flow_run)
    return find_command(process, word, but_for) if process else None


def kill_flow(site: Site, flow_run: str) -> None:
    kill(site.tree(flow_run)[0])


def kill(process: psutil.Process) -> None:
    process.kill()
    assert_all_gone([process])


def wait_for_log(site: Site, flow_run: str, words: str) -> None:
    """Until Prefect's page shows a line with these words."""
    site.wait_for(words, lambda: any(words in line for line in site.log_messages(flow_run)), PATIENCE_SECONDS)


def assert_state(site: Site, flow_run: str, kind: str) -> dict[str, Any]:
    state = site.wait_until_final(flow_run, PATIENCE_SECONDS)
    assert state["type"] == kind, (state, site.log_messages(flow_run)[-20:])
    return state
