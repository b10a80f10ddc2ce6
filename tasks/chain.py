"""The stages of the chain as Prefect tasks, each returning its artifact."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import task_run

from dapo_core.checkpoint.folder import CHECKPOINTS, checkpoint_folders
from dapo_core.checkpoint.manifest import shard_digests
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.folder import MERGE_MANIFEST
from durable import read_json_lines
from eval.requests.run import evaluate_all
from tasks.adopted import adopt_checkpoint, adopted_weights
from tasks.artifacts.artifact import Artifact, Output, algorithm_for
from tasks.artifacts.references import COMMIT
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE
from tasks.data.prepare import build_dataset
from tasks.evaluation.served_model import served_folder, served_model
from tasks.evaluation.settings import limits_of
from tasks.execution.command import link_log, run_dapo
from tasks.execution.page import CommandProgress, StageProgress, TrainingProgress, show_report
from tasks.execution.task import retried_task, stage_task
from tasks.execution.training_lock import hold, training_lock_path
from tasks.fetched_model import fetched_metrics, link_known_files, link_model_folder
from tasks.links import Link, baseline_of, link_of, step_checkpoint, step_of
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.report import Columns, report_run, send_report
from tasks.runs.run import Run
from tasks.runs.suite import benchmarks_of, link_stored_results, suite_metrics
from tasks.serve_model.command import served_name
from tasks.serve_model.servers import Server, serve_model
from tasks.stage_inputs import benchmark_files, validates

logger = logging.getLogger(__name__)

HEADLINE = "step critic/score/mean sampler/accuracy response_length/mean perf/throughput".split()


@stage_task("prepare-data")
def prepare_data(run: Run, label: str = "prepare_data") -> Artifact:
    """Prepare the training and held-out problems: train.parquet and eval.parquet."""
    key = link_of(run.config, label).key()
    return run.produce(label, key, lambda folder: build_dataset(run.config, folder))


@stage_task("fetch-model")
def fetch_model(run: Run, data: Artifact | None = None, label: str = "fetch_model") -> Artifact:
    """Build, link or fetch a Hugging Face model folder, for the policy or a baseline.

    Only a model that is built needs `data`. The next attempt resumes an interrupted download.
    """
    link = link_of(run.config, label)
    key, model = link.key(*([] if data is None else [data])), link.config.model

    def build(folder: Path) -> Mapping[str, Any]:
        if model.source == "path":
            return {"bytes": link_model_folder(model, folder)}
        arguments: list[str | Path] = ["fetch-model", run.config_of(link), "--output", folder]
        if data is not None and model.source == "recipe":
            arguments += ["--data", Path(data.path) / TRAIN_FILE]
        else:
            arguments += ["--commit", key.inputs[COMMIT]]
            link_known_files(run.store, key.stage, key.inputs, folder)
        progress_file = run.store.log_path(key.stage, key.key).with_suffix(".progress.jsonl")
        progress_file.unlink(missing_ok=True)  # of an earlier attempt
        arguments += ["--progress", progress_file]
        run_dapo(arguments, run, key, watch=CommandProgress(run, label, progress_file))
        return {} if model.source == "recipe" else fetched_metrics(model, key.inputs, folder)

    return run.produce(label, key, build)


@stage_task("evaluate-model")
def evaluate_model(
    run: Run, data: Artifact, model: Artifact | None = None, label: str = "evaluate_after"
) -> Artifact:
    """Evaluate one model, recorded as `label`: a results folder, or a suite of them.

    Without `model`, evaluates a baseline that is served elsewhere. A failed attempt keeps its
    answers, and the next one with the same key asks only the missing items. Stored results of
    single benchmarks are reused unless the stage is forced; if the store has all of them, no server
    is started.
    """
    link = link_of(run.config, label)
    key = link.key(data, *([] if model is None else [model]))
    if model is None:
        served_model(link.config, baseline_of(link)).remember()

    def build(folder: Path) -> Mapping[str, Any]:
        log_path = run.store.log_path(key.stage, key.key)
        link_log(run, log_path)
        with run.store.in_use():
            suite = benchmarks_of(
                run.store, link.stage, link.config, key.inputs, label in run.forced
            )
            link_stored_results(link.config, suite, folder)
        command = ""
        files = benchmark_files(link.config)
        asked = [
            (one, one.asked(Path(data.path, files[one.name])))
            for one in suite
            if one.stored is None
        ]
        if asked:
            items = [item for _, each in asked for item in each.items]
            pictures = max(len(item.images) for item in items)
            with served(link, model, log_path, pictures) as (server, digest, model_folder):
                missing = [one.benchmark(each, folder, model_folder) for one, each in asked]
                logger.info(
                    "%s serves %s; evaluating %d items", server.base_url, server.model, len(items)
                )
                evaluate_all(
                    missing,
                    server,
                    limits=limits_of(link.config.evaluate),
                    model_digest=digest,
                    on_progress=StageProgress(run, label).on_progress,
                )
            command = server.command
        return {**suite_metrics(link.config, suite, folder), "serve_command": command}

    return run.produce(label, key, build)


@contextlib.contextmanager
def served(
    link: Link, model: Artifact | None, log_path: Path, num_pictures: int
) -> Iterator[tuple[Server, str, Path | None]]:
    """Yield server, digest and folder of a model, or of the baseline behind `base_url`.

    `num_pictures` as in `on_this_device`.
    """
    if model is None:
        baseline = served_model(link.config, baseline_of(link))
        yield baseline.server, baseline.digest, served_folder(baseline.server)
        return
    name = served_name(model.digest)
    settings = link.config.served
    with serve_model(model.path, settings, log_path, name, num_pictures) as server:
        yield server, model.digest, Path(model.path)


@stage_task("train-policy")
def train_policy(
    run: Run,
    data: Artifact,
    model: Artifact,
    label: str = "train_policy",
    skips_if_locked: bool = False,
) -> Artifact:
    """Train: writes metrics.jsonl and checkpoints/step_NNNNNN. With adopt.folder, adopts that.

    If it is stopped, or this process ends, it writes a last checkpoint within flow.stop_seconds;
    the next attempt with the same key resumes from it. Waits while another training holds the lock.
    With `skips_if_locked` the first attempt raises RunSkipped instead; later attempts wait, so that
    no progress is lost.
    """
    attempt = task_run.run_count or 1
    key = link_of(run.config, label).key(data, model)
    if run.config.is_adopted:
        return run.produce(
            label, key, lambda folder: adopt_checkpoint(run.config, Path(model.path), folder)
        )

    def build(folder: Path) -> Output:
        arguments: list[str | Path] = ["train", run.config_path, "--quiet"]
        arguments += ["--data", Path(data.path) / TRAIN_FILE]
        arguments += ["--model", model.path, "--output", folder]
        if validates(run.config):
            arguments += ["--held-out", Path(data.path) / EVAL_FILE]
        arguments += resume_options(run.config.checkpoint.resume, attempt)
        arguments += keep_options(run.config)
        path, skips = training_lock_path(run.config), skips_if_locked and attempt == 1
        watch, grace_seconds = TrainingProgress(run, label, folder), run.config.flow.stop_seconds
        with hold(path, run.folder.name, key.key, skips) as lock:
            run_dapo(arguments, run, key, watch=watch, grace_seconds=grace_seconds, locks=[lock])
        return Output(last_metrics(folder), checkpoint_digests(folder))

    return run.produce(label, key, build)


def resume_options(resume: str, attempt: int) -> list[str]:
    """Options that let a retry resume the previous attempt although checkpoint.resume is `never`.

    A path needs no override: it is used only while the output has no checkpoint of its own.
    """
    return ["--set", "checkpoint.resume=auto"] if resume == "never" and attempt > 1 else []


def keep_options(config: ChainConfig) -> list[str]:
    """Options that keep the checkpoints to be evaluated."""
    steps = sorted({*config.checkpoint.keep_steps, *config.checkpoint_steps})
    return ["--set", f"checkpoint.keep_steps={steps}"] if steps else []


def checkpoint_digests(folder: Path) -> dict[str, str]:
    """Digests of the checkpoint shards by relative path, taken by the ranks while writing."""
    return {
        (checkpoint / name).relative_to(folder).as_posix(): f"blake3:{digest}"
        for checkpoint in checkpoint_folders(folder / CHECKPOINTS)
        for name, digest in shard_digests(checkpoint).items()
    }


def last_metrics(folder: Path) -> dict[str, float]:
    """Headline metrics of the last step, for the manifest."""
    last = read_json_lines(folder / METRICS_FILE)[-1]
    return {name: last[name] for name in HEADLINE if name in last}


@stage_task("merge-checkpoint")
def merge_checkpoint(run: Run, training: Artifact, label: str = "merge_checkpoint") -> Artifact:
    """Merge the final checkpoint, or that of one step, into a Hugging Face folder."""
    key, step = link_of(run.config, label).key(training), step_of(label)
    source = adopted_weights(training) if step is None else step_checkpoint(training, step)

    def build(folder: Path) -> Output:
        from dapo_core.merge.run import remove_leftovers

        merge = run.config.merge
        options = ["--checkpoint", merge.checkpoint if step is None else "latest"]
        options += ["--dtype", merge.dtype, "--max-shard-bytes", str(merge.max_shard_bytes)]
        remove_leftovers(folder.parent)
        run_dapo(["merge", source, folder, *options], run, key)
        files = json.loads((folder / MERGE_MANIFEST).read_text(encoding="utf-8"))["files"]
        digests = {
            name: f"blake3:{row['blake3']}"
            for name, row in files.items()
            if algorithm_for(name) == "blake3"
        }
        return Output(
            {"bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}, digests
        )

    return run.produce(label, key, build)


@retried_task("write-report")
def write_report(
    run: Run, before: Artifact, after: Artifact, training: Artifact, columns: Columns
) -> dict[str, Any]:
    """Write the before/after report, show it in the Prefect UI and send it to trackers."""
    report = report_run(run, before, after, training, columns)
    show_report(run, run.folder / REPORT_FOLDER, report["verdict"])
    send_report(run, training)
    return report
