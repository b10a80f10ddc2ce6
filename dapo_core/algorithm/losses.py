"""The policy losses by name (`algorithm.loss`), each a function of one token.

With A the advantage, r = exp(d), and d = log_probs - old_log_probs clamped to +-20. Losses of whole
responses have a form per token: what they need of the response is a detached mean, so that neither
micro-batches nor ranks change a gradient. Weights, masks, KL and entropy are added in loss.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dapo_core.algorithm.custom_loss import custom_loss
from dapo_core.algorithm.kl import MAX_LOG_RATIO
from dapo_core.algorithm.loss_tokens import LossTokens, TokenLoss
from dapo_core.config.algorithm import AlgorithmConfig

MAX_RESPONSE_LOG_RATIO = 10.0

Loss = Callable[[torch.Tensor, LossTokens, AlgorithmConfig], TokenLoss]


def log_ratios(log_probs: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """Return log(policy / old policy), clamped to +-20."""
    return (log_probs - tokens.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def dapo(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """max(-A r, -A clamp(r, 1 - low, 1 + high)), for A < 0 at most -A c.

    DAPO, arXiv:2503.14476, eq. 8; dual clip, arXiv:1912.09729.
    """
    value, is_clipped = _clipped(log_ratios(log_probs, tokens).exp(), tokens, algorithm)
    bound = -tokens.advantages * algorithm.clip_ratio_dual
    is_negative = tokens.advantages < 0
    lowest = torch.where(is_negative, torch.minimum(bound, value), value)
    return TokenLoss(lowest, is_clipped, is_negative & (bound < value))


def gspo(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's clip of the response's ratio s, the geometric mean of its r.

    A token's ratio is s in value and s times its own in gradient. GSPO, arXiv:2507.18071, eq. 5 and
    14.
    """
    mean = tokens.responses.mean(log_probs - tokens.old_log_probs, tokens.response_mask)
    log_ratio = (log_probs - log_probs.detach() + mean).clamp(max=MAX_RESPONSE_LOG_RATIO)
    return TokenLoss(*_clipped(log_ratio.exp(), tokens, algorithm))


def cispo(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A clamp(r, 1 - low, 1 + high) log_probs, with the clamped ratio detached.

    Clipped tokens keep a gradient. CISPO, arXiv:2506.13585, eq. 4.
    """
    ratio = log_ratios(log_probs, tokens).exp().detach()
    clamped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return TokenLoss(-clamped * tokens.advantages * log_probs, ratio != clamped)


def sapo(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate instead of a clip. SAPO, arXiv:2511.20347."""
    settings, advantages = algorithm.sapo, tokens.advantages
    positive = torch.full_like(advantages, settings.tau_positive)
    tau = torch.where(advantages > 0, positive, settings.tau_negative)
    gate = torch.sigmoid(tau * (log_ratios(log_probs, tokens).exp() - 1)) * 4 / tau
    return TokenLoss(-gate * advantages)


def gmpo(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A times the geometric mean of the response's clipped r: log r stops at -low and high.

    Only on the side that the advantage pushes to. A token's value is that of its response, its
    gradient that of its own clipped log-ratio. GMPO, arXiv:2507.20673.
    """
    log_ratio, sign = log_ratios(log_probs, tokens), tokens.advantages.sign()
    bounded = log_ratio.clamp(-algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    clipped = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = tokens.responses.mean(clipped, tokens.response_mask).exp()
    value = -tokens.advantages * ratio * (1 + clipped - clipped.detach())
    return TokenLoss(value, sign * clipped != sign * log_ratio)


def dppo_tv(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A min(r, c) log_probs, with the ratio detached; 0 once the probability moved too far.

    That is beyond `high` for A > 0 and below -`low` for others. DPPO, arXiv:2602.04879.
    """
    settings, moved = algorithm.dppo_tv, log_probs.exp() - tokens.old_log_probs.exp()
    is_far = torch.where(tokens.advantages > 0, moved > settings.high, moved < -settings.low)
    ratio = log_ratios(log_probs, tokens).exp().clamp(max=settings.ratio_max).detach()
    value = -tokens.advantages * ratio * log_probs
    return TokenLoss(torch.where(is_far, 0.0, value), is_far)


def clip_cov(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """PPO's clip, and 0 for the tokens chosen by covariance. Clip-Cov, arXiv:2505.22617, eq. 10."""
    assert tokens.is_selected is not None, "PolicyGroup.learn selects tokens for this loss"
    value, _ = _clipped(log_ratios(log_probs, tokens).exp(), tokens, algorithm)
    return TokenLoss(torch.where(tokens.is_selected, 0.0, value), tokens.is_selected)


def kl_cov(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A r, plus coefficient |d| for the tokens chosen by covariance. KL-Cov, arXiv:2505.22617."""
    assert tokens.is_selected is not None, "PolicyGroup.learn selects tokens for this loss"
    log_ratio = log_ratios(log_probs, tokens)
    penalty = algorithm.kl_cov.coefficient * log_ratio.abs()
    value = -tokens.advantages * log_ratio.exp()
    return TokenLoss(torch.where(tokens.is_selected, value + penalty, value))


def dro(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-(A log_probs - beta / 2 d^2): a quadratic penalty. DRO, arXiv:2405.19107."""
    penalty = algorithm.dro.beta / 2 * log_ratios(log_probs, tokens).square()
    return TokenLoss(penalty - tokens.advantages * log_probs)


def reinforce(log_probs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLoss:
    """-A log_probs, without a ratio. REINFORCE, Williams 1992; GPG, arXiv:2504.02546."""
    return TokenLoss(-tokens.advantages * log_probs)


def _clipped(
    ratio: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped loss of each ratio, and whether the clip applied."""
    unclipped = -tokens.advantages * ratio
    bounded = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    clipped = -tokens.advantages * bounded
    return torch.maximum(unclipped, clipped), clipped > unclipped


LOSSES: dict[str, Loss] = {
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo-tv": dppo_tv,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "dro": dro,
    "reinforce": reinforce,
}


def loss_of(algorithm: AlgorithmConfig) -> Loss:
    """Return the configured loss; a user's is loaded and tried once a process."""
    if algorithm.custom_loss.path is not None:
        return custom_loss(algorithm.custom_loss.path, algorithm.custom_loss.name)
    return LOSSES[algorithm.loss]
