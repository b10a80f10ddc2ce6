"""Compares this project's training with TRL's GRPOTrainer (loss_type="dapo") on the same work.

Both do one optimizer step of AdamW per batch, with the same prompts, numbers of responses, limits,
learning rate and score, without a reference model, at temperature 1, with the same gradient
checkpointing (as the recipe), all cores each. They run in turns, so that noise hits both, and only
what is between the first and the last step counts: those include start and checkpoint. TRL's steps
are timed from end to end, and its update is all but generating and scoring.

Cases:
  smollm2     a real model: --model and --data of configs/smollm2_cpu.yaml, or prepared by it
  uniform     2.6 million parameters, responses of 97 to 128 tokens, every length as likely
  long-tail   the same model, log-normal lengths up to 16 times the mean (bench/counting_model.py)

The models of the two small cases sample the lengths of their responses, so neither trainer sets
any, and a learning rate of 1e-9 keeps the distribution. Tokens of a step differ by chance: compare
tokens per second there, and steps of smollm2, where prompts are most of the work.

What is and is not the same:
- TRL generates with transformers, its default: vLLM 0.32 is newer than TRL 1.16 supports.
- TRL has float32 weights under bfloat16 autocast by default, this project bfloat16 copies of
  float32 weights. "bfloat16 weights" keeps weights and Adam's moments of TRL in bfloat16, so small
  updates are lost.
- TRL pads all responses of a batch to its longest, when it generates and when it updates, and
  starts the next step when the longest is done. `on-policy` here waits as long; the other rows
  train on some responses that older weights began, as TRL does not.
- This project scores in processes of its own, sends weights to an engine with checksums, compares
  engine and policy, and writes more metrics; TRL needs none of it in one process.
- The processes of this project spin for about 10 us at OpenMP barriers. TRL's threads spin for
  milliseconds by default, which costs it much of a busy machine; --brief-spinning is the same for
  both. Only a quiet machine gives ratios to quote.
- TRL's micro-batch is the whole batch, or 8 responses, its default, in rows of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
from counting_model import write_counting_model

from dapo_core.machine.environment import BRIEF_SPINNING
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.simulation.workload import NORMAL, log_normal
from durable import read_json_lines
from tasks.processes.child import dapo_command, run_command

EXAMPLE = """examples:
  .venv/bin/python bench/against_trl.py --trl-python TRL/bin/python --case uniform long-tail
  .venv/bin/python bench/against_trl.py --trl-python TRL/bin/python --case smollm2 \\
    --model MODEL --data train.parquet
TRL's environment, with this project's versions and without vLLM and torchvision:
  pip install --no-deps -r requirements/cpu-torch.txt
  pip install -c requirements/cpu.txt trl==1.16.0
"""
GROUP_SIZE = 8
NUM_TOKENIZED = 2000  # problems that the counting model's vocabulary is made of
TRAIN_ALIKE = (  # whatever the recipe says
    "model.chat_template=null",  # the model folder's, which TRL reads too
    "sampler.dynamic=false",
    f"rollout.group_size={GROUP_SIZE}",
    "reward.overlong.enabled=false",
    "train.warmup_steps=0",
    "train.weight_decay=0.0",
    "train.save_rollouts_every=0",
    "rollout.threads_per_worker=null",
    "train.threads_per_rank=null",
    "validation.every=0",
    f"custom_reward.path={Path(__file__).with_name('trl_run.py')}",
)
HEADERS = (
    "trainer",
    "s a step",
    "generate",
    "update",
    "sync",
    "prompt tokens",
    "response tokens",
    "longest",
    "response tokens/s",
    "times TRL's step rate",
    "times TRL's tokens/s",
)
ON_POLICY = {"on-policy": ("sampler.gen_prompts={num_prompts}", "sampler.window=0")}
Step = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """Work for both trainers; `ours` and `theirs` are the table's rows, by name."""

    recipe: str
    num_prompts: int
    max_response_tokens: int
    learning_rate: float
    responses_per_pass: int
    gradient_checkpointing: bool
    dtype: str
    ours: Mapping[str, Sequence[str]] = field(default_factory=lambda: ON_POLICY)
    theirs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"TRL": {}})
    chances: Sequence[float] = ()  # of 1, 2, ... response tokens; none: a model is given


