"""The files in deploy/: systemd takes the units as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = shutil.which("systemd-analyze")


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_without_a_word(tmp_path: Path) -> None:
    """A misspelt key is only a warning to systemd, which then ignores it; a missing program is an error."""
    project = tmp_path / "dapo-pipeline"  # where the units say that the clone is
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "prefect").symlink_to(Path(sys.executable).parent / "prefect")
    (project / "deploy").symlink_to(ROOT / "deploy")
    done = subprocess.run(
        [str(SYSTEMD), "--user", "verify", *map(str, sorted((ROOT / "deploy").glob("*.service")))],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
