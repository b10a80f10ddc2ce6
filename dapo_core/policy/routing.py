"""The routing of a mixture of experts: which experts process each token, and how evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dapo_core.algorithm.update import RoutingSums
from dapo_core.model.routers import UNKNOWN_EXPERT, Experts, returns_probabilities, routers_of

if TYPE_CHECKING:
    from dapo_core.policy.packing import PackedRow


class Routing:
    """Records the last forward pass of a model's L routers, with n tokens, E experts and top-K.

    A row's own routing replaces the routers' choice, also when gradients recompute the pass.
    With `keeps_logits`, logits are recorded too, with their gradient.
    """

    def __init__(self, model: nn.Module, keeps_logits: bool = False) -> None:
        self.routers = routers_of(model)
        self.keeps_logits = keeps_logits
        self.is_recording = False
        self.experts: list[torch.Tensor] = []  # L times [n, K]
        self.entropy: list[torch.Tensor] = []  # L times [n]
        self.logits: list[torch.Tensor] = []  # L times [n, E]
        self._sums: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._losses: list[torch.Tensor] = []
        self._replayed: torch.Tensor | None = None  # PackedRow.routing
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._on_forward, number))

    @contextmanager
    def recording(self, row: PackedRow) -> Iterator[None]:
        """Record the row's forward pass inside the block, but not its later recomputation."""
        self._replayed = row.routing
        self.experts, self.entropy, self.logits = [], [], []
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    @torch.compiler.disable
    def _on_forward(self, number: int, router: Any, _: Any, outputs: Any) -> Any:
        if returns_probabilities(type(router).forward):
            probs, *others = outputs
            outputs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), *others
        if self._replayed is not None:
            outputs = _replay(router, self._replayed[:, number], *outputs)
        if self.is_recording:
            self._record(router, *outputs)
        return outputs

    def _record(
        self, router: Any, logits: torch.Tensor, _: torch.Tensor, experts: torch.Tensor
    ) -> None:
        self.experts.append(experts)
        if self.keeps_logits:
            self.logits.append(logits)
        if router.training:
            log_probs = logits.detach().float().log_softmax(dim=-1)
            self.entropy.append(-(log_probs.exp() * log_probs).sum(dim=-1))

    def read(self, row: PackedRow, lengths: Sequence[int] | np.ndarray) -> list[Experts]:
        """Return the experts of each sequence of the last pass, as in Batch.routing.

        Collective over the ranks of the row.
        """
        experts = torch.stack(self.experts, dim=1).to(torch.uint8)  # [n, L, K]
        if (group := row.packing.group) is not None:
            parts = [torch.empty_like(experts) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, experts, group=group)
            experts = torch.cat(parts)
        return np.split(experts.cpu().numpy()[row.places], np.cumsum(lengths)[:-1])

    def count(self, row: PackedRow) -> None:
        """Add the last training pass, of the row, to the sums of `take`."""
        experts = torch.stack(self.experts)[:, row.tokens]  # [L, n, K]
        loads = _counts(experts.flatten(1), self.routers[0].num_experts)
        entropy = torch.stack(self.entropy)[:, row.tokens].sum()
        self._sums.append((loads, entropy, len(row.tokens)))

    def balance_loss(self, row: PackedRow, lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return this rank's part of the load-balancing loss of the last pass, of the row.

        lengths: [b], of the row's sequences; num_tokens: of the mini-batch's. The loss of a
        sequence is E sum_e f_e p_e, with f_e the number of its assignments to expert e and p_e the
        sum of its probabilities, both divided by tokens x layers (Switch Transformer,
        arXiv:2101.03961, eq. 4). Sequences are weighted by their tokens, so micro-batches and ranks
        do not affect the sum. Collective over the ranks of a row.
        """
        sequences, num_layers = row.sequences, len(self.logits)
        num_experts = self.routers[0].num_experts
        chosen = torch.cat([each[row.tokens] for each in self.experts], dim=-1)  # [n, L K]
        cells = sequences.unsqueeze(-1) * num_experts + chosen
        counts = _counts(cells.view(1, -1), len(lengths) * num_experts).float()
        if row.packing.group is not None:
            dist.all_reduce(counts, group=row.packing.group)
        shares = counts.view(-1, num_experts) / lengths.to(counts.device).unsqueeze(-1)  # [b, E]
        per_token = shares[sequences]
        parts = [
            (per_token * each[row.tokens].float().softmax(dim=-1)).sum() for each in self.logits
        ]
        loss = torch.stack(parts).sum() * num_experts / (num_tokens * num_layers**2)
        self._losses.append(loss.detach())
        return loss

    def take(self) -> RoutingSums | None:
        """Return the counted sums, None without any; frees them and the last pass's records."""
        sums, losses = self._sums, self._losses
        self._sums, self._losses = [], []
        self.experts, self.entropy, self.logits = [], [], []
        if not sums:
            return None
        loads, entropy, counts = zip(*sums, strict=True)
        return RoutingSums(
            torch.stack(loads).sum(dim=0).tolist(),
            float(torch.stack(entropy).sum()),
            sum(counts),
            float(torch.stack(losses).sum()) if losses else None,
        )


def _counts(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return how often each number below `size` is in each row: [rows, size] int32.

    torch.bincount waits for the device, and runs on an NPU's slow processor (AI CPU).
    """
    ones = torch.ones_like(numbers, dtype=torch.int32)
    return ones.new_zeros(len(numbers), size).scatter_add_(1, numbers, ones)


def _replay(
    router: Any,
    replayed: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor,
    experts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the router's results for the replayed experts [n, K], where they are known."""
    experts = torch.where(replayed == UNKNOWN_EXPERT, experts, replayed.long())
    chosen = logits.float().softmax(dim=-1).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always normalizes
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return logits, chosen.to(scores.dtype), experts
