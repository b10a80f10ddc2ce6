"""Comparisons of other programs' logs by their own scores.

tests/logs/scored holds logs of lm-eval 0.4.13, inspect_ai 0.3.285, evalscope 1.14.1 and AISBench
3.1.20260630 on SmolLM2-135M-Instruct, greedy before and at temperature 0.7 or 0.9 after. Those of
NeMo Evaluator are written here in their documented format.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.logs.foreign import import_log
from eval.logs.scored import compare_logs, program_of
from eval.results.scores import ScoresError
from flows.cli import app
from tests.evaluations import write_results

LOGS = Path(__file__).resolve().parents[1] / "logs/scored"
OLD = LOGS.parent


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return done.exit_code, done.output + str(done.exception or "")


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_lm_eval_tasks_are_compared_by_a_chosen_filter() -> None:
    sides = LOGS / "lm-eval/before", LOGS / "lm-eval/after"
    result = compare_logs(*sides, score="number")
    # exact_match,number in the results files
    assert [(row.name, row.n) for row in result.benchmarks] == [("sums", 12), ("words", 8)]
    means = [mean for row in result.benchmarks for mean in (row.before, row.after)]
    assert means == pytest.approx([1 / 12, 0, 1, 1 / 4])
    assert result.benchmarks[1].p == 2 / 2**6  # six items worse, none better
    assert result.direction == "worse"
    rome = next(flip for flip in result.worse if flip.gold == "Rome")
    assert rome.response_before == "The capital of Italy is Rome."
    assert result.about["before"].startswith("smollm2 (")
    assert compare_logs(*sides).total.before == 0  # type: ignore[union-attr]  # the first: strict
    with pytest.raises(ScoresError, match=r"no score f1; it has exact_match,strict, exact_match,n"):
        compare_logs(*sides, score="f1")


def test_lm_eval_says_which_metrics_are_better_lower(tmp_path: Path) -> None:
    for side in ("before", "after"):
        shutil.copytree(LOGS / "lm-eval" / side, tmp_path / side)
        [file] = (tmp_path / side).glob("results_*.json")
        content = json.loads(file.read_text())
        content["higher_is_better"] = {"words": {"exact_match": False}}
        file.write_text(json.dumps(content))
    before, after = (next((tmp_path / side).glob("samples_words*")) for side in ("before", "after"))
    result = compare_logs(before, after, "number")
    assert result.total is not None
    assert (result.total.difference, result.direction) == (-0.75, "better")
    assert (len(result.better), len(result.worse)) == (6, 0)
    after.write_text("".join(after.read_text().splitlines(keepends=True)[:-1]))
    # 2 of 8 answers are right; of the first 7, one
    with pytest.raises(ScoresError, match=r"number is 0.25 in the results file, but its 7 samples"):
        compare_logs(before, after, "number")


def test_an_inspect_archive_is_compared_with_a_json_log_epochs_as_samples() -> None:
    result = compare_logs(LOGS / "inspect/before.eval", LOGS / "inspect/after.json")
    [row] = result.benchmarks
    assert (row.name, row.n, row.samples) == ("words", 5, (2, 2))
    assert (row.before, row.after) == (1.0, 0.9)
    assert [(flip.item, flip.before, flip.after) for flip in result.worse] == [("w1", 1.0, 0.5)]
    assert result.about["score"] == "includes (--score reads match)"


def test_an_evalscope_work_folder_is_compared_by_its_reviews() -> None:
    result = compare_logs(LOGS / "evalscope/before", LOGS / "evalscope/after")
    [row] = result.benchmarks
    assert (row.name, row.n, row.num_better) == ("math_500_Level 1", 6, 2)
    assert (row.before, row.after) == (0, pytest.approx(1 / 3))
    assert {flip.gold for flip in result.better} == {"5", "6"}


def test_evalscope_settings_that_differ_are_named_and_predictions_lead_to_reviews(
    tmp_path: Path,
) -> None:
    for side, name in (("before", "smollm2"), ("after", "smollm2-warm")):
        shutil.copytree(LOGS / "evalscope" / side, tmp_path / side)
        (tmp_path / side / "configs").mkdir()
        task = tmp_path / side / "configs/task_config.yaml"
        task.write_text(f"repeats: 1\ngeneration_config: {{max_tokens: {len(name)}}}\n")
        write_lines(
            tmp_path / side / "predictions" / name / "math_500_Level 1.jsonl",
            [{"index": 0, "model": name, "model_output": {}}],
        )
        [reviews] = (tmp_path / side).glob("reviews/*/*")
        reviews.write_text(re.sub(r'"group_id": \d+', '"group_id": null', reviews.read_text()))
    before, after = (
        next((tmp_path / side / "predictions").glob("*/*")) for side in ("before", "after")
    )
    result = compare_logs(before, after)
    assert result.benchmarks[0].num_better == 2
    assert "generation_config.max_tokens: 7 before, 12 after" in result.notes[0]
    shutil.rmtree(tmp_path / "after/reviews")
    with pytest.raises(ScoresError, match="it holds evalscope's scores, and predictions do not"):
        compare_logs(before, after)


def nemo_run(folder: Path, rewards: Mapping[int, list[float]], **config: Any) -> Path:
    """Write NeMo Evaluator's bundle and results.jsonl, with a list of repeats for each problem."""
    rows = [
        {"problem_idx": problem, "repeat": repeat, "reward": reward, "expected_answer": "42"}
        for problem, repeats in rewards.items()
        for repeat, reward in enumerate(repeats)
    ]
    write_lines(folder / "results.jsonl", rows)
    bundle = {"run_id": "r", "config": config, "benchmark": {"name": "gsm8k", "scores": {}}}
    (folder / "eval-gsm8k.json").write_text(json.dumps(bundle))
    return folder


