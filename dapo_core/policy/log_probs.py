"""Log-probs and entropy of response tokens from logits in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dapo_core.policy.attention import PACKED_ATTENTION

if TYPE_CHECKING:
    from dapo_core.policy.packing import PackedRow


class TokenLogProbs(nn.Module):
    """A causal language model whose forward pass returns log-probs; FSDP2's root module.

    Logits exist for `chunk_tokens` tokens at a time and are recomputed in the backward pass, so memory does not
    grow with tokens times vocabulary. Without `entropy_gradient` the backward pass leaves the entropy out.
    """

    def __init__(self, causal_lm: Any, chunk_tokens: int, entropy_gradient: bool = True) -> None:
        super().__init__()
        causal_lm.set_attn_implementation(PACKED_ATTENTION)
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient

    def forward(self, row: PackedRow, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the row's targets and, if requested, the entropy there (else empty): [M] float32 each."""
        hidden = self.causal_lm.base_model(
            input_ids=row.token_ids, position_ids=row.position_ids, use_cache=False, packing=row.packing
        ).last_hidden_state
        predictors = hidden[0].index_select(0, row.predictors)  # [M, hidden]
        chunks = zip(predictors.split(self.chunk_tokens), row.targets.split(self.chunk_tokens), strict=True)
        parts = [
            checkpoint(
                self._chunk, *chunk, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False
            )
            for chunk in chunks
        ]
        log_probs, entropy = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropy)

    def _chunk(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.causal_lm.get_output_embeddings()(hidden).float() / temperature  # [chunk, V]
        normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
        if not with_entropy:
            return log_probs, log_probs.new_empty(0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            return log_probs, normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
