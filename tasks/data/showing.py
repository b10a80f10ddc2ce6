"""Rows of a set as the model will see them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo_core.reward.routing import routes, scorer_name
from tasks.config import ChainConfig
from tasks.data.reading import SetCount, iterate_source, to_row
from tasks.data.sources import Source, eval_sources, train_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Shown:
    """A prepared row: its prompt as text, with the number of tokens if a tokenizer made it, and its answer."""

    id: str
    prompt: str
    num_tokens: int | None
    gold: str
    data_source: str
    scorer: str


def source_to_show(config: ChainConfig, is_training: bool) -> Source:
    """The first set of data.train or of data.eval."""
    return (train_sources(config) if is_training else eval_sources(config))[0]


def show_rows(
    config: ChainConfig, source: Source, num_rows: int, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[Shown], SetCount]:
    """The first usable rows, and what became of the rows up to them. Raises what preparation raises."""
    table, count = routes(config.reward.scorers), SetCount(source.name)
    rows = []
    for problem, row in itertools.islice(iterate_source(config, source, count), num_rows):
        prepared = to_row(source, problem, row)
        text, num_tokens = _rendered(prepared["prompt"], tokenizer, config.rollout.chat_template_kwargs)
        scorer = scorer_name(prepared["data_source"], table)
        rows.append(Shown(problem.id, text, num_tokens, problem.gold, prepared["data_source"], scorer))
    return rows, count


def _rendered(
    chat: list[Any], tokenizer: PreTrainedTokenizerBase | None, template_kwargs: Mapping[str, Any]
) -> tuple[str, int | None]:
    if tokenizer is None:
        return "\n".join(f"{message['role']}: {message['content']}" for message in chat), None
    text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **template_kwargs))
    return text, len(tokenizer(text, add_special_tokens=False).input_ids)
