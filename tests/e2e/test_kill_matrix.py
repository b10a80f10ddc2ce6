"""Whatever is killed leaves no process behind and gets the right state, and the next run continues
its work.

    event, and during which stage                state of the run        what continues
    SIGKILL of the flow's process, building      Crashed, by worker      a waiting run builds
    cancelled in the UI, building                Cancelled               a waiting run builds
    SIGKILL of a stage's command                 Running                 its next attempt
    cancelled in the UI, evaluating              Cancelled               the next run asks the rest
    SIGTERM of the worker, training              Crashed, by automation  the next run, from the last
                                                                         step
    cancelled in the UI, training                Cancelled               as above
    cancelled in the UI, waiting to train        Cancelled               the training it waited for
    SIGKILL of worker and flow, training         Crashed, by automation  the next run, from the last
                                                                         step
    SIGKILL of worker and server, away for 40 s  Completed               its flow
    SIGKILL or SIGINT of `dapo run`              -, its server exits     a waiting run builds
    SIGKILL of everything at once                test_deployment.py

One scenario whose steps are fixtures: several rows run at a time, each starting from the results of
others.
"""

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
from tests.operated import GONE_SECONDS, Site, assert_all_gone, find_command
from tests.postgres_servers import started_postgres

pytestmark = pytest.mark.timeout(1500)  # on two busy cores
AWAY_SECONDS = 40.0
PATIENCE_SECONDS = 240.0
NUM_ITEMS, NUM_STEPS = 24, 20
SLOW_EVALUATION = "evaluate.requests_per_second=0.3"  # not part of any key; takes over a minute
# Only the last step is saved.
TRAINING = (f"train.total_steps={NUM_STEPS}", "checkpoint.save_every=100", "validation.every=0")
HOURS = "model.recipe.num_steps=100000"


@dataclass(frozen=True)
class Builds:
    """Three runs of the chain that built the model in turn, named by their fate."""

    killed: str
    cancelled: str
    command_killed: str  # continues


@dataclass(frozen=True)
class Stopped:
    """A stopped flow run, and the lines of its results.jsonl or metrics.jsonl at its end."""

    flow_run: str
    lines: list[str]


