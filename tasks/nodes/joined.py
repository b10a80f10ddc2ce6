"""Waits until all nodes have joined a Ray cluster with their devices, and says which have not.

`python -m tasks.nodes.joined HEAD:PORT --resource NPU --count 32 --seconds 120 node1 node2`, status 0 if all have.
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
_NODE = "node:"  # Ray's resource of each node, followed by its address


class NotAllJoined(DapoError):
    """Nodes or devices are missing when the time is up."""


def wait_until_joined(address: str, hosts: Sequence[str], resource: str, count: int, seconds: float) -> str:
    """What the cluster has once every host is there with its devices; raises NotAllJoined after `seconds`."""
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
    """What the cluster lacks, "" for nothing. A host is known by any address that its name has."""
    there = {name[len(_NODE) :] for name in room.total if name.startswith(_NODE)} - {"__internal_head__"}
    devices = room.total.get(resource, 0)
    if len(there) >= len(hosts) and devices >= count:
        return ""
    absent = [host for host in hosts if there.isdisjoint(addresses_of(host))]
    named = f": {', '.join(absent)}" if absent else ""
    return (
        f"{len(there)} of {len(hosts)} nodes have joined with {devices:g} of {count} {resource}; missing{named}. "
        f"There are {', '.join(sorted(there)) or 'none'}; see Ray's log on the others"
    )


def main(arguments: Sequence[str]) -> int:
    """Wait as the arguments say; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tasks.nodes.joined", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--resource", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args(arguments)
    try:
        joined = wait_until_joined(given.address, given.hosts, given.resource, given.count, given.seconds)
    except DapoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{joined}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
