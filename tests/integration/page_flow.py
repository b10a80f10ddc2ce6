"""A small chain of our real tasks, and stages that fail in the ways stages do, for a test of
Prefect's page.

python -m tests.integration.page_flow FOLDER WEBHOOK_URL
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow

from flows.config import load_config
from flows.notify import report_failure, report_result
from flows.recipe_flow import complete_page
from tasks.artifacts.artifact import Artifact
from tasks.chain import fetch_model, prepare_data, write_report
from tasks.execution.page import TrainingProgress
from tasks.execution.progress import following
from tasks.execution.task import RETRIED, stage_task
from tasks.links import link_of
from tasks.processes.child import run_command
from tasks.runs.report import Columns
from tasks.runs.run import Run
from tests.evaluations import write_results
from tests.tiny_models import build_tiny_qwen3

RETRIED["retry_delay_seconds"][:] = [0.2, 0.3, 0.4]
DIES_ONCE = """
import json, os, pathlib, sys, time
if not pathlib.Path("died").exists():
    pathlib.Path("died").touch()
    print("the engine is lost")
    os.kill(os.getpid(), 9)
with open("metrics.jsonl", "w") as file:
    for step in range(1, 13):
        numbers = {"sampler/accuracy": step / 3, "actor/entropy": None, "perf/throughput": 123456.4}
        file.write(json.dumps({"step": step, "wall_time": time.time(), **numbers}) + "\\n")
        file.flush()
"""
REFUSED = "print('DataError: no rows'); raise SystemExit(2)"
STUCK = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("kept a checkpoint")))
print("at it", flush=True)
time.sleep(600)
"""


@stage_task("train-policy")
def train_policy(
    run: Run, data: Artifact, model: Artifact, code: str, label: str = "train_policy"
) -> Artifact:
    key = link_of(run.config, label).key(data, model)
    key = replace(key, inputs={**key.inputs, "code": code})

    def build(folder: Path) -> dict[str, Any]:
        progress = TrainingProgress(run, label, folder)
        log_path = run.store.log_path(key.stage, key.key)
        command = ["env", "-C", str(folder), sys.executable, "-c", code]
        with following(progress.path, progress.on_rows):
            run_command(command, log_path=log_path, label=label)
        return {"step": 12, "sampler/accuracy": 4.00004}

    return run.produce(label, key, build)


def evaluate(run: Run, label: str, data: Artifact, model: Artifact, outcomes: str) -> Artifact:
    def build(folder: Path) -> dict[str, Any]:
        folder.rmdir()
        write_results(folder, outcomes)
        return {}

    return run.produce(label, link_of(run.config, label).key(data, model), build)


@flow(name="seen", on_completion=[complete_page], on_failure=[complete_page, report_failure])
def seen(config: str, overrides: tuple[str, ...], code: str) -> None:
    settings = load_config(config, overrides)
    with Run.start(settings) as run:
        data = prepare_data(run)
        model = fetch_model(run, data)
        training = train_policy(run, data, model, code)
        before = evaluate(run, "evaluate_before", data, model, "rwww")
        after = evaluate(run, "evaluate_after", data, training, "rrrw")
        report = write_report(run, before, after, training, Columns())
    report_result(run, report, settings.flow.webhook)


if __name__ == "__main__":
    recipe, folder, webhook = "configs/arith_cpu.yaml", Path(sys.argv[1]), sys.argv[2]
    build_tiny_qwen3(folder / "model")
    changes: tuple[str, ...] = (f"store.path={folder / 'store'}", f"flow.webhook.url={webhook}")
    changes += ("model.source=path", f"model.path={folder / 'model'}")
    changes += ("data.arithmetic.num_train=128", "data.arithmetic.num_eval=24")
    changes += ("train.total_steps=12",)
    seen(recipe, changes, DIES_ONCE)
    seen(recipe, changes, DIES_ONCE)
    seen(recipe, changes, REFUSED, return_state=True)
    seen(recipe, (*changes, "flow.time_limits.train_policy_hours=0.002"), STUCK, return_state=True)
