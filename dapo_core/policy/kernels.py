"""Operations of decoder layers for which a device may have a fused kernel, each beside the same in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dapo_core.device import Device
from dapo_core.errors import ConfigError

Operation = Callable[..., torch.Tensor]
ARCHITECTURES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
)  # whose operations are the twins below, in test_kernels.py
MOST_DIFFERENCE = 0.02  # of the twin's largest number: bfloat16 has 8 bits, and a kernel rounds elsewhere


def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """States over their root mean square, in float32, times the weight."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of the gate, times the other half."""
    return F.silu(gate) * up


def rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [b, H, n, D] turned by the angles of their positions [b, 1, n, D]; a pair is half of D apart."""
    half = states.shape[-1] // 2
    return states * cos + torch.cat((-states[..., half:], states[..., :half]), dim=-1) * sin


def _norms(model: nn.Module, operation: Operation) -> int:
    norms: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = lambda states, norm=norm: operation(states, norm.weight, norm.variance_epsilon)
    return len(norms)


def _mlps(model: nn.Module, operation: Operation) -> int:
    """Dense ones; experts, whose weights are one tensor, keep transformers' own products."""
    mlps: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    for mlp in mlps:
        mlp.forward = lambda states, mlp=mlp: mlp.down_proj(operation(mlp.gate_proj(states), mlp.up_proj(states)))
    return len(mlps)


def _rotations(model: nn.Module, operation: Operation) -> int:
    """Attention calls a function of its source file: all models of the architecture in the process get it."""

    def rotate(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return operation(query, cos, sin), operation(key, cos, sin)

    source: Any = sys.modules[type(model).__module__]
    source.apply_rotary_pos_emb = rotate
    return 1


@dataclass(frozen=True)
class Kernel:
    """One operation: itself in plain torch, how a model is given another, and shapes to compare the two on."""

    twin: Operation
    install: Callable[[nn.Module, Operation], int]  # returns in how many places
    shapes: Sequence[Sequence[int]]
    constants: tuple[float, ...] = ()  # arguments after the tensors


KERNELS = {
    "rms_norm": Kernel(rms_norm, _norms, [(2, 16, 128), (128,)], (1e-6,)),
    "swiglu": Kernel(swiglu, _mlps, [(2, 16, 128)] * 2),
    "rotary": Kernel(rotary, _rotations, [(1, 4, 16, 128), (1, 1, 16, 128), (1, 1, 16, 128)]),
}
# Attention has none: scaled_dot_product_attention is a fused kernel on CUDA and NPUs alike.


def install_kernels(model: nn.Module, chosen: Sequence[str], device: Device) -> None:
    """Give a model of transformers, before it is sharded, the operations that train.fused_kernels chooses.

    `auto` is all that the device has kernels for, if the architecture is known. A named operation is its twin
    where the device has no kernel. Raises ConfigError for a kernel that computes something else than its twin, and
    for a named one without a place in the model.
    """
    fused = device.fused_kernels()
    architecture = model.config.model_type  # type: ignore[union-attr]
    is_known = architecture in ARCHITECTURES and model.config.hidden_act == "silu"  # type: ignore[union-attr]
    found = [name for name in KERNELS if name in chosen or ("auto" in chosen and name in fused and is_known)]
    for name in found:
        if name in fused:
            require_parity(name, fused[name], device)
        places = KERNELS[name].install(model, fused.get(name, KERNELS[name].twin)) if is_known else 0
        if not places and name in chosen:
            raise ConfigError(
                f"train.fused_kernels names {name}, which this {architecture} model has no place for; leave it "
                f"out (known are {', '.join(ARCHITECTURES)}, with SiLU)"
            )


def require_parity(name: str, fused: Operation, device: Device) -> None:
    """Raise ConfigError unless values and gradients of a kernel are its twin's, in bfloat16 on the device."""
    kernel = KERNELS[name]
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).bfloat16() for shape in kernel.shapes]
    results = []
    for operation in (fused, kernel.twin):
        arguments = [tensor.to(device.torch_device()).requires_grad_() for tensor in tensors]
        output = operation(*arguments, *kernel.constants)
        output.backward(output.detach())
        gradients = (torch.zeros_like(each) if each.grad is None else each.grad for each in arguments)
        results.append([output.detach(), *gradients])
    for own, expected in zip(*results, strict=True):
        difference = float((own.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not difference <= MOST_DIFFERENCE:
            others = ",".join(other for other in KERNELS if other != name)
            raise ConfigError(
                f"the fused kernel {name} of this {device.kind} differs from plain torch by {difference:.2g} "
                f"of the largest number, more than the {MOST_DIFFERENCE:g} that bfloat16 explains: set "
                f"train.fused_kernels=[{others}], and report it with the versions of torch_npu and CANN"
            )
