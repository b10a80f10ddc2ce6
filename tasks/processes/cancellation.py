"""Whether a flow run was cancelled, or only its process is told to end."""

from __future__ import annotations

import logging
import os

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

logger = logging.getLogger(__name__)

WORKER_VARIABLE = "PREFECT__FLOW_RUN_ID"  # set by a worker for the process that executes a flow run
ANSWER_SECONDS = 2.0  # a worker that is restarted kills its flow processes after 3


def is_worker_restart(error: BaseException) -> bool:
    """Whether `error` is the SIGTERM of a worker that ends, not one of a person or of a cancelled flow run.

    A flow run whose state cannot be asked for counts as not cancelled.
    """
    return isinstance(error, TerminationSignal) and WORKER_VARIABLE in os.environ and not _is_cancelled()


def _is_cancelled() -> bool:
    limits = {"timeout": ANSWER_SECONDS}
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings=limits) as client,
        ):
            state = client.read_flow_run(flow_run.id).state
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("Prefect does not say whether flow run %s is cancelled: %s", flow_run.id, error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
