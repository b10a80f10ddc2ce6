"""Compares checksums of the tensors that ranks sent with those that engines loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from dapo_core.errors import RolloutError
from dapo_core.model.names import sample_of
from dapo_core.weights.plan import PlannedTensor, WeightPlan

CHUNK_NUMEL = 2**22  # elements per checksum step on a device
MULTIPLIER = 0x1E3779B97F4A7C15  # odd, below 2**61: gives each position a different weight

_ADVICE = (
    "rollouts would use wrong weights; start the training again to continue from the last "
    "checkpoint"
)

Checksums = dict[str, tuple[int, ...]]  # by tensor: one checksum per rank's rows, in order


@dataclass(frozen=True)
class Loaded:
    """Policy version and checksums of the last sync of an engine process."""

    policy_version: int
    checksums: Checksums


def checksums(tensor: torch.Tensor, planned: PlannedTensor) -> tuple[int, ...]:
    """Return a checksum for each rank's part of the tensor."""
    return tuple(map(checksum, tensor.split([*planned.shard_rows])))


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit checksum of the bytes: xxh3 on a CPU, a position-weighted sum elsewhere.

    Checksums from different kinds of device are not comparable.
    """
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        # A numpy view would keep the shard's memory from being released (policy.offload).
        return xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return weighted_sum(flat)


def weighted_sum(flat: torch.Tensor) -> int:
    """Return the sum of 16-bit words [N] times position weights modulo 2**64, on the device."""
    words = flat.view(torch.int16)
    total = 0
    for start in range(0, words.numel(), CHUNK_NUMEL):
        part = words[start : start + CHUNK_NUMEL].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        total += int((part * (places * MULTIPLIER)).sum())
    return total % 2**64


def merge_checksums(parts: Iterable[Mapping[str, Mapping[int, int]]]) -> Checksums:
    """Combine the ranks' checksums, by tensor and part number, into checksums by tensor."""
    merged: dict[str, dict[int, int]] = {}
    for rank_parts in parts:
        for name, numbered in rank_parts.items():
            merged.setdefault(name, {}).update(numbered)
    return {name: tuple(dict(sorted(found.items())).values()) for name, found in merged.items()}


def require_arrived(
    plan: WeightPlan, sent: Checksums, loaded: Mapping[str, Loaded], policy_version: int
) -> None:
    """Raise RolloutError unless every engine process loaded all tensors exactly as sent."""
    unsent = sorted(plan.tensors.keys() - sent.keys())
    if unsent:
        raise RolloutError(
            f"the policy ranks did not send {sample_of(unsent)} of {len(plan.tensors)} tensors of "
            f"policy version {policy_version}: {_ADVICE}"
        )
    for process, result in loaded.items():
        missing = [name for name in sent if name not in result.checksums]
        wrong = [name for name in result.checksums if result.checksums[name] != sent.get(name)]
        if missing or wrong:
            fault = (
                "did not load" if missing else "loaded other bytes than the policy ranks sent for"
            )
            raise RolloutError(
                f"{process} {fault} {sample_of(missing or wrong)} of {len(sent)} tensors of policy "
                f"version {policy_version}: {_ADVICE}"
            )
        if result.policy_version != policy_version:
            raise RolloutError(
                f"{process} has policy version {result.policy_version} after {policy_version} was "
                f"published: {_ADVICE}"
            )