def test_nemo_run_folders_are_compared_repeats_as_samples_and_settings_named(
    tmp_path: Path,
) -> None:
    before = nemo_run(tmp_path / "a", {0: [1, 1, 0], 1: [0, 0, 1], 2: [1, 1, 1]}, model="m", t=0)
    after = nemo_run(tmp_path / "b", {0: [1, 1, 1], 1: [0, 0, 1], 2: [1, 0, 1]}, model="n", t=1)
    result = compare_logs(before, after / "eval-gsm8k.json")
    [row] = result.benchmarks
    assert (row.name, row.n, row.samples, row.p) == ("gsm8k", 3, (3, 3), 1.0)
    assert (row.num_better, row.num_worse) == (1, 1)
    assert result.notes == ("gsm8k: not only the model differs: t: 0 before, 1 after.",)
    (after / "results.jsonl").unlink()
    with pytest.raises(ScoresError, match=r"results\.jsonl is missing"):
        compare_logs(before, after)


def test_an_aisbench_work_folder_is_compared_by_its_details(tmp_path: Path) -> None:
    result = compare_logs(LOGS / "aisbench/before", LOGS / "aisbench/after")
    [row] = result.benchmarks
    # summary: 25.00 and 0.00
    assert (row.name, row.n, row.before, row.after) == ("sums", 8, 0.25, 0)
    assert {flip.gold for flip in result.worse} == {"9", "13"}
    assert result.about["score"] == "correct"
    # with num_return_sequences, details are a list that mixes the items
    for side in ("before", "after"):
        shutil.copytree(LOGS / "aisbench" / side, tmp_path / side)
        file = tmp_path / side / "results/smollm2/sums.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"details": list(content["details"].values())}))
    graded = compare_logs(tmp_path / "before", tmp_path / "after")
    assert graded.about["score"] == "AISBench's rule, graded here"
    assert graded.benchmarks[0].ci95 == row.ci95


