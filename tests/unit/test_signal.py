"""What the stored answers before training say of its signal, and when they stop a run."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from eval.results.rows import write_rows
from eval.results.suite import Member, write_suite
from flows import dapo_full
from flows.config import Config
from tasks import chain
from tasks.artifacts.artifact import Artifact
from tasks.data.layout import EVAL_FILE
from tasks.data.prepare import build_dataset
from tasks.evaluation.settings import set_of
from tasks.links import link_of
from tasks.preflight.finding import FAIL, OK, WARN, Finding, PreflightError
from tasks.runs.run import Run
from tasks.runs.signal import examine_signal, examine_stored_signal, require_signal
from tests.configs import make_config
from tests.evaluations import make_row, write_results
from tests.recorded_runs import Outcome, produce, small_config

TAGGED = """
import re
def compute_score(data_source, solution_str, ground_truth, extra_info):
    found = re.findall("<answer>(.*?)</answer>", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0
"""


def recipe(folder: Path, num_items: int = 60, **sections: Any) -> Config:
    """A recipe of the user's own files, whose evaluation has `num_items` problems."""
    for name, count, asked in (("train", 8, "sum of 1 and"), ("eval", num_items, "successor of")):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = [(f"Find the {asked} {number}.", number + 1) for number in range(count)]
            csv.writer(file).writerows([("problem", "answer"), *rows])
    data = {"train": str(folder / "train.csv"), "eval": str(folder / "eval.csv")}
    store = {"path": str(folder / "store")}
    return make_config(**{"data": data, "store": store, **sections})


def answered(config: Config, folder: Path, outcomes: str, **changes: Any) -> Finding:
    """What a recipe's answers say; `outcomes` has a letter of make_row for each problem.

    `changes` apply to rows that are neither right nor wrong.
    """
    (folder / "data").mkdir()
    build_dataset(config, folder / "data")
    items = list(set_of(config.evaluate, folder / "data" / EVAL_FILE).items)
    results = write_results(folder / "results", outcomes, items)
    if changes:
        pairs = zip(items, outcomes, strict=True)
        rows = (make_row(item, one, **({} if one in "rw" else changes)) for item, one in pairs)
        write_rows(results, rows)
    data, before = (Artifact("s", "k", str(path), "d") for path in (folder / "data", results))
    (finding,) = examine_signal(config, data, before)
    return finding


def tagged(folder: Path) -> dict[str, Any]:
    (folder / "reward.py").write_text(TAGGED)
    return {"custom_reward": {"path": str(folder / "reward.py")}}


@pytest.mark.parametrize("metric", ["acc", "score"])
def test_a_scorer_that_reads_another_form_than_the_grader_stops_the_run_before_it_trains(
    tmp_path: Path, metric: str
) -> None:
    config = recipe(tmp_path, **tagged(tmp_path), sampler={"metric": metric})
    found = answered(config, tmp_path, "r" * 26 + "w" * 18 + "n" * 16)
    assert found.status == FAIL
    assert found.found == (
        "60 stored answers: for the training's scorer 60 wrong; for the grader 16 no answer, 26 "
        "right, 18 wrong"
    )
    assert found.why == "the scorer gives 60 of them 0, and equal rewards teach nothing"
    assert "correct the file of custom_reward.path. To train nevertheless" in found.advice
    shown = found.advice.splitlines()[1:]
    assert len(shown) == 2
    assert shown[0].endswith("scorer wrong, grader right, gold '1'")
    assert "\\\\boxed{1}" in shown[0]


def test_a_builtin_scorer_that_reads_no_answer_is_said_to_read_none(tmp_path: Path) -> None:
    config = recipe(tmp_path, reward={"scorers": ["exact=gsm8k"]})
    found = answered(config, tmp_path, "r" * 44 + "n" * 16)
    assert found.status == FAIL
    assert (
        "the training's scorer 60 no answer; for the grader 16 no answer, 44 right" in found.found
    )


def test_a_model_that_answers_nothing_stops_the_run_before_it_trains(tmp_path: Path) -> None:
    found = answered(recipe(tmp_path), tmp_path, "n" * 60, response="")
    assert found.status == FAIL
    assert "solved examples" in found.advice
    assert "-> ''" in found.advice


@pytest.mark.parametrize(
    ("limit", "num_wrong", "status"), [(8, 0, FAIL), (8, 20, WARN), (4096, 0, WARN)]
)
def test_cut_answers_stop_a_run_only_if_training_cuts_them_as_well(
    tmp_path: Path, limit: int, num_wrong: int, status: str
) -> None:
    lengths: dict[str, Any] = {
        "rollout": {"max_response_tokens": limit},
        "evaluate": {"max_response_tokens": 8},
    }
    config = recipe(tmp_path, **lengths, reward={"overlong": {"enabled": False}})
    outcomes = "w" * num_wrong + "t" * (60 - num_wrong)
    found = answered(config, tmp_path, outcomes, response="First, we note")
    assert found.status == status
    assert "raise rollout.max_response_tokens" in found.advice


@pytest.mark.parametrize(
    ("outcomes", "status", "advice"),
    [
        ("r" * 20 + "w" * 40, OK, ""),
        ("w" * 60, WARN, "unless the training's problems are easier"),
        ("r" * 60, WARN, "unless the training's problems are harder"),
        ("r" * 198 + "w" * 2, WARN, "unless the training's problems are harder"),
        ("r" * 6 + "w" * 194, WARN, "unless the training's problems are easier"),
        ("r" * 2 + "n" * 58, WARN, "in a form that the scorer reads"),
        ("n" * 20, WARN, "in a form that the scorer reads"),  # too few to be certain
        ("f" * 10 + "r" * 5 + "w" * 5, OK, ""),
    ],
)
def test_what_may_still_be_learned_is_trained(
    tmp_path: Path, outcomes: str, status: str, advice: str
) -> None:
    found = answered(recipe(tmp_path, len(outcomes)), tmp_path, outcomes)
    assert found.status == status
    assert advice in found.advice


@pytest.mark.parametrize(
    ("prompt", "asked", "status"),
    [
        ("aisbench", "End with #### and a number.", WARN),
        ("given", "End with #### and a number.", FAIL),
        ("bare", "Put it in double quotes.", WARN),
        ("given", "Put it in double quotes.", FAIL),
    ],
)
def test_answers_to_prompts_that_ask_for_another_form_than_trainings_are_no_proof(
    tmp_path: Path, prompt: str, asked: str, status: str
) -> None:
    config = recipe(tmp_path, reward={"scorers": ["exact=gsm8k"]}, evaluate={"prompt": prompt})
    data = {**config.data.model_dump(), "prompt_template": f"{{problem}} {asked}"}
    config = Config.model_validate(config.model_dump() | {"data": data})
    assert answered(config, tmp_path, "r" * 60).status == status


def test_a_failing_scorer_is_no_proof(tmp_path: Path) -> None:
    config = recipe(tmp_path, **tagged(tmp_path))
    (tmp_path / "reward.py").write_text(TAGGED.replace("found and", "extra_info['tests'] and"))
    found = answered(config, tmp_path, "r" * 60)
    assert (found.status, found.why) == (WARN, "the scorer fails on all of them")
    assert "60 error" in found.found


def test_a_benchmark_that_training_cannot_judge_neither_stops_a_run_nor_hides_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training's scorer reads letters of options; one benchmark has numbers."""
    caplog.set_level("INFO", "tasks")
    for name in ("train", "letters"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            rows = [(f"Name {name} {n}. A. one B. two", "AB"[n % 2]) for n in range(60)]
            csv.writer(file).writerows([("problem", "answer"), *rows])
    data = {"train": str(tmp_path / "train.csv"), "eval": "arithmetic"}
    benchmarks = [{"set": str(tmp_path / "letters.csv"), "name": "letters"}, {"set": "arithmetic"}]
    store = {"path": str(tmp_path / "store")}
    config = make_config(data=data, evaluate={"benchmarks": benchmarks}, store=store)
    data_folder, results = tmp_path / "data", tmp_path / "results"
    data_folder.mkdir()
    build_dataset(config, data_folder)
    results.mkdir()
    write_suite(results, [Member("letters"), Member("arithmetic")], "letters")
    for name in ("letters", "arithmetic"):
        items = list(set_of(config.evaluate, data_folder / "benchmarks" / f"{name}.parquet").items)
        write_results(results / name, "n" * len(items), items)
    artifacts = [Artifact("s", "k", str(path), "d") for path in (data_folder, results)]
    (finding,) = examine_signal(config, *artifacts)
    assert (finding.where, finding.status) == ("letters", FAIL)
    assert caplog.messages[-1] == (
        "signal: the training's scorer cannot judge the answers to arithmetic"
    )


def test_a_run_stops_before_a_training_without_signal_and_goes_on_with_a_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prepare_data", "fetch_model", "evaluate_model"):  # as outside of Prefect
        task = getattr(chain, name)
        monkeypatch.setattr(dapo_full, name, lambda *given, task=task: task.fn(*given).result())
    monkeypatch.setattr(dapo_full, "train_policy", lambda *_, **__: pytest.fail("it trains"))
    config = small_config(tmp_path, "data.arithmetic.num_eval=60")
    labels = ("prepare_data", "fetch_model", "evaluate_before")
    with Run.start(config) as run:
        built = produce(run, Outcome(before="n" * 60), labels[:2])
        data, model = built["prepare_data"], built["fetch_model"]

        def build(folder: Path) -> dict[str, Any]:
            items = list(set_of(config.evaluate, Path(data.path) / EVAL_FILE).items)
            shutil.copytree(
                write_results(tmp_path / "made", "n" * 60, items), folder, dirs_exist_ok=True
            )
            return {}

        key = link_of(config, "evaluate_before").key(data, model)
        before = run.produce("evaluate_before", key, build)
        with pytest.raises(PreflightError, match=r"^signal: 60 stored answers: .* 60 no answer"):
            dapo_full.run_chain(run, config.flow.webhook)
        assert [finding.status for finding in examine_stored_signal(config)] == [FAIL]
        produce(run, Outcome(), ("train_policy",))
        require_signal(run, data, model, before)
