"""Server endpoints and sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from eval import InputError
from redaction import add_secret

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_REQUEST_PATH = re.compile(r"/(chat/)?completions$|(?<=/v\d)/models$")
# of the API's version, or of one model, as in Azure's URLs: no /v1 is added below it
_VERSION_PATH = re.compile(r"/v\d+(\.\d+)?((alpha|beta)\d*)?(/|$)|/deployments/")

# Request fields that a key of `evaluate` sets; extra_body may set any other.
REQUEST_KEYS = {
    "model": "the served model's name",
    "messages": "evaluate.prompt",
    "prompt": "evaluate.prompt",
    "max_tokens": "evaluate.max_response_tokens",
    "max_completion_tokens": "evaluate.max_response_tokens",
    "temperature": "evaluate.temperature",
    "top_p": "evaluate.top_p",
    "top_k": "evaluate.top_k",
    "seed": "evaluate.seed",
    "n": "evaluate.num_samples",
    "best_of": "evaluate.num_samples",
    "stop": "evaluate.prompt: the template defines it",
    "stream": "the evaluation: responses are not streamed",
    "echo": "the evaluation: responses exclude the prompt",
    "chat_template_kwargs": "evaluate.chat_template_kwargs",
}
NULLABLE = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed"})  # left out by null
SAMPLING_FIELDS = NULLABLE | {"stop", "chat_template_kwargs"}


@dataclass(frozen=True)
class Endpoint:
    """A served model. `model` is the served name.

    `base_url` may end in `/v1` or another version, or be the full URL of a request. Its query is
    sent with every request.
    """

    base_url: str
    model: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        add_secret(self.api_key)
        add_secret(self._parts.password)
        for _, value in parse_qsl(self._parts.query):
            add_secret(value)

    def url(self, path: str) -> str:
        """Return the URL of a path such as "chat/completions". Raises InputError."""
        parts = self._parts
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(
                f"the base URL {self.base_url!r} does not start with http:// or https:// and a host"
            )
        given = parts.path.rstrip("/")
        root = _REQUEST_PATH.sub("", given)
        if root == given and not _VERSION_PATH.search(root):
            root += "/v1"
        return urlunsplit(parts._replace(path=f"{root}/{path}", fragment=""))

    @property
    def address(self) -> str:
        """The base URL without credentials or a query, which may contain a key."""
        return address_of(self.base_url)

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine, so that no proxy may be between."""
        return self._parts.hostname in LOOPBACK

    @property
    def _parts(self) -> SplitResult:
        try:
            return urlsplit(self.base_url.strip())
        except ValueError as error:
            raise InputError(f"{self.base_url!r} is not a URL: {error}") from None

    def has_ended(self) -> bool:
        """True if the server has ended for good; subclasses know servers that we started."""
        return False


def address_of(url: str) -> str:
    """Return the URL without credentials or a query, which may contain a key; "" for no URL."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@dataclass(frozen=True)
class Sampling:
    """Sampling, part of a result's identity. Sample i uses seed + i. None is not sent."""

    max_tokens: int | None
    temperature: float | None = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None  # vLLM extension
    seed: int | None = 1234
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None  # vLLM extension
    extra_body: Mapping[str, Any] | None = None
    renamed_fields: Mapping[str, Any] | None = None  # field -> name to send it under
    # of temperature, top_p and top_k; None: the settings
    source: Literal["model", "server"] | None = None

    def body(self, sample: int) -> dict[str, Any]:
        """Return the request fields for one sample."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": None if self.seed is None else self.seed + sample,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        names = self.renamed_fields or {}
        sent = {names.get(name, name): one for name, one in fields.items() if one is not None}
        return {**sent, **(self.extra_body or {})}

    def to_json(self) -> dict[str, Any]:
        """Convert to the form in settings.json. Fields of later versions are omitted unless set."""
        fields = {**asdict(self), "stop": list(self.stop)}
        added = ("chat_template_kwargs", "extra_body", "renamed_fields", "source")
        return {
            name: value for name, value in fields.items() if value is not None or name not in added
        }