def aisbench_run(folder: Path, answers: list[str], verdicts: list[bool] | None = None) -> Path:
    """Write AISBench's predictions, and with verdicts the results of --dump-eval-details."""
    rows = [
        {"data_abbr": "math", "id": i, "origin_prompt": f"{i}+1?", "prediction": x, "gold": "1/2"}
        for i, x in enumerate(answers)
    ]
    write_lines(folder / "predictions/api/math.jsonl", rows)
    if verdicts:
        details = {str(i): {"correct": [x]} for i, x in enumerate(verdicts)}
        (folder / "results/api").mkdir(parents=True)
        (folder / "results/api/math.json").write_text(json.dumps({"details": details}))
    return folder


def test_aisbench_runs_are_compared_by_their_verdicts_or_graded_by_its_rule(tmp_path: Path) -> None:
    # AISBench compares strings: 0.5 is not 1/2
    answers = ["\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{3}"]
    plain = aisbench_run(tmp_path / "a", answers)
    better = aisbench_run(tmp_path / "b", ["\\boxed{1/2}"] * 3)
    result = compare_logs(plain, better)
    assert (result.benchmarks[0].before, result.benchmarks[0].after) == (pytest.approx(1 / 3), 1)
    assert result.about["score"] == "AISBench's rule, graded here"
    judged = aisbench_run(tmp_path / "c", answers, [True, True, False])
    with pytest.raises(ScoresError, match="scored by AISBench's rule, graded here before and corr"):
        compare_logs(plain, judged)
    both = compare_logs(judged, aisbench_run(tmp_path / "d", answers, [True, True, True]))
    assert (both.benchmarks[0].before, both.benchmarks[0].after) == (pytest.approx(2 / 3), 1)


def test_tables_are_compared_with_a_gate_and_written_as_pages(tmp_path: Path) -> None:
    rows = [f"{name},q{i},{i % 2}" for name in ("math", "code") for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["subset,question_id,correct", *rows]))
    worse = [line[:-1] + "0" if line.startswith("math") else line for line in rows]
    (tmp_path / "b.csv").write_text("\n".join(["subset,question_id,correct", *worse]))
    status, text = run(
        *(tmp_path / "a.csv", tmp_path / "b.csv", "--output", tmp_path / "page"),
        *("--gate", "math >= before - 1", "--gate", "code >= before - 1"),
    )
    assert status == 3, text
    assert "GATES FAILED, 1 of 2: math >= before - 1 (measured 0, threshold 49 %)" in text
    report = json.loads((tmp_path / "page/report.json").read_text())
    assert [row["p_holm"] < 0.05 for row in report["benchmarks"]] == [True, False]
    assert [gate["is_passed"] for gate in report["gates"]] == [False, True]
    assert len(report["worse"]) == 15
    assert "math" in (tmp_path / "page/report.html").read_text()
    status, text = run(tmp_path / "a.csv", tmp_path / "b.csv", "--gate", "maths >= before")
    assert status != 0
    assert "no benchmark maths (did you mean math?)" in text


