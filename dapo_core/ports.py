"""Ports: free ones of this machine, and whether another's answer."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def free_ports(host: str, count: int = 1) -> list[int]:
    """Different ports that are free on the host now; raises OSError for a host that is not here."""
    with contextlib.ExitStack() as stack:  # all stay bound until the last is chosen
        probes = [stack.enter_context(new_socket(host)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def bind_fault(host: str, port: int) -> str:
    """Why no process can listen on the port of the host, "" if one can."""
    with new_socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed server's connections linger
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def meeting_point(address: str) -> str:
    """A URL with a free port at an address of this machine, at which processes of several nodes meet."""
    anywhere, shown = ("::", f"[{address}]") if is_ipv6(address) else ("0.0.0.0", address)
    return f"tcp://{shown}:{free_ports(anywhere)[0]}"


def connect(address: str, max_seconds: float, own: str = "") -> None:
    """Open a TCP connection to HOST:PORT, from an `own` address if one is named; OSError says why not."""
    host, _, port = address.rpartition(":")
    target, source = (host.strip("[]"), int(port)), (own, 0) if own else None
    socket.create_connection(target, max_seconds, source_address=source).close()


def new_socket(host: str) -> socket.socket:
    """A TCP socket of the host's family; a name is taken for one of IPv4."""
    return socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)


def is_ipv6(host: str) -> bool:
    """Whether this is an address of IPv6."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
