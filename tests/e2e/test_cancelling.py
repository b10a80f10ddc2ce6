"""Signals that cancel an evaluation or a training: what they leave, and that it is continued from
there.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from bench.small_chain import CONFIG, SMALL
from eval.endpoint import Endpoint, Sampling
from eval.requests.dispatch import Limits
from eval.results.rows import Row, RowKey, read_rows
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import ArithmeticServer, Handler, make_set, running
from tests.operated import Site, describe

FAR = 90.0
SAMPLING = Sampling(max_tokens=64)
NUM_STEPS = 12
START_SECONDS = 180.0
pytestmark = pytest.mark.timeout(1500)  # on two busy cores
GONE_SECONDS = 180.0
# Only the last step is due to be saved.
CHANGES = (f"train.total_steps={NUM_STEPS}", "checkpoint.save_every=100", "validation.every=0")

# Data and model in the store, without a Prefect server for each.
BUILD_MODEL = """
import sys
from flows.config import load_config
from tasks.chain import fetch_model
from tasks.chain import prepare_data
from tasks.runs.run import Run

with Run.start(load_config(sys.argv[1], sys.argv[2:]), flow="fetch-model") as run:
    fetch_model.fn(run, prepare_data.fn(run).data)
"""


class Terminated(BaseException):
    """What a signal handler raises, as Prefect's does: no KeyboardInterrupt, which asyncio would
    let through.
    """


@pytest.fixture
def sigterm_raises() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_ends_an_evaluation_whenever_it_comes(
    sigterm_raises: None, server: ArithmeticServer, tmp_path: Path
) -> None:
    """Each evaluation goes on from the one before, gets a signal at some request, and would not end
    without it.
    """
    evaluation_set, release, draw = make_set(1500), threading.Event(), random.Random(7)
    num_signals, limits = 20, Limits(concurrency=8, timeout_seconds=2 * FAR)
    stop_at, due = 0, threading.Semaphore(0)

    def kill_or_hold(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number >= stop_at and due.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGTERM)
        # the signal takes a while, in which not all may be answered
        is_late = handler.number >= stop_at + 30
        return (is_late or prompt == "1499 + 1 = ?") and release.wait(FAR)

    def evaluate_and_kill() -> None:
        due.release()
        evaluate(evaluation_set, Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=limits)

    server.behave = kill_or_hold
    kept: dict[RowKey, Row] = {}
    for _ in range(num_signals):
        stop_at = len(server.requests) + draw.randint(1, 40)
        began = time.monotonic()
        with pytest.raises(Terminated):
            evaluate_and_kill()
        assert time.monotonic() - began < FAR / 2
        before, kept = kept, read_rows(tmp_path)
        assert before.items() <= kept.items()
    release.set()
    assert all(row.is_answered for row in kept.values())
    # Those in flight are lost at each signal, answers that were read are not.
    assert len(server.requests) <= len(kept) + num_signals * limits.concurrency
    with running() as another:
        summary = evaluate(
            evaluation_set, Endpoint(another.url, "m"), SAMPLING, tmp_path, limits=limits
        )
        assert (summary.accuracy, len(another.requests)) == (
            1.0,
            len(evaluation_set.items) - len(kept),
        )


def metrics_lines(folder: Path) -> list[bytes]:
    return [
        line for path in folder.glob("metrics.jsonl") for line in path.read_bytes().splitlines()
    ]


def test_a_training_that_ctrl_c_cancels_is_to_continue_from_its_last_step(tmp_path: Path) -> None:
    site = Site(tmp_path, (*SMALL, *CHANGES))
    site.run(sys.executable, "-c", BUILD_MODEL, CONFIG, *site.changes())
    log = tmp_path / "run.log"
    run = site.start(log, *site.chain("stage", "train-policy"))
    try:
        site.wait_for(
            "two steps",
            lambda: (
                run.poll() is not None
                or any(
                    len(metrics_lines(folder)) >= 2
                    for folder in site.store.glob("train_policy/*/*.partial")
                )
            ),
            START_SECONDS,
        )
        assert run.poll() is None, log.read_text()
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        run.wait(GONE_SECONDS)
        assert describe(site.processes()) == []
    finally:
        site.end_everything()
        run.wait(GONE_SECONDS)
    said = log.read_text()
    assert run.returncode == 130, said
    assert "Traceback" not in said
    assert "stopped; run the same command again to continue" in said
    last_run = max(site.store.glob("runs/*/run.json"))
    assert json.loads(last_run.read_text())["state"] == "cancelled"
    [folder] = site.store.glob("train_policy/*/*.partial")
    before = metrics_lines(folder)
    assert 2 <= len(before) < NUM_STEPS
    assert (folder / "checkpoints/latest").read_text().strip() == f"step_{len(before):06d}"
    plan = site.dapo(*site.chain("plan")).stdout
    assert re.search(r"train_policy\W+resumes", plan), plan
