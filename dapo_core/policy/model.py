"""Loads a causal language model under FSDP2; each rank reads only its own rows of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from dapo_core.errors import ModelError
from dapo_core.machine.device import Device
from dapo_core.model.lora import base_name, first_values, is_adapter
from dapo_core.model.names import FilePiece, file_pieces
from dapo_core.model.sharding import first_row, local_part
from dapo_core.model.tensors import OTHER_MODEL, weight_files
from dapo_core.policy.experts import install_experts, split_experts
from dapo_core.policy.kernels import install_kernels
from dapo_core.policy.requirements import freeze, trainable_model

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig

HOST = torch.device("cpu")


def load_sharded(
    model_path: str | Path,
    train: TrainConfig,
    device: Device,
    wrap: Callable[[nn.Module], nn.Module],
    trainable: bool = True,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Load the folder's model under FSDP2, inside `wrap`, which stores it as `causal_lm`.

    Each decoder layer is an FSDP unit; the wrapper is the root. Under train.expert_parallel, so are
    the experts of a layer. A trainable model has float32
    master weights and computes in `train.dtype`; others are stored in that dtype, and so are the
    frozen weights under train.lora, whose adapters are the float32 master weights. Collective.
    Raises ModelError like trainable_model.
    """
    dtype = device.resolve_dtype(train.dtype)
    lora = train.lora if trainable and train.lora.rank else None
    stored = torch.float32 if trainable and lora is None else dtype
    parallel = train.sequence_parallel, train.expert_parallel
    causal_lm = trainable_model(model_path, *parallel, stored, trust_remote_code, lora)
    install_experts(causal_lm)
    install_kernels(causal_lm, train.fused_kernels, device)
    layers = decoder_layers(causal_lm)
    model = wrap(causal_lm).train(trainable)
    if lora is None:
        model.requires_grad_(trainable)
    if trainable:
        freeze(causal_lm, train.freeze)
    if train.gradient_checkpointing and trainable:
        causal_lm.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    if train.compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    computed = dtype if trainable and dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    _shard(model, layers, train, device, precision)
    _materialise(model, HOST if train.offload_shards else device.torch_device())
    _fill(causal_lm, weight_files(model_path), seed)
    # other groups have torch's shorter time limit, so all wait for the slowest reader here
    torch.distributed.all_reduce(torch.zeros(1, device=device.torch_device()))
    return model


def _shard(
    model: nn.Module,
    layers: list[nn.Module],
    train: TrainConfig,
    device: Device,
    precision: MixedPrecisionPolicy,
) -> None:
    """Shard the root, each layer and, under expert parallelism, the experts of each layer."""
    on_host = CPUOffloadPolicy(pin_memory=device.has_own_memory)
    offload = on_host if train.offload_shards else OffloadPolicy()
    free = train.reshard_after_forward
    if train.expert_parallel > 1:
        shape = (torch.distributed.get_world_size() // train.expert_parallel, train.expert_parallel)
        mesh = init_device_mesh(device.kind, shape, mesh_dim_names=("shard", "expert"))
        uncast = replace(precision, cast_forward_inputs=False)  # keeps the routers' precision
        for experts in split_experts(model.causal_lm, mesh["expert"]):
            fully_shard(
                experts,
                mesh=mesh["shard"],
                reshard_after_forward=free,
                mp_policy=uncast,
                offload_policy=offload,
            )
    options: Any = {"mesh": _mesh(device, train), "mp_policy": precision, "offload_policy": offload}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=free, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # its backward pass follows at once


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of an unsharded model; raises ModelError if there are none.

    transformers names their classes only in the private `_no_split_modules`; test_private_parts.py
    guards it.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules), so it "
            f"cannot be sharded by layer; {OTHER_MODEL}"
        )
    return layers


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass leaves gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the source's weights to the target, in its precision. Both must be sharded alike."""
    for model in (source, target):
        reshard(model)
    for weight, new in zip(target.parameters(), source.parameters(), strict=True):
        local_part(weight).copy_(local_part(new))


def require_same_shapes(policy: nn.Module, reference: nn.Module, path: str | Path) -> None:
    """Raise ModelError unless the reference model, from `path`, has the policy's shapes."""
    policy_shapes, reference_shapes = (
        {
            base_name(name): tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if not is_adapter(name)
        }
        for model in (policy, reference)
    )
    if policy_shapes != reference_shapes:
        name = min(policy_shapes.items() ^ reference_shapes.items())[0]
        raise ModelError(
            f"the reference model {path} does not match the policy's architecture and sizes: "
            f"{name} has shape {reference_shapes.get(name)} in the reference and "
            f"{policy_shapes.get(name)} in the policy; set another algorithm.kl.reference_path"
        )


def _mesh(device: Device, train: TrainConfig) -> DeviceMesh:
    """Return a 1D mesh of shards, or 2D of replicas x shards if train.fsdp_size is set (HSDP)."""
    num_ranks = torch.distributed.get_world_size()
    size = train.fsdp_size or num_ranks
    if size == num_ranks:
        return init_device_mesh(device.kind, (size,), mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    return init_device_mesh(device.kind, (num_ranks // size, size), mesh_dim_names=names)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate this rank's shards on the device; buffers keep their values and device."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer)


@torch.no_grad()
def _fill(causal_lm: nn.Module, files: Mapping[str, Path], seed: int) -> None:
    """Read this rank's rows of every parameter; new adapters get values from the seed."""
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, parameter in causal_lm.named_parameters():
            assert isinstance(parameter, DTensor)
            local, start = parameter.to_local(), first_row(parameter)
            if is_adapter(name):
                values = first_values(name, parameter.shape, generator)
                local.copy_(values[start : start + local.shape[0]])
                continue
            for piece in file_pieces(base_name(name), parameter.shape, files):
                path = files[piece.file_name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                _copy_rows(piece, opened[path].get_slice(piece.file_name), local, start)


def _copy_rows(piece: FilePiece, stored: Any, local: torch.Tensor, start: int) -> None:
    """Read the rows of the stored tensor that belong to `local`, whose first row is `start`."""
    if piece.expert is None:
        piece.view(local).copy_(stored[start : start + local.shape[0]])
    elif start <= piece.expert < start + local.shape[0]:
        piece.view(local, start).copy_(stored[:])
