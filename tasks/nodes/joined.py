"""Wait until all nodes have joined a Ray cluster with their devices, or report which have not.

`python -m tasks.nodes.joined HEAD:PORT --resource NPU --count 32 --seconds 120 node1 node2` exits
with 0 or 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from dapo_core.cluster.room import Room, ask_cluster
from dapo_core.errors import DapoError, WorkerDied
from tasks.nodes.interface import addresses_of

POLL_SECONDS = 2.0
_NODE = "node:"  # Ray has a resource node:ADDRESS for each node


class NotAllJoined(DapoError):
    """Nodes or devices were still missing at the deadline."""


def wait_until_joined(
    address: str, hosts: Sequence[str], resource: str, count: int, seconds: float
) -> str:
    """Wait until every host has joined with its devices; raises NotAllJoined after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            fault = _missing(ask_cluster(address, max(left, 1.0)), hosts, resource, count)
        except WorkerDied as error:
            fault = str(error)
        if not fault:
            return f"{len(hosts)} nodes have joined {address} with {count} {resource}"
        if time.monotonic() + POLL_SECONDS >= end:
            raise NotAllJoined(f"after {seconds:g} s {fault}")
        time.sleep(POLL_SECONDS)


def _missing(room: Room, hosts: Sequence[str], resource: str, count: int) -> str:
    """Describe missing nodes and devices, "" for none. A host has joined if any address of its name
    has.
    """
    joined = {name[len(_NODE) :] for name in room.total if name.startswith(_NODE)} - {
        "__internal_head__"
    }
    devices = room.total.get(resource, 0)
    if len(joined) >= len(hosts) and devices >= count:
        return ""
    absent = [host for host in hosts if joined.isdisjoint(addresses_of(host))]
    missing = f"missing: {', '.join(absent)}; " if absent else ""
    return (
        f"{len(joined)} of {len(hosts)} nodes have joined with {devices:g} of {count} {resource}; "
        f"{missing}"
        f"joined: {', '.join(sorted(joined)) or 'none'}; see Ray's log on the others"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tasks.nodes.joined", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--resource", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(arguments)
    try:
        message = wait_until_joined(
            args.address, args.hosts, args.resource, args.count, args.seconds
        )
    except DapoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
