"""Measures both inference engines on the load of the CPU recipe and prints one table.

Each engine runs in a process of its own, so that its start time includes imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dapo_core.engines.base import Engine

EXAMPLE = """example, on two cores, with one and with two threads per engine:
  taskset -c 0,1 .venv/bin/python bench/engines.py --threads 1 2
"""


@dataclass(frozen=True)
class Measurement:
    """Medians over the rounds after the first, which includes one-time work."""

    engine: str
    num_threads: int
    start_seconds: float
    first_round_seconds: float
    tokens_per_second: float
    cpu_seconds: float  # of one round, all threads
    load_weights_seconds: float
    mean_response_tokens: float


def main() -> None:
    """Build the model, measure each engine at each number of threads, print the table."""
    load = _parser().parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # as in rollout workers
    with tempfile.TemporaryDirectory() as folder:
        if load.model is None:
            load.model = build_recipe_model(Path(folder) / "model", load.warm_steps)
        measurements = []
        for num_threads in load.threads:
            for kind in load.engines:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    measurements.append(pool.submit(measure, kind, num_threads, load).result())
    print(table(measurements, load))


def build_recipe_model(path: Path, num_steps: int) -> Path:
    """The CPU recipe's model after a warm start of `num_steps`, for responses of realistic lengths."""
    from dapo_core.arithmetic import generate_problems
    from dapo_core.config.warm_start import WarmStartConfig
    from dapo_core.warm_start import build_model

    rows, _ = generate_problems(num_train=2000, num_eval=1, max_level=2, seed=0)
    build_model(rows, path, WarmStartConfig(num_steps=num_steps), seed=0)
    return path


def measure(kind: Literal["vllm", "hf"], num_threads: int, load: Namespace) -> Measurement:
    """One engine's figures on the load."""
    started = time.perf_counter()
    from dapo_core.engines.base import EngineSettings, build_engine

    prompts = _prompts(load.model, load.prompts)
    settings = EngineSettings(
        dtype="float32",
        max_model_tokens=max(len(prompt) for prompt in prompts) + load.response_tokens,
        max_response_tokens=load.response_tokens,
        max_num_seqs=load.max_num_seqs,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        memory_bytes=1024**3,
        memory_utilization=0.8,
        threads=num_threads,
    )
    engine = build_engine(kind, load.model, settings, seed=0)
    start_seconds = time.perf_counter() - started
    seconds, cpu_seconds, num_tokens, load_seconds = [], [], [], []
    for number in range(load.rounds + 1):
        load_seconds.append(_time_weight_load(engine, load.model, number))
        began, cpu_began = time.perf_counter(), time.process_time()
        num_tokens.append(_run_round(engine, prompts, load.group_size, number))
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    engine.close()
    return Measurement(
        kind,
        num_threads,
        start_seconds,
        seconds[0],
        statistics.median(tokens / spent for tokens, spent in zip(num_tokens[1:], seconds[1:], strict=True)),
        statistics.median(cpu_seconds[1:]),
        statistics.median(load_seconds[1:]),
        statistics.mean(num_tokens) / (load.prompts * load.group_size),
    )


def table(measurements: list[Measurement], load: Namespace) -> str:
    """The figures as text; the ratio is throughput over that of the first row."""
    first = measurements[0].tokens_per_second
    lines = [
        f"{load.prompts} prompts x {load.group_size} responses, at most {load.response_tokens} tokens "
        f"each, {measurements[0].mean_response_tokens:.0f} on average; medians of {load.rounds} rounds",
        "engine threads  start s  first round s  tokens/s  ratio  CPU s/round  load weights s",
    ]
    lines += [
        f"{row.engine:6} {row.num_threads:7} {row.start_seconds:8.1f} {row.first_round_seconds:14.2f} "
        f"{row.tokens_per_second:9.0f} {row.tokens_per_second / first:6.2f} {row.cpu_seconds:12.2f} "
        f"{row.load_weights_seconds:15.3f}"
        for row in measurements
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=["vllm", "hf"], default=["vllm", "hf"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="CPU threads per engine (default: 1)")
    parser.add_argument("--model", type=Path, help="a model folder instead of the recipe's model")
    for name, default, what in (
        ("--prompts", 32, "prompts per round"),
        ("--group-size", 8, "responses per prompt"),
        ("--response-tokens", 64, "length limit"),
        ("--max-num-seqs", 256, "rows decoded at once"),
        ("--rounds", 5, "measured rounds"),
        ("--warm-steps", 100, "warm-up steps of the recipe's model"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{what} (default: %(default)s)")
    return parser


def _prompts(model_path: Path, num_prompts: int) -> list[list[int]]:
    from dapo_core.arithmetic import generate_problems
    from dapo_core.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    rows, _ = generate_problems(num_train=num_prompts, num_eval=1, max_level=2, seed=1)
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _time_weight_load(engine: Engine, model_path: Path, policy_version: int) -> float:
    from safetensors.torch import load_file

    weights = {
        name: tensor for file in model_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    began = time.perf_counter()
    engine.load_weights(weights.items(), policy_version)
    return time.perf_counter() - began


def _run_round(engine: Engine, prompts: list[list[int]], group_size: int, number: int) -> int:
    """Response tokens of one round over all prompts."""
    from dapo_core.engines.base import GenerationRequest

    engine.submit(
        [
            GenerationRequest(f"{number}/{index}/{sample}", prompt, seed=(number * 1000 + index) * 100 + sample)
            for index, prompt in enumerate(prompts)
            for sample in range(group_size)
        ]
    )
    num_tokens = 0
    while engine.num_unfinished():
        num_tokens += sum(len(response.response_ids) for response in engine.step())
    return num_tokens


if __name__ == "__main__":
    main()
