"""Logs of other programs: recorded ones are imported, and exported ones survive a round trip.

tests/logs holds logs of lm-eval 0.4.13 and inspect_ai 0.3.285 (without events) on a server that
adds one, with a wrong gold answer for item 5, and predictions in the format of AISBench 3.1.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.logs.exported import export_inspect
from eval.logs.foreign import import_log, read_log
from eval.logs.regrade import regrade
from eval.report.compare import ComparisonError, compare
from eval.results.rows import (
    Evaluation,
    ResultsError,
    load_evaluation,
    read_rows,
    read_settings,
    write_rows,
)
from tests.evaluations import write_results

LOGS = Path(__file__).resolve().parents[1] / "logs"


def test_an_lm_eval_log_is_imported(tmp_path: Path) -> None:
    summary = import_log(LOGS / "lm-eval", tmp_path)
    # exact_match in its own results
    assert (summary.n, summary.accuracy) == (6, pytest.approx(5 / 6))
    settings = read_settings(tmp_path) or {}
    about = {"benchmark": "sums", "model": "m", "imported_from": "lm-eval"}
    assert about.items() <= settings.items()
    assert (settings["sampling"]["max_tokens"], settings["sampling"]["temperature"]) == (64, 0.0)
    row = read_rows(tmp_path)["5", 0]
    assert row.prompt == ({"role": "user", "content": "5 + 1 = ?"},)
    assert (row.response, row.gold, row.verdict) == ("Answer: \\boxed{6}", "7", "wrong")


def test_an_inspect_log_with_two_epochs_is_imported(tmp_path: Path) -> None:
    summary = import_log(LOGS / "inspect.json", tmp_path)
    assert (summary.num_items, summary.num_samples) == (3, 2)
    assert summary.accuracy == pytest.approx(2 / 3)
    row = read_rows(tmp_path)["row-4", 1]
    assert (row.gold, row.level, row.finish_reason, row.response_tokens) == ("5", "1", "stop", 5)
    assert row.seconds > 0


def test_an_unknown_finish_reason_in_a_log_is_counted_and_does_not_truncate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = json.loads((LOGS / "inspect.json").read_text())
    reasons = ["unheard_of", "STOP", "MAX_TOKENS", "unheard_of", "unknown", "stop"]
    for sample, reason in zip(content["samples"], reasons, strict=True):
        sample["output"]["choices"][0]["stop_reason"] = reason
    (tmp_path / "log.json").write_text(json.dumps(content))
    summary = import_log(tmp_path / "log.json", tmp_path / "out")
    assert summary.truncated_rate == pytest.approx(1 / 6)
    assert summary.unknown_finish_reasons == {"unheard_of": 2}
    assert "unknown finish reasons: 'unheard_of' (2 responses)" in caplog.text


def test_aisbench_predictions_are_imported_and_graded_by_both_rules(tmp_path: Path) -> None:
    summary = import_log(LOGS / "aisbench", tmp_path)
    assert summary.settings["model"] == "vllm-api"
    assert summary.settings["benchmark"] == "math_prm800k_500"
    rows = list(read_rows(tmp_path).values())
    assert [row.id for row in rows] == ["0", "1", "2"]
    # 0.5 equals \frac12 by value, but not as a string.
    verdicts = [(row.verdict, row.is_right_by_aisbench) for row in rows]
    assert verdicts == [("right", True), ("right", False), ("wrong", False)]
    assert rows[2].reasoning == "<think>four</think>"
    assert rows[1].prompt == ({"role": "user", "content": "1/2 = ?"},)


def evaluation(folder: Path) -> Evaluation:
    """One row of each verdict; the first one thinks."""
    write_results(folder, "rwntf", settings={"benchmark": "sums"})
    rows = list(read_rows(folder).values())
    write_rows(folder, [replace(rows[0], reasoning="hm", ended_at=1.5e9), *rows[1:]])
    return load_evaluation(folder)


def fields_of(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, name) for name in names) for row in read_rows(folder).values()]


def test_an_exported_inspect_log_survives_a_round_trip(tmp_path: Path) -> None:
    export_inspect(evaluation(tmp_path / "own"), log := tmp_path / "log.json")
    import_log(log, tmp_path / "back")
    names = "id prompt response gold verdict level response_tokens reasoning failure".split()
    assert fields_of(tmp_path / "back", *names) == fields_of(tmp_path / "own", *names)
    scores = [sample.get("scores") for sample in json.loads(log.read_text())["samples"]]
    assert [one and one["exact"]["value"] for one in scores] == ["C", "I", "N", "I", None]
    with pytest.raises(ComparisonError, match="imported_from"):
        compare(tmp_path / "own", tmp_path / "back")


def multiple_choice(number: int, target: str, options: list[str], values: list[float]) -> str:
    """Make a line of lm-eval 0.4's log of a multiple-choice task."""
    prompt = f"Question: {number}?\nAnswer:"
    requests = {
        f"gen_args_{i}": {"arg_0": prompt, "arg_1": f" {text}"} for i, text in enumerate(options)
    }
    results = [[str(value), "False"] for value in values]
    line = {
        "doc_id": number,
        "doc": {},
        "target": target,
        "arguments": requests,
        "resps": [[one] for one in results],
        "filtered_resps": results,
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
    }
    return json.dumps(line) + "\n"


