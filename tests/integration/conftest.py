"""What several integration tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_sites import ROOT
from tests.hub_server import HubServer
from tests.hubs import hub_of_this_machine
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
    # Else each training that joins starts a process per CPU, whatever it needs.
    os.environ |= {"RAY_prestart_worker_first_driver": "0"}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_of_this_machine(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home that all hosts share, and no token of another Ray."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.chdir(ROOT)
        yield Path.home()
