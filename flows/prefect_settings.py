"""Prefect settings that matter, in one place: for `dapo run`, for the services of `dapo up`, and for tests.

A worker hands its own environment to the flow runs it starts, so what it has holds for them too.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path


def project_settings() -> dict[str, str]:
    """Environment variables for every Prefect process of this project, wherever its files are."""
    return {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # what the stages say also belongs on Prefect's page
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,dapo_core,eval",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # the shortest Prefect takes; `within` in flows/services/crashed_runs.yaml goes with it
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # leases in memory are never given back once the server has restarted
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # a run begins within seconds of being asked for; Prefect's default is 10. Not less: a worker ends when its
        # server has been away for 44 of these
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        "PREFECT_RUNNER_POLL_FREQUENCY": "5",
    }


def prefect_settings(home: Path) -> dict[str, str]:
    """Environment variables for a Prefect process whose files live in `home`."""
    return {
        "PREFECT_HOME": str(home),
        # 3.7.7 does not derive these from PREFECT_HOME
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_LOGGING_CONFIG_PATH": str(home / "logging.yml"),
        **project_settings(),
    }


def apply_prefect_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set; call it before Prefect is imported."""
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    for name, value in prefect_settings(home).items():
        environment.setdefault(name, value)