@pytest.mark.parametrize(
    ("choices", "target", "gold"),
    [
        (["red", "blue", "green", "none"], "2", "C"),
        ({"text": ["red", "blue"], "label": ["A", "B"]}, 1, "B"),
        (["1", "2", "3"], "2", "2"),  # the option itself
        (["red", "blue"], "blue", "blue"),
        (["red", "blue"], "7", "7"),
        (None, "2", "2"),
    ],
)
def test_an_index_of_lm_eval_is_the_letter_that_a_response_names(
    tmp_path: Path, choices: object, target: object, gold: str
) -> None:
    line = {
        "doc_id": 0,
        "doc": {"question": "Which?", **({} if choices is None else {"choices": choices})},
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": "Which?", "arg_1": {"until": ["Q:"]}}},
        "resps": [[f"The answer is \\boxed{{{gold}}}."]],
        "filter": "none",
    }
    (tmp_path / "samples_mmlu_1.jsonl").write_text(json.dumps(line) + "\n")
    summary = import_log(tmp_path / "samples_mmlu_1.jsonl", tmp_path / "out")
    assert fields_of(tmp_path / "out", "gold") == [(gold,)]
    assert summary.accuracy == 1.0


def test_an_lm_eval_log_of_multiple_choice_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "samples_arc_1.jsonl"
    file.write_text(
        multiple_choice(0, "1", ["red", "very very blue"], [-3.0, -2.0])
        # by character, blue is likelier
        + multiple_choice(1, "1", ["red", "very very blue"], [-2.0, -3.0])
        + multiple_choice(2, "no", ["yes", "no"], [-1.0, -2.0])
    )
    summary = import_log(file, tmp_path / "out")
    assert (summary.accuracy, summary.acc_norm) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (summary.settings["benchmark"], summary.settings["grader"]) == ("arc", "loglikelihood/1")
    assert fields_of(tmp_path / "out", "answer", "gold") == [
        ("very very blue", "very very blue"),
        ("red", "very very blue"),
        ("yes", "no"),
    ]
    assert regrade(tmp_path / "out").summary.accuracy == summary.accuracy


def test_other_log_likelihoods_of_lm_eval_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "samples_lambada_1.jsonl"
    file.write_text(multiple_choice(0, " word", ["word"], [-3.0]))
    with pytest.raises(ResultsError, match=r"document 0 has 1 options .*only multiple choice"):
        read_log(file)


def generated(number: int, target: Any, response: Any, **settings: Any) -> str:
    """Make a line of lm-eval 0.4's log of a generating task."""
    line = {
        **{"doc_id": number, "doc": {}, "target": target, "filter": "none"},
        "arguments": {"gen_args_0": {"arg_0": "Q: 9 + 9?\nA:", "arg_1": settings}},
        "resps": [[response]],
    }
    return json.dumps(line) + "\n"