def tail_chances(longest: int, mean: float) -> list[float]:
    """Return the chance of each length of log-normal ones; one response in 128 is the longest."""
    log_mean, sigma = log_normal(mean, longest, 1 / 128)
    below = [NORMAL.cdf((math.log(n) - log_mean) / sigma) for n in range(1, longest)]
    return [high - low for low, high in zip([0.0, *below], [*below, 1.0], strict=True)]


AHEAD = ("sampler.gen_prompts=48", "sampler.window=0.3")
UNIFORM = Case(
    recipe="configs/arith_cpu.yaml",
    num_prompts=16,
    max_response_tokens=128,
    learning_rate=1e-9,
    responses_per_pass=128,
    gradient_checkpointing=False,
    dtype="float32",
    theirs={"TRL": {}, "TRL, 8 responses a pass": {"responses_per_pass": 8}},
    chances=[0.0] * 96 + [1 / 32] * 32,
)
CASES = {
    "smollm2": Case(
        recipe="configs/smollm2_cpu.yaml",
        num_prompts=8,
        max_response_tokens=24,
        learning_rate=2e-5,
        responses_per_pass=64,
        gradient_checkpointing=True,
        dtype="bfloat16",
        theirs={"TRL": {}, "TRL, bfloat16 weights": {"weights": "bfloat16"}},
    ),
    "uniform": UNIFORM,
    "long-tail": replace(
        UNIFORM,
        max_response_tokens=400,
        chances=tail_chances(400, 25.0),
        ours={
            **ON_POLICY,
            "in line": AHEAD,
            "asynchronous": (*AHEAD, "rollout.schedule=asynchronous"),
        },
    ),
}


def main() -> None:
    """Run each case's trainers in turns; print a table per case."""
    arguments = _parser().parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores")
    for name in arguments.case:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            work = Work(case, arguments, Path(folder))
            found: dict[str, list[Step]] = {each: [] for each in (*case.theirs, *case.ours)}
            for number in range(arguments.rounds):
                for label, steps in found.items():
                    before = load()
                    run = work.train_theirs if label in case.theirs else work.train_ours
                    steps += run(label, number)[1:-1]
                    loads = f"load {before} before, {load()} after"
                    print(f"{name}, {label}, round {number + 1}: {loads}", flush=True)
        print(table(name, found, next(iter(case.theirs))), flush=True)


