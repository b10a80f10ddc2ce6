"""Keeps secrets out of what is written: results, logs and messages. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

REDACTED = "[redacted]"
MIN_SECRET_CHARS = 6  # a shorter "secret" is a placeholder such as EMPTY, and also an ordinary word
MIN_URL_PART_CHARS = 16
_SECRET_NAME = re.compile(r"(^|_)(APIKEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|AUTH_STRING)$", re.IGNORECASE)
_WEBHOOK_NAME = re.compile(r"WEBHOOK", re.IGNORECASE)

_added: set[str] = set()


def add_secret(secret: str | None) -> None:
    """Have `redact` replace this secret too, in this process; too short a one is ignored."""
    if secret:
        _added.add(secret)


def add_secret_url(url: str) -> None:
    """Have `redact` replace the secrets of a URL: user, password, and long parts of its path and query."""
    _added.update(_secrets_of_url(url))


def redact(text: str) -> str:
    """The text with every known secret of MIN_SECRET_CHARS or more replaced, also where it is percent-encoded.

    Known are those added, the values of environment variables whose name ends in KEY, TOKEN, SECRET, PASSWORD or
    AUTH_STRING, and the secret parts of the URLs in variables whose name contains WEBHOOK.
    """
    return redactor()(text)


def redactor(min_chars: int = MIN_SECRET_CHARS) -> Callable[[str], str]:
    """`redact` with the secrets of `min_chars` or more known now: for many texts, the environment is read once."""
    known = sorted((one for one in _known_secrets() if len(one) >= min_chars), key=len, reverse=True)

    def replace_known(text: str) -> str:
        for secret in known:  # the longest first: one may contain another
            text = text.replace(secret, REDACTED)
        return text

    return replace_known


def redacted(value: Any) -> Any:
    """A tree of JSON values with `redact` applied to each text in it."""
    if isinstance(value, Mapping):
        return {name: redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name) or _WEBHOOK_NAME.search(name))


def _known_secrets() -> set[str]:
    known = set(_added)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name):
            known |= {value, value.strip(), value.partition(":")[2]}  # of USER:PASSWORD
        elif _WEBHOOK_NAME.search(name):
            known |= _secrets_of_url(value)
    return known | {quote(secret, safe="") for secret in known}


def _secrets_of_url(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
        named = {parts.username or "", parts.password or ""}
    except ValueError:
        return {url}
    words = re.split(r"[/?&=#]", f"{parts.path}/{parts.query}/{parts.fragment}")
    return named | {word for word in words if len(word) >= MIN_URL_PART_CHARS}
