"""Hosts for tests: network namespaces joined by a bridge, each with its own wire and decoy
interfaces.

The machine's own network is not changed. `ip netns exec HOST sh -c` stands in for ssh. Wires can be
slow lines (slow_line.py), since not every kernel has the netem module.
"""

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
    """This machine cannot create network namespaces; the message has the reason."""


@dataclass(frozen=True)
class FakeHost:
    """A namespace: its name, the interface and address that reach the others, the slow line if
    there is one.
    """

    name: str
    interface: str
    address: str
    line: subprocess.Popen[str] | None = None

    def run(self, command: str) -> str:
        """Run a shell line on the host; returns its output."""
        return _run("ip", "netns", "exec", self.name, "sh", "-c", command)

    def sent_bytes(self) -> int:
        """Return the bytes sent over the wire."""
        [link] = json.loads(self.run(f"ip -s -j link show {self.interface}"))
        return int(link["stats64"]["tx"]["bytes"])

    def slow_down(self, seconds: float, loss: float = 0.0) -> None:
        """Delay frames to and from the host by `seconds`, and drop the share `loss` of them."""
        assert self.line is not None
        assert self.line.stdin is not None
        self.line.stdin.write(f"{seconds} {loss}\n")
        self.line.stdin.flush()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Drop all packets that leave the host inside the block; its wire stays up."""
        self.run(f"tc qdisc add dev {self.interface} root {' '.join(_STOPPED)}")
        try:
            yield
        finally:
            self.run(f"tc qdisc del dev {self.interface} root")

    @contextmanager
    def closed(self, port: int) -> Iterator[None]:
        """Drop the answers from a port inside the block, like a firewall."""
        rule = _CLOSED.format(port)
        self.run(f"ip rule add {rule}")
        try:
            yield
        finally:
            self.run(f"ip rule del {rule}")


@contextmanager
def hosts(count: int, are_slow: bool = False) -> Iterator[list[FakeHost]]:
    """Create namespaces that reach each other, with decoys: docker0, a link-local interface and one
    that is down.

    `slow_down` needs `are_slow`. Raises NoNamespacesError if they cannot be created.
    """
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
            raise NoNamespacesError(f"`{command}` failed: {error.stderr.strip()}") from None
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
            host = FakeHost(
                name, wire, f"198.18.{os.getpid() % 250}.{number}", *lines[number - 1 :]
            )
            for command in _addresses(wire, f"{host.address}/24"):
                _run("ip", "-n", name, *command.split())
            _run("ip", "-n", made[0], "link", "set", f"port{letter}", "master", "bridge", "up")
            found.append(host)
        yield found
    finally:
        for line in lines:
            with line:  # closes its standard input, which ends it
                pass
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _slow_line(place: str, *devices: str) -> subprocess.Popen[str]:
    """Start a slow line and wait for its devices; raises NoNamespacesError if they cannot be
    created.
    """
    command = ["ip", "netns", "exec", place, sys.executable, "-m", "tests.slow_line", *devices]
    pipe = subprocess.PIPE
    line = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert line.stdout is not None
    assert line.stderr is not None
    if line.stdout.readline() != "ready\n":
        raise NoNamespacesError(
            f"there are no TAP devices: {line.communicate()[1].strip().splitlines()[-1]}"
        )
    return line


def _make(made: list[str], name: str, commands: Sequence[str]) -> None:
    _run("ip", "netns", "add", name)
    made.append(name)
    for command in ("link set lo up", *commands):
        _run("ip", "-n", name, *command.split())


def _addresses(interface: str, address: str) -> list[str]:
    return [f"addr add {address} dev {interface}", f"link set {interface} up"]


def _decoys(number: int) -> list[str]:
    """Commands for docker0 with its usual address, a link-local interface, and one that is down."""
    return [
        *(f"link add {name} type bridge" for name in ("docker0", "usb0", "spare0")),
        *_addresses("docker0", "172.17.0.1/16"),
        *_addresses("usb0", f"169.254.7.{number}/16"),
        f"addr add 10.250.250.{number}/24 dev spare0",
    ]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
