"""Sends the policy's weights to every process of every engine, and proves that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dapo_core.weights.links import Link
from dapo_core.weights.proof import Loaded, merge_checksums, require_arrived


class WeightTransfer:
    """Sends weights from policy rank 0 to every process of every engine.

    On CPUs, processes on rank 0's node read its shared memory. On accelerators, the process that
    shares rank 0's device uses IPC handles, since an NCCL or HCCL group may not contain a device
    twice. All others get broadcasts.
    """

    def __init__(
        self, ranks: Sequence[Any], engines: Sequence[Sequence[Any]], get: Callable[[Any], Any]
    ) -> None:
        """`engines` lists each engine's parts, the rollout worker first; `get` fetches results."""
        self.ranks = ranks
        self.workers = [parts[0] for parts in engines]
        self.parts = [part for parts in engines for part in parts]
        self.names = [
            f"rollout worker {worker} of {len(engines)}"
            + (f", part {part} of {len(parts)}" if part else "")
            for worker, parts in enumerate(engines)
            for part in range(len(parts))
        ]
        self.get = get
        self.plan = get(ranks[0].weight_plan.remote())

    def connect(
        self, is_local: Sequence[bool], meeting_point: Callable[[], str], on_device: bool = False
    ) -> None:
        """Open the connections; `is_local`: who shares rank 0's node, or device if `on_device`."""
        memory = self.get(self.ranks[0].open_outbox.remote(sum(is_local), on_device))
        size = 1 + is_local.count(False)
        address = meeting_point() if size > 1 else ""
        links = [
            Link(True, memory, sum(is_local[:number]), sum(is_local), on_device)
            if local
            else Link(False, address, 1 + is_local[:number].count(False), size)
            for number, local in enumerate(is_local)
        ]
        calls = [
            part.connect.remote(link, self.plan)
            for part, link in zip(self.parts, links, strict=True)
        ]
        if size > 1:
            calls.append(self.ranks[0].join_receivers.remote(address, size))
        self.get(calls)

    def send(self, policy_version: int) -> None:
        """Load the policy's weights into every engine.

        Raises RolloutError unless every engine process loaded all of them exactly as sent, and
        WorkerDied if a process dies.
        """
        sending = [rank.send_weights.remote() for rank in self.ranks]
        receiving = [worker.receive_weights.remote(policy_version) for worker in self.workers]
        sent = self.get(sending + receiving)[: len(sending)]
        loaded: list[Loaded] = self.get([part.loaded_weights.remote() for part in self.parts])
        by_name = dict(zip(self.names, loaded, strict=True))
        require_arrived(self.plan, merge_checksums(sent), by_name, policy_version)
