"""Where a model is served and with which sampling parameters it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from redaction import add_secret

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class Endpoint:
    """A served model: `base_url` with or without a trailing `/v1`, `model` the served name."""

    base_url: str
    model: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        add_secret(self.api_key)
        add_secret(urlsplit(self.base_url).password)

    def url(self, path: str) -> str:
        """URL of a path such as "chat/completions"."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def has_ended(self) -> bool:
        """Whether the server is known to be gone for good; of a server that is not ours nothing is known."""
        return False


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, all part of a result's identity. Sample i of an item uses seed + i."""

    max_tokens: int
    temperature: float | None = 0.0  # None, here and below: not sent, so that the server's own default applies
    top_p: float | None = 1.0
    top_k: int | None = None  # vLLM's extra field
    seed: int = 1234
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None  # vLLM's extra field
    extra_body: Mapping[str, Any] | None = None  # further fields
    source: Literal["model", "server"] | None = None  # of temperature, top_p, top_k; None: the settings

    def body(self, sample: int) -> dict[str, Any]:
        """The fields of the request of one sample."""
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
        """As settings.json holds it; a field that earlier versions lack is left out unless it is set."""
        fields = {**asdict(self), "stop": list(self.stop)}
        added = ("chat_template_kwargs", "extra_body", "source")
        return {name: value for name, value in fields.items() if value is not None or name not in added}
