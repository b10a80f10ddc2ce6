"""What a run would do: each stage's key, and whether its artifact is there. Runs no stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dapo_core.config import Config
from tasks.artifacts import Artifact, ArtifactStore, StageKey
from tasks.stages import (
    EVALUATE_MODEL,
    FETCH_MODEL,
    MERGE_CHECKPOINT,
    PREPARE_DATA,
    TRAIN_POLICY,
    evaluate_model_inputs,
    fetch_model_inputs,
    merge_checkpoint_inputs,
    prepare_data_inputs,
    train_policy_inputs,
)


@dataclass(frozen=True)
class PlannedStage:
    """One stage of the chain as a run would find it."""

    label: str
    state: str  # "cached", "resumes" or "runs"
    key: str | None  # None while an input is not built
    waits_for: str | None  # the stage whose output the key needs
    seconds: float | None  # what building the cached artifact took


class _Planner:
    def __init__(self, config: Config) -> None:
        self.store = ArtifactStore(config.store.path)
        self.stages: list[PlannedStage] = []

    def cached(self, label: str, key: StageKey) -> Artifact | None:
        """Plan a stage whose inputs are there; returns its artifact when that is there too."""
        artifact = self.store.lookup(key.stage, key.key) if Path(self.store.root).exists() else None
        started = self.store.working_directory(key.stage, key.key).exists()
        state = "cached" if artifact else "resumes" if started else "runs"
        seconds = artifact.manifest()["seconds"] if artifact else None
        self.stages.append(PlannedStage(label, state, key.key, None, seconds))
        return artifact

    def waiting(self, label: str, waits_for: str) -> None:
        self.stages.append(PlannedStage(label, "runs", None, waits_for, None))


def plan_chain(config: Config) -> list[PlannedStage]:
    """The stages of dapo-full in order; the report is written in each run and has no key."""
    plan = _Planner(config)
    data = plan.cached("prepare_data", PREPARE_DATA.key(config, prepare_data_inputs(config)))
    model = training = merged = None
    if data:
        model = plan.cached("fetch_model", FETCH_MODEL.key(config, fetch_model_inputs(config, data)))
    else:
        plan.waiting("fetch_model", "prepare_data")
    if data and model:
        plan.cached("evaluate_before", EVALUATE_MODEL.key(config, evaluate_model_inputs(config, data, model)))
        training = plan.cached("train_policy", TRAIN_POLICY.key(config, train_policy_inputs(config, data, model)))
    else:
        plan.waiting("evaluate_before", "fetch_model")
        plan.waiting("train_policy", "fetch_model")
    if training:
        merged = plan.cached("merge_checkpoint", MERGE_CHECKPOINT.key(config, merge_checkpoint_inputs(training)))
    else:
        plan.waiting("merge_checkpoint", "train_policy")
    if data and merged:
        plan.cached("evaluate_after", EVALUATE_MODEL.key(config, evaluate_model_inputs(config, data, merged)))
    else:
        plan.waiting("evaluate_after", "merge_checkpoint")
    return plan.stages
