"""Whether a flow run was cancelled, or only its process is told to end."""

from __future__ import annotations

import logging
import os
import time
from typing import Literal

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

try:
    from prefect._internal.control_listener import get_intent
except ImportError:  # an earlier Prefect, or a later one

    def get_intent() -> Literal["cancel"] | None:
        return None


logger = logging.getLogger(__name__)

WORKER_VARIABLE = "PREFECT__FLOW_RUN_ID"  # set by a worker for the process that executes a flow run
ANSWER_SECONDS = 15.0  # one that cancels kills us after 30; one that restarts after 3, and training goes on
RETRY_SECONDS = 0.5


def is_worker_restart(error: BaseException) -> bool:
    """Whether `error` is the SIGTERM of a worker that ends, not one of a person or of a cancelled flow run.

    A worker that cancels says so before its SIGTERM; if nothing came, the server is asked. A flow run whose state
    cannot be had counts as not cancelled.
    """
    if not isinstance(error, TerminationSignal) or WORKER_VARIABLE not in os.environ:
        return False
    return get_intent() != "cancel" and not _is_cancelled()


def _is_cancelled() -> bool:
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        limits = {"timeout": max(RETRY_SECONDS, deadline - time.monotonic())}
        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
                get_client(sync_client=True, httpx_settings=limits) as client,
            ):
                state = client.read_flow_run(flow_run.id).state
            return state is not None and (state.is_cancelling() or state.is_cancelled())
        except (httpx.HTTPError, PrefectException) as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                logger.warning("Prefect does not say whether flow run %s is cancelled: %s", flow_run.id, error)
                return False
        time.sleep(RETRY_SECONDS)
