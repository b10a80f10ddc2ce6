"""Learning rate schedules, checked by hand and against transformers."""

from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from dapo_core.config.train import TrainConfig
from dapo_core.policy.optimizer import learning_rate


def _train(**values: Any) -> TrainConfig:
    steps = {
        "total_steps": 6,
        "train_prompts": 4,
        "mini_prompts": 2,
        "warmup_steps": 2,
        "learning_rate": 1.0,
    }
    return TrainConfig.model_validate({**steps, **values})


def _rates(train: TrainConfig, steps: range = range(1, 15)) -> list[float]:
    return [learning_rate(step, train) for step in steps]


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        # 6 steps of 2 updates: 12, of which 2 warm up; p = (step - 2) / 10
        ({}, [0.5, *[1.0] * 13]),
        ({"schedule": "linear"}, [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0, 0]),
        # at least 0.2: 1 - 0.8 p
        (
            {"schedule": "linear", "min_learning_rate_ratio": 0.2},
            [0.5, 1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2, 0.2, 0.2],
        ),
        # to step 6: p = (step - 2) / 4, cosines of 45, 90 and 135 degrees; 0.1 + 0.9 (1 + cos) / 2
        (
            {"schedule": "cosine", "schedule_steps": 6, "min_learning_rate_ratio": 0.1},
            [0.5, 1.0, 0.868198, 0.55, 0.231802, *[0.1] * 9],
        ),
        # 4 of the 10 steps after warm-up fall: from step 8 to 12
        (
            {"schedule": "wsd", "decay_ratio": 0.4},
            [0.5, *[1.0] * 7, 0.853553, 0.5, 0.146447, 0, 0, 0],
        ),
        # one step at least
        ({"schedule": "wsd", "decay_ratio": 0.01}, [0.5, *[1.0] * 10, 0, 0, 0]),
        # two passes: twice as many updates, so at update 12 p = 10 / 22
        (
            {"schedule": "linear", "passes": 2, "warmup_steps": 2},
            [0.5, *[1 - n / 22 for n in range(13)]],
        ),
    ],
)
def test_rates_match_hand_computed_values(values: dict[str, Any], rates: list[float]) -> None:
    assert _rates(_train(**values)) == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_equal_transformers_schedules_one_step_later(schedule: str) -> None:
    """transformers starts at rate 0, which changes nothing; our first step is its second."""
    builders = {
        "constant": get_constant_schedule_with_warmup,
        "linear": get_linear_schedule_with_warmup,
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    total = {} if schedule == "constant" else {"num_training_steps": 40}
    theirs = builders.get(schedule, get_cosine_schedule_with_warmup)(
        optimizer, num_warmup_steps=7, **total
    )
    train = _train(learning_rate=3e-5, warmup_steps=7, total_steps=20, schedule=schedule)
    for step in range(1, 41):
        optimizer.step()
        theirs.step()
        assert learning_rate(step, train) == pytest.approx(
            theirs.get_last_lr()[0], rel=1e-12, abs=1e-20
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"schedule": "cosine", "warmup_steps": 12},
            r"warmup_steps=12 leaves none of the 12 optimizer .*schedule=cosine; .*total_s",
        ),
        (
            {"schedule": "wsd", "schedule_steps": 2},
            r"leaves none of the 2 optimizer steps .* raise train\.schedule_steps",
        ),
        (
            {"min_learning_rate_ratio": 0.1},
            r"min_learning_rate_ratio=0\.1 would be ignored by .*schedule=constant",
        ),
        (
            {"schedule": "cosine", "decay_ratio": 0.2},
            r"decay_ratio=0\.2 would be ignored .*; remove it, or .*wsd",
        ),
        ({"schedule_steps": 9}, r"train\.schedule_steps=9 would be ignored"),
        ({"train_prompts": 5}, r"train_prompts=5 is not a multiple of train\.mini_prompts=2"),
    ],
)
def test_schedules_with_no_room_or_ignored_keys_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _train(**values)
