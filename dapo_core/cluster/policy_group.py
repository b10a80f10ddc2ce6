"""All policy ranks, called as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch

from dapo_core.batch import Batch, RankShare, split_batch
from dapo_core.cluster.answers import Roster
from dapo_core.errors import CheckpointError
from dapo_core.loss import LossTotals
from dapo_core.policy import UpdateSums

if TYPE_CHECKING:
    import numpy as np

    from dapo_core.config.training import TrainConfig


class PolicyGroup:
    """All policy ranks, called as one; train.sequence_parallel consecutive ranks are given the same share."""

    def __init__(self, ranks: Sequence[Any], train: TrainConfig, roster: Roster) -> None:
        self.ranks = ranks
        self.roster = roster
        self.num_data_ranks = train.num_data_ranks
        self.sequence_parallel = train.sequence_parallel
        self.max_tokens = train.micro_batch_tokens * train.sequence_parallel  # of a micro-batch
        self._is_saving = False  # asynchronously
        self.hidden_size: int = self.roster.get(ranks[0].call.remote("hidden_size"))

    def log_probs(self, batch: Batch, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy at the response tokens: two [B, R] float32, in the batch's order."""
        shares, indices = self._split(batch)
        parts = self._call_shares("log_probs", shares, temperature)
        log_probs, entropy = zip(*parts[:: self.sequence_parallel], strict=True)
        return _rows(batch, indices, log_probs), _rows(batch, indices, entropy)

    def ref_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probs of the response tokens under the reference model: [B, R] float32, in the batch's order."""
        shares, indices = self._split(batch)
        return _rows(batch, indices, self._call_shares("ref_log_probs", shares)[:: self.sequence_parallel])

    def update(self, mini_batch: Batch) -> tuple[UpdateSums, list[np.ndarray]]:
        """One optimizer step on the mini-batch: sums over all ranks, and the rows of each data-parallel rank."""
        totals = LossTotals(mini_batch.num_loss_tokens, mini_batch.num_loss_responses, self.num_data_ranks)
        shares, indices = self._split(mini_batch)
        return UpdateSums.over_ranks(self._call_shares("update", shares, totals)), indices

    def onload(self) -> None:
        """Weights to the devices, where train.offload_parameters keeps them away between phases."""
        self._call_each("onload", [()] * len(self.ranks))

    def offload(self) -> None:
        """Weights and optimizer state to the hosts, as far as the train.offload keys say so."""
        self._call_each("offload", [()] * len(self.ranks))

    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each parameter by name."""
        return self.roster.get(self.ranks[0].call.remote("weight_sizes"))

    def gather_weights(self, names: list[str]) -> Any:
        """A reference to {name: whole tensor}, which stays in Ray's object store until it is dropped."""
        references = [rank.call.remote("gather_weights", names) for rank in self.ranks]
        self.roster.get(references[1:])
        return references[0]

    def save(self, folder: str, asynchronous: bool) -> None:
        """Write every rank's part of parameters, optimizer and random generators into the folder.

        Asynchronous: returns when they are copied to host memory; training may go on, and is_saved says the rest.
        Raises OSError with its errno where a rank could not write, CheckpointError where another save goes on.
        """
        if self._is_saving:
            raise CheckpointError(
                f"{folder} cannot be saved while another checkpoint is being written; call is_saved until it says "
                "so, or raises"
            )
        self._is_saving = asynchronous
        self._call_each("save", [(folder, asynchronous)] * len(self.ranks))

    def is_saved(self) -> bool:
        """Whether no asynchronous save goes on; raises what the first rank to fail raised, once."""
        if not self._is_saving:
            return True
        try:
            self._is_saving = not all(self._call_each("is_saved", [()] * len(self.ranks)))
        except (CheckpointError, OSError):
            self._call_each("end_save", [()] * len(self.ranks))  # all fail alike, some a moment later
            self._is_saving = False
            raise
        return not self._is_saving

    def checkpoint_bytes(self) -> int:
        """Bytes of parameters and optimizer state in a checkpoint of now."""
        return sum(self._call_each("checkpoint_bytes", [()] * len(self.ranks)))

    def load(self, folder: str) -> None:
        """Continue from the shards in the folder, written by any number of ranks."""
        self._call_each("load", [(folder,)] * len(self.ranks))

    def device_name(self) -> str:
        """What the vendor calls the first rank's device."""
        return self.roster.get(self.ranks[0].call.remote("device_name"))

    def memory_metrics(self) -> dict[str, float]:
        """Memory in GiB by metric name, the largest over ranks."""
        ranks = self._call_each("memory_metrics", [()] * len(self.ranks))
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def _split(self, batch: Batch) -> tuple[list[RankShare], list[np.ndarray]]:
        return split_batch(batch, self.num_data_ranks, self.max_tokens, self.hidden_size)

    def _call_shares(self, method: str, shares: Sequence[RankShare], *others: Any) -> list[Any]:
        """Results of all ranks; a share travels once for the ranks of its group."""
        references = [ray.put(share) for share in shares]
        return self._call_each(
            method, [(references[rank // self.sequence_parallel], *others) for rank in range(len(self.ranks))]
        )

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = zip(self.ranks, arguments, strict=True)
        return self.roster.get([rank.call.remote(method, *own) for rank, own in calls])


def _rows(batch: Batch, indices: Sequence[np.ndarray], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' rows in the batch's order: [B, R] from [b, R] of each share."""
    values = torch.zeros(batch.response_mask.shape)
    for rows, part in zip(indices, parts, strict=True):
        values[rows, : part.shape[1]] = part[: len(rows)]
    return values
