"""`python -m dapo_core.cluster.room ADDRESS`: the resources of a Ray cluster as JSON, in all and free."""

from __future__ import annotations

import json
import logging
import sys

import ray


def main(address: str) -> int:
    """Print the resources, or why the cluster cannot be used; returns the exit status."""
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError) as error:
        sys.stdout.write(f"{str(error).strip().splitlines()[0]}\n")
        return 1
    sys.stdout.write(json.dumps({"total": ray.cluster_resources(), "free": ray.available_resources()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
