"""Weights reach the engines completely, and checks detect if they do not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_core.algorithm.balance import split_batch
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.engines.base import Sequences
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.errors import RolloutError
from dapo_core.machine.device import Cpu
from dapo_core.metrics.engine_checks import probe_difference
from dapo_core.model.inputs import ModelInput
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.model.sharding import local_part
from dapo_core.policy.model import reshard
from dapo_core.policy.rank import Policy
from dapo_core.weights.inbox import Delivery
from dapo_core.weights.links import Link
from dapo_core.weights.plan import plan_buckets
from dapo_core.weights.proof import merge_checksums, require_arrived
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import ARCHITECTURES, Architecture, build_tiny, tiny_engine_settings
from tests.vllm_experts import runs_experts

PROBE = random_batch(num_groups=2, group_size=2)
LORA = {"rank": 3, "alpha": 9}


class InProcess:
    """A policy rank on a thread and one worker, called as RolloutGroup and WeightTransfer do."""

    def __init__(self, rank: Policy, worker: RolloutWorker) -> None:
        self.rank = rank
        self.worker = worker
        self.connect()

    def connect(self, on_device: bool = False) -> None:
        """Connect the worker to the rank."""
        plan = self.rank.weight_plan()
        link = Link(True, self.rank.open_outbox(1, on_device), 0, 1, on_device)
        self.worker.connect(link, plan)

    def send(self, policy_version: int) -> None:
        """Send all buckets to the engine and verify them."""
        plan = self.rank.weight_plan()
        with ThreadPoolExecutor(1) as executor:
            sending = executor.submit(self.rank.send_weights)
            self.worker.receive_weights(policy_version)
            sent = merge_checksums([sending.result()])
        require_arrived(
            plan, sent, {"rollout worker 0 of 1": self.worker.loaded_weights()}, policy_version
        )

    def log_probs(self, sequences: Sequences) -> list[list[list[float]]]:
        """Return the log-probs of the one engine."""
        return [self.worker.log_probs(sequences)]


@pytest.fixture(scope="module", params=[("qwen3", True)], ids=["tied"])
def shared_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sync")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    cluster = _start(folder / "model", "vllm", *request.param)  # architecture, tied, lora
    yield cluster
    cluster.rollouts.worker.close()
    if torch.distributed.is_initialized():  # closing vLLM ends the group
        torch.distributed.destroy_process_group()


def _start(
    path: Path, engine_name: str, architecture: Architecture, is_tied: bool, lora: str = ""
) -> Any:
    """Start a policy rank and an engine in this process, with the attributes of cluster.Cluster.

    lora: the engine's form of adapters; "" trains all weights.
    """
    model_path = build_tiny(path, architecture, seed=5, tie_word_embeddings=is_tied)
    sections = (
        {"train": {"lora": LORA}, "rollout": {"lora": lora, "dtype": "float32"}} if lora else {}
    )
    config = make_config(model_path, **sections)
    settings = replace(tiny_engine_settings(), lora=engine_settings(config, Cpu()).lora)
    rank = Policy(model_path, config)
    worker = RolloutWorker(
        lambda: build_engine(engine_name, model_path, settings, seed=0),
        load_tokenizer(model_path),
        config,
    )
    policy = SimpleNamespace(
        rank=rank,
        log_probs=lambda batch, temperature: rank.log_probs(
            split_batch(batch, 1, 4096)[0][0], temperature
        ),
    )
    both = InProcess(rank, worker)
    return SimpleNamespace(policy=policy, rollouts=both, weights=both)


@pytest.fixture
def cluster(shared_cluster: Any) -> Iterator[Any]:
    """The shared cluster; the initial weights are restored afterwards."""
    first = {name: shard.detach().clone() for name, shard in _shards(shared_cluster).items()}
    yield shared_cluster
    with torch.no_grad():
        for name, shard in _shards(shared_cluster).items():
            shard.copy_(first[name])
    shared_cluster.weights.send(0)


def _shards(cluster: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters, resharded: a forward pass may leave the root gathered."""
    model: Any = cluster.policy.rank.model
    reshard(model)
    return dict(model.causal_lm.named_parameters())


def _multiply(cluster: Any, name: str, factor: float) -> None:
    with torch.no_grad():
        _shards(cluster)[name].mul_(factor)


