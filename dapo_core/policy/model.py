"""A folder's causal language model under FSDP2, of which each rank reads only its own rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
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

from dapo_core.device import Device
from dapo_core.errors import ModelError
from dapo_core.model_folder import weight_files
from dapo_core.parameter_names import (
    COMPUTED_BUFFERS,
    FilePiece,
    file_pieces,
    match_files,
    sample_of,
    tied_names,
)
from dapo_core.policy.kernels import install_kernels
from dapo_core.pretrained import empty_causal_lm

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
) -> nn.Module:
    """The folder's causal language model under FSDP2, inside `wrap`, which keeps it as its attribute `causal_lm`.

    Each decoder layer is a unit, the wrapper is the root. A trainable model has float32 master weights and
    computes in `train.dtype`; others are stored in that dtype. Collective. Raises ModelError if the folder's
    tensors are not the model's parameters.
    """
    dtype = device.resolve_dtype(train.dtype)
    causal_lm = empty_causal_lm(model_path, torch.float32 if trainable else dtype, trust_remote_code)
    files = weight_files(model_path)
    _require_same_tensors(model_path, causal_lm, files)
    install_kernels(causal_lm, train.fused_kernels, device)
    layers = decoder_layers(causal_lm)
    model = wrap(causal_lm).train(trainable).requires_grad_(trainable)
    if train.gradient_checkpointing and trainable:
        causal_lm.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    if train.compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if trainable and dtype != torch.float32 else None, reduce_dtype=torch.float32
    )
    on_host = CPUOffloadPolicy(pin_memory=device.has_own_memory)
    options: Any = {
        "mesh": _mesh(device, train),
        "mp_policy": precision,
        "offload_policy": on_host if train.offload_shards else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=train.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # its backward comes at once
    _materialise(model, HOST if train.offload_shards else device.torch_device())
    _fill(causal_lm, files)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model that is not sharded yet; raises ModelError if none are found.

    Only `_no_split_modules` names their classes in transformers; test_sharded_model.py fails when it moves.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules), so "
            "it cannot be sharded by layer; set model.path to an architecture such as Qwen2, Qwen3, Qwen3-MoE or "
            "Llama"
        )
    return layers


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward pass without a backward pass leaves in every unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give the target the source's weights, in its own precision; both are sharded alike."""
    for model in (source, target):
        reshard(model)
    for weight, new in zip(target.parameters(), source.parameters(), strict=True):
        local_part(weight).copy_(local_part(new))


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_same_shapes(policy: nn.Module, reference: nn.Module, path: str | Path) -> None:
    """Raise ModelError unless the reference model, of the folder `path`, has the policy's tensors."""
    own, its = (
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for model in (policy, reference)
    )
    if own != its:
        name = min(own.items() ^ its.items())[0]
        raise ModelError(
            f"the reference model {path} is not of the policy's architecture and sizes: {name} has shape "
            f"{its.get(name)} there and {own.get(name)} in the policy; name another algorithm.kl.reference_path"
        )


def _require_same_tensors(model_path: str | Path, causal_lm: nn.Module, files: Mapping[str, Path]) -> None:
    """Raise ModelError unless the files hold every parameter, tied ones once, and no other weights."""
    _, missing, others = match_files(dict(causal_lm.named_parameters()), files)
    tied = tied_names(causal_lm)
    # Only this name in transformers says which tensors of published files a model leaves out (test_packing.py).
    ignored = [*(getattr(causal_lm, "_keys_to_ignore_on_load_unexpected", None) or ()), COMPUTED_BUFFERS]
    unexpected = [
        name for name in others if name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing or unexpected:
        raise ModelError(
            f"the files of {model_path} and {type(causal_lm).__name__} do not hold the same tensors: "
            f"{sample_of(missing)} parameters of the model are not in the files, {sample_of(unexpected)} tensors "
            "of the files are not in the model; the folder is incomplete, or engines and ranks would name this "
            "architecture's weights differently: set model.path to a complete folder of another one, such as "
            "Qwen2, Qwen3, Qwen3-MoE or Llama"
        )


def _mesh(device: Device, train: TrainConfig) -> DeviceMesh:
    """One dimension of shards, or copies x shards where `train.fsdp_size` asks for several copies (HSDP)."""
    num_ranks = torch.distributed.get_world_size()
    size = train.fsdp_size or num_ranks
    if size == num_ranks:
        return init_device_mesh(device.kind, (num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.kind, (num_ranks // size, size), mesh_dim_names=("replicate", "shard"))


def _materialise(model: nn.Module, place: torch.device) -> None:
    """Allocate this rank's shards there; buffers keep their values, on the device where fully_shard put them."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=place)
    for name, buffer in buffers.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)


@torch.no_grad()
def _fill(causal_lm: nn.Module, files: Mapping[str, Path]) -> None:
    """Read this rank's rows of every parameter; raises ModelError for a tensor of another shape."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, parameter in causal_lm.named_parameters():
            assert isinstance(parameter, DTensor)
            local, start = parameter.to_local(), first_row(parameter)
            whole = torch.empty(parameter.shape, device="meta")
            for piece in file_pieces(name, parameter.shape, files):
                path = files[piece.file_name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                stored = _stored(opened[path], piece.file_name, piece.view(whole).shape, path)
                _copy_rows(piece, stored, local, start)


def _stored(file: Any, name: str, shape: torch.Size, path: Path) -> Any:
    """The tensor in the open file, before it is read."""
    try:
        stored = file.get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"{name} cannot be read from {path}: {error}; fetch the model again") from error
    if tuple(stored.get_shape()) != shape:
        raise ModelError(
            f"{name} in {path} has shape {stored.get_shape()}, the model needs {list(shape)}: config.json and "
            "weights belong to different models; set model.path to an unmodified folder"
        )
    return stored


def first_row(parameter: DTensor) -> int:
    """The row of the whole parameter at which this rank's shard starts; FSDP2 splits like torch.chunk."""
    dim = next(index for index, placement in enumerate(parameter.placements) if placement.is_shard())
    size = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
    return min(parameter.device_mesh.get_local_rank(dim) * size, parameter.shape[0])


def _copy_rows(piece: FilePiece, stored: Any, local: torch.Tensor, start: int) -> None:
    """Read into `local`, a shard that starts at row `start`, its rows of the stored tensor."""
    if piece.expert is None:
        local.copy_(stored[start : start + local.shape[0]])
    elif start <= piece.expert < start + local.shape[0]:
        piece.view(local, start).copy_(stored[:])
