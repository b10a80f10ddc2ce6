"""Checksums of tensors as the ranks sent them and as the engines' loaders took them, and their comparison."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from dapo_core.errors import RolloutError
from dapo_core.parameter_names import sample_of
from dapo_core.weight_transfer.plan import PlannedTensor, WeightPlan

CHUNK_NUMEL = 2**22  # elements of which a device sums checksums at once
MULTIPLIER = 0x1E3779B97F4A7C15  # odd, below 2**61: weighs each place differently

_ADVICE = "its rollouts would come from wrong weights; start the training again: it continues from a checkpoint"

Checksums = dict[str, tuple[int, ...]]  # of a tensor's parts in order: the rows of one rank after another's


@dataclass(frozen=True)
class Loaded:
    """What a process of an engine took last."""

    policy_version: int
    checksums: Checksums


def checksums(tensor: torch.Tensor, planned: PlannedTensor) -> tuple[int, ...]:
    """The checksum of each part of the tensor that one rank holds."""
    return tuple(map(checksum, tensor.split(planned.shard_rows)))


def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the tensor's bytes in order: xxh3 on a CPU, elsewhere a sum that weighs each place differently.

    Values of different kinds of device do not compare.
    """
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        # A numpy array of it would make the shard's memory one that cannot be given back (policy.offload).
        return xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return weighted_sum(flat)


def weighted_sum(flat: torch.Tensor) -> int:
    """Sum of the 16-bit words times a number for each place, modulo 2**64, computed where the tensor [N] is."""
    words = flat.view(torch.int16)
    total = 0
    for start in range(0, words.numel(), CHUNK_NUMEL):
        part = words[start : start + CHUNK_NUMEL].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        total += int((part * (places * MULTIPLIER)).sum())
    return total % 2**64


def merge_checksums(parts: Iterable[Mapping[str, Mapping[int, int]]]) -> Checksums:
    """Checksums by tensor, from those of its parts by number that each rank sent."""
    merged: dict[str, dict[int, int]] = {}
    for sent in parts:
        for name, own in sent.items():
            merged.setdefault(name, {}).update(own)
    return {name: tuple(own[number] for number in sorted(own)) for name, own in merged.items()}


def require_arrived(plan: WeightPlan, sent: Checksums, loaded: Mapping[str, Loaded], policy_version: int) -> None:
    """Raise RolloutError unless every process of every engine, by name, took all tensors as they were sent."""
    unsent = sorted(plan.tensors.keys() - sent.keys())
    if unsent:
        raise RolloutError(
            f"the policy ranks did not send {sample_of(unsent)} of {len(plan.tensors)} tensors of policy version "
            f"{policy_version}: {_ADVICE}"
        )
    for process, own in loaded.items():
        missing = [name for name in sent if name not in own.checksums]
        if missing:
            raise RolloutError(
                f"{process} did not load {sample_of(missing)} of {len(sent)} tensors of policy version "
                f"{policy_version}: {_ADVICE}"
            )
        wrong = [name for name in sent if own.checksums[name] != sent[name]]
        if wrong:
            raise RolloutError(
                f"{process} loaded other bytes than the policy ranks sent in {sample_of(wrong)} of {len(sent)} "
                f"tensors of policy version {policy_version}: {_ADVICE}"
            )
        if own.policy_version != policy_version:
            raise RolloutError(
                f"{process} holds policy version {own.policy_version} after {policy_version} was published: "
                f"{_ADVICE}"
            )
