"""HTTP client for an OpenAI-compatible server. Its errors say whether a retry makes sense."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson

from downloads.errors import seconds_from_now
from durable import parse_json
from eval.endpoint import LOOPBACK, Endpoint, Sampling
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
from redaction import redact, redactor

_RETRIED_STATUS = frozenset({408, 409, 425, 429})  # besides every 5xx
_TEXT_PARTS = frozenset({"text", "output_text", None})
_MAX_REASON_CHARS = 300
_MIN_KEY_CHARS = 16  # shorter secrets are not redacted from responses: 123456 may be an answer
_MAX_RETRY_AFTER_SECONDS = 300.0
_CONNECT_SECONDS = 30.0


class Answer(NamedTuple):
    """A response of the model."""

    text: str
    finish_reason: str | None
    response_tokens: int | None  # including thinking; None if the server does not count them
    reasoning: str | None = None  # thinking that the server's parser separated from the text
    reasoning_tokens: int | None = None
    details: dict[str, Any] | None = None  # {options, log_probs} if options were ranked


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
        super().__init__(encodable(redact(reason))[:_MAX_REASON_CHARS])
        self.is_final = is_final  # would fail again on any server
        self.is_timeout = is_timeout  # would time out again on this server
        self.is_unreachable = is_unreachable  # no connection, nothing was sent
        self.retry_after_seconds = retry_after_seconds


class Connection:
    """Keep-alive connections to one server. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._redact = redactor(_MIN_KEY_CHARS)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        connect_seconds = min(_CONNECT_SECONDS, timeout_seconds)
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=connect_seconds),
            connector=aiohttp.TCPConnector(limit=0),
            # YAML allows number keys
            json_serialize_bytes=partial(orjson.dumps, option=orjson.OPT_NON_STR_KEYS),
            # a load balancer's cookie would pin all requests to one server
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=urlsplit(endpoint.base_url).hostname
            not in LOOPBACK,  # no proxy to this machine
        )

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def answer(self, item: Item, sampling: Sampling, sample: int = 0) -> Answer:
        """Generate a response to an item, or rank its options if any. Raises RequestError."""
        if item.options:
            return await self.rank(str(item.prompt), item.options, sampling)
        return await self.generate(item.prompt, sampling, sample)

    async def generate(self, prompt: Prompt, sampling: Sampling, sample: int = 0) -> Answer:
        """Generate by chat/completions for messages, else completions. Raises RequestError.

        The timeout covers the whole request, even if bytes keep arriving.
        """
        is_chat = not isinstance(prompt, str)
        fields = {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        body = {"model": self._endpoint.model, **fields, **sampling.body(sample)}
        content = await self._request("chat/completions" if is_chat else "completions", body)
        return _read_answer(content, is_chat, lambda text: encodable(self._redact(text)))

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
        alone, *continued = _read_echoed(await self._request("completions", body), 1 + len(options))
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
        if response.status != 200:
            raise RequestError(
                f"HTTP {response.status}: {content.decode('utf-8', 'replace')}",
                is_final=response.status < 500 and response.status not in _RETRIED_STATUS,
                retry_after_seconds=_retry_after(response.headers.get("Retry-After", "")),
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


def _read_answer(content: bytes, is_chat: bool, clean: Callable[[str], str]) -> Answer:
    try:
        payload = parse_json(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        size = f"a body of {len(content)} bytes"
        raise RequestError(
            f"invalid JSON in {size} ({error}): {_beginning(content)[:100]!r}"
        ) from error
    try:
        choice = payload["choices"][0]
        message = choice["message"] if is_chat else {"content": choice["text"]}
        text = message["content"]
        # vLLM's name, and its former one
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestError(
            f"not a {'chat ' if is_chat else ''}completion: {_beginning(content)!r}"
        ) from error
    text = _join_parts(text)
    if not isinstance(text, str):
        raise RequestError(f"the response's text is a {type(text).__name__}, not text")
    reasoning = clean(reasoning) if reasoning and isinstance(reasoning, str) else None
    usage = payload.get("usage")
    details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
    num_thinking = _count(details, "reasoning_tokens")
    # vLLM counts nothing if the chat template opens the thinking
    if reasoning is not None and num_thinking == 0:
        num_thinking = None
    return Answer(
        clean(text),
        clean(finish_reason) if isinstance(finish_reason, str) else None,
        _count(usage, "completion_tokens"),
        reasoning,
        num_thinking,
    )


def _read_echoed(content: bytes, num_prompts: int) -> list[list[float]]:
    """Return the log-probs of each prompt's tokens, 0 for the first. Raises RequestError."""
    try:
        choices = sorted(parse_json(content)["choices"], key=lambda choice: choice["index"])
        # the last token is generated
        values = [choice["logprobs"]["token_logprobs"][:-1] for choice in choices]
        echoed = [[float(value) for value in (0.0, *one[1:])] for one in values]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        echoed = []
    if len(echoed) != num_prompts or any(len(one) <= len(echoed[0]) for one in echoed[1:]):
        raise RequestError(
            "the server returns no log-probs of prompts (completions with echo and logprobs), "
            "which evaluate.mode=loglikelihood needs; vLLM does. Its reply: "
            f"{_beginning(content)!r}",
            is_final=True,
        )
    return echoed


def _count(fields: Any, name: str) -> int | None:
    count = fields.get(name) if isinstance(fields, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _join_parts(content: Any) -> Any:
    """Return a message's text: "" for null, the text parts of a list without thinking."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _beginning(content: bytes) -> str:
    return redact(content.decode("utf-8", "replace"))[:_MAX_REASON_CHARS]


def _retry_after(value: str) -> float:
    """Return the seconds to wait from a Retry-After header, 0 without one."""
    return min(_MAX_RETRY_AFTER_SECONDS, seconds_from_now(value) or 0.0)
