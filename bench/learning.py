"""Trains the CPU recipe whole, without one ingredient of DAPO at a time, and with each loss.

Writes docs/ablation.md.

Stages are built with the `dapo` commands of the chain into an artifact store: nothing finished is
repeated, an interrupted training continues, and a change of the training code starts it over.
Accuracy is that of greedy answers to the held-out set by the Hugging Face engine in process, which
needs no server and takes seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning_page import CURVES, FULL, VARIANTS, Job, Outcome, draw, render

if TYPE_CHECKING:
    from flows.config import Config
    from tasks.artifacts.artifact import Artifact
    from tasks.artifacts.stage_key import StageKey
    from tasks.artifacts.store import ArtifactStore

logger = logging.getLogger("learning")

RECIPE = "configs/arith_cpu.yaml"
EXAMPLE = """examples, the whole table on four cores, and a quick look at one comparison:
  .venv/bin/python bench/learning.py --parallel 2
  .venv/bin/python bench/learning.py --variants full token-mean --seeds 0 --steps 5
"""
ANSWERS_FILE = "answers.jsonl"


def main() -> None:
    """Run what is missing, then write the page and the plot."""
    arguments = _arguments()
    _print_lines()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that blocks are left and children ended
    variants = list(dict.fromkeys([FULL, *arguments.variants]))
    befores = [Job(None, seed, arguments.steps, arguments.store) for seed in arguments.seeds]
    trainings = [
        Job(name, seed, arguments.steps, arguments.store)
        for seed in arguments.seeds
        for name in variants
    ]
    started = time.monotonic()
    outcomes = _run_jobs(befores, arguments.parallel) + _run_jobs(trainings, arguments.parallel)
    logger.info("%d trainings after %.0f s", len(trainings), time.monotonic() - started)
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(outcomes, arguments.output / "ablation.png")
    page = arguments.output / "ablation.md"
    page.write_text(
        render(outcomes, shlex.join(["bench/learning.py", *sys.argv[1:]])), encoding="utf-8"
    )
    print(page.read_text(encoding="utf-8"))


def run_job(job: Job) -> Outcome:
    """Build what the job needs and is not in the store; runs in a process of its own."""
    _print_lines()
    from dapo_core.metrics.log import METRICS_FILE
    from eval.report.training import read_training_metrics, training_totals
    from flows.config import load_config
    from tasks.artifacts.store import ArtifactStore
    from tasks.data.layout import TRAIN_FILE
    from tasks.links import link_of

    config, store = load_config(RECIPE, job.overrides), ArtifactStore(job.store)
    key = link_of(config, "prepare_data").key()
    data = _produce(store, key, job, lambda folder: ["prepare-data", RECIPE, "--output", folder])
    rows = Path(data.path) / TRAIN_FILE
    key = link_of(config, "fetch_model").key(data)
    model = _produce(
        store, key, job, lambda folder: ["fetch-model", RECIPE, "--data", rows, "--output", folder]
    )
    if job.variant is None:
        return Outcome(
            job, *_answer(config, store, data, model), curves={}, generated_tokens=0, num_items=0
        )
    training, merged = _train(config, store, data, model, job)
    steps = read_training_metrics(Path(training.path) / METRICS_FILE)
    accuracy, answer_tokens = _answer(config, store, data, merged)
    return Outcome(
        job,
        accuracy,
        answer_tokens,
        curves={metric: [step.get(metric, math.nan) for step in steps] for metric in CURVES},
        generated_tokens=training_totals(steps)["tokens_generated"],
        num_items=config.data.arithmetic.num_eval,
    )


def _run_jobs(jobs: Sequence[Job], parallel: int) -> list[Outcome]:
    """Outcomes as they come; leaving early, by an error or a signal, ends the jobs and what they
    started.
    """
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(parallel, maxtasksperchild=1) as pool:
        for outcome in pool.imap_unordered(run_job, jobs):
            outcomes.append(outcome)
            logger.info(
                "%d of %d: %s, %.1f %% right",
                len(outcomes),
                len(jobs),
                outcome.job.label,
                100 * outcome.accuracy,
            )
    return outcomes


def _train(
    config: Config, store: ArtifactStore, data: Artifact, model: Artifact, job: Job
) -> tuple[Artifact, Artifact]:
    """The training and its policy as a model folder."""
    from tasks.data.layout import TRAIN_FILE
    from tasks.links import link_of

    key = link_of(config, "train_policy").key(data, model)
    paths = ["--data", Path(data.path) / TRAIN_FILE, "--model", model.path]
    training = _produce(
        store,
        key,
        job,
        lambda folder: ["train", RECIPE, *paths, "--output", folder],
        resumable=True,
    )
    key = link_of(config, "merge_checkpoint").key(training)
    return training, _produce(store, key, job, lambda folder: ["merge", training.path, folder])


def _produce(
    store: ArtifactStore, key: StageKey, job: Job, words: Any, resumable: bool = False
) -> Artifact:
    """The artifact of the key, made if need be by the `dapo` command that `words(folder)` gives."""
    from tasks.execution.command import METRICS_LINE
    from tasks.processes.child import dapo_command, run_command

    def tell(line: str) -> None:
        if line.strip() and not line.startswith(METRICS_LINE):
            logger.info("%s: %s", job.label, line.rstrip())

    def build(folder: Path) -> Mapping[str, Any]:
        command = [*words(folder)]
        if command[0] != "merge":  # which takes no recipe
            command += [word for override in job.overrides for word in ("--set", override)]
        log_path = store.log_path(key.stage, key.key)
        run_command(dapo_command(*command), log_path=log_path, label=key.stage, on_line=tell)
        return {}

    return store.produce(key, build, resumable=resumable)[0]


def _answer(
    config: Config, store: ArtifactStore, data: Artifact, model: Artifact
) -> tuple[float, float]:
    """Accuracy and mean response tokens of a model's greedy answers to the held-out items."""
    from tasks.stage_inputs import evaluate_model_inputs
    from tasks.stages import Stage

    stage = Stage(
        name="bench_learning_answers",
        about="Answer the held-out problems.",
        sections=("evaluate.max_response_tokens",),
        code=("dapo_core/engines", "eval/problems", "eval/answers"),
        packages=("torch", "transformers"),
    )
    key = stage.key(config, evaluate_model_inputs(config, data, model))
    answers, _ = store.produce(key, lambda folder: _write_answers(config, data, model, folder))
    rows = [
        json.loads(line) for line in (Path(answers.path) / ANSWERS_FILE).read_text().splitlines()
    ]
    return (
        statistics.fmean(row["verdict"] == "right" for row in rows),
        statistics.fmean(row["num_tokens"] for row in rows),
    )


