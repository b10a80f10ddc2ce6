"""The causal language model of a folder, sharded with FSDP2; each rank reads its own rows of the files only."""

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
from dapo_core.pretrained import empty_causal_lm

if TYPE_CHECKING:
    from dapo_core.config.training import TrainConfig

HOST = torch.device("cpu")


def load_sharded(
    model_path: str | Path,
    train: TrainConfig,
    device: Device,
    wrap: Callable[[nn.Module], nn.Module],
    trainable: bool = True,
) -> nn.Module:
    """The folder's causal language model inside `wrap`, which keeps it as its attribute `causal_lm`, under FSDP2.

    Each decoder layer is a unit, the wrapper the root. A trainable model has float32 master weights and computes
    in `train.dtype`; another one is kept in that dtype. Collective. Raises ModelError when the folder's tensors
    are not the model's parameters.
    """
    dtype = device.resolve_dtype(train.dtype)
    causal_lm = empty_causal_lm(model_path, torch.float32 if trainable else dtype)
    files = weight_files(model_path)
    _require_same_tensors(model_path, causal_lm, files)
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
    mesh = _mesh(device, train)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=train.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)  # its backward comes at once
    _materialise(model, device)
    _fill(causal_lm, files)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, before they are sharded: modules of the classes that must not be split.

    Raises ModelError when the architecture names none, or they are not in it.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not say which of its modules are decoder layers (_no_split_modules), so "
            "it cannot be sharded by layer; set model.path to an architecture such as Qwen2, Qwen3, Qwen3-MoE or "
            "Llama"
        )
    return layers


def reshard(model: nn.Module) -> None:
    """Free the whole weights that a forward pass without a backward pass leaves in every unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _require_same_tensors(model_path: str | Path, causal_lm: nn.Module, files: Mapping[str, Path]) -> None:
    """Raise ModelError unless the files hold every parameter, tied ones once, and nothing else that matters."""
    _, missing, others = match_files(dict(causal_lm.named_parameters()), files)
    tied = tied_names(causal_lm)
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
    """All ranks in one dimension, or copies x shards where `train.fsdp_size` asks for several copies (HSDP)."""
    num_ranks = torch.distributed.get_world_size()
    size = train.fsdp_size or num_ranks
    if size == num_ranks:
        return init_device_mesh(device.kind, (num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.kind, (num_ranks // size, size), mesh_dim_names=("replicate", "shard"))


def _materialise(model: nn.Module, device: Device) -> None:
    """Memory on the device for this rank's shards; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device.torch_device())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


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
    """The tensor in the open file, not read yet."""
    try:
        stored = file.get_slice(name)
    except SafetensorError as error:
        raise ModelError(f"{name} cannot be read from {path}: {error}; fetch the model again") from error
    if tuple(stored.get_shape()) != shape:
        raise ModelError(
            f"{name} in {path} has shape {stored.get_shape()}, the model needs {list(shape)}: config.json and "
            "weights belong to different models; set model.path to a folder as it was published"
        )
    return stored


def first_row(parameter: DTensor) -> int:
    """The row of the whole parameter that is the first of this rank's shard; FSDP2 cuts as torch.chunk does."""
    dim = next(index for index, placement in enumerate(parameter.placements) if placement.is_shard())
    size = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
    return min(parameter.device_mesh.get_local_rank(dim) * size, parameter.shape[0])


def _copy_rows(piece: FilePiece, stored: Any, local: torch.Tensor, start: int) -> None:
    """Copy the rows of the stored tensor that `local`, a shard from row `start` on, holds; reads no others."""
    if piece.expert is None:
        local.copy_(stored[start : start + local.shape[0]])
    elif start <= piece.expert < start + local.shape[0]:
        piece.view(local, start).copy_(stored[:])


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move the shards of an FSDP2 model; the parameters stay the objects that the optimizer knows."""
    before = next(model.parameters()).device
    model.to(device)
    _free_cached(before, device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move AdamW's moments; step counts stay where AdamW put them, on the host."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = value.to(device)
    _free_cached(optimizer.param_groups[0]["params"][0].device, device)


def _free_cached(before: torch.device, device: torch.device) -> None:
    """Give the memory that torch caches back to the device that was left, for other processes."""
    if before.type not in ("cpu", "meta") and before != device:
        getattr(torch, before.type).empty_cache()
