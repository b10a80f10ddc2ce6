"""TCP ports: free ones on this machine, and connections to others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def free_ports(host: str, count: int = 1) -> list[int]:
    """Return distinct free ports; raises OSError if the host is not this machine."""
    with contextlib.ExitStack() as stack:  # keep all bound until the last is chosen
        probes = [stack.enter_context(new_socket(host)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def bind_fault(host: str, port: int) -> str:
    """Return why no process can listen on the port, "" if one can."""
    with new_socket(host) as probe:
        # a closed server's connections linger
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def meeting_point(address: str) -> str:
    """Return a rendezvous URL with a free port at an address of this machine."""
    any_address, shown = ("::", f"[{address}]") if is_ipv6(address) else ("0.0.0.0", address)
    return f"tcp://{shown}:{free_ports(any_address)[0]}"


def connect(address: str, max_seconds: float, own: str = "") -> None:
    """Open and close a TCP connection to HOST:PORT, from `own` if given; raises OSError."""
    host, _, port = address.rpartition(":")
    target, source = (host.strip("[]"), int(port)), (own, 0) if own else None
    socket.create_connection(target, max_seconds, source_address=source).close()


def new_socket(host: str) -> socket.socket:
    """Create a TCP socket of the host's address family; host names count as IPv4."""
    return socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)


def is_ipv6(host: str) -> bool:
    """Return whether this is an IPv6 address."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
