"""Token limits: all conflicts are reported at once, and the proposed values fit."""

import itertools
from dataclasses import replace

import pytest

from dapo_core.errors import ConfigError
from flows.config import load_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.config.lengths import KEYS, Bounds, Lengths, explain, fitted

DEFAULTS = Lengths(
    prompt=2048, response=20480, buffer=4096, answer=20480, served=22528, micro_batch=32768
)


def test_a_small_model_gets_working_keys() -> None:
    found, advice = explain(
        DEFAULTS, Bounds(positions=512, longest_prompt=100, longest_question=120)
    )
    assert [message.rpartition(" is above ")[0].partition(" =")[0] for message in found] == [
        "data.max_prompt_tokens + rollout.max_response_tokens",
        "serve.max_model_len=22528",
    ]
    # prompts: 100, rounded up to 112; responses: 512 - 112; buffer: a fifth of that; answers: 512 -
    # 120
    assert advice == (
        "these fit together: --set data.max_prompt_tokens=112 --set "
        "rollout.max_response_tokens=400 --set reward.overlong.buffer_tokens=80 --set "
        "evaluate.max_response_tokens=392 --set serve.max_model_len=512"
    )


@pytest.mark.parametrize("positions", [None, 64, 512, 4096])
@pytest.mark.parametrize("longest", [None, 1, 60, 3000])
def test_proposed_lengths_have_no_conflict(positions: int | None, longest: int | None) -> None:
    """Over sizes of every key that fit, contradict the others, or contradict the model."""
    sizes = (2, 500, 5000)
    for prompt, response, buffer, served in itertools.product(sizes, repeat=4):
        lengths = Lengths(prompt, response, buffer, response, served, micro_batch=512)
        for bounds in (
            Bounds(2, True, positions, longest, longest),
            Bounds(1, False, positions, longest, 40),
        ):
            other = fitted(lengths, bounds)
            if other is not None:
                assert explain(other, bounds) == ([], "")
                assert fitted(other, bounds) == other
            else:
                assert positions is not None
                assert max(longest or 0, bounds.longest_question or 0) > positions - 2


def test_prompts_without_room_for_a_response_are_refused() -> None:
    _, advice = explain(DEFAULTS, Bounds(positions=512, longest_prompt=511))
    assert advice.startswith(
        "no lengths fit: prompts of 511 tokens leave no room for a response in 512 positions"
    )


def test_all_conflicts_are_reported_at_once() -> None:
    changes = [
        "rollout.max_response_tokens=6",
        "evaluate.max_response_tokens=100",
        "train.micro_batch_tokens=60",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(PROJECT_ROOT / "configs/arith_cpu.yaml", changes)
    message = str(caught.value)
    for words in (
        "buffer_tokens=8 is not below",
        "= 70 is above train.micro_batch_tokens=60",
        "= 164 is above serve",
    ):
        assert words in message
    fixes = message.rpartition("these fit together: ")[2].split(" --set ")
    fixed = [fix.removeprefix("--set ") for fix in fixes]
    assert (
        load_config(PROJECT_ROOT / "configs/arith_cpu.yaml", [*changes, *fixed]).lengths.micro_batch
        == 70
    )


def test_the_keys_match_the_configuration() -> None:
    lengths = load_config(PROJECT_ROOT / "configs/arith_cpu.yaml").lengths
    assert (lengths.prompt, lengths.buffer, lengths.served) == (64, 8, 128)
    changed = replace(lengths, **dict.fromkeys(KEYS, 1))
    assert changed.changes(lengths) == [
        f"--set {key}={getattr(lengths, name)}" for name, key in KEYS.items()
    ]
