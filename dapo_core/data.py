"""Problems as tokenised prompts, and training's in a seeded order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.problems.items import Problem


@dataclass(frozen=True)
class Prompt:
    """One problem as tokens.

    Example: Prompt(index=7, prompt_ids=(1, 52, 9), data_source="arithmetic", ground_truth="132")
    """

    index: int  # row in its file
    prompt_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the row's, in JSON types


def tokenize_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    key: str = "data.train",
) -> list[Prompt]:
    """The problems' messages as prompts, through the chat template with the generation prompt added.

    Raises DataError when a prompt is longer than `max_prompt_tokens`, with the count and the longest; `key` is
    what the configuration calls their file.
    """
    prompts = []
    for index, problem in enumerate(problems):
        messages = [dict(message) for message in problem.messages or ()]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        prompts.append(
            Prompt(
                index=index,
                prompt_ids=tuple(tokenizer(text, add_special_tokens=False).input_ids),
                data_source=str(problem.data_source),
                ground_truth=problem.gold,
                extra_info=json.loads(json.dumps(problem.extra_info)),
            )
        )
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    num_long = sum(length > max_prompt_tokens for length in lengths)
    if num_long:
        raise DataError(
            f"{num_long} of {len(prompts)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(longest {max(lengths)} tokens); raise data.max_prompt_tokens, or shorten them in the sets of {key}"
        )
    return prompts


class PromptStream:
    """An endless, seeded order of prompts; its position is the number of prompts taken.

    Each epoch has its own permutation, derived from (seed, epoch) alone, so a stream continued at position n
    gives exactly what the uninterrupted one gives from there.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.position = position

    @property
    def digest(self) -> str:
        """sha256 over the prompts with all their fields, in the order of the file."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    @property
    def epoch(self) -> float:
        """Epochs by prompts taken."""
        return self.position / len(self.prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; crosses epoch boundaries."""
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, start = divmod(self.position, len(self.prompts))
            rows = self._order(epoch)[start : start + count - len(taken)]
            taken += [self.prompts[int(row)] for row in rows]
            self.position += len(rows)
        return taken

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
