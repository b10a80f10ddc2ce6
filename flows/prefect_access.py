"""Reach a Prefect server: client, authentication, and checks of who can reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from dapo_core.errors import DapoError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

# USER:PASSWORD for the server and for its clients.
AUTH_VARIABLES = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")


class ServicesError(DapoError, RuntimeError):
    """A Prefect server or worker cannot be started, reached or stopped."""


@contextlib.contextmanager
def connected(api_url: str) -> Iterator[SyncPrefectClient]:
    """Yield a client of the server; raises ServicesError if the password or key is rejected.

    PREFECT_API_KEY is sent only to the server in Prefect's settings.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL

    auth = auth_string() or PREFECT_API_AUTH_STRING.value()  # possibly from a profile
    key = PREFECT_API_KEY.value() if api_url == PREFECT_API_URL.value() else None
    with SyncPrefectClient(api_url, auth_string=auth, api_key=key) as client:
        try:
            client.api_version()
        except PrefectHTTPStatusError as error:
            if error.response.status_code != HTTPStatus.UNAUTHORIZED:
                raise
            if key and not auth:
                problem = "rejects PREFECT_API_KEY: set a key of that server"
            else:
                problem = (
                    f"{'rejects the' if auth else 'needs a'} password: export {AUTH_VARIABLES[1]}="
                    "USER:PASSWORD with the value the server was started with"
                )
            raise ServicesError(f"the Prefect server at {api_url} {problem}") from None
        yield client


def configured_api() -> tuple[str, str] | None:
    """Return the API address in the user's Prefect settings, and where it is set."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url, "PREFECT_API_URL"
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    return (url, "your Prefect profile") if url else None


def require_server(url: str) -> None:
    """Raise ServicesError unless the server responds and accepts our credentials."""
    if not is_healthy(url):
        raise ServicesError(
            f"the Prefect server at {url} does not respond; start it, or fix PREFECT_API_URL or "
            "the profile. If neither is set, dapo starts its own server"
        )
    with connected(url):
        pass


def auth_string() -> str | None:
    """Return the server's USER:PASSWORD from the environment, None if it is not set."""
    return next((value for name in AUTH_VARIABLES if (value := os.environ.get(name))), None)


def is_loopback(host: str) -> bool:
    """True if the host is reachable from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def own_addresses() -> list[str]:
    """Return the addresses at which other machines can reach this one, formatted for a URL."""
    listed = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    internet = [each.address for each in listed if each.family in (socket.AF_INET, socket.AF_INET6)]
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in internet]
    outside = [each for each in found if not (each.is_loopback or each.is_link_local)]
    return [f"[{each}]" if each.version == 6 else str(each) for each in outside]


def is_healthy(api_url: str) -> bool:
    """True if a Prefect server answers, even if it requires authentication for this."""
    return _status(f"{api_url}/health") in (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED)


def lets_anyone_in(api_url: str) -> bool:
    """True if the server accepts API requests without a password."""
    return _status(f"{api_url}/admin/version") == HTTPStatus.OK


def _status(url: str) -> int | None:
    """Return the status code of a GET, without a proxy on this machine; None without an answer."""
    import httpx  # takes 0.1 s to import

    host = urlsplit(url).hostname or ""
    is_here = is_loopback(host) or host in {each.strip("[]") for each in own_addresses()}
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
        return httpx.get(url, timeout=5.0, trust_env=not is_here).status_code
    return None


def is_listening(pid: int, port: int) -> bool:
    """True if the process or one of its children listens on the port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        sockets = [
            each
            for one in (process, *process.children(recursive=True))
            for each in one.net_connections("tcp")
        ]
        listening = (each for each in sockets if each.status == psutil.CONN_LISTEN)
        return any(each.laddr.port == port for each in listening)
    return False
