"""Decoding only the end of a response gives exactly the end of the fully decoded response."""

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dapo_core.reward.tail import TailDecoder
from tests.tiny_models import MAX_VOCABULARY, tiny_tokenizer


@cache
def byte_level() -> Any:
    return tiny_tokenizer()


@cache
def byte_fallback() -> Any:
    """A tokenizer like Llama 2's: words with a leading-space mark, and a token for each byte."""
    words = ["<s>", "</s>", "▁the", "▁", "a", "b", "▁sum", "19", ":", "é", "和", "."]
    vocabulary = {
        token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, MAX_VOCABULARY - 1), max_size=120),
    num_characters=st.integers(1, 40),
)
def test_random_byte_level_tokens(ids: list[int], num_characters: int) -> None:
    ids = [token_id for token_id in ids if token_id < len(byte_level())]
    assert (
        TailDecoder(byte_level()).decode(ids, num_characters)
        == whole(byte_level(), ids)[-num_characters:]
    )


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 267), max_size=120), num_characters=st.integers(1, 40))
# one valid run of bytes
@example(ids=[2] * 40 + [12 + byte for byte in "和".encode() * 40], num_characters=20)
@example(
    ids=[12 + 0xE5, *[12 + byte for byte in "和".encode() * 20], 1, *[4] * 30], num_characters=30
)
def test_random_byte_fallback_tokens(ids: list[int], num_characters: int) -> None:
    tail = TailDecoder(byte_fallback()).decode(ids, num_characters)
    assert tail == whole(byte_fallback(), ids)[-num_characters:]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), end=st.text(max_size=20), repeats=st.integers(1, 20))
def test_arbitrary_text(text: str, end: str, repeats: int) -> None:
    ids = byte_level()(text * repeats + end, add_special_tokens=False).input_ids
    assert TailDecoder(byte_level()).decode(ids, 30) == whole(byte_level(), ids)[-30:]


@pytest.mark.parametrize("character", ["a", "é", "和", "😀"])
def test_cutting_inside_a_character(character: str) -> None:
    decoder = TailDecoder(byte_level())
    for num_leading in range(8):
        ids = byte_level()("x" * num_leading + character * 400, add_special_tokens=False).input_ids
        for num_characters in (1, 50, 51, 52, 53, 300):
            assert decoder.decode(ids, num_characters) == character * num_characters


def test_special_tokens_at_the_end_do_not_hide_the_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = [*tokenizer("x" * 500 + "Answer: 19").input_ids, *[end] * 2000]
    assert TailDecoder(tokenizer).decode(ids, 300) == "x" * 290 + "Answer: 19"
    assert TailDecoder(tokenizer).decode([end] * 700, 300) == ""


def test_only_the_end_of_a_long_response_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, num_decoded = byte_level(), list[int]()
    decode = tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        num_decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    decoder = TailDecoder(tokenizer)
    ids = tokenizer("What is 12 + 7? " * 2000, add_special_tokens=False).input_ids
    assert len(ids) > 10_000
    for _ in range(10):
        decoder.decode(ids, 300)
    # 316 characters at one per token (the worst case) plus 15 % are 364 tokens; the first response
    # takes more.
    assert sum(num_decoded) < 10 * 364 + 1000
    decoder.decode(ids, None)
    assert sum(num_decoded) > len(ids)


def test_the_answer_follows_thinking_that_the_prompt_may_open() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["<think>", "</think>"])

    def answer(response: str, prompt: str = "What is 1 + 1?") -> str:
        prompt_ids, response_ids = (
            tokenizer.encode(text, add_special_tokens=False) for text in (prompt, response)
        )
        decoder = TailDecoder(tokenizer)
        return decoder.decode(decoder.answer_ids(prompt_ids, response_ids), None)

    opened = "What is 1 + 1?<think>"
    assert answer("It is 2.") == "It is 2."
    assert answer("<think>3? No.</think>It is 2.") == "It is 2."
    assert answer("3? No.</think>It is 2.", opened) == "It is 2."
    assert answer("<think>It is 3.") == answer("It is 3.", opened) == ""
    assert answer("</think>2<think>It is") == ""
    assert answer("It is 2.", f"{opened}</think>") == "It is 2.", "the template closes the thinking"
    assert answer("a</think>b</think>It is 2.", opened) == "It is 2."
    plain = TailDecoder(tiny_tokenizer())
    assert plain.answer_ids((), [5, 6]) == [5, 6]