def _with_plan(cluster: Any, **changes: Any) -> None:
    """Reconnect the rank with a different plan."""
    rank = cluster.policy.rank
    plan = rank.weights.plan
    tensors, dtype = plan.tensors.values(), changes.get("dtype", plan.dtype)
    rank.weights.plan = plan_buckets(tensors, dtype, changes.get("max_bytes", 2**29))
    cluster.weights.connect()


def test_weights_are_sent_in_the_engines_dtype(cluster: Any) -> None:
    rank = cluster.policy.rank
    whole = sent_weights(rank)
    _with_plan(cluster, dtype=torch.bfloat16)
    halves = sent_weights(rank)
    assert whole is not None
    assert halves is not None
    assert all(torch.equal(halves[name], tensor.bfloat16()) for name, tensor in whole.items())
    _with_plan(cluster, dtype=torch.float32)


def _engine_log_probs(cluster: Any) -> torch.Tensor:
    """Return the engine's log-probs of the first probe response."""
    start, count = int(PROBE.prompt_lengths[0]), int(PROBE.response_lengths[0])
    ids = PROBE.token_ids[0].tolist()
    sequence = ModelInput(tuple(ids[:start])), ids[start : start + count]
    return torch.tensor(cluster.rollouts.log_probs([sequence])[0][0])


def _difference(cluster: Any) -> float:
    log_probs = cluster.policy.log_probs(PROBE, 1.0).log_probs
    return probe_difference(cluster.rollouts.log_probs, PROBE, log_probs, [torch.float32])


def _require_every_weight_arrives(cluster: Any, is_tied: bool) -> None:
    """Change each weight by a different factor, so that swapped weights are detected."""
    for number, name in enumerate(_shards(cluster)):
        _multiply(cluster, name, 1.02 + 0.01 * number)
    before = _engine_log_probs(cluster)
    cluster.weights.send(3)
    after = _engine_log_probs(cluster)
    expected = cluster.policy.log_probs(PROBE, 1.0)[0][0, : len(after)]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-2
    assert _difference(cluster) < 1e-4
    names = list(cluster.policy.rank.weight_plan().tensors)
    assert list(cluster.rollouts.worker.loaded_weights().checksums) == names
    assert ("lm_head.weight" in names) == (not is_tied)


@runs_experts
@pytest.mark.parametrize("shared_cluster", [("qwen3_moe", False)], indirect=True, ids=["experts"])
def test_experts_reach_vllm(shared_cluster: Any) -> None:
    _require_every_weight_arrives(shared_cluster, is_tied=False)
    assert (
        "model.layers.1.mlp.experts.4.up_proj.weight"
        in shared_cluster.policy.rank.weight_plan().tensors
    )


def _sync_into_transformers(
    rank: int, path: Path, architecture: Architecture, is_tied: bool
) -> None:
    _require_every_weight_arrives(_start(path, "hf", architecture, is_tied), is_tied)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_every_architecture_reaches_the_transformers_engine(
    tmp_path: Path, architecture: Architecture, is_tied: bool
) -> None:
    run_ranks(1, _sync_into_transformers, tmp_path, architecture, is_tied)


def _require_adapters_arrive(cluster: Any, lora: str) -> None:
    """Three updates; the engine follows each, and its base is the model's."""
    base = cluster.policy.log_probs(PROBE, 1.0)[0]
    draw = torch.Generator().manual_seed(0)
    for version in (1, 2, 3):
        before = _engine_log_probs(cluster)
        for name, shard in _shards(cluster).items():
            if ".lora_" in name:
                with torch.no_grad():
                    local_part(shard).add_(torch.randn(shard.shape, generator=draw) * 0.1)
        cluster.weights.send(version)
        after = _engine_log_probs(cluster)
        assert (after - before).abs().max() > 1e-2
        assert _difference(cluster) < 1e-5
    names = cluster.rollouts.worker.loaded_weights().checksums
    assert len(names) == (2 * 2 * 7 if lora == "adapter" else 2 * 11 + 2)
    assert all(("lora_" in name) == (lora == "adapter") for name in names)
    assert (cluster.policy.log_probs(PROBE, 1.0)[0] - base).abs().max() > 0.1


# Merged adapters are sent as all weights are.
in_vllm = pytest.mark.parametrize(
    "shared_cluster", [("qwen3", True, "adapter")], indirect=True, ids=["adapter"]
)


@in_vllm
def test_adapters_reach_vllm(shared_cluster: Any) -> None:
    _require_adapters_arrive(shared_cluster, "adapter")


