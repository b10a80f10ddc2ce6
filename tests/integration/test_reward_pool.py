"""The reward pool with real processes: user files that loop, die, print and raise do not affect
other calls.
"""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_core.config.training import CustomRewardConfig, RewardConfig
from dapo_core.errors import RewardError, RolloutError
from dapo_core.reward.pool import RewardPool, ScoreRequest
from dapo_core.reward.scorers import Score
from eval.answers import pool as pool_module
from tasks.execution.retries import is_lasting
from tests.processes import wait_until
from tests.tiny_models import tiny_tokenizer

Make = Callable[..., RewardPool]
FAR = 240.0
TOKENIZER = tiny_tokenizer()

USER_FILE = """
import asyncio, os, sys, time
print("loaded")
def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("scoring", solution_str)
    os.write(1, b"{}\\n[1, 2]\\n")
    what = solution_str.partition(" ")[0]
    if what == "regex":  # holds the interpreter's lock
        import re
        re.match("(a*)*b", "a" * 60)
    if what == "sleep":
        time.sleep(3600)
    if what == "exit":
        os._exit(3)
    if what == "quit":
        sys.exit(0)
    if what == "crash":
        os.kill(os.getpid(), 11)
    if what == "raise":
        raise KeyError("nothing here")
    if what == "nan":
        return float("nan")
    if what == "await":
        return later()
    score, acc = len(solution_str), solution_str == ground_truth
    return {"score": score, "acc": acc, "pred": str(extra_info.get("index"))}
async def later():
    await asyncio.sleep(0)
    return 0.25
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Build pools with or without a user's file, and close them."""
    pools: list[RewardPool] = []

    def build(source: str | None = USER_FILE, **reward: Any) -> RewardPool:
        path = tmp_path / "mine.py"
        if source is not None:
            path.write_text(source)
        custom = CustomRewardConfig(path=None if source is None else str(path))
        pools.append(RewardPool(RewardConfig(**reward), custom, TOKENIZER))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def request(text: str, truth: str = "", data_source: str = "mine", index: int = 0) -> ScoreRequest:
    return ScoreRequest(data_source, TOKENIZER(text).input_ids, truth, {"index": index})


def drain(pool: RewardPool) -> dict[str, Score]:
    scores: list[tuple[str, Score]] = []
    deadline = time.monotonic() + FAR
    while pool.num_pending:
        assert time.monotonic() < deadline
        scores += pool.finished(1.0)
    assert len(dict(scores)) == len(scores)
    return dict(scores)


def test_a_users_file_scores_every_response(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    pool = make()
    for index in range(200):
        pool.submit(f"key {index}", request("x" * index, "xxx", index=index))
    pool.submit("later", request("await"))
    assert pool.num_pending == 201
    scores = drain(pool)
    assert scores["key 3"] == Score(3.0, "right", "3", 1.0)
    assert scores["key 199"] == Score(199.0, "wrong", "199", 0.0)
    assert scores["later"] == Score(0.25, "wrong", None, 0.25)
    assert len(scores) == 201
    out, log = capfd.readouterr()  # the file's prints go to the log
    assert out == ""
    assert "loaded" in log
    assert "scoring xxx\n" in log


@pytest.mark.parametrize("what", ["sleep", "regex"])
def test_a_hanging_call_times_out_once_and_blocks_no_other(
    make: Make, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(timeout_seconds=4.0, num_processes=2)
    before = pool.pids
    started = time.monotonic()
    for index in range(20):
        pool.submit(str(index), request(what if index == 5 else "fine", "fine"))
    scores = drain(pool)
    assert scores.pop("5") == Score(0.0, "timeout")
    assert set(scores.values()) == {Score(4.0, "right", "0", 1.0)}
    assert len(scores) == 19
    assert 4.0 <= time.monotonic() - started < 4 * 19  # one time limit, not nineteen
    assert len(pool.pids & before) == 1  # the other process kept running
    assert (
        f"took longer than reward.timeout_seconds=4; the response ends in '{what}'" in caplog.text
    )


def test_a_failed_call_is_an_error_and_affects_no_other(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {
        "exit": "ended its process (exit code 3)",
        "quit": "ended its process (exit code 0)",
        "crash": "ended its process (exit code -11)",
        "raise": "KeyError: 'nothing here'",
        "nan": "ValueError: score must be finite and below 1e+30, not nan",
    }
    pool = make(num_processes=1)
    for what in failures:
        pool.submit(what, request(f"{what} it"))
        pool.submit(f"after {what}", request("fine", "fine"))
    scores = drain(pool)
    for what, message in failures.items():
        assert scores[what] == Score(0.0, "error")
        assert scores[f"after {what}"].verdict == "right"
        assert message in caplog.text
        assert f"ends in '{what} it'" in caplog.text
    for index in range(30):
        pool.submit(str(index), request("raise"))
    assert {score.verdict for score in drain(pool).values()} == {"error"}
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 5
    assert caplog.text.count("later ones are counted, not logged") == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import nothing_of_this_name\ndef compute_score(**_): ...",
            "No module named 'nothing_of_this_name'",
        ),
        ("import os\nos._exit(7)\ndef compute_score(**_): ...", r"ended \(exit code 7\)"),
        ("import time\ntime.sleep(600)\ndef compute_score(**_): ...", r"was not ready within 3 s"),
    ],
)
def test_a_file_that_fails_to_load_is_reported_at_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.setattr(
        pool_module, "START_SECONDS", 3.0 if "sleep" in source else pool_module.START_SECONDS
    )
    with pytest.raises(
        RewardError,
        match=rf"(?s)custom_reward\.path=.*mine\.py.*{message}|{message}.*custom_reward\.path=",
    ) as caught:
        make(source)
    assert is_lasting(caught.value)