def _write_answers(
    config: Config, data: Artifact, model: Artifact, folder: Path
) -> Mapping[str, Any]:
    from dapo_core.engines.base import EngineSettings, GenerationRequest
    from dapo_core.engines.factory import build_engine
    from dapo_core.model.inputs import ModelInput
    from dapo_core.model.pretrained import load_tokenizer
    from eval.answers.grading import grade
    from eval.problems.evaluation_sets import load_set
    from tasks.data.layout import EVAL_FILE

    limit = config.evaluate.max_response_tokens
    assert limit is not None  # the recipe sets it
    items = load_set(Path(data.path) / EVAL_FILE).items
    tokenizer = load_tokenizer(model.path)
    chats = [list(item.prompt) for item in items if not isinstance(item.prompt, str)]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    settings = EngineSettings(
        dtype="float32",
        max_model_tokens=max(map(len, prompts)) + limit,
        max_response_tokens=limit,
        max_num_seqs=256,
        temperature=1.0,
        top_p=1.0,
        top_k=1,  # greedy
        memory_bytes=1024**3,
        memory_utilization=0.8,
        threads=1,
    )
    engine = build_engine("hf", model.path, settings, seed=0)
    engine.submit(
        [GenerationRequest(str(n), ModelInput(tuple(ids)), seed=0) for n, ids in enumerate(prompts)]
    )
    with (folder / ANSWERS_FILE).open("w", encoding="utf-8") as file:
        while engine.num_unfinished():
            for response in engine.step():
                item = items[int(response.request_id)]
                text = str(
                    tokenizer.decode(response.response_ids.tolist(), skip_special_tokens=True)
                )
                verdict = grade(text, response.finish_reason, item.gold).verdict
                row = {
                    "id": item.id,
                    "verdict": verdict,
                    "num_tokens": len(response.response_ids),
                    "text": text,
                }
                file.write(json.dumps(row) + "\n")
    engine.close()
    return {}


def _print_lines() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(logging.INFO)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = [name for name in VARIANTS if name != FULL]
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=others,
        metavar="VARIANT",
        help=f"ingredients to remove, and losses, each alone (default: {' '.join(others)})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="at least 2 for intervals (default: 0 1 2)",
    )
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's)")
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="trainings at a time, of 3 threads each (default: 1)",
    )
    parser.add_argument(
        "--store",
        default=".dapo",
        help="artifact store; the demo's is shared (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("docs"), help="folder of ablation.md (default: docs)"
    )
    arguments = parser.parse_args()
    if len(set(arguments.seeds)) != len(arguments.seeds) or len(arguments.seeds) > 10:
        parser.error("--seeds takes up to 10 different numbers")
    return arguments


if __name__ == "__main__":
    main()
