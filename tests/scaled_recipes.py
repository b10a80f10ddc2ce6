"""The guides' recipes, scaled down to a tiny model of their architecture on two ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import train
from durable import read_json_lines
from flows.config import Config, load_config
from tasks.data.prepare import build_dataset

RECIPES = Path(__file__).resolve().parents[1] / "configs"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 3 - 1.0
"""  # a random model is never right
NUM_RANKS = 2  # of 8 to 128, with as many engines of one process each


def scaled(name: str, folder: Path, model: Path, ray: str, data: Sequence[str]) -> Config:
    """The recipe with its placement, kinds of parallelism and updates, and `data` as overrides."""
    full = load_config(RECIPES / f"{name}.yaml")
    (folder / "scorer.py").write_text(SCORER)
    is_long, updates = full.reward.overlong.enabled, full.train.updates_per_step
    prompts = max(4, updates)
    return load_config(
        RECIPES / f"{name}.yaml",
        [
            *data,
            "data.max_prompt_tokens=256",
            "model.source=path",
            "model.id=null",
            f"model.path={model}",
            f"custom_reward.path={folder / 'scorer.py'}",
            *(["reward.overlong.buffer_tokens=2"] if is_long else []),
            f"sampler.gen_prompts={2 * prompts}",
            "sampler.metric=score",
            f"rollout.num_workers={NUM_RANKS}",
            "rollout.tensor_parallel=1",
            "rollout.expert_parallel=false",
            "rollout.max_response_tokens=8",
            "rollout.memory_gigabytes=0.1",
            "rollout.threads_per_worker=1",
            "train.device=cpu",
            "train.device_model=null",
            "train.dtype=float32",
            f"train.num_ranks={NUM_RANKS}",
            f"train.sequence_parallel={min(full.train.sequence_parallel, NUM_RANKS)}",
            f"train.expert_parallel={min(full.train.expert_parallel, NUM_RANKS)}",
            "train.total_steps=2",
            f"train.train_prompts={prompts}",
            f"train.mini_prompts={prompts // updates}",
            "train.micro_batch_tokens=512",
            "train.learning_rate=1e-3",
            "train.warmup_steps=0",
            f"train.ray_address={ray}",
            "serve.tensor_parallel=1",
            "serve.data_parallel=1",
            "serve.max_model_len=512",
            "evaluate.max_response_tokens=8",
        ],
    )


def trained(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Prepare the data and train; returns the metrics of both steps after common assertions."""
    data, output = folder / "data", folder / "training"
    data.mkdir()
    build_dataset(config, data)
    model = Path(str(config.model.path))
    train(config, data / "train.parquet", model, output, held_out_path=data / "eval.parquet")
    lines = [line for line in read_json_lines(output / METRICS_FILE) if line["step"]]
    updates = config.train.updates_per_step
    assert [line["policy_version"] for line in lines] == [updates, 2 * updates]
    for line in lines:
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert lines[0]["rollout/fresh_log_probs_diff_mean"] < 1e-4  # later tokens are older
    assert latest_checkpoint(output / "checkpoints") is not None
    return lines
