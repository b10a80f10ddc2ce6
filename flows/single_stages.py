"""One flow per stage: the chain's task, with its inputs from the store."""

from typing import Any

from flows.config import load_config
from flows.recipe_flow import DEFAULT_CONFIG, ConfigPath, Overrides, Side, recipe_flow
from tasks.chain import (
    evaluate_model,
    fetch_model,
    merge_checkpoint,
    prepare_data,
    train_policy,
    write_report,
)
from tasks.links import label_of, link_of
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.report import take_columns
from tasks.runs.run import Run


@recipe_flow("prepare-data")
def prepare(
    config: ConfigPath = DEFAULT_CONFIG, overrides: Overrides = (), force: bool = False
) -> str:
    """Prepare a recipe's training and held-out problems."""
    with Run.start(load_config(config, overrides), "prepare-data", ["prepare_data"] * force) as run:
        return prepare_data(run).path


@recipe_flow("fetch-model")
def fetch(
    config: ConfigPath = DEFAULT_CONFIG,
    overrides: Overrides = (),
    side: Side = "",
    force: bool = False,
) -> str:
    """Fetch a recipe's initial model, or a baseline."""
    settings = load_config(config, overrides)
    label = label_of(settings, "fetch_model", side)
    with Run.start(settings, "fetch-model", [label] * force) as run:
        needs_data = "prepare_data" in link_of(run.config, label).needs
        return fetch_model(run, run.take("prepare_data") if needs_data else None, label).path


@recipe_flow("train-policy")
def train(
    config: ConfigPath = DEFAULT_CONFIG, overrides: Overrides = (), force: bool = False
) -> str:
    """Train a recipe's policy with DAPO, using data and model from the store."""
    with Run.start(load_config(config, overrides), "train-policy", ["train_policy"] * force) as run:
        return train_policy(run, run.take("prepare_data"), run.take("fetch_model")).path


@recipe_flow("merge-checkpoint")
def merge(
    config: ConfigPath = DEFAULT_CONFIG,
    overrides: Overrides = (),
    side: Side = "",
    force: bool = False,
) -> str:
    """Merge a recipe's trained shards, or those of one step, into a model folder."""
    settings = load_config(config, overrides)
    label = label_of(settings, "merge_checkpoint", side)
    with Run.start(settings, "merge-checkpoint", [label] * force) as run:
        step = int(side.removeprefix("step_")) if side else None
        return merge_checkpoint(run, run.take("train_policy"), label, step).path


@recipe_flow("evaluate-model")
def evaluate(
    config: ConfigPath = DEFAULT_CONFIG,
    overrides: Overrides = (),
    side: Side = "after",
    force: bool = False,
) -> str:
    """Evaluate a recipe's model on all held-out problems: before, after, a baseline, or step_N."""
    settings = load_config(config, overrides)
    label = label_of(settings, "evaluate_model", side)
    with Run.start(settings, "evaluate-model", [label] * force) as run:
        data, *models = map(run.take, link_of(settings, label).needs)
        return evaluate_model(run, data, models[0] if models else None, label).path


@recipe_flow("compare")
def compare(config: ConfigPath = DEFAULT_CONFIG, overrides: Overrides = ()) -> str:
    """Write the report comparing a recipe's two evaluations in the store."""
    with Run.start(load_config(config, overrides), "compare") as run:
        before, after = run.take("evaluate_before"), run.take("evaluate_after")
        write_report(run, before, after, run.take("train_policy"), take_columns(run))
        return str(run.folder / REPORT_FOLDER)


STAGE_FLOWS: dict[str, Any] = {
    flow.name: flow for flow in (prepare, fetch, train, merge, evaluate, compare)
}
