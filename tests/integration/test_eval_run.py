"""Resumable evaluations against an HTTP server: what is stored, requested again, reported."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from eval import EvaluationError, RequestsRefused
from eval.answers.grading import MathGrader
from eval.endpoint import Endpoint, Sampling
from eval.logs.regrade import regrade
from eval.problems.evaluation_sets import load_set
from eval.report.compare import compare
from eval.report.history import make_history
from eval.requests.dispatch import Limits
from eval.results.rows import ResultsError, exclusive, load_evaluation, read_rows
from tasks.evaluation.served_model import served_model_identity
from tasks.serve_model.failure import ServeError
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import (
    ArithmeticServer,
    Behaviour,
    Handler,
    make_set,
    running,
)
from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = Sampling(max_tokens=64, temperature=0.0, top_p=0.9, seed=7)
FAR = 200.0  # longer than any machine stalls
LIMITS = Limits(
    concurrency=8, timeout_seconds=FAR, max_attempts=4, backoff_seconds=0.01, outage_seconds=0.1
)


@pytest.fixture
def endpoint(server: ArithmeticServer) -> Endpoint:
    return Endpoint(server.url, "m", api_key="secret")


def seeds_of(server: ArithmeticServer, prompt: str) -> list[int]:
    bodies = [body for _, _, body in server.requests]
    return sorted(body["seed"] for body in bodies if body["messages"][-1]["content"] == prompt)


def test_rows_and_summary_record_prompts_answers_and_verdicts(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    # Item 0 is cut off, items 1-3 are right; gold of item 3 is made wrong.
    items = list(make_set(4).items)
    items[3] = replace(items[3], gold="-1", level="2")
    server.behave = lambda handler, prompt, attempt: (
        prompt.startswith("0 ") and handler.answer(prompt, "length")
    )
    evaluation_set = replace(make_set(1), items=tuple(items), benchmark="arithmetic")
    summary = evaluate(evaluation_set, endpoint, SAMPLING, tmp_path, model_digest="sha256:abc")
    assert (summary.accuracy, summary.truncated_rate, summary.no_answer_rate) == (0.5, 0.25, 0.0)
    assert summary.by_level == {
        "1": {"n": 3, "right": 2, "accuracy": 2 / 3},
        "2": {"n": 1, "right": 0, "accuracy": 0.0},
    }
    assert (summary.mean_response_tokens, summary.num_samples, summary.repeats) == (5.0, 1, None)
    # AISBench ignores how a response ended, so only its rule calls the truncated item 0 right.
    assert summary.aisbench == {"accuracy": 0.75, "raises": 0}
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["accuracy"], stored["settings"]["sampling"]["max_tokens"]) == (0.5, 64)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["benchmark"], settings["model"]) == ("arithmetic", "sha256:abc")
    assert settings["api"] == "chat/completions"
    assert settings["prompt_template"] == {"name": "given", "text": "{problem}"}
    assert list(read_rows(tmp_path)) == [("item-0", 0), ("item-1", 0), ("item-2", 0), ("item-3", 0)]
    row = read_rows(tmp_path)["item-1", 0]
    assert row.prompt == ({"role": "user", "content": "1 + 1 = ?"},)
    assert row.response == "Answer: \\boxed{2}"
    assert (row.answer, row.gold, row.verdict) == ("2", "2", "right")
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["results.jsonl", "settings.json", "summary.json"]
    assert "secret" not in "".join((tmp_path / name).read_text() for name in written)


def test_samples_have_their_own_seeds_and_differing_greedy_samples_are_reported(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    # Two of four items get another response from their second sample on, one of them with the same
    # answer.
    def differ(handler: Handler, prompt: str, attempt: int) -> bool:
        text = {"1 + 1 = ?": "\\boxed{9}", "2 + 1 = ?": "So \\boxed{3}"}.get(prompt)
        return attempt >= 2 and text is not None and handler.say(text)

    server.behave = differ
    summary = evaluate(
        make_set(4),
        endpoint,
        replace(SAMPLING, num_samples=3),
        tmp_path,
        limits=replace(LIMITS, concurrency=1),
    )
    assert (summary.num_items, summary.num_samples, summary.n) == (4, 3, 12)
    assert summary.accuracy == 10 / 12  # samples 1 and 2 of item 1 are wrong
    # Of 3 samples each item has 3, 1, 3, 3 right; the answer 9, given twice, outvotes item 1's
    # right one.
    assert summary.samples is not None
    values = {name: metric["value"] for name, metric in summary.samples.items()}
    # pass@2 of item 1: 1 - C(2, 2) / C(3, 2) = 2 / 3
    assert values == pytest.approx(
        {"avg@3": 10 / 12, "pass@2": (3 + 2 / 3) / 4, "pass@3": 1.0, "maj@3": 0.75}
    )
    for name, metric in summary.samples.items():
        assert metric["ci95"][0] <= values[name] <= metric["ci95"][1]
    assert summary.repeats == {
        "num_items": 4,
        "differing_responses": 0.5,
        "differing_answers": 0.25,
        "differing_verdicts": 0.25,
    }
    assert seeds_of(server, "3 + 1 = ?") == [7, 8, 9]
    finished = load_evaluation(tmp_path)
    assert [row.key for row in finished.rows] == [
        (f"item-{item}", n) for item in range(4) for n in range(3)
    ]
    assert [row.verdict for row in finished.items["item-1"]] == ["right", "wrong", "wrong"]

    # A missing sample is requested with its own seed; the others are kept.
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    del lines[[row.key for row in finished.rows].index(("item-3", 1))]
    (tmp_path / "results.jsonl").write_text("".join(lines))
    server.requests.clear()
    evaluate(make_set(4), endpoint, replace(SAMPLING, num_samples=3), tmp_path, limits=LIMITS)
    assert [body["seed"] for _, _, body in server.requests] == [8]


def test_a_problem_on_several_rows_is_one_item_in_statistical_tests(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    """AIME as published, 8 rows per problem. As 240 items, this change would have p = 0.0005."""
    rows = [{"problem": f"{n % 30} + 1 = ?", "answer": str(n % 30 + 1)} for n in range(240)]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    aime = load_set(tmp_path / "aime.jsonl", "aime24", "bare")
    sampled = replace(SAMPLING, temperature=1.0)

    def be_wrong_on(*problems: int) -> Behaviour:
        return lambda handler, prompt, attempt: (
            int(prompt.split()[0]) in problems and handler.say("\\boxed{-1}")
        )

    server.behave = be_wrong_on(0, 1, 2, 3)
    summary = evaluate(aime, endpoint, sampled, tmp_path / "before", limits=LIMITS)
    assert (summary.num_items, summary.num_samples, summary.n) == (30, 8, 240)
    assert summary.accuracy == 26 / 30
    assert summary.samples is not None
    assert summary.samples["avg@8"]["value"] == summary.accuracy
    assert seeds_of(server, "5 + 1 = ?") == list(range(7, 15))
    server.behave = be_wrong_on(3, 4)
    evaluate(aime, endpoint, sampled, tmp_path / "after", limits=LIMITS)
    result = compare(tmp_path / "before", tmp_path / "after")
    # Three better, one worse: 2 * (1 + 4) / 2^4.
    assert (result.n, result.num_samples, result.b, result.c) == (30, 8, 1, 3)
    assert result.p == pytest.approx(0.625)
    assert result.ci95[0] <= 0 <= result.ci95[1]
    (series,) = make_history([tmp_path / "before", tmp_path / "after"])
    assert [change.n for change in series.to_previous if change] == [30]


def test_a_failed_ratio_of_29_percent_allows_29_failures_in_100(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    failing = {f"{number} " for number in range(29)}  # 0.29 * 100 is 28.999999999999996
    server.behave = lambda handler, prompt, attempt: (
        prompt[: prompt.find(" ") + 1] in failing and handler.send(400, b"too long")
    )
    assert evaluate(make_set(100), endpoint, SAMPLING, tmp_path, max_failed_ratio=0.29).n == 71


def test_too_many_failures_raise_and_the_next_attempt_retries_only_those(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    server.behave = lambda handler, prompt, attempt: (
        prompt[:2] in ("3 ", "6 ") and handler.send(400, b"too long")
    )
    message = (
        r"2 of 10 requests to .* failed; at most 1 may .*First reason: HTTP 400 from .*: too long"
    )
    with pytest.raises(RequestsRefused, match=message) as caught:
        evaluate(make_set(10), endpoint, SAMPLING, tmp_path, max_failed_ratio=0.1)
    assert caught.value.is_lasting
    assert not (tmp_path / "summary.json").exists()

    summary = evaluate(make_set(10), endpoint, SAMPLING, tmp_path, max_failed_ratio=0.2)
    assert (summary.accuracy, summary.n, summary.num_items) == (1.0, 8, 10)
    assert summary.request_failed_rate == 0.2

    server.behave = lambda handler, prompt, attempt: False
    assert evaluate(make_set(10), endpoint, SAMPLING, tmp_path).n == 10
    repeated = server.asked - Counter(dict.fromkeys(server.asked, 1))
    assert repeated == {"3 + 1 = ?": 2, "6 + 1 = ?": 2}


def test_a_server_that_refuses_everything_is_given_up_early(
    endpoint: Endpoint, server: ArithmeticServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.behave = lambda handler, prompt, attempt: handler.send(403, b"no")
    with pytest.raises(
        EvaluationError, match=r"were not answered.*HTTP 403 from .*export VLLM_API_KEY"
    ):
        evaluate(make_set(400), endpoint, SAMPLING, tmp_path, limits=LIMITS)
    assert len(server.requests) < 60
    assert re.search(r"a request failed after \d+ attempts: HTTP 403 from .*: no", caplog.text)


def test_answers_of_a_server_that_dies_for_good_are_kept(
    endpoint: Endpoint, server: ArithmeticServer, tmp_path: Path
) -> None:
    def die(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 30:
            server.socket.close()
        return handler.number >= 30 and handler.drop()

    server.behave = die
    with pytest.raises(
        EvaluationError, match=r"0 of 90 .* not answered.*First reason: ClientConnectorError"
    ):
        evaluate(make_set(90), endpoint, SAMPLING, tmp_path, limits=LIMITS)
    assert 20 <= len(read_rows(tmp_path)) < 30
    with running() as another:
        endpoint = Endpoint(another.url, "m")
        assert evaluate(make_set(90), endpoint, SAMPLING, tmp_path, limits=LIMITS).n == 90
        assert len(another.requests) <= 70


def test_a_torn_line_costs_only_its_row_and_rows_of_another_version_are_not_overwritten(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    evaluate(make_set(6), endpoint, SAMPLING, tmp_path)
    results = tmp_path / "results.jsonl"
    text = results.read_text()
    torn_id = json.loads(text.splitlines()[-1])["id"]
    results.write_text(text[:-25])
    assert evaluate(make_set(6), endpoint, SAMPLING, tmp_path).n == 6
    twice = [prompt for prompt, count in server.asked.items() if count == 2]
    assert twice == [f"{torn_id.removeprefix('item-')} + 1 = ?"]
    assert len(results.read_text().splitlines()) == 6
    newer = results.read_text().replace('"attempts"', '"tries"')
    results.write_text(newer)
    with pytest.raises(ResultsError, match=r"has a row of another version or program \(.*'tries'"):
        evaluate(make_set(6), endpoint, SAMPLING, tmp_path)
    assert results.read_text() == newer
    assert sum(server.asked.values()) == 7


def test_rows_of_another_evaluation_are_refused_and_kept(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    evaluate(make_set(3), endpoint, SAMPLING, tmp_path)
    results = tmp_path / "results.jsonl"
    text = results.read_text()
    row = json.loads(text.splitlines()[-1])
    prompt = [{"role": "user", "content": "4 + 1 = ?"}]
    for changes in ({"id": "zzz"}, {"sample": 1}, {"prompt": prompt}):
        foreign = {**row, **changes}
        results.write_text(text + json.dumps(foreign) + "\n")
        message = rf"1 of \d rows answer .*'{foreign['id']}', sample {foreign['sample']}\)"
        for grader in ("mathematics", "choice"):  # continued and regraded
            with pytest.raises(ResultsError, match=message):
                evaluate(replace(make_set(3), grader=grader), endpoint, SAMPLING, tmp_path)
        assert len(results.read_text().splitlines()) == 4
    results.write_text(text + json.dumps({**row, "id": "zzz"}))
    with pytest.raises(
        ResultsError, match=r"has 4 rows, but the evaluation has 3 .*the 1 added .*item 'zzz'"
    ):
        regrade(tmp_path)


def test_changed_settings_start_over_and_are_logged(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shorter = replace(SAMPLING, max_tokens=32)
    evaluate(make_set(3), endpoint, SAMPLING, tmp_path)
    with caplog.at_level(logging.WARNING):
        evaluate(make_set(3), endpoint, shorter, tmp_path)
        assert "sampling.max_tokens: 64 before, 32 after" in caplog.text
        assert set(server.asked.values()) == {2}
        assert len(read_rows(tmp_path / "superseded-1")) == 3
        evaluate(make_set(3), endpoint, shorter, tmp_path, model_digest="another model")
        assert (tmp_path / "superseded-2" / "summary.json").exists()
        evaluate(make_set(3, "text"), endpoint, shorter, tmp_path, model_digest="another model")
        assert "api: chat/completions before, completions after" in caplog.text
    assert set(server.asked.values()) == {4}


def test_another_grader_or_gold_answer_regrades_without_requests(
    server: ArithmeticServer,
    endpoint: Endpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert evaluate(make_set(3), endpoint, SAMPLING, tmp_path).accuracy == 1.0
    first, *others = make_set(3).items
    corrected = replace(make_set(3), items=(replace(first, gold="5", subject="sum"), *others))
    monkeypatch.setattr(MathGrader, "rule", "numbers/2")
    with caplog.at_level(logging.WARNING):
        summary = evaluate(corrected, endpoint, SAMPLING, tmp_path)
    assert "regrading 3 stored responses" in caplog.text
    assert "before, numbers/2 after" in caplog.text
    assert (summary.accuracy, summary.settings["grader"]) == (2 / 3, "numbers/2")
    assert set(summary.by_subject) == {"sum", "add"}
    row = read_rows(tmp_path)["item-0", 0]
    assert (row.gold, row.verdict, row.subject) == ("5", "wrong", "sum")
    assert not row.is_right_by_aisbench
    assert set(server.asked.values()) == {1}
    assert not list(tmp_path.glob("superseded-*"))


def test_two_evaluations_cannot_write_to_one_folder(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    with exclusive(tmp_path), pytest.raises(EvaluationError, match="another evaluation is"):
        evaluate(make_set(3), endpoint, SAMPLING, tmp_path)
    assert server.requests == []
    assert evaluate(make_set(3), endpoint, SAMPLING, tmp_path).n == 3


def command(folder: Path, url: str, count: int, *settings: str) -> list[str]:
    """Return the `dapo eval` command for that many problems."""
    data = folder / "problems.jsonl"
    rows = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(count)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--base-url", url, "--model-name", "m"]
    words += ["--data", str(data), "--output", str(folder / "out")]
    words += [
        word for setting in ("evaluate.prompt=bare", *settings) for word in ("--set", setting)
    ]
    return [sys.executable, "-m", "flows.cli", "eval", *words]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_evaluation_resumes_without_repeating_requests(
    server: ArithmeticServer, tmp_path: Path, end: signal.Signals
) -> None:
    half, held = threading.Event(), threading.Semaphore(0)

    def hold(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number >= 24 and not half.is_set():
            held.release()
            half.wait(FAR)  # until the process ends
        return False

    server.behave = hold
    words = command(tmp_path, server.url, 60, "evaluate.concurrency=4")
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = tmp_path / "out"
    assert all(held.acquire(timeout=FAR) for _ in range(4))
    wait_until(lambda: len(read_rows(output)) == 23, "every answer to be written")
    process.send_signal(end)
    output_text = process.communicate(timeout=FAR)[0]
    half.set()
    assert "Traceback" not in output_text
    assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 130), output_text
    finished = {identity for identity, _ in read_rows(output)}
    assert len(finished) == 23
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=FAR)
    assert done.returncode == 0, done.stderr
    assert f"continuing, {len(finished)} of 60" in done.stdout
    assert len(read_rows(output)) == 60
    asked_again = {prompt for prompt, count in server.asked.items() if count > 1}
    assert len(asked_again) <= 4  # those in flight when the process ended
    assert not asked_again & {f"{identity.removeprefix('row-')} + 1 = ?" for identity in finished}


def test_a_key_with_invalid_characters_is_refused_and_not_shown(server: ArithmeticServer) -> None:
    with pytest.raises(ServeError, match="VLLM_API_KEY holds a character") as caught:
        served_model_identity(Endpoint(server.url, "m", "secret\n"))
    assert "secret" not in str(caught.value)


def test_a_terminal_shows_a_progress_bar_and_a_hanging_request_times_out(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    import pty

    release = threading.Event()
    server.behave = lambda handler, prompt, attempt: prompt.startswith("7 ") and release.wait(FAR)
    words = command(tmp_path, server.url, 60, "evaluate.request_timeout_seconds=10")
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(words, cwd=ROOT, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the other end of the terminal is closed
        while chunk := os.read(controller, 4096):
            shown += chunk
    os.close(controller)
    assert process.wait(timeout=FAR) == 1
    release.set()
    for expected in (b"60/60", b"tokens/s", b"left:", b"1 of 60 requests"):
        assert expected in shown
    rows = read_rows(tmp_path / "out")
    assert {row.id for row in rows.values() if row.verdict == "request_failed"} == {"row-7"}
    assert (rows["row-7", 0].failure, len(rows)) == ("no answer within 10 s", 60)
    assert rows["row-7", 0].seconds < FAR  # how long the server hangs
