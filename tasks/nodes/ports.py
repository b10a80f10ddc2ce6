"""A node's ports: who has one, and whether the head's can be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import psutil

from dapo_core.ports import bind_fault, connect

REACH_SECONDS = 8.0  # a kernel sends a connection's first packet again after 1, 3 and 7 s


def unreachable(request: Mapping[str, Any]) -> str:
    """Why this node cannot open a connection to the head from its own address, "" if it can."""
    head = request["head_address"]
    try:
        connect(head, REACH_SECONDS, request["address"])
    except ConnectionRefusedError:
        return f"{head} refuses it: no Ray listens there, or a firewall rejects"
    except TimeoutError:
        return f"{head} does not answer it within {REACH_SECONDS:g} s: a firewall drops, or no way back"
    except OSError as error:
        return f"it cannot reach {head} from {request['address']}: {error.strerror}"
    return ""


def holder_of(address: str, port: int) -> str:
    """Who listens on a port of an address, "" if it is free."""
    if not (reason := bind_fault(address, port)):
        return ""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(each.pid)
                return f"pid {each.pid} of {process.username()} ({' '.join(process.cmdline())[:80]})"
    return f"a process that this user cannot see ({reason})"
