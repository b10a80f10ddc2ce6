"""An update on a sequence of the recipes' length, 2,048 + 20,480 tokens, shared by two ranks."""

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.update import Update
from dapo_core.memory.rank import rank_memory
from dapo_core.memory.shape import shape_of
from dapo_core.policy.rank import Policy
from flows.config import Config
from tests.batches import make_group
from tests.configs import make_config
from tests.ranks import run_ranks

PROMPT, RESPONSE = 2048, 20_480
MODEL = Qwen3Config(
    vocab_size=8_000,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,  # fewer than ranks
    head_dim=16,
    max_position_embeddings=PROMPT + RESPONSE,
)
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # from malloc.h


def _batch() -> Batch:
    groups = [make_group([1.0], 0, 4, 4), make_group([1.0], 1, RESPONSE, PROMPT)]
    return replace(build_batch(groups, mask_truncated=False), advantages=torch.ones(2))


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _peak_of_an_update(rank: int, config: Config) -> tuple[int, Update]:
    """Return the peak bytes of an update on the long sequence, after one on a short sequence."""
    libc = ctypes.CDLL(None)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):  # return freed memory to the system
        libc.mallopt(parameter, 65_536)
    policy = Policy(config.model.path or "", config)
    short, long = (
        split_batch(_batch().select([row]), 1, PROMPT + RESPONSE)[0][0] for row in (0, 1)
    )
    # allocates moments, libraries and threads
    policy.update(short, LossTotals.of(short.batch), with_stats=True)
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    update = policy.update(long, LossTotals.of(long.batch), with_stats=True)
    return _resident("VmHWM") - before, update


def test_an_update_on_22528_tokens_stays_within_the_memory_plan(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MODEL).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    config: Any = make_config(
        tmp_path,
        data={"max_prompt_tokens": PROMPT},
        rollout={"max_response_tokens": RESPONSE, "group_size": 2},
        train={
            "num_ranks": 2,
            "sequence_parallel": 2,
            "train_prompts": 1,
            "mini_prompts": 1,
            "micro_batch_tokens": (PROMPT + RESPONSE) // 2,
            "logits_chunk_tokens": 128,
        },
    )
    planned = rank_memory(config, shape_of(MODEL.to_dict()))
    parts = (
        "update_weights",
        "update_gradients",
        "update_copies",
        "update_activations",
        "update_logits",
    )
    expected = sum(getattr(planned, part) for part in parts)
    whole_logits, scores = 4 * RESPONSE * MODEL.vocab_size, 4 * (PROMPT + RESPONSE) ** 2
    for peak, update in run_ranks(2, _peak_of_an_update, config):
        assert update.stats is not None
        assert update.stats.log_probs.shape == (1, RESPONSE)
        assert (update.stats.log_probs < 0).all()
        assert 0.8 * expected < peak < 1.2 * expected
    # 78 MiB; full logits would take 625, one head's scores 1,936
    assert expected < (whole_logits + scores) / 10
