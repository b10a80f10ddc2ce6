"""Connects policy ranks with the processes of engines, and starts the syncs between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dapo_core.cluster.actors import Actors
from dapo_core.weight_transfer.links import Link
from dapo_core.weight_transfer.proof import Loaded, merge_checksums, require_arrived


class WeightTransfer:
    """The way of the weights from rank 0 of the policy to every process of every engine.

    On a CPU those on rank 0's node read its memory, on accelerators the one that shares rank 0's device does, by
    handles: no group of NCCL or HCCL may have a device twice. The others get broadcasts.
    """

    def __init__(self, ranks: Sequence[Any], engines: Sequence[Sequence[Any]], actors: Actors) -> None:
        """`engines`: the parts of each, of which the first is the rollout worker."""
        self.ranks = ranks
        self.workers = [parts[0] for parts in engines]
        self.parts = [part for parts in engines for part in parts]
        self.names = [
            f"rollout worker {worker} of {len(engines)}" + (f", part {part} of {len(parts)}" if part else "")
            for worker, parts in enumerate(engines)
            for part in range(len(parts))
        ]
        self.actors = actors
        self.plan = actors.get(ranks[0].weight_plan.remote())

    def connect(self, is_local: Sequence[bool], meeting_point: Callable[[], str], on_device: bool = False) -> None:
        """Open the ways. `is_local`: of each process of the engines, whether it can read rank 0's memory.

        `on_device`: that of a device, else the node's.
        `meeting_point` gives an address at which the others meet rank 0.
        """
        memory = self.actors.get(self.ranks[0].open_outbox.remote(sum(is_local), on_device))
        size = 1 + is_local.count(False)
        address = meeting_point() if size > 1 else ""
        links = [
            Link(True, memory, sum(is_local[:number]), sum(is_local), on_device)
            if local
            else Link(False, address, 1 + is_local[:number].count(False), size)
            for number, local in enumerate(is_local)
        ]
        calls = [part.connect.remote(link, self.plan) for part, link in zip(self.parts, links, strict=True)]
        if size > 1:
            calls.append(self.ranks[0].join_receivers.remote(address, size))
        self.actors.get(calls)

    def send(self, policy_version: int) -> None:
        """Load the policy's weights into every engine.

        Raises RolloutError unless every process of every engine took all of them as the ranks sent them, and
        WorkerDied if a process dies meanwhile.
        """
        sending = [rank.send_weights.remote() for rank in self.ranks]
        receiving = [worker.receive_weights.remote(policy_version) for worker in self.workers]
        sent = self.actors.get(sending + receiving)[: len(sending)]
        loaded: list[Loaded] = self.actors.get([part.loaded_weights.remote() for part in self.parts])
        require_arrived(
            self.plan, merge_checksums(sent), dict(zip(self.names, loaded, strict=True)), policy_version
        )
