"""bench/gpu.py as one command, on a CPU with tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.timeout(1500)  # each part may take its share on a busy machine
def test_one_command_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, BENCH / "gpu.py", tmp_path, "--device", "cpu", "--tiny"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert not [row for row in report["rows"] if "error" in row]
    assert {row["part"] for row in report["rows"]} == set(report["seconds"])
    page = (tmp_path / "gpu.md").read_text()
    assert "checksums |\n" in page
    assert "| step 2 |" in page
