"""Chat-completion requests to an OpenAI-compatible server: one outcome per prompt, never an exception."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from eval.benchmark import Message

logger = logging.getLogger(__name__)

_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class Endpoint:
    """Where the model answers, and how patiently it is asked.

    `base_url` with or without the closing `/v1`; `model` is the served name. `timeout_seconds` bounds one
    attempt as a whole. Attempts are spaced by `backoff_seconds * 2**k`, with jitter, at most a minute.
    """

    base_url: str
    model: str
    api_key: str | None = None
    concurrency: int = 32
    timeout_seconds: float = 600.0
    max_attempts: int = 6
    backoff_seconds: float = 0.5

    @property
    def chat_url(self) -> str:
        """URL of the chat completions of this server."""
        base = self.base_url.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"


@dataclass(frozen=True)
class Sampling:
    """How one response is sampled; all of it is part of a result's identity."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1234


@dataclass(frozen=True)
class Outcome:
    """What came of one prompt: `text` is None exactly when `failure` says why every attempt failed."""

    text: str | None
    finish_reason: str | None
    response_tokens: int | None  # None where the server does not count them
    attempts: int
    seconds: float  # over all attempts
    failure: str | None = None


class _AttemptError(Exception):
    """One attempt failed. `is_final` says that another one would fail alike."""

    def __init__(self, reason: str, is_final: bool = False, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.retry_after_seconds = retry_after_seconds


class ChatClient:
    """Asks one endpoint over one connection, with retries. Use as an async context manager.

    One client per request in flight: httpx's own pool looks at all its connections for every request, which
    costs more than the requests once dozens are in flight.
    """

    def __init__(self, endpoint: Endpoint, sampling: Sampling) -> None:
        self._endpoint = endpoint
        self._sampling = sampling
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(endpoint.timeout_seconds),
            limits=httpx.Limits(max_connections=1),
            verify=_ssl_context(),
            # A proxy from the environment must not stand between us and a server on this machine.
            trust_env=urlsplit(endpoint.base_url).hostname not in _LOOPBACK,
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, messages: Sequence[Message]) -> Outcome:
        """The response to one prompt, or a failed outcome with the reason of the last attempt."""
        start = time.monotonic()
        body = {"model": self._endpoint.model, "messages": list(messages), **asdict(self._sampling)}
        reason = ""
        attempt = 0
        for attempt in range(1, self._endpoint.max_attempts + 1):
            try:
                text, finish_reason, tokens = await asyncio.wait_for(
                    self._attempt(body), self._endpoint.timeout_seconds
                )
                return Outcome(text, finish_reason, tokens, attempt, time.monotonic() - start)
            except (TimeoutError, asyncio.TimeoutError, httpx.TimeoutException):
                error = _AttemptError(f"no answer within {self._endpoint.timeout_seconds:g} s")
            except (httpx.HTTPError, httpx.InvalidURL) as problem:
                error = _AttemptError(f"{type(problem).__name__}: {problem}"[:_MAX_REASON_CHARS])
            except _AttemptError as problem:
                error = problem
            reason = str(error)
            if error.is_final or attempt == self._endpoint.max_attempts:
                break
            logger.debug("attempt %d failed, asking again: %s", attempt, reason)
            await asyncio.sleep(max(self._backoff(attempt), error.retry_after_seconds))
        return Outcome(None, None, None, attempt, time.monotonic() - start, failure=reason)

    def _backoff(self, attempt: int) -> float:
        longest = min(60.0, self._endpoint.backoff_seconds * 2 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)

    async def _attempt(self, body: dict[str, Any]) -> tuple[str, str | None, int | None]:
        response = await self._http.post(self._endpoint.chat_url, json=body)
        if response.status_code != 200:
            raise _AttemptError(
                f"HTTP {response.status_code}: {response.text[:_MAX_REASON_CHARS]}",
                is_final=response.status_code not in _RETRIED_STATUS,
                retry_after_seconds=_retry_after(response),
            )
        return _read_completion(response)


def _read_completion(response: httpx.Response) -> tuple[str, str | None, int | None]:
    """(text, finish reason, response tokens) of a chat completion; raises _AttemptError on any other body."""
    try:
        payload = json.loads(response.content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _AttemptError(
            f"invalid JSON in a body of {len(response.content)} bytes ({error}): {response.text[:100]!r}"
        ) from error
    try:
        choice = payload["choices"][0]
        text = choice["message"]["content"]
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _AttemptError(f"not a chat completion: {response.text[:_MAX_REASON_CHARS]!r}") from error
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise _AttemptError(f"message.content is a {type(text).__name__}, not text")
    # A lone surrogate cannot be written as UTF-8; it becomes the replacement character.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    usage = payload.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return text, finish_reason, tokens if isinstance(tokens, int) else None


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """One for all clients: loading the certificate authorities takes tens of milliseconds."""
    return httpx.create_ssl_context()


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(60.0, float(value)) if value.isdigit() else 0.0