def _adapters_into_transformers(rank: int, path: Path, lora: str) -> None:
    _require_adapters_arrive(_start(path, "hf", "qwen3", True, lora), lora)


@pytest.mark.parametrize("lora", ["adapter", "merged"])
def test_adapters_reach_the_transformers_engine(tmp_path: Path, lora: str) -> None:
    run_ranks(1, _adapters_into_transformers, tmp_path, lora)


@in_vllm
def test_an_engine_with_an_old_adapter_is_detected(cluster: Any) -> None:
    """By its log-probs."""
    for name in _shards(cluster):
        if ".lora_B." in name:
            with torch.no_grad():
                _shards(cluster)[name].add_(0.1)
    with pytest.raises(RolloutError, match="the engine does not have the policy's weights"):
        _difference(cluster)


def test_an_engine_with_old_weights_is_detected(cluster: Any) -> None:
    assert _difference(cluster) < 1e-4
    _multiply(cluster, "model.layers.0.mlp.down_proj.weight", 1.5)
    with pytest.raises(RolloutError) as caught:
        _difference(cluster)
    message = str(caught.value)
    assert "the engine does not have the policy's weights" in message
    assert "more than the 0.001 that float32 explains" in message
    assert "rollout.dtype=float32" in message
    cluster.weights.send(1)
    assert _difference(cluster) < 1e-4


@pytest.fixture
def small_buckets(cluster: Any) -> Iterator[Any]:
    """The cluster with buckets of 50,000 bytes."""
    _with_plan(cluster, max_bytes=50_000)
    assert len(cluster.policy.rank.weight_plan().buckets) >= 4
    yield cluster
    _with_plan(cluster)


def test_every_weight_reaches_vllm_in_several_buckets(small_buckets: Any) -> None:
    _require_every_weight_arrives(small_buckets, is_tied=True)
    assert small_buckets.rollouts.worker.engine.policy_version == 3


@pytest.fixture
def file_system() -> Iterator[None]:
    """Share CPU tensors through files: the default handles only work in child processes."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def test_every_weight_arrives_through_ipc_handles(small_buckets: Any, file_system: None) -> None:
    """Like a rank and an engine on the same device."""
    small_buckets.weights.connect(on_device=True)
    for _ in range(2):  # each sync has new slots
        _require_every_weight_arrives(small_buckets, is_tied=True)


def _no_copy(outbox: Any, number: int) -> Any:
    """Wrap Outbox.slot so that this bucket is gathered elsewhere and a stale one is sent."""
    slot, first = outbox.slot, outbox._number

    def other() -> torch.Tensor:
        real = slot()
        return torch.empty_like(real) if outbox._number - first == number else real

    return other


def test_a_bucket_sent_twice_is_detected(
    small_buckets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _multiply(small_buckets, "model.norm.weight", 1.01)
    outbox = small_buckets.policy.rank.outbox
    monkeypatch.setattr(outbox, "slot", _no_copy(outbox, 3))
    with pytest.raises(
        RolloutError, match=r"^rollout worker 0 of 1 loaded other bytes than the policy ranks sent"
    ):
        small_buckets.weights.send(4)


def test_a_skipped_tensor_is_detected(small_buckets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine if it was not sent, by the checksums if the loader skipped it."""
    loaded = small_buckets.rollouts.worker.loaded_weights
    norm = "model.norm.weight"

    def skip(delivery: Delivery) -> Any:
        tensors = original(delivery)
        for name, tensor in tensors:
            if name != norm:
                yield name, tensor

    original = Delivery.__iter__
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "__iter__", skip)
        with pytest.raises(
            RolloutError, match=r"1 of \d+ tensors are missing: model\.norm\.weight"
        ):
            small_buckets.weights.send(4)
    small_buckets.weights.send(5)
    del loaded().checksums[norm]
    plan = small_buckets.policy.rank.weight_plan()
    sent = {name: (0,) for name in plan.tensors}
    with pytest.raises(RolloutError, match=r"did not load 1 \(model\.norm\.weight\) of"):
        require_arrived(plan, sent, {"rollout worker 0 of 1": loaded()}, 5)
    del sent[norm]
    with pytest.raises(
        RolloutError, match=r"the policy ranks did not send 1 \(model\.norm\.weight\) of"
    ):
        require_arrived(plan, sent, {}, 5)
