"""Server endpoints and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from redaction import add_secret

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class Endpoint:
    """A served model. `base_url` may end in `/v1`; `model` is the served name."""

    base_url: str
    model: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        add_secret(self.api_key)
        add_secret(urlsplit(self.base_url).password)

    def url(self, path: str) -> str:
        """Return the URL of a path such as "chat/completions"."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    @property
    def address(self) -> str:
        """The base URL without credentials or a query, which may contain a key."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def has_ended(self) -> bool:
        """True if the server has ended for good; subclasses know servers that we started."""
        return False


@dataclass(frozen=True)
class Sampling:
    """Sampling, part of a result's identity. Sample i uses seed + i. None is not sent."""

    max_tokens: int
    temperature: float | None = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None  # vLLM extension
    seed: int = 1234
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None  # vLLM extension
    extra_body: Mapping[str, Any] | None = None
    # of temperature, top_p and top_k; None: the settings
    source: Literal["model", "server"] | None = None

    def body(self, sample: int) -> dict[str, Any]:
        """Return the request fields for one sample."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed + sample,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        sent = {name: value for name, value in fields.items() if value is not None}
        return {**sent, **(self.extra_body or {})}

    def to_json(self) -> dict[str, Any]:
        """Convert to the form in settings.json. Fields of later versions are omitted unless set."""
        fields = {**asdict(self), "stop": list(self.stop)}
        added = ("chat_template_kwargs", "extra_body", "source")
        return {
            name: value for name, value in fields.items() if value is not None or name not in added
        }
