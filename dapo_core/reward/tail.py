"""Decodes the end of a response without decoding all of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# This close to the cut, the text may differ from that of the whole response. A cut inside a UTF-8
# character leaves at most 3 bytes, each decoded to a replacement character; the rest is for
# decoders that strip the first space or join punctuation to the preceding word.
_CUT_CHARACTERS = 16
_BYTE_TOKEN = re.compile(r"<0x..>")
_SPARE = 1.15  # decode more tokens than estimated, since a second decode costs more


class TailDecoder:
    """Decodes the end of responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        added = tokenizer.get_added_vocab()
        self._thinking_ids = (added.get("<think>"), added.get("</think>"))
        # Of the last response; English has 4, Chinese and digits 1 to 2.
        self._characters_per_token = 3.0

    def decode(self, response_ids: Sequence[int], num_characters: int | None) -> str:
        """Return the text's last `num_characters` (None: all) without special tokens.

        Equal to `tokenizer.decode(response_ids, skip_special_tokens=True)[-num_characters:]`.
        """
        if num_characters is None:
            return self._text(response_ids)
        num_needed = num_characters + _CUT_CHARACTERS
        num_tokens = int(_SPARE * num_needed / self._characters_per_token) + 1
        while num_tokens < len(response_ids):
            start = self._before_byte_tokens(response_ids, len(response_ids) - num_tokens)
            text = self._text(response_ids[start:])
            self._characters_per_token = max(len(text) / (len(response_ids) - start), 0.1)
            if len(text) >= num_needed:
                return text[-num_characters:]
            num_tokens *= 2
        return self._text(response_ids)[-num_characters:]

    def answer_ids(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sequence[int]:
        """Return the response's tokens after the last </think>, or none if thinking has not ended.

        A chat template may open the thinking in the prompt. Returns all tokens if the tags are not
        single tokens.
        """
        begin, end = self._thinking_ids
        if end is None:
            return response_ids
        if end in response_ids:
            response_ids = response_ids[len(response_ids) - response_ids[::-1].index(end) :]
        else:
            tags = (token for token in reversed(prompt_ids) if token in self._thinking_ids)
            if next(tags, end) == begin:
                return ()
        return () if begin in response_ids else response_ids

    def _before_byte_tokens(self, response_ids: Sequence[int], start: int) -> int:
        """Move `start` back so that it splits no run of byte tokens (`<0x41>`, as in Llama 2).

        Their decoder discards a whole run if one byte of it is invalid. A run may contain special
        tokens, which are skipped.
        """
        while start > 0 and self._is_byte_or_special(response_ids[start]):
            start -= 1
        return start

    def _is_byte_or_special(self, token_id: int) -> bool:
        token = str(self.tokenizer.convert_ids_to_tokens(token_id))
        return token_id in self._special_ids or _BYTE_TOKEN.fullmatch(token) is not None

    def _text(self, response_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(response_ids), skip_special_tokens=True))
