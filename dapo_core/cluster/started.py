"""Records that `dapo cluster up` keeps on each node about the clusters it started.

~/.dapo/clusters/HEAD_PORT/address       of the Ray head, such as 10.0.0.1:6379
                           token         the cluster's secret, readable only by the user
                           HOST/         record and log of the host's Ray (tasks/nodes/on_node.py)
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import psutil

AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ADDRESS, TOKEN = "address", "token"


def clusters_folder() -> Path:
    """Return the folder of this user's cluster records on a node."""
    return Path.home() / ".dapo" / "clusters"


def token_environment(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to join the cluster at `address`; empty if set or no token is known.

    A token file is used only if this user owns it and nobody else can read it.
    """
    if any(name in environment for name in (AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH)):
        return {}
    newest_first = sorted(
        clusters_folder().glob(f"*/{ADDRESS}"), key=lambda file: -file.stat().st_mtime
    )
    for file in newest_first:
        token = file.with_name(TOKEN)
        if _is_same(address, file.read_text(encoding="utf-8").strip()) and _is_private(token):
            return {AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
    return {}


def _is_same(address: str, recorded: str) -> bool:
    """True if HOST:PORT is the recorded address, possibly by another name of the host."""
    (host, _, port), (known_host, _, known_port) = address.rpartition(":"), recorded.rpartition(":")
    if port != known_port or not host:
        return False
    if host == known_host:
        return True
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    addresses = {str(entry[4][0]) for entry in found}
    known = known_host.strip("[]")
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        # a name of this machine
        return known in {
            entry.address for entries in psutil.net_if_addrs().values() for entry in entries
        }
    return known in addresses


def _is_private(token: Path) -> bool:
    try:
        status = token.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
