"""Attention over a packed row: each sequence attends only to itself, without a full attention mask.

Siblings may share their prompt's tokens: the prompt attends to itself, and each response to the
prompt and itself, so the prompt's states are computed once. Only the keys that a response reads are
copied.

Under Ulysses sequence parallelism (arXiv:2309.14509), ranks exchange slices of the row for
attention heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from dapo_core.errors import ModelError
from dapo_core.machine.device import device_for
from dapo_core.model.pretrained import reads_pictures
from dapo_core.policy.all_to_all import all_to_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# name in transformers' registry, which builds no mask for unknown names
PACKED_ATTENTION = "packed"


@dataclass(frozen=True)
class PaddedBlock:
    """Spans of similar length, computed as one padded tensor."""

    num_spans: int
    num_tokens: int  # of the longest span
    num_prompt_tokens: int  # that each span reads before itself
    # [num_spans * num_tokens]: positions in the row; padding repeats token 0
    queries: torch.Tensor
    # [num_spans * (num_prompt_tokens + num_tokens)]: likewise
    keys: torch.Tensor


class Packing:
    """Layout of the spans in a packed row of N tokens; passed to every attention layer.

    A span is a sequence, a prompt that siblings share, or a response to one.

    Not a dataclass, because FSDP2's mixed precision would copy one with its tensors before every
    layer.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        device: torch.device,
        group: ProcessGroup | None = None,
        prompts: np.ndarray | None = None,
    ) -> None:
        """Lay out consecutive spans with the given lengths.

        A span shorter than half of a block's longest starts the next block, prompts included, so at
        most half of a block is padding. group: the ranks that each hold a slice of the row; None
        for a whole row. prompts: [spans, 2], the first token of the prompt that a span reads, and
        its number of tokens, 0 for none; None: no span reads any.
        """
        self.group = group
        self.layers: set[int] = set()  # indices of the layers that used this packing
        self.blocks: list[PaddedBlock] = []
        counts = np.asarray(lengths, dtype=np.int64)
        prompts = np.zeros((len(counts), 2), np.int64) if prompts is None else prompts
        starts = np.cumsum(counts) - counts
        positions = np.empty(counts.sum(), dtype=np.int64)
        longest_first = np.argsort(-counts, kind="stable")
        filled = 0
        for num_prompt_tokens in np.unique(prompts[:, 1]).tolist():
            order = longest_first[prompts[longest_first, 1] == num_prompt_tokens]
            order = order[counts[order] > 0]
            totals = num_prompt_tokens + counts
            while len(order):
                longest = int(counts[order[0]])
                is_similar = 2 * totals[order] >= totals[order[0]]
                members, order = order[is_similar], order[~is_similar]
                offsets = np.arange(longest)
                is_token = offsets < counts[members, None]
                queries = np.where(is_token, starts[members, None] + offsets, 0)
                positions[queries[is_token]] = filled + np.flatnonzero(is_token)
                filled += queries.size
                shared = prompts[members, :1] + np.arange(num_prompt_tokens)
                keys = np.concatenate([shared, queries], axis=1)
                indices = (torch.from_numpy(each.ravel()).to(device) for each in (queries, keys))
                self.blocks.append(PaddedBlock(len(members), longest, num_prompt_tokens, *indices))
        # [N]: position of each token in the blocks
        self.positions = torch.from_numpy(positions).to(device)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention in each sequence: [1, n, H, D] from queries, keys, values [1, H, n, D].

    With right padding, the causal kernel is exact without a mask, unless a prompt is shared. Raises
    ModelError for architectures that modify attention scores.
    """
    packing, scale, window = map(options.get, ("packing", "scaling", "sliding_window"))
    changes = map(options.get, ("softcap", "s_aux", "position_bias"))
    if packing is None or any(change is not None for change in changes):
        raise ModelError(
            f"{type(module).__name__} modifies attention scores (soft cap, sinks or a bias) or "
            "does not pass its arguments to the attention function, so sequences cannot be "
            "packed; set model.path to a model of another architecture"
        )
    packing.layers.add(getattr(module, "layer_idx", -1))
    states = [part.squeeze(0).transpose(0, 1) for part in (query, key, value)]  # [n, H, D]
    if packing.group is not None:
        repeats = repeats_of_key_heads(key.shape[1], packing.group.size())
        states[1:] = [part.repeat_interleave(repeats, dim=1) for part in states[1:]]
        states = [tokens_to_heads(part, packing.group) for part in states]
    parts = [_attend(block, states, scale, window, dropout) for block in packing.blocks]
    attended = torch.cat(parts).index_select(0, packing.positions)
    if packing.group is not None:
        attended = heads_to_tokens(attended, packing.group)
    return attended.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def set_packed_attention(causal_lm: Any) -> None:
    """Let the decoder of a model attend over packed rows; a vision tower keeps its attention."""
    has_tower = reads_pictures(causal_lm.config)
    parts = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
    causal_lm.set_attn_implementation(parts if has_tower else PACKED_ATTENTION)


def _attend(
    block: PaddedBlock,
    states: Sequence[torch.Tensor],
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """[N, H, D] of the row -> [num_spans * num_tokens, H, D]."""
    query, key, value = (
        part.index_select(0, tokens).unflatten(0, (block.num_spans, -1)).transpose(1, 2)
        for part, tokens in zip(states, (block.queries, block.keys, block.keys), strict=True)
    )
    mask = None
    num_keys = block.num_prompt_tokens + block.num_tokens
    if block.num_prompt_tokens or (window and window < num_keys):
        mask = _mask(block.num_tokens, num_keys, window, query.device)
    # Only flash kernels on accelerators support GQA without materializing all scores.
    is_flash = query.dtype != torch.float32 and mask is None and query.shape[-1] <= 256
    is_flash = is_flash and device_for(query.device.type).shares_key_heads
    if not is_flash:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=is_flash,
    )
    return attended.transpose(1, 2).flatten(0, 1)


def _mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which keys the last `num_queries` tokens read: [num_queries, num_keys] bool.

    Each reads itself and the tokens before it, or the `window` - 1 before it.
    """
    num_before = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(num_before)
    return mask.triu_(num_before - window + 1) if window else mask


def sequence_group(sequence_parallel: int) -> ProcessGroup | None:
    """Create this rank's group of `sequence_parallel` consecutive ranks; None for 1. Collective."""
    if sequence_parallel == 1:
        return None
    group, _ = dist.new_subgroups(group_size=sequence_parallel)
    return group


def repeats_of_key_heads(num_key_heads: int, num_ranks: int) -> int:
    """Return how often key heads must be repeated to divide evenly over the ranks."""
    return num_ranks // math.gcd(num_key_heads, num_ranks)


def tokens_to_heads(states: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All heads of its tokens, [N / sp, H, D] -> all tokens of its heads, [N, H / sp, D]."""
    num_ranks = dist.get_world_size(group)
    blocks = states.unflatten(1, (num_ranks, -1)).transpose(0, 1)  # [sp, N / sp, H / sp, D]
    return _exchange(blocks, group).flatten(0, 1)


def heads_to_tokens(states: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All tokens of its heads, [N, H / sp, D] -> all heads of its tokens, [N / sp, H, D]."""
    num_ranks = dist.get_world_size(group)
    blocks = _exchange(states.unflatten(0, (num_ranks, -1)), group)  # [sp, N / sp, H / sp, D]
    return blocks.transpose(0, 1).flatten(1, 2)


def _exchange(blocks: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Send block i to rank i."""
    one_each = [1] * len(blocks)
    return all_to_all(blocks, one_each, one_each, group)
