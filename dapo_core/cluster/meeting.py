"""Where processes of several nodes meet."""

from __future__ import annotations

import socket


def meeting_point(address: str) -> str:
    """A URL with a free port at an address of this machine, of either family."""
    is_ipv6 = ":" in address
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"tcp://[{address}]:{port}" if is_ipv6 else f"tcp://{address}:{port}"
