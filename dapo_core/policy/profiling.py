"""Profiler traces of selected steps on a rank, written by torch's or torch_npu's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_core.machine.device import Device

PROFILES = "profiles"  # folder in the training output


def trace_name(step: int, rank: int) -> str:
    """Return the file name of one rank's trace of one step, for Perfetto or chrome://tracing."""
    return f"step_{step:06d}_rank_{rank}.json"


class Profiled:
    """Mixin for a process that can trace itself between two calls."""

    device: Device
    _profiler: Any = None

    def begin_profile(self) -> None:
        """Start tracing."""
        self._profiler = self.device.profiler()
        self._profiler.start()

    def end_profile(self, path: str) -> None:
        """Stop tracing and write the trace. Raises OSError if the path cannot be written."""
        self.device.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(path)
