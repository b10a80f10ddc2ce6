"""The NaN guard names the module that produced the first non-finite number, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch, TokenStats
from dapo_core.algorithm.loss import LossSums, LossTotals
from dapo_core.algorithm.update import Fault, Update
from dapo_core.cluster.actors import Actors
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.policy.nan_guard import MAX_SEARCHES
from dapo_core.policy.rank import Policy
from flows.config import Config
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny


class _BadBackward(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / 0


def _searched(rank: int, config: Config, batch: Batch) -> dict[str, Any]:
    """What the guard says of faults planted one after the other, and whether the model trains
    without them.
    """
    policy = Policy(config.model.path or "", config)
    policy._searches_left = 99
    layer: Any = policy.model.causal_lm.model.layers[1]  # type: ignore[union-attr, index]
    share, totals = split_batch(batch, 2, max_tokens=40)[0][rank], LossTotals.of(batch, 2)
    found: dict[str, Any] = {"sound": policy.update(share, totals)}

    def planted(name: str, module: torch.nn.Module, spoil: Any) -> None:
        handle = module.register_forward_hook(lambda module, arguments, output: spoil(output))
        found[name] = policy.update(share, totals)
        handle.remove()

    planted("forward", layer.mlp.act_fn, lambda output: output / 0 if rank == 1 else output)
    planted("backward", layer.self_attn.o_proj, lambda output: _BadBackward.apply(output))
    weight = layer.mlp.down_proj.weight
    with torch.no_grad():
        weight.to_local()[0, 0] = float("nan")
    found["weight"] = policy.update(share, totals)
    policy._searches_left = MAX_SEARCHES
    found["searches"] = [
        policy.update(share, totals).fault is not None for _ in range(MAX_SEARCHES + 1)
    ]
    return found


def test_the_nan_guard_names_module_rank_and_micro_batch(tmp_path: Path) -> None:
    train = {"num_ranks": 2}
    config = make_config(
        build_tiny(tmp_path / "model", "qwen3"), train=train, rollout={"group_size": 4}
    )
    ranks = run_ranks(2, _searched, config, random_batch(6, 4, seed=1))
    for found in ranks:
        assert (found["sound"].is_skipped, found["sound"].fault) == (False, None)
        assert all(found[name].is_skipped for name in ("forward", "backward", "weight"))
        assert found["searches"] == [True] * MAX_SEARCHES + [False]
    faults = {
        name: [str(found[name].fault) for found in ranks]
        for name in ("forward", "backward", "weight")
    }
    # The other rank's numbers are sound until gradients are summed: the lower order is where it
    # began.
    assert [found["forward"].fault.order for found in ranks] == [3, 0]
    assert faults["forward"][1] == "the output of model.layers.1.mlp.act_fn (rank 1, micro-batch 0)"
    backward = "a gradient from the backward pass of model.layers.1.self_attn.o_proj"
    assert faults["backward"] == [f"{backward} (rank {rank}, micro-batch 0)" for rank in (0, 1)]
    assert faults["weight"][0] == "weight of model.layers.1.mlp.down_proj (rank 0, micro-batch 0)"


def test_the_nan_warning_names_the_step_and_what_to_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of two optimizer steps of training step 7 is skipped."""
    config = make_config(train={"train_prompts": 4, "mini_prompts": 2}, rollout={"group_size": 2})
    group = PolicyGroup([], config, Actors(), hidden_size=64)
    fault = Fault(0, "the output of model.layers.1.mlp", micro_batch=2, rank=5)
    sums = LossSums(0, 0, 4, 0, 0, 0)
    done = [
        Update(sums, 1.0, False, 1e-6, policy_version=13),
        Update(sums, float("nan"), True, 1e-6, policy_version=14, fault=fault),
    ]
    monkeypatch.setattr(group, "update", lambda mini_batch, with_stats: done.pop(0))
    batch = random_batch(4, 2)
    group.learn(batch, TokenStats(batch.rollout_log_probs, batch.rollout_log_probs), step=7)
    (said,) = caplog.messages
    assert said.startswith(
        "step 7: the gradient norm is nan, so optimizer step 14 is skipped. First non-finite "
        "number: the output of model.layers.1.mlp (rank 5, micro-batch 2). If this continues, "
        "rule out causes: "
    )
    assert "train.fused_kernels=[]" in said
