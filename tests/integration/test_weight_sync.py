"""Weights from a policy rank into engines, and the probe that detects when they did not arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_core import weight_sync
from dapo_core.batch import split_batch
from dapo_core.engines.base import build_engine
from dapo_core.errors import RolloutError
from dapo_core.policy.model import reshard
from dapo_core.policy.rank import Policy
from dapo_core.pretrained import load_tokenizer
from dapo_core.rollout import RolloutWorker
from dapo_core.weight_sync import probe_difference, probe_log_probs, publish_weights
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.tiny_models import ARCHITECTURES, Architecture, build_tiny, tiny_engine_settings

PROBE = random_batch(num_groups=2, group_size=2)


class InProcessRollouts:
    """One worker behind the calls of cluster.RolloutGroup; keeps the names in the buckets that it loaded."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self.buckets: list[list[str]] = []

    def load_weights(self, buckets: list[dict[str, torch.Tensor]], policy_version: int) -> list[int]:
        """All buckets into the engine."""
        self.buckets = [list(bucket) for bucket in buckets]
        return [self.worker.load_weights((pair for bucket in buckets for pair in bucket.items()), policy_version)]

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        """The engine's log-probs, for one engine."""
        return [self.worker.log_probs(sequences)]


@pytest.fixture(scope="module", params=[("qwen3", True), ("qwen3", False)], ids=["tied", "untied"])
def shared_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sync")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    cluster = _start(folder / "model", "vllm", *request.param)
    yield cluster
    cluster.rollouts.worker.close()
    if torch.distributed.is_initialized():  # closing vLLM ends the group
        torch.distributed.destroy_process_group()


def _start(path: Path, engine_name: str, architecture: Architecture, is_tied: bool) -> Any:
    """A policy rank and an engine in this process, with the attributes of cluster.Cluster."""
    model_path = build_tiny(path, architecture, seed=5, tie_word_embeddings=is_tied)
    rank = Policy(model_path, make_config(model_path))
    worker = RolloutWorker(
        lambda: build_engine(engine_name, model_path, tiny_engine_settings(), seed=0),
        load_tokenizer(model_path),
        make_config(model_path),
    )
    policy = SimpleNamespace(
        rank=rank,
        log_probs=lambda batch, temperature: rank.log_probs(split_batch(batch, 1, 4096)[0][0], temperature),
        weight_sizes=rank.weight_sizes,
        gather_weights=lambda buckets: [rank.gather_weights(names) for names in buckets],
    )
    return SimpleNamespace(policy=policy, rollouts=InProcessRollouts(worker))


@pytest.fixture
def cluster(shared_cluster: Any) -> Iterator[Any]:
    """The shared cluster; policy and engine get their first weights back afterwards."""
    first = {name: shard.detach().clone() for name, shard in _shards(shared_cluster).items()}
    yield shared_cluster
    with torch.no_grad():
        for name, shard in _shards(shared_cluster).items():
            shard.copy_(first[name])
    publish_weights(shared_cluster, 0)


def _shards(cluster: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that the optimizer changes; reshards the root, which a forward pass may leave gathered."""
    model: Any = cluster.policy.rank.model
    reshard(model)
    return dict(model.causal_lm.named_parameters())


def _multiply(cluster: Any, name: str, factor: float) -> None:
    with torch.no_grad():
        _shards(cluster)[name].mul_(factor)


def test_weights_travel_in_the_precision_of_the_engines(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = cluster.policy.rank
    sizes = rank.weight_sizes()
    whole = rank.gather_weights(list(sizes))
    monkeypatch.setattr(rank, "engine_dtype", torch.bfloat16)
    assert rank.weight_sizes() == {name: size // 2 for name, size in sizes.items()}
    assert all(
        torch.equal(half, whole[name].bfloat16()) for name, half in rank.gather_weights(list(sizes)).items()
    )


def _engine_log_probs(cluster: Any) -> torch.Tensor:
    """The engine's log-probs of the probe's first response."""
    start, count = int(PROBE.prompt_lengths[0]), int(PROBE.response_lengths[0])
    ids = PROBE.token_ids[0].tolist()
    return torch.tensor(cluster.rollouts.log_probs([(ids[:start], ids[start : start + count])])[0][0])


def _require_every_weight_arrives(cluster: Any, is_tied: bool) -> None:
    """Each weight changes by a different factor, so that no two can be confused."""
    for number, name in enumerate(_shards(cluster)):
        _multiply(cluster, name, 1.02 + 0.01 * number)
    before = _engine_log_probs(cluster)
    publish_weights(cluster, 3)
    after = _engine_log_probs(cluster)
    expected = cluster.policy.log_probs(PROBE, 1.0)[0][0, : len(after)]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-2
    assert probe_difference(cluster, PROBE, probe_log_probs(cluster, PROBE), ["float32"]) < 1e-4
    names = [name for bucket in cluster.rollouts.buckets for name in bucket]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) == (not is_tied)


@pytest.mark.parametrize("shared_cluster", [("qwen3_moe", True)], indirect=True, ids=["experts"])
def test_experts_arrive_in_vllm(shared_cluster: Any) -> None:
    _require_every_weight_arrives(shared_cluster, is_tied=True)
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in shared_cluster.rollouts.buckets[0]


def _sync_into_transformers(rank: int, path: Path, architecture: Architecture, is_tied: bool) -> None:
    _require_every_weight_arrives(_start(path, "hf", architecture, is_tied), is_tied)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_every_architecture_arrives_in_the_transformers_engine(
    tmp_path: Path, architecture: Architecture, is_tied: bool
) -> None:
    run_ranks(1, _sync_into_transformers, tmp_path, architecture, is_tied)


def test_an_engine_with_old_weights_is_detected(cluster: Any) -> None:
    assert probe_difference(cluster, PROBE, probe_log_probs(cluster, PROBE), ["float32"]) < 1e-4
    _multiply(cluster, "model.layers.0.mlp.down_proj.weight", 1.5)
    with pytest.raises(RolloutError) as caught:
        probe_difference(cluster, PROBE, probe_log_probs(cluster, PROBE), ["float32"])
    message = str(caught.value)
    assert "the engine does not hold the policy's weights" in message
    assert "more than the 0.001 that float32 explains" in message
    assert "rollout.dtype=float32" in message
    publish_weights(cluster, 1)
    assert probe_difference(cluster, PROBE, probe_log_probs(cluster, PROBE), ["float32"]) < 1e-4


def test_every_weight_arrives_in_vllm_in_several_buckets(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 50_000)
    sizes = cluster.policy.weight_sizes()
    _require_every_weight_arrives(cluster, is_tied="lm_head.weight" not in sizes)
    assert len(cluster.rollouts.buckets) >= 4
    assert [name for bucket in cluster.rollouts.buckets for name in bucket] == list(sizes)
    for bucket in cluster.rollouts.buckets:
        assert len(bucket) == 1 or sum(sizes[name] for name in bucket) <= 50_000
    assert cluster.rollouts.worker.engine.policy_version == 3
