"""The complete configuration of a recipe, and how it is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dapo_core.config import loading
from dapo_core.config.fields import Section, volatile
from redaction import add_secret_url
from tasks.config import ChainConfig, chain


class WebhookConfig(Section):
    """The URL notified of finished reports and failed runs."""

    url: str | None = volatile(
        None,
        "URL that receives a JSON POST; $NAME reads it from an environment variable, where secrets "
        "belong.",
    )
    timeout_seconds: float = volatile(10.0, "Timeout of the request.", gt=0, le=300)

    @field_validator("url")
    @classmethod
    def _url_can_be_posted_to(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not re.fullmatch(r"\$[A-Za-z_]\w*", url) and not is_http_address(url):
            raise ValueError(
                "flow.webhook.url must be an http or https URL, or $NAME of an environment variable"
            )
        # anyone who knows the URL can post to it
        add_secret_url(os.environ.get(url[1:], "") if url.startswith("$") else url)
        return url


class FlowConfig(chain.FlowConfig):
    """Locks, time limits, logging and notification of a run."""

    webhook: WebhookConfig = Field(default_factory=WebhookConfig)


class Config(ChainConfig):
    """One resolved recipe."""

    flow: FlowConfig = Field(default_factory=FlowConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration: defaults < file < overrides of the form `section.key=value`.

    Raises ConfigError as `loading.load` does.
    """
    return loading.load(Config, path, overrides)


def load_config_or_defaults(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return `load_config` for a file that may lack training set and model."""
    tree: dict[str, Any] = {} if path is None else loading.read_recipe(Path(path))
    if isinstance(data := tree.get("data") or {}, dict):
        tree["data"] = {"train": "arithmetic", "eval": "arithmetic", **data}
    tree["model"] = tree.get("model") or {"source": "recipe"}
    return resolve_config(loading.overridden(Config, tree, overrides))


def resolve_config(tree: dict[str, Any]) -> Config:
    """Validate a tree of sections and keys into a configuration; raises ConfigError."""
    return loading.resolve(Config, tree)


def is_http_address(text: str) -> bool:
    """True for an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
