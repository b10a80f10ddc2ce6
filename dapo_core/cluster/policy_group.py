"""All policy ranks behind one interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dapo_core.algorithm.balance import RankShare, mini_batches, split_batch
from dapo_core.algorithm.batch import Batch, TokenStats, random_order
from dapo_core.algorithm.covariance import select_tokens
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.update import Update
from dapo_core.checkpoint.manifest import require_complete
from dapo_core.errors import CheckpointError, RolloutError
from dapo_core.model.routers import Experts
from dapo_core.policy.profiling import PROFILES, trace_name

if TYPE_CHECKING:
    from dapo_core.cluster.calls import Calls
    from dapo_core.config.training import TrainingConfig
    from dapo_core.machine.timers import PhaseTimer

logger = logging.getLogger(__name__)


class PolicyGroup:
    """Calls all policy ranks as one; sequence-parallel ranks get the same share of a batch."""

    def __init__(
        self, ranks: Sequence[Any], config: TrainingConfig, actors: Calls, hidden_size: int
    ) -> None:
        train = config.train
        self.config = config
        self.ranks = ranks
        self.actors = actors
        self.num_data_ranks = train.num_data_ranks
        self.sequence_parallel = train.sequence_parallel
        self.max_tokens = train.micro_batch_tokens * train.sequence_parallel  # per micro-batch
        self.hidden_size = hidden_size  # determines a sequence's cost

    def anchor(self, batch: Batch, timer: PhaseTimer) -> tuple[Batch, TokenStats | None]:
        """Return the batch with old log-probs, and with reference log-probs if KL needs them.

        Also returns the policy's log-probs before any update, or None if the updates compute them:
        with the engine's log-probs as the anchor, or a single update, unless KL in the reward or
        rollout correction needs them first.
        """
        stats, is_engine = None, self.config.algorithm.old_log_probs == "engine"
        if self.config.algorithm.routing_replay == "rollout" and batch.routing is None:
            raise RolloutError(
                f"the engines recorded no routing for any of {batch.num_responses} responses, so "
                "there is nothing to replay, as with vLLM 0.23, whose CPU kernel calls no router; "
                "set rollout.engine=hf or algorithm.routing_replay=off"
            )
        if self.config.anchors_before_updates or (not is_engine and self._has_updates(batch)):
            with timer.phase("old_log_prob"):
                if self.config.algorithm.routing_replay == "policy":
                    stats, routing = self.routed_log_probs(batch)
                    batch = replace(batch, routing=routing)
                else:
                    stats = self.log_probs(batch)
                batch = replace(batch, old_log_probs=stats.log_probs)
        if is_engine:
            batch = replace(batch, old_log_probs=batch.rollout_log_probs)
        if self.config.algorithm.kl.place != "off":
            with timer.phase("ref"):
                batch = replace(batch, ref_log_probs=self.ref_log_probs(batch))
        return batch, stats

    def log_probs(self, batch: Batch, temperature: float | None = None) -> TokenStats:
        """Return log-probs and entropy at the response tokens, in batch order."""
        shares, indices = self._split(batch)
        calls = [rank.log_probs.remote(share, temperature) for rank, share in self._deal(shares)]
        return _joined(batch, indices, self.actors.get(calls)[:: self.sequence_parallel])

    def routed_log_probs(self, batch: Batch) -> tuple[TokenStats, list[Experts]]:
        """Return log-probs and entropy, and the experts that they used (Batch.routing)."""
        shares, indices = self._split(batch)
        calls = [rank.routed_log_probs.remote(share) for rank, share in self._deal(shares)]
        stats, parts = zip(*self.actors.get(calls)[:: self.sequence_parallel], strict=True)
        routing = {
            row: experts
            for rows, part in zip(indices, parts, strict=True)
            for row, experts in zip(rows.tolist(), part, strict=True)
        }
        return _joined(batch, indices, stats), [routing[row] for row in sorted(routing)]

    def ref_log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the reference model's log-probs of the response tokens: [B, R], in batch order.

        The reference model routes by itself.
        """
        shares, indices = self._split(replace(batch, routing=None))
        calls = [rank.ref_log_probs.remote(share) for rank, share in self._deal(shares)]
        return _rows(batch, indices, self.actors.get(calls)[:: self.sequence_parallel])

    def learn(
        self, batch: Batch, stats: TokenStats | None, step: int
    ) -> tuple[list[Update], TokenStats]:
        """Run one optimizer step per mini-batch and pass; returns the updates and `stats`.

        The first pass computes missing stats. Anchor, advantages and weights stay fixed.
        """
        train, seed = self.config.train, self.config.run.seed
        updates: list[Update] = []
        for number in range(train.passes):
            is_shuffled = number > 0 and train.shuffle_passes
            order = random_order(batch.num_groups, seed, step, number) if is_shuffled else None
            rows = mini_batches(batch, train.mini_prompts, order)
            with_stats = stats is None
            pass_updates = [
                self.update(self._mini_batch(batch, indices, step, number, place), with_stats)
                for place, indices in enumerate(rows)
            ]
            parts = [update.stats for update in pass_updates if update.stats is not None]
            stats = stats or _joined(batch, rows, parts)
            updates += [replace(update, stats=None) for update in pass_updates]
        for update in updates:
            update.log_fault(step)
        assert stats is not None, "train.passes is at least 1"
        return updates, stats

    def refresh_reference(self, step: int, timer: PhaseTimer) -> None:
        """Copy the policy's weights to the reference model if algorithm.kl.refresh_every is due.

        Only the step number decides, so a resume changes nothing.
        """
        refresh_every = self.config.algorithm.kl.refresh_every
        if refresh_every and step % refresh_every == 0:
            with timer.phase("ref"):
                self.actors.get([rank.refresh_reference.remote() for rank in self.ranks])

    def update(self, mini_batch: Batch, with_stats: bool = False) -> Update:
        """Run one optimizer step on the mini-batch; the result sums over ranks."""
        totals = LossTotals.of(mini_batch, self.num_data_ranks)
        shares, indices = self._split(mini_batch)
        calls = [
            rank.update.remote(share, totals, with_stats) for rank, share in self._deal(shares)
        ]
        updates: list[Update] = self.actors.get(calls)
        sums = reduce(add, (update.sums for update in updates))
        routings = [update.routing for update in updates if update.routing is not None]
        routing = reduce(add, routings) if routings else None
        rank_tokens = tuple(int(mini_batch.lengths[rows].sum()) for rows in indices)
        shared = updates[:: self.sequence_parallel]
        parts = [update.stats for update in shared if update.stats is not None]
        stats = _joined(mini_batch, indices, parts) if with_stats else None
        faults = [update.fault for update in updates if update.fault is not None]
        first = min(faults, key=lambda fault: fault.order, default=None)
        return replace(
            updates[0],
            sums=sums,
            rank_tokens=rank_tokens,
            routing=routing,
            stats=stats,
            fault=first,
        )

    @contextmanager
    def profiled(self, step: int, folder: Path) -> Iterator[None]:
        """Trace the step inside the block on train.profile.ranks, into the folder."""
        chosen = self.config.train.profile.ranks
        ranks = {number: rank for number, rank in enumerate(self.ranks) if number in chosen}
        self.actors.get([rank.begin_profile.remote() for rank in ranks.values()])
        yield
        paths = {number: str(folder / PROFILES / trace_name(step, number)) for number in ranks}
        self.actors.get([rank.end_profile.remote(paths[number]) for number, rank in ranks.items()])
        logger.info("traced step %d in %s", step, ", ".join(paths.values()))

    def onload(self, states: Collection[str]) -> None:
        """Move weights or optimizer state (memory.holdings) back to the devices."""
        self.actors.get([rank.onload.remote(states) for rank in self.ranks])

    def offload(self, states: Collection[str]) -> None:
        """Free gradients, and move weights or optimizer state (memory.holdings) off the devices."""
        self.actors.get([rank.offload.remote(states) for rank in self.ranks])

    def save(self, folder: str, asynchronous: bool) -> None:
        """Write each rank's parameters, optimizer state and random generators to the folder.

        If asynchronous, return once they are in host memory. Raises OSError with its errno if a
        rank cannot write, and CheckpointError while another save runs.
        """
        self.actors.get([rank.save.remote(folder, asynchronous) for rank in self.ranks])

    def is_saved(self) -> bool:
        """True if no asynchronous save is running; raises the first rank's error once."""
        try:
            return all(self.actors.get([rank.is_saved.remote() for rank in self.ranks]))
        except (CheckpointError, OSError):
            self.actors.get([rank.end_save.remote() for rank in self.ranks])  # they fail later
            raise

    def checkpoint_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state in a checkpoint."""
        return sum(self.actors.get([rank.checkpoint_bytes.remote() for rank in self.ranks]))

    def verify(self, checkpoint: Path) -> None:
        """Raise CheckpointError if a file is damaged; each rank reads a share of the shards."""
        began = time.monotonic()
        require_complete(checkpoint)
        shares = range(len(self.ranks))
        calls = [
            rank.verify.remote(str(checkpoint), share, len(shares))
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        self.actors.get(calls)
        seconds = time.monotonic() - began
        logger.info("checkpoint %s is intact: verified in %.1f s", checkpoint.name, seconds)

    def load(self, folder: str) -> None:
        """Load the folder's shards, written by any number of ranks."""
        self.actors.get([rank.load.remote(folder) for rank in self.ranks])

    def device_name(self) -> str:
        """Return the vendor's name of the first rank's device."""
        return self.actors.get(self.ranks[0].device_name.remote())

    def take_memory(self) -> dict[str, float]:
        """Return the peak memory since the last call in GiB, the maximum over ranks."""
        ranks = self.actors.get([rank.take_memory.remote() for rank in self.ranks])
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def _has_updates(self, batch: Batch) -> bool:
        """True if the batch takes more than one optimizer step."""
        return batch.num_groups > self.config.train.mini_prompts or self.config.train.passes > 1

    def _mini_batch(self, batch: Batch, indices: np.ndarray, *numbers: int) -> Batch:
        """Return the rows, with tokens selected if the loss needs it; `numbers` identify them."""
        algorithm, seed = self.config.algorithm, self.config.run.seed
        return select_tokens(batch.select(indices), algorithm, seed, *numbers)

    def _split(self, batch: Batch) -> tuple[list[RankShare], list[np.ndarray]]:
        return split_batch(batch, self.num_data_ranks, self.max_tokens, self.hidden_size)

    def _deal(self, shares: Sequence[RankShare]) -> Iterator[tuple[Any, Any]]:
        """Yield each rank with a reference to its share; sequence-parallel ranks share one."""
        references = [self.actors.put(share) for share in shares]
        for number, rank in enumerate(self.ranks):
            yield rank, references[number // self.sequence_parallel]


def _joined(batch: Batch, indices: Sequence[np.ndarray], parts: Sequence[TokenStats]) -> TokenStats:
    """Combine the values of parts of the batch, given their row indices."""
    return TokenStats(
        _rows(batch, indices, [part.log_probs for part in parts]),
        _rows(batch, indices, [part.entropy for part in parts]),
    )


def _rows(
    batch: Batch, indices: Sequence[np.ndarray], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Arrange the parts' rows in batch order: [B, R] from [b, R] of each share."""
    values = torch.zeros(batch.response_mask.shape)
    for rows, part in zip(indices, parts, strict=True):
        values[rows, : part.shape[1]] = part[: len(rows)]
    return values
