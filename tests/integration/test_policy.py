"""FSDP2 ranks over gloo: log-probs, gradients and weights do not depend on the split."""

import logging
import re
from dataclasses import replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import heartbeat
from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.correction import importance_weights
from dapo_core.algorithm.loss import LossTotals, PolicyLoss, policy_loss
from dapo_core.algorithm.losses import LOSSES
from dapo_core.errors import ModelError
from dapo_core.model.folder import SINGLE_FILE
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_trainable
from flows.config import Config
from tests.batches import loss_tokens_of, one_by_one, random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import build_tiny

TRAIN = {
    "train_prompts": 6,
    "mini_prompts": 6,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "logits_chunk_tokens": 9,  # cuts most micro-batches into several chunks
}
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by architecture, with tied and untied output heads."""
    folder = tmp_path_factory.mktemp("models")
    is_tied = {"qwen3": True, "qwen3_moe": True, "llama": False}
    return {
        name: build_tiny(folder / name, name, seed=3, tie_word_embeddings=tied)
        for name, tied in is_tied.items()
    }


def _config(
    model_path: Path, train: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    sections = {"rollout": {"temperature": TEMPERATURE, "group_size": 4}, **sections}
    return make_config(model_path, train=TRAIN | (train or {}), **sections)


def _batch() -> Batch:
    """18 responses, one empty and one masked, with old and reference log-probs."""
    batch = random_batch(num_groups=6, group_size=3, seed=1)
    batch.response_lengths[4] = 0
    batch.response_mask[4], batch.response_mask[7] = False, False
    draw = torch.Generator().manual_seed(0)
    old = torch.rand(batch.response_mask.shape, generator=draw) * 0.4 - 5.5
    old[~batch.response_mask] = float("nan")  # padding must not matter
    selected = torch.rand(batch.response_mask.shape, generator=draw) < 0.3
    return replace(batch, old_log_probs=old, ref_log_probs=old + 0.3, is_selected=selected)


def _update(rank: int, config: Config, batch: Batch, max_tokens: int) -> dict[str, Any]:
    """Return log-probs, one update, and the weights after it."""
    torch.compile = partial(torch.compile, backend="eager")  # inductor takes 40 s
    policy = Policy(config.model.path or "", config)
    shares, indices = split_batch(batch, config.train.num_data_ranks, max_tokens)
    number = rank // config.train.sequence_parallel
    log_probs, entropy = policy.log_probs(shares[number])
    totals = LossTotals.of(batch, config.train.num_data_ranks)
    update = policy.update(shares[number], totals)
    return {
        "indices": indices[number],
        "log_probs": log_probs[: len(indices[number])],
        "entropy": entropy[: len(indices[number])],
        "update": update,
        "weights": sent_weights(policy),
    }


def _expected(config: Config, batch: Batch) -> dict[str, Any]:
    """Run the same update in one process without FSDP: one sequence at a time, full logits."""
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, experts_implementation="eager"
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.train.learning_rate, weight_decay=0.0
    )
    log_probs, entropy = one_by_one(model, batch, TEMPERATURE)
    tokens = loss_tokens_of(batch, config.algorithm)
    part = policy_loss(log_probs, entropy, tokens, config.algorithm)
    part.loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    optimizer.step()
    model.save_pretrained(Path(config.model.path or "") / "expected")
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "pg_loss": part.sums.pg_loss,
        "kl_loss": part.sums.kl_loss,
        "norm": grad_norm.item(),
        "weights": load_file(Path(config.model.path or "") / "expected" / SINGLE_FILE),
    }


def _require_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], batch: Batch) -> None:
    for rank in ranks:
        width = rank["log_probs"].shape[1]
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(
                rank[name], expected[name][rank["indices"], :width], rtol=1e-5, atol=1e-5
            )
        assert rank["update"].grad_norm == pytest.approx(expected["norm"], rel=1e-4)
    sums = reduce(add, (rank["update"].sums for rank in ranks))
    assert sums.pg_loss == pytest.approx(expected["pg_loss"], rel=1e-5)
    assert sums.kl_loss == pytest.approx(expected["kl_loss"], rel=1e-5)
    assert sums.num_tokens == int(batch.response_mask.sum())
    weights = ranks[0]["weights"]
    assert set(weights) == set(expected["weights"])
    for name, weight in weights.items():
        # AdamW's first step moves each weight by lr * sign(gradient): compare where the gradient is
        # not noise
        close = torch.isclose(weight, expected["weights"][name], rtol=1e-4, atol=1e-4)
        assert close.float().mean() > 0.995, name
    assert all(rank["weights"] is None for rank in ranks[1:])


def _gradients_between(rank: int, config: Config, batch: Batch) -> list[set[type]]:
    """Return the gradient types before each micro-batch after the first."""
    policy = Policy(config.model.path or "", config)
    shares, _ = split_batch(batch, config.train.num_data_ranks, 30)
    micro_loss, found = policy._micro_loss, []

    def watched(*arguments: Any) -> PolicyLoss:
        found.append({type(parameter.grad) for parameter in policy.model.parameters()})
        return micro_loss(*arguments)

    policy._micro_loss = watched  # type: ignore[method-assign]
    policy.update(shares[rank], LossTotals.of(batch))
    return found[1:]


def test_gradients_are_sharded_after_every_micro_batch(models: dict[str, Path]) -> None:
    """Unreduced gradients would not be in `grad`."""
    for found in run_ranks(
        4, _gradients_between, _config(models["qwen3"], {"num_ranks": 4}), _batch()
    ):
        assert found == [{DTensor}] * len(found) != []


def _anchored_or_not(rank: int, config: Config, batch: Batch, max_tokens: int) -> list[Any]:
    """Return [stats, update, weights] of a step with a separate anchor pass, and of one without."""
    found = []
    for is_anchored in (True, False):
        policy = Policy(config.model.path or "", config)
        shares, _ = split_batch(batch, config.train.num_data_ranks, max_tokens)
        share = shares[rank // config.train.sequence_parallel]
        stats = policy.log_probs(share) if is_anchored else None
        if stats is not None:
            known = (stats.log_probs, share.batch.rollout_log_probs, share.batch.response_mask)
            weights = importance_weights(*known, share.batch.is_stale, config.rollout_correction)
            anchored = replace(
                share.batch, old_log_probs=stats.log_probs, importance_weights=weights
            )
            share = replace(share, batch=anchored)
        update = policy.update(
            share, LossTotals.of(batch, config.train.num_data_ranks), with_stats=not is_anchored
        )
        weights = sent_weights(policy)
        found.append([stats or update.stats, replace(update, stats=None), weights])
    return found


KL_AND_ENTROPY = {"kl": {"place": "loss", "coefficient": 0.5}, "entropy_coefficient": 0.2}


@pytest.mark.parametrize(
    ("architecture", "train", "max_tokens", "algorithm"),
    [
        ("qwen3", {"num_ranks": 1}, 24, {}),
        ("qwen3", {"num_ranks": 1, "compile": True}, 45, {}),
        ("qwen3", {"num_ranks": 3}, 30, {}),
        # several micro-batches, all-reduced after the last
        ("qwen3", {"num_ranks": 4, "fsdp_size": 2}, 30, {}),
        ("qwen3", {"num_ranks": 2}, 64, KL_AND_ENTROPY),
        ("qwen3_moe", {"num_ranks": 2, "sequence_parallel": 2}, 64, {}),
        ("llama", {"num_ranks": 2, "sequence_parallel": 2}, 64, {}),
    ],
)
def test_an_update_equals_the_plain_single_process_update(
    models: dict[str, Path],
    architecture: str,
    train: dict[str, Any],
    max_tokens: int,
    algorithm: dict[str, Any],
) -> None:
    config, batch = _config(models[architecture], train, algorithm=algorithm), _batch()
    expected = _expected(config, batch)
    assert (expected["kl_loss"] > 0.01) == ("kl" in algorithm)
    _require_equal(
        run_ranks(config.train.num_ranks, _update, config, batch, max_tokens), expected, batch
    )


def _update_each(rank: int, configs: list[Config], batch: Batch) -> list[dict[str, Any]]:
    return [_update(rank, config, batch, max_tokens=45) for config in configs]


def test_no_loss_depends_on_micro_batches_ranks_or_cut_responses(models: dict[str, Path]) -> None:
    train = {"num_ranks": 4, "sequence_parallel": 2}
    configs = [_config(models["qwen3"], train, algorithm={"loss": name}) for name in LOSSES]
    batch = _batch()
    found = run_ranks(4, _update_each, configs, batch)
    norms = set()
    for config, ranks in zip(configs, zip(*found, strict=True), strict=True):
        expected = _expected(config, batch)
        _require_equal(list(ranks), expected, batch)
        norms.add(expected["norm"])
    assert len(norms) == len(LOSSES)


@pytest.mark.parametrize(
    ("architecture", "train", "max_tokens", "algorithm"),
    [
        ("qwen3", {"num_ranks": 2}, 30, {}),  # weights of stale tokens
        (
            "qwen3",
            {"num_ranks": 4, "sequence_parallel": 2},
            45,
            {"rollout_correction": {"importance": "token"}},
        ),
        ("qwen3", {"num_ranks": 1, "gradient_checkpointing": False}, 64, {"compat": "verl"}),
        ("qwen3_moe", {"num_ranks": 2}, 64, KL_AND_ENTROPY),
    ],
)
def test_a_single_update_needs_no_anchor_pass(
    models: dict[str, Path],
    architecture: str,
    train: dict[str, Any],
    max_tokens: int,
    algorithm: dict[str, Any],
) -> None:
    """Weights, sums, norm, log-probs and entropy have the same bits as with an anchor pass."""
    config, batch = _config(models[architecture], train, algorithm=algorithm), _batch()
    draw = torch.Generator().manual_seed(1)
    sampled = torch.rand(batch.response_mask.shape, generator=draw) * 2 - 6.5
    stale = torch.rand(batch.response_mask.shape, generator=draw) < 0.5
    batch = replace(batch, old_log_probs=None, rollout_log_probs=sampled, is_stale=stale)
    losses = set()
    for anchored, plain in run_ranks(
        config.train.num_ranks, _anchored_or_not, config, batch, max_tokens
    ):
        for before, own in zip(anchored[0], plain[0], strict=True):
            assert torch.equal(before, own)
            assert before.abs().max() > 1
        assert anchored[1] == plain[1]
        assert (plain[1].sums.clipped, plain[1].sums.neg_log_ratio) == (0, 0)
        losses.add(plain[1].sums.pg_loss)
        for name, weight in (anchored[2] or {}).items():
            assert torch.equal(weight, plain[2][name]), name
    if config.rollout_correction.importance == "stale":
        batch = replace(batch, is_stale=torch.zeros_like(stale))
        fresh = run_ranks(config.train.num_ranks, _anchored_or_not, config, batch, max_tokens)
        assert losses.isdisjoint(rank[1][1].sums.pg_loss for rank in fresh)


@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(4, 4096), (2, 21)])
def test_a_rank_without_work_does_not_change_the_gradient(
    models: dict[str, Path], num_ranks: int, max_tokens: int
) -> None:
    """Three responses on four ranks, or one rank with more micro-batches than the other."""
    batch = _batch().select([0, 1, 6])
    shares, _ = split_batch(batch, num_ranks, max_tokens)
    assert any(len(indices) == 0 for share in shares for indices in share.micro_batches)
    config = _config(models["qwen3"], {"num_ranks": num_ranks})
    _require_equal(
        run_ranks(num_ranks, _update, config, batch, max_tokens), _expected(config, batch), batch
    )


def test_bfloat16_gives_the_same_within_its_precision(models: dict[str, Path]) -> None:
    batch = _batch()
    config = _config(models["qwen3"], {"num_ranks": 2, "sequence_parallel": 2, "dtype": "bfloat16"})
    expected = _expected(config, batch)
    rank, _ = run_ranks(2, _update, config, batch, 64)
    difference = (rank["log_probs"] - expected["log_probs"][rank["indices"]]).abs()
    # bfloat16 keeps 8 bits: logits of about 5 are within 0.01 or so
    assert 1e-4 < difference.mean() < 0.02
    assert rank["update"].grad_norm == pytest.approx(expected["norm"], rel=0.02)
    # the master weights
    assert {weight.dtype for weight in rank["weights"].values()} == {torch.float32}


def _progress_lines(rank: int, config: Config, batch: Batch) -> list[str]:
    heartbeat.SECONDS = 0.002
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    heartbeat.logger.addFilter(keep)
    heartbeat.logger.setLevel(logging.INFO)
    policy = Policy(config.model.path or "", config)
    shares, _ = split_batch(batch, config.train.num_data_ranks, 30)
    policy.log_probs(shares[rank])
    policy.update(shares[rank], LossTotals.of(batch))
    return lines


def test_a_long_update_says_how_many_micro_batches_are_done(models: dict[str, Path]) -> None:
    config = _config(models["qwen3"], {"num_ranks": 2})
    first, second = run_ranks(2, _progress_lines, config, _batch())
    found = [re.fullmatch(r"(\S+): (\d+) of (\d+) micro-batches \(.*\)", line) for line in first]
    assert {match[1] for match in found if match} == {"log-probs", "update"}
    done = [int(match[2]) for match in found if match and match[1] == "update"]
    assert done == sorted(done)
    assert len(set(done)) > 1
    assert second == []  # one rank speaks for all


def _reference_before_and_after(rank: int, config: Config, batch: Batch) -> list[torch.Tensor]:
    policy = Policy(config.model.path or "", config)
    shares, _ = split_batch(batch, 1, 64)
    before = policy.ref_log_probs(shares[0])
    same = policy.log_probs(shares[0])[0]
    policy.update(shares[0], LossTotals.of(batch))
    return [before, same, policy.ref_log_probs(shares[0]), policy.log_probs(shares[0])[0]]


def test_the_reference_model_does_not_change(models: dict[str, Path]) -> None:
    config = _config(
        models["llama"],
        {"num_ranks": 2, "sequence_parallel": 2},
        algorithm={"kl": {"place": "loss"}},
    )
    for before, same, after, moved in run_ranks(2, _reference_before_and_after, config, _batch()):
        assert torch.equal(before, after)
        torch.testing.assert_close(before, same, rtol=1e-6, atol=1e-6)
        assert (moved - same).abs().max() > 0.1


def _infinite_loss(rank: int, config: Config, batch: Batch) -> Any:
    policy = Policy(config.model.path or "", config)
    before = sent_weights(policy)
    shares, _ = split_batch(batch, 2, 4096)
    update = policy.update(shares[rank], LossTotals.of(batch))
    return before, sent_weights(policy), update


def test_a_non_finite_norm_skips_the_update(models: dict[str, Path]) -> None:
    batch = random_batch(num_groups=2, group_size=2)
    batch = replace(batch, old_log_probs=torch.full_like(batch.rollout_log_probs, -2.0))
    batch.advantages[1] = float("inf")
    before, after, update = run_ranks(
        2, _infinite_loss, _config(models["qwen3"], {"num_ranks": 2}), batch
    )[0]
    assert update.is_skipped
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def _deterministic(rank: int, config: Config, batch: Batch) -> tuple[bool, list[Any]]:
    results = [_update(rank, config, batch, 64) for _ in range(2)]
    return torch.are_deterministic_algorithms_enabled(), [result["weights"] for result in results]


def test_deterministic_runs_give_the_same_bits(models: dict[str, Path]) -> None:
    config = _config(models["qwen3_moe"], run={"deterministic": True})
    is_enabled, (first, second) = run_ranks(1, _deterministic, config, _batch())[0]
    assert is_enabled
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_unsupported_model_is_refused_at_the_start(
    models: dict[str, Path], tmp_path: Path
) -> None:
    divided = {"num_ranks": 2, "expert_parallel": 2}
    (tmp_path / "config.json").write_bytes((models["qwen3"] / "config.json").read_bytes())
    for path, train, message in (
        (models["qwen3"], divided, r"^train\.expert_parallel=2, but qwen3 has no experts"),
        (
            models["qwen3_moe"],
            divided,
            r"qwen3_moe has 5 experts in a layer.*\.expert_parallel=2 ranks; use one of \[1, 5\]",
        ),
        (tmp_path, {}, r"lacks weights \(\*\.safetensors\) and a tokenizer"),
        (tmp_path / "nowhere", {}, r"does not exist; set model\.path"),
    ):
        with pytest.raises(ModelError, match=message):
            require_trainable(_config(path, train), path)


def _gradients(rank: int, configs: list[Config], batch: Batch) -> list[tuple[Any, ...]]:
    """Return the weights to send, and an update's norm and whole gradients, by configuration."""
    found = []
    for config in configs:
        train = config.train
        policy = Policy(config.model.path or "", config)
        sent = sent_weights(policy)
        shares, _ = split_batch(batch, train.num_data_ranks, 45)
        totals = LossTotals.of(batch, train.num_data_ranks)
        norm = policy.update(shares[rank // train.sequence_parallel], totals).grad_norm
        parameters: Any = policy._causal_lm().named_parameters()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in parameters}
        found.append((sent, norm, gradients))
    return found


def _without_routers(path: Path) -> Path:
    """Zero the routers: experts are equally likely, and all tokens get the same ones."""
    tensors = load_file(path / SINGLE_FILE)
    zeroed = {name: each * (".mlp.gate." not in name) for name, each in tensors.items()}
    save_file(zeroed, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


def _with_fused_experts(path: Path) -> Path:
    """Name the experts in the file as transformers does: one tensor holds those of a layer."""
    tensors = load_file(path / SINGLE_FILE)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fused = {name: each for name, each in tensors.items() if ".experts." not in name}
    fused |= {name: each for name, each in model.named_parameters() if ".experts." in name}
    save_file(fused, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


def _require_same_gradients(path: Path, trains: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Assert that the ranks' gradients are those of one process, which are returned."""
    batch, files = _batch(), load_file(path / SINGLE_FILE)
    plain = {"max_grad_norm": 1e9}  # clips nothing
    _, expected_norm, expected = run_ranks(1, _gradients, [_config(path, plain)], batch)[0][0]
    num_ranks = trains[0]["num_ranks"]
    configs = [_config(path, plain | train) for train in trains]
    for train, ranks in zip(
        trains, zip(*run_ranks(num_ranks, _gradients, configs, batch), strict=True), strict=True
    ):
        sent, norm, gradients = ranks[0]
        assert {rank[1] for rank in ranks} == {norm}
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).norm()
            assert error <= 2e-6 * gradient.norm(), (name, train)
        assert sent.keys() == files.keys()
        assert all(torch.equal(sent[name], weight) for name, weight in files.items())
    return expected


@pytest.mark.parametrize(("num_ranks", "is_fused"), [(2, True), (4, False), (4, True)])
def test_experts_divided_over_ranks_learn_like_those_of_one_process(
    tmp_path: Path, num_ranks: int, is_fused: bool
) -> None:
    """On four ranks, FSDP2 splits three experts unevenly over two of them."""
    path = build_tiny(tmp_path, "qwen3_moe", seed=3, num_experts=6)
    path = _with_fused_experts(path) if is_fused else path
    divided = {"num_ranks": num_ranks, "expert_parallel": 2}
    _require_same_gradients(path, [divided, {**divided, "sequence_parallel": 2}])


def test_a_rank_whose_experts_get_no_tokens_takes_part(tmp_path: Path) -> None:
    path = _without_routers(build_tiny(tmp_path, "qwen3_moe", seed=3, num_experts=6))
    divided = {"num_ranks": 2, "expert_parallel": 2}
    expected = _require_same_gradients(path, [divided, {**divided, "sequence_parallel": 2}])
    by_expert = expected["model.layers.1.mlp.experts.down_proj"].flatten(1).norm(dim=1)
    assert not by_expert[:3].any() or not by_expert[3:].any()


class _GroupedProducts(TorchDispatchMode):
    """Counts grouped matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def _grouped_products(rank: int, config: Config, batch: Batch) -> tuple[int, int]:
    """Return the number of micro-batches of an update, and of its grouped products."""
    policy = Policy(config.model.path or "", config)
    shares, _ = split_batch(batch, config.train.num_data_ranks, 45)
    with _GroupedProducts() as products:
        policy.update(shares[rank], LossTotals.of(batch, config.train.num_data_ranks))
    return len(shares[rank].micro_batches), products.count


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layers_experts_are_multiplied_at_once_and_not_one_by_one(
    tmp_path: Path, num_ranks: int
) -> None:
    """Two products in a forward pass, two when it is recomputed, and four backward."""
    path = build_tiny(tmp_path, "qwen3_moe", seed=3, num_experts=6)
    config = _config(path, {"num_ranks": num_ranks, "expert_parallel": num_ranks})
    for num_passes, num_products in run_ranks(num_ranks, _grouped_products, config, _batch()):
        assert num_products == 2 * (2 + 2 + 4) * num_passes > 0  # of both layers
