"""A training scorer as the grader of an evaluation: scores, verdicts, failures, and regrading."""

from dataclasses import replace
from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from eval import InputError
from eval.endpoint import Endpoint, Sampling
from eval.logs.regrade import regrade
from eval.problems.items import EvaluationSet
from eval.report.compare import compare
from eval.report.report import make_report, render_markdown
from eval.requests.recorder import Benchmark
from eval.requests.run import evaluate_all
from eval.results.rows import read_rows
from eval.results.summary import Summary
from flows.config import load_config_or_defaults
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.evaluation import settings
from tasks.evaluation.settings import grader_for
from tests.integration.arithmetic_server import ArithmeticServer, make_set, running

SAMPLING = Sampling(max_tokens=64)
JUDGE = PROJECT_ROOT / "configs" / "scorers" / "judge.py"
# 0.5 for any response, 1 for the right sum; reads extra_info and data_source.
SCORER = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        os._exit(3)
    if extra_info["index"] == 4:
        time.sleep(600)
    assert data_source == "sums"
    is_right = solution_str.endswith("{" + ground_truth + "}")
    return {"score": 0.5 + 0.5 * is_right, "acc": is_right, "pred": solution_str[-2:-1]}
"""
FAILING_SCORER = """
def compute_score(extra_info, **_):
    number = extra_info["index"]
    if number == 7:
        return 1
    if number % 2:
        raise ValueError(f"odd\\n{number}")
    raise KeyError(number)
