"""Models that read pictures: ranks compute as transformers does one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.config.train import LoraConfig
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.errors import ModelError, RolloutError
from dapo_core.machine.device import Cpu
from dapo_core.merge.run import merge_checkpoint
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.folder import SINGLE_FILE
from dapo_core.model.inputs import ModelInput
from dapo_core.model.lora import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    adapter_name,
    adapter_names,
    is_adapter,
    write_adapter,
)
from dapo_core.model.names import is_of_tower
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_trainable
from dapo_core.training import train
from durable import read_json_lines
from tests.batches import random_batch
from tests.configs import make_config
from tests.in_process import without_ray
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import build_tiny
from tests.tiny_vision import FAMILIES, Family, build_tiny_vision
from tests.trainings import World
from tests.trainings import config_of as config_of_recipe

TRAIN = {"num_ranks": 2, "train_prompts": 4, "mini_prompts": 4, "warmup_steps": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "sequence parallel": {"sequence_parallel": 2},
    "frozen": {"freeze": ["vision"]},
    "adapters": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
}
MAX_TOKENS = 24  # so that every rank has several micro-batches


@dataclass(frozen=True)
class Known:
    """Results of transformers, one sequence at a time."""

    log_probs: torch.Tensor  # [B, R], 0 where a response has no token
    gradients: dict[str, torch.Tensor]


def batch_of() -> Batch:
    """Return three groups of two responses."""
    return random_batch(num_groups=3, group_size=2, seed=4)


def one_by_one(folder: Path, batch: Batch) -> Known:
    """Return the log-probs, and the gradients of a step in which old log-probs are the same."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    log_probs = torch.zeros(batch.response_mask.shape)
    loss = torch.zeros(())
    for row, (start, count) in enumerate(
        zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        ids = batch.token_ids[row, : start + count].long().unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, start:].unsqueeze(-1)).squeeze(-1)
        log_probs[row, :count] = chosen.detach()
        loss = loss - batch.advantages[row] * chosen.sum()
    (loss / batch.response_mask.sum()).backward()
    parameters = model.named_parameters()
    gradients = {n: each.grad for n, each in parameters if each.grad is not None}
    return Known(log_probs, gradients)


def config_of(folder: Path, **train: Any) -> Any:
    """Return a configuration whose update computes the gradients of one_by_one."""
    optional = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "dtype": "float32"}
    return make_config(
        folder,
        train={**TRAIN, **optional, **train},
        rollout={"dtype": "float32", "group_size": 2},
    )


