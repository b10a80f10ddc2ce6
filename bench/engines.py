"""Measures the inference engines on the load of the CPU recipe and prints one table.

Each engine runs in its own process, so its start time includes imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dapo_core.machine.environment import WORKERS

if TYPE_CHECKING:
    from dapo_core.engines.base import Engine
    from dapo_core.model.inputs import ModelInput

EXAMPLE = """example, on two cores, with one and with two threads per engine:
  taskset -c 0,1 .venv/bin/python bench/engines.py --threads 1 2
and where few sequences decode, as vLLM's drafts need:
  .venv/bin/python bench/engines.py --prompts 2
"""
GROUP_SIZE, MAX_RESPONSE_TOKENS, MAX_NUM_SEQS = 8, 64, 256  # the load of a round
NUM_ROUNDS = 5  # measured, after one warm-up
WARM_UP_STEPS = 100  # of the recipe's model, for responses of realistic lengths
# names of the table's rows: engine and rollout.speculation
ENGINES: dict[str, tuple[Literal["vllm", "hf"], Literal["off", "ngram"]]] = {
    "vllm": ("vllm", "off"),
    "vllm, drafts": ("vllm", "ngram"),
    "hf": ("hf", "off"),
}
os.environ |= WORKERS  # as in rollout workers


@dataclass(frozen=True)
class Measurement:
    """Medians over the rounds after the warm-up."""

    engine: str
    num_threads: int
    start_seconds: float
    warm_up_seconds: float
    tokens_per_second: float
    cpu_seconds: float  # of one round, all threads
    load_weights_seconds: float
    mean_response_tokens: float


def main() -> None:
    """Build the model, measure each engine at each number of threads, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[1], help="CPU threads per engine (default: 1)"
    )
    parser.add_argument(
        "--prompts", type=int, default=32, help=f"of {GROUP_SIZE} responses each (default: 32)"
    )
    parser.add_argument("--model", type=Path, help="a model folder, instead of the recipe's model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_path = arguments.model or build_recipe_model(Path(folder) / "model")
        measurements = []
        for num_threads in arguments.threads:
            for name in ENGINES:
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as pool:
                    measurements.append(
                        pool.submit(
                            measure, name, num_threads, model_path, arguments.prompts
                        ).result()
                    )
    print(table(measurements, arguments.prompts))


def build_recipe_model(path: Path) -> Path:
    """The CPU recipe's model after a short warm-up."""
    from dapo_core.config.warm_start import WarmStartConfig
    from dapo_core.demo.arithmetic import generate_problems
    from dapo_core.demo.warm_start import build_model

    rows, _ = generate_problems(num_train=2000, num_eval=1, max_level=2, seed=0)
    build_model(rows, path, WarmStartConfig(num_steps=WARM_UP_STEPS), seed=0)
    return path


def recipe_prompts(model_path: Path, num_prompts: int) -> list[ModelInput]:
    """Tokenized prompts of the CPU recipe."""
    from dapo_core.demo.arithmetic import generate_problems
    from dapo_core.model.inputs import ModelInput
    from dapo_core.model.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    rows, _ = generate_problems(num_train=num_prompts, num_eval=1, max_level=2, seed=1)
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [ModelInput(tuple(token_ids)) for token_ids in prompts]


def measure(name: str, num_threads: int, model_path: Path, num_prompts: int) -> Measurement:
    """Run one of ENGINES on the load."""
    started = time.perf_counter()
    kind, speculation = ENGINES[name]
    from dapo_core.engines.base import EngineSettings
    from dapo_core.engines.factory import build_engine

    prompts = recipe_prompts(model_path, num_prompts)
    settings = EngineSettings(
        dtype="float32",
        max_model_tokens=max(len(prompt.token_ids) for prompt in prompts) + MAX_RESPONSE_TOKENS,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        memory_bytes=1024**3,
        memory_utilization=0.8,
        threads=num_threads,
        speculation=speculation,
    )
    engine = build_engine(kind, model_path, settings, seed=0)
    start_seconds = time.perf_counter() - started
    seconds, cpu_seconds, num_tokens, load_seconds = [], [], [], []
    for number in range(NUM_ROUNDS + 1):
        load_seconds.append(_time_weight_load(engine, model_path, number))
        began, cpu_began = time.perf_counter(), time.process_time()
        num_tokens.append(_run_round(engine, prompts, number))
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    engine.close()
    return Measurement(
        name,
        num_threads,
        start_seconds,
        seconds[0],
        statistics.median(
            tokens / spent for tokens, spent in zip(num_tokens[1:], seconds[1:], strict=True)
        ),
        statistics.median(cpu_seconds[1:]),
        statistics.median(load_seconds[1:]),
        statistics.mean(num_tokens) / (num_prompts * GROUP_SIZE),
    )


def table(measurements: list[Measurement], num_prompts: int) -> str:
    """The measurements as text; the ratio is relative to the throughput of the first row."""
    first = measurements[0].tokens_per_second
    lines = [
        f"{num_prompts} prompts x {GROUP_SIZE} responses, at most {MAX_RESPONSE_TOKENS} tokens "
        "each, "
        f"{measurements[0].mean_response_tokens:.0f} on average; medians of {NUM_ROUNDS} rounds",
        "engine       threads  start s  warm-up s  tokens/s  ratio  CPU s/round  load weights s",
    ]
    lines += [
        f"{row.engine:12} {row.num_threads:7} {row.start_seconds:8.1f} {row.warm_up_seconds:10.2f} "
        f"{row.tokens_per_second:9.0f} {row.tokens_per_second / first:6.2f} "
        f"{row.cpu_seconds:12.2f} "
        f"{row.load_weights_seconds:15.3f}"
        for row in measurements
    ]
    return "\n".join(lines)


def _time_weight_load(engine: Engine, model_path: Path, policy_version: int) -> float:
    from safetensors.torch import load_file

    weights = {
        name: tensor
        for file in model_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    began = time.perf_counter()
    engine.load_weights(weights.items(), policy_version)
    return time.perf_counter() - began


def _run_round(engine: Engine, prompts: list[ModelInput], number: int) -> int:
    """Generate all responses of a round and return their tokens."""
    from dapo_core.engines.base import GenerationRequest

    engine.submit(
        [
            GenerationRequest(
                f"{number}/{index}/{sample}", prompt, seed=(number * 1000 + index) * 100 + sample
            )
            for index, prompt in enumerate(prompts)
            for sample in range(GROUP_SIZE)
        ]
    )
    num_tokens = 0
    while engine.num_unfinished():
        num_tokens += sum(len(response.response_ids) for response in engine.step())
    return num_tokens


if __name__ == "__main__":
    main()
