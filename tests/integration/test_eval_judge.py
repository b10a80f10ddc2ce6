"""LLM-as-a-judge: votes, agreement, failures, and votes that are not requested again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapo_core.errors import ConfigError
from eval import EvaluationError, InputError, RequestsRefused
from eval.compare import ComparisonError, compare
from eval.endpoint import Endpoint, Sampling
from eval.item_pages import pack_items
from eval.judge import VOTES_FILE, Judge, read_vote
from eval.recorder import Benchmark
from eval.regrade import regrade
from eval.report import make_report, render_html, render_markdown
from eval.results import Row, load_evaluation, read_rows
from eval.run import evaluate_all
from eval.summary import Summary, summarise_votes
from flows.config import load_config_or_defaults
from tasks.evaluation.settings import judge_for
from tests.evaluations import no_plots
from tests.integration.arithmetic_server import ArithmeticServer, Handler, make_set, running

SAMPLING = Sampling(max_tokens=64)
PROMPT = "P {problem} G {gold} R {response} {0}"


@pytest.fixture
def court() -> Iterator[ArithmeticServer]:
    with running() as server:
        yield server


def rule(court: ArithmeticServer, *verdicts: str) -> None:
    """Make vote i on the problem `n + 1 = ?` letter i of verdict n: r right, w wrong, u unreadable,
    f failed.
    """
    words = {"r": "It is.\n**Verdict: RIGHT**", "w": "\nwrong.\n", "u": "I cannot say"}

    def behave(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.body["max_tokens"] == 1:  # the check before the first item, which is no vote
            court.requests.pop()
            return handler.say("It")
        letter = verdicts[int(prompt.split()[1])][handler.body["seed"] - 1234]
        return (
            handler.send(500, b"overloaded")
            if letter == "f"
            else handler.say(words[letter], reasoning="hm")
        )

    court.behave = behave


def settings_of(court: ArithmeticServer, folder: Path, *more: str) -> Any:
    (folder / "prompt.txt").write_text(PROMPT)
    judge = [f"base_url={court.url}", "model=court", f"prompt={folder / 'prompt.txt'}", *more]
    words = [f"evaluate.judge.{word}" for word in judge]
    words += ["evaluate.max_attempts=1", "evaluate.concurrency=1", "evaluate.outage_seconds=0"]
    return load_config_or_defaults(None, words).evaluate


def evaluated(
    server: ArithmeticServer, folder: Path, judge: Judge | None, max_failed_ratio: float = 0.0
) -> tuple[Summary, list[Row]]:
    """Evaluate four problems: 0 and 1 are right, 2 is wrong (its gold is), 3 is truncated."""
    items = list(make_set(4).items)
    items[2] = replace(items[2], gold="-1")
    server.behave = lambda handler, prompt, attempt: (
        prompt.startswith("3 ") and handler.answer(prompt, "length")
    )
    asked = replace(make_set(4), items=tuple(items))
    benchmark = Benchmark(asked, SAMPLING, folder, max_failed_ratio=max_failed_ratio, judge=judge)
    [summary] = evaluate_all([benchmark], [Endpoint(server.url, "m")])
    return summary, list(read_rows(folder).values())


def votes_of(rows: Sequence[Row]) -> list[Any]:
    return [row.details and row.details["judge"]["votes"] for row in rows]


def test_votes_are_reported_beside_the_grader_and_failed_votes_are_not_verdicts(
    server: ArithmeticServer,
    court: ArithmeticServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DAPO_JUDGE_API_KEY", "key-of-the-judge-1234")
    judge = judge_for(settings_of(court, tmp_path, "votes=3", "temperature=0.7"))
    rule(court, "rrr", "rwu", "wrr")
    summary, rows = evaluated(server, tmp_path / "before", judge)
    assert [row.verdict for row in rows] == ["right", "right", "wrong", "truncated"]  # the grader's
    assert votes_of(rows) == [
        ["right"] * 3,
        ["right", "wrong", None],
        ["wrong", "right", "right"],
        None,
    ]
    # 1 has no majority; of 0 and 2, right, and the truncated 3, 2 of 3. Pairs that agree: 3 of 3, 0
    # of 1, 1 of 3.
    assert summary.judge == {
        "judged": 3,
        "failed": 1,
        "accuracy": pytest.approx(2 / 3),
        "vote_agreement": pytest.approx((1 + 0 + 1 / 3) / 3),
        "grader_agreement": 0.5,  # 0, not 2
    }
    assert summary.accuracy == 0.5
    paths = {path for path, _, _ in court.requests}
    _, authorization, body = court.requests[0]
    assert (paths, authorization) == ({"/v1/chat/completions"}, "Bearer key-of-the-judge-1234")
    assert body["messages"] == [
        {"role": "user", "content": "P 0 + 1 = ? G 1 R Answer: \\boxed{1} {0}"}
    ]
    assert (
        sorted(body["seed"] for _, _, body in court.requests)
        == [1234] * 3 + [1235] * 3 + [1236] * 3
    )
    stored = "".join(path.read_text() for path in (tmp_path / "before").iterdir())
    assert "key-of-the-judge" not in stored

    # Only the vote on the torn last line is requested again.
    votes = tmp_path / "before" / VOTES_FILE
    text = votes.read_text()
    votes.write_text(text[:-10])
    court.requests.clear()
    again, _ = evaluated(server, tmp_path / "before", judge)
    assert (len(court.requests), again.judge) == (1, summary.judge)
    assert regrade(tmp_path / "before").summary.judge == summary.judge

    summary, _ = evaluated(server, tmp_path / "after", judge)
    comparison = compare(tmp_path / "before", tmp_path / "after")
    assert comparison.after.judge == summary.judge
    markdown = render_markdown(make_report(comparison, []))
    assert "court, 3 votes per response, in addition to the grader" in " ".join(markdown.split())
    assert any(line.split()[1:5] == ["LLM", "judge", "|", "66.7"] for line in markdown.splitlines())
    evaluated(server, tmp_path / "alone", None)
    with pytest.raises(ComparisonError, match=r"judge.* before, unset after"):
        compare(tmp_path / "before", tmp_path / "alone")


def test_a_judge_without_a_readable_vote_has_no_shares(
    server: ArithmeticServer,
    court: ArithmeticServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule(court, "u", "u", "u")
    with caplog.at_level("INFO"):
        summary, _ = evaluated(server, tmp_path / "out", judge_for(settings_of(court, tmp_path)))
    shares = dict.fromkeys(("accuracy", "vote_agreement", "grader_agreement"))
    assert summary.judge == {"judged": 3, "failed": 3, **shares}
    assert "judge: no verdict on any of 3 responses" in caplog.text
    comparison = compare(tmp_path / "out", tmp_path / "out")
    report = make_report(comparison, [])
    [line] = [line for line in render_markdown(report).splitlines() if "LLM judge" in line]
    assert line.split()[4:8] == ["none", "|", "none", "|"]
    page = render_html(
        report, no_plots(comparison, []), pack_items(*[load_evaluation(tmp_path / "out")] * 2)
    )
    assert page.count('data-field="before/judge/accuracy" data-form="percent">none<') == 1


def test_as_the_headline_the_majority_is_the_verdict_and_undecided_responses_are_not_wrong(
    server: ArithmeticServer, court: ArithmeticServer, tmp_path: Path
) -> None:
    beside = judge_for(settings_of(court, tmp_path))
    rule(court, "w", "r", "r")
    assert evaluated(server, tmp_path / "out", beside)[0].accuracy == 0.5
    num_asked, num_votes = len(server.requests), len(court.requests)
    # Making the same judge the headline sends no request.
    judge = judge_for(settings_of(court, tmp_path, "headline=true"))
    summary, rows = evaluated(server, tmp_path / "out", judge)
    assert (len(server.requests), len(court.requests)) == (num_asked, num_votes)
    assert [row.verdict for row in rows] == ["wrong", "right", "right", "truncated"]
    assert (summary.accuracy, summary.judge and summary.judge["grader_agreement"]) == (
        0.5,
        pytest.approx(1 / 3),
    )
    note = make_report(compare(tmp_path / "out", tmp_path / "out"), [])["measured"]["judge"]
    assert note == "court, 1 vote per response, used for the headline"
    again = regrade(tmp_path / "out")
    assert (again.verdicts, again.summary.accuracy) == ({}, 0.5)
    # Without the judge, the grader's verdicts are restored.
    assert [row.verdict for row in evaluated(server, tmp_path / "out", None)[1]][:3] == [
        "right",
        "right",
        "wrong",
    ]
    assert len(server.requests) == num_asked

    # Failing on 1 of 4 is an error above max_failed_ratio, and a failed request within it.
    rule(court, "w", "f", "r")
    with pytest.raises(
        EvaluationError, match=r"1 of 4 responses have no verdict of court .*at most 0 may"
    ):
        evaluated(server, tmp_path / "failing", judge)
    court.requests.clear()
    summary, rows = evaluated(server, tmp_path / "failing", judge, 0.25)
    assert len(court.requests) == 1  # only the vote that failed
    assert [row.verdict for row in rows] == ["wrong", "request_failed", "right", "truncated"]
    assert (summary.n, summary.accuracy, summary.request_failed_rate) == (
        3,
        pytest.approx(1 / 3),
        0.25,
    )
    rule(court, "w", "r", "r")
    num_asked = len(server.requests)
    summary, rows = evaluated(server, tmp_path / "failing", judge)
    assert (len(server.requests), summary.accuracy, rows[1].failure) == (num_asked, 0.5, None)


@pytest.mark.parametrize(
    ("status", "key", "change"),
    [
        (401, "", "DAPO_JUDGE_API_KEY is not set"),
        (401, "a-wrong-key-of-the-judge", "it rejects the API key in DAPO_JUDGE_API_KEY"),
        (404, "", "it has no model court: correct evaluate.judge.model"),
    ],
)
def test_a_judge_that_refuses_every_vote_is_found_before_the_first_item(
    server: ArithmeticServer,
    court: ArithmeticServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    key: str,
    change: str,
) -> None:
    monkeypatch.setenv("DAPO_JUDGE_API_KEY", key)
    judge = judge_for(settings_of(court, tmp_path))
    court.behave = lambda handler, prompt, attempt: handler.send(status, b"no")
    with pytest.raises(RequestsRefused, match=f"{change}.*HTTP {status}: no") as caught:
        evaluated(server, tmp_path / "out", judge)
    assert (caught.value.is_lasting, len(server.requests), len(court.requests)) == (True, 0, 1)

    # The key expires later: the responses are kept, and no further vote is requested.
    court.behave = lambda handler, prompt, attempt: (
        handler.say("It") if handler.body["max_tokens"] == 1 else handler.send(status, b"no")
    )
    with pytest.raises(RequestsRefused, match=f"{change}.*The responses are kept"):
        evaluated(server, tmp_path / "out", judge)
    num_asked = len(server.requests)
    rule(court, "r", "r", "r")
    assert evaluated(server, tmp_path / "out", judge)[0].judge is not None
    assert len(server.requests) == num_asked


def test_a_judge_that_never_answers_is_an_error_but_responses_are_kept(
    server: ArithmeticServer, court: ArithmeticServer, tmp_path: Path
) -> None:
    court.behave = lambda handler, prompt, attempt: handler.send(400, b"what")
    judge = judge_for(settings_of(court, tmp_path))
    with pytest.raises(
        EvaluationError, match=r"all 3 votes of court at .*\(evaluate\.judge\) failed: HTTP 400"
    ):
        evaluated(server, tmp_path / "out", judge)
    num_asked = len(server.requests)
    rule(court, "r", "r", "r")
    assert evaluated(server, tmp_path / "out", judge)[0].judge is not None
    assert len(server.requests) == num_asked


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ("RIGHT", "right"),
        ("so\n\n**Verdict: Correct.**\n", "right"),
        ("Final judgment - yes", "right"),
        ("wrong", "wrong"),
        ("INCORRECT", "wrong"),
        ("RIGHT\nNo", "wrong"),
        ("It is not right", None),
        ("RIGHT or WRONG", None),
        ("RIGHT\nbut who knows", None),
        ("", None),
    ],
)
def test_a_vote_is_a_last_line_that_is_only_a_verdict(text: str, vote: str | None) -> None:
    assert read_vote(text) == vote


def test_incomplete_judge_settings_are_refused(tmp_path: Path, court: ArithmeticServer) -> None:
    for word, message in (
        (
            "evaluate.judge.model=m",
            r"needs both evaluate\.judge\.base_url and evaluate\.judge\.model",
        ),
        ("evaluate.judge.headline=true", r"headline=true needs evaluate\.judge\.base_url"),
        ("evaluate.judge.votes=3", r"votes=3 at temperature 0 asks 3 times for the same vote"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config_or_defaults(None, [word])
    assert judge_for(load_config_or_defaults(None).evaluate) is None
    settings = settings_of(court, tmp_path)
    (tmp_path / "prompt.txt").write_text("Is it right?")
    with pytest.raises(InputError, match=r"evaluate\.judge\.prompt has no \{response\}"):
        judge_for(settings)
    (tmp_path / "prompt.txt").unlink()
    with pytest.raises(ConfigError, match=r"evaluate\.judge\.prompt=.*prompt\.txt cannot be read"):
        judge_for(settings)
    assert summarise_votes([]) is None