"""


def sums(count: int) -> EvaluationSet:
    items = [
        replace(item, data_source="sums", extra_info={"index": i})
        for i, item in enumerate(make_set(count).items)
    ]
    items[0] = replace(items[0], gold="-1")  # so that the answer 1 is wrong
    return replace(make_set(count), items=tuple(items))


def evaluated(server: ArithmeticServer, folder: Path, scorer: object, count: int = 5) -> Summary:
    settings = load_config_or_defaults(None, [f"evaluate.scorer={scorer}"]).evaluate
    benchmark = Benchmark(sums(count), SAMPLING, folder, grader=grader_for(settings))
    return evaluate_all([benchmark], Endpoint(server.url, "m"))[0]


def test_a_scorer_file_grades_and_its_failures_are_counted(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SCORER_SECONDS", 5.0)
    path = tmp_path / "score.py"
    path.write_text(SCORER)
    cut = "2 + 1 = ?"
    server.behave = lambda handler, prompt, attempt: (
        prompt == cut and handler.answer(prompt, "length")
    )
    summary = evaluated(server, tmp_path / "out", path)
    rows = list(read_rows(tmp_path / "out").values())
    # Item 2 is right for the scorer, but truncated; 3 and 4 end the scorer's process.
    assert [row.verdict for row in rows] == ["wrong", "right", "truncated", "wrong", "wrong"]
    assert [row.details and row.details.get("score") for row in rows] == [0.5, 1.0, 1.0, None, None]
    assert [row.answer for row in rows] == ["1", "2", "3", None, None]
    assert summary.accuracy == 0.2
    assert summary.scorer == {"mean_score": pytest.approx(2.5 / 3), "errors": 2}
    errors = [row.details["error"] for row in rows if row.details and "error" in row.details]
    assert errors == ["ended its process (exit code 3)", "took longer than 5 s"]

    # Another scorer regrades stored responses without requests.
    path.write_text("async def mine(solution_str, **_):\n    return 0.25\n")
    num_asked = len(server.requests)
    again = evaluated(server, tmp_path / "out", f"{path}:mine")
    assert len(server.requests) == num_asked
    assert (again.accuracy, again.scorer) == (0.0, {"mean_score": 0.25, "errors": 0})
    assert again.settings["grader"].startswith("scorer-score.py:mine/")

    # A scorer that fails on everything is refused, and the responses are kept.
    path.write_text("def compute_score(**_):\n    raise KeyError('gold')\n")
    with pytest.raises(
        InputError, match=r"(?s)failed on all 5 responses.*sends no request again.*KeyError: 'gold'"
    ):
        evaluated(server, tmp_path / "out", path)
    path.write_text("def compute_score(**_):\n    return 1\n")
    assert evaluated(server, tmp_path / "out", path).accuracy == 0.8  # item 2 is truncated
    assert len(server.requests) == num_asked
    with pytest.raises(
        InputError, match=r"graded by scorer-score\.py:compute_score/.*repeat `dapo eval`"
    ):
        regrade(tmp_path / "out")

    path.write_text("import nothing_of_this_name\n\ndef compute_score(**_):\n    return 1\n")
    with pytest.raises(InputError, match=r"correct evaluate\.scorer\n(.|\n)*nothing_of_this_name"):
        evaluated(server, tmp_path / "out", path)


def test_the_same_failure_of_a_scorer_is_logged_once(
    server: ArithmeticServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "score.py"
    path.write_text(FAILING_SCORER)
    with caplog.at_level("INFO"):
        summary = evaluated(server, tmp_path / "out", path, 12)
    assert summary.scorer is not None
    assert summary.scorer["errors"] == 11
    assert caplog.text.count("Traceback") == 2
    assert "the scorer failed on 11 responses" in caplog.text


def test_the_example_judge_decides_and_its_failures_are_asked_again(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = {
        0: "Same number.\n**Verdict: RIGHT**",
        1: "<think>RIGHT</think>wrong.",
        2: "Who knows",
    }
    with running() as court:
        monkeypatch.setenv("DAPO_JUDGE_URL", court.url)
        monkeypatch.setenv("DAPO_JUDGE_API_KEY", "key-of-the-judge-1234")
        court.behave = lambda handler, prompt, attempt: (
            handler.send(503, b"busy")
            if attempt == 1
            else handler.say(replies[int(prompt.split("Problem:\n")[1][0])])
        )
        summary = evaluated(server, tmp_path / "out", JUDGE, 3)
        # The first is right, although the exact rule calls it wrong.
        verdicts = [row.verdict for row in read_rows(tmp_path / "out").values()]
        assert verdicts == ["right", "wrong", "wrong"]
        assert summary.scorer == {"mean_score": 0.5, "errors": 1}
        _, authorization, body = court.requests[0]
        assert authorization == "Bearer key-of-the-judge-1234"
        [message] = body["messages"]
        assert "Problem:\n" in message["content"]
        assert "Response:\nAnswer: \\boxed{" in message["content"]

        num_asked, num_judged = len(server.requests), len(court.requests)
        replies[2] = "RIGHT"
        assert evaluated(server, tmp_path / "out", JUDGE, 3).accuracy == pytest.approx(2 / 3)
        assert (len(server.requests), len(court.requests)) == (num_asked, num_judged + 1)


def test_a_hanging_scorer_is_given_up_and_delays_no_request(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SCORER_SECONDS", 0.5)
    path = tmp_path / "score.py"
    path.write_text("import time\n\ndef compute_score(**_):\n    time.sleep(600)\n")
    with pytest.raises(InputError, match=r"failed on all 200 responses.*took longer than 0\.5 s"):
        evaluated(server, tmp_path / "out", path, 200)
    path.write_text("def compute_score(**_):\n    return 1\n")
    assert evaluated(server, tmp_path / "out", path, 200).accuracy == 1.0
    assert len(server.asked) == sum(server.asked.values()) == 200  # each once

    # Scoring waits until the last request was sent, so requests must not wait for scoring.
    last = tmp_path / "last"
    path.write_text(
        "import pathlib, time\n\ndef compute_score(**_):\n"
        f"    while not pathlib.Path({str(last)!r}).exists():\n        time.sleep(0.01)\n    "
        "return 1\n"
    )
    monkeypatch.setattr(settings, "SCORER_SECONDS", 60.0)
    server.behave = lambda handler, prompt, attempt: prompt == "99 + 1 = ?" and last.touch()
    assert evaluated(server, tmp_path / "waits", path, 100).accuracy == 1.0


def test_a_built_in_scorer_grades_and_the_report_shows_its_scores(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    for side in ("before", "after"):
        summary = evaluated(server, tmp_path / side, "geo3k", 3)
        # A box scores 0.9; the 0.1 for format needs thinking in tags, which the server does not
        # send.
        assert summary.scorer == {"mean_score": pytest.approx(0.6), "errors": 0}
        assert summary.accuracy == pytest.approx(2 / 3)
        assert summary.settings["grader"] == "scorer-geo3k/2"
    markdown = render_markdown(make_report(compare(tmp_path / "before", tmp_path / "after"), []))
    assert [line.split() for line in markdown.splitlines() if "mean score" in line] == [
        ["|", "mean", "score", "|", "0.6", "|", "0.6", "|", "|"]
    ]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("math_dap", r"math_dap is not a scorer, FILE\.py.*did you mean math_dapo\?"),
        ("math_verify", r"math_verify is not a scorer.*use exact instead.*docs/data\.md"),
        ("absent.py", r"evaluate\.scorer=absent\.py cannot be read: No such file"),
        ("{}/score.py:other", r"defines compute_score, os, time at top level, not other"),
    ],
)
def test_an_unknown_scorer_is_refused_before_any_request(
    tmp_path: Path, scorer: str, message: str
) -> None:
    (tmp_path / "score.py").write_text(SCORER)
    override = f"evaluate.scorer={scorer.format(tmp_path)}"
    settings = load_config_or_defaults(None, [override]).evaluate
    with pytest.raises(ConfigError, match=message):
        grader_for(settings)
