"""Trains with TRL's GRPOTrainer, in TRL's own environment, and writes seconds and tokens of each
step: `python trl_run.py SETTINGS OUTPUT`, SETTINGS being JSON.

bench/against_trl.py runs it. Both trainers score with `compute_score`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return 0 or 1 by the text's checksum: costs nothing, and most groups have both."""
    return float(zlib.crc32(solution_str.encode()) % 2)


def main() -> None:
    """Train as the settings say; write a line of JSON per step."""
    settings, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    import pyarrow.parquet
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = pyarrow.parquet.read_table(settings["data"], columns=["prompt"]).to_pylist()
    num_responses = settings["num_prompts"] * settings["group_size"]
    micro = settings["responses_per_pass"]
    arguments = GRPOConfig(
        output_dir=str(output.with_suffix("")),
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_response_tokens"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=num_responses // micro,
        max_steps=settings["num_steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=settings["gradient_checkpointing"],
        bf16=settings["bfloat16"],
        model_init_kwargs={"dtype": settings["weights"]},
        seed=settings["seed"],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = timed_trainer()(
        model=settings["model"],
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    output.write_text("".join(json.dumps(step) + "\n" for step in trainer.steps))


def score(completions: list[Any], **others: Any) -> list[float]:
    """Return TRL's rewards of a batch."""
    return [compute_score("", message[0]["content"], "", None) for message in completions]


def timed_trainer() -> type[Any]:
    """Return a GRPOTrainer that keeps the seconds and tokens of its steps in `steps`.

    A step lasts from the end of one optimizer step to the end of the next, so nothing is left out.
    """
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.trainer.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.trainer.end_step()

    class TimedTrainer(GRPOTrainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.steps: list[dict[str, float]] = []
            self.spent: dict[str, float] = {"generate": 0.0, "prepare": 0.0}
            self.began, self.lengths, self.num_prompt_tokens = 0.0, [0], 0
            self.add_callback(Clock(self))

        def end_step(self) -> None:
            now = time.perf_counter()
            step = {
                "seconds": now - self.began,
                "generate": self.spent["generate"],
                "update": now - self.began - self.spent["prepare"],
                "sync": 0.0,
                "response_tokens": sum(self.lengths),
                "longest": max(self.lengths),
                "prompt_tokens": self.num_prompt_tokens,
            }
            self.steps.append(step)
            self.spent = dict.fromkeys(self.spent, 0.0)
            self.began = now

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            inputs = super()._prepare_inputs(*args, **kwargs)
            self.spent["prepare"] += time.perf_counter() - began
            return inputs

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            outputs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.spent["generate"] += time.perf_counter() - began
            self.lengths = [len(response) for response in outputs[0]]
            self.num_prompt_tokens = sum(map(len, prompt_ids))
            return outputs

    return TimedTrainer


if __name__ == "__main__":
    main()
