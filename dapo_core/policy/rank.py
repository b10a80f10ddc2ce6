"""The policy: one FSDP2 rank that computes log-probs, learns from micro-batches, and hands out its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dapo_core.batch import Batch, RankShare
from dapo_core.checkpoint import load_shards, save_shards
from dapo_core.device import Device, device_for
from dapo_core.errors import ModelError
from dapo_core.loss import LossTotals, policy_loss
from dapo_core.model_folder import require_model_folder, weight_names

if TYPE_CHECKING:
    import numpy as np

    from dapo_core.config import AlgorithmConfig, TrainConfig


@dataclass(frozen=True)
class UpdateSums:
    """One rank's sums over an optimizer step; sums of all ranks are the mini-batch's."""

    loss: float  # policy loss alone, already divided by the whole mini-batch's denominator
    kl_loss: float  # aggregated KL to the reference, without its coefficient; 0 without KL in the loss
    num_tokens: float
    clipped: float
    clipped_dual: float
    neg_log_ratio: float
    grad_norm: float  # of the whole model, the same on every rank
    is_skipped: bool  # the norm was not finite, so the weights did not change
    learning_rate: float

    @staticmethod
    def over_ranks(ranks: Sequence[UpdateSums]) -> UpdateSums:
        """The sums of the whole mini-batch."""
        return replace(
            ranks[0],
            loss=sum(rank.loss for rank in ranks),
            kl_loss=sum(rank.kl_loss for rank in ranks),
            num_tokens=sum(rank.num_tokens for rank in ranks),
            clipped=sum(rank.clipped for rank in ranks),
            clipped_dual=sum(rank.clipped_dual for rank in ranks),
            neg_log_ratio=sum(rank.neg_log_ratio for rank in ranks),
        )


class Policy:
    """One rank of the sharded model, with its optimizer.

    Collective: every rank calls the same method at the same time.
    """

    def __init__(
        self, model_path: str | Path, train: TrainConfig, algorithm: AlgorithmConfig, temperature: float
    ) -> None:
        self.train = train
        self.algorithm = algorithm
        self.temperature = temperature
        self.device: Device = device_for(train.device)
        self.num_optimizer_steps = 0
        self.model = _shard(load_causal_lm(model_path), self.device, train.dtype)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay, foreach=True
        )

    def log_probs(self, share: RankShare, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the share's response tokens and the policy's entropy there: two [b, R] float32.

        At the sampling temperature unless another is given; 0 beyond each response.
        """
        log_probs = torch.zeros(share.batch.response_mask.shape)
        entropy = torch.zeros(share.batch.response_mask.shape)
        with torch.no_grad():
            for indices in share.micro_batches:
                micro = _micro_batch(share.batch, indices)
                micro_log_probs, micro_entropy = self._forward(
                    micro, temperature or self.temperature, with_entropy=True
                )
                assert micro_entropy is not None
                width, rows = micro.response_mask.shape[1], indices.tolist()
                log_probs[rows, :width] = micro_log_probs[: len(rows)].float().cpu()
                entropy[rows, :width] = micro_entropy[: len(rows)].float().cpu()
        self.model.reshard()  # type: ignore[operator]  # without a backward pass the root stays whole
        return log_probs, entropy

    def update(self, share: RankShare, totals: LossTotals) -> UpdateSums:
        """One optimizer step on a mini-batch of which `share` is this rank's part.

        Gradients are summed, not averaged, over ranks and micro-batches: `totals` already holds the denominator.
        A gradient norm that is not finite leaves weights and optimizer state unchanged.
        """
        learning_rate = self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss = num_tokens = clipped = clipped_dual = neg_log_ratio = 0.0
        for number, indices in enumerate(share.micro_batches):
            self._sync_gradients(number == len(share.micro_batches) - 1)
            micro = _micro_batch(share.batch, indices)
            log_probs, _ = self._forward(micro, self.temperature, with_entropy=False)
            place = log_probs.device
            part = policy_loss(
                log_probs,
                micro.old_log_probs.to(place),
                micro.advantages.to(place),
                micro.response_mask.to(place),
                totals,
                self.algorithm,
            )
            (part.loss * self._num_ranks()).backward()  # FSDP2 averages over ranks
            loss += float(part.loss.detach())
            num_tokens += part.num_tokens
            clipped += part.clipped
            clipped_dual += part.clipped_dual
            neg_log_ratio += part.neg_log_ratio
        grad_norm = _full(nn.utils.clip_grad_norm_(self.model.parameters(), self.train.max_grad_norm)).item()
        is_skipped = not math.isfinite(grad_norm)
        if not is_skipped:
            self.optimizer.step()
        self.num_optimizer_steps += 1
        return UpdateSums(
            loss, 0.0, num_tokens, clipped, clipped_dual, neg_log_ratio, grad_norm, is_skipped, learning_rate
        )

    def save(self, folder: str) -> None:
        """Write this rank's shards of parameters and optimizer into the folder. Collective."""
        save_shards(folder, self.model, self.optimizer, self.num_optimizer_steps)

    def load(self, folder: str) -> None:
        """Continue from shards that any number of ranks wrote. Collective."""
        self.num_optimizer_steps = load_shards(folder, self.model, self.optimizer)

    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each parameter in float32, by Hugging Face name; tied parameters once."""
        return {name: parameter.numel() * 4 for name, parameter in self.model.named_parameters()}

    def gather_weights(self, names: list[str]) -> dict[str, torch.Tensor] | None:
        """Whole parameters on the CPU: a dict on rank 0, None elsewhere. Collective."""
        parameters = dict(self.model.named_parameters())
        gathered = {}
        for name in names:
            whole = _full(parameters[name].detach())
            if torch.distributed.get_rank() == 0:
                gathered[name] = whole.to("cpu", copy=True)
        return gathered if torch.distributed.get_rank() == 0 else None

    def device_name(self) -> str:
        """What the vendor calls this rank's device."""
        return self.device.name()

    def memory_metrics(self) -> dict[str, float]:
        """Memory of this rank and of its node in GiB, by metric name."""
        return self.device.memory_metrics()

    def _forward(
        self, micro: Batch, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        device = self.device.torch_device()
        token_ids = micro.token_ids.to(device)
        lengths = (micro.prompt_lengths + micro.response_lengths).to(device)
        positions = torch.arange(token_ids.shape[1], device=device)
        first = int(micro.prompt_lengths.min()) - 1  # its logits give the earliest response token
        logits = self.model(
            input_ids=token_ids,
            attention_mask=(positions < lengths.unsqueeze(-1)).long(),
            logits_to_keep=positions[first:-1],
            use_cache=False,
        ).logits
        logits = logits.float() / temperature  # [b, T - 1 - first, V]
        normalizer = logits.logsumexp(dim=-1)
        chosen = logits.gather(2, token_ids[:, first + 1 :].unsqueeze(-1)).squeeze(-1)
        log_probs = _response_tokens(chosen - normalizer, micro, first)
        if not with_entropy:
            return log_probs, None
        entropy = normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
        return log_probs, _response_tokens(entropy, micro, first)

    def _num_ranks(self) -> int:
        return torch.distributed.get_world_size()

    def _set_learning_rate(self) -> float:
        """Linear warm-up over `warmup_steps` optimizer steps, then constant."""
        warmup = self.train.warmup_steps
        share = min((self.num_optimizer_steps + 1) / warmup, 1.0) if warmup else 1.0
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.train.learning_rate * share
        return self.train.learning_rate * share

    def _sync_gradients(self, is_last: bool) -> None:
        """Reduce gradients over ranks only after the last micro-batch."""
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]


