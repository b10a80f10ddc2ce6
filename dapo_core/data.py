"""Problems as tokenised prompts, and training's in a seeded order."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from dapo_core.errors import DataError

logger = logging.getLogger(__name__)

TooLong = Literal["drop", "truncate_left", "error"]

ROWS_FILE, ABOUT_FILE = "rows.arrow", "about.json"  # of TokenizedPrompts
TURNS = 1000  # of a cycle of several sets


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
    dataset: str = ""  # its set, where there are several


class TokenizedPrompts(Sequence[Prompt]):
    """The prompts of a folder that dapo_core.tokenizing wrote, mapped into memory instead of read.

    A prompt longer than `max_prompt_tokens` is treated as `too_long` says: left out, cut to its last tokens, or
    refused with a DataError that has their count and the longest.
    """

    def __init__(self, folder: Path, max_prompt_tokens: int, too_long: TooLong) -> None:
        import pyarrow as pa

        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        self.digest: str = about["digest"]  # of all rows with all their fields
        self.data_sources: list[str] = about["data_sources"]
        self._file = pa.ipc.open_file(pa.memory_map(str(folder / ROWS_FILE)))
        self._max_prompt_tokens = max_prompt_tokens
        batches = [self._file.get_batch(number)["prompt_ids"] for number in range(self._file.num_record_batches)]
        self._firsts = np.cumsum([0, *map(len, batches)])  # rows before each batch
        self.lengths = np.concatenate([ids.value_lengths().to_numpy() for ids in batches])  # tokens of every row
        is_long = self.lengths > max_prompt_tokens
        treat_too_long(self.lengths, max_prompt_tokens, too_long, "data.train")
        self._rows = np.flatnonzero(~is_long if too_long == "drop" else np.ones_like(is_long))
        names, weights = zip(*about["sets"], strict=True)
        self._datasets = names if len(names) > 1 else ("",)
        batches = [self._file.get_batch(number)["set"] for number in range(self._file.num_record_batches)]
        numbers = np.concatenate([batch.to_numpy() for batch in batches])[self._rows]
        # Weight of each set, and its prompts by their number; a set whose prompts are all too long is none.
        self.sets = [(weight, np.flatnonzero(numbers == place)) for place, weight in enumerate(weights)]
        self.sets = [(weight, rows) for weight, rows in self.sets if len(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...

    @overload
    def __getitem__(self, number: slice) -> list[Prompt]: ...

    def __getitem__(self, number: int | slice) -> Prompt | list[Prompt]:
        if isinstance(number, slice):
            return [self._prompt(int(row)) for row in self._rows[number]]
        return self._prompt(int(self._rows[number]))

    def _prompt(self, row: int) -> Prompt:
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        fields = self._file.get_batch(number).slice(row - int(self._firsts[number]), 1).to_pylist()[0]
        prompt_ids = tuple(fields.pop("prompt_ids")[-self._max_prompt_tokens :])
        extra_info = json.loads(fields.pop("extra_info"))
        number = fields.pop("set")
        dataset = self._datasets[number if len(self._datasets) > 1 else 0]
        return Prompt(index=row, prompt_ids=prompt_ids, extra_info=extra_info, dataset=dataset, **fields)


def treat_too_long(lengths: np.ndarray, max_prompt_tokens: int, too_long: TooLong, key: str) -> None:
    """Say how many prompts are longer than allowed, if any; raises DataError under `error` and if none is left.

    `key` is what the configuration calls their sets.
    """
    num_long = int((lengths > max_prompt_tokens).sum())
    if not num_long:
        return
    words = (
        f"{num_long} of {len(lengths)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens} "
        f"(longest {lengths.max()} tokens)"
    )
    if too_long == "error" or (num_long == len(lengths) and too_long == "drop"):
        raise DataError(
            f"{words}; raise data.max_prompt_tokens, or shorten them in the sets of {key}"
            + (", or set data.too_long=drop" if num_long < len(lengths) and key == "data.train" else "")
        )
    treatment = "left out" if too_long == "drop" else "cut to their last tokens"
    logger.warning("%s and are %s (data.too_long=%s)", words, treatment, too_long)


class PromptStream:
    """An endless, seeded order of prompts; its position is the number of prompts taken.

    Of several sets, each with its weight and the numbers of its prompts, every stretch of the stream has prompts
    by weight, to the nearest thousandth. Each epoch of a set has its own permutation, derived from (seed, epoch)
    alone, so a stream continued at position n gives exactly what the uninterrupted one gives from there.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool,
        position: int = 0,
        sets: Sequence[tuple[float, np.ndarray]] = (),
    ) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.position = position
        self._sets = [rows for _, rows in sets] or [np.arange(len(prompts))]
        self._turns = interleave([weight for weight, _ in sets] or [1.0])
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of each set, its epoch and that epoch's order

    @property
    def digest(self) -> str:
        """A digest of the prompts with all their fields, in the order of the file."""
        if isinstance(self.prompts, TokenizedPrompts):
            return self.prompts.digest
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    @property
    def epoch(self) -> float:
        """Epochs by prompts taken, of all sets together."""
        return self.position / len(self.prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; crosses epoch boundaries."""
        taken = [self.prompts[self._row(position)] for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def _row(self, position: int) -> int:
        """The number of the prompt at a position."""
        cycle, turn = divmod(position, len(self._turns))
        place = int(self._turns[turn])
        per_cycle = int(np.count_nonzero(self._turns == place))
        number = cycle * per_cycle + int(np.count_nonzero(self._turns[:turn] == place))  # in its set
        epoch, start = divmod(number, len(self._sets[place]))
        if self._orders.get(place, (None,))[0] != epoch:
            self._orders[place] = epoch, self._order(epoch, len(self._sets[place]))
        return int(self._sets[place][self._orders[place][1][start]])

    def _order(self, epoch: int, count: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch]).permutation(count)


def interleave(weights: Sequence[float]) -> np.ndarray:
    """Whose turn it is in a cycle of turns: [TURNS] numbers of sets, evenly spread by weight; [0] for one set.

    Every set has a turn at least, however small its weight.
    """
    if len(weights) == 1:
        return np.zeros(1, int)
    counts = np.maximum(1, np.round(TURNS * np.array(weights) / sum(weights))).astype(int)
    places = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return places[np.argsort(times, kind="stable")]
