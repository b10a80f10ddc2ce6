"""What a configuration means in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from dapo_core.config.training import TrainingConfig


def _quantity(label: str, unit: str, formula: str) -> Any:
    """A field with what a table says about it; the formula is in keys, short names where they are unambiguous."""
    return field(metadata={"label": label, "unit": unit, "formula": formula})


@dataclass(frozen=True)
class Derived:
    """Sizes that follow from several keys. `most` marks bounds that dynamic sampling or early ends stay below."""

    num_policy_devices: int = _quantity("policy", "devices", "train.num_ranks")
    num_rollout_devices: int = _quantity("rollouts", "devices", "rollout.num_workers")
    num_devices: int = _quantity("policy and rollouts", "devices", "train.num_ranks + rollout.num_workers")
    num_data_ranks: int = _quantity("data-parallel ranks", "ranks", "train.num_ranks / train.sequence_parallel")
    num_weight_copies: int = _quantity(
        "copies of the trained weights", "copies", "train.num_ranks / train.fsdp_size (unset: 1)"
    )
    prompts_per_step: int = _quantity("a training step", "prompts", "train.train_prompts")
    responses_per_step: int = _quantity("a training step", "responses", "train.train_prompts x rollout.group_size")
    most_response_tokens_per_step: int = _quantity(
        "a training step, at most", "response tokens", "train_prompts x group_size x rollout.max_response_tokens"
    )
    most_tokens_per_step: int = _quantity(
        "a training step, at most", "tokens", "train_prompts x group_size x longest sequence"
    )
    most_prompts_drawn_per_step: int = _quantity(
        "drawn for a step, at most", "prompts", "sampler.gen_prompts x sampler.max_num_gen_batches"
    )
    optimizer_steps_per_step: int = _quantity(
        "a training step", "optimizer steps", "train.train_prompts / train.mini_prompts"
    )
    num_optimizer_steps: int = _quantity(
        "the training", "optimizer steps", "train_prompts / mini_prompts x train.total_steps"
    )
    num_warmup_steps: int = _quantity("warm-up, of these", "optimizer steps", "train.warmup_steps")
    num_trained_prompts: int = _quantity("the training", "prompts", "train.train_prompts x train.total_steps")
    responses_per_optimizer_step: int = _quantity(
        "an optimizer step", "responses", "train.mini_prompts x rollout.group_size"
    )
    responses_per_rank: int = _quantity(
        "an optimizer step, of each data-parallel rank",
        "responses",
        "mini_prompts x group_size / data-parallel ranks",
    )
    longest_sequence_tokens: int = _quantity(
        "longest sequence", "tokens", "data.max_prompt_tokens + rollout.max_response_tokens"
    )
    most_tokens_per_device: int = _quantity(
        "a micro-batch on a device, at most", "tokens", "train.micro_batch_tokens"
    )
    longest_sequences_per_micro_batch: int = _quantity(
        "a micro-batch of longest sequences",
        "sequences",
        "micro_batch_tokens x sequence_parallel / longest sequence",
    )
    num_responses_decoded_at_once: int = _quantity(
        "decoded at once by all engines, at most", "responses", "rollout.num_workers x rollout.max_num_seqs"
    )
    most_cached_tokens_per_engine: int = _quantity(
        "keys and values to decode them all to the end, an engine",
        "tokens",
        "rollout.max_num_seqs x longest sequence",
    )

    def rows(self) -> Iterator[tuple[str, int, str, str]]:
        """(what, number, unit, how it follows from the keys) of every quantity."""
        for quantity in fields(self):
            about = quantity.metadata
            yield about["label"], getattr(self, quantity.name), about["unit"], about["formula"]


def derive(config: TrainingConfig) -> Derived:
    """The sizes that a resolved configuration means; exact, since its checks refuse what does not divide."""
    train, rollout, sampler = config.train, config.rollout, config.sampler
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    responses = train.train_prompts * rollout.group_size
    updates = train.train_prompts // train.mini_prompts
    mini_responses = train.mini_prompts * rollout.group_size
    return Derived(
        num_policy_devices=train.num_ranks,
        num_rollout_devices=rollout.num_workers,
        num_devices=train.num_ranks + rollout.num_workers,
        num_data_ranks=train.num_data_ranks,
        num_weight_copies=train.num_ranks // (train.fsdp_size or train.num_ranks),
        prompts_per_step=train.train_prompts,
        responses_per_step=responses,
        most_response_tokens_per_step=responses * rollout.max_response_tokens,
        most_tokens_per_step=responses * longest,
        most_prompts_drawn_per_step=sampler.gen_prompts * sampler.max_num_gen_batches,
        optimizer_steps_per_step=updates,
        num_optimizer_steps=updates * train.total_steps,
        num_warmup_steps=train.warmup_steps,
        num_trained_prompts=train.train_prompts * train.total_steps,
        responses_per_optimizer_step=mini_responses,
        responses_per_rank=mini_responses // train.num_data_ranks,
        longest_sequence_tokens=longest,
        most_tokens_per_device=train.micro_batch_tokens,
        longest_sequences_per_micro_batch=train.micro_batch_tokens * train.sequence_parallel // longest,
        num_responses_decoded_at_once=rollout.num_workers * rollout.max_num_seqs,
        most_cached_tokens_per_engine=rollout.max_num_seqs * longest,
    )
