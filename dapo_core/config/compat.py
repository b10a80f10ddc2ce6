"""Switches for algorithm.compat=verl, where this project differs from verl (docs/departures.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo_core.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Compat:
    """verl's behaviours; True reproduces verl."""

    # a group has signal if np.std of its metric is above 0, rounding included
    signal_by_std: bool = False
    # equal rewards keep rounding noise, a group of one keeps its reward
    advantages_in_float32: bool = False
    token_mean_per_micro_batch: bool = False  # older verl: the mean of micro-batch means
    # the overlong penalty keeps growing beyond the response limit
    overlong_beyond_limit: bool = False
    stale_is_fresh: bool = False  # tokens of an older policy count as on-policy
    math_dapo_to_the_letter: bool = False  # only `Answer:`, never a box, and verl's normalisation

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Compat:
        """Return the switches for algorithm.compat."""
        return VERL if algorithm.compat == "verl" else OURS


OURS = Compat()
VERL = Compat(
    signal_by_std=True,
    advantages_in_float32=True,
    token_mean_per_micro_batch=True,
    overlong_beyond_limit=True,
    stale_is_fresh=True,
    math_dapo_to_the_letter=True,
)
