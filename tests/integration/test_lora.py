"""LoRA: adapters train alike on any ranks, and alone have gradients, moments and checkpoints."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals, policy_loss
from dapo_core.checkpoint.metadata import read_metadata
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.errors import CheckpointError, ModelError
from dapo_core.merge import lora
from dapo_core.merge.run import merge_checkpoint
from dapo_core.model.folder import MERGE_MANIFEST, SINGLE_FILE, model_fingerprint
from dapo_core.model.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    add_adapters,
    first_values,
    is_adapter,
)
from dapo_core.policy.rank import Policy
from flows.config import Config
from tasks import chain
from tasks.artifacts.artifact import Artifact
from tasks.config import ModelConfig
from tasks.fetched_model import link_model_folder
from tasks.links import link_of
from tasks.runs.run import Run
from tests.batches import loss_tokens_of, one_by_one, random_batch
from tests.checkpoints import ShardsOf, make_state
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.recorded_runs import Outcome, produce, small_config
from tests.sent_weights import sent_weights
from tests.tiny_models import build_adapter, build_tiny

LORA = {"rank": 4, "alpha": 12}
KL = {"place": "loss", "coefficient": 0.5}
TRAIN = {"train_prompts": 6, "mini_prompts": 6, "learning_rate": 1e-2, "warmup_steps": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny(folder / name, name, seed=3) for name in ("qwen3", "qwen3_moe")}


def _config(
    model_path: Path, lora: dict[str, Any] = LORA, rollout: str = "adapter", **train: Any
) -> Config:
    return make_config(
        model_path,
        algorithm={"kl": KL},
        rollout={"group_size": 4, "lora": rollout, "dtype": "float32"},
        train={**TRAIN, "lora": lora, **train},
    )


def _batch() -> Batch:
    batch = random_batch(num_groups=6, group_size=3, seed=1)
    known = torch.full_like(batch.rollout_log_probs, -5.5)
    return replace(batch, old_log_probs=known, ref_log_probs=known)


def _whole(policy: Policy) -> dict[str, torch.Tensor]:
    """Return copies of the adapters and their moments."""
    values: dict[str, Any] = {
        name: each for name, each in policy.model.named_parameters() if each.requires_grad
    }
    for name, parameter in list(values.items()):
        values[f"{name} m"] = policy.optimizer.state[parameter]["exp_avg"]
    return {n: each.full_tensor().detach().clone() for n, each in values.items()}


def _two_updates(rank: int, config: Config, batch: Batch, max_tokens: int) -> dict[str, Any]:
    policy = Policy(config.model.path or "", config)
    shares, indices = split_batch(batch, config.train.num_data_ranks, max_tokens)
    number = rank // config.train.sequence_parallel
    share, totals = shares[number], LossTotals.of(batch, config.train.num_data_ranks)
    norms = [policy.update(share, totals).grad_norm for _ in range(2)]
    trained = {name for name, each in policy.model.named_parameters() if each.requires_grad}
    log_probs, reference = policy.log_probs(share).log_probs, policy.ref_log_probs(share)
    return {
        "norms": norms,
        "indices": indices[number],
        "log_probs": log_probs[: len(indices[number])],
        "reference": reference[: len(indices[number])],
        "has_copy": policy.reference is not None,
        "trained_after_reference": trained
        == {name for name, each in policy.model.named_parameters() if each.requires_grad},
        "names": trained,
        "dtypes": {
            (is_adapter(name), each.dtype) for name, each in policy.model.named_parameters()
        },
        "moments": sum(each.numel() for each in policy.offloader.local_tensors("optimizer")),
        "whole": _whole(policy),
        "merged": sent_weights(policy),
    }


def _plain_updates(config: Config, batch: Batch) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        str(config.model.path), dtype=torch.float32
    ).train()
    before = one_by_one(model, batch)[0].detach()
    sizes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    add_adapters(model, sizes, config.train.lora, on_meta=False)
    adapters = {name: each for name, each in model.named_parameters() if is_adapter(name)}
    generator = torch.Generator().manual_seed(config.run.seed)
    for name, parameter in adapters.items():
        parameter.data = first_values(name, parameter.shape, generator)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, weight_decay=0.1)
    norms = []
    for _ in range(2):
        tokens = loss_tokens_of(batch, config.algorithm)
        optimizer.zero_grad()
        policy_loss(one_by_one(model, batch)[0], None, tokens, config.algorithm).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0).item())
        optimizer.step()
    return {"norms": norms, "log_probs": one_by_one(model, batch)[0].detach(), "before": before}


@pytest.mark.parametrize(
    ("architecture", "train", "lora"),
    [
        ("qwen3", {"num_ranks": 2}, LORA),
        ("qwen3", {"num_ranks": 2, "sequence_parallel": 2}, LORA),
        ("qwen3", {"num_ranks": 2, "fsdp_size": 1, "offload_shards": True}, LORA),
        ("qwen3", {"num_ranks": 3}, {**LORA, "targets": ["v_proj", "down_proj"]}),
        ("qwen3_moe", {"num_ranks": 2}, {**LORA, "targets": ["q_proj", "o_proj"]}),
    ],
)
def test_adapters_train_alike_on_any_ranks(
    models: dict[str, Path], architecture: str, train: dict[str, Any], lora: dict[str, Any]
) -> None:
    """Two packed updates equal those of one process, one sequence at a time."""
    config = _config(models[architecture], lora, "merged", **train)
    batch = _batch()
    expected = _plain_updates(config, batch)
    ranks = run_ranks(config.train.num_ranks, _two_updates, config, batch, 40)
    assert (expected["log_probs"] - expected["before"])[batch.response_mask].abs().max() > 0.1
    for rank in ranks:
        mask = batch.response_mask[rank["indices"]]
        for name, other in (("log_probs", "log_probs"), ("reference", "before")):
            values = expected[other][rank["indices"], : rank[name].shape[1]]
            mask = mask[:, : rank[name].shape[1]]
            torch.testing.assert_close(rank[name][mask], values[mask], rtol=1e-4, atol=1e-4)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert not rank["has_copy"]
        assert rank["trained_after_reference"]
        assert all(map(is_adapter, rank["names"]))
    _require_merged(models[architecture], ranks[0], config)


def _require_merged(model_path: Path, rank: dict[str, Any], config: Config) -> None:
    """Merged weights are the model's plus scale x B x A, for adapted ones alone."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    whole = {name.removeprefix("causal_lm."): each for name, each in rank["whole"].items()}
    num_adapted = 0
    for name, sent in rank["merged"].items():
        module = name.removesuffix(".weight")
        first = whole.get(f"{module}.lora_A.default.weight")
        if first is None:
            assert ".experts." in name or torch.equal(sent, model.get_parameter(name)), name
            continue
        num_adapted += 1
        update = config.train.lora.scale * whole[f"{module}.lora_B.default.weight"] @ first
        merged = model.get_parameter(name) + update
        torch.testing.assert_close(sent, merged, rtol=0, atol=1e-6)
        assert update.abs().max() > 1e-3
    assert num_adapted == 2 * len(config.train.lora.targets)


