"""Weights in buckets, and a probe that lets no engine with other weights pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from dapo_core.batch import Batch, build_batch
from dapo_core.errors import RolloutError
from dapo_core.weight_sync import plan_buckets, probe_difference, publish_weights
from tests.batches import make_group

if TYPE_CHECKING:
    from dapo_core.cluster.start import Cluster

NAN = float("nan")


@dataclass
class FixedPolicy:
    """A policy of known log-probs and weights."""

    values: torch.Tensor
    temperatures: list[float | None] = field(default_factory=list)

    def log_probs(self, batch: Batch, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.temperatures.append(temperature)
        return self.values, torch.zeros_like(self.values)

    def weight_sizes(self) -> dict[str, int]:
        return {"a": 300 * 1024**2, "b": 300 * 1024**2, "c": 4}

    def gather_weights(self, buckets: list[list[str]]) -> list[list[str]]:
        return buckets


@dataclass
class FixedEngines:
    """Engines of known log-probs, which remember what they were given."""

    rows: list[list[list[float]]]  # of each engine, of each response
    sequences: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)
    loaded: list[tuple[list[Any], int]] = field(default_factory=list)
    late: int = 0  # versions that the second engine stays behind

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        self.sequences += sequences
        return self.rows

    def load_weights(self, buckets: list[Any], policy_version: int) -> list[int]:
        self.loaded.append((buckets, policy_version))
        return [policy_version, policy_version - self.late]


@dataclass
class FixedCluster:
    """The two roles that a weight sync talks to."""

    policy: FixedPolicy
    rollouts: FixedEngines


def _cluster(policy: FixedPolicy, engines: FixedEngines) -> Cluster:
    return cast("Cluster", FixedCluster(policy, engines))


def _probe(engines: list[list[list[float]]], dtype: str = "float32") -> float:
    """The difference for responses of 2 and 1 tokens whose policy log-probs are -1, -2 and -3."""
    group = make_group([1.0, 1.0], num_response_tokens=[2, 1], num_prompt_tokens=3)
    batch = build_batch([group], mask_truncated=False)
    policy, rollouts = FixedPolicy(torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])), FixedEngines(engines)
    difference = probe_difference(_cluster(policy, rollouts), batch, ["float32", dtype])
    prompt_ids = list(group.prompt.prompt_ids)
    assert rollouts.sequences == [(prompt_ids, rollout.response_ids) for rollout in group.rollouts]
    assert policy.temperatures == [1.0]
    return difference


def test_buckets_keep_the_order_and_the_bound() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 11, "e": 1, "f": 9}
    assert plan_buckets(sizes, max_bytes=10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]  # d alone is larger
    assert plan_buckets({}, max_bytes=10) == []


def test_the_worst_engine_counts() -> None:
    # first engine: (0 + 0 + 0.0003) / 3 = 0.0001; second: (0.0003 + 0.0006 + 0) / 3 = 0.0003
    engines = [[[-1.0, -2.0], [-3.0003]], [[-1.0003, -1.9994], [-3.0]]]
    assert _probe(engines) == pytest.approx(3e-4, rel=1e-3)


def test_all_weights_reach_every_engine_with_their_version() -> None:
    engines = FixedEngines([])
    cluster = _cluster(FixedPolicy(torch.zeros(1, 1)), engines)
    publish_weights(cluster, policy_version=7)
    assert engines.loaded == [([["a"], ["b", "c"]], 7)]  # 300 + 300 MiB exceed 512 MiB
    engines.late = 2
    with pytest.raises(RolloutError, match=r"1 of 2 engines hold policy versions \[5\] after version 7"):
        publish_weights(cluster, policy_version=7)


def test_an_engine_with_other_weights_is_refused_by_its_precision() -> None:
    engines = [[[-1.0, -2.0], [-3.3]]]  # 0.1 nats per token
    assert _probe(engines, "bfloat16") == pytest.approx(0.1)
    with pytest.raises(
        RolloutError, match=r"differ from the policy's by 0\.1 nats per token, more than the 0\.001"
    ):
        _probe(engines, "float32")


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ([[[NAN, -2.0], [-3.0]]], "by nan nats per token"),
        ([[[-1.0, -2.0], [-3.0]], [[-1.0, NAN], [-3.0]]], "by nan nats per token"),
        ([[[], []]], "gave 0 log-probs for a probe of 3 response tokens"),
        ([[[-1.0], [-3.0]]], "gave 2 log-probs for a probe of 3 response tokens"),
    ],
)
def test_log_probs_that_are_nan_or_left_out_are_no_proof(engines: list[list[list[float]]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _probe(engines)
