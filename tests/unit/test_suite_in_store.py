"""Benchmarks of a recipe: prepared files, keys, reuse from the store, and plans."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from eval.results.suite import describe_suite, read_suite
from flows.config import Config
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.store import ArtifactStore
from tasks.data.prepare import build_dataset
from tasks.links import link_of
from tasks.runs.suite import (
    PlannedBenchmark,
    benchmarks_of,
    describe_benchmarks,
    link_stored_results,
    suite_metrics,
)
from tasks.stage_inputs import evaluate_model_inputs
from tasks.stages import EVALUATE_MODEL
from tests.configs import make_config
from tests.evaluations import make_items, write_results

MINE = [{"question": f"Name the sum of {n} and 7.", "result": str(n + 7)} for n in range(3)]
SAMPLED = {
    "set": "arithmetic",
    "name": "sampled",
    "num_samples": 4,
    "temperature": 0.6,
    "weight": 2.0,
}


def recipe(folder: Path, *benchmarks: Any, **evaluate: Any) -> Config:
    return make_config(
        store={"path": str(folder / "store")},
        data={"arithmetic": {"num_train": 16, "num_eval": 5}},
        evaluate={"benchmarks": list(benchmarks), **evaluate},
    )


def own_set(folder: Path) -> dict[str, Any]:
    path = folder / "mine.json"
    path.write_text(json.dumps(MINE))
    return {"set": str(path), "columns": {"problem": "question", "answer": "result"}}


def prepared(config: Config) -> Artifact:
    store, key = ArtifactStore(config.store.path), link_of(config, "prepare_data").key()
    return store.produce(key, lambda folder: build_dataset(config, folder))[0]


def asked_of(config: Config, data: Artifact, model: str = "m") -> list[PlannedBenchmark]:
    merged = Artifact("merge_checkpoint", "k", "/nowhere", model)
    return benchmarks_of(
        ArtifactStore(config.store.path),
        EVALUATE_MODEL,
        config,
        evaluate_model_inputs(config, data, merged),
    )


def evaluated(
    config: Config, data: Artifact, model: str = "m"
) -> tuple[Artifact, list[PlannedBenchmark]]:
    """The artifact of an evaluation, with fake results for benchmarks that are not stored."""
    asked = asked_of(config, data, model)
    key = link_of(config, "evaluate_before").key(
        data, Artifact("merge_checkpoint", "k", "/nowhere", model)
    )

    def build(folder: Path) -> Mapping[str, Any]:
        link_stored_results(config, asked, folder)
        for one in asked:
            if one.stored is None:
                (target := one.folder(folder)).mkdir(exist_ok=True)
                made = write_results(folder / ".made", "rwr", make_items(3))
                for path in made.iterdir():
                    path.rename(target / path.name)
                made.rmdir()
                (target / "images").mkdir()
                (target / "images" / "a.png").write_bytes(b"a picture")
                (target / "summary.json").write_text('{"accuracy": 0.5, "n": 3}')
        return suite_metrics(config, asked, folder)

    return ArtifactStore(config.store.path).produce(key, build)[0], asked


def test_each_benchmark_has_its_own_file_and_is_held_out_of_training(tmp_path: Path) -> None:
    mine = own_set(tmp_path)
    config = recipe(tmp_path, "arithmetic", SAMPLED, mine, prompt="bare")
    leaked = tmp_path / "train.json"
    leaked.write_text(json.dumps([*MINE, {"question": "What is 1 + 1?", "result": "2"}]))
    train = {"set": str(leaked), "columns": mine["columns"]}
    data = {"train": train, "eval": "arithmetic", "arithmetic": {"num_eval": 5}}
    config = make_config(
        store={"path": str(tmp_path / "store")}, data=data, evaluate=config.evaluate.model_dump()
    )
    artifact = prepared(config)
    metrics = artifact.manifest()["metrics"]
    assert (metrics["train_rows"], metrics["eval_rows"], metrics["contaminated_rows"]) == (1, 5, 3)
    assert metrics["benchmark_rows"] == {"arithmetic": 5, "sampled": 5, "mine": 3}
    asked = load_set(Path(artifact.path) / "benchmarks" / "mine.parquet", None, "bare")
    assert [item.gold for item in asked.items] == ["7", "8", "9"]
    card = json.loads((Path(artifact.path) / "data_card.json").read_text())
    uses = [f"{one['name']} {one['use']}" for one in card["sets"][1:]]
    benchmarks = ["arithmetic benchmark", "sampled benchmark", "mine benchmark"]
    assert uses == ["arithmetic eval", *benchmarks]
    assert "## Benchmarks" in (Path(artifact.path) / "data_card.md").read_text()


def test_stored_results_are_reused_and_the_rest_is_evaluated(tmp_path: Path) -> None:
    first = recipe(tmp_path, "arithmetic", SAMPLED)
    data = prepared(first)
    before, asked = evaluated(first, data)
    assert [one.stored for one in asked] == [None, None]
    assert describe_benchmarks(asked) == "evaluates arithmetic, sampled"

    more = recipe(tmp_path, SAMPLED, own_set(tmp_path), "arithmetic", headline="mine")
    data = prepared(more)
    after, asked = evaluated(more, data)
    assert describe_benchmarks(asked) == "evaluates mine; in the store sampled, arithmetic"
    assert list(read_suite(after.path)) == ["sampled", "mine", "arithmetic"]
    for name in ("sampled", "arithmetic"):
        for file in ("results.jsonl", "images/a.png"):
            assert os.path.samefile(*(Path(one.path) / name / file for one in (before, after)))
    suite = describe_suite(after.path)
    assert (suite.headline, [one.weight for one in suite.members]) == ("mine", [2.0, 1.0, 1.0])
    metrics = after.manifest()["metrics"]
    assert metrics["sampled/from"] == str(Path(before.path) / "sampled")
    assert (metrics["accuracy"], metrics["mine/n"]) == (0.5, 3)

    # Another model, other sampling and other problems are asked; a changed weight is not.
    assert [one.stored for one in asked_of(more, data, "other model")] == [None] * 3
    hotter = recipe(tmp_path, {**SAMPLED, "temperature": 0.9}, {"set": "arithmetic", "weight": 7.0})
    assert (
        describe_benchmarks(asked_of(hotter, data)) == "evaluates sampled; in the store arithmetic"
    )
    # How long answers get is known from any model's.
    assert all(one.earlier is not None for one in asked_of(more, data, "other model"))


def test_a_benchmark_alone_and_in_a_suite_share_results(tmp_path: Path) -> None:
    alone = recipe(tmp_path)
    artifact, _ = evaluated(alone, prepared(alone))
    suite = recipe(tmp_path, "arithmetic", own_set(tmp_path))
    data = prepared(suite)
    assert asked_of(suite, data)[0].stored == Path(artifact.path)
    together, _ = evaluated(suite, data)
    files = {path.name for path in (Path(together.path) / "arithmetic").iterdir()}
    assert files == {"images", "results.jsonl", "settings.json", "summary.json"}


def test_damaged_results_are_evaluated_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = recipe(tmp_path, "arithmetic", SAMPLED)
    data = prepared(config)
    artifact, _ = evaluated(config, data)
    (Path(artifact.path) / "arithmetic" / "results.jsonl").write_text("")
    other = recipe(tmp_path, SAMPLED)
    assert asked_of(other, prepared(other))[0].stored is None
    assert "is not reused: arithmetic/results.jsonl" in caplog.text


def test_token_limits_follow_the_longest_benchmark(tmp_path: Path) -> None:
    message = r"evaluate\.benchmarks\.sampled\.max_response_tokens = 3\d{4} is above"
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, "arithmetic", {**SAMPLED, "max_response_tokens": 30_000})
    with pytest.raises(ProblemsError, match="did you mean math500"):
        prepared(recipe(tmp_path, "math50"))
