"""Messages to Prefect's API from a thread of their own: no stage waits for the server, or fails with it."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

logger = logging.getLogger(__name__)

Message = Callable[[SyncPrefectClient], None]

REQUEST_SECONDS = 10.0
REST_SECONDS = 5.0  # before a server that did not answer is asked again
FLUSH_SECONDS = 5.0  # how long a flow that ends waits for its last messages


class Poster:
    """Sends each message in the order of posting; of those under one name only the newest that is not yet sent.

    While no server answers, messages wait. One that the server refuses is dropped. Both are said once.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[contextvars.Context, Message]] = {}
        self._is_sending = False
        self._is_down = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._clients: dict[str | None, SyncPrefectClient] = {}

    def post(self, name: str, message: Message) -> None:
        """Have the message sent to the API of the flow run that we are in; returns at once."""
        with self._changed:
            self._waiting[name] = (contextvars.copy_context(), message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="prefect-page", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything is sent, but not for a server that is away; returns whether it is.

        What a process has not sent when it ends is lost: flows call this at their end.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._is_sending:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_down:
                    logger.warning("Prefect's page lacks %d messages of this process", len(self._waiting) or 1)
                    return False
                self._changed.wait(left)
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                if not threading.main_thread().is_alive():  # Prefect's own threads end now: it could only fail
                    return
                name = next(iter(self._waiting))
                context, message = self._waiting.pop(name)
                self._is_sending = True
            is_done = context.copy().run(self._is_done_with, name, message)
            with self._changed:
                self._is_sending = False
                self._is_down = not is_done
                if not is_done:
                    self._waiting = {name: (context, message)} | self._waiting
                self._changed.notify_all()
            if not is_done:
                time.sleep(REST_SECONDS)

    def _is_done_with(self, name: str, message: Message) -> bool:
        """Whether the message was sent, or refused; False when it may be sent later."""
        try:
            # Prefect's own retries would hold up what comes after for minutes.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                message(self._client())
        except httpx.TransportError as error:
            if not self._is_down:
                logger.warning(
                    "Prefect's API does not answer (%s): what the page shows of this run comes later",
                    str(error) or type(error).__name__,
                )
            return False
        except (httpx.HTTPStatusError, PrefectException, OSError, RuntimeError, ValueError) as error:
            logger.warning("Prefect's page lacks %s: %s: %s", name, type(error).__name__, error)
        return True

    def _client(self) -> SyncPrefectClient:
        """One client for each server: making one costs a tenth of a second."""
        url = PREFECT_API_URL.value()
        if url not in self._clients:
            # With settings that differ from the flow's client, which is closed when the flow ends.
            self._clients[url] = get_client(httpx_settings={"timeout": REQUEST_SECONDS}, sync_client=True)
        return self._clients[url]


poster = Poster()
