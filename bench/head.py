"""Compares the log-probs of a policy rank with autograd on recomputed chunks of logits.

    .venv/bin/python bench/head.py [--tokens 1024] [--vocabulary 49152] [--hidden 576] [--chunk 128]

Both get the same hidden states, weights and gradients in bfloat16 and take turns; the table has the
least CPU time of a forward and a backward pass, and the largest difference between their gradients
as a share of the largest value.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from dapo_core.policy.log_probs import Options, TargetLogProbs

TURNS = 3
Outputs = tuple[torch.Tensor, torch.Tensor]


def by_autograd(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: Options
) -> Outputs:
    """Return log-probs and entropy; checkpointing computes logits again in the backward pass."""

    def chunk(rows: torch.Tensor, chosen: torch.Tensor) -> Outputs:
        logits = (rows @ weight.T).float() / options.temperature
        normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(1, chosen.unsqueeze(-1)).squeeze(-1) - normalizer
        with torch.set_grad_enabled(options.entropy_gradient):
            return log_probs, normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)

    chunks = zip(*(each.split(options.chunk_tokens) for each in (hidden, targets)), strict=True)
    parts = [checkpoint(chunk, *each, use_reentrant=False) for each in chunks]
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def fused(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: Options
) -> Outputs:
    """Return the log-probs and entropy of a policy rank."""
    return TargetLogProbs.apply(hidden, weight, None, targets, options)


def main() -> None:
    """Print one row with and one without the entropy's gradient."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", 1024), ("vocabulary", 49152), ("hidden", 576), ("chunk", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden).bfloat16()
    weight = (torch.randn(sizes.vocabulary, sizes.hidden) / sizes.hidden**0.5).bfloat16()
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,))
    slopes = torch.randn(2, sizes.tokens)
    print(
        "| entropy's gradient | autograd s | fused s | ratio | difference |\n|---|---|---|---|---|"
    )
    for entropy_gradient in (False, True):
        options = Options(1.0, sizes.chunk, True, entropy_gradient)
        seconds = {by_autograd: 1e9, fused: 1e9}
        gradients = {}
        for function in [*seconds] * TURNS:
            found, gradients[function] = _measure(
                function, hidden, weight, targets, slopes, options
            )
            seconds[function] = min(seconds[function], found)
        pairs = zip(*gradients.values(), strict=True)
        difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        first, second = seconds.values()
        print(
            f"| {'yes' if entropy_gradient else 'no'} | {first:.2f} | {second:.2f} | "
            f"{first / second:.2f} | {difference:.1e} |"
        )


def _measure(
    function: Callable[..., Outputs],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    options: Options,
) -> tuple[float, list[torch.Tensor]]:
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    began = time.process_time()
    log_probs, entropy = function(*leaves, targets, options)
    loss = (slopes[0] * log_probs).sum()
    if options.entropy_gradient:
        loss = loss + (slopes[1] * entropy).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return time.process_time() - began, [each.float() for each in gradients]


if __name__ == "__main__":
    main()