def test_a_process_killed_by_the_kernel_at_start_is_worth_a_retry(make: Make) -> None:
    with pytest.raises(
        RolloutError, match=r"ended \(exit code -9\).* lower reward\.num_processes=2"
    ) as caught:
        make("import os\nos.kill(os.getpid(), 9)\ndef compute_score(**_): ...", num_processes=2)
    assert not is_lasting(caught.value)


def test_built_in_rules_use_a_process_only_if_they_could_hang(make: Make) -> None:
    pool = make(None, timeout_seconds=5.0, scorers=("mine=math_dapo",))
    pool.submit("math", request("x" * 900 + "Answer: 19", "19"))
    pool.submit("gsm8k", request("x" * 900 + "#### 18", "19", "openai/gsm8k"))
    pool.submit("exact", request("\\boxed{1,900}" + "x" * 900, "1900", "math"))
    assert pool.pids == set()
    assert dict(pool.finished()) == {
        "math": Score(1.0, "right", "19", 1.0),
        "gsm8k": Score(0.0, "wrong", "18", 0.0),
        "exact": Score(1.0, "right", "1,900", 1.0),
    }
    pool.submit("choice", request("<think>" + "x" * 900 + "</think>\\boxed{A}", "A", "cflue"))
    pool.submit("bad truth", request("\\boxed{A}", "Z", "cflue"))
    pool.submit("geo3k", request("<think>x</think>\\boxed{3}", "3", "hiyouga/geometry3k"))
    pool.submit("exact", request("\\boxed{\\frac{19}{2}}", "9.5", "math"))
    scores = drain(pool)
    assert (scores["choice"].verdict, scores["geo3k"].value) == ("right", 1.0)
    assert (scores["bad truth"].verdict, scores["exact"].verdict) == ("error", "right")


def test_close_ends_the_processes_and_their_children(make: Make, tmp_path: Path) -> None:
    source = (
        "import subprocess\n"
        "def compute_score(ground_truth, **_):\n"
        "    child = subprocess.Popen(['sleep', '3600'])\n"
        "    open(ground_truth, 'w').write(str(child.pid))\n"
        "    child.wait()\n"
    )
    pool = make(source, num_processes=1)
    pool.submit("a", request("x", str(tmp_path / "pid")))
    pid = tmp_path / "pid"
    wait_until(
        lambda: pool.finished(0.05) == [] and pid.exists() and pid.read_text() != "",
        "the child's id",
    )
    started = [*pool.pids, int(pid.read_text())]
    pool.close()
    wait_until_gone(started)
    assert pool.num_pending == 0


def test_busy_and_idle_processes_die_with_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    code = (
        "import sys, time\n"
        "from tests.integration.test_reward_pool import *\n"
        f"pool = RewardPool(RewardConfig(), CustomRewardConfig(path={str(path)!r}), TOKENIZER)\n"
        "pool.submit('a', request('regex'))\n"
        "pool.finished(0.3)\n"
        "print(*pool.pids, flush=True)\n"
        "time.sleep(3600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert owner.stdout is not None
    children = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(children) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until_gone(children)


def wait_until_gone(processes: list[int]) -> None:
    """Wait until none of the processes runs; zombies do not count."""
    wait_until(lambda: not any(is_running(pid) for pid in processes), "every process to end")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_scoring_processes_import_nothing_heavy() -> None:
    code = "import dapo_core.reward.custom, eval.answers.pool, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "dapo_core" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "ray", "vllm", "sympy", "numpy", "pydantic"})
