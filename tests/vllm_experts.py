"""Skips tests if the installed vLLM cannot run mixture-of-experts models on this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from dapo_core.machine.versions import installed

_IS_OLD = Version(installed("vllm") or "0") < Version("0.24")
_HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text().split()

runs_experts = pytest.mark.skipif(
    _IS_OLD and not _HAS_AVX512,
    reason="vLLM 0.23 runs experts on CPUs with AVX-512 only",
)
