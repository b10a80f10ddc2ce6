"""The routing of a mixture of experts in real updates: its sums, and its load-balancing loss."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeTopKRouter,
    load_balancing_loss_func,
)

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.update import RoutingSums, Update
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.config.algorithm import AlgorithmConfig
from dapo_core.errors import ModelError, RolloutError
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.routers import UNKNOWN_EXPERT, returns_probabilities
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_trainable
from dapo_core.training import train
from durable import read_json_lines
from flows.config import Config
from tests.batches import random_batch
from tests.configs import make_config
from tests.in_process import Threads, _Actor, without_ray
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny
from tests.trainings import World, config_of

AUX = {"router_aux_loss_coefficient": 0.5}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=3, num_experts=8)


def _batch() -> Batch:
    return random_batch(num_groups=1, group_size=3, seed=1)


def test_the_load_balancing_loss_is_that_of_transformers_for_each_sequence(moe: Path) -> None:
    """Weighted by tokens, with the same gradient of the routers."""
    batch = _batch()
    model = TokenLogProbs(
        AutoModelForCausalLM.from_pretrained(moe), 16, keeps_router_logits=True
    ).train()
    row = pack(batch, torch.device("cpu"))
    model(row, 1.0, False)
    num_tokens, lengths = int(batch.lengths.sum()), torch.from_numpy(batch.lengths)
    loss = model.routing.balance_loss(row, lengths, num_tokens)
    loss.backward()
    plain = AutoModelForCausalLM.from_pretrained(moe).train()
    expected = torch.zeros(())
    for ids, count in zip(batch.token_ids.long(), batch.lengths.tolist(), strict=True):
        logits = plain(ids[None, :count], output_router_logits=True).router_logits
        if returns_probabilities(Qwen3MoeTopKRouter.forward):
            logits = tuple(each.log() for each in logits)
        expected = expected + load_balancing_loss_func(logits, 8, 2) * count / num_tokens
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert abs(loss.item() - 2) > 0.01  # uneven
    for own, its in zip(model.causal_lm.parameters(), plain.parameters(), strict=True):
        if its.grad is not None:
            torch.testing.assert_close(own.grad, its.grad, rtol=1e-4, atol=1e-7)


def test_routers_that_return_probabilities_as_logits_are_replayed_alike(
    moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changed between the versions of the two supported sets."""
    draw, batch = np.random.default_rng(0), _batch()
    given = [
        np.argsort(draw.random((count, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
        for count in batch.lengths
    ]
    model = TokenLogProbs(AutoModelForCausalLM.from_pretrained(moe), 16).train()
    row = pack(replace(batch, routing=given), torch.device("cpu"))
    expected, _ = model(row, 1.0, False)
    entropy = torch.stack(model.routing.entropy)
    forward = Qwen3MoeTopKRouter.forward
    is_probability = returns_probabilities(forward)

    def other(router: Any, hidden: torch.Tensor) -> Any:
        first, *others = forward(router, hidden)
        if is_probability:  # logits of any mean
            return first.log() - first.log().mean(dim=-1, keepdim=True), *others
        return first.softmax(dim=-1), *others

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", other)
    assert returns_probabilities(other) != is_probability
    found, _ = model(row, 1.0, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack(model.routing.entropy), entropy, rtol=1e-5, atol=1e-5)


def _updated(rank: int, config: Config, batch: Batch, max_tokens: int) -> Update:
    policy = Policy(config.model.path or "", config)
    shares, _ = split_batch(batch, config.train.num_data_ranks, max_tokens)
    policy.log_probs(shares[rank // config.train.sequence_parallel])
    totals = LossTotals.of(batch, config.train.num_data_ranks)
    return policy.update(shares[rank // config.train.sequence_parallel], totals)


def _whole(ranks: list[Update]) -> RoutingSums:
    return reduce(add, [update.routing for update in ranks if update.routing is not None])


def test_no_routing_metric_and_no_gradient_depends_on_micro_batches_and_ranks(moe: Path) -> None:
    """Also with a rank without responses, and with rows padded for their ranks."""
    batch = _batch()

    def run(max_tokens: int, algorithm: dict[str, Any] = AUX, **train: Any) -> list[Update]:
        settings = {"learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e3, **train}
        config = make_config(
            moe, train={"train_prompts": 1, "mini_prompts": 1, **settings}, algorithm=algorithm
        )
        return run_ranks(train.get("num_ranks", 1), _updated, config, batch, max_tokens)

    whole = run(4096)
    sums = _whole(whole)
    assert sums.num_tokens == batch.lengths.sum()
    assert [sum(layer) for layer in sums.loads] == [2 * sums.num_tokens] * 2  # both layers' top-2
    assert whole[0].grad_norm != pytest.approx(run(4096, {})[0].grad_norm, rel=1e-3)
    splits: list[tuple[int, dict[str, Any]]] = [
        (30, {"num_ranks": 4}),
        (30, {"num_ranks": 4, "expert_parallel": 2}),
        (25, {"num_ranks": 2, "sequence_parallel": 2, "gradient_checkpointing": False}),
    ]
    for max_tokens, split in splits:
        ranks = run(max_tokens, **split)
        found = _whole(ranks)
        assert found.loads == sums.loads
        assert found.num_tokens == sums.num_tokens
        assert found.entropy == pytest.approx(sums.entropy, rel=1e-5)
        assert found.balance_loss == pytest.approx(sums.balance_loss, rel=1e-5)
        assert ranks[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-4)


def _routed_each(rank: int, cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [_routed(rank, *case) for case in cases]


def _routed(
    rank: int, config: Config, batch: Batch, max_tokens: int
) -> tuple[list[Any], Update, list[np.ndarray]]:
    policy = Policy(config.model.path or "", config)
    shares, indices = split_batch(batch, config.train.num_data_ranks, max_tokens)
    share = shares[rank // config.train.sequence_parallel]
    rows = indices[rank // config.train.sequence_parallel].tolist()
    _, routing = policy.routed_log_probs(share)
    update = policy.update(share, LossTotals.of(batch, config.train.num_data_ranks))
    return rows, update, routing


def _counts(routing: Sequence[np.ndarray]) -> list[list[int]]:
    experts = np.concatenate(routing)
    return [np.bincount(experts[:, layer].ravel(), minlength=8).tolist() for layer in (0, 1)]


SPLITS: list[tuple[int, dict[str, Any]]] = [
    (25, {"sequence_parallel": 2}),
    (25, {"sequence_parallel": 2, "expert_parallel": 2}),
    (25, {"sequence_parallel": 2, "gradient_checkpointing": False}),
    (30, {"expert_parallel": 2}),
]


def test_a_replayed_token_is_processed_by_the_given_experts_on_any_split(moe: Path) -> None:
    """The last token of each sequence, of unknown routing, keeps the policy's own."""
    draw = np.random.default_rng(0)
    own = _batch()
    given = [
        np.argsort(draw.random((count, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
        for count in own.lengths
    ]
    for experts in given:
        experts[-1] = UNKNOWN_EXPERT
    batch = replace(own, routing=given)
    settings = {"train_prompts": 1, "mini_prompts": 1, "max_grad_norm": 1e3}
    one = make_config(moe, train=settings)
    [[(_, expected, recorded), (_, free, _)]] = run_ranks(
        1, _routed_each, [(one, batch, 4096), (one, own, 4096)]
    )
    assert free.grad_norm != pytest.approx(expected.grad_norm, rel=1e-3)
    for experts, found in zip(given, recorded, strict=True):
        assert np.array_equal(experts[:-1], found[:-1])
        assert found[-1].max() < 8
    assert expected.routing is not None
    assert expected.routing.loads == _counts(recorded)
    cases = [
        (make_config(moe, train={**settings, "num_ranks": 2, **train}), batch, max_tokens)
        for max_tokens, train in SPLITS
    ]
    for ranks in zip(*run_ranks(2, _routed_each, cases), strict=True):
        by_row: dict[int, np.ndarray] = {}
        for rows, _, routing in ranks:
            by_row |= dict(zip(rows, routing, strict=True))
        for row, experts in enumerate(recorded):
            assert np.array_equal(by_row[row], experts)
        assert _whole([update for _, update, _ in ranks]).loads == expected.routing.loads
        assert ranks[0][1].grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def _learned(rank: int, config: Config, batch: Batch) -> list[Update]:
    with without_ray():
        actor = _Actor(lambda: Policy(config.model.path or "", config))
        group = PolicyGroup([actor], config, Threads(), hidden_size=64)
        anchored, stats = group.anchor(batch, PhaseTimer())
        updates, _ = group.learn(anchored, stats, 1)
        return updates


def test_routing_of_the_anchor_holds_in_all_updates_of_a_step(moe: Path) -> None:
    """Large steps move a router's choice; replayed, only probabilities change."""
    train: dict[str, Any] = {"train_prompts": 4, "mini_prompts": 2, "passes": 3}
    train |= {"shuffle_passes": False, "learning_rate": 1e-2, "warmup_steps": 0}
    batch = random_batch(num_groups=4, group_size=3, seed=1)
    kept, free = (
        run_ranks(
            1, _learned, make_config(moe, train=train, algorithm={"routing_replay": name}), batch
        )[0]
        for name in ("policy", "off")
    )
    loads = [[update.routing.loads for update in updates] for updates in (kept, free)]
    assert loads[0] == loads[0][:2] * 3
    assert loads[1][0] == loads[0][0]  # before the first update
    assert loads[1][2:] != loads[1][:2] * 2


def test_a_training_replays_its_engine_also_in_groups_from_a_checkpoint(
    world: World, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surplus groups, sampled by older weights, are carried over each step and the resume."""
    batches: list[Batch] = []
    losses: list[Update] = []

    def learn(group: PolicyGroup, batch: Batch, *others: Any) -> Any:
        batches.append(batch)
        updates, stats = learned(group, batch, *others)
        losses.extend(updates)
        return updates, stats

    learned = PolicyGroup.learn
    monkeypatch.setattr(PolicyGroup, "learn", learn)

    def run(name: str, total_steps: int) -> list[dict[str, Any]]:
        config = config_of(
            algorithm={"routing_replay": "rollout"},
            serve={"max_model_len": 256},
            data={"max_prompt_tokens": 200},
            train={"num_ranks": 1, "total_steps": total_steps, "learning_rate": 1e-2},
        )
        with without_ray():
            train(config, world.data, moe, tmp_path / name)
        return read_json_lines(tmp_path / name / METRICS_FILE)

    whole = run("whole", 3)
    assert max(line["sampler/staleness/max"] for line in whole) > 0
    run("parts", 2)
    parts = run("parts", 3)
    for name in ("actor/pg_loss", "actor/entropy", "router/load/max", "router/entropy"):
        assert [line[name] for line in parts] == [line[name] for line in whole]
    assert len(batches) == 3 + 3
    for batch in batches:
        assert batch.routing is not None
        for experts, count in zip(batch.routing, batch.lengths.tolist(), strict=True):
            assert experts.shape == (count, 2, 2)
            assert experts[:-1].max() < 8
    given = np.sum([_counts([each[:-1] for each in batches[0].routing or []])], axis=0)
    used = np.sum([update.routing.loads for update in losses[:2] if update.routing], axis=0)
    assert (used - given).min() >= 0
    assert (used - given).sum() == 2 * 2 * batches[0].num_responses  # the last tokens, by itself


def test_a_replay_of_nothing_is_not_a_silent_training_without_replay() -> None:
    config = make_config(algorithm={"routing_replay": "rollout"})
    group = PolicyGroup([], config, Threads(), hidden_size=64)
    with pytest.raises(RolloutError, match=r"no routing for any of 3 responses.*vLLM 0\.23"):
        group.anchor(_batch(), PhaseTimer())


def test_a_replay_without_an_anchor_pass_is_refused() -> None:
    with pytest.raises(ValidationError, match="routing_replay=policy replays the policy's pass"):
        AlgorithmConfig.model_validate({"routing_replay": "policy", "old_log_probs": "engine"})


@pytest.mark.parametrize(
    ("rollout", "device", "message"),
    [
        ({"pipeline_parallel": 2}, "cpu", "in one pipeline stage and without drafts"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "npu", "or routing_replay=policy"),
    ],
)
def test_a_replay_of_an_engine_whose_routing_is_unknown_is_refused(
    rollout: dict[str, Any], device: str, message: str
) -> None:
    replay, train = {"routing_replay": "rollout"}, {"device": device}
    with pytest.raises(ValidationError, match=message):
        make_config(algorithm=replay, rollout={"engine": "vllm", **rollout}, train=train)
    vllm = {"engine": "vllm", "tensor_parallel": 2}
    for kind in ("cpu", "cuda", "npu"):
        make_config(algorithm=replay, rollout=vllm, train={"device": kind})


def test_a_dense_model_is_refused_instead_of_trained_without_its_auxiliary_loss(
    tmp_path: Path,
) -> None:
    path = build_tiny(tmp_path / "dense", "qwen3")
    with pytest.raises(ModelError, match=r"aux_loss_coefficient=0\.5 .* Qwen3ForCausalLM"):
        require_trainable(make_config(path, algorithm=AUX), path)
    with pytest.raises(ModelError, match=r"routing_replay=policy needs a mixture"):
        require_trainable(make_config(path, algorithm={"routing_replay": "policy"}), path)
