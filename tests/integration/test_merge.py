"""Merging real FSDP2 shards gives a folder that transformers loads, equal by tensor."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.engines.factory import build_engine
from dapo_core.errors import CheckpointError
from dapo_core.merge.run import merge_checkpoint
from dapo_core.model.folder import INDEX_FILE, MERGE_MANIFEST, SINGLE_FILE
from dapo_core.model.inputs import ModelInput
from dapo_core.model.names import is_of_tower
from dapo_core.model.pretrained import empty_causal_lm
from dapo_core.policy.rank import Policy
from tests.batches import one_by_one, random_batch
from tests.checkpoints import Harmful, ShardsOf, flip, make_state, replace_file
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import ARCHITECTURES, build_tiny, tiny_engine_settings
from tests.tiny_vision import FAMILIES, build_tiny_vision
from tests.vllm_experts import runs_experts

TRAIN = {"train_prompts": 4, "mini_prompts": 4, "learning_rate": 1e-2, "warmup_steps": 0}
MANY_BYTES = 10**9
Case = tuple[str, bool]  # architecture, whether it is tied
CASES: list[Case] = [
    (architecture, is_tied) for architecture in ARCHITECTURES for is_tied in (True, False)
]
CASES += [("qwen2_5_vl", True), ("qwen3_vl", True), ("qwen3_vl_moe", False)]
PROMPT_IDS, RESPONSE_IDS = [5, 6, 7, 40, 90], [8, 9, 200, 31]


@dataclass(frozen=True)
class Trained:
    """A checkpoint and the tensors of the ranks that wrote it."""

    output: Path  # a training output with one checkpoint
    checkpoint: Path
    weights: dict[str, torch.Tensor]
    log_probs: torch.Tensor  # [B, R], from the sharded policy
    is_tied: bool


def _train_all(rank: int, folders: list[Path], num_ranks: int) -> list[dict[str, Any]]:
    return [
        _train_and_save(rank, folder / "model", folder / "shards", num_ranks) for folder in folders
    ]


def _train_and_save(rank: int, model_path: Path, folder: Path, num_ranks: int) -> dict[str, Any]:
    """Update once, so that every weight changes, and save; returns weights and log-probs."""
    policy = Policy(model_path, make_config(model_path, train=TRAIN))
    batch = random_batch(num_groups=4, group_size=2)
    shares, indices = split_batch(batch, num_ranks, 4096)
    before = replace(batch, old_log_probs=torch.full_like(batch.rollout_log_probs, -3.0))
    totals = LossTotals.of(batch)
    policy.update(split_batch(before, num_ranks, 4096)[0][rank], totals)
    policy.save(str(folder), asynchronous=False)
    log_probs, _ = policy.log_probs(shares[rank])
    weights = sent_weights(policy)
    return {"weights": weights, "log_probs": log_probs, "rows": indices[rank]}


def _checkpoint(folder: Path) -> Path:
    """Write the shards as a checkpoint in a training output beside them."""
    config = make_config(folder / "model", checkpoint={"asynchronous": False})

    def save(target: str) -> None:
        shutil.copytree(folder / "shards", target, dirs_exist_ok=True)

    writer = CheckpointWriter(
        folder / "output" / "checkpoints", folder / "model", ShardsOf(save), config
    )
    writer.begin(make_state(step=7))
    return writer.folder / "step_000007"


def _trained(checkpoint: Path, ranks: list[dict[str, Any]], is_tied: bool) -> Trained:
    """Combine what the ranks returned."""
    log_probs = torch.zeros(random_batch(num_groups=4, group_size=2).response_mask.shape)
    for rank in ranks:
        log_probs[rank["rows"], : rank["log_probs"].shape[1]] = rank["log_probs"]
    return Trained(checkpoint.parents[1], checkpoint, ranks[0]["weights"], log_probs, is_tied)


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Trained]:
    """Every architecture, tied and untied, trained by the same three ranks."""
    folders = {case: tmp_path_factory.mktemp("case") for case in CASES}
    for (architecture, is_tied), folder in folders.items():
        build: Any = build_tiny_vision if architecture in FAMILIES else build_tiny
        build(folder / "model", architecture, 3, is_tied)
    by_rank = run_ranks(3, _train_all, list(folders.values()), 3)
    return {
        case: _trained(_checkpoint(folder), list(ranks), is_tied=case[1])
        for case, folder, *ranks in zip(CASES, folders.values(), *by_rank, strict=True)
    }


@pytest.fixture(scope="module")
def trained(all_trained: dict[Case, Trained]) -> Trained:
    """The hardest case: five experts on three ranks."""
    return all_trained["qwen3_moe", False]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}"
)
def test_the_merged_model_equals_the_trained_one(
    all_trained: dict[Case, Trained], case: Case, tmp_path: Path
) -> None:
    trained = all_trained[case]
    sizes = merge_checkpoint([trained.output], tmp_path, "keep", MANY_BYTES)
    assert sizes == {
        "tensors": len(trained.weights),
        "parameters": sum(weight.numel() for weight in trained.weights.values()),
        "bytes": sum(weight.nbytes for weight in trained.weights.values()),
        "shards": 1,
    }
    assert not (tmp_path / INDEX_FILE).exists()
    tensors, before = (
        load_file(tmp_path / SINGLE_FILE),
        load_file(trained.output.parent / "model" / SINGLE_FILE),
    )
    assert tensors.keys() == before.keys() == trained.weights.keys()
    assert ("lm_head.weight" in tensors) == (not trained.is_tied)
    for name, weight in trained.weights.items():
        assert tensors[name].dtype == weight.dtype == torch.float32
        assert torch.equal(tensors[name], weight), name
        is_trained = not is_of_tower(name)  # texts leave a tower's biases at 0
        assert not (is_trained and torch.equal(tensors[name], before[name])), name
    _require_log_probs(tmp_path, trained)


def _require_log_probs(merged: Path, trained: Trained) -> None:
    """transformers loads the folder and reproduces the sharded policy's log-probs."""
    model_class: Any = type(empty_causal_lm(merged))
    model, report = model_class.from_pretrained(merged, output_loading_info=True)
    assert not any(report.values())  # nothing missing, unexpected or mismatched
    assert model.dtype == torch.float32
    if trained.is_tied:
        assert model.lm_head.weight is model.get_input_embeddings().weight
    batch = random_batch(num_groups=4, group_size=2)
    with torch.no_grad():
        given, _ = one_by_one(model, batch)
    expected = torch.where(batch.is_response, trained.log_probs, 0.0)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def merged(trained: Trained) -> Path:
    target = trained.output / "merged"
    merge_checkpoint([trained.output], target, "keep", MANY_BYTES)
    return target