def test_in_bfloat16_only_adapters_are_wide_and_have_moments(models: dict[str, Path]) -> None:
    config = _config(models["qwen3"], num_ranks=2, dtype="bfloat16")
    rank = run_ranks(2, _two_updates, config, _batch(), 64)[0]
    assert rank["dtypes"] == {(True, torch.float32), (False, torch.bfloat16)}
    trained = sum(each.numel() for name, each in rank["whole"].items() if not name.endswith(" m"))
    assert rank["moments"] == pytest.approx(trained, rel=0.05)  # two moments on half of the rows
    expected = _plain_updates(_config(models["qwen3"]), _batch())
    assert rank["norms"] == pytest.approx(expected["norms"], rel=0.05)


def _saved_and_resumed(rank: int, config: Config, folder: str) -> list[Any]:
    batch = _batch()
    shares, _ = split_batch(batch, config.train.num_data_ranks, 64)
    totals = LossTotals.of(batch, config.train.num_data_ranks)
    found = []
    for is_resumed in (False, True):
        policy = Policy(config.model.path or "", config)
        if is_resumed:
            policy.load(folder)
        else:
            policy.update(shares[rank], totals)
            policy.save(folder, asynchronous=False)
        policy.update(shares[rank], totals)
        found.append(_whole(policy))
    return [*found, policy.checkpoint_bytes()]


