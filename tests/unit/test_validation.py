"""Validation: hand-computed metrics, independent of finishing order, and its time limit."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.draw.groups import Group, GroupRequest, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.errors import DataError, RewardError, RolloutError
from dapo_core.metrics.step_files import GENERATIONS, step_file
from dapo_core.model.inputs import ModelInput
from dapo_core.model.sampling import GREEDY, Sampling
from dapo_core.validation import Validation, held_out_prompts, validate, validation_metrics
from durable import read_json_lines
from tests.batches import make_group
from tests.configs import make_config
from tests.sources import Clock, SlowSource
from tests.tiny_models import tiny_tokenizer

SAMPLED = Sampling(0.7, 0.9, 20)

RIGHT = replace(make_group([1.0]).rollouts[0], verdict="right", acc=1.0)
PROMPTS = [
    Prompt(index, ModelInput((5,)), "arithmetic" if index < 3 else "openai/gsm8k", "1")
    for index in range(5)
]
SEVENS = np.full(24, 7, np.int32)
ROLLOUTS = [
    replace(RIGHT, response_ids=SEVENS[:3], overlong_penalty=-0.75),
    replace(RIGHT, response_ids=SEVENS, verdict="no_answer", acc=0.0, finish_reason="length"),
    replace(RIGHT, response_ids=SEVENS[:10], verdict="timeout", acc=0.0),
    replace(RIGHT, response_ids=SEVENS[:2], verdict="wrong", acc=0.25),
    replace(RIGHT, response_ids=SEVENS[:6]),
]


class AnsweringSource(SlowSource):
    """Gives the prompts' rollouts in an order of its own; each wait takes `seconds` of the clock.

    As many as are asked for, one after another of those at and after the prompt's place.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        clock: Clock | None = None,
        seconds: float = 0.0,
        pause: int = 1,
    ) -> None:
        super().__init__([], clock or Clock(), seconds, pause)
        self.rollouts = rollouts
        self.requests: list[GroupRequest] = []
        self.num_reward_seconds_taken = 0

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        super().submit(requests)
        self.requests += requests

    def take_reward_seconds(self) -> float:
        self.num_reward_seconds_taken += 1
        return super().take_reward_seconds()

    def _whole(self, request: GroupRequest) -> Group:
        first, count = request.prompt.index, request.num_samples or 0
        chosen = [*self.rollouts, *self.rollouts][first : first + count]
        return Group(request.group_id, request.prompt, chosen)


def metrics_of(
    source: SlowSource, prompts: Sequence[Prompt], step: int, num_samples: int = 1
) -> dict[str, float]:
    return validation_metrics(
        prompts, validate(source, prompts, step, 60.0, GREEDY, num_samples), step
    )  # type: ignore[arg-type]


def test_metrics_match_hand_computed_values() -> None:
    source = AnsweringSource(ROLLOUTS)
    assert metrics_of(source, PROMPTS, 4) == {
        "val-core/arithmetic/acc/mean@1": 0.5,  # right and no answer; the third has no score
        "val-core/openai/gsm8k/acc/mean@1": 0.625,  # 0.25 and 1
        "val-aux/arithmetic/score/mean@1": 1.0,
        "val-aux/openai/gsm8k/score/mean@1": 1.0,
        "val-aux/arithmetic/reward/mean@1": 0.625,  # with the penalty of the first
        "val-aux/openai/gsm8k/reward/mean@1": 1.0,
        "validation/accuracy": 0.5625,  # 2.25 of four with a score; no overlong penalty in it
        "validation/truncated_ratio": 0.2,
        "validation/no_answer_ratio": 0.2,
        "validation/unscored_ratio": 0.2,
        "validation/response_length/mean": 9.0,  # 45 tokens of five
        "validation/num_prompts": 5.0,
    }
    assert [request.prompt for request in source.requests] == PROMPTS  # one greedy response each
    assert {
        (request.step, request.sampling, request.num_samples) for request in source.requests
    } == {(4, GREEDY, 1)}
    assert max(request.group_id for request in source.requests) < 0  # stream positions begin at 0
    assert source.num_in_flight == 0
    assert source.num_reward_seconds_taken == 1  # else they would count as the next step's


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_metrics_do_not_depend_on_finishing_order(burst: int) -> None:
    rollouts = [replace(RIGHT, acc=acc) for acc in (0.1, 0.2, 0.3)]
    assert (0.1 + 0.2 + 0.3) / 3 != (0.3 + 0.2 + 0.1) / 3
    for seed in range(6):
        source = AnsweringSource(rollouts)
        source.burst, source.order = burst, random.Random(seed)
        metrics = metrics_of(source, PROMPTS[:3], 1)
        assert metrics["validation/accuracy"] == (0.1 + 0.2 + 0.3) / 3


def test_unscored_data_sources_are_omitted_and_a_failing_scorer_ends_training() -> None:
    unscored = [
        replace(RIGHT, verdict="error", acc=0.0) if index < 3 else RIGHT for index in range(5)
    ]
    metrics = metrics_of(AnsweringSource(unscored), PROMPTS, 1)
    assert "val-core/arithmetic/acc/mean@1" not in metrics
    assert (metrics["validation/accuracy"], metrics["validation/unscored_ratio"]) == (1.0, 0.6)
    with pytest.raises(
        RewardError, match=r"on all 3 responses of the validation after training step 7; .*custom"
    ):
        metrics_of(AnsweringSource(unscored), PROMPTS[:3], 7)


