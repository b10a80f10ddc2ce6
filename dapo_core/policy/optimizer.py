"""AdamW, its learning rate schedule, and the result of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import get_total_norm

from dapo_core.machine.device import device_for
from dapo_core.model.sharding import local_part

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig


def adamw(parameters: Iterable[torch.Tensor], train: TrainConfig) -> torch.optim.AdamW:
    """Create the optimizer of the trainable parameters; the learning rate is set before each step.

    Accelerators update all tensors at once. A CPU, which would gain nothing, takes one at a time,
    with temporaries of its size alone.
    """
    return torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
        foreach=device_for(train.device).has_own_memory,
    )


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, num_copies: int) -> float:
    """Clip the gradients to a global norm; returns the norm before. Collective.

    Each of `num_copies` groups of ranks holds all gradients. torch's clip_grad_norm_ needs all
    parameters on one mesh; experts may have their own.
    """
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    square = get_total_norm(gradients).square()
    torch.distributed.all_reduce(square)
    norm = (square / num_copies).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm.item()


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step`, which starts at 1.

    With W = warmup_steps, T = num_schedule_steps and m = min_learning_rate_ratio, the peak is
    multiplied by step / W during warm-up, then by 1 (constant) or by m + (1 - m) f(p). p rises from
    0 at step W to 1 at step T and stays there; f(p) is 1 - p (linear) or (1 + cos(pi p)) / 2
    (cosine). wsd is constant, then a cosine over the last decay_ratio * (T - W) steps, rounded.
    """
    return train.learning_rate * _factor(step, train)


def _factor(step: int, train: TrainConfig) -> float:
    start, end = train.warmup_steps, train.num_schedule_steps
    if step < start:
        return step / start
    if train.schedule == "constant":
        return 1.0
    if train.schedule == "wsd":
        start = end - max(round(train.decay_ratio * (end - start)), 1)
    progress = min(max((step - start) / (end - start), 0.0), 1.0)
    decay = progress if train.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - train.min_learning_rate_ratio) * decay
