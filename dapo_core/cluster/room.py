"""Queries a running Ray cluster's resources in a child process, since connecting may block.

`python -m dapo_core.cluster.room ADDRESS [PARENT_PID]` prints total, free and per-node resources as
JSON. It exits with its parent, which a signal may end at any moment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import PIPE
from typing import Any, NamedTuple

from dapo_core.cluster.started import AUTH_MODE, token_environment
from dapo_core.errors import ConfigError, WorkerDied
from dapo_core.machine.ports import connect
from durable import end_with

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
LOG_SECONDS = 10.0  # between log lines while waiting
CONNECT_SECONDS = 5.0
START_RAY = (
    "start one on a list of machines with `dapo cluster up` (docs/clusters.md), or by hand with a "
    "token (docs/security.md), or unset train.ray_address to use only this machine"
)
NO_RAY = "Could not find any running Ray instance"  # from Ray's message


class Room(NamedTuple):
    """Resources of a cluster by Ray name, such as CPU and NPU."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    nodes: Sequence[Mapping[str, Any]] = ()  # id, address, is_alive, total and free by node


def ask_cluster(
    address: str, max_seconds: float = ANSWER_SECONDS, environment: Mapping[str, str] = os.environ
) -> Room:
    """Return the cluster's resources, authenticating with the token from the environment.

    Raises ConfigError with the commands to run if `auto` finds no Ray on this machine, and
    WorkerDied with Ray's reason if a cluster does not answer. While waiting, it logs progress and
    signals take effect immediately.
    """
    command = [sys.executable, "-m", "dapo_core.cluster.room", address, str(os.getpid())]
    started = time.monotonic()
    hint = ""
    if AUTH_MODE not in environment:  # Ray silently waits for a cluster that wants a token
        hint = f"; if it has a token, set {AUTH_MODE}=token (docs/security.md)"
    with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True) as child:
        try:
            while (seconds := time.monotonic() - started) < max_seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    left = min(LOG_SECONDS, max_seconds - seconds)
                    output, errors = child.communicate(timeout=left)
                    break
                logger.info("waiting for %s to answer (limit %g s)", _name(address), max_seconds)
            else:
                raise WorkerDied(f"{_name(address)} did not answer within {max_seconds:g} s{hint}")
        finally:
            child.kill()
    lines = output.strip().splitlines() or errors.strip().splitlines() or ["no output"]
    if NO_RAY in lines[-1]:
        raise ConfigError(
            f"train.ray_address={address} needs a Ray on this machine, but none runs; {START_RAY}"
        )
    if child.returncode:
        raise WorkerDied(f"{_name(address)} does not answer: {lines[-1]}")
    return Room(**json.loads(lines[-1]))


def _name(address: str) -> str:
    return f"the Ray cluster at train.ray_address={address}"


def main(address: str) -> int:
    """Print the resources, or why the connection failed; returns the exit status."""
    import ray
    from ray._private import services
    from ray._private.state import available_resources_per_node

    use_known_token(address)
    try:
        if address == "auto" and not os.environ.get("RAY_ADDRESS"):
            # Ray retries forever if a dead instance left its address in a file, which only a
            # private function reads.
            _require_listener(services.canonicalize_bootstrap_address_or_die(address))
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        kind = type(error).__name__
        if "AuthenticationError" in str(error.__cause__):
            kind = "AuthenticationError"
        sys.stdout.write(f"{kind}: {(str(error).strip().splitlines() or [''])[0]}\n")
        return 1
    free = available_resources_per_node()
    nodes = [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "is_alive": node["Alive"],
            "total": node["Resources"],
            "free": free.get(node["NodeID"], {}),
        }
        for node in ray.nodes()
    ]
    room = {"total": ray.cluster_resources(), "free": ray.available_resources(), "nodes": nodes}
    sys.stdout.write(json.dumps(room))
    return 0


def use_known_token(address: str) -> None:
    """Use the cluster's token if `dapo cluster up` stored one here, in children too."""
    from ray._private import services
    from ray._raylet import Config  # type: ignore[attr-defined]

    if address == "auto":
        with contextlib.suppress(ConnectionError):
            address = services.canonicalize_bootstrap_address_or_die(address)
    if found := token_environment(address, os.environ):
        os.environ.update(found)
        # Ray reads the variables on import, and has no public way to do it again
        Config.initialize("")


def _require_listener(address: str) -> None:
    """Raise ConnectionError if the port is closed: no Ray runs there."""
    try:
        connect(address, CONNECT_SECONDS)
    except ConnectionRefusedError:
        message = f"{NO_RAY}: {address} belongs to an instance that has ended"
        raise ConnectionError(message) from None
    except OSError:  # Ray itself waits for a slow network
        return


if __name__ == "__main__":
    for parent_pid in sys.argv[2:]:
        end_with(int(parent_pid))
    sys.exit(main(sys.argv[1]))
