"""Collects the weights that policy ranks send to engines."""

from typing import Any

import torch

from dapo_core.policy.rank import Policy
from dapo_core.weights.plan import WeightPlan


class _RecordingOutbox:
    """An outbox that keeps all buckets."""

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.buckets: list[torch.Tensor] = []

    def slot(self) -> torch.Tensor:
        bucket = torch.full(
            [self.plan.slot_numel], torch.nan, dtype=self.plan.dtype, device=self.device
        )
        self.buckets.append(bucket)
        return bucket

    def send(self, numel: int) -> None:
        pass

    def finish(self) -> None:
        pass


def sent_weights(policy: Policy) -> dict[str, torch.Tensor] | None:
    """Return whole tensors by file name on rank 0, None on other ranks. Collective."""
    outbox: Any = _RecordingOutbox(policy.weights.plan, policy.device.torch_device())
    policy.outbox = outbox if torch.distributed.get_rank() == 0 else None
    policy.send_weights()
    if policy.outbox is None:
        return None
    return {
        planned.name: values[planned.offset : planned.offset + planned.numel].view(planned.shape)
        for bucket, values in zip(policy.weights.plan.buckets, outbox.buckets, strict=True)
        for planned in bucket
    }
