"""Quantities that follow from a configuration."""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple

from dapo_core.config.training import TrainingConfig

# LABEL | UNIT | FORMULA. "At most" marks an upper bound: dynamic sampling and early stops stay
# below it. Formulas are evaluated left to right; an operand is a key, the last part of a key, or
# the label of an earlier line.
_QUANTITIES = """
policy | devices | train.num_ranks
rollouts | devices | rollout.num_workers x rollout.tensor_parallel x rollout.pipeline_parallel
policy and rollouts | devices | train.num_ranks + rollouts
data-parallel ranks | ranks | train.num_ranks / train.sequence_parallel
copies of the trained weights | copies | train.num_ranks / train.fsdp_size
longest sequence | tokens | data.max_prompt_tokens + rollout.max_response_tokens
a training step | prompts | train.train_prompts
a training step | responses | train.train_prompts x rollout.group_size
a training step, at most | response tokens | train_prompts x group_size x max_response_tokens
a training step, at most | tokens | train_prompts x group_size x longest sequence
drawn for a step, at most | prompts | sampler.gen_prompts x sampler.max_num_gen_batches
a training step | optimizer steps | train.train_prompts / train.mini_prompts x train.passes
the training | optimizer steps | train_prompts / mini_prompts x passes x train.total_steps
of these, warm-up | optimizer steps | train.warmup_steps
the training | prompts | train.train_prompts x train.total_steps
an optimizer step | responses | train.mini_prompts x rollout.group_size
an optimizer step, per data rank | responses | mini_prompts x group_size / data-parallel ranks
a micro-batch on a device, at most | tokens | train.micro_batch_tokens
a micro-batch of the longest | sequences | micro_batch_tokens x sequence_parallel / longest sequence
decoded at once by all engines, at most | responses | rollout.num_workers x rollout.max_num_seqs
KV cache to decode them to the end, per engine | tokens | rollout.max_num_seqs x longest sequence
"""
_SHARED = "policy and rollouts, on the same | devices | train.num_ranks"
_OPERATORS = {"x": operator.mul, "/": operator.floordiv, "+": operator.add}


class Quantity(NamedTuple):
    """A number derived from keys, with its formula."""

    label: str
    number: int
    unit: str
    formula: str


def derive(config: TrainingConfig) -> list[Quantity]:
    """Return the quantities derived from a configuration; all divisions are even."""
    values: dict[str, Any] = {}
    for section in (config.data, config.sampler, config.rollout, config.train):
        values |= dict(section)
    values["fsdp_size"] = config.train.fsdp_size or config.train.num_ranks
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
