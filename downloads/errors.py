"""Download errors. Each message says what happened, what it means and what to change."""

from __future__ import annotations

import email.utils
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from durable import FULL_DISK_ERRORS

BUSY = frozenset({408, 416, 425, 429})  # in addition to 5xx
MORE_SPACE = "free some space (dapo runs gc removes what no run needs), or set store.path"
_TLS = re.compile(r"CERTIFICATE|\bSSL|\bTLS", re.IGNORECASE)


class DownloadError(Exception):
    """A download that fails until the user changes something. Takes one message, picklable."""

    is_lasting = True


class Unreachable(DownloadError):
    """The hub does not respond or is busy. Worth a retry unless local settings are the cause."""

    def __init__(self, message: str, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


def refused(status: int, what: str, denied: str, missing: str) -> DownloadError:
    """The error of an HTTP status; `denied` and `missing` say what to change after 403 and 404."""
    if status in (401, 403):
        return DownloadError(f"access to {what} is denied (HTTP {status}): {denied}")
    if status in (404, 410):
        return DownloadError(f"{what} does not exist (HTTP {status}): {missing}")
    if status in BUSY or status >= 500:
        return Unreachable(f"{what} returned HTTP {status}; run it again later")
    return DownloadError(f"{what} returned HTTP {status}")


def failed(address: str, error: BaseException) -> DownloadError:
    """Explain an exception of a client: disk, certificate, proxy or network."""
    if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
        return DownloadError(
            f"the disk filled up during the download: {error}. Partial files are kept; {MORE_SPACE}"
        )
    reasons = list(_causes(error))
    text = " ".join(f"{type(reason).__name__} {reason}" for reason in reasons)
    reason = f"{type(reasons[-1]).__name__}: {reasons[-1]}"
    if _TLS.search(text):
        return Unreachable(
            f"{address} has no certificate that this machine trusts ({reason}); if a proxy signs "
            "connections, point SSL_CERT_FILE and REQUESTS_CA_BUNDLE at a file with its "
            "certificate",
            is_lasting=True,
        )
    if (proxy := _proxy_for(address)) is not None:
        return Unreachable(
            f"{address} cannot be reached through the proxy {proxy} ({reason}); correct "
            "HTTPS_PROXY, HTTP_PROXY or ALL_PROXY (http://USER:PASSWORD@HOST:PORT), or list the "
            "host in NO_PROXY",
            is_lasting="407" in text,  # the proxy requires user and password
        )
    return Unreachable(
        f"{address} cannot be reached ({reason}); check the network and the endpoint's spelling, "
        "or set HTTPS_PROXY if this machine reaches the internet through a proxy"
    )


def require_room(num_bytes: int, folder: Path, label: str) -> None:
    """Raise DownloadError unless `num_bytes` more fit on the folder's disk."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DownloadError(
            f"{num_bytes:,} bytes {label} do not fit on the disk of {folder}, which has {free:,} "
            f"free; {MORE_SPACE}"
        )


def seconds_from_now(retry_after: str) -> float | None:
    """Seconds to wait per a Retry-After header (a number or a date); None if it is neither."""
    text = retry_after.strip()
    try:
        moment = None if text[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp()
        return float(text) if moment is None else max(0.0, moment - time.time())
    except ValueError:
        return None


def _proxy_for(address: str) -> str | None:
    """Host and port of the proxy that the environment sets for an address."""
    from urllib.request import getproxies, proxy_bypass  # 0.1 s

    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return urlsplit(proxy if "//" in proxy else f"//{proxy}").netloc.rpartition("@")[2]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    current: object = error
    while isinstance(current, BaseException):
        yield current
        inner = next((arg for arg in current.args[:1] if isinstance(arg, BaseException)), None)
        reason = inner or getattr(current, "reason", None)
        current = reason or current.__cause__ or current.__context__
