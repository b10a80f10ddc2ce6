"""Training shown as Prefect's concurrency limit `dapo-training`: a picture of the kernel lock, no condition."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import ConcurrencyLimitWithLeaseResponse
from prefect.settings import get_current_settings

logger = logging.getLogger(__name__)

LIMIT = "dapo-training"
LEASE_SECONDS = 180.0  # a killed flow's slot is shown that long
RENEW_SECONDS = 60.0
CLOSE_SECONDS = 5.0


@contextlib.contextmanager
def shown_as_training() -> Iterator[None]:
    """Occupy the limit's slot for the block, from a thread of its own, which no failure of Prefect's leaves.

    `prefect.concurrency.sync.concurrency` waits for a slot that nobody uses, and raises where the server is away.
    """
    if not get_current_settings().api.url:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_occupy, args=(is_over,), name=LIMIT, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(CLOSE_SECONDS)


def _occupy(is_over: threading.Event) -> None:
    lease: UUID | None = None
    with get_client(sync_client=True) as client:
        while not is_over.is_set():
            lease = _take_or_renew(client, lease)
            is_over.wait(RENEW_SECONDS)
        if lease is not None:
            with contextlib.suppress(httpx.HTTPError):  # the lease ends by itself
                client.release_concurrency_slots_with_lease(lease)


def _take_or_renew(client: SyncPrefectClient, lease: UUID | None) -> UUID | None:
    """The lease that shows us; None where Prefect does not answer or the slot is taken: the next try may do."""
    try:
        if lease is not None:
            client.renew_concurrency_lease(lease, LEASE_SECONDS)
            return lease
        answer = client.increment_concurrency_slots_with_lease([LIMIT], 1, "concurrency", LEASE_SECONDS)
        return ConcurrencyLimitWithLeaseResponse.model_validate(answer.json()).lease_id
    except httpx.HTTPStatusError as error:  # no such lease any more, or the slot is taken
        logger.debug("Prefect's limit %s does not show this training: %s", LIMIT, error)
        return None
    except httpx.TransportError as error:
        logger.debug("Prefect's limit %s cannot be reached: %s", LIMIT, error)
        return lease