class Work:
    """Data, model and folder of a case."""

    def __init__(self, case: Case, arguments: argparse.Namespace, folder: Path) -> None:
        self.case, self.arguments, self.folder = case, arguments, folder
        self.num_steps = arguments.steps + 2
        data, self.model = arguments.data, arguments.model
        if data is None:
            self._stage("prepare-data", case.recipe, "--output", folder / "data")
            data = folder / "data" / "train.parquet"
        problems = pyarrow.parquet.read_table(data)
        rows = problems.slice(0, case.num_prompts * self.num_steps)
        self.data = folder / "prompts.parquet"  # each prompt once
        pyarrow.parquet.write_table(rows, self.data)
        if case.chances:
            self.model = folder / "model"
            texts = problems.slice(0, NUM_TOKENIZED).to_pylist()
            count = write_counting_model(texts, case.chances, self.model)
            print(f"a model of {count:,} parameters")
        elif self.model is None:
            self.model = folder / "model"
            words = ("--data", data, "--output", self.model)
            self._stage("fetch-model", case.recipe, *words)

    def train_ours(self, label: str, number: int) -> list[Step]:
        """Train with this project; returns its steps."""
        case, output = self.case, self.folder / f"ours {label} {number}"
        keys = [
            *TRAIN_ALIKE,
            f"run.seed={number}",
            f"rollout.max_response_tokens={case.max_response_tokens}",
            f"train.total_steps={self.num_steps}",
            f"train.train_prompts={case.num_prompts}",
            f"train.mini_prompts={case.num_prompts}",
            f"train.learning_rate={case.learning_rate}",
            f"train.gradient_checkpointing={case.gradient_checkpointing}",
            f"train.dtype={case.dtype}",
            *(key.format(num_prompts=case.num_prompts) for key in case.ours[label]),
            *self.arguments.set,
        ]
        words = [word for key in keys for word in ("--set", key)]
        paths = ("--data", self.data, "--model", self.model, "--output", output)
        self._stage("train", case.recipe, *paths, *words)
        return [our_step(line) for line in read_json_lines(output / METRICS_FILE)]

    def train_theirs(self, label: str, number: int) -> list[Step]:
        """Train with TRL; returns its steps."""
        case, output = self.case, self.folder / f"{label} {number}.jsonl"
        settings = {
            "data": str(self.data),
            "model": str(self.model),
            "num_prompts": case.num_prompts,
            "group_size": GROUP_SIZE,
            "max_response_tokens": case.max_response_tokens,
            "responses_per_pass": case.responses_per_pass,
            "num_steps": self.num_steps,
            "learning_rate": case.learning_rate,
            "gradient_checkpointing": case.gradient_checkpointing,
            "bfloat16": case.dtype == "bfloat16",
            "weights": "float32",
            "seed": number,
            **case.theirs[label],
        }
        program = str(Path(__file__).with_name("trl_run.py"))
        brief = [f"{name}={value}" for name, value in BRIEF_SPINNING.items()]
        command = ["env", *brief] if self.arguments.brief_spinning else []
        command += [self.arguments.trl_python, program, json.dumps(settings), str(output)]
        self._run(command, "TRL")
        return read_json_lines(output)

    def _stage(self, *words: str | Path) -> None:
        self._run(dapo_command(*words), str(words[0]))

    def _run(self, command: Sequence[str], label: str) -> None:
        log_path = self.folder / f"{label}.log"
        run_command(command, log_path=log_path, label=label, on_line=lambda line: None)


def our_step(line: Mapping[str, float]) -> Step:
    """Return the numbers of a line of metrics.jsonl by the names of bench/trl_run.py."""
    tokens = line["perf/trained_response_tokens"]
    return {
        "seconds": line["timing_s/step"],
        "generate": line["timing_s/gen"],
        "update": line["timing_s/update_actor"] + line.get("timing_s/old_log_prob", 0.0),
        "sync": line["timing_s/weight_sync"],
        "response_tokens": tokens,
        "longest": line["response_length/max"],
        "prompt_tokens": line["perf/total_num_tokens"] - tokens,
    }


def table(case: str, found: Mapping[str, Sequence[Step]], peer: str) -> str:
    """Return medians of steps as Markdown. Rates are of all steps; the peer's are 1.00 times."""
    rates, paces = {}, {}
    for label, steps in found.items():
        tokens = sum(step["response_tokens"] for step in steps)
        rates[label] = tokens / sum(step["seconds"] for step in steps)
        paces[label] = 1 / statistics.median(step["seconds"] for step in steps)
    lines = [f"\n{case}\n", "| " + " | ".join(HEADERS) + " |", "|---" * len(HEADERS) + "|"]
    for label, steps in found.items():
        names = ("seconds", *HEADERS[2:5], "prompt_tokens", "response_tokens", "longest")
        medians = [statistics.median(step[name] for step in steps) for name in names]
        cells = [label, *(f"{value:.2f}" for value in medians[:4])]
        cells += [f"{value:,.0f}" for value in (*medians[4:], rates[label])]
        cells += [f"{each[label] / each[peer]:.2f}" for each in (paces, rates)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def load() -> str:
    """Return the machine's load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", required=True, help="interpreter that imports trl 1.16.0")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", type=Path, help="model folder (smollm2; else prepared)")
    parser.add_argument("--data", type=Path, help="training parquet (else prepared)")
    parser.add_argument(
        "--steps", type=int, default=4, help="measured per training (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="trainings of each row (default: %(default)s)"
    )
    parser.add_argument(
        "--brief-spinning", action="store_true", help="TRL's threads wait as this project's do"
    )
    parser.add_argument("--set", action="append", default=[], help="override of our recipe")
    return parser


if __name__ == "__main__":
    main()