def test_the_answers_of_gold_solutions_in_a_log_are_read_as_in_gsm8k_and_math(
    tmp_path: Path,
) -> None:
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 1,018 clips.\n#### 1,018"
    file = tmp_path / "samples_gsm8k_1.jsonl"
    file.write_text(
        generated(0, solution, "The answer is 1018.", until="Question:", max_gen_toks=256)
        + generated(1, "We add.\nIt is $\\boxed{18}$, as claimed.", "\\boxed{18}")
        + generated(2, [" 18"], [["#### 18"]])
        + generated(3, 18, "#### 19")
        + generated(4, "['18']", "\\boxed{18}")
        + generated(5, True, "\\boxed{\\text{true}}")
    )
    summary = import_log(file, tmp_path / "out")
    assert fields_of(tmp_path / "out", "gold", "verdict") == [
        *(("1,018", "right"), ("18", "right"), ("18", "right"), ("18", "wrong")),
        *(("18", "right"), ("True", "right")),
    ]
    recorded = {"max_tokens": 256, "stop": ["Question:"], "temperature": None, "seed": None}
    assert recorded.items() <= summary.settings["sampling"].items()


@pytest.mark.parametrize(
    ("target", "response", "fault"),
    [
        (
            "She sold 24 in May.\nThat is 72 in all.",
            "72",
            r"2 of 2 gold answers .* of row 0: every",
        ),
        ("word " * 21, "72", r"whole texts, such as .*write the final answers into the log"),
        (["7", "2"], "72", r"row 0: a list of 2 different values as gold answer"),
        (None, "72", "row 0: no gold answer"),
        ({"value": {"x": 72}}, "72", "row 0: an object with value as gold answer"),
        ("72", {"text": "72"}, "row 0: the response is not text but dict"),
    ],
)
def test_a_log_whose_answers_are_no_answers_is_refused_and_not_graded_wrong(
    target: Any, response: Any, fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "samples_x_1.jsonl"
    file.write_text("".join(generated(number, target, response) for number in range(2)))
    with pytest.raises(ResultsError, match=fault):
        import_log(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logs_of_early_lm_eval_that_list_their_requests_are_read(tmp_path: Path) -> None:
    file = tmp_path / "samples_boolq_1.jsonl"
    lines = [json.loads(generated(number, "yes", "Yes")) for number in range(2)]
    for line in lines:
        line["arguments"] = [["Q: is it?\nA:", {"until": ["\n\n"]}]]
        del line["filter"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    import_log(file, tmp_path / "out")
    assert fields_of(tmp_path / "out", "gold", "verdict") == [("yes", "right")] * 2


def test_an_inspect_prompt_keeps_its_examples_and_a_null_answer_is_no_answer(
    tmp_path: Path,
) -> None:
    content = json.loads((LOGS / "inspect.json").read_text())
    examples: list[dict[str, Any]] = [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
    ]
    for sample in content["samples"]:
        sample["messages"][:0] = examples
        sample["output"]["choices"][0]["message"]["content"] = None
        sample["output"]["usage"] = {"output_tokens": "5"}
    (tmp_path / "log.json").write_text(json.dumps(content))
    assert import_log(tmp_path / "log.json", tmp_path / "out").no_answer_rate == 1
    row = read_rows(tmp_path / "out")["row-4", 1]
    roles = [message["role"] for message in row.prompt if isinstance(message, dict)]
    assert roles == ["developer", "user", "assistant", "user"]
    assert (row.prompt[2], row.response_tokens) == ({"role": "assistant", "content": "2"}, 5)


@pytest.mark.parametrize("text", ["", '{"resps": 1}\n'])
def test_an_unreadable_log_is_refused_with_the_supported_formats(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples_x_1.jsonl").write_text(text)
    with pytest.raises(ResultsError, match=r"is not a readable log.*AISBench's predictions folder"):
        read_log(tmp_path)


def test_ambiguous_folders_and_used_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="has no log"):
        read_log(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"samples_{name}_1.jsonl").write_text("{}")
    with pytest.raises(
        ResultsError, match=r"has 2 logs, .* type dapo grade \S+samples_a_1\.jsonl --output"
    ):
        read_log(tmp_path)
    write_results(tmp_path / "used", "r")
    with pytest.raises(ResultsError, match="choose another --output"):
        import_log(LOGS / "lm-eval", tmp_path / "used")
