"""Download errors. Each message says what happened, what it means and what to change."""

from __future__ import annotations

import email.utils
import errno
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit


class DownloadError(Exception):
    """Base of all deliberate download errors. Takes one message and is picklable."""

    is_lasting = True  # True if a retry cannot help until the user changes something


class BadReference(DownloadError, ValueError):
    """A reference is malformed, or lacks a required digest."""


class NotFound(DownloadError):
    """The repository, revision or file does not exist or is not visible to this user."""


class AccessDenied(DownloadError):
    """The hub requires a token, a different token, or accepted terms."""


class WrongContent(DownloadError):
    """The downloaded content has a different size or digest than announced."""


class DiskTooSmall(DownloadError):
    """The files do not fit on the disk."""


class Unreachable(DownloadError):
    """The hub does not respond or is busy. Worth a retry unless local settings are the cause."""

    is_lasting = False


class Offline(Unreachable):
    """The environment forbids network access to the hub."""

    is_lasting = True


def disk_is_full(error: OSError) -> DiskTooSmall | None:
    """DiskTooSmall if the disk filled up during a download; None for other errors."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return DiskTooSmall(
        f"the disk filled up during the download: {error}. Partial files are kept; free some space "
        "(dapo runs gc "
        "removes what no run needs) and run it again, or set store.path to another disk"
    )


def require_room(num_bytes: int, folder: Path, label: str) -> None:
    """Raise DiskTooSmall unless `num_bytes` more fit on the folder's disk."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskTooSmall(
            f"{num_bytes:,} bytes {label} do not fit on the disk of {folder}, which has {free:,} "
            "free; free some "
            "space (dapo runs gc removes what no run needs), or set store.path to another disk"
        )


def seconds_from_now(retry_after: str) -> float | None:
    """Seconds to wait per a Retry-After header (a number or a date); None if it is neither."""
    text = retry_after.strip()
    try:
        moment = None if text[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp()
        return float(text) if moment is None else max(0.0, moment - time.time())
    except ValueError:
        return None


_TLS = re.compile(r"CERTIFICATE|\bSSL|\bTLS", re.IGNORECASE)
_DNS = re.compile(
    r"gaierror|NameResolution|getaddrinfo|Name or service not known|name resolution", re.IGNORECASE
)


def unreachable(address: str, error: BaseException) -> Unreachable:
    """Explain an exception of an HTTP library: certificate, proxy, name resolution or network."""
    reasons = list(_causes(error))
    text = " ".join(f"{type(reason).__name__} {reason}" for reason in reasons)
    root = reasons[-1]
    reason = f"{type(root).__name__}: {root}" if str(root) else type(root).__name__
    if _TLS.search(text):
        problem = Unreachable(
            f"{address} has no certificate that this machine trusts ({reason}); if a proxy in your "
            "network signs "
            "connections, point SSL_CERT_FILE and REQUESTS_CA_BUNDLE at a file with its certificate"
        )
        problem.is_lasting = True
        return problem
    if (proxy := _proxy_for(address)) is not None:
        problem = Unreachable(
            f"{address} cannot be reached through the proxy {proxy} ({reason}); correct "
            "HTTPS_PROXY, HTTP_PROXY "
            "or ALL_PROXY (http://USER:PASSWORD@HOST:PORT), or list the host in NO_PROXY"
        )
        problem.is_lasting = "407" in text  # the proxy requires user and password
        return problem
    if _DNS.search(text):
        return Unreachable(
            f"the host name in {address} cannot be resolved ({reason}); check the network and the "
            "spelling of the "
            "endpoint, or set HTTPS_PROXY if this machine reaches the internet through a proxy"
        )
    return Unreachable(
        f"{address} cannot be reached ({reason}); check the network and the endpoint, then retry"
    )


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
    current: BaseException | None = error
    while current is not None:
        yield current
        inner = (
            current.args[0] if current.args and isinstance(current.args[0], BaseException) else None
        )
        current = (
            inner or getattr(current, "reason", None) or current.__cause__ or current.__context__
        )
        if not isinstance(current, BaseException):
            return
