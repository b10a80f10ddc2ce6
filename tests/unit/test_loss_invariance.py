"""Loss and gradients of a mini-batch do not depend on how it is split, ordered, padded or packed.

All properties are tested in float32 with entropy bonus, KL in the loss and importance weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from random import Random
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.algorithm.loss import LossTotals, policy_loss
from dapo_core.algorithm.loss_tokens import LossTokens, Responses
from dapo_core.algorithm.losses import LOSSES
from dapo_core.config.algorithm import AlgorithmConfig, KLConfig
from tests.batches import row_numbers

AGGREGATIONS = get_args(AlgorithmConfig.model_fields["loss_aggregation"].annotation)
ESTIMATORS = get_args(KLConfig.model_fields["estimator"].annotation)
COUNTS = ("num_tokens", "clipped", "clipped_dual")
SUMS = ("pg_loss", "kl_loss", "neg_log_ratio")


@dataclass(frozen=True)
class MiniBatch:
    """Responses whose values outside the mask are NaN, all [B, R] but the first field."""

    lengths: list[int]
    log_probs: torch.Tensor
    entropy: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    importance_weights: torch.Tensor
    ref_log_probs: torch.Tensor
    mask: torch.Tensor
    is_selected: torch.Tensor

    def map(
        self, change: Callable[[torch.Tensor], torch.Tensor], lengths: list[int] | None = None
    ) -> MiniBatch:
        """The mini-batch with every tensor changed."""
        changed = {field.name: change(getattr(self, field.name)) for field in fields(self)[1:]}
        return MiniBatch(lengths=self.lengths if lengths is None else lengths, **changed)

    def select(self, rows: Sequence[int]) -> MiniBatch:
        return self.map(lambda values: values[list(rows)], [self.lengths[row] for row in rows])


@dataclass(frozen=True)
class Result:
    """A mini-batch's loss, its derivatives [B, R] by log_probs and entropy, and the rest."""

    loss: float
    gradients: tuple[torch.Tensor, torch.Tensor]
    sums: dict[str, float]
    counts: dict[str, float]


@st.composite
def _mini_batches(draw: st.DrawFn) -> MiniBatch:
    """Responses of 0 to 6 tokens of which some are masked out, sometimes all."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (len(lengths), max(*lengths, 1))

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    is_response = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(-1)
    keeps = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    old = -normal(2.0).abs()
    batch = MiniBatch(
        lengths=lengths,
        log_probs=old + normal(1.0),
        entropy=normal(1.0).abs(),
        old_log_probs=old,
        advantages=normal(2.0)[:, :1].expand(shape).contiguous(),
        importance_weights=normal(1.0).exp().clamp(max=2.0),
        ref_log_probs=old + normal(1.0),
        mask=is_response & keeps,
        is_selected=torch.rand(shape, generator=generator) < 0.3,
    )
    hidden = batch.map(lambda values: torch.where(batch.mask, values, float("nan")))
    return replace(hidden, mask=batch.mask, is_selected=batch.is_selected)


@st.composite
def _algorithms(draw: st.DrawFn) -> AlgorithmConfig:
    aggregation = draw(st.sampled_from(AGGREGATIONS))
    values: dict[str, Any] = {
        "loss": draw(st.sampled_from(list(LOSSES))),
        "loss_aggregation": aggregation,
        "entropy_coefficient": 0.3,
        "kl": {"place": "loss", "coefficient": 0.7, "estimator": draw(st.sampled_from(ESTIMATORS))},
    }
    if aggregation == "seq-mean-token-sum-norm":
        values["loss_norm_tokens"] = 5
    return AlgorithmConfig.model_validate(values)


def _evaluate(
    batch: MiniBatch,
    algorithm: AlgorithmConfig,
    ranks: list[list[list[int]]],
    is_packed: bool = False,
) -> Result:
    """Sum over ranks of micro-batches of row numbers; packed: the rows' tokens joined, [N]."""
    num_responses = int(batch.mask.any(dim=-1).sum())
    totals = LossTotals(int(batch.mask.sum()), num_responses, num_data_ranks=len(ranks))
    leaves = batch.log_probs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    tracked = replace(batch, log_probs=leaves[0], entropy=leaves[1])
    numbers = dict.fromkeys(("loss", *SUMS, *COUNTS), 0.0)
    for share in ranks:
        num_share_responses = sum(len(rows) for rows in share)
        for rows in share:
            part = tracked.select(rows)
            weights = totals.token_weights(part.mask, algorithm, num_share_responses)
            row_of = row_numbers(part.mask)
            if is_packed:
                is_response = torch.arange(weights.shape[1]) < torch.tensor(part.lengths).unsqueeze(
                    -1
                )
                part, weights, row_of = (
                    part.map(lambda values, chosen=is_response: values[chosen]),
                    weights[is_response],
                    row_of[is_response],
                )
            tokens = LossTokens(
                old_log_probs=part.old_log_probs,
                advantages=part.advantages,
                response_mask=part.mask,
                weights=weights,
                responses=Responses(row_of, len(rows)),
                importance_weights=part.importance_weights,
                ref_log_probs=part.ref_log_probs,
                is_selected=part.is_selected,
            )
            loss = policy_loss(part.log_probs, part.entropy, tokens, algorithm)
            loss.loss.backward()
            for name in numbers:
                numbers[name] += loss.loss.item() if name == "loss" else getattr(loss.sums, name)
    gradients = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return Result(
        numbers["loss"],
        (gradients[0], gradients[1]),
        {name: numbers[name] for name in SUMS},
        {name: numbers[name] for name in COUNTS},
    )


def _whole(batch: MiniBatch, algorithm: AlgorithmConfig) -> Result:
    return _evaluate(batch, algorithm, [[list(range(len(batch.lengths)))]])


def _assert_same(found: Result, expected: Result) -> None:
    # absolute 1e-5: up to 36 float32 terms of size 1 to 10 may cancel
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
    assert found.sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-5)
    assert found.counts == expected.counts
    for gradient, wanted in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def _cut(rows: list[int], num_parts: int, shuffler: Random) -> list[list[int]]:
    """The rows in consecutive parts, of which some may be empty."""
    cuts = [0, *sorted(shuffler.randint(0, len(rows)) for _ in range(num_parts - 1)), len(rows)]
    return [rows[start:end] for start, end in pairwise(cuts)]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    batch=_mini_batches(),
    algorithm=_algorithms(),
    num_ranks=st.sampled_from([1, 2, 3]),
    more=st.integers(0, 3),
    is_packed=st.booleans(),
    shuffler=st.randoms(use_true_random=False),
)
def test_loss_and_gradient_do_not_depend_on_the_split(
    batch: MiniBatch,
    algorithm: AlgorithmConfig,
    num_ranks: int,
    more: int,
    is_packed: bool,
    shuffler: Random,
) -> None:
    def widen(values: torch.Tensor) -> torch.Tensor:
        filler = False if values.dtype == torch.bool else float("nan")
        return torch.nn.functional.pad(values, (0, more), value=filler)

    rows = list(range(len(batch.lengths)))
    shuffler.shuffle(rows)
    ranks = [_cut(share, 2, shuffler) for share in _cut(rows, num_ranks, shuffler)]
    found, width = _evaluate(batch.map(widen), algorithm, ranks, is_packed), batch.mask.shape[1]
    assert all(gradient[:, width:].count_nonzero() == 0 for gradient in found.gradients)
    narrow = found.gradients[0][:, :width], found.gradients[1][:, :width]
    _assert_same(replace(found, gradients=narrow), _whole(batch, algorithm))
