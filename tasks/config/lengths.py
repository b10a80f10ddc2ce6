"""Token limits of prompts and responses: finds conflicts and proposes values that fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

KEYS = {
    "prompt": "data.max_prompt_tokens",
    "response": "rollout.max_response_tokens",
    "buffer": "reward.overlong.buffer_tokens",
    "answer": "evaluate.max_response_tokens",
    "served": "serve.max_model_len",
    "micro_batch": "train.micro_batch_tokens",
}
ROUND_TOKENS = 16  # proposed prompt limits are multiples of this
BUFFER_PART = 5  # response limit / buffer, as in the DAPO paper: 20,480 / 4,096


@dataclass(frozen=True)
class Lengths:
    """The values of the keys in `KEYS`, in tokens."""

    prompt: int
    response: int
    buffer: int
    answer: int
    served: int
    micro_batch: int
    answer_key: str = KEYS["answer"]  # or the key of a benchmark in the suite

    def changes(self, other: Lengths) -> list[str]:
        """The `--set` options that change these lengths to the others."""
        keys = {name: f"--set {key}" for name, key in KEYS.items()}
        if self.answer_key != KEYS["answer"]:
            keys["answer"] = self.answer_key
        return [
            f"{key}={getattr(other, name)}"
            for name, key in keys.items()
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class Bounds:
    """Limits for the lengths; positions and longest prompts are None if unknown."""

    sequence_parallel: int = 1
    has_buffer: bool = True
    positions: int | None = None
    longest_prompt: int | None = None  # in training and validation
    longest_question: int | None = None  # in the evaluation


def bounds_of(config: TrainingConfig) -> Bounds:
    """The bounds known from the configuration alone."""
    return Bounds(config.train.sequence_parallel, config.reward.overlong.enabled)


def explain(lengths: Lengths, bounds: Bounds) -> tuple[list[str], str]:
    """All conflicts with their numbers, and the changes that resolve them; empty if none."""
    found = [
        message
        for is_so, message in (*_of_keys(lengths, bounds), *_of_inputs(lengths, bounds))
        if is_so
    ]
    if not found:
        return [], ""
    other = fitted(lengths, bounds)
    if other is None:
        longest = max(bounds.longest_prompt or 0, bounds.longest_question or 0)
        if bounds.positions is None:
            return found, "no lengths fit; raise rollout.max_response_tokens"
        return found, (
            f"no lengths fit: prompts of {longest} tokens leave no room for a response in "
            f"{bounds.positions} positions; use a model with more positions, or shorter prompts "
            "(data.too_long=drop with a lower data.max_prompt_tokens drops long prompts from "
            "training)"
        )
    return found, "these fit together: " + " ".join(lengths.changes(other))


def _of_keys(lengths: Lengths, bounds: Bounds) -> list[tuple[bool, str]]:
    """Conflicts among the keys, each with whether it applies."""
    longest, served = lengths.prompt + lengths.response, lengths.prompt + lengths.answer
    most = lengths.micro_batch * bounds.sequence_parallel
    return [
        (
            bounds.has_buffer and lengths.buffer >= lengths.response,
            f"reward.overlong.buffer_tokens={lengths.buffer} is not below "
            "rollout.max_response_tokens="
            f"{lengths.response}: every response would be penalised; lower the buffer",
        ),
        (
            longest > most,
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above "
            f"train.micro_batch_tokens={lengths.micro_batch} x "
            f"train.sequence_parallel={bounds.sequence_parallel} = {most}: the longest sequence "
            "does not fit into one micro-batch; raise train.micro_batch_tokens",
        ),
        (
            served > lengths.served,
            f"data.max_prompt_tokens + {lengths.answer_key} = {served} is above "
            "serve.max_model_len="
            f"{lengths.served}: the server would refuse requests; raise serve.max_model_len",
        ),
    ]


def _of_inputs(lengths: Lengths, bounds: Bounds) -> list[tuple[bool, str]]:
    """Conflicts between the keys, the model and the prompts."""
    longest, positions = lengths.prompt + lengths.response, bounds.positions
    prompt, question = bounds.longest_prompt or 0, bounds.longest_question or 0
    return [
        (
            positions is not None and longest > positions,
            f"data.max_prompt_tokens + rollout.max_response_tokens = {lengths.prompt} + "
            f"{lengths.response} is above the model's {positions} positions",
        ),
        (
            positions is not None and lengths.served > positions,
            f"serve.max_model_len={lengths.served} is above the model's {positions} positions: "
            "vLLM would refuse it",
        ),
        (
            prompt > lengths.prompt,
            f"data.max_prompt_tokens={lengths.prompt} is below the longest prompt, {prompt} tokens",
        ),
        (
            question > lengths.prompt and question + lengths.answer > lengths.served,
            f"the longest evaluation prompt, {question} tokens, + "
            f"{lengths.answer_key}={lengths.answer} "
            f"is above serve.max_model_len={lengths.served}: the server would refuse it",
        ),
    ]


def fitted(lengths: Lengths, bounds: Bounds) -> Lengths | None:
    """The nearest lengths without a conflict; None if no room is left for a response."""
    limit, known = bounds.positions, bounds.longest_prompt
    prompt = max(lengths.prompt, known or 0)
    if limit is not None and prompt + max(lengths.response, lengths.answer) > limit:
        rounded = -(-(known or limit // 4) // ROUND_TOKENS) * ROUND_TOKENS
        prompt = min(prompt, rounded if known is None or rounded <= limit // 2 else known)
    question = max(prompt, bounds.longest_question or 0)
    response, answer = lengths.response, lengths.answer
    served = max(lengths.served, question + answer)
    if limit is not None:
        response, answer, served = (
            min(response, limit - prompt),
            min(answer, limit - question),
            min(served, limit),
        )
    if response < 2 or answer < 1:
        return None
    buffer = lengths.buffer
    if bounds.has_buffer and (
        buffer >= response or (response < lengths.response and 2 * buffer > response)
    ):
        buffer = max(response // BUFFER_PART, 1)
    micro_batch = max(lengths.micro_batch, -(-(prompt + response) // bounds.sequence_parallel))
    return replace(
        lengths,
        prompt=prompt,
        response=response,
        buffer=buffer,
        answer=answer,
        served=served,
        micro_batch=micro_batch,
    )
