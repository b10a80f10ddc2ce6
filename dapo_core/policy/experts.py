"""Expert parallelism: a rank holds whole experts; tokens travel to their experts and back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dapo_core.model.names import expert_modules
from dapo_core.policy.all_to_all import all_to_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def split_experts(causal_lm: Any, mesh: DeviceMesh) -> list[Any]:
    """Give each rank of the mesh an equal part of every layer's experts; returns their modules.

    Parameters are on the meta device.
    """
    modules = expert_modules(causal_lm)
    for experts in modules:
        experts.ranks = mesh.get_group()
        experts.forward = partial(run_experts, experts)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = parameter.detach().chunk(mesh.size())[0]
            split = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(split, parameter.requires_grad))
    return modules


def run_experts(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, which other ranks may hold: [N, hidden].

    index, weights: a token's experts and their weights, [N, k]. Collective.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    group, num_chosen = experts.ranks, index.shape[1]
    held: Any = _Held(experts, group.size())
    chosen, order = index.flatten().sort(stable=True)
    received, sends, receives = _count_rows(chosen, held.num_experts, group)
    rows = all_to_all(hidden[order // num_chosen], sends, receives, group)
    if len(rows):
        numbers = torch.arange(held.num_experts, device=rows.device).repeat(group.size())
        numbers = numbers.repeat_interleave(received, output_size=len(rows)).unsqueeze(1)
        rows = grouped_mm_experts_forward(held, rows, numbers, rows.new_ones(numbers.shape))
    else:  # FSDP2 and the other ranks wait for the gradients of this rank too
        rows = rows + sum(weight.sum() for weight in held.weights)
    results = all_to_all(rows, receives, sends, group)[order.argsort()]
    return (results.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _count_rows(
    chosen: torch.Tensor, num_experts: int, group: ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the rows that come from each rank for each expert of this one, [ranks x experts].

    And those to send to each rank and to receive from it. Collective.
    """
    sent = torch.bincount(chosen, minlength=group.size() * num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sends, receives = (count.view(group.size(), -1).sum(1).tolist() for count in (sent, received))
    return received, sends, receives


class _Held:
    """The experts that this rank holds, with everything else of the module."""

    def __init__(self, experts: nn.Module, num_ranks: int) -> None:
        self._experts = experts
        self.weights: list[torch.Tensor] = []
        for name, parameter in experts.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor)
            weight = parameter.to_local()
            if weight.requires_grad:
                # FSDP2 averages over the ranks with these experts, not over all
                weight.register_hook(lambda gradient: gradient / num_ranks)
            self.weights.append(weight)
            setattr(self, name, weight)
        self.num_experts = len(self.weights[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
