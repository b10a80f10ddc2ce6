"""Measures the resident memory of a policy rank's phases on a CPU, in separate processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Map blocks from 64 KiB on, so that freeing returns them to the system. By default glibc raises
# this threshold to the size of freed blocks, up to 32 MiB, and keeps such memory.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def measure(model_path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Returns rank 0's peak bytes per phase, beyond what the process held before loading the model.

    That base is reported as `process`: a warm process with libraries, threads and process group,
    after an update of a tiny policy. Phases: old_log_probs, update (forward, backward and optimizer
    step, with Adam's moments from an earlier one).
    """
    from transformers import Qwen3Config

    num_ranks = config["train"]["num_ranks"]
    program = [sys.executable, __file__]
    tiny = Qwen3Config(**SIZES, hidden_size=64, num_hidden_layers=1, intermediate_size=64)
    with tempfile.TemporaryDirectory() as folder:
        write_model(tiny, Path(folder) / "tiny")
        ranks = [
            subprocess.Popen(
                [*program, str(rank), folder, str(model_path), json.dumps(config)],
                env={**os.environ, **MALLOC, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError("a rank failed; see its error above")
    return json.loads(outputs[0].splitlines()[-1])


def _run_rank(rank: int, folder: str, model_path: Path, settings: dict[str, Any]) -> dict[str, int]:
    import torch
    from made_up import rows

    from dapo_core.algorithm.loss import LossTotals
    from dapo_core.config.training import TrainingConfig
    from dapo_core.policy.rank import Policy

    config = TrainingConfig.model_validate(settings)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=config.train.num_ranks
    )
    share = rows(config.data.max_prompt_tokens, config.rollout.max_response_tokens, 2)
    totals = LossTotals(1, 1)
    _warm_up(Path(folder) / "tiny", config)
    gc.collect()
    before = _resident("VmRSS")
    policy = Policy(model_path, config)
    held = {"process": before}

    def peak(call: Callable[[], Any]) -> int:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
        call()
        return _resident("VmHWM") - before

    policy.update(share, totals)  # creates Adam's moments
    held["old_log_probs"] = peak(lambda: policy.log_probs(share))
    held["update"] = peak(lambda: policy.update(share, totals))
    return held


def _warm_up(model_path: Path, config: Any) -> None:
    """Update a tiny policy to load libraries and start threads; its memory is freed again."""
    from made_up import rows

    from dapo_core.algorithm.loss import LossTotals
    from dapo_core.policy.rank import Policy

    policy, share = Policy(model_path, config), rows(8, 8, 2)
    policy.log_probs(share)
    policy.update(share, LossTotals(1, 1))


def write_model(config: Any, folder: Path) -> None:
    """Write a model folder with random weights and a tokenizer of one token."""
    from made_up import write_tokenizer
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)


def _resident(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    number, meeting, model, settings = sys.argv[1:]
    print(json.dumps(_run_rank(int(number), meeting, Path(model), json.loads(settings))))
