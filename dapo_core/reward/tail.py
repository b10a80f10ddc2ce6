"""The end of a response as text, without decoding the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How far from the cut the text may differ from that of the whole response. A UTF-8 character in the middle of
# which we cut takes at most 3 bytes, each of which becomes one replacement character; the rest is for decoders
# that strip the first space or join punctuation with the word before it.
_CUT_CHARACTERS = 32
_CHARACTERS_PER_TOKEN = 3  # a first guess: English has 4, Chinese and digits 1 to 2


def decode_tail(
    tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int], num_characters: int | None
) -> str:
    """The response's text without special tokens, of which only the last characters unless that is None.

    Exactly `tokenizer.decode(response_ids, skip_special_tokens=True)[-num_characters:]`.
    """
    if num_characters is None:
        return _decode(tokenizer, response_ids)
    num_tokens = (num_characters + _CUT_CHARACTERS) // _CHARACTERS_PER_TOKEN
    while num_tokens < len(response_ids):
        start = _before_byte_tokens(tokenizer, response_ids, len(response_ids) - num_tokens)
        text = _decode(tokenizer, response_ids[start:])
        if len(text) >= num_characters + _CUT_CHARACTERS:
            return text[-num_characters:]
        num_tokens *= 2
    return _decode(tokenizer, response_ids)[-num_characters:]


def _before_byte_tokens(tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int], start: int) -> int:
    """The place, at or before `start`, where no run of byte tokens (`<0x41>`, as Llama 2 has them) is cut in two.

    Their decoder gives up a whole run when one byte of it does not fit. Special tokens, which are skipped, may
    stand within a run.
    """
    special_ids = tokenizer.all_special_ids
    while start > 0 and (response_ids[start] in special_ids or _is_byte_token(tokenizer, response_ids[start])):
        start -= 1
    return start


def _is_byte_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    token = tokenizer.convert_ids_to_tokens(token_id)
    return isinstance(token, str) and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decode(tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(response_ids), skip_special_tokens=True))
