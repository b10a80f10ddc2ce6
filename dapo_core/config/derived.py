"""What a configuration means in numbers."""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple

from dapo_core.config.training import TrainingConfig

# "At most": dynamic sampling and responses that end early stay below. Formulas are read from left to right; an
# operand is a key, its last part where that is unambiguous, or the label of a line above.
_QUANTITIES = """
policy | devices | train.num_ranks
rollouts | devices | rollout.num_workers x rollout.tensor_parallel x rollout.pipeline_parallel
policy and rollouts | devices | train.num_ranks + rollouts
data-parallel ranks | ranks | train.num_ranks / train.sequence_parallel
copies of the trained weights | copies | train.num_ranks / train.fsdp_size
longest sequence | tokens | data.max_prompt_tokens + rollout.max_response_tokens
a training step | prompts | train.train_prompts
a training step | responses | train.train_prompts x rollout.group_size
a training step, at most | response tokens | train_prompts x group_size x rollout.max_response_tokens
a training step, at most | tokens | train_prompts x group_size x longest sequence
drawn for a step, at most | prompts | sampler.gen_prompts x sampler.max_num_gen_batches
a training step | optimizer steps | train.train_prompts / train.mini_prompts x train.passes
the training | optimizer steps | train_prompts / mini_prompts x passes x train.total_steps
warm-up, of these | optimizer steps | train.warmup_steps
the training | prompts | train.train_prompts x train.total_steps
an optimizer step | responses | train.mini_prompts x rollout.group_size
an optimizer step, of each data-parallel rank | responses | mini_prompts x group_size / data-parallel ranks
a micro-batch on a device, at most | tokens | train.micro_batch_tokens
a micro-batch of longest sequences | sequences | micro_batch_tokens x sequence_parallel / longest sequence
decoded at once by all engines, at most | responses | rollout.num_workers x rollout.max_num_seqs
keys and values to decode them all to the end, an engine | tokens | rollout.max_num_seqs x longest sequence
"""
_SHARED = "policy and rollouts, in turns | devices | train.num_ranks"
_OPERATORS = {"x": operator.mul, "/": operator.floordiv, "+": operator.add}


class Quantity(NamedTuple):
    """A number that follows from keys, and how."""

    label: str
    number: int
    unit: str
    formula: str


def derive(config: TrainingConfig) -> list[Quantity]:
    """The quantities that a configuration means; exact, since its checks refuse what does not divide."""
    train = {**dict(config.train), "fsdp_size": config.train.fsdp_size or config.train.num_ranks}
    values: dict[str, Any] = {**dict(config.data), **dict(config.sampler), **dict(config.rollout), **train}
    quantities = []
    for line in _QUANTITIES.strip().splitlines():
        if line.startswith("drawn for a step, at most") and not config.sampler.max_num_gen_batches:
            continue
        if config.train.is_colocated and line.startswith("policy and rollouts"):
            line = _SHARED
        label, unit, formula = line.split(" | ")
        values[label] = _evaluate(formula, values)
        quantities.append(Quantity(label, values[label], unit, formula))
    return quantities


def _evaluate(formula: str, values: dict[str, Any]) -> int:
    first, *rest = re.split(r" ([x/+]) ", formula)
    number = values[first.rpartition(".")[2]]
    for sign, operand in zip(rest[::2], rest[1::2], strict=True):
        number = _OPERATORS[sign](number, values[operand.rpartition(".")[2]])
    return number
