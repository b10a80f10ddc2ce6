"""Tokenized prompts, and the seeded order in which training reads them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dapo_core.draw.backoff import Backoff
from dapo_core.errors import DataError
from dapo_core.model.inputs import ImageReference, ModelInput

logger = logging.getLogger(__name__)

TooLong = Literal["drop", "truncate_left", "error"]

ROWS_FILE, ABOUT_FILE = "rows.arrow", "about.json"  # of TokenizedPrompts
TURNS = 1000  # prompts per cycle over several sets
NO_IMAGES = "[]"
SMALLER = "lower data.image_max_pixels for smaller pictures"


@dataclass(frozen=True)
class Prompt:
    """One tokenized problem.

    Example: Prompt(7, ModelInput((1, 52, 9)), "arithmetic", "132")
    """

    index: int  # row in its file
    input: ModelInput
    data_source: str
    ground_truth: str
    # of the row, in JSON types
    extra_info: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dataset: str = ""  # name of its set, if there are several


class TokenizedPrompts:
    """Memory-mapped prompts, from a folder written by dapo_core.draw.tokenizing.

    `too_long` drops prompts longer than `max_prompt_tokens`, truncates them to their last tokens,
    or raises DataError with their number and the longest.
    """

    def __init__(
        self, folder: Path, pictures: Path, max_prompt_tokens: int, too_long: TooLong
    ) -> None:
        """Names of pictures are relative to `pictures`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        self.digest: str = about["digest"]  # of all fields of all rows
        self.data_sources: list[str] = about["data_sources"]
        self._file = pa.ipc.open_file(pa.memory_map(str(folder / ROWS_FILE)))
        self._max_prompt_tokens = max_prompt_tokens
        batches = [self._file.get_batch(n) for n in range(self._file.num_record_batches)]
        self._firsts = np.cumsum([0, *map(len, batches)])  # first row of each batch
        lengths = [batch["prompt_ids"].value_lengths().to_numpy() for batch in batches]
        self.lengths = np.concatenate(lengths)  # tokens of every row
        self._pictures = pictures.absolute()
        pictured = [pc.not_equal(batch["images"], NO_IMAGES) for batch in batches]
        has_images = np.concatenate([each.to_numpy(zero_copy_only=False) for each in pictured])
        listed = [
            json.loads(images)
            for batch, rows in zip(batches, pictured, strict=True)
            for images in batch["images"].filter(rows).to_pylist()
        ]
        self.max_pictures = max(map(len, listed), default=0)  # of one prompt
        # tokens of each picture
        self.image_lengths = [num_tokens for images in listed for *_, num_tokens in images]
        is_long = self.lengths > max_prompt_tokens
        if too_long == "truncate_left" and (num_cut := int((is_long & has_images).sum())):
            raise DataError(
                f"{num_cut} prompts with pictures are longer than data.max_prompt_tokens="
                f"{max_prompt_tokens}, and a picture cannot be truncated; {SMALLER}, or set "
                "data.too_long=drop"
            )
        advice = SMALLER if has_images.any() else ""
        treat_too_long(self.lengths, max_prompt_tokens, too_long, "data.train", advice)
        self._rows = np.flatnonzero(~is_long if too_long == "drop" else np.ones_like(is_long))
        names, weights = zip(*about["sets"], strict=True)
        self._datasets = names if len(names) > 1 else ("",)
        numbers = np.concatenate([batch["set"].to_numpy() for batch in batches])[self._rows]
        # (weight, prompt indices) of each set; sets whose prompts are all dropped are left out.
        rows = [np.flatnonzero(numbers == place) for place in range(len(weights))]
        self.sets = [pair for pair in zip(weights, rows, strict=True) if len(pair[1])]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = int(self._rows[index])
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        offset = row - int(self._firsts[number])
        fields = self._file.get_batch(number).slice(offset, 1).to_pylist()[0]
        token_ids = tuple(fields.pop("prompt_ids")[-self._max_prompt_tokens :])
        images = tuple(
            ImageReference(str(self._pictures / name), (time, height, width), first, num_tokens)
            for name, (time, height, width), first, num_tokens in json.loads(fields.pop("images"))
        )
        extra_info = json.loads(fields.pop("extra_info"))
        number = fields.pop("set")
        dataset = self._datasets[number if len(self._datasets) > 1 else 0]
        own = {"index": row, "input": ModelInput(token_ids, images), "extra_info": extra_info}
        return Prompt(**own, dataset=dataset, **fields)


