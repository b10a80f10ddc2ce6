"""Training data: prompts tokenised, and an order that resumes anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.data import Prompt, PromptStream, tokenize_prompts
from dapo_core.errors import DataError, ModelError
from dapo_core.pretrained import load_tokenizer
from eval.problems.items import Problem
from tests.tiny_models import tiny_tokenizer

PROMPTS = [Prompt(index, (index,), "arithmetic", str(index)) for index in range(5)]


def _problem(content: str = "What is 1 + 1?") -> Problem:
    return Problem("7", content, "2", messages=({"role": "user", "content": content},), data_source="arithmetic")


def _order(stream: PromptStream, count: int) -> list[int]:
    return [prompt.index for prompt in stream.take(count)]


def test_epochs_are_permutations_that_differ_and_the_seed_alone_decides_them() -> None:
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
    assert _order(stream, 9) == [3, 4, 0, 1, 2, 3, 4, 0, 1]  # larger than the set, over two boundaries
    assert stream.position == 12
    assert _order(stream, 0) == []


@settings(deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(0, 13), max_size=6), st.booleans())
def test_a_stream_resumed_at_any_position_gives_the_uninterrupted_order(
    position: int, takes: list[int], shuffle: bool
) -> None:
    whole = _order(PromptStream(PROMPTS, 7, shuffle), position + sum(takes))
    resumed = PromptStream(PROMPTS, 7, shuffle, position)
    assert [index for count in takes for index in _order(resumed, count)] == whole[position:]
    assert resumed.position == position + sum(takes)


def test_prompts_go_through_the_chat_template_with_their_extra_info() -> None:
    info = {"index": 7, "split": "train", "answers": [1.5, None], "more": {"level": 3}}
    tokenizer = tiny_tokenizer()
    prompt, without = tokenize_prompts([replace(_problem(), extra_info=info), _problem()], tokenizer, 100)
    assert tokenizer.decode(list(prompt.prompt_ids)) == "<|user|>\nWhat is 1 + 1?<|end|>\n<|assistant|>\n"
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (0, "arithmetic", "2")
    assert (prompt.extra_info, without.extra_info) == (info, {})
    assert PromptStream([prompt], 0, False).digest != PromptStream([without], 0, False).digest


def test_prompts_that_are_too_long_are_counted_with_the_longest() -> None:
    tokenizer, problems = tiny_tokenizer(), [_problem("What is 1 + 1? " * count) for count in (1, 3, 9)]
    lengths = [len(prompt.prompt_ids) for prompt in tokenize_prompts(problems, tokenizer, 10_000)]
    assert lengths == sorted(lengths)
    assert len(tokenize_prompts(problems, tokenizer, lengths[2])) == 3  # the limit itself is allowed
    expected = rf"2 of 3 .* longer than data\.max_prompt_tokens={lengths[0]} \(longest {lengths[2]} tokens"
    with pytest.raises(DataError, match=expected):
        tokenize_prompts(problems, tokenizer, lengths[0])


def test_a_tokenizer_without_chat_template_or_none_at_all_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").chat_template == tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="plain has no chat template; use an instruction-tuned model"):
        load_tokenizer(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"(?s)empty has no readable tokenizer: .*check model\.path"):
        load_tokenizer(tmp_path / "empty")
