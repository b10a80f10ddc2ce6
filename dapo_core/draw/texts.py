"""Responses as text: rows of files, and examples in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.draw.groups import Group, Rollout
    from dapo_core.draw.prompts import Prompt

Decode = Callable[[list[int]], str]

SHOWN_CHARACTERS = 160


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the function that turns tokens into text, special ones included."""
    return lambda ids: str(tokenizer.decode(ids))


def shortened(text: str, num_characters: int = SHOWN_CHARACTERS) -> str:
    """Return the text, or its first third and its end with `...` between them."""
    if len(text) <= num_characters:
        return text
    num_first = num_characters // 3
    return f"{text[:num_first]} ... {text[num_first - num_characters :]}"


def text_row(prompt: Prompt, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Return a response with its prompt and score as a row of a file."""
    return {
        "set": prompt.dataset or prompt.data_source,
        "prompt": decode(prompt.input.placeholder_ids),
        "response": decode(rollout.response_ids.tolist()),
        "answer": rollout.answer,
        "gold": prompt.ground_truth,
        "score": rollout.score,
        "verdict": rollout.verdict,
        "truncated": rollout.is_truncated,
        "response_tokens": len(rollout.response_ids),
    }


def rollout_rows(step: int, groups: Sequence[Group], decode: Decode) -> Iterator[dict[str, Any]]:
    """Yield a row per response of the groups, which are in prompt order."""
    for group in groups:
        for sample, rollout in enumerate(group.rollouts):
            number = {"step": step, "prompt_number": group.group_id, "sample": sample}
            yield {
                **number,
                **text_row(group.prompt, rollout, decode),
                "reward": rollout.reward,
            }


def example(prompt: Prompt, rollout: Rollout, decode: Decode) -> str:
    """Return a response, shortened, with its prompt and verdict, on one line."""
    row = text_row(prompt, rollout, decode)
    cut = ", cut" if rollout.is_truncated else ""
    return (
        f"{shortened(row['prompt'])!r} -> {shortened(row['response'])!r} "
        f"({rollout.verdict.replace('_', ' ')}{cut}, gold {shortened(prompt.ground_truth)!r})"
    )
