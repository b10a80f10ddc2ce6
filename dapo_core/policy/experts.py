"""Experts of a mixture: tokens are multiplied by expert, on the ranks that hold the experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dapo_core.model.names import expert_modules, is_gated
from dapo_core.policy.all_to_all import all_to_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def multiply_experts(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows [S, in], sorted by expert, by their experts' weights [E, out, in].

    ends: where each expert's rows end, [E] int32.
    """
    from transformers.integrations.moe import _grouped_linear  # private: test_private_parts.py

    product: torch.Tensor = _grouped_linear(rows, weight, ends)
    return product


def install_experts(causal_lm: Any) -> None:
    """Replace transformers' forward of all experts, which holds twice as many rows of tokens."""
    for experts in gated_experts(causal_lm):
        experts.ranks, experts.multiply = None, multiply_experts
        experts.forward = partial(run_experts, experts)


def gated_experts(causal_lm: Any) -> list[Any]:
    """Return the modules of experts that the policy computes itself."""
    return [experts for experts in expert_modules(causal_lm) if is_gated(experts)]


def split_experts(causal_lm: Any, mesh: DeviceMesh) -> list[Any]:
    """Give each rank of the mesh an equal part of every layer's experts; returns their modules.

    Parameters are on the meta device.
    """
    modules = expert_modules(causal_lm)
    for experts in modules:
        experts.ranks = mesh.get_group()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = parameter.detach().chunk(mesh.size())[0]
            split = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(split, parameter.requires_grad))
    return modules


def run_experts(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, which other ranks may hold: [N, hidden].

    index, weights: a token's experts and their weights, [N, k]. Collective over these ranks. Rows
    take k times the memory of the tokens, so each step frees the rows of the step before.
    """
    group = experts.ranks
    num_ranks = 1 if group is None else group.size()
    held: Any = experts if group is None else _Held(experts, num_ranks)
    chosen = index.flatten()
    # float32 and int32 are exact here; NPUs sort and scatter int64 on a slow processor (AI CPU)
    order = chosen.float().argsort(stable=True)
    as_chosen = _inverse(order)
    rows = hidden[order // index.shape[1]]
    ones = torch.ones_like(chosen, dtype=torch.int32)
    counts = ones.new_zeros(num_ranks * held.num_experts).scatter_add_(0, chosen, ones)
    if group is not None:
        received, sends, receives = _exchange_counts(counts, group)
        rows = all_to_all(rows, sends, receives, group)
        numbers = torch.arange(held.num_experts, device=rows.device).float().repeat(num_ranks)
        by_expert = numbers.repeat_interleave(received, output_size=len(rows)).argsort(stable=True)
        as_received = _inverse(by_expert)
        rows = _reordered(rows, by_expert, as_received)
        counts = received.view(num_ranks, -1).sum(0)
    if len(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        gate_up, down = (
            weight.transpose(1, 2) if experts.is_transposed else weight
            for weight in (held.gate_up_proj, held.down_proj)
        )
        rows = experts.multiply(rows, gate_up, ends)
        rows = held._apply_gate(rows)
        rows = experts.multiply(rows, down, ends)
    else:  # FSDP2 and the other ranks wait for the gradients of this rank too
        rows = rows + sum(weight.sum() for weight in (held.gate_up_proj, held.down_proj))
    if group is not None:
        rows = _reordered(rows, as_received, by_expert)
        rows = all_to_all(rows, receives, sends, group)
    rows = _reordered(rows, as_chosen, order).view(*index.shape, -1)  # [N, k, hidden]
    dtype = torch.result_type(rows, weights)
    combined = weights.unsqueeze(1).to(dtype) @ rows.to(dtype)  # [N, 1, hidden]
    return combined.sum(1).to(hidden.dtype)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order, places)


def _reordered(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return rows[order]; the gradient of plain indexing takes a third copy, of zeros."""
    reordered: torch.Tensor = _Reordered.apply(rows, order, inverse)
    return reordered


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        context.order, context.inverse = order, inverse
        return rows[order]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _reordered(gradients[0], context.inverse, context.order), None, None


def _exchange_counts(
    sent: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the rows that come from each rank for each expert of this one, [ranks x experts].

    And those to send to each rank and to receive from it. `sent`: rows for each expert of all
    ranks. Collective.
    """
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sends, receives = (count.view(group.size(), -1).sum(1).tolist() for count in (sent, received))
    return received, sends, receives


class _Held:
    """The experts that this rank holds, with everything else of the module."""

    def __init__(self, experts: nn.Module, num_ranks: int) -> None:
        self._experts = experts
        for name, parameter in experts.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor)
            weight = parameter.to_local()
            if weight.requires_grad:
                # FSDP2 averages over the ranks with these experts, not over all
                weight.register_hook(lambda gradient: gradient / num_ranks)
            setattr(self, name, weight)
            self.num_experts = len(weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
