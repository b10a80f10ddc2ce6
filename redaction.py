"""Redacts secrets in results, logs and messages. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

REDACTED = "[redacted]"
MIN_SECRET_CHARS = 6  # shorter values are placeholders such as EMPTY, or ordinary words
MIN_URL_PART_CHARS = 16
_SECRET_NAME = re.compile(
    r"(^|_)((API|ACCESS|SECRET|PRIVATE|SIGNING|ENCRYPTION|ACCOUNT)_?KEY|TOKEN|PAT|"
    r"SECRET|CREDENTIALS?|AUTH_STRING|PASS|(?<=_)PWD|DSN|CONNECTION_STRING|COOKIE"
    r"|(CUSTOM|OTLP(_\w+)?)_HEADERS)$"
    r"|(PASSWORD|PASSWD|PASSPHRASE|SSHPASS)$",
    re.IGNORECASE,
)
_KEY_NAME = re.compile(r"(^|_)KEY$", re.IGNORECASE)  # PRIMARY_KEY=problem is not a secret
_KEY_VALUE = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])\S{16,}", re.IGNORECASE)
_WEBHOOK_NAME = re.compile(r"WEBHOOK", re.IGNORECASE)
# https://:PASSWORD@host, or https://TOKEN@host
_URL_SECRET = re.compile(
    r"://(?:[^/@\s:]*:(?!x-oauth-basic@)([^/\s]+)|((?=\D*\d)[^/@\s:]{16,})(?::(?:x-oauth-basic)?)?)@"
)
_ASSIGNED_SECRET = re.compile(
    r"(?:(?:password|pwd|key|secret|token)\s*=\s*'?|(?:bearer|basic)(?: |%20)+)([^;&'\"\s]+)",
    re.IGNORECASE,
)

_added: set[str] = set()


def add_secret(secret: str | None) -> None:
    """Make `redact` replace this secret too, in this process. Short ones are ignored."""
    if secret:
        _added.add(secret)


def add_secret_url(url: str) -> None:
    """Make `redact` replace a URL's user, password, and long parts of its path and query."""
    _added.update(_secrets_of_url(url))


def redact(text: str) -> str:
    """Replace every known secret of at least MIN_SECRET_CHARS characters, also if percent-encoded.

    Known secrets are those added, plus from the environment: values of variables whose name ends
    like a secret's (API_KEY, TOKEN, PASS, DSN and others; any other KEY if its value has 16 or more
    characters with letters and digits), passwords and tokens in
    URLs of any variable, and the secret parts of
    URLs if the name contains WEBHOOK.
    """
    return redactor()(text)


def redactor(min_chars: int = MIN_SECRET_CHARS) -> Callable[[str], str]:
    """Return `redact` with the environment read once, for secrets of at least `min_chars`."""
    known = sorted(
        (one for one in _known_secrets() if len(one) >= min_chars), key=len, reverse=True
    )

    def replace_known(text: str) -> str:
        for secret in known:  # longest first: one may contain another
            text = text.replace(secret, REDACTED)
        return text

    return replace_known


def redacted(value: Any) -> Any:
    """Apply `redact` to every string in a tree of JSON values."""
    if isinstance(value, Mapping):
        return {name: redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def is_secret(name: str, value: str) -> bool:
    """True if an environment variable's name, or one in a URL of its value, marks a secret."""
    return bool(
        _is_named_secret(name, value) or _WEBHOOK_NAME.search(name) or _URL_SECRET.search(value)
    )


def _is_named_secret(name: str, value: str) -> bool:
    is_key = _KEY_NAME.search(name) and _KEY_VALUE.fullmatch(value.strip())
    return bool(_SECRET_NAME.search(name) or is_key)


def _known_secrets() -> set[str]:
    known = set(_added)
    for name, value in os.environ.items():
        parts = ["".join(groups) for groups in _URL_SECRET.findall(value)]
        if _is_named_secret(name, value):
            known |= {value, value.strip(), value.partition(":")[2]}  # USER:PASSWORD
            parts += _ASSIGNED_SECRET.findall(value)  # connection strings
        elif _WEBHOOK_NAME.search(name):
            known |= _secrets_of_url(value)
        known |= {*parts, *map(unquote, parts)}
    return known | {quote(secret, safe="") for secret in known}


def _secrets_of_url(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
        named = {parts.username or "", parts.password or ""}
    except ValueError:
        return {url}
    words = re.split(r"[/?&=#]", f"{parts.path}/{parts.query}/{parts.fragment}")
    return named | {word for word in words if len(word) >= MIN_URL_PART_CHARS}
