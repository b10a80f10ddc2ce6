"""Shows which groups are trained on: runs the sampler over simulated engines with realistic
response lengths.

    .venv/bin/python bench/selection.py [--steps 200] [--slots 256]

The sampler is real; engines and clock are simulated, and no model runs. Lengths are log-normal with
the published mean and share of responses at the limit (7,385 tokens, 3.9 % at 20,480). Half of the
variance of their logs lies between prompts. Prompts with longer responses are harder, and a
truncated response is wrong. In a tick an engine decodes one token in each slot. The table compares
the mean length of responses trained on with that of all drawn groups with signal, and gives the
share of slots without a response while a step is drawn.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_core.config.sampler import SamplerConfig
from dapo_core.simulation.costs import Costs
from dapo_core.simulation.engines import EngineCosts
from dapo_core.simulation.steps import Setup
from dapo_core.simulation.steps import simulate as simulate_steps
from dapo_core.simulation.workload import (
    PUBLISHED_CUT,
    PUBLISHED_LIMIT,
    PUBLISHED_MEAN,
    Workload,
    log_normal,
    outcomes,
)

GROUP_SIZE, TRAIN_PROMPTS, NUM_ENGINES = 16, 64, 8
LENGTHS = log_normal(PUBLISHED_MEAN, PUBLISHED_LIMIT, PUBLISHED_CUT)
WORKLOAD = Workload(GROUP_SIZE, 1, PUBLISHED_LIMIT, *LENGTHS)


def has_signal(group_id: int) -> bool:
    """True if the group has both right and wrong responses."""
    return 0 < outcomes(WORKLOAD, group_id)[1].sum() < GROUP_SIZE


@dataclass(frozen=True)
class Selection:
    """Statistics over the simulated steps."""

    kept_length: float  # mean tokens of responses trained on
    signal_length: float  # mean tokens of responses of all drawn groups with signal
    cut_share: float  # truncated share of responses trained on
    idle_share: float  # share of slots without a response while groups are drawn
    ticks_per_step: float
    waste_ratio: float  # share of tokens that no step learns from
    mean_age: float  # steps between a group's draw and its training
    max_age: int

    @property
    def difference(self) -> float:
        """Relative difference between kept and signal length."""
        return self.kept_length / self.signal_length - 1


def simulate(
    settings: SamplerConfig, num_steps: int, train_prompts: int, num_engines: int, num_slots: int
) -> Selection:
    """Draw `num_steps` steps with the sampler; a second is a tick, and ranks take no time."""
    costs = Costs(EngineCosts(fixed=1.0, num_slots=num_slots))
    found = simulate_steps(Setup(WORKLOAD, costs, settings, train_prompts, num_engines), num_steps)
    draws = found.draws
    kept = [rollout for draw in draws for group in draw.groups for rollout in group.rollouts]
    num_drawn = sum(draw.num_drawn for draw in draws)
    with_signal = [group_id for group_id in range(num_drawn) if has_signal(group_id)]
    kept_tokens = sum(len(rollout.response_ids) for rollout in kept)
    means = [outcomes(WORKLOAD, group_id)[0].mean() for group_id in with_signal]
    return Selection(
        kept_length=kept_tokens / len(kept),
        signal_length=float(np.mean(means)),
        cut_share=sum(rollout.is_truncated for rollout in kept) / len(kept),
        idle_share=found.idle_share,
        ticks_per_step=found.step_seconds,
        waste_ratio=found.waste_ratio,
        mean_age=found.mean_age,
        max_age=found.max_age,
    )


def compared_settings() -> dict[str, SamplerConfig]:
    """Settings to compare, by name. 3 P prompts are open, as in the default recipe."""
    base: dict[str, Any] = {"gen_prompts": 3 * TRAIN_PROMPTS, "max_seconds_without_kept": 1e12}
    ahead = {**base, "gen_prompts": 5 * TRAIN_PROMPTS, "max_staleness": 4}
    return {
        "the defaults: `window: 0.3`, `max_staleness: 3`": SamplerConfig(**base),
        "`window: 0`, strict order": SamplerConfig(**base, window=0),
        "`window: 0.1`": SamplerConfig(**base, window=0.1),
        "`window: 1`": SamplerConfig(**base, window=1),
        "`max_staleness: 2`": SamplerConfig(**base, max_staleness=2),
        "`max_staleness: 1`": SamplerConfig(**base, max_staleness=1),
        "`max_staleness: 0`": SamplerConfig(**base, max_staleness=0),
        "`max_staleness: 4`, 5 P open": SamplerConfig(**ahead),
        "`max_staleness: 4`, 5 P open, `window: 0`": SamplerConfig(**ahead, window=0),
    }


def main() -> None:
    """Simulate each setting and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=256,
        help="responses an engine decodes at once (default: %(default)s)",
    )
    arguments = parser.parse_args()
    sample = range(20_000)
    lengths = np.concatenate([outcomes(WORKLOAD, group_id)[0] for group_id in sample])
    print(
        f"{arguments.steps} steps of {TRAIN_PROMPTS} x {GROUP_SIZE} responses; all responses: mean "
        f"{lengths.mean():,.0f} tokens, {np.mean(lengths == PUBLISHED_LIMIT):.1%} cut; "
        f"{np.mean([has_signal(group_id) for group_id in sample]):.0%} of groups have signal"
    )
    columns = (
        "kept | with signal | difference | kept ones cut | idle slots | ticks a step | wasted | "
        "steps waited"
    )
    print(f"| setting | {columns} |\n|---|{'---|' * columns.count('|')}---|")
    for name, settings in compared_settings().items():
        found = simulate(settings, arguments.steps, TRAIN_PROMPTS, NUM_ENGINES, arguments.slots)
        print(
            f"| {name} | {found.kept_length:,.0f} | {found.signal_length:,.0f} | "
            f"{found.difference:+.2%} | "
            f"{found.cut_share:.1%} | {found.idle_share:.0%} | {found.ticks_per_step:,.0f} | "
            f"{found.waste_ratio:.0%} | {found.mean_age:.2f} (at most {found.max_age}) |"
        )


if __name__ == "__main__":
    main()