def test_a_hanging_engine_ends_validation_but_a_slow_one_does_not() -> None:
    clock = Clock()  # a response every 3 waits of 4 s
    source = AnsweringSource(ROLLOUTS, clock, seconds=4.0, pause=3)
    validate(source, PROMPTS, 1, 11.5, GREEDY, clock=clock)
    assert clock.now == 100.0 + 5 * 12.0
    source = AnsweringSource(ROLLOUTS, clock, seconds=4.0, pause=3)
    with pytest.raises(RolloutError) as raised:  # after 4 s, then 8 s, the second time
        validate(source, PROMPTS, 9, 7.5, GREEDY, clock=clock)
    assert "no response finished for 8 s of the validation after" in str(raised.value)


def _held_out(folder: Path, contents: Sequence[str], data_source: str = "arithmetic") -> Path:
    same = {"data_source": data_source, "reward_model": {"ground_truth": "2"}}
    rows = [{**same, "prompt": [{"role": "user", "content": text}]} for text in contents]
    pq.write_table(pa.Table.from_pylist(rows), folder / "eval.parquet")
    return folder / "eval.parquet"


def test_num_prompts_selects_the_first_held_out_prompts(tmp_path: Path) -> None:
    path = _held_out(tmp_path, ["What is 1 + 1?", "What is 2?", "What is 3? " * 40])
    tokenizer = tiny_tokenizer()
    config = make_config(validation={"every": 1, "num_prompts": 2}, data={"max_prompt_tokens": 20})
    prompts = held_out_prompts(path, tmp_path, tokenizer, config)
    assert [prompt.index for prompt in prompts] == [0, 1]
    text = tokenizer.decode(list(prompts[1].input.token_ids))
    assert text == "<|user|>\nWhat is 2?<|end|>\n<|assistant|>\n"
    with pytest.raises(DataError, match="data_source 'unheard-of' has no scorer"):
        held_out_prompts(_held_out(tmp_path, ["1 + 1"], "unheard-of"), tmp_path, tokenizer, config)


def test_unscored_samples_do_not_count() -> None:
    """Three prompts, two responses each: 1 and 0, 0 and unscored, unscored and 0.25."""
    source = AnsweringSource(ROLLOUTS)
    metrics = metrics_of(source, PROMPTS[:3], 2, num_samples=2)
    assert [request.num_samples for request in source.requests] == [2, 2, 2]
    assert metrics["validation/accuracy"] == (0.5 + 0.0 + 0.25) / 3
    assert metrics["val-core/arithmetic/acc/mean@2"] == metrics["validation/accuracy"]
    # 3 of 4 draws
    assert metrics["val-core/arithmetic/acc/best@2/mean"] == pytest.approx((0.75 + 0.0 + 0.25) / 3)
    assert metrics["val-aux/arithmetic/acc/worst@2/mean"] == pytest.approx((0.25 + 0.0 + 0.25) / 3)
    assert metrics["val-aux/arithmetic/acc/std@2"] == pytest.approx(0.5 / 3)
    assert metrics["validation/unscored_ratio"] == 2 / 6
    assert metrics["validation/num_prompts"] == 3.0
    assert not [name for name in metrics if "maj@" in name]  # no answer to vote with


def test_responses_to_the_same_prompts_are_saved_as_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    words = [tokenizer.encode(f"It is {number}.", add_special_tokens=False) for number in range(5)]
    prompts = [replace(prompt, input=ModelInput(tuple(words[prompt.index]))) for prompt in PROMPTS]
    rollouts = [
        replace(rollout, response_ids=np.array(ids, np.int32), answer="5")
        for rollout, ids in zip(ROLLOUTS, words, strict=True)
    ]
    sampled = {"num_samples": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    config = make_config(validation={"every": 1, "num_logged": 2, **sampled})
    validation = Validation(config, prompts, tokenizer, tmp_path)
    source = AnsweringSource(rollouts)
    for step in (0, 1):
        metrics = validation.run(source, step)  # type: ignore[arg-type]
        assert metrics["validation/num_prompts"] == 5.0
        same = {"set": "arithmetic", "answer": "5", "gold": "1", "score": 1.0, "truncated": False}
        same["response_tokens"] = len(words[0])
        assert read_json_lines(step_file(tmp_path, GENERATIONS, step)) == [
            {**same, "prompt": text, "response": text, "verdict": verdict}
            for text, verdict in (("It is 0.", "right"), ("It is 2.", "timeout"))
        ]
    assert {(request.sampling, request.num_samples) for request in source.requests} == {
        (SAMPLED, 2)
    }
    validation.files.begin(0)
    assert step_file(tmp_path, GENERATIONS, 0).exists()
    assert not step_file(tmp_path, GENERATIONS, 1).exists()
    silent = Validation(
        make_config(validation={"every": 1, "num_logged": 0}), prompts, tokenizer, tmp_path
    )
    silent.run(AnsweringSource(rollouts), 1)  # type: ignore[arg-type]
    assert not step_file(tmp_path, GENERATIONS, 1).exists()
