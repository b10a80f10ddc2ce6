"""Builds the renamed CPU, and makes it this process's `torch.npu`, with what torch_npu has in
Python.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("device.cpp")


def build(folder: Path) -> Path:
    """The shared library of device.cpp, in the folder; takes about 15 s."""
    home = Path(torch.__file__).parent
    library = folder / "renamed_cpu.so"
    options = [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{home / 'include'}",
        f"-L{home / 'lib'}",
    ]
    libraries = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(library), *libraries], check=True)
    return library


def install(library: Path) -> None:
    """Make the device `npu` of this process, for good, with gloo as its `hccl`."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    sys.modules["torch_npu"] = fake_torch_npu()
    # The CPU tensors are those that collectives on the device hand on.
    torch.distributed.Backend.register_backend("hccl", _gloo, devices=["npu", "cpu"])


def fake_torch_npu() -> Any:
    """Its fused kernels, with its arguments and results, in plain torch; `called` counts them."""
    module: Any = types.ModuleType("torch_npu")
    module.called = Counter()

    def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
        module.called["npu_rms_norm"] += 1
        rstd = (self.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return (self * rstd * gamma).to(self.dtype), rstd

    def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
        module.called["npu_swiglu"] += 1
        gate, up = self.chunk(2, dim)
        return gate * gate.sigmoid() * up

    def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
        assert rotary_mode == "half"
        module.called["npu_rotary_mul"] += 1
        first, second = input.chunk(2, -1)
        return input * r1 + torch.cat([-second, first], -1) * r2

    def npu_grouped_matmul(
        x: list[Tensor],
        weight: list[Tensor],
        *,
        group_list: Tensor,
        split_item: int = 0,
        group_type: int | None = None,
    ) -> list[Tensor]:
        """One tensor each, in parts that end at group_list; without gradients."""
        module.called["npu_grouped_matmul"] += 1
        (left,), (right,) = x, weight
        assert (split_item, group_list.dtype) == (3, torch.int64)
        assert left.dtype == right.dtype
        ends = group_list.tolist()
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        with torch.no_grad():
            if group_type == 0:  # over rows
                assert left.is_contiguous()
                assert right.is_contiguous() or right.mT.is_contiguous()
                rows = [left[part] @ right[number] for number, part in enumerate(parts)]
                return [torch.cat(rows)]
            assert group_type == 2  # over the summed axis; CANN wants a transposed left side
            assert left.T.is_contiguous()
            assert right.is_contiguous()
            return [torch.stack([left[:, part] @ right[part] for part in parts])]

    module.__dict__.update(
        npu_rms_norm=npu_rms_norm,
        npu_swiglu=npu_swiglu,
        npu_rotary_mul=npu_rotary_mul,
        npu_grouped_matmul=npu_grouped_matmul,
    )
    return module


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


class _Stream:
    """A stream, or an event: everything is done when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def nothing(self, *_: Any) -> None:
        """There is nothing to wait for."""

    wait_stream = wait_event = synchronize = record = wait = nothing


def _module() -> types.ModuleType:
    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    module: Any = types.ModuleType("torch.npu")
    module.__dict__.update(
        Stream=_Stream,
        Event=_Stream,
        stream=stream,
        current_stream=_Stream,
        default_stream=_Stream,
        synchronize=lambda *_: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        get_device_name=lambda _=0: "Ascend910B3",
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        manual_seed_all=lambda _: None,
        get_rng_state=lambda _="npu": torch.random.get_rng_state(),
        set_rng_state=lambda state, _="npu": torch.random.set_rng_state(state),
        mem_get_info=lambda _=0: (48 * 1024**3, 64 * 1024**3),
        get_device_properties=lambda _: types.SimpleNamespace(total_memory=64 * 1024**3),
        max_memory_allocated=lambda: 3 * 1024**3,
        max_memory_reserved=lambda: 4 * 1024**3,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    return module
