"""dtype `auto` on a CPU is the model's dtype if its kernels run, which a child process tests once."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from dapo_core.engines import cpu_dtype
from dapo_core.engines.cpu_dtype import runs_bfloat16
from tasks.config.serve import ServeConfig
from tasks.serve_model.command import with_supported_dtype
from tests.tiny_models import build_tiny_qwen3


@pytest.mark.parametrize(
    ("exit_code", "runs", "is_cached"),
    [
        (0, True, True),
        (-signal.SIGILL, False, True),
        (-signal.SIGKILL, True, False),
        (1, True, False),
    ],
)
def test_a_kernel_crash_is_cached_and_other_failures_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_code: int, runs: bool, is_cached: bool
) -> None:
    monkeypatch.setattr(cpu_dtype, "_exit_code", lambda: exit_code)
    assert runs_bfloat16(tmp_path) is runs
    monkeypatch.setattr(cpu_dtype, "_exit_code", lambda: 0 if runs is False else -signal.SIGILL)
    assert runs_bfloat16(tmp_path) is (runs if is_cached else not runs)


def test_auto_becomes_float32_only_if_the_models_dtype_crashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build_tiny_qwen3(tmp_path / "model")  # float32: nothing is tested
    half = Path(shutil.copytree(model, tmp_path / "half"))
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tried = []
    monkeypatch.setattr("tasks.serve_model.command.runs_bfloat16", lambda: bool(tried.append(1)))
    assert with_supported_dtype(ServeConfig(), model).dtype == "auto"
    assert with_supported_dtype(ServeConfig(dtype="bfloat16"), half).dtype == "bfloat16"
    assert tried == []
    assert with_supported_dtype(ServeConfig(), half).dtype == "float32"
    assert tried == [1]
