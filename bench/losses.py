"""Compares losses and advantages with verl's functions on the same random numbers.

Prints the largest difference of value and gradient for each entry. verl 0.9.1 must be importable: a
checkout or `pip install --no-deps --target FOLDER verl==0.9.1`, with its configuration library
(hydra-core, omegaconf, tensordict, codetiming, datasets) on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dapo_core.algorithm.advantage import response_advantages
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.covariance import select_tokens
from dapo_core.algorithm.loss import policy_loss
from dapo_core.algorithm.loss_tokens import LossTokens, Responses
from dapo_core.config.algorithm import AlgorithmConfig
from interop.table import load

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
# verl's name: our keys
LOSSES: dict[str, Mapping[str, Any]] = {
    "vanilla": {"loss": "dapo", **CLIPS},
    "gspo": {"loss": "gspo", **CLIPS},
    "cispo": {"loss": "cispo", **CLIPS},
    "sapo": {"loss": "sapo"},
    "geo_mean": {"loss": "gmpo", **CLIPS},
    "dppo_tv": {"loss": "dppo-tv", "dppo_tv": {"low": 0.2, "high": 0.28, "ratio_max": 10.0}},
    "clip_cov": {"loss": "clip-cov", "clip_cov": {"ratio": 1.0, "low": 1.0, "high": 5.0}, **CLIPS},
    "kl_cov": {"loss": "kl-cov", "kl_cov": {"ratio": 0.1}},
    "dro": {"loss": "dro", "dro": {"beta": 0.5}},
    "gpg": {"loss": "reinforce"},
}
LENGTHS = torch.tensor([7, 1, 9, 4, 2, 9, 5, 6])
GROUPS = np.repeat([0, 1], 4)
MASK = torch.arange(9) < LENGTHS.unsqueeze(-1)
ADVANTAGES = torch.tensor([1.0, -2.0, -0.5, 0.3, 0.7, -1.0, 2.0, -0.2], dtype=torch.float64)
_draw = torch.Generator().manual_seed(0)
OLD = -3 * torch.rand(MASK.shape, generator=_draw, dtype=torch.float64)
MOVED = OLD + 0.3 * torch.randn(MASK.shape, generator=_draw, dtype=torch.float64)


def main() -> None:
    """Print one line per loss and estimator; exit with 2 if verl cannot be imported."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        print(f"verl cannot be imported: {error}; bench/losses.py --help says what it needs")
        sys.exit(2)
    print(f"{'verl':30s} {'here':22s} {'value':>9s} {'gradient':>9s}")
    for name, keys in LOSSES.items():
        value, gradient = loss_differences(core_algos, name, keys)
        print(f"{name:30s} {keys['loss']:22s} {value:9.1e} {gradient:9.1e}")
    [estimators] = [row for row in load("verl").rows if row.key == "algorithm.adv_estimator"]
    for name, ours in estimators.values.items():
        if name.endswith("_vectorized"):
            continue  # the same values
        print(f"{name:30s} {ours:22s} {advantage_difference(core_algos, name, ours):9.1e}")


def loss_differences(verl: Any, name: str, keys: Mapping[str, Any]) -> tuple[float, float]:
    """Return the largest differences of the loss and of its gradient by the log-probs.

    The loss is a mean over tokens; of geo_mean and sapo, which ignore that, over responses.
    Covariance losses select from the current log-probs, as verl does, and clip_cov all tokens in
    its bounds.
    """
    algorithm = AlgorithmConfig.model_validate({**keys, "loss_aggregation": "token-mean"})
    advantages = ADVANTAGES.unsqueeze(-1).expand(MASK.shape)
    theirs, ours = (MOVED.clone().requires_grad_() for _ in range(2))
    inputs = OLD, theirs, advantages, MASK.double(), "token-mean", _verl_settings(), None
    loss, _ = verl.get_policy_loss_fn(name)(*inputs)
    rows = torch.arange(len(MASK)).unsqueeze(-1).expand(MASK.shape)
    weights = MASK / MASK.sum().double()
    if name in ("geo_mean", "sapo"):
        weights = MASK / MASK.sum(dim=-1, keepdim=True).double() / len(MASK)
    tokens = LossTokens(OLD, advantages, MASK, weights, Responses(rows, len(MASK)))
    tokens = replace(tokens, is_selected=_selected(algorithm))
    found = policy_loss(ours, None, tokens, algorithm).loss
    (wanted,), (slope,) = torch.autograd.grad(loss, theirs), torch.autograd.grad(found, ours)
    return abs(found.item() - loss.item()), float((wanted - slope)[MASK].abs().max())


def advantage_difference(verl: Any, name: str, ours: str) -> float:
    """Return the largest difference of the advantages, for rewards without ties in a group."""
    from verl.trainer.config import AlgoConfig

    rewards = np.array([1.0, 0.0, 0.3, 1.2, 1.0, 0.9, -1.0, 0.5])
    at_last_token = torch.zeros(MASK.shape, dtype=torch.float64)
    at_last_token[torch.arange(len(MASK)), LENGTHS - 1] = torch.from_numpy(rewards)
    settings = {"index": GROUPS, "config": AlgoConfig(gamma=1.0)}
    mask = MASK.double()
    theirs, _ = verl.get_adv_estimator_fn(name)(at_last_token, mask, **settings)
    algorithm = AlgorithmConfig.model_validate({"advantage": ours})
    found = response_advantages(rewards, GROUPS, algorithm, num_tokens=LENGTHS.numpy())
    return float(np.abs(theirs[:, 0].numpy() - found).max())


def _verl_settings() -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    chosen = {"clip_cov_ratio": 1.0, "kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0, "dro_beta": 0.5}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_c=10.0,
        policy_loss=PolicyLossConfig(**chosen),
        **CLIPS,
    )


def _selected(algorithm: AlgorithmConfig) -> torch.Tensor | None:
    """Return the tokens that the loss selects from the current log-probs.

    clip_cov of verl leaves out tokens whose ratio is clipped.
    """
    nothing = torch.zeros(0)
    batch = Batch(
        token_ids=torch.zeros(len(MASK), 1, dtype=torch.int64),
        prompt_lengths=LENGTHS,
        response_lengths=LENGTHS,
        response_mask=MASK,
        group_ids=torch.from_numpy(GROUPS),
        rewards=ADVANTAGES,
        is_scored=MASK[:, 0],
        rollout_log_probs=OLD,
        is_stale=nothing,
        advantages=ADVANTAGES,
        old_log_probs=MOVED,
    )
    selected = select_tokens(batch, algorithm, 0).is_selected
    if selected is None or algorithm.loss == "kl-cov":
        return selected
    ratio, advantages = (MOVED - OLD).exp(), ADVANTAGES.unsqueeze(-1)
    clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return selected & ~(-advantages * clipped > -advantages * ratio)


if __name__ == "__main__":
    main()
