"""Memory of a policy rank by phase, in bytes; docs/memory.md explains the formulas.

Symbols: n tokens of a micro-batch on the device, c bytes per element in the compute dtype; h, a, k,
i, V as in ModelShape. Lifetimes follow FSDP2 in torch 2.13, torch.optim.AdamW, and
transformers' decoder layers with non-reentrant checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.machine.device import device_for
from dapo_core.memory.engine import longest_sequence
from dapo_core.memory.shape import count

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes per parameter: float32, see dapo_core/policy/model.py
SQUARE_ROOTS = 4  # bytes per parameter: of AdamW's second moments; on accelerators of all at once
LOGITS = 8  # bytes per logit in a forward pass: float32 logits and exponentials for the entropy


@dataclass(frozen=True)
class RankMemory:
    """Memory parts of a rank, which phases are composed of."""

    weights: int  # float32 shards
    gradients: int
    optimizer: int
    optimizer_step: int  # temporaries
    reference: int  # shards of the reference model
    pinned: int  # weights in pinned host memory
    pinned_trained: int  # those that are trained; gradients are as large, and moments twice
    forward_weights: int  # gathered in a forward-only pass
    scoring_activations: int
    scoring_logits: int
    update_weights: int  # gathered at the peak of the update
    update_gradients: int  # full gradients and the reduce buffer
    update_copies: int  # gloo's copy of the reduce buffer
    update_activations: int
    update_logits: int
    host_activations: int  # layer inputs offloaded to host memory
    num_image_tokens: (
        int  # of pictures in a micro-batch of an update, in all of its prompts' tokens
    )
    num_patches: int  # of these pictures

    @property
    def states(self) -> int:
        """Bytes kept between phases on the device unless offloaded."""
        return self.weights + self.gradients + self.optimizer


def rank_memory(
    config: TrainingConfig, shape: ModelShape, counts_copies: bool = True
) -> RankMemory:
    """Return the memory of one rank, with or without what gloo copies."""
    return _Rank(config, shape, counts_copies).memory()


def layer_bytes(config: TrainingConfig, shape: ModelShape) -> int:
    """Return the bytes that a layer keeps per token for its backward pass."""
    return _Rank(config, shape).layer_bytes()


class _Rank:
    def __init__(
        self, config: TrainingConfig, shape: ModelShape, counts_copies: bool = True
    ) -> None:
        train, self.shape = config.train, shape
        device = device_for(train.device)
        self.train, self.item = train, device.item_bytes(train.dtype)
        self.has_own_memory = device.has_own_memory
        self.has_host_inputs = train.offload_activations and device.has_own_memory
        self.has_host_shards = train.offload_shards and device.has_own_memory
        self.has_grouped_attention = device.shares_key_heads and self.item == 2
        self.num_shards = train.fsdp_size or train.num_ranks
        self.shards = shape.shards(self.num_shards, train.expert_parallel)
        self.layer_sizes = shape.layer_sizes(train.expert_parallel)
        self.is_copied = counts_copies and device.backend == "gloo" and self.num_shards > 1
        # elements of each tensor's shard; adapters count as one tensor
        self.trained = self.shards
        self.frozen: list[int] = []
        self.has_adapters = train.lora.rank > 0
        if self.has_adapters:
            self.frozen = self.trained
            self.trained = [-(-shape.adapter_parameters(train.lora) // self.num_shards)]
        self.frozen_tower: list[int] = []
        if "vision" in train.freeze and not self.has_adapters:
            self.frozen_tower = shape.tower_shards(self.num_shards)
            self.trained = shape.language_shards(self.num_shards, train.expert_parallel)
        has_copy = not self.has_adapters or config.algorithm.kl.reference_path is not None
        self.has_reference = config.algorithm.kl.place != "off" and has_copy
        longest = longest_sequence(config)
        # bytes per logit in a backward pass: float32, the compute dtype, factors of an entropy
        self.logit_gradients = 4 + self.item % 4 + 4 * (config.algorithm.entropy_coefficient > 0)
        self.response_share = config.rollout.max_response_tokens / longest
        responses = config.rollout.group_size * train.mini_prompts // train.num_data_ranks
        scored = -(-config.rollout.group_size * train.train_prompts // train.num_data_ranks)
        self.update_tokens = self._row(longest, max(responses, 1))
        self.scored_tokens = self._row(longest, scored)

    def _row(self, longest: int, num_responses: int) -> int:
        """Return the tokens of the largest micro-batch of `num_responses` longest sequences."""
        parts = self.train.sequence_parallel
        sequences = min(max(self.train.micro_batch_tokens * parts // longest, 1), num_responses)
        return -(-sequences * longest // parts)

    def memory(self) -> RankMemory:
        item, shard = self.item, sum(self.shards)
        weights, gradients, copies, activations, logits = max(self._update_moments(shard), key=sum)
        scoring = max(self._scoring_moments(), key=sum)
        trained = sum(self.trained)
        pinned_trained = sum(_pinned(MASTER * number) for number in self.trained)
        return RankMemory(
            weights=item * sum(self.frozen) + MASTER * (trained + sum(self.frozen_tower)),
            gradients=GRADIENT * trained,
            optimizer=MOMENTS * trained,
            optimizer_step=self._optimizer_step(),
            reference=item * shard if self.has_reference else 0,
            pinned=pinned_trained
            + sum(_pinned(item * number) for number in self.frozen)
            + sum(_pinned(MASTER * number) for number in self.frozen_tower),
            pinned_trained=pinned_trained,
            forward_weights=scoring[0],
            scoring_activations=scoring[1],
            scoring_logits=scoring[2],
            update_weights=weights,
            update_gradients=gradients,
            update_copies=copies,
            update_activations=activations,
            update_logits=logits,
            host_activations=self._inputs(self.update_tokens) if self.has_host_inputs else 0,
            num_image_tokens=self._image_tokens(self.update_tokens),
            num_patches=self._num_patches(self.update_tokens),
        )

    def _scoring_moments(self) -> list[tuple[int, int, int]]:
        """Return (weights, activations, logits) at possible peaks of a forward-only pass."""
        shape, item, tokens = self.shape, self.item, self.scored_tokens
        root, layers = item * shape.root_parameters, self._gathered_layers()
        stream = item * shape.hidden * tokens  # the residual stream
        logits = self._chunk(tokens) * shape.vocabulary * LOGITS
        # FSDP2 keeps a unit's buffer until the next unit's weights are copied out of theirs.
        buffers = self._layer_buffer() if self.train.expert_parallel == 1 else 0
        return [
            (2 * root + self._first_unit(), 0, 0),  # buffers and weights
            (root + layers + buffers, 0, 0),
            (root + layers, tokens * self._mlp_pass(), 0),
            (root + layers - self._layer_buffer(), 4 * stream, logits),
            (root + layers, self._tower_pass(tokens), 0),
        ]

    def _update_moments(self, shard: int) -> list[tuple[int, int, int, int, int]]:
        """Return (weights, gradients, gloo's copies, activations, logits) at possible peaks."""
        shape, item, tokens = self.shape, self.item, self.update_tokens
        root, layer = shape.root_parameters, max(self.layer_sizes)
        head = shape.vocabulary * shape.hidden
        layers = self._gathered_layers()
        kept = self._kept(tokens)
        stream = item * shape.hidden * tokens  # the residual stream
        norm = (4 + 2 * item) * shape.hidden * tokens
        # and their gradients
        predictors = 2 * item * shape.hidden * int(tokens * self.response_share)
        # the last layer's buffer beside the root
        first = item * root + layers - self._layer_buffer()
        outputs, logits = kept + norm + predictors, self._chunk(tokens) * shape.vocabulary
        recomputed = tokens * self.layer_bytes() if self.train.gradient_checkpointing else 0
        backward = kept + recomputed + tokens * self._mlp_backward() + 2 * stream
        head_gradient = item * head
        root_gradients = max(item * root, GRADIENT * root // self.num_shards) + GRADIENT * root
        reduced, layer_gradients = item * head + GRADIENT * layer, item * layer // 2
        # the results of experts are freed before the gradients of their weights exist
        results = item * shape.experts_per_token * shape.hidden * tokens
        copied = GRADIENT * self.is_copied
        if self.has_adapters:  # weights have no gradients, and those of adapters are small
            head_gradient, root_gradients, reduced, layer_gradients = 0, 0, 0, 0
        return [
            (item * root + layers, 0, 0, self._tower_kept(tokens) + self._tower_pass(tokens), 0),
            (first, 0, 0, outputs - predictors // 2, logits * LOGITS),
            (first, head_gradient, 0, outputs, logits * self.logit_gradients),
            (item * root + layers, reduced, copied * layer, backward, 0),
            (
                item * root + layers,
                reduced + layer_gradients,
                copied * layer,
                backward - results,
                0,
            ),
            (0, root_gradients, copied * root, stream, 0),
            (
                0,
                0 if self.has_host_shards else self._optimizer_step(),
                0,
                0,
                0,
            ),  # the optimizer step
        ]

    def _optimizer_step(self) -> int:
        """Return the bytes of the optimizer's temporaries."""
        shards = sum(self.trained) if self.has_own_memory else max(self.trained)
        return SQUARE_ROOTS * shards

    def _gathered_layers(self) -> int:
        """Return the bytes of gathered layers: one and the next one's buffer, or all."""
        if self.train.reshard_after_forward:
            return max(self.layer_sizes) * self.item + self._layer_buffer()
        return sum(self.layer_sizes) * self.item + self._layer_buffer()

    def _first_unit(self) -> int:
        """Return the bytes of gathered weights below the root when its own buffer still exists."""
        if self.train.expert_parallel == 1:
            return self._gathered_layers()
        dense = [[each for each in layer if len(each) < 3] for layer in self.shape.layers]
        return 2 * self.item * max(map(count, dense))

    def _layer_buffer(self) -> int:
        """Return the bytes of the next layer's buffer; none if the weights are not sharded."""
        return max(self.layer_sizes) * self.item if self.num_shards > 1 else 0

    def _chunk(self, tokens: int) -> int:
        """Return the number of tokens whose logits are in memory at once."""
        return max(min(self.train.logits_chunk_tokens, int(tokens * self.response_share)), 1)

    def _kept(self, tokens: int) -> int:
        """Return the bytes that the forward pass keeps for the backward pass."""
        tower = self._tower_kept(tokens)
        if self.has_host_inputs:
            return 2 * self.item * self.shape.hidden * tokens + tower  # one in transfer, one in use
        if self.train.gradient_checkpointing:
            return self._inputs(tokens) + tower
        return len(self.shape.layers) * tokens * self.layer_bytes() + tower

    def _image_tokens(self, tokens: int) -> int:
        """Return the tokens of pictures in a row whose prompts are all pictures."""
        if self.shape.tower is None:
            return 0
        return round(tokens * (1 - self.response_share)) * self.train.sequence_parallel

    def _num_patches(self, tokens: int) -> int:
        """Return the patches of a row whose prompts are all pictures; ranks share none."""
        tower = self.shape.tower
        return 0 if tower is None else self._image_tokens(tokens) * tower.patches_per_token

    def _tower_pass(self, tokens: int) -> int:
        """Return the bytes of a tower's forward pass: pixels, and the values of one block."""
        if (tower := self.shape.tower) is None:
            return 0
        pixels = (4 + self.item) * tower.patch_values
        return self._num_patches(tokens) * (pixels + self.item * tower.block_values)

    def _tower_kept(self, tokens: int) -> int:
        """Return the bytes that a trained tower keeps for its backward pass."""
        tower = self.shape.tower
        if tower is None or self.has_adapters or self.frozen_tower:
            return 0
        is_recomputed = self.train.gradient_checkpointing
        kept = tower.hidden if is_recomputed else tower.block_values
        return self._num_patches(tokens) * self.item * kept * len(tower.blocks)

    def _inputs(self, tokens: int) -> int:
        """Return the bytes of all layers' inputs."""
        return len(self.shape.layers) * self.item * self.shape.hidden * tokens

    def layer_bytes(self) -> int:
        """Return the bytes that a layer keeps per token for its backward pass."""
        shape, item = self.shape, self.item
        queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        norms = 2 * (4 + 2 * item) * shape.hidden  # float32 input, normalized and scaled values
        head_norms = (4 + item) * (queries + keys) if shape.has_head_norms else 0
        attended = 3 * queries + 2 * (keys if self.has_grouped_attention else queries)
        return norms + head_norms + item * attended + 4 * shape.heads + self._mlp_kept()

    def _mlp_kept(self) -> int:
        shape, item = self.shape, self.item
        if not shape.num_experts:
            return 4 * item * shape.intermediate  # gate, activation, up, product
        expert = 4 * item * shape.expert_intermediate + 2 * item * shape.hidden
        return shape.experts_per_token * expert + 4 * shape.num_experts

    def _mlp_pass(self) -> int:
        """Return the bytes of a layer's MLP in a forward-only pass, per token."""
        shape, item = self.shape, self.item
        if not shape.num_experts:  # residual and norm; activation, up, product
            return (3 * item + 4) * shape.hidden + 3 * item * shape.intermediate
        hidden, width = shape.hidden, shape.expert_intermediate
        # rows before and after they move, through the gate, or with gate, activation and product
        rows = max(2 * hidden, hidden + 2 * width, 4 * width)
        return 4 * item * hidden + shape.experts_per_token * item * rows

    def _mlp_backward(self) -> int:
        """Return the bytes of MLP gradients that exist at once, per token."""
        shape, width = self.shape, 2 * self.shape.mlp_width
        return self.item * max(width, shape.experts_per_token * shape.hidden)


def _pinned(num_bytes: int) -> int:
    """Return the bytes that torch allocates for pinned memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()
