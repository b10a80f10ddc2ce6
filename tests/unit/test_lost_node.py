"""The loss of a node leaves the most ranks and engines that fit; a node with other files says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo_core.cluster.placement import Demand, demands
from dapo_core.cluster.shared_files import differences, digests
from dapo_core.cluster.shrink import has_room, shrunk
from dapo_core.device import device_for
from dapo_core.errors import ConfigError
from flows.config import Config
from tests.trainings import config_of

NPU_NODE = {"CPU": 128.0, "NPU": 16.0}


def four_nodes(**changes: dict[str, Any]) -> Config:
    """32 ranks and 8 engines of 4 on 64 dies, 512 responses to an optimizer step."""
    train = {"device": "npu", "num_ranks": 32, "sequence_parallel": 8, "mini_prompts": 32, "train_prompts": 32}
    rollout = {"engine": "vllm", "num_workers": 8, "tensor_parallel": 4, "group_size": 16}
    return config_of(
        train=train | changes.pop("train", {}),
        rollout=rollout | changes.pop("rollout", {}),
        sampler={"gen_prompts": 32},
        **changes,
    )


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        ([4, 4], [Demand(6, {"NPU": 1}), Demand(2, {"NPU": 1}, on_one_node=True)], True),
        ([4, 4], [Demand(7, {"NPU": 1}), Demand(2, {"NPU": 1}, on_one_node=True)], False),
        ([3, 3], [Demand(4, {"NPU": 1}, on_one_node=True)], False),  # six are free, but not on one node
        ([3, 3], [Demand(4, {"NPU": 1})], True),
        ([4], [Demand(2, {"NPU": 1, "CPU": 1})], False),  # no CPU
        ([], [Demand(1, {"NPU": 1})], False),
    ],
)
def test_room_is_counted_by_node(free: list[int], wanted: list[Demand], expected: bool) -> None:
    assert has_room([{"NPU": float(count)} for count in free], wanted) is expected


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [
        # 24 ranks are 3 data-parallel ones, over which 512 responses do not divide: the next are 16, or all 32.
        (3, (32, 4)),
        (2, (16, 4)),
        (1, (8, 2)),
    ],
)
def test_both_roles_shrink_alike_within_the_rules(num_nodes: int, expected: tuple[int, int]) -> None:
    config, device = four_nodes(), device_for("npu")
    assert has_room([NPU_NODE] * 4, demands(config, device))
    smaller = shrunk(config, device, [NPU_NODE] * num_nodes)
    assert (smaller.train.num_ranks, smaller.rollout.num_workers) == expected
    changed = {"train": {"num_ranks": expected[0]}, "rollout": {"num_workers": expected[1]}}
    assert smaller == four_nodes(**changed)  # and nothing else changes


def test_what_cannot_shrink_is_refused_with_the_reason() -> None:
    config, device = four_nodes(train={"sequence_parallel": 1, "fsdp_size": 32}), device_for("npu")
    with pytest.raises(
        ConfigError, match=r"16\.0\}\]: train\.num_ranks=\d+ is not a multiple of train\.fsdp_size=32"
    ):
        shrunk(config, device, [NPU_NODE] * 2)
    with pytest.raises(ConfigError, match=r"are left, \[\]: they have no room for one of each"):
        shrunk(config, device, [])


def test_a_node_with_other_files_says_which(tmp_path: Path) -> None:
    scorer, model, output = tmp_path / "scorer.py", tmp_path / "model", tmp_path / "output"
    scorer.write_text("1")
    for folder in (model, output):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    (output / "probe").touch()
    paths = {"model folder": model, "output": output, "custom_reward.path": scorer}
    expected = digests(paths)
    assert differences(paths, expected, "probe") == []
    (model / "config.json").write_text("{ }")
    scorer.unlink()
    assert differences(paths, expected, "another") == [
        f"model folder {model} (other content)",
        f"output {output} (another folder)",
        f"custom_reward.path {scorer} (No such file or directory)",
    ]
    assert [path.name for path in output.iterdir()] == ["probe"]
