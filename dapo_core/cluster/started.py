"""Ray clusters that `dapo cluster up` started: what each of their nodes keeps of them.

~/.dapo/clusters/HEAD_PORT/address       of Ray's head, such as 10.0.0.1:6379
                           token         the cluster's secret, readable by the user alone
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
    """Where this user's clusters are kept on a node."""
    return Path.home() / ".dapo" / "clusters"


def token_environment(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a process joins the cluster at `address`, {} if the user sets his own or none is known.

    A token file counts only if this user owns it and no other may read it.
    """
    if any(name in environment for name in (AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH)):
        return {}
    for file in sorted(clusters_folder().glob(f"*/{ADDRESS}"), key=_age):
        token = file.with_name(TOKEN)
        if _is_same(address, file.read_text(encoding="utf-8").strip()) and _is_private(token):
            return {AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
    return {}


def _age(file: Path) -> float:
    return -file.stat().st_mtime  # the newest first


def _is_same(address: str, recorded: str) -> bool:
    """Whether HOST:PORT is the recorded one, also by a name of the host."""
    (host, _, port), (known_host, _, known_port) = address.rpartition(":"), recorded.rpartition(":")
    if port != known_port or not host:
        return False
    if host == known_host:
        return True
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    addresses = {str(each[4][0]) for each in found}
    known = known_host.strip("[]")
    if all(
        ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses
    ):  # a name of this machine
        return known in {each.address for entries in psutil.net_if_addrs().values() for each in entries}
    return known in addresses


def _is_private(token: Path) -> bool:
    try:
        status = token.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