def _update(rank: int, folder: Path, batch: Batch) -> dict[str, dict[str, Any]]:
    """Return what each layout's ranks compute in an update, and the weights before and after."""
    results = {}
    for name, layout in LAYOUTS.items():
        config = config_of(folder, **layout)
        policy = Policy(folder, config)
        before = sent_weights(policy)
        sp = config.train.sequence_parallel
        shares, indices = split_batch(batch, config.train.num_data_ranks, MAX_TOKENS * sp)
        share = shares[rank // sp]
        log_probs = policy.log_probs(share).log_probs
        parameters: dict[str, Any] = dict(policy.model.causal_lm.named_parameters())
        adapters = {
            n: each.full_tensor().clone() for n, each in parameters.items() if is_adapter(n)
        }
        policy.update(share, LossTotals.of(batch, config.train.num_data_ranks))
        results[name] = {
            "before": before,
            "after": sent_weights(policy),
            "log_probs_after": policy.log_probs(share).log_probs,
            "adapters": adapters,
            "rows": indices[rank // sp],
            "num_parts": len(share.micro_batches),
            "log_probs": log_probs,
            "gradients": {
                name: each.grad.full_tensor()
                for name, each in parameters.items()
                if each.grad is not None
            },
            "moments": {n for n, each in parameters.items() if each in policy.optimizer.state},
        }
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: build_tiny_vision(parent / name, name, seed=3) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_as_transformers_does_one_sequence_at_a_time(
    folders: dict[Family, Path], family: Family
) -> None:
    folder, batch = folders[family], batch_of()
    known, stored = one_by_one(folder, batch), load_file(folders[family] / SINGLE_FILE)
    assert known.log_probs.std() > 0.5  # weights are loud enough to show a fault
    ranks = run_ranks(2, _update, folder, batch)
    for layout, options in LAYOUTS.items():
        first, second = (rank[layout] for rank in ranks)
        assert first["num_parts"] > 1
        for result in (first, second):
            expected = known.log_probs[result["rows"], : result["log_probs"].shape[1]]
            torch.testing.assert_close(result["log_probs"], expected, rtol=0, atol=1e-5)
        is_trained = {name: not is_of_tower(name) or "freeze" not in options for name in stored}
        if "lora" not in options:
            assert first["before"].keys() == {name for name in stored if is_trained[name]}
            assert all(torch.equal(each, stored[name]) for name, each in first["before"].items())
        assert first["moments"] == first["gradients"].keys()
        for name, gradient in first["gradients"].items():
            assert not (is_of_tower(name) and {"freeze", "lora"} & options.keys())
            expected = _expected(name, gradient, known.gradients, first["adapters"])
            scale = max(expected.abs().max().item(), 1e-6)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * scale, msg=name)
        _require_engine(folder, options, batch, [first, second])


def _expected(
    name: str,
    gradient: torch.Tensor,
    known: dict[str, torch.Tensor],
    adapters: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return a parameter's gradient; of a new adapter, whose B is 0, those of A are 0."""
    if ".lora_B." not in name:
        return known.get(name, torch.zeros_like(gradient))
    of_weight = known[name.replace(".lora_B.default", "")]
    scale = LoraConfig(**LAYOUTS["adapters"]["lora"]).scale
    return scale * of_weight @ adapters[name.replace("lora_B", "lora_A")].T


def _require_engine(
    folder: Path, options: dict[str, Any], batch: Batch, ranks: list[dict[str, Any]]
) -> None:
    """An engine with the sent weights has the ranks' log-probs."""
    settings = engine_settings(config_of(folder, **options), Cpu())
    engine = build_engine("hf", folder, settings, seed=0)
    engine.load_weights(ranks[0]["after"].items(), 1)
    lengths = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    rows = zip(batch.token_ids.tolist(), lengths, strict=True)
    given = engine.log_probs([(ModelInput(tuple(ids[:n])), ids[n : n + m]) for ids, (n, m) in rows])
    for result in ranks:
        for row, values in zip(result["rows"], result["log_probs_after"], strict=True):
            expected = values[: len(given[row])]
            torch.testing.assert_close(torch.tensor(given[row]), expected, rtol=0, atol=1e-4)
    if "freeze" in options:
        with pytest.raises(RolloutError, match=r"tensors are missing: .*visual"):
            build_engine("hf", folder, replace(settings, freezes_tower=False), 0).load_weights(
                ranks[0]["after"].items(), 1
            )


def test_a_text_model_has_no_tower_to_freeze(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, "qwen3")
    with pytest.raises(ModelError, match="qwen3 has no vision tower; remove the key"):
        require_trainable(config_of(folder, freeze=["vision"]), folder)


def test_a_model_that_reads_pictures_trains_on_texts(
    world: World, folders: dict[Family, Path], tmp_path: Path
) -> None:
    """With a frozen tower, through draw, update, synchronization and checkpoint, then merged."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) % 3, 'acc': 0}\n"
    )
    train_config = {"num_ranks": 1, "total_steps": 2, "freeze": ["vision"], "mini_prompts": 4}
    config = config_of_recipe(train=train_config, custom_reward={"path": str(scorer)})
    folder = folders["qwen2_5_vl"]
    with without_ray():
        train(config, world.data, folder, tmp_path / "run")
    for line in read_json_lines(tmp_path / "run" / METRICS_FILE):
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["actor/grad_norm"] > 0
    merge_checkpoint([tmp_path / "run"], tmp_path / "merged")
    before, after = (load_file(path / SINGLE_FILE) for path in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == set(filter(is_of_tower, before))


def test_an_adapter_of_the_language_model_is_merged_into_the_weights_of_the_files(
    folders: dict[Family, Path], tmp_path: Path
) -> None:
    """Adapters have the modules' names, and the files of Qwen2.5-VL others."""
    base, lora = folders["qwen2_5_vl"], LoraConfig(rank=2, targets=("q_proj",))
    draw = torch.Generator().manual_seed(0)
    tensors, changed = {}, load_file(base / SINGLE_FILE)
    for layer in range(2):
        module = f"layers.{layer}.self_attn.q_proj.weight"
        names = [adapter_name(n) for n in adapter_names(f"model.language_model.{module}")]
        first, second = (torch.randn(shape, generator=draw) for shape in ((2, 128), (128, 2)))
        tensors |= dict(zip(names, (first, second), strict=True))
        changed[f"model.{module}"] += lora.scale * second @ first
    write_adapter(tmp_path / "adapter", tensors, lora, base)
    merge_checkpoint([tmp_path / "adapter"], tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / SINGLE_FILE)
    assert merged.keys() == changed.keys()
    for name, tensor in changed.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)
    written = load_file(tmp_path / "merged" / ADAPTER_FOLDER / ADAPTER_FILE)
    assert written.keys() == tensors.keys()
