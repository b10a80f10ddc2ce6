"""What a plan says a run would do and why, compared with earlier runs of the same recipe."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_core.memory.devices import describe_bytes
from dapo_core.memory.plan import disk_plan
from flows.cli import app
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.artifacts.store import ArtifactStore
from tasks.links import link_of
from tasks.preflight import machine
from tasks.preflight.finding import FAIL, OK, Finding, Findings
from tasks.preflight.model import ModelFacts
from tasks.runs.history import differences_of
from tasks.runs.plan import PlannedStage, plan_chain
from tasks.runs.run import Run
from tests.recorded_runs import LABELS, SMALL, Outcome, record_run, small_config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of the whole chain, for tests that do not modify it."""
    return record_run(small_config(tmp_path_factory.mktemp("plan") / "store"))


def copied(recorded: Run, folder: Path) -> Path:
    """A copy of the store with that run."""
    return Path(shutil.copytree(recorded.store.root, folder / "store", symlinks=True))


def planned(store: Path, *overrides: str) -> dict[str, PlannedStage]:
    return {stage.label: stage for stage in plan_chain(small_config(store, *overrides))}


def states(plan: Mapping[str, PlannedStage]) -> list[str]:
    return [stage.state for stage in plan.values()]


def test_a_second_run_is_fully_cached(recorded: Run) -> None:
    plan = planned(recorded.store.root)
    assert states(plan) == ["cached"] * 6
    assert all(stage.why() == "" and stage.seconds is not None for stage in plan.values())


def test_a_changed_key_is_shown_with_both_values(recorded: Run) -> None:
    plan = planned(recorded.store.root, "algorithm.clip_ratio_high=0.3", "merge.dtype=bfloat16")
    assert states(plan) == ["cached", "cached", "cached", "stale", "stale", "stale"]
    assert [stage.why() for stage in plan.values()][3:] == [
        "algorithm.clip_ratio_high 0.28 -> 0.3",
        "waits for train_policy; merge.dtype keep -> bfloat16",
        "waits for merge_checkpoint",
    ]
    assert [stage.waits_for for stage in plan.values()][3:] == [
        None,
        "train_policy",
        "merge_checkpoint",
    ]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("versions", {"torch": "0.1"}, "torch 0.1 -> "),
        ("code_digest", "0" * 64, "its code changed"),
        ("inputs", {"model": "0" * 64}, "input model changed"),
        ("inputs", {"former": "0" * 64}, "input former is no longer used"),
        ("config", {"train": {}}, "train.total_steps (unset) -> 60"),
    ],
)
def test_changed_code_packages_and_inputs_are_named(
    recorded: Run, tmp_path: Path, part: str, value: Any, said: str
) -> None:
    """Simulates an earlier version: another key, and other parts in the manifest."""
    store = copied(recorded, tmp_path)
    [manifest] = (store / "train_policy").glob("*/1/manifest.json")
    content = json.loads(manifest.read_text())
    content["key"] = "f" * 64
    content[part] = {**content[part], **value} if isinstance(value, dict) else value
    if part == "config":
        del content["config"]["train"]
    manifest.write_text(json.dumps(content))
    manifest.parent.parent.rename(store / "train_policy" / ("f" * 16))
    [record] = (store / "runs").glob("*/run.json")
    text = record.read_text().replace(recorded.stages["train_policy"].key, "f" * 64)
    record.write_text(text.replace(manifest.parent.parent.name, "f" * 16))
    stage = planned(store)["train_policy"]
    assert stage.state == "stale"
    assert said in stage.why(None)
    assert len(stage.changes) == 1 or part == "config"


def test_removed_artifacts_are_reported(recorded: Run, tmp_path: Path) -> None:
    store = copied(recorded, tmp_path)
    shutil.rmtree(store / "train_policy")
    plan = planned(store)
    assert (plan["train_policy"].state, plan["train_policy"].why()) == (
        "runs",
        "its artifact is gone",
    )
    assert plan["merge_checkpoint"].state == "stale"
    # does not make the other stale
    record_run(small_config(store, "run.seed=3"), labels=("prepare_data",))
    shutil.rmtree(
        Path(recorded.stages["prepare_data"].artifact.replace(str(recorded.store.root), str(store)))
    )
    data = planned(store)["prepare_data"]
    assert (data.state, data.why()) == ("runs", "its artifact is gone")


