"""Distinguishes a cancelled flow run from a worker that shuts down."""

from __future__ import annotations

import logging
import os
import time

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

logger = logging.getLogger(__name__)

WORKER_VARIABLE = "PREFECT__FLOW_RUN_ID"  # set by a worker in the process of a flow run
ANSWER_SECONDS = 15.0  # a cancelling worker kills the process after 30
RETRY_SECONDS = 0.5


def is_worker_restart(error: BaseException) -> bool:
    """True if the error is a SIGTERM from a worker that shuts down, not from a person or a
    cancellation.

    If the server does not answer within ANSWER_SECONDS, the flow run counts as not cancelled.
    """
    if not isinstance(error, TerminationSignal) or WORKER_VARIABLE not in os.environ:
        return False
    deadline = time.monotonic() + ANSWER_SECONDS
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        while True:
            try:
                return not _is_cancelled(max(RETRY_SECONDS, deadline - time.monotonic()))
            except (httpx.HTTPError, PrefectException) as unanswered:
                if time.monotonic() + RETRY_SECONDS > deadline:
                    logger.warning(
                        "cannot ask Prefect whether %s is cancelled: %s", flow_run.id, unanswered
                    )
                    return True
            time.sleep(RETRY_SECONDS)


def _is_cancelled(timeout_seconds: float) -> bool:
    with get_client(sync_client=True, httpx_settings={"timeout": timeout_seconds}) as client:
        state = client.read_flow_run(flow_run.id).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())