def load_causal_lm(model_path: str | Path) -> nn.Module:
    """The model of a Hugging Face folder in float32, on the CPU; raises ModelError when it is incomplete."""
    from transformers import AutoModelForCausalLM

    require_model_folder(model_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_path), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{model_path} cannot be loaded as a causal language model: {error}") from error
    unknown = {name for name, _ in model.named_parameters()} - weight_names(model_path)
    if unknown:
        raise ModelError(
            f"{len(unknown)} parameters of {model_path} have other names in transformers than in its files (such "
            f"as {min(unknown)}); engines and a merged folder need the names of the files, so this architecture, "
            "most often a mixture of experts, cannot be trained yet: set model.path to a dense model"
        )
    return model


def _shard(model: nn.Module, device: Device, dtype_name: str) -> nn.Module:
    """The model under FSDP2: each decoder layer a unit, float32 master weights, compute in the given dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = device.resolve_dtype(dtype_name)
    mesh = init_device_mesh(device.kind, (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: modules of the classes the model says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _micro_batch(batch: Batch, indices: np.ndarray) -> Batch:
    """The chosen rows; for no rows, one row that trains nothing, so that the collective forward takes place."""
    if len(indices):
        return batch.select(indices)
    row = batch.select([0])
    return replace(row, response_mask=torch.zeros_like(row.response_mask))


def _response_tokens(values: torch.Tensor, micro: Batch, first: int) -> torch.Tensor:
    """Values of response tokens, 0 beyond each response: [b, R] from [b, S]; [:, s] is of token first + 1 + s."""
    device = values.device
    offsets = torch.arange(micro.response_mask.shape[1], device=device)
    columns = offsets + (micro.prompt_lengths.to(device) - first - 1).unsqueeze(-1)
    aligned = values.gather(1, columns.clamp(max=values.shape[1] - 1))
    is_response = offsets < micro.response_lengths.to(device).unsqueeze(-1)
    return torch.where(is_response, aligned, torch.zeros_like(aligned))


def _full(tensor: Any) -> torch.Tensor:
    """The whole tensor of a DTensor (collective); any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
