"""Requests to an OpenAI-compatible server: each gives a response, or an error that says whether to retry."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from eval.problems.prompts import Prompt
from redaction import add_secret, redact

_RETRIED_STATUS = frozenset({408, 409, 425, 429})  # beside every 5xx
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_MAX_REASON_CHARS = 300
_MAX_RETRY_AFTER_SECONDS = 300.0
_CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Endpoint:
    """A served model: `base_url` with or without a trailing `/v1`, `model` the served name."""

    base_url: str
    model: str
    api_key: str | None = None

    def url(self, path: str) -> str:
        """URL of a path such as "chat/completions"."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, all part of a result's identity. Sample i of an item uses seed + i."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None  # vLLM's extra field, sent only when set
    seed: int = 1234
    num_samples: int = 1
    stop: tuple[str, ...] = ()

    def body(self, sample: int) -> dict[str, Any]:
        """The fields of the request of one sample."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed + sample,
        }
        if self.top_k is not None:
            fields["top_k"] = self.top_k
        if self.stop:
            fields["stop"] = list(self.stop)
        return fields


@dataclass(frozen=True)
class Answer:
    """A response of the model."""

    text: str
    finish_reason: str | None
    response_tokens: int | None  # None where the server does not count them


class RequestError(Exception):
    """A request failed."""

    def __init__(
        self,
        reason: str,
        *,
        is_final: bool = False,
        is_timeout: bool = False,
        is_unreachable: bool = False,
        retry_after_seconds: float = 0.0,
    ) -> None:
        super().__init__(_clean(reason)[:_MAX_REASON_CHARS])
        self.is_final = is_final  # another attempt would fail too, at any server
        self.is_timeout = is_timeout  # another attempt at this server would only wait again
        self.is_unreachable = is_unreachable  # no connection, so nothing was sent
        self.retry_after_seconds = retry_after_seconds


class Connection:
    """A kept-open connection for one request at a time. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, sampling: Sampling, timeout_seconds: float) -> None:
        add_secret(endpoint.api_key)
        self._endpoint = endpoint
        self._sampling = sampling
        self._timeout_seconds = timeout_seconds
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        connect_seconds = min(_CONNECT_SECONDS, timeout_seconds)
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=connect_seconds),
            connector=aiohttp.TCPConnector(limit=1),
            # A server on this machine is reached without the environment's proxy.
            trust_env=urlsplit(endpoint.base_url).hostname not in LOOPBACK,
        )

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def ask(self, prompt: Prompt, sample: int = 0) -> Answer:
        """The response to one prompt: messages go to chat/completions, text to completions. Raises RequestError.

        The time-out covers the whole request, even if bytes keep arriving.
        """
        is_chat = not isinstance(prompt, str)
        fields = {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        body = {"model": self._endpoint.model, **fields, **self._sampling.body(sample)}
        url = self._endpoint.url("chat/completions" if is_chat else "completions")
        try:
            async with self._http.post(url, json=body, allow_redirects=False) as response:
                content = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RequestError(f"{type(error).__name__}: {error}", is_unreachable=True) from error
        except (TimeoutError, asyncio.TimeoutError) as error:
            reason = f"no answer within {self._timeout_seconds:g} s"
            raise RequestError(reason, is_timeout=True) from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}", is_final=True) from error
        except aiohttp.ClientError as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise RequestError(
                f"HTTP {response.status}: {content.decode('utf-8', 'replace')}",
                is_final=response.status < 500 and response.status not in _RETRIED_STATUS,
                retry_after_seconds=_retry_after(response.headers.get("Retry-After", "")),
            )
        return _read_answer(content, is_chat)

    async def is_there(self) -> bool:
        """Whether a server accepts connections, whatever it answers."""
        timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
        try:
            async with self._http.get(self._endpoint.url("models"), timeout=timeout):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError, asyncio.TimeoutError):
            return False
        except aiohttp.ClientError:
            return True


def _read_answer(content: bytes, is_chat: bool) -> Answer:
    try:
        payload = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        size = f"a body of {len(content)} bytes"
        raise RequestError(f"invalid JSON in {size} ({error}): {_beginning(content)[:100]!r}") from error
    try:
        choice = payload["choices"][0]
        text = choice["message"]["content"] if is_chat else choice["text"]
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestError(f"not a {'chat ' if is_chat else ''}completion: {_beginning(content)!r}") from error
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise RequestError(f"the response's text is a {type(text).__name__}, not text")
    usage = payload.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    is_count = isinstance(tokens, int) and not isinstance(tokens, bool)
    reason = _clean(finish_reason) if isinstance(finish_reason, str) else None
    return Answer(_clean(text), reason, tokens if is_count else None)


def _beginning(content: bytes) -> str:
    return redact(content.decode("utf-8", "replace"))[:_MAX_REASON_CHARS]


def _clean(text: str) -> str:
    """The text without known secrets, and without lone surrogates, which UTF-8 cannot encode."""
    return redact(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _retry_after(value: str) -> float:
    """Seconds to wait from a Retry-After header with a number or a date; 0 without one."""
    value = value.strip()
    try:
        seconds = float(value) if value[:1].isdigit() else _seconds_until(value)
    except ValueError:
        return 0.0
    return min(_MAX_RETRY_AFTER_SECONDS, max(0.0, seconds))


def _seconds_until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
