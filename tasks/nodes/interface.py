"""The network interface by which a node reaches another: asked of the kernel, without a packet."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from dapo_core.errors import DapoError
from dapo_core.ports import is_ipv6
from tasks.preflight.interfaces import is_virtual

ELSEWHERE = "203.0.113.1"  # of no machine (TEST-NET-3): the default route leads there
ANY_PORT = 9  # of a datagram socket, which sends nothing when it connects


class NoInterfaceError(DapoError):
    """A node has no interface by which others reach it; the message has what it has."""


@dataclass(frozen=True)
class Interface:
    """An interface of this machine, with the address that others see."""

    name: str
    address: str
    mtu: int


def interface_towards(targets: Sequence[str], wanted: str | None = None, own: str = "") -> Interface:
    """The interface, `wanted` if given, by which this machine reaches the first target that can be reached.

    A target is a name or an address, of either family. If one is this machine's own and an interface has it, that
    interface is meant. Never link-local, a bridge of containers or, unless it is `wanted`, loopback; of several
    addresses of the `wanted` one, `own` is taken if it is one, a name or an address.
    A machine that is its own only target needs none to reach it: where its name leads to loopback (Debian's
    127.0.1.1) or nowhere, the interface of the default route is meant.
    Raises NoInterfaceError with what is in the way and what there is.
    """
    if wanted is not None:
        return _named(wanted, targets, own)
    fault = ""
    for target in (*targets, ELSEWHERE) if list(targets) == [own] else targets:
        for address in addresses_of(target):
            try:
                source = source_towards(address)
            except OSError as error:
                fault = fault or f"{_called(target, address)} cannot be reached: {error.strerror}"
                continue
            found = interface_of(source)
            if not (why := _unfit(source, found)):
                assert found is not None
                return found
            fault = fault or f"{_called(target, address)}: {why}"
    raise NoInterfaceError(
        f"{fault or f'none of {targets} resolves'}; this machine has {describe_interfaces()}. Set the host's "
        "address to one that the others see, or its interface"
    )


def source_towards(address: str) -> str:
    """This machine's address on the way to another; raises OSError where no route leads there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))
        return str(probe.getsockname()[0])


def describe_interfaces() -> str:
    """Every interface with its addresses, and those that are down."""
    stats = psutil.net_if_stats()
    shown = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        held = [each.address for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)]
        state = ", ".join(held) or "no address"
        device = stats.get(_device(name))
        shown.append(f"{name} ({state}{'' if device is not None and device.isup else '; down'})")
    return ", ".join(shown)


def _named(name: str, targets: Sequence[str], own: str) -> Interface:
    stats, entries = psutil.net_if_stats().get(_device(name)), psutil.net_if_addrs()
    if stats is None:
        raise NoInterfaceError(f"no interface {name}; this machine has {describe_interfaces()}")
    if not stats.isup:
        raise NoInterfaceError(f"interface {name} is down; this machine has {describe_interfaces()}")
    families = {
        socket.AF_INET6 if ":" in address else socket.AF_INET for t in targets for address in addresses_of(t)
    }
    held = [each.address for each in entries.get(name, ()) if each.family in families]
    usable = [address for address in held if not ipaddress.ip_address(address.partition("%")[0]).is_link_local]
    if not usable:
        state = "only the link-local address " + ", ".join(held) if held else "no address of the head's kind"
        raise NoInterfaceError(f"interface {name} has {state}; this machine has {describe_interfaces()}")
    meant = [
        address for address in addresses_of(own) if address in usable or (name == "lo" and _is_loopback(address))
    ]
    return Interface(name, (meant or usable)[0], stats.mtu)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def addresses_of(target: str) -> list[str]:
    """What a name stands for, IPv4 first; [] if nothing."""
    try:
        return sorted(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(target, None)), key=is_ipv6)
    except OSError:
        return []


def interface_of(address: str) -> Interface | None:
    """The interface of this machine that has an address."""
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in entries):
            return Interface(name, address, stats[_device(name)].mtu)
    return None


def _device(name: str) -> str:
    """The interface that has a name: eth0:1 is the label of an address of eth0."""
    return name.partition(":")[0]


def _unfit(source: str, found: Interface | None) -> str:
    """Why other machines cannot reach this one at an address of an interface, "" if they may."""
    if _is_loopback(source):
        return "only loopback leads there; in /etc/hosts a name must not be an address of 127.0.0.0/8"
    if found is None:
        return f"no interface has {source}"
    if ipaddress.ip_address(found.address.partition("%")[0]).is_link_local:
        return f"{found.name} has only a link-local address, {found.address}"
    if is_virtual(found.name):
        return f"{found.name} leads there, a bridge of containers of this machine"
    return ""


def _called(target: str, address: str) -> str:
    return target if target == address else f"{target} ({address})"
