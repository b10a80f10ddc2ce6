"""Offloading, with the meta device standing in for an accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.update import Update
from dapo_core.config.train import TrainConfig
from dapo_core.machine.device import Device, device_for
from dapo_core.memory.holdings import GRADIENTS, OPTIMIZER, WEIGHTS
from dapo_core.model.pretrained import load_model_config
from dapo_core.policy.model import load_sharded
from dapo_core.policy.offload import Transfers, move_model, move_optimizer
from dapo_core.policy.rank import Policy
from flows.config import Config
from tests.batches import random_batch
from tests.configs import make_config
from tests.integration.test_sharded_model import IDS, Logits
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny

META, CPU = torch.device("meta"), torch.device("cpu")


def _moments(optimizer: torch.optim.AdamW) -> Iterator[tuple[torch.Tensor, DTensor]]:
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            yield parameter, state[name]


def _move_away(rank: int, path: Path, num_ranks: int) -> dict[str, bool]:
    """Move weights and moments to the meta device; returns facts that must hold."""
    model: Any = load_sharded(path, TrainConfig(num_ranks=num_ranks), device_for("cpu"), Logits)
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS).logsumexp(-1).mean().backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.to_local().shape for name, parameter in parameters.items()}
    with torch.no_grad():
        model(IDS)  # leaves the root whole
    transfers = Transfers(device_for("cpu"))
    move_model(model, META, transfers)
    move_optimizer(optimizer, META, transfers)
    moments = list(_moments(optimizer))
    return {
        "weights are away": all(parameter.to_local().is_meta for parameter in model.parameters()),
        "buffers are away": all(buffer.is_meta for buffer in model.buffers()),
        "weights are the optimizer's": set(map(id, model.parameters()))
        == set(map(id, optimizer.state)),
        "moments are away": all(moment.to_local().is_meta for _, moment in moments),
        "moments are shards": all(
            isinstance(moment, DTensor) and moment.placements == parameter.placements
            for parameter, moment in moments
        ),
        "step counts stay": all(state["step"].device == CPU for state in optimizer.state.values()),
        "same objects": all(
            parameters[name] is parameter for name, parameter in model.named_parameters()
        ),
        "shapes stay": {name: parameter.to_local().shape for name, parameter in parameters.items()}
        == shapes,
        "every parameter has moments": len(moments) == 2 * len(parameters),
    }


def _updated(rank: int, config: Config) -> tuple[Update, dict[str, torch.Tensor]]:
    policy = Policy(config.model.path or "", config)
    batch = random_batch(num_groups=2, group_size=3)
    shares, _ = split_batch(batch, config.train.num_ranks, 30)
    update = policy.update(shares[rank], LossTotals.of(batch, config.train.num_ranks))
    parameters: list[Any] = list(policy.model.named_parameters())
    gradients = {name: parameter.grad.to_local() for name, parameter in parameters}
    return update, gradients | {
        f"{name} after": parameter.to_local() for name, parameter in parameters
    }


def _updated_elsewhere(rank: int, config: Config) -> Any:
    """Use a list as host memory, and overwrite the layer inputs on the device."""
    saved: list[torch.Tensor] = []

    @contextmanager
    def saving_on_host(device: Device) -> Iterator[None]:
        inputs = []

        def save(tensor: torch.Tensor) -> int:
            saved.append(tensor.detach().clone())
            if tensor.ndim == 3:
                inputs.append(tensor.detach())
            return len(saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(save, lambda number: saved[number].clone()):
            yield
        for tensor in inputs:
            tensor.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "saving_on_host", saving_on_host)
        return _updated(rank, config), [tuple(tensor.shape) for tensor in saved]


def test_offloaded_activations_give_the_same_gradients_bit_for_bit(tmp_path: Path) -> None:
    """Every layer's input is offloaded, and no weight; several micro-batches on two ranks."""
    build_tiny(tmp_path, "qwen3_moe", seed=9)
    model = load_model_config(tmp_path, False)
    train = {"num_ranks": 2, "train_prompts": 2, "mini_prompts": 2}
    plain = run_ranks(2, _updated, make_config(tmp_path, train=train))
    config = make_config(tmp_path, train={**train, "offload_activations": True})
    on_host = run_ranks(2, _updated, config)
    elsewhere = run_ranks(2, _updated_elsewhere, config)
    for (update, values), same, (others, shapes) in zip(plain, on_host, elsewhere, strict=True):
        for other_update, other_values in (same, others):
            assert other_update == update
            assert [
                name for name in values if not torch.equal(values[name], other_values[name])
            ] == []
        inputs = [
            shape for shape in shapes if len(shape) == 3 and shape[::2] == (1, model.hidden_size)
        ]
        assert len(inputs) >= 2 * model.num_hidden_layers
        assert not [shape for shape in shapes if model.vocab_size in shape]


