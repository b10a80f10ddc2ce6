"""A node of a simulated cluster dies in the middle of a training."""

import json
import os
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from dapo_core.cluster import shrink
from dapo_core.cluster.connection import AUTH_TOKEN, private_token
from dapo_core.training import train
from tests.integration.test_nodes import ONE_PROCESS, QUICK_DEATH
from tests.trainings import World, config_of


def test_training_continues_smaller_after_losing_a_node(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", AUTH_TOKEN: private_token()}
    monkeypatch.setenv(*next(iter(ONE_PROCESS.items())))
    monkeypatch.setattr(shrink, "SETTLE_SECONDS", 4.0)
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK_DEATH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    changes = {"total_steps": 3, "on_lost_node": "shrink", "restart_delay_seconds": 0.0}
    config = config_of(train={"ray_address": cluster.address, **changes})

    def lose_node(step: int, _: dict[str, float]) -> None:
        if step == 2 and node in cluster.worker_nodes:  # once; step 1 has its checkpoint
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            workers = raylet.children(recursive=True)
            cluster.remove_node(node, allow_graceful=False)
            psutil.wait_procs(workers)  # wait until they notice, which may take longer than a step

    try:
        result = train(config, world.data, world.model, tmp_path, on_step=lose_node)
    finally:
        cluster.shutdown()
    assert result.steps == 3
    assert "training continues with 1 of 2 ranks and 1 of 1 engines" in caplog.text
    assert "from checkpoint step_00000" in caplog.text
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert len(list(result.checkpoint.glob("*.distcp"))) == 1  # one shard per rank