def treat_too_long(
    lengths: np.ndarray, max_prompt_tokens: int, too_long: TooLong, key: str, advice: str = ""
) -> None:
    """Log how many prompts are too long; raises DataError for `error`, or if `drop` leaves none.

    `key` is the configuration key of their sets; `advice` is added to the error.
    """
    num_long = int((lengths > max_prompt_tokens).sum())
    if not num_long:
        return
    summary = (
        f"{num_long} of {len(lengths)} prompts are longer than "
        f"data.max_prompt_tokens={max_prompt_tokens} (longest {lengths.max()} tokens)"
    )
    if too_long == "error" or (num_long == len(lengths) and too_long == "drop"):
        can_drop = num_long < len(lengths) and key == "data.train"
        raise DataError(
            f"{summary}; raise data.max_prompt_tokens, or shorten them in the sets of {key}"
            + (f", or {advice}" if advice else "")
            + (", or set data.too_long=drop" if can_drop else "")
        )
    action = "dropped" if too_long == "drop" else "truncated to their last tokens"
    logger.warning("%s and are %s (data.too_long=%s)", summary, action, too_long)


class PromptStream:
    """An endless, seeded sequence of prompts; `position` is the number of prompts passed.

    Several sets, each given as (weight, prompt indices), are interleaved evenly by weight, to the
    nearest thousandth. Each epoch of a set has its own permutation, derived only from (seed,
    epoch), so a stream resumed at position n, with its backoff, continues exactly like an
    uninterrupted one.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] | TokenizedPrompts,
        seed: int,
        shuffle: bool,
        position: int = 0,
        sets: Sequence[tuple[float, np.ndarray]] = (),
        backoff: Backoff | None = None,
    ) -> None:
        self.prompts = prompts
        self.backoff = backoff
        self.seed = seed
        self.shuffle = shuffle
        self.position = position
        self._sets = [rows for _, rows in sets] or [np.arange(len(prompts))]
        self._turns = interleave([weight for weight, _ in sets] or [1.0])
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # set -> (epoch, order in that epoch)

    @property
    def digest(self) -> str:
        """Digest of all fields of all prompts, in file order."""
        if isinstance(self.prompts, TokenizedPrompts):
            return self.prompts.digest
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    @property
    def epoch(self) -> float:
        """Prompts passed / number of prompts, over all sets."""
        return self.position / len(self.prompts)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Return the next prompts with their positions; crosses epoch boundaries."""
        taken: list[tuple[int, Prompt]] = []
        while len(taken) < count:
            row, epoch = self._row(self.position)
            prompt = self.prompts[row]
            if self.backoff is None or not self.backoff.skips(prompt.index, epoch):
                taken.append((self.position, prompt))
                if self.backoff is not None:
                    self.backoff.visit(prompt.index, epoch)
            self.position += 1
        return taken

    def _row(self, position: int) -> tuple[int, int]:
        """Return the index of the prompt at a position, and the epoch of its set."""
        cycle, turn = divmod(position, len(self._turns))
        set_index = int(self._turns[turn])
        rows = self._sets[set_index]
        per_cycle = int(np.count_nonzero(self._turns == set_index))
        # in the set
        num_before = cycle * per_cycle + int(np.count_nonzero(self._turns[:turn] == set_index))
        epoch, offset = divmod(num_before, len(rows))
        if self._orders.get(set_index, (None,))[0] != epoch:
            self._orders[set_index] = epoch, self._order(epoch, len(rows))
        return int(rows[self._orders[set_index][1][offset]]), epoch

    def _order(self, epoch: int, count: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch]).permutation(count)


def interleave(weights: Sequence[float]) -> np.ndarray:
    """Return the set of each turn in a cycle, evenly spread by weight: [TURNS]; [0] for one set.

    Every set gets at least one turn.
    """
    if len(weights) == 1:
        return np.zeros(1, int)
    counts = np.maximum(1, np.round(TURNS * np.array(weights) / sum(weights))).astype(int)
    sets = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return sets[np.argsort(times, kind="stable")]
