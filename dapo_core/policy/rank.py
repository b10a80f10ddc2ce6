"""One FSDP2 rank of the policy: log-probs, optimizer steps, checkpoints, and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function

from dapo_core.algorithm.balance import RankShare
from dapo_core.algorithm.batch import TokenStats
from dapo_core.algorithm.loss import LossSums, LossTotals, PolicyLoss, policy_loss
from dapo_core.algorithm.losses import loss_of
from dapo_core.algorithm.update import Fault, Update
from dapo_core.checkpoint.manifest import verify_shards
from dapo_core.checkpoint.shards import Shards
from dapo_core.machine.device import Device, device_for
from dapo_core.machine.environment import DETERMINISTIC, set_defaults
from dapo_core.memory.holdings import OPTIMIZER, WEIGHTS
from dapo_core.model.lora import adapters_off
from dapo_core.model.routers import Experts
from dapo_core.model.tensors import weight_names
from dapo_core.policy.attention import sequence_group
from dapo_core.policy.log_probs import load_token_log_probs
from dapo_core.policy.model import copy_weights, require_same_shapes, reshard
from dapo_core.policy.nan_guard import MAX_SEARCHES, find_fault
from dapo_core.policy.offload import Offloader
from dapo_core.policy.optimizer import adamw, clip_gradients, learning_rate
from dapo_core.policy.packing import StatsBuffer, loss_tokens, pack
from dapo_core.policy.profiling import Profiled
from dapo_core.policy.routing import Routing
from dapo_core.weights.outbox import Outbox
from dapo_core.weights.source import WeightSource
from heartbeat import heartbeat

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.weights.plan import WeightPlan


def _progress(describe: Callable[[], str]) -> AbstractContextManager[None]:
    """Log the progress of the block, on the first rank alone."""
    return heartbeat(describe) if torch.distributed.get_rank() == 0 else nullcontext()


class Policy(Profiled):
    """One rank of the sharded policy and its optimizer, and of the reference model if KL needs one.

    Methods are collective unless noted. With sp = train.sequence_parallel, ranks r * sp to
    r * sp + sp - 1 get the same share, and each processes a slice of its rows.
    """

    def __init__(self, model_path: str | Path, config: TrainingConfig) -> None:
        self.train = config.train
        self.algorithm = config.algorithm
        loss_of(self.algorithm)  # a faulty custom loss fails here, before the model loads
        self.rollout_correction = config.rollout_correction
        self.temperature = config.rollout.temperature
        self.device: Device = device_for(self.train.device)
        self.num_optimizer_steps = 0
        self._searches_left = MAX_SEARCHES if self.train.nan_guard else 0
        if config.run.deterministic:
            set_defaults(DETERMINISTIC)
            torch.use_deterministic_algorithms(True)  # raises without a deterministic kernel
        lora, is_merged = self.train.lora, config.rollout.lora == "merged"
        self.group = sequence_group(self.train.sequence_parallel)
        shared = config, self.device, self.group
        self.model = load_token_log_probs(model_path, *shared, is_trainable=True)
        self.routing: Routing = self.model.routing  # type: ignore[assignment]
        self.weights = WeightSource(
            self._causal_lm(),
            weight_names(model_path),
            self.device.resolve_dtype(config.rollout.dtype),
            self.train.weight_bucket_bytes,
            self.device.torch_device(),
            lora.scale if is_merged else None,
        )
        self.outbox: Outbox | None = None  # only on rank 0
        self.reference: nn.Module | None = None
        reference_path = self.algorithm.kl.reference_path
        if self.algorithm.kl.place != "off" and (reference_path or not lora.rank):
            path = reference_path or model_path
            self.reference = load_token_log_probs(path, *shared, is_trainable=False)
            require_same_shapes(self.model, self.reference, path)
        self.optimizer = adamw(self.model.parameters(), self.train)
        train = self.train
        is_offloaded = train.offload_optimizer or train.offload_shards or train.takes_turns
        is_refreshed = self.reference is not None and self.algorithm.kl.refresh_every > 0
        saved: Any = self.reference.causal_lm if is_refreshed else None  # type: ignore[union-attr]
        state = self._causal_lm(), self.optimizer, self.device
        self.shards = Shards(*state, is_offloaded, config.run.seed, saved)
        models = [self.model] if self.reference is None else [self.model, self.reference]
        self.offloader = Offloader(models, self.optimizer, self.device, self.train)

    @record_function("old_log_prob")
    def log_probs(self, share: RankShare, temperature: float | None = None) -> TokenStats:
        """Return log-probs and entropy at the share's response tokens, else 0: [b, R] float32."""
        return self._score(self.model, share, temperature or self.temperature, with_entropy=True)

    @record_function("old_log_prob")
    def routed_log_probs(self, share: RankShare) -> tuple[TokenStats, list[Experts]]:
        """Return `log_probs`, and the experts of the share's tokens (Batch.routing)."""
        experts: dict[int, Experts] = {}
        stats = self._score(self.model, share, self.temperature, True, experts)
        return stats, [experts[row] for row in sorted(experts)]

    @record_function("ref")
    def ref_log_probs(self, share: RankShare) -> torch.Tensor:
        """Return the reference model's log-probs of the share's response tokens: [b, R] float32.

        Under train.lora, the reference model is the policy without its adapters.
        """
        if self.reference is None:
            with adapters_off(self.model):
                return self._score(self.model, share, self.temperature, False).log_probs
        return self._score(self.reference, share, self.temperature, with_entropy=False).log_probs

    @record_function("update_actor")
    def update(self, share: RankShare, totals: LossTotals, with_stats: bool = False) -> Update:
        """Run one optimizer step on a mini-batch; `share` is this rank's part.

        If the share has no old log-probs, the forward pass's own are the anchor: in a batch's only
        step, both are the same. `with_stats` returns that pass's log-probs and entropy. Gradients
        are summed, not averaged, over ranks and micro-batches, because `totals` holds the
        denominator. A non-finite gradient norm leaves weights and optimizer state unchanged.
        """
        self.offloader.require_loaded(WEIGHTS, OPTIMIZER)
        rate = learning_rate(self.num_optimizer_steps + 1, self.train)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        parts: list[LossSums] = []
        self.routing.take()
        buffer = StatsBuffer(share) if with_stats else None
        num_parts = len(share.micro_batches)
        with _progress(lambda: f"update: {len(parts)} of {num_parts} micro-batches"):
            for loss in self._losses(share, totals, buffer, parts):
                with record_function("backward"):
                    loss.backward()
        num_copies = self.train.num_ranks // (self.train.fsdp_size or self.train.num_ranks)
        grad_norm = clip_gradients(self.model.parameters(), self.train.max_grad_norm, num_copies)
        is_skipped = not math.isfinite(grad_norm)
        self.offloader.transfers.join()  # moments may still be copying until here
        if not is_skipped:
            with record_function("optimizer"):
                self.optimizer.step()
        self.num_optimizer_steps += 1
        stats = buffer.read(self.group, self.device.torch_device()) if buffer else None
        return Update(
            reduce(add, parts),
            grad_norm,
            is_skipped,
            rate,
            self.num_optimizer_steps,
            routing=self.routing.take(),
            stats=stats,
            fault=self._fault(share, totals) if is_skipped and self._searches_left else None,
        )

    def refresh_reference(self) -> None:
        """Copy the policy's weights to the reference model, in its precision."""
        assert self.reference is not None, "algorithm.kl.place=off loads no reference model"
        with self.offloader.readable():
            copy_weights(self.model, self.reference)

    @record_function("save_checkpoint")
    def save(self, folder: str, asynchronous: bool) -> None:
        """Write this rank's parameters, optimizer state and random generators to the folder.

        If asynchronous, return once they are in host memory. Raises OSError or CheckpointError.
        """
        with self.offloader.readable():
            self.shards.save(folder, self.num_optimizer_steps, asynchronous)

    def is_saved(self) -> bool:
        """Return whether no asynchronous save is pending; raises its error once. Not collective."""
        return self.shards.is_saved()

    def end_save(self) -> None:
        """Wait for a pending asynchronous save and ignore its outcome. Not collective."""
        self.shards.end_save()

    def checkpoint_bytes(self) -> int:
        """Return the bytes of this rank's part of a checkpoint; HSDP copies count once."""
        return self.shards.num_bytes()

    def verify(self, folder: str, number: int, num_shares: int) -> None:
        """Raise CheckpointError for a damaged shard of this share. Not collective."""
        verify_shards(Path(folder), number, num_shares)

    def load(self, folder: str) -> None:
        """Load a checkpoint written by any number of ranks. Weights must be on the device."""
        self.offloader.require_loaded(WEIGHTS, OPTIMIZER)
        self.offloader.transfers.join()
        self.num_optimizer_steps = self.shards.load(folder)

    def weight_plan(self) -> WeightPlan:
        """Return the buckets that the engines receive; the same on all ranks."""
        return self.weights.plan

    def open_outbox(self, num_local: int, on_device: bool) -> str:
        """Create rank 0's outbox; returns the address at which `num_local` processes read it."""
        self.outbox = Outbox(self.weights.plan, self.device, num_local, on_device)
        return self.outbox.address

    def join_receivers(self, address: str, size: int) -> None:
        """Connect to the engine processes on other nodes. Collective with them."""
        assert self.outbox is not None
        self.outbox.join(address, size, self.device.backend)

    @record_function("weight_sync")
    def send_weights(self) -> dict[str, dict[int, int]]:
        """Send all weights through rank 0; returns the checksums of this rank's rows."""
        self.offloader.require_loaded(WEIGHTS)
        reshard(self.model)
        return self.weights.send(self.outbox)

    @record_function("onload")
    def onload(self, names: Collection[str]) -> None:
        """Copy weights or optimizer state (memory.holdings) back to the device."""
        self.offloader.onload(names)

    @record_function("offload")
    def offload(self, names: Collection[str]) -> None:
        """Free gradients, and move weights or optimizer state off the device."""
        self.offloader.offload(names)

    def device_name(self) -> str:
        """Return the vendor's name of this rank's device."""
        return self.device.name()

    def take_memory(self) -> dict[str, float]:
        """Return this rank's peak memory since the last call, in GiB by metric name."""
        return self.device.take_memory()

    def _causal_lm(self) -> nn.Module:
        """Return the model inside the FSDP2 root, with the names in checkpoints."""
        return self.model.causal_lm  # type: ignore[return-value]

    def _score(
        self,
        model: nn.Module,
        share: RankShare,
        temperature: float,
        with_entropy: bool,
        experts: dict[int, Experts] | None = None,
    ) -> TokenStats:
        """Return the share's log-probs and, if requested, entropy, without gradient: [b, R].

        The experts of each response's tokens are added to `experts`, if given.
        """
        self.offloader.require_loaded(WEIGHTS)
        device = self.device.torch_device()
        buffer, number, count = StatsBuffer(share), 0, len(share.micro_batches)
        model.eval()
        with torch.no_grad(), _progress(lambda: f"log-probs: {number} of {count} micro-batches"):
            for number in range(count):
                micro = share.micro_batch(number)
                row = pack(micro, device, self.group)
                buffer.add(number, row, model(row, temperature, with_entropy))
                indices = share.micro_batches[number].tolist()
                if experts is not None and indices:
                    routing = self.routing.read(row, micro.lengths)
                    experts |= dict(zip(indices, routing, strict=True))
        reshard(model)  # without a backward pass, the root stays gathered
        return buffer.read(self.group, device)

    def _losses(
        self,
        share: RankShare,
        totals: LossTotals,
        buffer: StatsBuffer | None,
        parts: list[LossSums],
    ) -> Iterator[torch.Tensor]:
        """Yield the loss of each micro-batch; the sums are appended to `parts`."""
        last = len(share.micro_batches) - 1
        for number in range(last + 1):
            # Every backward pass reduce-scatters, because unsharded gradients are as large as the
            # float32 model. HSDP copies all-reduce theirs once, after the last.
            self.model.set_requires_all_reduce(number == last)  # type: ignore[operator]
            with record_function("forward"):
                loss, sums = self._micro_loss(share, number, totals, buffer)
            parts.append(sums)
            yield loss * torch.distributed.get_world_size()  # FSDP2 averages over ranks

    def _fault(self, share: RankShare, totals: LossTotals) -> Fault:
        """Find the first non-finite number of the skipped update; leaves no gradients."""
        self._searches_left -= 1
        self.optimizer.zero_grad(set_to_none=True)
        losses = self._losses(share, totals, None, [])
        fault = find_fault(self.model, losses, torch.distributed.get_rank())
        self.optimizer.zero_grad(set_to_none=True)
        return fault

    def _micro_loss(
        self, share: RankShare, number: int, totals: LossTotals, buffer: StatsBuffer | None
    ) -> PolicyLoss:
        """Return the loss of this rank's slice of a micro-batch."""
        device, micro = self.device.torch_device(), share.micro_batch(number)
        row = pack(micro, device, self.group)
        has_bonus = self.algorithm.entropy_coefficient > 0
        with self.device.saving_on_host() if self.train.offload_activations else nullcontext():
            log_probs, entropy = self.model(row, self.temperature, has_bonus or buffer is not None)
        if buffer is not None:
            buffer.add(number, row, (log_probs, entropy))
        num_responses = share.batch.num_responses
        weights = totals.token_weights(micro.response_mask, self.algorithm, num_responses)
        tokens = loss_tokens(micro, row, log_probs.detach(), weights, self.rollout_correction)
        loss, sums = policy_loss(log_probs, entropy if has_bonus else None, tokens, self.algorithm)
        if self.routing.routers and len(share.micro_batches[number]):
            self.routing.count(row)
            if coefficient := self.algorithm.router_aux_loss_coefficient:
                lengths = micro.prompt_lengths + micro.response_lengths
                balance = self.routing.balance_loss(row, lengths, totals.num_sequence_tokens)
                loss = loss + coefficient * balance
        return PolicyLoss(loss, sums)