@dataclass(frozen=True)
class Paused:
    """A paused training, which cannot finish before we act."""

    site: Site
    flow_run: str
    command: psutil.Process
    processes: list[psutil.Process]  # supervisor, command, Ray

    def end(self) -> list[str]:
        """Resume once it has been told to stop; returns its metrics once all processes are gone."""
        self.site.wait_for("SIGTERM to the training", self._has_sigterm, PATIENCE_SECONDS)
        self.command.resume()
        assert_all_gone(self.processes)
        return metrics(self.site)

    def _has_sigterm(self) -> bool:
        status = Path(f"/proc/{self.command.pid}/status").read_text()
        pending = status.partition("ShdPnd:")[2].split()[0]
        return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Services on PostgreSQL, because under this load Prefect finds SQLite locked for minutes."""
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
    """Stop each run as soon as it builds the model that the others wait for."""
    waiting = {site.create_run("dapo-full", SLOW_EVALUATION) for _ in range(3)}

    def find_builder() -> tuple[str, psutil.Process] | None:
        for flow_run in waiting:
            if command := command_of(site, flow_run, "fetch-model"):
                return flow_run, command
        return None

    stopped = []
    for stop in (kill_flow, Site.cancel):
        flow_run, _ = site.wait_for("a run to build the model", find_builder, PATIENCE_SECONDS)
        waiting.remove(flow_run)
        processes = site.tree(flow_run)
        assert len(processes) >= 3  # flow, supervisor, command
        stop(site, flow_run)
        assert_all_gone(processes)
        stopped.append(flow_run)
    last, command = site.wait_for(
        "the third run to build the model", find_builder, PATIENCE_SECONDS
    )
    command.kill()
    site.wait_for(
        "its next attempt", lambda: command_of(site, last, "fetch-model", command), PATIENCE_SECONDS
    )
    return Builds(*stopped, last)


@pytest.fixture(scope="module")
def training(site: Site, builds: Builds) -> Paused:
    """A training run, paused, while another run evaluates."""
    site.wait_for(
        "the model",
        lambda: [*site.store.glob("fetch_model/*/[0-9]/manifest.json")],
        PATIENCE_SECONDS,
    )
    return paused(site, site.create_run("train-policy", *TRAINING), 2)


@pytest.fixture(scope="module")
def evaluation(site: Site, builds: Builds, training: Paused) -> Stopped:
    """Cancel the run whose command was killed while it evaluates."""
    flow_run = builds.command_killed
    site.wait_for("answers", lambda: len(answers(site)) >= 2, PATIENCE_SECONDS)
    processes = site.tree(flow_run)
    assert any("serve" in process.cmdline() for process in processes)
    site.cancel(flow_run)
    assert_all_gone(processes)
    assert_state(site, flow_run, "CANCELLED")
    return Stopped(flow_run, answers(site))


@pytest.fixture(scope="module")
def restarted(site: Site, training: Paused, evaluation: Stopped) -> Stopped:
    """Stop the worker of the training, as systemd would, and start it again."""
    worker, flow_process = site.service("worker"), site.tree(training.flow_run)[0]
    os.kill(worker.pid, signal.SIGTERM)
    assert_all_gone([worker, flow_process])
    lines = training.end()
    site.up()
    return Stopped(training.flow_run, lines)


@pytest.fixture(scope="module")
def resumed_evaluation(site: Site, evaluation: Stopped, restarted: Stopped) -> str:
    """A run of only the evaluation."""
    return site.create_run("evaluate-model", SLOW_EVALUATION, side="before")


@pytest.fixture(scope="module")
def cancelled(site: Site, restarted: Stopped, resumed_evaluation: str) -> Stopped:
    """Cancel a run that waits for the resumed training, then the training."""
    lock = site.store / ".locks" / TRAINING_LOCK
    flow_run = site.create_run("train-policy", *TRAINING)
    holder = site.wait_for("the training's lock", lambda: find_holder(lock), PATIENCE_SECONDS)
    waiting = site.create_run("train-policy", "train.total_steps=1")
    training = paused(site, flow_run, len(restarted.lines) + 1)
    wait_for_log(site, waiting, "waiting for run ")
    processes = site.tree(waiting)
    site.cancel(waiting)
    assert_all_gone(processes)
    assert_state(site, waiting, "CANCELLED")
    assert find_holder(lock) == holder
    processes = site.tree(flow_run)
    site.cancel(flow_run)
    lines = training.end()
    assert_all_gone(processes)
    assert_state(site, flow_run, "CANCELLED")
    return Stopped(flow_run, lines)


@dataclass(frozen=True)
class Away:
    """The state after worker and server were killed."""

    processes: list[psutil.Process]  # of the evaluation
    training: Stopped
    dapo_runs: Future[None]  # `dapo run` commands stopped meanwhile


@pytest.fixture(scope="module")
def away(site: Site, evaluation: Stopped, resumed_evaluation: str, cancelled: Stopped) -> Away:
    """Kill worker, server and the flow of a training; restart the services 40 s later."""
    site.wait_for(
        "more answers", lambda: len(answers(site)) > len(evaluation.lines), PATIENCE_SECONDS
    )
    flow_run = site.create_run("train-policy", *TRAINING)
    training = paused(site, flow_run, len(cancelled.lines) + 1)
    processes, port = site.tree(resumed_evaluation), site.services.server.read()["port"]
    kill(site.service("worker"))
    kill_flow(site, flow_run)
    kill(site.service("server"))
    back_at = time.monotonic() + AWAY_SECONDS
    with ThreadPoolExecutor() as beside:
        dapo_runs = beside.submit(stop_dapo_runs, site.folder / "runs")
        lines = training.end()
        assert find_holder(site.store / ".locks" / TRAINING_LOCK) is None
        site.wait_for("40 s", lambda: time.monotonic() >= back_at, AWAY_SECONDS)
        site.up()
        assert site.services.server.read()["port"] == port
        return Away(processes, Stopped(flow_run, lines), dapo_runs)


@pytest.fixture(scope="module")
def finished(site: Site, away: Away) -> Path:
    """The training's output, completed by a final run."""
    assert_state(site, site.create_run("train-policy", *TRAINING), "COMPLETED")
    [folder] = site.store.glob("train_policy/*/1")
    return folder


def test_a_model_is_built_after_its_builders_were_stopped(site: Site, builds: Builds) -> None:
    state = assert_state(site, builds.killed, "CRASHED")
    assert "No heartbeat" not in state["message"]
    assert_state(site, builds.cancelled, "CANCELLED")
    assert any("killed by SIGKILL" in line for line in site.log_messages(builds.command_killed))


