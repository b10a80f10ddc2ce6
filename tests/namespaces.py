"""Hosts for tests: network namespaces joined by a bridge, with wires of different names and interfaces to avoid.

Nothing is added to the machine's own network. `ip netns exec HOST sh -c` stands in for ssh. Wires can be slow
lines (slow_line.py): not every kernel has the module netem.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LETTERS = "abcdefgh"
_CLOSED = "ipproto tcp sport {} blackhole"
_STOPPED = ["tbf", "rate", "1kbit", "burst", "10", "limit", "10"]
_NEEDED = (
    "link add bridge type bridge",
    "link set bridge up",
    "link add wire type veth peer name port",
    "link del wire",
    f"rule add {_CLOSED.format(1)}",
    f"rule del {_CLOSED.format(1)}",
)


class NoNamespacesError(Exception):
    """This machine makes no network namespaces; the message has the reason."""


@dataclass(frozen=True)
class FakeHost:
    """A namespace: name, the interface that reaches the others, the address there, the wire if it is slow."""

    name: str
    interface: str
    address: str
    line: subprocess.Popen[str] | None = None

    def run(self, command: str) -> str:
        """What a line of shell prints on the host."""
        return _run("ip", "netns", "exec", self.name, "sh", "-c", command)

    def sent_bytes(self) -> int:
        """Bytes that have left by the wire."""
        [link] = json.loads(self.run(f"ip -s -j link show {self.interface}"))
        return int(link["stats64"]["tx"]["bytes"])

    def slow_down(self, seconds: float, loss: float = 0.0) -> None:
        """From now on frames take so many seconds to and from the host, and this share of them is lost."""
        assert self.line is not None
        assert self.line.stdin is not None
        self.line.stdin.write(f"{seconds} {loss}\n")
        self.line.stdin.flush()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """No packet leaves the host inside the block; its wire stays up."""
        self.run(f"tc qdisc add dev {self.interface} root {' '.join(_STOPPED)}")
        try:
            yield
        finally:
            self.run(f"tc qdisc del dev {self.interface} root")

    @contextmanager
    def closed(self, port: int) -> Iterator[None]:
        """Answers from a port do not leave the host inside the block, as behind a firewall that drops."""
        rule = _CLOSED.format(port)
        self.run(f"ip rule add {rule}")
        try:
            yield
        finally:
            self.run(f"ip rule del {rule}")


@contextmanager
def hosts(count: int, are_slow: bool = False) -> Iterator[list[FakeHost]]:
    """Namespaces that reach each other; beside its wire each has docker0 and a link-local interface, which are up,
    and one with an address that is down. `slow_down` works on those that `are_slow`.
    Raises NoNamespacesError where they cannot be made."""
    if missing := [command for command in ("ip", "tc") if shutil.which(command) is None]:
        raise NoNamespacesError(f"there is no command {missing[0]} (Debian's iproute2)")
    prefix = f"dapo{os.getpid()}"
    made: list[str] = []
    lines: list[subprocess.Popen[str]] = []
    try:
        try:
            _make(made, f"{prefix}-switch", _NEEDED)
            _run("tc", "-n", made[0], "qdisc", "add", "dev", "bridge", "root", *_STOPPED)
            _run("tc", "-n", made[0], "qdisc", "del", "dev", "bridge", "root")
        except subprocess.CalledProcessError as error:
            command = " ".join(error.cmd)
            raise NoNamespacesError(f"`{command}` is refused: {error.stderr.strip()}") from None
        found = []
        for number, letter in enumerate(LETTERS[:count], start=1):
            wire, name = f"wire{letter}", f"{prefix}-{letter}"
            _make(made, name, _decoys(number))
            if are_slow:
                lines.append(_slow_line(made[0], wire, f"port{letter}"))
                _run("ip", "-n", made[0], "link", "set", wire, "netns", name)
            else:
                peer = f"peer name port{letter} netns {made[0]}"
                _run("ip", "-n", name, *f"link add {wire} type veth {peer}".split())
            host = FakeHost(name, wire, f"198.18.{os.getpid() % 250}.{number}", *lines[number - 1 :])
            for command in _addresses(wire, f"{host.address}/24"):
                _run("ip", "-n", name, *command.split())
            _run("ip", "-n", made[0], "link", "set", f"port{letter}", "master", "bridge", "up")
            found.append(host)
        yield found
    finally:
        for line in lines:
            with line:  # which closes its standard input, and it ends
                pass
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _slow_line(place: str, *devices: str) -> subprocess.Popen[str]:
    """A slow line, once its devices are there; raises NoNamespacesError where they cannot be made."""
    command = ["ip", "netns", "exec", place, sys.executable, "-m", "tests.slow_line", *devices]
    pipe = subprocess.PIPE
    line = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert line.stdout is not None
    assert line.stderr is not None
    if line.stdout.readline() != "ready\n":
        raise NoNamespacesError(f"there are no TAP devices: {line.communicate()[1].strip().splitlines()[-1]}")
    return line


def _make(made: list[str], name: str, commands: Sequence[str]) -> None:
    _run("ip", "netns", "add", name)
    made.append(name)
    for command in ("link set lo up", *commands):
        _run("ip", "-n", name, *command.split())


def _addresses(interface: str, address: str) -> list[str]:
    return [f"addr add {address} dev {interface}", f"link set {interface} up"]


def _decoys(number: int) -> list[str]:
    """docker0 with the address that it has everywhere, a link-local interface, and one that is down."""
    return [
        *(f"link add {name} type bridge" for name in ("docker0", "usb0", "spare0")),
        *_addresses("docker0", "172.17.0.1/16"),
        *_addresses("usb0", f"169.254.7.{number}/16"),
        f"addr add 10.250.250.{number}/24 dev spare0",
    ]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
