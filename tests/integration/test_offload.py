"""Weights and moments leave the device and come back; the meta device stands for one that this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from dapo_core.config.training import TrainConfig
from dapo_core.device import device_for
from dapo_core.policy.model import load_sharded, move_model, move_optimizer
from tests.integration.test_sharded_model import IDS, Logits
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny

META, CPU = torch.device("meta"), torch.device("cpu")


def _trained(path: Path, num_ranks: int) -> tuple[Any, torch.optim.AdamW]:
    model = load_sharded(path, TrainConfig(num_ranks=num_ranks), device_for("cpu"), Logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    _step(model, optimizer)
    return model, optimizer


def _step(model: Any, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    model(IDS).logsumexp(-1).mean().backward()
    optimizer.step()


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def _moments(optimizer: torch.optim.AdamW) -> Iterator[tuple[torch.Tensor, DTensor]]:
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            yield parameter, state[name]


def _away_and_back(rank: int, path: Path, num_ranks: int) -> dict[str, bool]:
    """What holds while weights and moments are away."""
    model, optimizer = _trained(path, num_ranks)
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


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_shards_and_moments_move_and_stay_what_they_are(tmp_path: Path, num_ranks: int) -> None:
    build_tiny(tmp_path, "qwen3_moe", seed=9)
    for facts in run_ranks(num_ranks, _away_and_back, tmp_path, num_ranks):
        assert [fact for fact, holds in facts.items() if not holds] == []


def _learn(rank: int, path: Path, num_ranks: int, is_offloaded: bool) -> dict[str, torch.Tensor]:
    """Weights after two updates, between which a forward pass was made and the model was away."""
    model, optimizer = _trained(path, num_ranks)
    with torch.no_grad():
        model(IDS)
    if is_offloaded:
        for _ in ("away", "back"):
            move_model(model, CPU)
            move_optimizer(optimizer, CPU)
    _step(model, optimizer)
    return _whole(model)


def test_training_goes_on_as_if_nothing_had_moved(tmp_path: Path) -> None:
    build_tiny(tmp_path, "qwen3", seed=9)
    stayed, moved = (run_ranks(3, _learn, tmp_path, 3, is_offloaded)[0] for is_offloaded in (False, True))
    assert stayed.keys() == moved.keys()
    for name, weight in stayed.items():
        assert torch.equal(weight, moved[name]), name
