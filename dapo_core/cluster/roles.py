"""The actors of a training: policy ranks, rollout workers, and the other parts of an engine."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from dapo_core.checkpoint.shards import seed_generators
from dapo_core.cluster.followers import Followers
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.engines.base import Engine, EnginePart
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.errors import DapoError
from dapo_core.machine.device import Device, device_for
from dapo_core.machine.ports import meeting_point
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_averages
from dapo_core.weights.inbox import open_inbox
from dapo_core.weights.links import STALL_SECONDS, Link
from dapo_core.weights.proof import Loaded
from heartbeat import print_to

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.weights.plan import WeightPlan

logger = logging.getLogger(__name__)


class _Process:
    """A process of a training."""

    def place(self) -> str:
        """Return pid and node of the process; also used as a ping."""
        return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"

    def rendezvous(self) -> str:
        """Return a rendezvous address on this node."""
        return meeting_point(ray.util.get_node_ip_address())


class PolicyRank(_Process, Policy):
    """A policy rank as an actor; `start` constructs it, since that is collective."""

    def __init__(self) -> None:
        pass

    def start(
        self, rank: int, num_ranks: int, address: str, model_path: str, config: TrainingConfig
    ) -> None:
        """Join the other ranks and load this rank's part of the model."""
        device = _own_device(config, config.threads_per_rank)
        seed_generators(config.run.seed, rank, num_optimizer_steps=0)
        backends = device.backends(config.train.offload_shards)
        # torch's own 600 s end ranks that read a large model at different speeds
        timeout = timedelta(seconds=STALL_SECONDS)
        torch.distributed.init_process_group(
            backends, address, timeout, rank=rank, world_size=num_ranks
        )
        require_averages(device.torch_device())
        if rank == 0:  # Ray forwards what a process prints to the trainer's output
            print_to(sys.stdout)
        super().__init__(model_path, config)


class RolloutRank(_Process, RolloutWorker):
    """A rollout worker as an actor; `start` constructs it."""

    def __init__(self) -> None:
        pass

    def start(
        self, model_path: str, config: TrainingConfig, part: EnginePart, followers: Sequence[Any]
    ) -> None:
        """Load the model into the engine and start the scoring processes."""
        self._part = part
        self._followers = Followers(followers)
        super().__init__(
            lambda: _load_engine(model_path, config, part, self._followers),
            load_tokenizer(model_path, config.model.trust_remote_code),
            config,
        )

    def sleep(self) -> None:
        """Return once all parts of the engine have freed their device memory."""
        super().sleep()
        self._followers.wait()

    def unlink_shared_memory(self) -> None:
        """Unlink vLLM's shared memory on a CPU, which it may leave; all parts have it open."""
        for path in Path("/dev/shm").glob(f"{re.split('[/:]', self._part.address)[-1]}-tp*"):
            path.unlink(missing_ok=True)


class EngineRank(_Process):
    """A further engine part as an actor, which repeats the rollout worker's engine calls."""

    def start(self, model_path: str, config: TrainingConfig, part: EnginePart) -> None:
        """Load this part of the model."""
        self._device = device_for(config.train.device)
        self._engine = _load_engine(model_path, config, part)

    def connect(self, link: Link, plan: WeightPlan) -> None:
        """Open the inbox for weights; collective over all processes that use the link's address."""
        self._engine.inbox = open_inbox(link, plan, self._device)

    def loaded_weights(self) -> Loaded:
        """Return what this part loaded in the last sync."""
        return self._engine.loaded

    def make_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Call the engine. An error of this part alone ends the process: the others wait for it."""
        try:
            getattr(self._engine, name)(*arguments)
        except DapoError:  # raised by every part
            raise
        except BaseException:
            logger.exception("a part of an engine failed in %s", name)
            os._exit(1)


def _own_device(config: TrainingConfig, num_threads: int) -> Device:
    """Prepare this process's device and limit its CPU threads."""
    device = device_for(config.train.device)
    device.prepare(os.environ, config.train.is_colocated)
    device.require()
    torch.set_num_threads(num_threads)
    return device


def _load_engine(
    model_path: str, config: TrainingConfig, part: EnginePart, followers: Followers | None = None
) -> Engine:
    device = _own_device(config, config.threads_per_worker)
    settings = engine_settings(config, device)
    seed = config.run.seed if settings.seeds_responses else part.seed
    if settings.num_parts > 1:
        from dapo_core.engines.vllm_engine import TensorParallelEngine

        return TensorParallelEngine(model_path, settings, seed, part, followers)
    model = model_path, settings, seed
    return build_engine(config.rollout.engine, *model, str(device.torch_device()))
