"""HTTP client for an OpenAI-compatible server. Its errors say whether a retry makes sense."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from downloads.errors import seconds_from_now
from eval.advice import advise
from eval.endpoint import Endpoint, Sampling, address_of
from eval.problems.items import Item
from eval.problems.prompts import Prompt
from eval.requests.identity import (
    Weights,
    encodable,
    probe_requests,
    read_engine,
    read_logprobs,
    read_root,
)
from eval.requests.pictures import with_pictures
from eval.requests.replies import Answer, ReplyError, read_answer, read_echoed
from redaction import redact, redactor

_RETRIED_STATUS = frozenset({408, 409, 425, 429})  # besides every 5xx
_MAX_REASON_CHARS = 400
_MIN_KEY_CHARS = 16  # shorter secrets are not redacted from responses: 123456 may be an answer
_MAX_RETRY_AFTER_SECONDS = 300.0
_CONNECT_SECONDS = 30.0
T = TypeVar("T")


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
        advice: str = "",
    ) -> None:
        super().__init__(encodable(redact(reason))[:_MAX_REASON_CHARS])
        self.is_final = is_final  # would fail again on any server
        self.is_timeout = is_timeout  # would time out again on this server
        self.is_unreachable = is_unreachable  # no connection, nothing was sent
        self.retry_after_seconds = retry_after_seconds
        self.advice = advice  # what to change


class _Bearer(aiohttp.BasicAuth):
    """An API key, sent unless the URL has a user; a netrc file does not replace it."""

    def encode(self) -> str:
        return f"Bearer {self.password}"


class Connection:
    """Keep-alive connections to one server. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._redact = redactor(_MIN_KEY_CHARS)
        connect_seconds = min(_CONNECT_SECONDS, timeout_seconds)
        self._http = aiohttp.ClientSession(
            auth=_Bearer("", endpoint.api_key) if endpoint.api_key else None,
            timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=connect_seconds),
            connector=aiohttp.TCPConnector(limit=0),
            # YAML allows number keys
            json_serialize_bytes=partial(orjson.dumps, option=orjson.OPT_NON_STR_KEYS),
            # a load balancer's cookie would pin all requests to one server
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=not endpoint.is_local,
        )

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def answer(self, item: Item, sampling: Sampling, sample: int = 0) -> Answer:
        """Generate a response to an item, or rank its options if any. Raises RequestError."""
        if item.options:
            return await self.rank(str(item.prompt), item.options, sampling)
        return await self.generate(item.prompt, sampling, sample, item.images)

    async def generate(
        self, prompt: Prompt, sampling: Sampling, sample: int = 0, images: Sequence[Path] = ()
    ) -> Answer:
        """Generate by chat/completions for messages, else completions. Raises RequestError.

        The timeout covers the whole request, even if bytes keep arriving.
        """
        is_chat = not isinstance(prompt, str)
        try:
            fields: dict[str, Any] = (
                {"prompt": prompt}
                if isinstance(prompt, str)
                else {"messages": with_pictures(prompt, images)}
            )
        except OSError as error:
            raise RequestError(f"a picture cannot be read: {error}", is_final=True) from error
        body = {"model": self._endpoint.model, **fields, **sampling.body(sample)}
        path = "chat/completions" if is_chat else "completions"
        return await self._ask(path, body, partial(read_answer, clean=self._clean))

    def _clean(self, text: str) -> str:
        return encodable(self._redact(text))

    async def rank(self, prompt: str, options: Sequence[str], sampling: Sampling) -> Answer:
        """Return the likeliest option after the prompt, as lm-eval does, with all log-probs.

        One request echoes the log-probs of the prompt alone and with each option; an option's
        tokens are those beyond the prompt's. Raises RequestError, also if the server returns no
        log-probs of prompts.
        """
        start = prompt.rstrip()  # whitespace belongs to the option's first token
        between = prompt[len(start) :] or " "
        body = {
            "model": self._endpoint.model,
            "prompt": [start, *(f"{start}{between}{option}" for option in options)],
            **{"max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1},
            **(sampling.extra_body or {}),
        }
        read = partial(read_echoed, num_prompts=1 + len(options))
        alone, *continued = await self._ask("completions", body, read)
        log_probs = [sum(values[len(alone) :]) for values in continued]
        best = max(range(len(options)), key=log_probs.__getitem__)
        details = {"options": list(options), "log_probs": log_probs}
        return Answer(options[best], "stop", None, details=details)

    async def identify(self) -> Weights:
        """Identify the served weights as far as the server reveals them. Raises RequestError."""
        root, engine = read_root(await self._fetch_json("models"), self._endpoint.model), None
        for path, body in probe_requests(self._endpoint.model):
            reply = await self._fetch_json(path, body)
            engine = read_engine(reply) or engine
            if (logprobs := read_logprobs(reply)) is not None:
                return Weights(root, logprobs, engine)
        return Weights(root, None, engine)

    async def _fetch_json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return a JSON reply, or None if the server refuses or replies with something else."""
        try:
            return json.loads(await self._request(path, body))
        except RequestError as error:
            if error.is_final:
                return None
            raise
        except (ValueError, RecursionError):
            return None

    async def _ask(self, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T:
        """Return what `read` finds in the reply to a request."""
        content = await self._request(path, body)
        try:
            return read(content)
        except ReplyError as error:
            raise RequestError(
                f"{address_of(self._endpoint.url(path))}: {error}",
                is_final=_is_final(error.status),
                advice=advise(error.status, str(error), body),
            ) from error

    async def _request(self, path: str, body: dict[str, Any] | None) -> bytes:
        method, url = "GET" if body is None else "POST", self._endpoint.url(path)
        try:
            async with self._http.request(
                method, url, json=body, allow_redirects=False
            ) as response:
                content = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RequestError(f"{type(error).__name__}: {error}", is_unreachable=True) from error
        except TimeoutError as error:
            reason = f"no answer within {self._timeout_seconds:g} s"
            raise RequestError(reason, is_timeout=True) from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}", is_final=True) from error
        except aiohttp.ClientError as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        if not 200 <= response.status < 300:
            status, reply = response.status, content.decode("utf-8", "replace")
            raise RequestError(
                f"HTTP {status} from {address_of(url)}: {reply}",
                is_final=_is_final(status),
                retry_after_seconds=_retry_after(response.headers.get("Retry-After", "")),
                advice=advise(status, reply, body or (), response.headers.get("Location", "")),
            )
        return content

    async def is_reachable(self) -> bool:
        """True if a server accepts connections, whatever it replies."""
        timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
        try:
            async with self._http.get(self._endpoint.url("models"), timeout=timeout):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError):
            return False
        except aiohttp.ClientError:
            return True


def _is_final(status: int) -> bool:
    return 300 <= status < 500 and status not in _RETRIED_STATUS


def _retry_after(value: str) -> float:
    """Return the seconds to wait from a Retry-After header, 0 without one."""
    return min(_MAX_RETRY_AFTER_SECONDS, seconds_from_now(value) or 0.0)
