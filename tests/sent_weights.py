"""What the ranks of a policy send to engines, as a dictionary."""

from __future__ import annotations

from typing import Any

import torch

from dapo_core.policy.rank import Policy
from dapo_core.weight_transfer.plan import WeightPlan


class _Kept:
    """An outbox that keeps the buckets."""

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.buckets: list[torch.Tensor] = []

    def slot(self) -> torch.Tensor:
        self.buckets.append(self._room())
        return self.buckets[-1]

    def _room(self) -> torch.Tensor:
        return torch.full([self.plan.slot_numel], torch.nan, dtype=self.plan.dtype, device=self.device)

    def send(self, numel: int) -> None:
        pass

    def finish(self) -> None:
        pass


def sent_weights(policy: Policy) -> dict[str, torch.Tensor] | None:
    """Whole tensors by their names in the model's files on rank 0, else None. Collective."""
    kept: Any = _Kept(policy.weights.plan, policy.device.torch_device())
    policy.outbox = kept if torch.distributed.get_rank() == 0 else None
    policy.send_weights()
    if policy.outbox is None:
        return None
    return {
        planned.name: values[planned.offset : planned.offset + planned.numel].view(planned.shape)
        for bucket, values in zip(policy.weights.plan.buckets, kept.buckets, strict=True)
        for planned in bucket
    }
