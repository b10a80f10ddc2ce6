"""The whole chain as one Prefect flow."""

from typing import Any

from prefect.states import Completed

from flows.config import WebhookConfig, load_config
from flows.notify import report_result
from flows.recipe_flow import DEFAULT_CONFIG, Overrides, recipe_flow
from tasks.artifacts.artifact import Artifact
from tasks.chain import (
    evaluate_model,
    fetch_model,
    merge_checkpoint,
    prepare_data,
    train_policy,
    write_report,
)
from tasks.links import BASELINE_EVALUATION, BASELINE_MODEL
from tasks.preflight.run import require_fetched, require_ready
from tasks.runs.report import Columns
from tasks.runs.run import Run
from tasks.runs.signal import require_signal


@recipe_flow("dapo-full")
def dapo_full(config: str = DEFAULT_CONFIG, overrides: Overrides = ()) -> dict[str, Any]:
    """Train a model with DAPO and report whether it got better."""
    settings = load_config(config, overrides)
    require_ready(settings)
    with Run.start(settings) as run:
        return outcome(run_chain(run, settings.flow.webhook))


def run_chain(run: Run, webhook: WebhookConfig, skips_if_locked: bool = False) -> dict[str, Any]:
    """Run every stage, then the report; `skips_if_locked` raises RunSkipped beside a training.

    A plain function shared by two flows, because a subflow costs Prefect 1.2 s.
    """
    data = prepare_data(run)
    model = fetch_model(run, data)
    require_fetched(run.config, data, model)
    before = evaluate_model(run, data, model, "evaluate_before")
    require_signal(run, data, model, before)
    columns = Columns()
    evaluate_baselines(run, data, columns)
    training = train_policy(run, data, model, skips_if_locked=skips_if_locked)
    merged = merge_checkpoint(run, training)
    after = evaluate_model(run, data, merged, "evaluate_after")
    evaluate_checkpoints(run, data, training, columns)
    report = write_report(run, before, after, training, columns)
    report_result(run, report, webhook)
    return {"run": str(run.folder), "verdict": report["verdict"], "is_failed": report["is_failed"]}


def outcome(result: dict[str, Any]) -> Any:
    """Return the flow's result, or a state named GateFailed for the Prefect UI if a gate failed."""
    if not result["is_failed"]:
        return result
    return Completed(name="GateFailed", message=result["verdict"], data=result)


def evaluate_baselines(run: Run, data: Artifact, columns: Columns) -> None:
    """Evaluate the models in evaluate.baselines, before training takes the devices."""
    for baseline in run.config.evaluate.baselines:
        with columns.one(baseline.name):
            model = None
            if baseline.base_url is None:
                model = fetch_model(run, None, f"{BASELINE_MODEL}{baseline.name}")
            label = f"{BASELINE_EVALUATION}{baseline.name}"
            columns.baselines[baseline.name] = evaluate_model(run, data, model, label)


def evaluate_checkpoints(run: Run, data: Artifact, training: Artifact, columns: Columns) -> None:
    """Evaluate the models in evaluate.checkpoints."""
    for step in run.config.checkpoint_steps:
        with columns.one(f"step {step}"):
            merged = merge_checkpoint(run, training, f"merge_step_{step}")
            columns.checkpoints[step] = evaluate_model(run, data, merged, f"evaluate_step_{step}")
