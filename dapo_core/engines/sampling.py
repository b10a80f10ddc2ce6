"""Tokens from logits, with randomness that the caller brings."""

from __future__ import annotations

import torch

from dapo_core.engines.base import EngineSettings


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, is_greedy: torch.Tensor, settings: EngineSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N] and their log-probs [N] under the distribution sampled from.

    Inverts the distribution's CDF at `uniforms` [N], float64 in [0, 1); `logits` [N, V]. Where `is_greedy` [N],
    the likeliest token instead, with its log-prob at temperature 1.
    """
    logits = logits.float()
    if is_greedy.all():
        return _likeliest(logits)
    ids, log_probs = _drawn(logits, uniforms, settings)
    if is_greedy.any():
        likeliest_ids, likeliest_log_probs = _likeliest(logits)
        ids = torch.where(is_greedy, likeliest_ids, ids)
        log_probs = torch.where(is_greedy, likeliest_log_probs, log_probs)
    return ids, log_probs


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = logits.argmax(dim=-1)
    return ids, _chosen(logits.log_softmax(dim=-1), ids)


def _drawn(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: EngineSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = _keep_likeliest(logits / settings.temperature, settings.top_k, settings.top_p)
    log_probs = logits.log_softmax(dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Rounding must not carry the target to the total itself, which no token's interval contains.
    targets = uniforms * cumulative[:, -1] * (1 - 2**-52)
    ids = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
    return ids, _chosen(log_probs, ids)


def _keep_likeliest(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with -inf outside the `top_k` likeliest tokens, then outside the smallest set of mass `top_p`."""
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        is_beyond = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(is_beyond.scatter(1, order, is_beyond), -torch.inf)
    return logits


def _chosen(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return log_probs.gather(1, ids.unsqueeze(-1)).squeeze(-1)