@runs_experts
def test_vllm_and_transformers_give_the_same_log_probs(merged: Path) -> None:
    engine = build_engine("vllm", merged, tiny_engine_settings(), seed=0)
    given = engine.log_probs([(ModelInput(tuple(PROMPT_IDS)), RESPONSE_IDS)])[0]
    engine.close()
    ids = torch.tensor([PROMPT_IDS + RESPONSE_IDS])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged)(ids).logits[
            0, len(PROMPT_IDS) - 1 : -1
        ]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT_IDS) :].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(torch.tensor(given), expected, rtol=0, atol=1e-4)


def test_the_folder_contains_what_a_server_needs(trained: Trained, merged: Path) -> None:
    original = trained.output.parent / "model"
    assert {path.name for path in merged.iterdir()} == {MERGE_MANIFEST} | {
        path.name for path in original.iterdir()
    }
    config = json.loads((merged / "config.json").read_text())
    assert config == {**json.loads((original / "config.json").read_text()), "dtype": "float32"}
    message = [{"role": "user", "content": "What is 12 + 7?"}]
    tokenizer = AutoTokenizer.from_pretrained(merged)
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nWhat is 12 + 7?<|end|>\n<|assistant|>\n"
    assert GenerationConfig.from_pretrained(merged).eos_token_id == tokenizer.eos_token_id


