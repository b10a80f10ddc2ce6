"""Log-probs and entropy of response tokens, from chunked logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dapo_core.errors import ModelError
from dapo_core.machine.device import Device
from dapo_core.model.pretrained import reads_pictures
from dapo_core.model.tensors import OTHER_MODEL
from dapo_core.policy.attention import PACKED_ATTENTION
from dapo_core.policy.model import load_sharded, reshard
from dapo_core.policy.packing import PackedRow, probe_row
from dapo_core.policy.routing import Routing
from dapo_core.policy.vision import Tower

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dapo_core.config.training import TrainingConfig


class TokenLogProbs(nn.Module):
    """FSDP2 root module: a causal language model whose forward pass returns log-probs.

    Logits are computed for `chunk_tokens` tokens at a time and recomputed in the backward pass, so
    memory does not grow with tokens x vocabulary. Without `entropy_gradient`, the entropy is
    detached.
    """

    def __init__(
        self,
        causal_lm: Any,
        chunk_tokens: int,
        entropy_gradient: bool = True,
        keeps_router_logits: bool = False,
        tower: Tower | None = None,
    ) -> None:
        super().__init__()
        self.tower = tower
        if tower is None:
            causal_lm.set_attn_implementation(PACKED_ATTENTION)
        self.causal_lm = causal_lm
        self.routing = Routing(causal_lm, keeps_router_logits)
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient

    def forward(
        self, row: PackedRow, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and, if requested, entropy (else empty) at the row's targets: [M]."""
        shown = {"input_ids": row.token_ids} if self.tower is None else self.tower.inputs(row)
        with self.routing.recording(row):
            hidden = self.causal_lm.get_decoder()(
                **shown,
                position_ids=row.position_ids,
                use_cache=False,
                packing=row.packing,
            ).last_hidden_state
        predictors = hidden[0].index_select(0, row.predictors)  # [M, hidden]
        inputs = (predictors.split(self.chunk_tokens), row.targets.split(self.chunk_tokens))
        modes: Any = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [
            checkpoint(self._chunk, *chunk, temperature, with_entropy, **modes)
            for chunk in zip(*inputs, strict=True)
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


def load_token_log_probs(
    model_path: str | Path,
    config: TrainingConfig,
    device: Device,
    group: ProcessGroup | None,
    is_trainable: bool,
) -> nn.Module:
    """Load the folder's model under FSDP2, inside TokenLogProbs; `group` splits rows. Collective.

    Raises ModelError if a probe of two sequences shows that a layer does not keep them apart.
    """
    train, algorithm = config.train, config.algorithm
    is_balanced = is_trainable and algorithm.router_aux_loss_coefficient > 0

    def wrap(causal_lm: nn.Module) -> nn.Module:
        has_bonus = algorithm.entropy_coefficient > 0
        config: Any = causal_lm.config
        tower = Tower(causal_lm, model_path) if reads_pictures(config) else None
        return TokenLogProbs(causal_lm, train.logits_chunk_tokens, has_bonus, is_balanced, tower)

    options = is_trainable, config.model.trust_remote_code, config.run.seed
    model = load_sharded(model_path, train, device, wrap, *options)
    row = probe_row(device.torch_device(), group)
    with torch.no_grad():
        model(row, 1.0, False)
    reshard(model)
    model_config: Any = model.causal_lm.config  # type: ignore[union-attr]
    num_layers = model_config.get_text_config().num_hidden_layers
    if len(row.packing.layers) != num_layers:
        raise ModelError(
            f"only {len(row.packing.layers)} of the {num_layers} layers of "
            f"{model_config.model_type} keep the sequences of a packed row apart; {OTHER_MODEL}"
        )
    return model
