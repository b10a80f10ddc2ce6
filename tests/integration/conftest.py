"""What several integration tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.trainings import World, build_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A running Ray for `train.ray_address`: trainings that join it need not start one each."""
    from ray.cluster_utils import Cluster

    from dapo_core.cluster.connection import AUTH_TOKEN, private_token

    # A process reads its token once, so its private Rays and this one have the same.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", AUTH_TOKEN: private_token()}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
