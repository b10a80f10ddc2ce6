"""Offloading, with the meta device in place of an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dapo_core.config.training import TrainConfig
from dapo_core.device import device_for
from dapo_core.policy.model import load_sharded, move_model, move_optimizer
from tests.integration.test_sharded_model import IDS, Logits
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny

META, CPU = torch.device("meta"), torch.device("cpu")


def _moments(optimizer: torch.optim.AdamW) -> Iterator[tuple[torch.Tensor, DTensor]]:
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            yield parameter, state[name]


def _move_away(rank: int, path: Path, num_ranks: int) -> dict[str, bool]:
    """What holds once weights and moments are on the meta device."""
    model: Any = load_sharded(path, TrainConfig(num_ranks=num_ranks), device_for("cpu"), Logits)
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS).logsumexp(-1).mean().backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.to_local().shape for name, parameter in parameters.items()}
    with torch.no_grad():
        model(IDS)  # leaves the root whole
    move_model(model, META)
    move_optimizer(optimizer, META)
    moments = list(_moments(optimizer))
    return {
        "weights are away": all(parameter.to_local().is_meta for parameter in model.parameters()),
        "buffers are away": all(buffer.is_meta for buffer in model.buffers()),
        "weights are the optimizer's": set(map(id, model.parameters())) == set(map(id, optimizer.state)),
        "moments are away": all(moment.to_local().is_meta for _, moment in moments),
        "moments are shards": all(
            isinstance(moment, DTensor) and moment.placements == parameter.placements
            for parameter, moment in moments
        ),
        "step counts stay": all(state["step"].device == CPU for state in optimizer.state.values()),
        "same objects": all(parameters[name] is parameter for name, parameter in model.named_parameters()),
        "shapes stay": {name: parameter.to_local().shape for name, parameter in parameters.items()} == shapes,
        "every parameter has moments": len(moments) == 2 * len(parameters),
    }


def test_weights_and_moments_move_and_remain_the_same_parameters_and_shards(tmp_path: Path) -> None:
    build_tiny(tmp_path, "qwen3_moe", seed=9)
    for facts in run_ranks(3, _move_away, tmp_path, 3):
        assert [fact for fact, holds in facts.items() if not holds] == []