def test_stages_that_were_never_built_are_planned_to_run(recorded: Run, tmp_path: Path) -> None:
    assert {stage.why() for stage in planned(tmp_path / "none").values()} >= {"never built"}
    assert states(planned(tmp_path / "none")) == ["runs"] * 6
    # Runs of another name say nothing about this one.
    plan = planned(recorded.store.root, "run.name=other", "train.total_steps=61")
    assert (plan["train_policy"].state, plan["train_policy"].why()) == ("runs", "never built")
    assert (plan["merge_checkpoint"].state, plan["merge_checkpoint"].why()) == (
        "runs",
        "waits for train_policy",
    )


def test_an_unfinished_attempt_resumes(recorded: Run, tmp_path: Path) -> None:
    store = copied(recorded, tmp_path)
    stage = planned(store, "train.total_steps=61")["train_policy"]
    assert stage.key is not None
    (ArtifactStore(store).key_folder("train_policy", stage.key) / "1.partial").mkdir(parents=True)
    stage = planned(store, "train.total_steps=61")["train_policy"]
    assert stage.state == "resumes"
    assert stage.why() == "an attempt was not finished; train.total_steps 60 -> 61"


def test_a_waiting_stage_names_a_changed_file(recorded: Run, tmp_path: Path) -> None:
    store = copied(recorded, tmp_path)
    prompt, scorer = tmp_path / "prompt.txt", tmp_path / "scorer.py"
    prompt.write_text("Q: {problem}")
    scorer.write_text("def compute_score(**_):\n    return 1\n")
    named = (f"evaluate.prompt={prompt}", f"custom_reward.path={scorer}")
    record_run(small_config(store, *named))
    prompt.write_text("{problem}?")
    scorer.write_text("def compute_score(**_):\n    return 2\n")
    plan = planned(store, *named, "run.seed=1")
    assert "input prompt_template changed" in plan["evaluate_after"].changes
    assert "input custom_reward changed" in plan["train_policy"].changes


def test_a_stage_being_built_is_not_shown_as_unfinished(recorded: Run, tmp_path: Path) -> None:
    store = copied(recorded, tmp_path)
    link = link_of(small_config(store, "train.total_steps=61"), "train_policy")
    key = link.key(*map(recorded.take, link.needs))
    seen: list[PlannedStage] = []

    def build(folder: Path) -> dict[str, int]:
        seen.append(planned(store, "train.total_steps=61")["train_policy"])
        return {"size": (folder / "weights").write_text("trained")}

    ArtifactStore(store).produce(key, build, resumable=True)
    assert seen[0].state == "building"
    assert seen[0].note.startswith(f"by pid {os.getpid()} on ")


def test_planning_reports_a_damaged_artifact_without_moving_it(
    recorded: Run, tmp_path: Path
) -> None:
    store = copied(recorded, tmp_path)
    [weights] = (store / "train_policy").glob("*/1/weights")
    weights.write_text("trainee")  # as long as "trained"
    files = sorted((path, path.lstat().st_mtime_ns) for path in store.rglob("*/1/*"))
    stage = planned(store)["train_policy"]
    assert stage.state == "damaged"
    assert stage.why().startswith("weights has sha256 ")
    assert planned(store)["merge_checkpoint"].why() == "waits for train_policy"
    assert sorted((path, path.lstat().st_mtime_ns) for path in store.rglob("*/1/*")) == files


def test_stages_after_a_forced_training_are_stale(recorded: Run, tmp_path: Path) -> None:
    config = small_config(copied(recorded, tmp_path))
    again = record_run(
        config, Outcome(weights="other"), ("train_policy",), "train-policy", ("train_policy",)
    )
    assert not again.stages["train_policy"].cached
    plan = planned(again.store.root)
    assert states(plan) == ["cached", "cached", "cached", "cached", "stale", "stale"]
    assert plan["merge_checkpoint"].why() == "input training changed"
    assert plan["evaluate_after"].why() == "waits for merge_checkpoint"
    # The same bytes again change nothing.
    config = small_config(copied(recorded, tmp_path / "same"))
    record_run(config, None, ("train_policy",), "train-policy", ("train_policy",))
    assert states(planned(Path(config.store.path))) == ["cached"] * 6


