"""Prefect settings that matter, in one place: offline, patient with a slow start, and all files in one home."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path


def prefect_settings(home: Path) -> dict[str, str]:
    """Environment variables for a Prefect process whose files live in `home`."""
    return {
        "PREFECT_HOME": str(home),
        # 3.7.7 does not derive these two from PREFECT_HOME
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # what the stages say also belongs on Prefect's page
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,dapo_core,eval",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }


def apply_prefect_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set; call it before Prefect is imported."""
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    for name, value in prefect_settings(home).items():
        environment.setdefault(name, value)