def test_each_stopped_training_is_continued_from_its_last_step(
    site: Site, restarted: Stopped, cancelled: Stopped, away: Away, finished: Path
) -> None:
    stops = [restarted.lines, cancelled.lines, away.training.lines]
    assert 2 <= len(stops[0]) < len(stops[1]) < len(stops[2]) < NUM_STEPS
    lines = lines_of(finished / "metrics.jsonl")
    assert [lines[: len(stop)] for stop in stops] == stops
    assert [json.loads(line)["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    log = site.store / ".logs" / f"train_policy-{finished.parent.name}.log"
    assert log.read_text().count("Ray is up") == 1 + len(stops)


def test_an_evaluation_survives_a_cancellation_and_a_missing_server(
    site: Site, evaluation: Stopped, resumed_evaluation: str, away: Away
) -> None:
    assert_state(site, resumed_evaluation, "COMPLETED")
    assert_all_gone(away.processes)
    [results] = site.store.glob("evaluate_model/*/1/results.jsonl")
    lines = lines_of(results)
    assert len(lines) == NUM_ITEMS > len(evaluation.lines)
    assert set(evaluation.lines) <= set(lines)  # including timestamps


def test_stopping_dapo_run_leaves_no_orphans(away: Away) -> None:
    away.dapo_runs.result()


def test_runs_that_lost_their_process_and_worker_become_crashed(
    site: Site, restarted: Stopped, away: Away
) -> None:
    for flow_run in (restarted.flow_run, away.training.flow_run):
        assert "No heartbeat" in assert_state(site, flow_run, "CRASHED")["message"]


def stop_dapo_runs(place: Path) -> None:
    """Start two at once, of which one builds the model that the other waits for."""
    site = Site(place, (*SMALL, HOURS))
    runs: dict[subprocess.Popen[bytes], Path] = {}
    for name in ("one", "other"):  # each with its own Prefect home and server
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
            run = site.wait_for("a run to build the model", find_builder, PATIENCE_SECONDS)
            home = runs.pop(run)
            processes = psutil.Process(run.pid).children(recursive=True)
            [log] = (home / "servers").glob(f"*-{run.pid}.log")
            assert "Traceback" not in log.read_text()
            run.send_signal(stop_signal)
            assert run.wait(GONE_SECONDS) != 0
            assert_all_gone(processes)
            assert "Traceback" not in (home / "run.log").read_text()
        assert_all_gone(site.processes())
    finally:
        site.end_everything()


def paused(site: Site, flow_run: str, num_steps: int) -> Paused:
    """Pause a run's training after this many steps."""
    site.wait_for(f"{num_steps} steps", lambda: len(metrics(site)) >= num_steps, PATIENCE_SECONDS)
    command = command_of(site, flow_run, "train")
    assert command is not None
    command.suspend()
    supervisor = command.parent()
    assert supervisor is not None
    return Paused(site, flow_run, command, [supervisor, *supervisor.children(recursive=True)])


def metrics(site: Site) -> list[str]:
    return [
        line
        for path in site.store.glob("train_policy/*/*.partial/metrics.jsonl")
        for line in lines_of(path)
    ]


def answers(site: Site) -> list[str]:
    paths = site.store.glob("evaluate_model/*/*.partial/results.jsonl")
    return [line for path in paths for line in lines_of(path)]


def lines_of(path: Path) -> list[str]:
    """Return complete lines only."""
    return path.read_text().rpartition("\n")[0].splitlines()


def command_of(
    site: Site, flow_run: str, word: str, but_for: psutil.Process | None = None
) -> psutil.Process | None:
    """Return the stage command that a flow run waits for, once it runs."""
    process = site.flow_process(flow_run)
    return find_command(process, word, but_for) if process else None


def kill_flow(site: Site, flow_run: str) -> None:
    kill(site.tree(flow_run)[0])


def kill(process: psutil.Process) -> None:
    process.kill()
    assert_all_gone([process])


def wait_for_log(site: Site, flow_run: str, words: str) -> None:
    """Wait until the Prefect UI shows a line with these words."""
    site.wait_for(
        words, lambda: any(words in line for line in site.log_messages(flow_run)), PATIENCE_SECONDS
    )


def assert_state(site: Site, flow_run: str, kind: str) -> dict[str, Any]:
    state = site.wait_until_final(flow_run, PATIENCE_SECONDS)
    assert state["type"] == kind, (state, site.log_messages(flow_run)[-20:])
    return state
