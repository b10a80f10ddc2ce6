"""The order of training prompts, which can resume anywhere, and tokenizers that are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.draw.prompts import Prompt, PromptStream, interleave
from dapo_core.errors import ModelError
from dapo_core.model.inputs import ModelInput
from dapo_core.model.pretrained import load_tokenizer
from tests.tiny_models import tiny_tokenizer

PROMPTS = [Prompt(index, ModelInput((index,)), "arithmetic", str(index)) for index in range(5)]


def _order(stream: PromptStream, count: int) -> list[int]:
    return [prompt.index for _, prompt in stream.take(count)]


def test_each_epoch_is_a_different_permutation_decided_by_the_seed() -> None:
    stream = PromptStream(PROMPTS * 4, seed=3, shuffle=True)
    epochs = [_order(stream, 20) for _ in range(3)]
    assert (stream.position, stream.epoch) == (60, 3.0)
    assert all(sorted(epoch) == sorted([0, 1, 2, 3, 4] * 4) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream.take(5)
    assert (stream.position, stream.epoch) == (65, 3.25)
    orders = [_order(PromptStream(PROMPTS * 4, seed, shuffle=True), 60) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_the_file_order_repeats() -> None:
    stream = PromptStream(PROMPTS, seed=0, shuffle=False)
    assert _order(stream, 3) == [0, 1, 2]
    # larger than the set, over two boundaries
    assert _order(stream, 9) == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert stream.position == 12
    assert _order(stream, 0) == []


@settings(deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(0, 13), max_size=6), st.booleans())
def test_a_stream_resumed_at_any_position_continues_the_same_order(
    position: int, takes: list[int], shuffle: bool
) -> None:
    whole = _order(PromptStream(PROMPTS, 7, shuffle), position + sum(takes))
    resumed = PromptStream(PROMPTS, 7, shuffle, position)
    assert [index for count in takes for index in _order(resumed, count)] == whole[position:]
    assert resumed.position == position + sum(takes)


def test_a_missing_tokenizer_or_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").chat_template == tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ModelError, match="plain has no chat template; use an instruction-tuned model"
    ):
        load_tokenizer(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelError, match=r"(?s)empty has no readable tokenizer: .*correct its files"
    ):
        load_tokenizer(tmp_path / "empty")


def test_a_mixture_follows_its_weights_and_resumes() -> None:
    prompts = [replace(PROMPTS[0], index=n, dataset="ab"[n >= 40]) for n in range(50)]
    sets = [(3.0, np.arange(40)), (1.0, np.arange(40, 50))]
    whole = [prompt for _, prompt in PromptStream(prompts, 5, True, sets=sets).take(5000)]
    for start in (0, 37, 2000, 4900):  # also over short stretches
        assert sum(prompt.dataset == "b" for prompt in whole[start : start + 100]) == 25
    taken = [[prompt.index for prompt in whole if prompt.dataset == name] for name in "ab"]
    # each epoch of a set has all of it
    for indices, rows in zip(taken, (range(40), range(40, 50)), strict=True):
        for first in range(0, len(indices) - len(rows), len(rows)):
            assert sorted(indices[first : first + len(rows)]) == list(rows)
    for position in (0, 1, 999, 1000, 3210):
        resumed = PromptStream(prompts, 5, True, position, sets)
        expected = list(enumerate(whole))[position : position + 500]
        assert resumed.take(500) == expected
    one = PromptStream(prompts, 5, True, sets=[(0.5, np.arange(50))])
    assert one.take(200) == PromptStream(prompts, 5, True).take(200)


def test_turns_follow_weights_and_every_set_gets_one() -> None:
    assert interleave([2, 1]).tolist()[:6] == [0, 1, 0, 0, 1, 0]
    assert np.bincount(interleave([1, 1, 1])).tolist() == [333, 333, 333]
    assert np.bincount(interleave([1.0, 1e-6])).tolist() == [1000, 1]