def test_bfloat16_shards_and_their_index_are_complete(trained: Trained, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    max_bytes = 30_000
    sizes = merge_checkpoint(
        [trained.checkpoint],
        tmp_path,
        "bfloat16",
        max_bytes,
        lambda done, total: seen.append((done, total)),
    )
    total = 2 * sizes["parameters"]
    assert sizes["bytes"] == total == sum(weight.nbytes for weight in trained.weights.values()) // 2
    assert sizes["shards"] >= 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_parameters": sizes["parameters"], "total_size": total}
    assert set(index["weight_map"]) == set(trained.weights)
    for number in range(1, sizes["shards"] + 1):
        name = f"model-{number:05d}-of-{sizes['shards']:05d}.safetensors"
        tensors = load_file(tmp_path / name)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= max_bytes
        assert {key for key, place in index["weight_map"].items() if place == name} == set(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(tensor, trained.weights[key].bfloat16()), key
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def _truncate_shard(checkpoint: Path) -> None:
    shard = checkpoint / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])


def _plant(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: replace_file(checkpoint, name, content)


def _link_outside(checkpoint: Path) -> None:
    config = (checkpoint / "huggingface" / "config.json").rename(checkpoint.parent / "config.json")
    (checkpoint / "huggingface" / "config.json").symlink_to(config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoint: (checkpoint / "__1_0.distcp").unlink(), r"shard __1_0\.distcp of 3 in"),
        (_truncate_shard, r"shard __1_0\.distcp of 3 in .* is 1000 bytes long instead of \d{5,7}"),
        (flip("__1_0.distcp", 40_000), r"__1_0\.distcp( in \S+)? is damaged"),
        (
            lambda checkpoint: (checkpoint / "trainer_state.json").unlink(),
            r"step_000007 lacks trainer_state\.json; it is not a dapo train checkpoint",
        ),
        (flip("tensor_names.json", 9), r"tensor_names\.json is damaged"),
        (
            _plant("tensor_names.json", b'["model.norm.weight"]'),
            r"model\.\S+ in .* has no counterpart",
        ),
        (_plant("tensor_names.json", b'["model.norm'), r"tensor_names\.json cannot be read"),
        (_plant("tensor_names.json", b"3"), r"tensor_names\.json cannot be read \(it is not a"),
        (lambda checkpoint: (checkpoint / ".metadata").unlink(), "step_000007 has no complete"),
        (_plant(".metadata", b"\x80"), r"\.metadata .* cannot be read"),
        (_plant(".metadata", pickle.dumps(Harmful())), r"cannot be read \(it references io\.open"),
        (_link_outside, r"huggingface/config\.json is a symbolic link, which is not followed"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_nothing_is_written(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "step_000007"
    shutil.copytree(trained.checkpoint, checkpoint)
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint([checkpoint], tmp_path / "target", "keep", MANY_BYTES)
    assert {path.name for path in tmp_path.iterdir()} <= {"step_000007", "config.json"}


def test_an_incomplete_checkpoint_is_skipped_and_refused_if_named(
    trained: Trained, tmp_path: Path
) -> None:
    partial = tmp_path / "output" / "checkpoints" / "step_000009.partial"
    shutil.copytree(trained.checkpoint, partial)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        merge_checkpoint([tmp_path / "output"], tmp_path / "target", "keep", MANY_BYTES)
    with pytest.raises(CheckpointError, match=r"step_000009\.partial is incomplete"):
        merge_checkpoint([partial], tmp_path / "target", "keep", MANY_BYTES)
    shutil.copytree(trained.checkpoint, partial.with_name("step_000007"))
    sizes = merge_checkpoint([tmp_path / "output"], tmp_path / "target", "keep", MANY_BYTES)
    assert sizes["tensors"] == len(trained.weights)


def test_shards_from_two_nodes_are_merged(trained: Trained, tmp_path: Path) -> None:
    first, second = (
        tmp_path / "node0" / "step_000007",
        tmp_path / "node1" / "checkpoints" / "step_000007",
    )
    shutil.copytree(trained.checkpoint, first)
    second.mkdir(parents=True)
    (first / "__1_0.distcp").rename(second / "__1_0.distcp")
    merge_checkpoint(
        [first.parent, tmp_path / "node1"],
        tmp_path / "target",
        "keep",
        MANY_BYTES,
        verify_logits=True,
    )
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    assert tensors.keys() == trained.weights.keys()
    assert all(torch.equal(tensor, trained.weights[name]) for name, tensor in tensors.items())
