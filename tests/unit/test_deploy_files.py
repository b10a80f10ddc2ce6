"""The files in deploy/: systemd accepts the units, and Prefect any password of the compose file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.settings import Settings
from sqlalchemy.engine import make_url

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = shutil.which("systemd-analyze")


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_without_warnings(tmp_path: Path) -> None:
    """systemd only warns about a misspelt key and ignores it; a missing program is an error."""
    project = tmp_path / "dapo-pipeline"  # the clone's location in the units
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


def test_any_password_works_for_the_compose_database(monkeypatch: pytest.MonkeyPatch) -> None:
    password = "p@ss:/%40+ #?"
    server = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"][
        "server"
    ]
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, value.replace("${DAPO_PASSWORD}", password))
    found = Settings().server.database.connection_url
    assert found is not None
    url = make_url(found.get_secret_value())
    assert (url.drivername, url.host, url.database) == ("postgresql+asyncpg", "database", "dapo")
    assert (url.username, url.password) == ("dapo", password)