def _load(rank: int, config: Config, folder: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        Policy(config.model.path or "", config).load(folder)
    return str(raised.value)


def test_a_checkpoint_holds_adapters_alone_and_resumes_to_the_bit(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Even with dropout, whose random numbers the checkpoint continues."""
    lora = {**LORA, "dropout": 0.2}
    config = _config(models["qwen3"], lora, num_ranks=2)
    ranks = run_ranks(2, _saved_and_resumed, config, str(tmp_path))
    for whole, resumed, _ in ranks:
        assert all(torch.equal(resumed[name], each) for name, each in whole.items())
    stored = read_metadata(tmp_path).state_dict_metadata
    saved = [name for name in stored if name.startswith(("model.", "optimizer."))]
    assert len(saved) == 28 * 4  # each with step and two moments
    assert all(".lora_" in name for name in saved)
    num_adapted = sum(each.numel() for n, each in ranks[0][0].items() if not n.endswith(" m"))
    assert sum(rank[2] for rank in ranks) == pytest.approx(12 * num_adapted, rel=0.01)
    other = _config(models["qwen3"], {**lora, "rank": 5})
    assert "cannot be loaded" in run_ranks(1, _load, other, str(tmp_path))[0]


@dataclass(frozen=True)
class Trained:
    """A training output with one checkpoint of adapters, and the policy behind it."""

    model: Path
    output: Path
    log_probs: torch.Tensor


def _train_and_save(rank: int, model_path: Path, folder: str) -> torch.Tensor:
    policy = Policy(model_path, _config(model_path))
    share = split_batch(_batch(), 1, 4096)[0][0]
    for _ in range(3):
        policy.update(share, LossTotals.of(_batch()))
    policy.save(folder, asynchronous=False)
    return policy.log_probs(share).log_probs[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    model = build_tiny(folder / "model", "qwen3", seed=3)
    log_probs = run_ranks(1, _train_and_save, model, str(folder / "shards"))[0]
    config = make_config(model, train={**TRAIN, "lora": LORA}, checkpoint={"asynchronous": False})

    def save(target: str) -> None:
        shutil.copytree(folder / "shards", target, dirs_exist_ok=True)

    writer = CheckpointWriter(folder / "output" / "checkpoints", model, ShardsOf(save), config)
    identity = {"model": model_fingerprint(model)}
    writer.begin(replace(make_state(step=7), identity=identity))
    return Trained(model, folder / "output", log_probs)


def _first_log_probs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return one_by_one(model.eval(), _batch().select([0]))[0][0]


def test_the_merged_model_and_its_adapter_equal_the_policy(
    trained: Trained, tmp_path: Path
) -> None:
    """In transformers, in peft, and once the adapter is merged again."""
    merge_checkpoint([trained.output], tmp_path / "merged", verify_logits=True)
    adapter = tmp_path / "merged" / ADAPTER_FOLDER
    merge_checkpoint([adapter], tmp_path / "again")
    base = AutoModelForCausalLM.from_pretrained(trained.model)
    expected = trained.log_probs[: len(_first_log_probs(base))]
    assert (_first_log_probs(base) - expected).abs().max() > 0.1
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "again"),
        PeftModel.from_pretrained(base, adapter),
    ):
        torch.testing.assert_close(_first_log_probs(model), expected, rtol=0, atol=1e-5)
    manifest = json.loads((tmp_path / "merged" / MERGE_MANIFEST).read_text())
    assert manifest["rounding_error"] == 0
    assert manifest["source"]["lora"]["rank"] == 4
    assert f"{ADAPTER_FOLDER}/adapter_model.safetensors" in manifest["files"]


def test_a_merge_says_what_its_precision_loses(
    trained: Trained,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora, "LARGE_ERROR", 0.01)
    merge_checkpoint([trained.output], tmp_path / "half", dtype="bfloat16")
    error = json.loads((tmp_path / "half" / MERGE_MANIFEST).read_text())["rounding_error"]
    merged, base = (load_file(path / SINGLE_FILE) for path in (tmp_path / "half", trained.model))
    merge_checkpoint([trained.output], tmp_path / "exact")
    exact = load_file(tmp_path / "exact" / SINGLE_FILE)
    lost = sum(
        float((merged[name].float() - exact[name]).square().sum())
        for name in base
        if "proj" in name
    )
    total = sum(float((exact[name] - base[name]).square().sum()) for name in base if "proj" in name)
    assert error == pytest.approx((lost / total) ** 0.5, rel=1e-3)
    assert f"loses {100 * error:.0f} % of what the adapter changes" in caplog.text


def test_an_adapter_without_its_base_is_named(trained: Trained, tmp_path: Path) -> None:
    merge_checkpoint([trained.output], tmp_path / "merged")
    adapter = tmp_path / "merged" / ADAPTER_FOLDER
    merged = model_fingerprint(tmp_path / "merged")
    hidden = trained.model.rename(trained.model.with_name("elsewhere"))
    try:
        for source, error, way_on in (
            (trained.output, CheckpointError, "pass its folder to dapo merge --base"),
            (adapter, ModelError, rf"name its folder in {adapter / ADAPTER_CONFIG} \(base_model"),
        ):
            missing = r"is an adapter of the model \S+/model, but this machine has no such folder; "
            with pytest.raises(error, match=missing + way_on):
                merge_checkpoint([source], tmp_path / "none")
            merge_checkpoint([source], tmp_path / error.__name__, base=hidden)
            assert model_fingerprint(tmp_path / error.__name__) == merged
        build_tiny(trained.model, "qwen3", seed=4)
        for source, error in ((trained.output, CheckpointError), (adapter, ModelError)):
            with pytest.raises(error, match="was trained on another model than the one in"):
                merge_checkpoint([source], tmp_path / "none")
    finally:
        shutil.rmtree(trained.model, ignore_errors=True)
        hidden.rename(trained.model)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("rank", "num_left", "fit"), [(4, 8, 0), (2, 7, 6), (2, 0, 0)])
def test_an_adapter_that_does_not_fit_its_base_is_refused(
    trained: Trained, tmp_path: Path, rank: int, num_left: int, fit: int
) -> None:
    """Another rank would scale it wrongly; missing tensors would leave weights as they are."""
    adapter = build_adapter(tmp_path / "adapter", trained.model, "q_proj", "down_proj")
    config = adapter / ADAPTER_CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": rank}))
    tensors = load_file(adapter / ADAPTER_FILE)
    save_file(dict(list(tensors.items())[:num_left]), adapter / ADAPTER_FILE)
    fault = rf"has {num_left} tensors, of which {fit} fit {trained.model} as .* rank {rank}; merge"
    with pytest.raises(CheckpointError, match=fault):
        merge_checkpoint([adapter], tmp_path / "none")


def test_an_adapter_of_a_training_that_diverged_is_refused(
    trained: Trained, tmp_path: Path
) -> None:
    adapter = build_adapter(tmp_path / "adapter", trained.model, "q_proj")
    tensors = load_file(adapter / ADAPTER_FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, adapter / ADAPTER_FILE)
    with pytest.raises(CheckpointError, match=r"lora_A.weight in \S+/adapter contains NaN"):
        merge_checkpoint([adapter], tmp_path / "none")


def test_an_adapter_as_model_path_is_opened_on_its_base(trained: Trained, tmp_path: Path) -> None:
    merge_checkpoint([trained.output], tmp_path / "merged")
    adapter = ModelConfig(path=str(tmp_path / "merged" / ADAPTER_FOLDER))
    (tmp_path / "fetched").mkdir()
    link_model_folder(adapter, tmp_path / "fetched")
    fetched = AutoModelForCausalLM.from_pretrained(tmp_path / "fetched")
    expected = trained.log_probs[: len(_first_log_probs(fetched))]
    torch.testing.assert_close(_first_log_probs(fetched), expected, rtol=0, atol=1e-5)


def test_the_chain_merges_adapters_in_the_recipes_precision(
    trained: Trained, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "store", "train.lora.rank=4", "merge.dtype=bfloat16")

    def build(folder: Path) -> dict[str, Any]:
        shutil.copytree(trained.output, folder, dirs_exist_ok=True)
        return {}

    with Run.start(config, "merge-checkpoint") as run:
        made = produce(run, Outcome(), ("prepare_data", "fetch_model"))
        key = link_of(config, "train_policy").key(*made.values())
        training = run.produce("train_policy", key, build)
        merged = chain.merge_checkpoint.fn(run, training).result()
    assert isinstance(merged, Artifact)
    folder = Path(merged.path)
    manifest = json.loads((folder / MERGE_MANIFEST).read_text())
    assert {tensor["dtype"] for tensor in manifest["tensors"].values()} == {"bfloat16"}
    assert 0 < manifest["rounding_error"] < 1
    adapter = load_file(folder / ADAPTER_FOLDER / ADAPTER_FILE)
    assert {each.dtype for each in adapter.values()} == {torch.float32}