@pytest.mark.slow
def test_the_command_prints_a_table_all_changes_or_json(recorded: Run) -> None:
    changes = ("train.total_steps=61", "run.seed=0", "train.weight_decay=0.1")
    overrides = (*SMALL, f"store.path={recorded.store.root}", *changes)
    words = [word for override in overrides for word in ("--set", override)]
    command = ["plan", str(PROJECT_ROOT / "configs" / "arith_cpu.yaml"), *words]

    def plan(*options: str) -> str:
        done = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in plan().splitlines()
        if "│" in line
    ]
    assert [row[0] for row in rows] == list(LABELS)
    assert rows[3][1:3] == ["stale", "train.total_steps 60 -> 61 +1 more"]
    assert rows[4][1:4] == ["stale", "waits for train_policy", "after train_policy"]
    assert "train.total_steps 60 -> 61; train.weight_decay 0.0 -> 0.1" in plan("--all")
    shown_json = json.loads(plan("--json"))
    assert [stage["label"] for stage in shown_json] == list(LABELS)
    assert shown_json[3]["changes"] == [
        "train.total_steps 60 -> 61",
        "train.weight_decay 0.0 -> 0.1",
    ]


def test_secrets_are_neither_shown_nor_reported_as_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    secret = "serve.extra_args=[--header, hf_very-secret]"
    record_run(
        small_config(tmp_path, secret), labels=("prepare_data", "fetch_model", "evaluate_before")
    )
    assert planned(tmp_path, secret)["evaluate_before"].state == "cached"
    changes = planned(tmp_path, secret, "serve.eager=false")["evaluate_before"].changes
    assert changes == ("serve.eager true -> false",)
    [change] = planned(tmp_path)["evaluate_before"].changes
    assert change == "serve.extra_args ['--header', '[redacted]'] -> []"


def test_the_webhook_url_is_not_shown() -> None:
    configs = [
        {"flow": {"webhook": {"url": url}}}
        for url in (None, "https://hooks.example/a", "https://hooks.example/b")
    ]
    changes = [*differences_of(*configs[:2]), *differences_of(*configs[1:])]
    assert list(map(str, changes)) == [
        "flow.webhook.url null -> (secret)",
        "flow.webhook.url (secret) -> (secret)",
    ]


@pytest.mark.slow
def test_a_plan_lists_the_benchmarks_to_evaluate(tmp_path: Path) -> None:
    alone = small_config(tmp_path)
    record_run(alone, labels=("prepare_data", "fetch_model", "evaluate_before"))
    suite = "evaluate.benchmarks=[arithmetic, {set: arithmetic, name: sampled, num_samples: 2}]"
    record_run(small_config(tmp_path, suite), labels=("prepare_data",))
    plan = planned(tmp_path, suite)
    assert states(plan)[:3] == ["cached", "cached", "stale"]
    before = plan["evaluate_before"]
    assert before.note == "evaluates sampled; in the store arithmetic"
    assert "evaluate.benchmarks.sampled.num_samples (unset) -> 2" in before.changes
    # A benchmark more: its problems are not prepared yet, and the model may depend on that.
    more = suite.replace("}]", "}, {set: arithmetic, name: cot, prompt: cot}]")
    plan = planned(tmp_path, more)
    assert plan["evaluate_before"].note == (
        # the run before asked data.eval, alone
        "waits for fetch_model; evaluates arithmetic, sampled, cot"
    )
    record_run(
        small_config(tmp_path, suite), labels=("prepare_data", "fetch_model", "evaluate_before")
    )
    plan = planned(tmp_path, more)
    assert plan["evaluate_before"].note.endswith(
        "evaluates sampled, cot; if the model changes also arithmetic"
    )


def test_disk_space_is_required_only_for_remaining_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that filled the disk continues once there is space for the rest, as do later
    stages.
    """
    config = small_config(tmp_path / "store")
    facts = ModelFacts(parameters=2**26)  # a checkpoint is 0.75 GiB, a merged model 0.125 or 0.25
    disk = disk_plan(config, facts.parameters)
    free = disk.num_bytes - disk.checkpoint
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    def said() -> Finding:
        machine._check_disk(config, facts, findings := Findings())
        return findings[-1]

    assert (said().status, said().check) == (FAIL, "disk")
    assert (
        f"; {disk.num_checkpoints} checkpoints and merged models take about "
        f"{describe_bytes(disk.num_bytes)}" in said().found
    )
    record_run(config, labels=("prepare_data", "fetch_model"))
    key = next(stage.key for stage in plan_chain(config) if stage.label == "train_policy")
    partial = ArtifactStore(config.store.path).key_folder("train_policy", str(key)) / "1.partial"
    partial.mkdir(parents=True)
    with (partial / "shard").open("wb") as shard:
        shard.truncate(disk.checkpoint)
    assert said().status == OK
    shutil.rmtree(partial)
    assert said().status == FAIL
    free = disk.merged
    record_run(config, labels=("train_policy",))
    assert said().status == OK
    free = 2**20
    record_run(config, labels=("merge_checkpoint",))
    assert said().found == f"1.0 MiB free in {config.store.path}"
