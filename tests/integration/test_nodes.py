"""Several nodes, as raylets on one machine: placement, preflight, a node without the files."""

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dapo_core.cluster.connection import AUTH_TOKEN, connected_to_ray, private_token
from dapo_core.cluster.placement import Demand, place_roles, reserve
from dapo_core.cluster.shared_files import require_shared
from dapo_core.config.train import TrainConfig
from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from flows.config import load_config
from tasks.preflight.cluster import check_cluster
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.preflight.smoke import QUESTION, _sample_on_node
from tests.processes import wait_until
from tests.trainings import World, config_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
NUM_NODES = 4
DEVICES = {"NPU": 32, "GPU": 32}  # per node: what the largest recipe needs on four nodes
# A node whose port is closed is dead after 2 s instead of 15; slow nodes keep Ray's default.
QUICK_DEATH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
QUICK_DEATH |= {"health_check_failure_threshold": 2}
ONE_PROCESS = {"RAY_prestart_worker_first_driver": "0"}  # else each declared CPU gets a process
HERE = Path("/proc/self/cwd")  # a different folder for the processes of each node


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all nodes but one see at HERE."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    """A head node with two CPUs, where the trainer runs."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", AUTH_TOKEN: private_token()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(ONE_PROCESS.items())))
        patch.chdir(shared)
        head = {"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK_DEATH}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def other_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with an extra line."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("dapo_core", "downloads", "eval", "tasks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("durable.py", "heartbeat.py", "redaction.py"):
        shutil.copy(ROOT / name, folder)
    with (folder / "durable.py").open("a") as file:
        file.write("# of another commit\n")
    return folder


def test_preflight_names_the_node_that_differs(
    cluster: Cluster, shared: Path, other_project: Path, tmp_path: Path
) -> None:
    (shared / "store").mkdir()
    os.chdir(tmp_path)
    variables = {"PYTHONPATH": str(other_project), "VLLM_USE_V1": "1", **ONE_PROCESS}
    node = cluster.add_node(num_cpus=1, env_vars=variables)
    os.chdir(shared)
    config = config_of(train={"ray_address": cluster.address}, store={"path": str(HERE / "store")})
    findings = Findings()
    check_cluster(config, None, is_whole=True, findings=findings)
    cluster.remove_node(node)
    by_check = {(finding.check, finding.status): finding for finding in findings}
    other = re.escape(by_check["files", FAIL].where)
    assert re.fullmatch(r".+ \(.+, node [0-9a-f]{6}\)", by_check["files", FAIL].where)
    assert "does not see output /proc/self/cwd/store" in by_check["files", FAIL].found
    assert re.match(other, by_check["versions", FAIL].where)
    assert re.match(r"code [0-9a-f]{12}, but [0-9a-f]{12} on ", by_check["versions", FAIL].found)
    assert re.match(other, by_check["environment", WARN].where)
    assert by_check["environment", WARN].found.startswith("VLLM_USE_V1=1: unset it")
    assert by_check["network", OK].found == "2 TCP connections, from each node to each other"
    assert by_check["all-reduce", OK].found.startswith("over gloo between 1 pair(s) of nodes")
    assert {("nodes", OK), ("clock", OK), ("Ray", OK)} <= by_check.keys()
    assert not list((shared / "store").iterdir())


def test_preflight_generates_on_an_engine_of_a_node(cluster: Cluster, world: World) -> None:
    findings = Findings()
    config = config_of(train={"ray_address": cluster.address})
    [sampled] = _sample_on_node(world.model, config, [QUESTION], findings)
    assert len(sampled.group.rollouts) == 8
    [found] = findings
    assert found.status == OK
    assert re.fullmatch(r"rollout.engine=hf on \S+ \(.+\) gave \d+ tokens after \d+ s", found.found)
    train = {"ray_address": cluster.address, "device": "npu"}
    spread = config_of(train=train, rollout={"engine": "vllm", "tensor_parallel": 2})
    assert not _sample_on_node(world.model, spread, [QUESTION], findings)
    assert findings[1].status == WARN
    assert "spans 2 devices and was not tried" in findings[1].found


@pytest.fixture(scope="module")
def nodes(
    cluster: Cluster, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Four nodes with devices, of which the second has another HERE; this process is connected."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "output").mkdir()
    for number in range(NUM_NODES):
        os.chdir(elsewhere if number == 1 else shared)
        resources = {"NPU": DEVICES["NPU"], f"node{number}": 1}
        cluster.add_node(num_cpus=128, num_gpus=DEVICES["GPU"], resources=resources, wait=False)
    os.chdir(shared)
    with connected_to_ray(TrainConfig(ray_address=cluster.address), num_cpus=0):
        yield cluster


@pytest.fixture
def groups(nodes: Cluster) -> Iterator[list[PlacementGroup]]:
    """Placement groups, removed afterwards."""
    groups: list[PlacementGroup] = []
    yield groups
    for group in groups:
        remove_placement_group(group)
    # Ray frees node by node, and would pack the next groups around devices still in use.
    all_devices = {name: NUM_NODES * count for name, count in DEVICES.items()}
    wait_until(lambda: free_devices() == all_devices, "free devices")


def free_devices() -> dict[str, float]:
    available = ray.available_resources()
    return {name: available.get(name, 0) for name in DEVICES}


RECIPES = {path.stem: load_config(path) for path in sorted(CONFIGS.glob("*.yaml"))}


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_are_packed_by_node_and_each_engine_is_on_one_node(
    recipe: str, groups: list[PlacementGroup]
) -> None:
    config = RECIPES[recipe]
    train, rollout, device = config.train, config.rollout, device_for(config.train.device)
    places = place_roles(config, device, groups, max_seconds=300)
    parts = [part for engine in places.engines for part in engine]
    assert len(places.ranks) == train.num_ranks
    assert {len(engine) for engine in places.engines} == {
        rollout.num_devices // rollout.num_workers
    }
    assert len(parts) == rollout.num_devices
    assert {len({part.node for part in engine}) for engine in places.engines} == {1}
    devices = {(place.group.id, place.bundle) for place in [*places.ranks, *parts]}
    assert len(devices) == config.num_devices  # each is used once, or by a rank and an engine part
    per_node = [len(list(ranks)) for _, ranks in groupby(place.node for place in places.ranks)]
    assert len(per_node) == len({place.node for place in places.ranks})  # ranks are consecutive
    if device.kind != "cpu":
        full, rest = divmod(train.num_ranks, DEVICES[device.ray_resource])
        assert len(per_node) == full + bool(rest)
        assert not [count for count in per_node[:-1] if count % train.sequence_parallel]


def test_placement_waits_for_missing_devices(nodes: Cluster, groups: list[PlacementGroup]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reserve, Demand(1, {"CPU": 1, "late": 1}), groups, 300)
        nodes.add_node(num_cpus=1, resources={"late": 1})
        place = waiting.result()[0]
    late = [node["NodeID"] for node in ray.nodes() if "late" in node["Resources"]]
    assert late == [place.node]


def test_a_node_without_the_files_is_named(nodes: Cluster, shared: Path, world: World) -> None:
    (shared / "model").symlink_to(world.model)
    (shared / "output").mkdir()
    ids = {name: node["NodeID"] for node in ray.nodes() for name in node["Resources"]}
    config = config_of()
    require_shared([ids["node0"], ids["node2"]], config, HERE / "model", HERE / "output")
    message = (
        r"^node \S+ \(.+?\) does not see model folder /proc/self/cwd/model \(No such file or "
        r"directory\), "
        r"output /proc/self/cwd/output \(another folder\): put the store \(store\.path\)"
    )
    with pytest.raises(ConfigError, match=message):
        require_shared([ids["node0"], ids["node1"]], config, HERE / "model", HERE / "output")
    assert not list((shared / "output").iterdir())


def test_each_stage_is_on_one_node_and_engines_may_span_nodes(groups: list[PlacementGroup]) -> None:
    rollout = {"engine": "vllm", "num_workers": 2, "pipeline_parallel": 3}
    rollout |= {"tensor_parallel": DEVICES["NPU"] // 2}
    config = config_of(train={"device": "npu", "num_ranks": 8, "mini_prompts": 4}, rollout=rollout)
    places = place_roles(config, device_for("npu"), groups, max_seconds=300)
    assert len(places.engines) == 2
    size = config.rollout.tensor_parallel
    for parts in places.engines:
        stages = [parts[first : first + size] for first in range(0, len(parts), size)]
        assert [len({part.node for part in stage}) for stage in stages] == [1, 1, 1]
        assert len({part.node for part in parts}) > 1  # three stages of half a node each
