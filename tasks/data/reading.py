"""Reads the rows of a set into prepared rows; counts unusable and repeated problems by reason."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.demo import arithmetic, shapes
from dapo_core.errors import DataError
from dapo_core.reward.routing import routes, scorer_name
from eval.problems import ProblemsError
from eval.problems.files import iterate_problems
from eval.problems.items import Problem
from eval.problems.pictures import PictureStore
from eval.problems.rows import QUESTION, Row, Unusable, read_chat
from tasks.config import ChainConfig
from tasks.data.sources import SHAPES, Source, eval_sources, train_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOWNLOADS = ".downloads"  # folder in the store with files of remote sets, by commit
DETAILS = {"index", "unique_id", "id", "idx", "subject", "level"}  # in extra_info
MAX_EXAMPLES = 3  # per reason
EXAMPLE_CHARACTERS = 300
REPEATED = "the same problem again"
CONTRADICTED = "a problem that other rows answer otherwise"
HELD_OUT = "a problem of an evaluation set"


@dataclass
class SetCount:
    """Row counts of one set."""

    name: str
    read: int = 0
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    removed: Counter[str] = field(default_factory=Counter)  # usable but left out, by reason
    examples: dict[str, list[str]] = field(default_factory=dict)  # by reason: `row 7: ...`
    answers: Counter[str] = field(default_factory=Counter)  # kept rows by kind of answer
    images: Counter[str] = field(default_factory=Counter)  # usable rows by picture

    def refuse(self, number: int, reason: str, row: Row) -> None:
        """Count an unusable row."""
        self.refused[reason] += 1
        shown = json.dumps(dict(row), ensure_ascii=False, default=_shown)
        self.show(reason, f"row {number}: {shown}")

    def remove(self, reason: str, example: str) -> None:
        """Count a usable row that is left out."""
        self.removed[reason] += 1
        self.kept -= 1
        self.show(reason, example)

    def show(self, reason: str, example: str) -> None:
        """Store an example, up to MAX_EXAMPLES per reason."""
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example[:EXAMPLE_CHARACTERS])

    def require_usable(self, max_refused_ratio: float, advice: str) -> None:
        """Raise DataError with `advice` if too many rows are unusable or none is left."""
        num_refused = self.refused.total()
        if num_refused > max_refused_ratio * self.read or num_refused == self.read:
            found = "; ".join(
                f"{count} with {reason}" for reason, count in self.refused.most_common()
            )
            first = "; ".join(
                examples[0] for reason, examples in self.examples.items() if reason in self.refused
            )
            raise DataError(
                f"{self.name}: {num_refused} of {self.read} rows cannot be used ({found}). "
                f"{advice} First: {first}"
            )


def _shown(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def iterate_source(
    config: ChainConfig, source: Source, count: SetCount, pictures: PictureStore | None = None
) -> Iterator[tuple[Problem, Row]]:
    """Yield the usable problems of a set `here` with their rows, in order. Raises ProblemsError.

    Their pictures become names in `pictures`; without it, they stay as rows hold them.
    """
    rows: Iterator[tuple[int, Row, Problem | Unusable]]
    if source.is_generated:
        rows = (
            (number, row, read_chat(row)) for number, row in enumerate(_generated(config, source))
        )
    else:
        assert source.path is not None
        rows = iterate_problems(source.path, source.schemas, source.split)
    for number, row, problem in rows:
        if not number and (
            missing := [name for name in source.prompt_format.columns if name not in row]
        ):
            raise ProblemsError(
                f"{source.name} has no column {', '.join(missing)}, which data.prompt_template "
                f"uses; it has {', '.join(sorted(row))}"
            )
        count.read += 1
        if pictures is not None and isinstance(problem, Problem) and problem.images:
            problem = pictures.stored(problem, source.path)
            if isinstance(problem, Problem):
                count.images.update({*problem.images})
        if isinstance(problem, Unusable):
            count.refuse(number, str(problem), row)
        else:
            count.kept += 1
            yield problem, row


def here(config: ChainConfig, source: Source) -> Source:
    """The set with local files, as they are read."""
    return source.here(Path(config.store.path) / DOWNLOADS)


def read_source(config: ChainConfig, source: Source, limit: int | None = None) -> list[Problem]:
    """The usable problems of a set as prompts; with `limit`, the first ones only.

    Raises DataError or ProblemsError as preparation does; with `limit`, only if no row is usable.
    """
    count, source = SetCount(source.name), here(config, source)
    found = itertools.islice(iterate_source(config, source, count), limit)
    problems = [read_chat(to_row(source, *one)) for one in found]
    if limit is None or not problems:
        count.require_usable(config.data.max_refused_ratio, advice_for(config))
    return problems


def advice_for(config: ChainConfig) -> str:
    """Advice for too many unusable training rows."""
    return (
        "Correct the rows or data.columns, or raise "
        f"data.max_refused_ratio={config.data.max_refused_ratio:g}."
    )


def to_row(source: Source, problem: Problem, row: Row) -> dict[str, Any]:
    """A row in DAPO-Math-17k's schema, plus the bare problem, its set, template and grader.

    In a mixture, the usual details become strings, since their types may differ between sets.
    """
    info = dict(problem.extra_info)
    if source.is_one_of_several:
        info |= {name: str(info[name]) for name in DETAILS & info.keys() if info[name] is not None}
    details = {"index": problem.id, "subject": problem.subject, "level": problem.level}
    if not info or QUESTION in info:
        info |= {name: value for name, value in details.items() if value is not None}
    elif not info.keys() & {"index", "unique_id", "id", "idx"}:
        info["index"] = problem.id
    return {
        "data_source": problem.data_source or source.data_source,
        "prompt": source.prompt_format.messages(problem, row),
        "ability": row.get("ability"),
        "reward_model": {"ground_truth": problem.gold, "style": "rule"},
        "extra_info": info,
        "problem": problem.text,
        "dataset": source.name,
        "weight": source.weight,
        "template": source.prompt_format.template_of(problem),
        "grader": source.known.grader,
        **({"images": list(problem.images)} if problem.images else {}),
    }


class Seen:
    """The problems seen so far, by digest: about 100 bytes each, whatever their length."""

    def __init__(self) -> None:
        # digest -> (first row, digest of its answer)
        self._first: dict[bytes, tuple[int, bytes]] = {}
        self.contradicted: set[int] = set()  # first rows whose answer a later row contradicts

    def add(self, problem: Problem, number: int) -> str | None:
        """Record a problem; returns None if it is new, else why `number` is left out."""
        history = [
            message["content"]
            for message in (problem.messages or ())[:-1]
            if message["role"] != "system"
        ]
        key = hashlib.blake2b(
            "\0".join([*history, problem.text.strip(), *problem.images]).encode(), digest_size=16
        ).digest()
        answer = hashlib.blake2b(problem.gold.strip().encode(), digest_size=8).digest()
        first, first_answer = self._first.setdefault(key, (number, answer))
        if first == number:
            return None
        if first_answer == answer:
            return REPEATED
        self.contradicted.add(first)
        return CONTRADICTED


def _generated(config: ChainConfig, source: Source) -> list[Row]:
    if source.known.name == SHAPES:
        pictures = config.data.shapes
        num_rows = pictures.num_train if source.split == "train" else pictures.num_eval
        return [*shapes.generate_problems(num_rows, config.run.seed, source.split == "test")]
    sizes = config.data.arithmetic
    seed = config.run.seed if sizes.seed is None else sizes.seed
    pair = arithmetic.generate_problems(sizes.num_train, sizes.num_eval, sizes.max_level, seed)
    return list(pair[0 if source.split == "train" else 1])


def batched(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    while batch := list(itertools.islice(rows, size)):
        yield batch


@dataclass(frozen=True)
class Shown:
    """A prepared row for display, with its number of tokens if a tokenizer was given."""

    id: str
    prompt: str
    num_tokens: int | None
    gold: str
    data_source: str
    scorer: str


def source_to_show(config: ChainConfig, is_training: bool) -> Source:
    """The first set of data.train, or of data.eval."""
    return here(config, (train_sources(config) if is_training else eval_sources(config))[0])


def show_rows(
    config: ChainConfig, source: Source, num_rows: int, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[Shown], SetCount]:
    """The first usable rows, and the counts of rows read so far; raises what preparation does."""
    table, count = routes(config.reward.scorers), SetCount(source.name)
    rows = []
    for problem, row in itertools.islice(iterate_source(config, source, count), num_rows):
        prepared = to_row(source, problem, row)
        text, num_tokens = _rendered(
            prepared["prompt"], tokenizer, config.rollout.chat_template_kwargs
        )
        scorer = scorer_name(prepared["data_source"], table)
        rows.append(
            Shown(problem.id, text, num_tokens, problem.gold, prepared["data_source"], scorer)
        )
    return rows, count


def _rendered(
    chat: list[Any], tokenizer: PreTrainedTokenizerBase | None, template_kwargs: Mapping[str, Any]
) -> tuple[str, int | None]:
    if tokenizer is None:
        return "\n".join(f"{message['role']}: {message['content']}" for message in chat), None
    text = str(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False, **template_kwargs
        )
    )
    return text, len(tokenizer(text, add_special_tokens=False).input_ids)
