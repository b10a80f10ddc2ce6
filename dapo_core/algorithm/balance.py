"""Load balancing: distributes sequences over ranks and micro-batches of nearly equal cost.

Siblings whose prompt is worth sharing stay together, in bundles small enough to balance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dapo_core.algorithm.batch import Batch
from dapo_core.errors import DataError

BUNDLES_PER_RANK = 4  # at least, so that ranks can be balanced
# Memory of a shared prompt token's keys and values, which attention copies for each further
# sibling, relative to a token of its own.
COPY_SHARE = 0.25


def workload(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Return the relative cost of training on sequences of T tokens: float64 [B].

    A decoder layer of width H needs about 24 H^2 T operations for its matrices (12 H^2 weights) and
    2 H T^2 for causal attention: 12 H T + T^2 up to a factor. verl also counts the masked half of
    attention and uses the 7B model's H = 4096 for every model: 6 * 4096 T + T^2.
    """
    tokens = lengths.astype(np.float64)
    return 12 * hidden_size * tokens + tokens**2


def balance_over_ranks(costs: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Return the indices of each rank: by falling cost, each goes to the least loaded rank."""
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    rank_of = np.empty(len(costs), dtype=np.int64)
    order = np.argsort(-costs, kind="stable")
    for index, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = loads[0]
        rank_of[index] = rank
        heapq.heapreplace(loads, (load + cost, rank))
    return [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


def micro_batches(
    lengths: np.ndarray, costs: np.ndarray, max_tokens: int, at_least: int = 1
) -> list[np.ndarray]:
    """Return index sets of at most `max_tokens` tokens, dearest first; no sequence is longer.

    Best fit determines the number of sets; costs are balanced if that number allows it. Empty sets
    are added up to `at_least`.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    fullest = _fill(longest_first, lengths, -lengths, max_tokens, len(lengths))
    assert fullest is not None
    count = max(int(fullest.max(initial=-1)) + 1, at_least)
    set_of = _fill(longest_first, lengths, costs, max_tokens, count)
    numbers = fullest if set_of is None else set_of
    sums = np.bincount(numbers, weights=costs, minlength=count)
    return [np.flatnonzero(numbers == number) for number in np.argsort(-sums, kind="stable")]


def _fill(
    order: np.ndarray, lengths: np.ndarray, costs: np.ndarray, max_tokens: int, count: int
) -> np.ndarray | None:
    """Assign each sequence to the cheapest set with room; None if a sequence does not fit."""
    numbers = np.zeros(len(lengths), dtype=np.int64)
    tokens, loads = np.zeros(count, dtype=np.int64), np.zeros(count)
    for index in order:
        room = tokens + lengths[index] <= max_tokens
        if not room.any():
            return None
        number = numbers[index] = int(np.where(room, loads, np.inf).argmin())
        tokens[number] += lengths[index]
        loads[number] += costs[index]
    return numbers


@dataclass(frozen=True)
class RankShare:
    """One data-parallel rank's part of a batch, split into micro-batches.

    All ranks have the same number of micro-batches, because each is a collective forward pass under
    FSDP.
    """

    batch: Batch
    micro_batches: list[np.ndarray]  # indices into `batch`; the last ones may be empty

    def micro_batch(self, number: int) -> Batch:
        """Return the rows of a micro-batch; for an empty one, a masked row to run the pass on."""
        indices = self.micro_batches[number]
        if len(indices):
            return self.batch.select(indices)
        row = self.batch.select([0])
        return replace(row, response_mask=torch.zeros_like(row.response_mask))


def split_batch(
    batch: Batch, num_data_ranks: int, max_tokens: int, hidden_size: int = 4096
) -> tuple[list[RankShare], list[np.ndarray]]:
    """Return a balanced share for each data-parallel rank, and the indices of its rows in `batch`.

    max_tokens: limit of one micro-batch, train.micro_batch_tokens times the ranks that share it.
    Raises DataError if a single sequence is longer.
    """
    lengths = batch.lengths
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise DataError(
            f"response {longest} of the batch has {lengths[longest]} tokens with its prompt, more "
            f"than the {max_tokens} allowed in a micro-batch (train.micro_batch_tokens x "
            "train.sequence_parallel); raise train.micro_batch_tokens"
        )
    bundles, tokens, costs = _bundles(batch, num_data_ranks, max_tokens, hidden_size)
    parts = balance_over_ranks(costs, num_data_ranks)
    count = max(len(micro_batches(tokens[part], costs[part], max_tokens)) for part in parts)
    shares, indices = [], []
    for part in parts:
        rows = _rows(bundles, part)
        sets = micro_batches(tokens[part], costs[part], max_tokens, count)
        chosen = [np.searchsorted(rows, _rows(bundles, part[each])) for each in sets]
        shares.append(RankShare(batch.select(rows if len(rows) else [0]), chosen))
        indices.append(rows)
    return shares, indices


def _bundles(
    batch: Batch, num_data_ranks: int, max_tokens: int, hidden_size: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the batch's rows in bundles that share a prompt, with their tokens and costs.

    A shared prompt's tokens count once, and `COPY_SHARE` of them for each further sibling.
    """
    lengths, prompt_lengths = batch.lengths, batch.prompt_lengths.numpy()
    costs = workload(lengths, hidden_size)
    saved_costs = workload(prompt_lengths, hidden_size)
    saved_tokens = np.floor((1 - COPY_SHARE) * prompt_lengths).astype(np.int64)
    max_cost = costs.sum() / (BUNDLES_PER_RANK * num_data_ranks)
    bundles: list[list[int]] = []
    tokens: list[int] = []
    whole_costs: list[float] = []  # without sharing
    last: dict[int, int] = {}  # bundle of each owner
    for row, owner in enumerate(batch.prompt_owners.tolist()):
        bundle = last.get(owner)
        added = lengths[row] - saved_tokens[row]
        if (
            bundle is None
            or tokens[bundle] + added > max_tokens
            or whole_costs[bundle] + costs[row] > max_cost
        ):
            last[owner] = len(bundles)
            bundles.append([row])
            tokens.append(lengths[row])
            whole_costs.append(costs[row])
        else:
            bundles[bundle].append(row)
            tokens[bundle] += added
            whole_costs[bundle] += costs[row]
    saved = [(len(rows) - 1) * saved_costs[rows[0]] for rows in bundles]
    return [np.array(rows) for rows in bundles], np.array(tokens), np.subtract(whole_costs, saved)


def _rows(bundles: Sequence[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """Return the rows of the chosen bundles, in the batch's order."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *(bundles[each] for each in chosen)]))


def mini_batches(
    batch: Batch, num_prompts: int, order: Sequence[int] | np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of each mini-batch: `num_prompts` groups in `order`, at last fewer."""
    group_ids = batch.group_ids.numpy()
    group_positions = np.argsort(np.arange(batch.num_groups) if order is None else order)
    positions = group_positions[group_ids]  # by row
    rows = np.argsort(positions, kind="stable")
    firsts = range(num_prompts, batch.num_groups, num_prompts)
    return np.split(rows, np.searchsorted(positions[rows], firsts))
