"""Weights in buckets, and a probe that no engine with other weights passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_core.batch import build_batch
from dapo_core.errors import RolloutError
from dapo_core.weight_sync import plan_buckets, probe_difference, probe_log_probs, publish_weights
from tests.batches import make_group

NAN = float("nan")


def _probe(engines: list[list[list[float]]], dtype: str = "float32") -> float:
    """The difference for responses of 2 and 1 tokens whose policy log-probs are -1, -2 and -3."""
    group = make_group([1.0, 1.0], num_response_tokens=[2, 1], num_prompt_tokens=3)
    batch = build_batch([group], mask_truncated=False)
    temperatures, asked = [], []

    def policy_log_probs(probe: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        temperatures.append(temperature)
        return torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.zeros(2, 2)

    def engine_log_probs(sequences: Any) -> list[list[list[float]]]:
        asked.extend(sequences)
        return engines

    cluster: Any = SimpleNamespace(
        policy=SimpleNamespace(log_probs=policy_log_probs), rollouts=SimpleNamespace(log_probs=engine_log_probs)
    )
    difference = probe_difference(cluster, batch, probe_log_probs(cluster, batch), ["float32", dtype])
    assert asked == [(list(group.prompt.prompt_ids), rollout.response_ids) for rollout in group.rollouts]
    assert temperatures == [1.0]
    return difference


def test_buckets_keep_the_order_and_the_bound() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 11, "e": 1, "f": 9}
    assert plan_buckets(sizes, max_bytes=10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]  # d alone is larger
    assert plan_buckets({}, max_bytes=10) == []


@pytest.mark.parametrize("version", [7, 5])
def test_all_weights_reach_every_engine_with_their_version(version: int) -> None:
    loaded = []

    def load_weights(buckets: Any, policy_version: int) -> list[int]:
        loaded.append((buckets, policy_version))
        return [policy_version, version]

    mebibytes = {"a": 300 * 1024**2, "b": 300 * 1024**2, "c": 4}
    cluster: Any = SimpleNamespace(
        policy=SimpleNamespace(weight_sizes=lambda: mebibytes, gather_weights=lambda buckets: buckets),
        rollouts=SimpleNamespace(load_weights=load_weights),
    )
    if version == 7:
        publish_weights(cluster, policy_version=7)
    else:
        with pytest.raises(RolloutError, match=r"1 of 2 engines hold policy versions \[5\] after version 7"):
            publish_weights(cluster, policy_version=7)
    assert loaded == [([["a"], ["b", "c"]], 7)]  # 300 + 300 MiB exceed 512 MiB


def test_the_worst_engine_counts_and_its_precision_is_the_limit() -> None:
    # first engine: (0 + 0 + 0.0003) / 3 = 0.0001; second: (0.0003 + 0.0006 + 0) / 3 = 0.0003
    engines = [[[-1.0, -2.0], [-3.0003]], [[-1.0003, -1.9994], [-3.0]]]
    assert _probe(engines) == pytest.approx(3e-4, rel=1e-3)
    assert _probe([[[-1.0, -2.0], [-3.3]]], "bfloat16") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ([[[-1.0, -2.0], [-3.3]]], r"differ from the policy's by 0\.1 nats per token, more than the 0\.001"),
        ([[[NAN, -2.0], [-3.0]]], "by nan nats per token"),
        ([[[-1.0, -2.0], [-3.0]], [[-1.0, NAN], [-3.0]]], "by nan nats per token"),
        ([[[], []]], "gave 0 log-probs for a probe of 3 response tokens"),
        ([[[-1.0], [-3.0]]], "gave 2 log-probs for a probe of 3 response tokens"),
    ],
)
def test_an_engine_with_other_weights_is_refused(engines: list[list[list[float]]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _probe(engines)
