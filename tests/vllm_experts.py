"""Skips tests if the installed vLLM cannot run mixture-of-experts models on this CPU."""

from pathlib import Path

import pytest
from packaging.version import Version

from dapo_core.machine.versions import installed

_IS_OLD = Version(installed("vllm") or "0") < Version("0.24")
# vLLM 0.23 multiplies float32 experts by a kernel for AVX-512, but not where the CPU has AMX too.
_FLAGS = set(Path("/proc/cpuinfo").read_text().split())

runs_experts = pytest.mark.skipif(
    _IS_OLD and ("avx512f" not in _FLAGS or "amx_tile" in _FLAGS),
    reason="vLLM 0.23 runs float32 experts on CPUs with AVX-512 and without AMX only",
)
