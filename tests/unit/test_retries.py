"""Which errors are retried, when, and how failures are reported."""

import errno
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest
from prefect.states import Failed
from prefect.task_engine import TaskRunTimeoutError

from dapo_core.draw.report import NotEnoughSignal
from dapo_core.errors import CheckpointError, DataError, RolloutError, WorkerDied
from dapo_core.machine.stopping import TrainingStopped
from downloads import DownloadError, Unreachable
from eval import EvaluationError
from flows.cli import main
from tasks.artifacts.artifact import StoreError
from tasks.chain import (
    evaluate_model,
    fetch_model,
    merge_checkpoint,
    prepare_data,
    train_policy,
    write_report,
)
from tasks.execution.retries import (
    exit_code_of,
    is_lasting,
    may_succeed_next_time,
    shortened,
)
from tasks.processes.child import ChildProcessFailed, run_command
from tasks.serve_model.failure import ServeError, ServerDied
from tests.processes import python

PASSING = (
    httpx.ConnectTimeout("slow"),
    ConnectionResetError("lost"),
    OSError(5, "input/output error of a network file system"),
    WorkerDied("rank 1"),
    RolloutError("engine lost"),
    EvaluationError("requests failed"),
    ServerDied("killed"),
    MemoryError(),
    Unreachable("busy"),
)
LASTING = (
    CheckpointError("damaged"),
    DataError("no rows"),
    NotEnoughSignal("few groups"),
    ServeError("refused argument"),
    StoreError("disk full"),
    FileNotFoundError(2, "no such file"),
    TypeError("a mistake of ours"),
    DownloadError("gated"),
    Unreachable("offline by the environment", is_lasting=True),
)


def test_transient_errors_are_retried_and_permanent_ones_are_not() -> None:
    assert [error for error in PASSING if is_lasting(error)] == []
    assert [error for error in LASTING if not is_lasting(error)] == []
    assert exit_code_of(TrainingStopped("after step 7")) == 143


@pytest.mark.parametrize(
    ("code", "lasting"),
    [
        ("sys.exit(1)", False),
        ("sys.exit(2)", True),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_a_stopped_child_or_a_usage_error_is_not_retried(
    code: str, lasting: bool, tmp_path: Path
) -> None:
    with pytest.raises(ChildProcessFailed) as caught:
        run_command(python(f"import os, sys\n{code}"), log_path=tmp_path / "log", label="train")
    error = pickle.loads(pickle.dumps(caught.value))
    assert is_lasting(error) is lasting
    assert exit_code_of(error) == (2 if lasting else 1)


def test_every_task_has_the_same_retry_policy() -> None:
    for task in (
        prepare_data,
        fetch_model,
        evaluate_model,
        train_policy,
        merge_checkpoint,
        write_report,
    ):
        assert task.retry_condition_fn is may_succeed_next_time
        assert (task.retries, len(task.retry_delay_seconds)) == (3, 3)


def test_the_log_explains_each_retry(caplog: pytest.LogCaptureFixture) -> None:
    run = SimpleNamespace(name="train-policy-0", run_count=2)
    for lasting in (NotEnoughSignal("few groups"), TaskRunTimeoutError("48 h")):
        assert not may_succeed_next_time(train_policy, run, Failed(data=lasting))
    assert caplog.text == ""
    assert may_succeed_next_time(train_policy, run, Failed(data=RolloutError("engine lost")))
    delay = train_policy.retry_delay_seconds[1]
    said = (
        f"train-policy-0: attempt 2 of 4 failed, retrying in {delay:.1f} s: RolloutError: engine "
        "lost"
    )
    assert said in caplog.text


def test_a_short_error_keeps_the_last_line_of_the_child_and_its_exit_code() -> None:
    error = ChildProcessFailed(
        "train ended with exit code 1. Its last lines, from t.log:\n  | step 3\n  | OSError: no"
    )
    error.exit_code, error.summary = 1, "train ended with exit code 1; its log is t.log"
    short = pickle.loads(pickle.dumps(shortened(error)))
    assert str(short) == "train ended with exit code 1; its log is t.log: OSError: no"
    assert (type(short), short.exit_code) == (ChildProcessFailed, 1)
    assert "step 3" in str(error)
    error = ServerDied(
        "vllm serve was killed by SIGKILL. Its last lines, from s.log:\n  | a\nIt answered before"
    )
    error.summary = "vllm serve was killed by SIGKILL; its log is s.log\nIt answered before"
    assert str(shortened(error)) == error.summary
    assert not is_lasting(shortened(error))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "my.yaml: Read-only file system; choose another location\n"),
        (
            errno.ENOSPC,
            "[Errno 28] No space left on device: 'my.yaml'; free some space or choose another "
            "location",
        ),
    ],
)
def test_an_unwritable_path_is_named_without_a_traceback(
    number: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = OSError(number, os.strerror(number), "my.yaml")
    with mock.patch("flows.cli.app", side_effect=refusal), pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith(said)
