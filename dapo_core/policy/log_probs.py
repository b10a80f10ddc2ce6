"""Log-probs and entropy of response tokens, from chunked logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dapo_core.errors import ModelError
from dapo_core.machine.device import Device
from dapo_core.model.pretrained import reads_pictures
from dapo_core.model.tensors import OTHER_MODEL
from dapo_core.policy.attention import set_packed_attention
from dapo_core.policy.model import load_sharded, reshard
from dapo_core.policy.packing import PackedRow, probe_row
from dapo_core.policy.routing import Routing
from dapo_core.policy.vision import Tower

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dapo_core.config.training import TrainingConfig


class TokenLogProbs(nn.Module):
    """FSDP2 root module: a causal language model whose forward pass returns log-probs.

    Logits exist for `chunk_tokens` tokens at a time, so memory does not grow with tokens x
    vocabulary. Without `entropy_gradient`, the entropy is detached.
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
        set_packed_attention(causal_lm)
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
        head = self.causal_lm.get_output_embeddings()
        log_probs, entropy = TargetLogProbs.apply(
            predictors,
            head.weight,
            head.bias,
            row.targets,
            Options(
                temperature,
                self.chunk_tokens,
                with_entropy,
                with_entropy and self.entropy_gradient,
            ),
        )
        return log_probs, entropy


class Options(NamedTuple):
    """How TargetLogProbs computes."""

    temperature: float
    chunk_tokens: int
    with_entropy: bool
    entropy_gradient: bool


class TargetLogProbs(torch.autograd.Function):
    """Log-probs of the targets, and the entropy, if requested: [M] from hidden states [M, hidden].

    Neither pass holds more than one chunk's logits. The backward pass computes them again and turns
    them into their gradient in place: softmax minus one-hot.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.weight, ctx.bias = weight, bias  # parameters, which saved-tensor hooks must not move
        ctx.options = options
        chosen, normalizer = torch.empty(2, len(hidden), device=hidden.device)
        entropy = torch.empty(len(hidden) * options.with_entropy, device=hidden.device)
        for part in _chunks(len(hidden), options.chunk_tokens):
            logits = _logits(hidden[part], weight, bias, options.temperature)
            normalizer[part] = logits.logsumexp(dim=-1)
            chosen[part] = logits.gather(1, targets[part, None]).squeeze(-1)
            if options.with_entropy:
                probs = (logits - normalizer[part, None]).exp_()
                entropy[part] = normalizer[part] - probs.mul_(logits).sum(dim=-1)
                del probs
            del logits  # before the next chunk's
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, targets, normalizer, entropy)
        return chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: torch.Tensor, d_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, targets, normalizer, entropy = ctx.saved_tensors
        weight, bias, options = ctx.weight, ctx.bias, ctx.options
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(hidden), options.chunk_tokens):
            log_probs = _logits(hidden[part], weight, bias, options.temperature)  # [chunk, V]
            log_probs.sub_(normalizer[part, None])
            slope = factor = d_log_probs[part, None]
            if options.entropy_gradient:  # d entropy / d logits = -probs (log_probs + entropy)
                factor = (log_probs + entropy[part, None]).mul_(d_entropy[part, None]).add_(slope)
            d_logits = log_probs.exp_().mul_(factor).neg_()
            d_logits.scatter_add_(1, targets[part, None], slope)
            del log_probs, factor
            d_logits = d_logits.div_(options.temperature).to(hidden.dtype)
            torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0)
            del d_logits
        return d_hidden, d_weight, d_bias, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(first, first + chunk_tokens) for first in range(0, num_tokens, chunk_tokens)]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Return new float32 logits [chunk, V] at a temperature."""
    return functional.linear(hidden, weight, bias).float().div_(temperature)


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
