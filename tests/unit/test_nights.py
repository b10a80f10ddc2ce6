"""The last nightly model as a baseline of the next run."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eval.report.compare import compare
from eval.report.report import Provenance, make_report, render_markdown
from tasks.fetched_model import link_model_folder
from tasks.links import link_of
from tasks.runs.nights import (
    LAST_NIGHT,
    NIGHTLY,
    describe_change,
    since_first_night,
    with_last_night,
)
from tasks.runs.run import Run
from tests.garbage import collect
from tests.recorded_runs import Outcome, builder, produce, record_run, small_config
from tests.tiny_models import build_tiny_qwen3

SAME_PROBLEMS = "data.arithmetic.seed=0"
RESULT = {"before": 0.2, "after": 0.4, "difference": 0.2, "p": 0.01, "n": 8}


def night(store: Path, seed: int, *overrides: str, flow: str = NIGHTLY) -> Run:
    """A nightly run whose merged model can be served."""
    config = small_config(store, SAME_PROBLEMS, f"run.seed={seed}", *overrides)
    with Run.start(config, flow) as run:
        labels = ("prepare_data", "fetch_model", "evaluate_before", "train_policy")
        made = produce(run, Outcome(weights=f"of seed {seed}"), labels)

        def merge(folder: Path) -> Mapping[str, Any]:
            shutil.copytree(
                build_tiny_qwen3(folder.parent / "made", seed=seed), folder, dirs_exist_ok=True
            )
            (folder / "merge_manifest.json").write_text("{}")
            return {}

        merged = run.produce(
            "merge_checkpoint", link_of(config, "merge_checkpoint").key(made["train_policy"]), merge
        )
        key = link_of(config, "evaluate_after").key(made["prepare_data"], merged)
        run.produce(
            "evaluate_after",
            key,
            builder(config, "evaluate_after", Outcome(weights=f"of seed {seed}")),
        )
        run.record(report=RESULT)
    return run


@pytest.mark.slow
def test_answers_of_the_last_nightly_run_are_reused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert with_last_night(small_config(store)) == ()
    night(store, 1)
    yesterday = night(store, 2)
    night(store, 3, flow="dapo-full")
    night(store, 4, "run.name=other")
    with Run.start(small_config(store, SAME_PROBLEMS), NIGHTLY):  # failed before its report
        pass
    entry = "evaluate.baselines=[{name: mine, id: org/name}]"
    tonight = small_config(store, SAME_PROBLEMS, "run.seed=5", entry)
    [override] = with_last_night(tonight)
    tonight = small_config(store, SAME_PROBLEMS, "run.seed=5", override)
    assert [one.name for one in tonight.evaluate.baselines] == ["mine", LAST_NIGHT]
    with Run.start(tonight, NIGHTLY) as run:
        [data] = produce(run, Outcome(), ["prepare_data"]).values()
        link = link_of(tonight, "fetch_baseline_last-night")
        model = run.produce(
            link.label,
            link.key(),
            lambda folder: {"bytes": link_model_folder(link.config.model, folder)},
        )
        assert model.digest == yesterday.stages["merge_checkpoint"].digest
        asked = run.take("evaluate_baseline_last-night")
    assert asked.key == yesterday.stages["evaluate_after"].key
    assert data.digest == yesterday.stages["prepare_data"].digest
    # Other settings ask the same model again.
    other = small_config(store, SAME_PROBLEMS, "run.seed=5", override, "evaluate.temperature=0.5")
    assert link_of(other, "evaluate_baseline_last-night").key(data, model).key != asked.key


def test_a_baseline_named_last_night_is_kept(tmp_path: Path) -> None:
    night(tmp_path, 1)
    own = small_config(tmp_path, "evaluate.baselines=[{name: last-night, path: mine}]")
    assert with_last_night(own) == ()


@pytest.mark.slow
def test_the_newest_nightly_model_survives_gc_and_a_lost_one_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, last = night(tmp_path, 1), night(tmp_path, 2)
    for step in (61, 62):
        record_run(small_config(tmp_path, f"train.total_steps={step}"))
    collect(tmp_path)
    assert not Path(first.stages["merge_checkpoint"].artifact).exists()
    assert last.stages["merge_checkpoint"].artifact in with_last_night(last.config)[0]
    shutil.rmtree(last.stages["merge_checkpoint"].artifact)
    with caplog.at_level(logging.WARNING):
        assert with_last_night(last.config) == ()
    assert f"the run {last.folder.name} is no longer in the store" in caplog.text


@pytest.mark.slow
def test_a_nightly_run_is_compared_with_the_first_one(tmp_path: Path) -> None:
    nights = []
    for step, (before, after) in enumerate(
        (("rwwwwwww", "rwwwwwww"), ("rwwwwwww", "rrrwwwww")), start=60
    ):
        config = small_config(tmp_path, f"train.total_steps={step}")
        outcome = Outcome(weights=f"of step {step}", before=before, after=after)
        run = record_run(config, outcome, flow=NIGHTLY)
        nights.append((run, run.stages["evaluate_after"].artifact))
    (first, own), (_, after) = nights
    said = since_first_night(tmp_path, "arith_cpu", after)
    assert said.startswith("not significantly different from the first night, ")
    assert said.endswith(f"{first.folder.name[:8]} (+25.0 points, p 0.5)")
    assert since_first_night(tmp_path, "arith_cpu", own) == ""  # one measurement
    assert since_first_night(tmp_path, "other", after) == ""
    shown = render_markdown(
        make_report(compare(own, after), [], Provenance(facts={"since the first night": said}))
    )
    assert f"Tonight's model is {said}." in " ".join(shown.split())
    change = {"difference": -0.1, "p": 0.01}
    assert describe_change(change, "last night") == "worse than last night (-10.0 points, p 0.01)"
