"""Log-probs and entropy of a rank's share, put together from the passes over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dapo_core.batch import Measured, RankShare

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dapo_core.policy.packing import PackedRow


class Measuring:
    """What the policy gives the response tokens of a share, 0 where no pass has been."""

    def __init__(self, share: RankShare) -> None:
        self.share = share
        self.values = torch.zeros(len(Measured._fields), *share.batch.response_mask.shape)  # [2, b, R]

    def add(self, number: int, row: PackedRow, values: Sequence[torch.Tensor]) -> None:
        """Keep log-probs and entropy [M] of this rank's slice of micro-batch `number`; entropy may be empty."""
        indices, micro = self.share.micro_batches[number], self.share.micro_batch(number)
        part = torch.zeros(len(self.values), micro.response_mask.numel())
        for field, its in zip(part, values, strict=True):
            field[row.cells[: len(its)]] = its.detach().cpu()
        part = part.unflatten(1, micro.response_mask.shape)[:, : len(indices)]
        self.values[:, torch.tensor(indices), : part.shape[2]] = part

    def read(self, group: ProcessGroup | None, device: torch.device) -> Measured:
        """The whole share's, on every rank of the group: [b, R] float32 each. Collective in the group."""
        values = self.values
        if group is not None:  # each rank has its slice of the rows, and 0 elsewhere
            values = values.to(device)
            torch.distributed.all_reduce(values, group=group)
        return Measured(*values.cpu())