def _two_updates(rank: int, config: Config) -> Any:
    """Return updates, weights and offload policies of two steps with a checkpoint between."""
    policy = Policy(config.model.path or "", config)
    batch = random_batch(num_groups=2, group_size=3)
    shares, _ = split_batch(batch, config.train.num_ranks, 30)
    totals = LossTotals.of(batch, config.train.num_ranks)
    updates = [policy.update(shares[rank], totals)]
    folder = str(config.store.path)
    policy.save(folder, asynchronous=False)
    policy.load(folder)
    updates.append(policy.update(shares[rank], totals))
    parameters: list[Any] = list(policy.model.named_parameters())
    states = [fsdp for fsdp in policy.model.modules() if isinstance(fsdp, FSDPModule)]
    policies = {
        type(one._get_fsdp_state()._fsdp_param_group.offload_policy).__name__ for one in states
    }
    return updates, {name: parameter.to_local() for name, parameter in parameters}, policies


def test_offloaded_shards_train_to_the_same_bits(tmp_path: Path) -> None:
    """Results are identical to the bit, and every FSDP unit uses torch's CPUOffloadPolicy."""
    build_tiny(tmp_path / "model", "qwen3", seed=9)
    train = {"num_ranks": 2, "train_prompts": 2, "mini_prompts": 2}
    results = {
        is_offloaded: run_ranks(
            2,
            _two_updates,
            make_config(
                tmp_path / "model",
                train={**train, "offload_shards": is_offloaded},
                store={"path": str(tmp_path / f"saved_{is_offloaded}")},
            ),
        )
        for is_offloaded in (False, True)
    }
    for (updates, values, plain), (others, other_values, offloading) in zip(
        *results.values(), strict=True
    ):
        assert others == updates
        assert [name for name in values if not torch.equal(values[name], other_values[name])] == []
        assert (plain, offloading) == ({"OffloadPolicy"}, {"CPUOffloadPolicy"})


class _LateCopies(Transfers):
    """Copies that contain NaN until awaited, and sources that contain NaN afterwards."""

    def __init__(self) -> None:
        super().__init__(device_for("cpu"))
        self.is_late = True
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_joined = 0

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy: Any = tensor.clone()
        self._sources.append(tensor)
        if self.is_late:
            local = copy.to_local()
            self.pending.append((local, local.clone()))
            local.fill_(float("nan"))
        return copy

    def join(self) -> None:
        self.num_joined += 1
        for copy, values in self.pending:
            copy.copy_(values)
        self.pending.clear()

    def finish(self) -> None:
        self.join()
        for source in self._sources:
            source.detach().fill_(float("nan"))
        super().finish()


def _step_with_offloading(rank: int, config: Config, is_offloaded: bool) -> dict[str, Any]:
    """Run two updates with a checkpoint and log-probs in between."""
    policy = Policy(config.model.path or "", config)
    transfers = policy.offloader.transfers = _LateCopies()
    batch = random_batch(num_groups=2, group_size=3)
    shares, _ = split_batch(batch, config.train.num_ranks, 30)
    totals = LossTotals.of(batch, config.train.num_ranks)
    updates = [policy.update(shares[rank], totals)]
    if is_offloaded:
        policy.offload([GRADIENTS, OPTIMIZER])
        assert transfers.pending  # moments are copied while weights are published
    folder = f"{config.store.path}_{is_offloaded}"
    policy.save(folder, asynchronous=False)
    if is_offloaded:
        policy.offload([WEIGHTS])
        # what follows on the stream is in order
        transfers.is_late, joined = (False, transfers.num_joined)
        policy.onload([WEIGHTS])
        assert transfers.num_joined > joined
        transfers.is_late = True
    scored = policy.log_probs(shares[rank])
    if is_offloaded:
        policy.onload([OPTIMIZER])
        assert transfers.pending  # until AdamW needs them
    updates.append(policy.update(shares[rank], totals))
    second = Policy(config.model.path or "", config)
    second.load(folder)
    found = {"log_probs": scored.log_probs, "entropy": scored.entropy}
    for number, one in enumerate((policy, second)):
        for name, parameter in one.model.named_parameters():
            shards: dict[str, Any] = {"weight": parameter, **one.optimizer.state[parameter]}
            found |= {
                f"{number} {name} {kind}": getattr(shard, "_local_tensor", shard)
                for kind, shard in shards.items()
            }
    return {**found, "updates": updates}


def test_background_copies_are_never_read_early(tmp_path: Path) -> None:
    """Also with uneven shards, which FSDP2 pads: 5 experts on 2 ranks."""
    build_tiny(tmp_path / "model", "qwen3_moe", seed=9)
    config = make_config(
        tmp_path / "model",
        train={"num_ranks": 2, "train_prompts": 2, "mini_prompts": 2},
        store={"path": str(tmp_path / "saved")},
    )
    plain, offloaded = (
        run_ranks(2, _step_with_offloading, config, is_on) for is_on in (False, True)
    )
    for one, other in zip(plain, offloaded, strict=True):
        assert one.pop("updates") == other.pop("updates")
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert not [name for name, value in one.items() if value.isnan().any()]


def test_moved_weights_stay_the_same_parameters(tmp_path: Path) -> None:
    build_tiny(tmp_path, "qwen3_moe", seed=9)
    for facts in run_ranks(3, _move_away, tmp_path, 3):
        assert [fact for fact, holds in facts.items() if not holds] == []
