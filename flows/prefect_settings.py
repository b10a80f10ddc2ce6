"""Prefect settings for `dapo run`, for the services of `dapo up`, and for tests.

Flow runs inherit the environment of their worker, so these settings apply to them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

LEASES = "prefect.server.concurrency.lease_storage.filesystem"
THIS_MACHINE = "127.0.0.1,localhost,::1"
PROJECT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_CONFIG_PATH": str(Path(__file__).with_name("logging.yml")),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Prefect's minimum; keep `within` in flows/crashed_runs.yaml in step with it
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # leases in memory would be lost when the server restarts, leaving their slots occupied
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
    # A run starts within 5 s instead of 10. Not shorter: a worker exits if the server is away for
    # 44 intervals.
    "PREFECT_WORKER_QUERY_SECONDS": "5",
    "PREFECT_RUNNER_POLL_FREQUENCY": "5",
}


def apply_prefect_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Apply the settings that the user has not set; call this before importing Prefect."""
    home = Path(environment.setdefault("PREFECT_HOME", "~/.prefect")).expanduser()
    environment["PREFECT_HOME"] = str(home)
    settings = {
        **PROJECT_SETTINGS,
        # Prefect 3.7.7 does not derive these from PREFECT_HOME.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
    }
    for name, value in settings.items():
        environment.setdefault(name, value)
    environment["no_proxy"] = no_proxy(environment)


def no_proxy(environment: Mapping[str, str]) -> str:
    """Return a `no_proxy` with this machine: Prefect's client asks a proxy for any server."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    is_covered = given == "*" or given.endswith(THIS_MACHINE)
    return given if is_covered else f"{given},{THIS_MACHINE}".lstrip(",")
