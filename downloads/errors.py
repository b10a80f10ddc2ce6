"""Errors of downloads: each says what happened, what it means and what to change."""

from __future__ import annotations

import email.utils
import errno
import re
import time
from collections.abc import Iterator
from urllib.parse import urlsplit


class DownloadError(Exception):
    """Base of the errors that downloads raise on purpose. Takes one message and is picklable."""

    is_lasting = True  # until the user changes something; the others may pass when tried again


class BadReference(DownloadError, ValueError):
    """A reference is misspelt, or names no digest where one is needed."""


class NotFound(DownloadError):
    """The repository, its revision or a file in it does not exist, or not for this user."""


class AccessDenied(DownloadError):
    """The hub wants a token, another token, or its terms accepted."""


class WrongContent(DownloadError):
    """What came has another size or digest than was announced."""


class DiskTooSmall(DownloadError):
    """The files do not fit on the disk. Raised before the first byte."""


class Unreachable(DownloadError):
    """The hub does not answer, or is busy; worth another attempt unless a setting of this machine is the cause."""

    is_lasting = False
    retry_after: float | None = None  # seconds that the server asks to wait


class Offline(Unreachable):
    """The environment forbids asking the hub."""

    is_lasting = True


def disk_is_full(error: OSError) -> DiskTooSmall | None:
    """The error of a disk that filled up during a download; None for any other one."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return DiskTooSmall(
        f"the disk filled up during the download: {error}. What has come is kept; make room (dapo gc removes what "
        "no run needs) and run it again, or set store.path to another disk"
    )


def seconds_from_now(retry_after: str) -> float | None:
    """The seconds that a Retry-After header asks to wait, as a number or a date; None where it says neither."""
    text = retry_after.strip()
    try:
        moment = None if text[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp()
        return float(text) if moment is None else max(0.0, moment - time.time())
    except ValueError:
        return None


_TLS = re.compile(r"CERTIFICATE|\bSSL|\bTLS", re.IGNORECASE)
_DNS = re.compile(r"gaierror|NameResolution|getaddrinfo|Name or service not known|name resolution", re.IGNORECASE)


def unreachable(address: str, error: BaseException) -> Unreachable:
    """What an exception of an HTTP library means: a certificate, a proxy, a name, or the network."""
    reasons = list(_causes(error))
    text = " ".join(f"{type(reason).__name__} {reason}" for reason in reasons)
    root = reasons[-1]
    said = f"{type(root).__name__}: {root}" if str(root) else type(root).__name__
    if _TLS.search(text):
        problem = Unreachable(
            f"{address} shows no certificate that this machine trusts ({said}); where a proxy of your network "
            "signs connections, put its certificate in a file that SSL_CERT_FILE and REQUESTS_CA_BUNDLE name"
        )
        problem.is_lasting = True
        return problem
    if (proxy := _proxy_for(address)) is not None:
        problem = Unreachable(
            f"{address} cannot be reached through the proxy {proxy} ({said}); correct HTTPS_PROXY, HTTP_PROXY or "
            "ALL_PROXY (http://USER:PASSWORD@HOST:PORT), or list the host in NO_PROXY"
        )
        problem.is_lasting = "407" in text  # it wants a user and password
        return problem
    if _DNS.search(text):
        return Unreachable(
            f"the name of {address} cannot be resolved ({said}); check the network, the spelling of the endpoint, "
            "or set HTTPS_PROXY if this machine reaches the internet through a proxy"
        )
    return Unreachable(f"{address} cannot be reached ({said}); check the network and the endpoint, and try again")


def _proxy_for(address: str) -> str | None:
    """Host and port of the proxy that the environment names for an address."""
    from urllib.request import getproxies, proxy_bypass  # 0.1 s

    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return urlsplit(proxy if "//" in proxy else f"//{proxy}").netloc.rpartition("@")[2]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        inner = current.args[0] if current.args and isinstance(current.args[0], BaseException) else None
        current = inner or getattr(current, "reason", None) or current.__cause__ or current.__context__
        if not isinstance(current, BaseException):
            return
