"""Traces of chosen steps: what a rank does, phase by phase, as torch's profiler or torch_npu's writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_core.device import Device

PROFILES = "profiles"  # folder of the training's output


def trace_name(step: int, rank: int) -> str:
    """The file of one rank's trace of one step, which Perfetto and chrome://tracing open."""
    return f"step_{step:06d}_rank_{rank}.json"


class Profiled:
    """A process that can trace itself between two calls; `device` is its own."""

    device: Device
    _profiler: Any = None

    def begin_profile(self) -> None:
        """Trace from now on."""
        self._profiler = self.device.profiler()
        self._profiler.start()

    def end_profile(self, path: str) -> None:
        """Write the trace. Raises OSError if the path cannot be written."""
        self.device.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(path)