def test_a_table_with_other_columns_names_them_and_the_score_can_be_chosen(tmp_path: Path) -> None:
    for name, f1 in (("a", 0.25), ("b", 0.75)):
        rows = [{"id": i, "acc": 1, "f1": f1, "label": "x"} for i in range(9)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    sides = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert compare_logs(*sides).difference == 0
    assert compare_logs(*sides, score="f1").direction == "better"
    assert compare_logs(*sides, score="f1:lower").direction == "worse"
    assert compare_logs(*sides, score="f1:lower").difference == 0.5
    write_lines(tmp_path / "c.jsonl", [{"frage": 1, "punkte": 2}])
    with pytest.raises(ScoresError, match=r"no column item .*its columns are frage, punkte"):
        compare_logs(tmp_path / "c.jsonl", tmp_path / "c.jsonl")


def test_mixed_kinds_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_results(tmp_path / "own", "rw")
    (tmp_path / "a.csv").write_text("item,score\n1,1\n")
    for other, kind in (
        (tmp_path / "own", "a results folder of dapo eval"),
        (LOGS / "lm-eval/before", "a log of lm-eval"),
    ):
        status, text = run(tmp_path / "a.csv", other)
        assert status != 0
        assert f"a.csv is a table and {other} is {kind}: programs prompt and score" in text
    for other, fault in ((tmp_path / "none.csv", "does not exist"), (tmp_path, "is no evaluation")):
        assert f"{other} {fault}" in run(tmp_path / "a.csv", other)[1]
    assert "All scores are equal on both" in run(tmp_path / "a.csv", tmp_path / "a.csv")[1]


def test_an_inspect_archive_is_also_imported_and_graded_by_our_rule(tmp_path: Path) -> None:
    summary = import_log(LOGS / "inspect/before.eval", tmp_path / "out")
    assert (summary.num_items, summary.num_samples, summary.settings["benchmark"]) == (
        5,
        2,
        "words",
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda data: data[: len(data) // 2], "is damaged: File is not a zip file"),
        (lambda data: data[:2000] + b"\0" * 40 + data[2040:], "is damaged: "),
    ],
)
def test_a_damaged_archive_is_named(tmp_path: Path, change: Any, fault: str) -> None:
    file = tmp_path / "log.eval"
    file.write_bytes(change((LOGS / "inspect/before.eval").read_bytes()))
    with pytest.raises(ScoresError, match=rf"log\.eval {fault}"):
        compare_logs(file, LOGS / "inspect/after.json")


def test_a_damaged_line_of_samples_is_named_and_not_dropped(tmp_path: Path) -> None:
    shutil.copytree(LOGS / "lm-eval/after", tmp_path / "after")
    [file] = (tmp_path / "after").glob("samples_words*")
    file.write_text(file.read_text()[:-50])
    with pytest.raises(ScoresError, match=r"samples_words.*JSON parse error in line 16"):
        compare_logs(LOGS / "lm-eval/before", tmp_path / "after")


def test_shuffled_documents_of_the_same_number_are_not_taken_for_the_same(tmp_path: Path) -> None:
    shutil.copytree(LOGS / "lm-eval/after", tmp_path / "after")
    [file] = (tmp_path / "after").glob("samples_sums*")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["doc_id"] = (line["doc_id"] + 1) % 12
    write_lines(file, lines)
    with pytest.raises(ScoresError, match=r"sums: the problem differs in 12 of 12 items"):
        compare_logs(LOGS / "lm-eval/before", tmp_path / "after")


def test_a_failed_inspect_sample_is_left_out_and_not_wrong(tmp_path: Path) -> None:
    content = json.loads((LOGS / "inspect/after.json").read_text())
    content["status"] = "error"
    for sample in content["samples"][:2]:
        sample["error"], sample["scores"] = {"message": "timeout"}, None
    (tmp_path / "log.json").write_text(json.dumps(content))
    result = compare_logs(LOGS / "inspect/before.eval", tmp_path / "log.json")
    assert result.benchmarks[0].samples == (1, 2)
    assert "status: success before, error after" in result.notes[0]
    assert result.notes[1] == "words: samples without a counterpart, left out: 2 before, 0 after."
    content["samples"] = []
    (tmp_path / "log.json").write_text(json.dumps(content))
    with pytest.raises(ScoresError, match=r"log\.json has no scored response"):
        compare_logs(LOGS / "inspect/before.eval", tmp_path / "log.json")


def test_training_logs_and_result_folders_are_no_evaluation_logs(tmp_path: Path) -> None:
    write_results(tmp_path / "own", "rw")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "critic/score/mean": 0.5}])
    write_lines(tmp_path / "verl.jsonl", [{"step": 1, "data": {"critic/score/mean": 0.5}}])
    (tmp_path / "console.log").write_text("step:1 - critic/score/mean:0.5\n")
    names = ("own", "metrics.jsonl", "verl.jsonl", "console.log", "none")
    assert [program_of(tmp_path / name) for name in names] == [None] * 5
    for name, program in (("lm-eval", "lm-eval"), ("inspect.json", "inspect_ai")):
        assert program_of(OLD / name) == program
    assert program_of(OLD / "aisbench") == "AISBench"
