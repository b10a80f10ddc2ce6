"""One flow per stage: the chain's task, with its inputs from the store."""

from prefect import Flow

from flows.config import load_config
from flows.recipe_flow import DEFAULT_CONFIG, Overrides, Side, recipe_flow
from tasks import chain
from tasks.execution.task import StageTask
from tasks.links import label_of, link_of
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.report import take_columns
from tasks.runs.run import Run
from tasks.stages import BY_COMMAND


def stage_flow(task: StageTask[...]) -> Flow[..., str]:
    """Return the flow of one stage; its output is the path of the artifact."""

    def run_stage(
        config: str = DEFAULT_CONFIG,
        overrides: Overrides = (),
        side: Side = "",
        force: bool = False,
    ) -> str:
        settings = load_config(config, overrides)
        label = label_of(settings, stage.name, side)
        with Run.start(settings, stage.command, [label] * force) as run:
            needs = link_of(run.config, label).needs
            return task(run, *map(run.take, needs), label=label).path

    stage = BY_COMMAND[task.name]
    run_stage.__doc__ = stage.about
    return recipe_flow(stage.command)(run_stage)


prepare_data = stage_flow(chain.prepare_data)
fetch_model = stage_flow(chain.fetch_model)
train_policy = stage_flow(chain.train_policy)
merge_checkpoint = stage_flow(chain.merge_checkpoint)
evaluate_model = stage_flow(chain.evaluate_model)


@recipe_flow("compare")
def compare(config: str = DEFAULT_CONFIG, overrides: Overrides = ()) -> str:
    """Write the report comparing a recipe's two evaluations in the store."""
    with Run.start(load_config(config, overrides), "compare") as run:
        before, after = run.take("evaluate_before"), run.take("evaluate_after")
        chain.write_report(run, before, after, run.take("train_policy"), take_columns(run))
        return str(run.folder / REPORT_FOLDER)


STAGE_FLOWS: dict[str, Flow[..., str]] = {
    flow.name: flow
    for flow in (prepare_data, fetch_model, train_policy, merge_checkpoint, evaluate_model, compare)
}
