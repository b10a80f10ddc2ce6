"""Fused kernels for operations of decoder layers, each with a reference in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dapo_core.errors import ConfigError
from dapo_core.machine.device import Device
from dapo_core.policy.experts import gated_experts, multiply_experts

Operation = Callable[..., torch.Tensor]
# their decoders use exactly these operations; see test_kernels.py
ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# relative to the largest value: bfloat16 has 8 bits, and kernels round differently
MAX_DIFFERENCE = 0.02


def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm, computed in float32."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the last dimension, times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [b, H, n, D], cos and sin [b, 1, n, D]; pairs are D / 2 apart."""
    half = states.shape[-1] // 2
    return states * cos + torch.cat((-states[..., half:], states[..., :half]), dim=-1) * sin


def _modules(model: Any, suffix: str) -> list[Any]:
    """Return the decoder's modules whose class name ends with the suffix; none of a tower."""
    modules = model.get_decoder().modules()
    return [module for module in modules if type(module).__name__.endswith(suffix)]


def _norms(model: nn.Module, operation: Operation) -> int:
    norms = _modules(model, "RMSNorm")
    for norm in norms:
        norm.forward = lambda x, norm=norm: operation(x, norm.weight, norm.variance_epsilon)
    return len(norms)


def _gates(model: nn.Module, operation: Operation) -> int:
    """In dense MLPs and in experts."""
    mlps, experts = _modules(model, "MLP"), gated_experts(model)
    for mlp in mlps:
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(
            operation(torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1))
        )
    for module in experts:
        module._apply_gate = operation
    return len(mlps) + len(experts)


def _experts(model: nn.Module, operation: Operation) -> int:
    experts = gated_experts(model)
    for module in experts:
        module.multiply = operation
    return len(experts)


def _rotations(model: nn.Module, operation: Operation) -> int:
    """Patches a module-level function: it affects all models of the architecture here.

    transformers 5.5.4 has another one for Qwen2.5-VL, which is kept.
    """

    def rotate(
        query: Any, key: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return operation(query, cos, sin), operation(key, cos, sin)

    source: Any = sys.modules[type(model).__module__]
    if not hasattr(source, "apply_rotary_pos_emb"):
        return 0
    source.apply_rotary_pos_emb = rotate
    return 1


@dataclass(frozen=True)
class Kernel:
    """One replaceable operation."""

    reference: Operation  # in plain torch
    install: Callable[[nn.Module, Operation], int]  # returns the number of replacements
    shapes: Sequence[Sequence[int]]  # of test inputs
    constants: tuple[Any, ...] = ()  # arguments after these tensors
    is_general: bool = False  # for architectures beyond ARCHITECTURES too


KERNELS = {
    "rms_norm": Kernel(rms_norm, _norms, [(2, 16, 128), (128,)], (1e-6,)),
    "swiglu": Kernel(swiglu, _gates, [(2, 16, 256)]),
    "rotary": Kernel(rotary, _rotations, [(1, 4, 16, 128), (1, 1, 16, 128), (1, 1, 16, 128)]),
    "experts": Kernel(
        multiply_experts,
        _experts,
        [(16, 128), (4, 64, 128)],
        (torch.tensor([3, 3, 12, 16], dtype=torch.int32),),  # one expert has no rows
        is_general=True,
    ),
}
# Attention needs none: scaled_dot_product_attention is fused on both CUDA and NPUs.


def install_kernels(model: nn.Module, chosen: Sequence[str], device: Device) -> None:
    """Install the kernels of train.fused_kernels in an unsharded transformers model.

    `auto` installs all kernels of the device if the architecture is known. A named operation
    without a kernel uses its reference. Raises ConfigError if a kernel differs from its reference,
    or a named operation is not in the model.
    """
    fused = device.fused_kernels()
    config: Any = model.config
    is_known = config.model_type in ARCHITECTURES and config.get_text_config().hidden_act == "silu"
    installed = []
    for name, kernel in KERNELS.items():
        if name not in chosen and not ("auto" in chosen and name in fused):
            continue
        is_usable = is_known or kernel.is_general
        if is_usable and kernel.install(model, fused.get(name, kernel.reference)):
            installed.append(name)
        elif name in chosen:
            raise ConfigError(
                f"train.fused_kernels names {name}, which cannot be replaced in this "
                f"{config.model_type} model; remove it (supported: {', '.join(ARCHITECTURES)}, "
                "with SiLU)"
            )
    for name in installed:
        if name in fused:
            require_parity(name, fused[name], device, [each for each in installed if each != name])


def require_parity(name: str, fused: Operation, device: Device, others: Sequence[str] = ()) -> None:
    """Raise ConfigError unless a kernel's values and gradients match its reference.

    others: the model's other kernels, which the error proposes.
    """
    kernel, place = KERNELS[name], device.torch_device()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in kernel.shapes]
    results = []
    for operation in (fused, kernel.reference):
        arguments = [tensor.to(place).requires_grad_() for tensor in tensors]
        constants = [
            each.to(place) if isinstance(each, torch.Tensor) else each for each in kernel.constants
        ]
        output = operation(*arguments, *constants)
        output.backward(output.detach())
        gradients = (
            torch.zeros_like(each) if each.grad is None else each.grad for each in arguments
        )
        results.append([output.detach(), *gradients])
    for actual, expected in zip(*results, strict=True):
        actual, expected = actual.float(), expected.float()
        difference = float((actual - expected).abs().max() / expected.abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise ConfigError(
                f"the fused kernel {name} of this {device.kind} differs from plain torch by "
                f"{difference:.2g} of the largest value, more than the {MAX_DIFFERENCE:g} that "
                f"bfloat16 explains: set train.fused_kernels=[{','.join(others)}], and report it "
                "with the versions of torch_npu and CANN"
            )
