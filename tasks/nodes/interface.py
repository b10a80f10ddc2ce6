"""Find the interface that reaches other nodes by the kernel's routes, without a packet."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from dapo_core.errors import DapoError
from dapo_core.machine.ports import bind_fault, connect, is_ipv6
from tasks.preflight.interfaces import is_virtual

DEFAULT_ROUTE = "203.0.113.1"  # TEST-NET-3, never assigned: only the default route leads there
ANY_PORT = 9  # connecting a datagram socket sends nothing
CONNECT_SECONDS = 8.0  # the kernel retries a connection's first packet after 1, 3 and 7 s


class NoInterfaceError(DapoError):
    """No interface reaches the other nodes; the message lists this machine's interfaces."""


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine and the address that other nodes see."""

    name: str
    address: str
    mtu: int


def interface_towards(
    targets: Sequence[str], name: str | None = None, own_host: str = ""
) -> Interface:
    """Return the interface that leads to the first reachable target, or the one called `name`.

    An address of this machine selects its interface. Link-local addresses, container bridges and
    loopback are rejected, but `name` may be loopback; of its addresses, the one that `own_host`
    resolves to is used. A machine that is its own only target and whose name resolves to loopback
    (Debian's 127.0.1.1) or not at all uses the default route's interface. Raises NoInterfaceError.
    """
    if name is not None:
        return _named(name, targets, own_host)
    fault = ""
    for target in (*targets, DEFAULT_ROUTE) if list(targets) == [own_host] else targets:
        for address in addresses_of(target):
            label = target if target == address else f"{target} ({address})"
            try:
                source = source_towards(address)
            except OSError as error:
                fault = fault or f"{label} cannot be reached: {error.strerror}"
                continue
            found = interface_of(source)
            reason = _rejection(source, found)
            if found is not None and not reason:
                return found
            fault = fault or f"{label}: {reason}"
    raise _no_interface(
        fault or f"none of {targets} resolves",
        ". Set the host's address to one that the other hosts can reach, or set its interface",
    )


def _no_interface(reason: str, advice: str = "") -> NoInterfaceError:
    return NoInterfaceError(f"{reason}; this machine has {describe_interfaces()}{advice}")


def source_towards(address: str) -> str:
    """Return this machine's source address for packets to an address; OSError without a route."""
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))
        return str(probe.getsockname()[0])


def describe_interfaces() -> str:
    """List all interfaces with their addresses; those that are down are marked."""
    stats = psutil.net_if_stats()
    shown = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        held = [
            each.address for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        state = ", ".join(held) or "no address"
        device = stats.get(_device(name))
        shown.append(f"{name} ({state}{'' if device is not None and device.isup else '; down'})")
    return ", ".join(shown)


def _named(name: str, targets: Sequence[str], own_host: str) -> Interface:
    stats, entries = psutil.net_if_stats().get(_device(name)), psutil.net_if_addrs()
    if stats is None:
        raise _no_interface(f"no interface {name}")
    if not stats.isup:
        raise _no_interface(f"interface {name} is down")
    reached = [address for target in targets for address in addresses_of(target)]
    families = {socket.AF_INET6 if is_ipv6(each) else socket.AF_INET for each in reached}
    held = [each.address for each in entries.get(name, ()) if each.family in families]
    usable = [address for address in held if not _parsed(address).is_link_local]
    if not usable:
        others = f"only the link-local address {', '.join(held)}" if held else ""
        fault = others or "no address of the head's family"
        raise _no_interface(f"interface {name} has {fault}")
    own = [
        address
        for address in addresses_of(own_host)
        if address in usable or (name == "lo" and _parsed(address).is_loopback)
    ]
    return Interface(name, (own or usable)[0], stats.mtu)


def addresses_of(target: str) -> list[str]:
    """Resolve a name, IPv4 addresses first; [] if it does not resolve."""
    try:
        found = socket.getaddrinfo(target, None)
    except OSError:
        return []
    return sorted(dict.fromkeys(str(each[4][0]) for each in found), key=is_ipv6)


def interface_of(address: str) -> Interface | None:
    """Return the interface of this machine that has an address."""
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in entries):
            return Interface(name, address, stats[_device(name)].mtu)
    return None


def _device(name: str) -> str:
    """The device behind an address label: eth0 for eth0:1."""
    return name.partition(":")[0]


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _rejection(source: str, found: Interface | None) -> str:
    """Why other machines cannot reach this one at a source address; "" if they can."""
    if _parsed(source).is_loopback:
        return "only loopback leads there; remove the name from the 127.0.0.0/8 lines of /etc/hosts"
    if found is None:
        return f"no interface has {source}"
    if _parsed(found.address).is_link_local:
        return f"{found.name} has only a link-local address, {found.address}"
    if is_virtual(found.name):
        return f"it is reached through {found.name}, a container bridge of this machine"
    return ""


def unreachable(request: Mapping[str, Any]) -> str:
    """Why this node cannot connect to the head from its own address; "" if it can."""
    head = request["head_address"]
    try:
        connect(head, CONNECT_SECONDS, request["address"])
    except ConnectionRefusedError:
        return f"{head} refuses connections: no Ray listens there, or a firewall rejects them"
    except TimeoutError:
        return (
            f"{head} did not answer within {CONNECT_SECONDS:g} s: a firewall drops packets, or no "
            "route leads back"
        )
    except OSError as error:
        return f"{head} cannot be reached from {request['address']}: {error.strerror}"
    return ""


def port_owner(address: str, port: int) -> str:
    """Describe the process that listens on a port; "" if the port is free."""
    if not (reason := bind_fault(address, port)):
        return ""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(each.pid)
                words = " ".join(process.cmdline())
                return f"pid {each.pid} of {process.username()} ({words[:80]})"
    return f"a process that this user cannot see ({reason})"
