"""A user's loss, from the file of algorithm.custom_loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dapo_core.algorithm.loss_tokens import LossTokens, Responses, TokenLoss
from dapo_core.errors import ConfigError
from dapo_core.reward.custom import LOSS_KEYS, LOSS_PARAMETERS, load_function, require_loss


@functools.cache
def custom_loss(path: str, name: str) -> Callable[..., TokenLoss]:
    """Load the function, and try it on two small responses.

    Raises ConfigError if it fails, or does not return a finite, differentiable loss per token; the
    loss raises it too.
    """
    require_loss(path, name)
    place = f"{path}: {name}"
    function = _ran(f"{path}, when loaded,", load_function, path, name, LOSS_KEYS[0])

    def loss(log_probs: torch.Tensor, tokens: LossTokens, _: Any) -> TokenLoss:
        mask = tokens.response_mask
        inputs = (tokens.old_log_probs, tokens.advantages, mask, tokens.responses)
        value = _ran(
            place, function, **dict(zip(LOSS_PARAMETERS, (log_probs, *inputs), strict=True))
        )
        if not isinstance(value, torch.Tensor) or value.shape != log_probs.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"{place} returned {found} instead of a tensor with the loss of each token, of the "
                f"shape {tuple(log_probs.shape)} of log_probs; do not sum or average"
            )
        num_bad = int((~value.isfinite() & mask).sum())
        if num_bad and log_probs[mask].isfinite().all():
            raise ConfigError(
                f"{place} returned NaN or infinity for {num_bad} of {int(mask.sum())} tokens with "
                "finite log-probs; correct the function"
            )
        return TokenLoss(value)

    log_probs = torch.tensor([-1.0, -0.2, -2.1, -0.3, -1.7], requires_grad=True)
    tokens = LossTokens(
        old_log_probs=torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.2]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        response_mask=torch.ones(5, dtype=torch.bool),
        weights=torch.ones(5),
        responses=Responses(torch.tensor([0, 0, 0, 1, 1]), 2),
    )
    if not loss(log_probs, tokens, None).value.requires_grad:
        raise ConfigError(
            f"{place} returned a loss that does not depend on log_probs, so nothing would be "
            "learned; do not detach log_probs everywhere"
        )
    return loss


def _ran(place: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the user's code; raises ConfigError if it fails."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        raise ConfigError(f"{place} raised {type(error).__name__}: {error}") from error
