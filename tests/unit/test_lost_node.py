"""After losing a node, training continues with as many ranks and engines as fit."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dapo_core.cluster import shrink, start
from dapo_core.cluster.placement import Demand, Places, demands
from dapo_core.cluster.shared_files import differences, digests
from dapo_core.cluster.shrink import has_room, shrunk
from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from dapo_core.memory.published import published_config
from flows.config import Config
from tests.trainings import config_of

NPU_NODE = {"CPU": 128.0, "NPU": 16.0}


def four_node_config(**changes: dict[str, Any]) -> Config:
    """32 ranks and 8 engines of 4 dies each on 64 dies, 512 responses per optimizer step."""
    train = {
        "device": "npu",
        "num_ranks": 32,
        "sequence_parallel": 8,
        "mini_prompts": 32,
        "train_prompts": 32,
    }
    rollout = {"engine": "vllm", "num_workers": 8, "tensor_parallel": 4, "group_size": 16}
    return config_of(
        train=train | changes.pop("train", {}),
        rollout=rollout | changes.pop("rollout", {}),
        sampler={"gen_prompts": 32},
        **changes,
    )


@pytest.mark.parametrize(
    ("free", "demanded", "expected"),
    [
        ([4, 4], [Demand(6, {"NPU": 1}), Demand(2, {"NPU": 1}, on_one_node=True)], True),
        ([4, 4], [Demand(7, {"NPU": 1}), Demand(2, {"NPU": 1}, on_one_node=True)], False),
        # six are free, but on two nodes
        ([3, 3], [Demand(4, {"NPU": 1}, on_one_node=True)], False),
        ([3, 3], [Demand(4, {"NPU": 1})], True),
        ([4], [Demand(2, {"NPU": 1, "CPU": 1})], False),  # no CPU
        ([], [Demand(1, {"NPU": 1})], False),
    ],
)
def test_free_resources_are_counted_by_node(
    free: list[int], demanded: list[Demand], expected: bool
) -> None:
    assert has_room([{"NPU": float(count)} for count in free], demanded) is expected


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [
        # 24 ranks are 3 data-parallel groups, which do not divide 512 responses: next are 16, or
        # all 32.
        (3, (32, 4)),
        (2, (16, 4)),
        (1, (8, 2)),
    ],
)
def test_ranks_and_engines_shrink_in_proportion_to_a_valid_configuration(
    num_nodes: int, expected: tuple[int, int]
) -> None:
    config, device = four_node_config(), device_for("npu")
    assert has_room([NPU_NODE] * 4, demands(config, device))
    smaller = shrunk(config, device, [NPU_NODE] * num_nodes, Path())
    assert (smaller.train.num_ranks, smaller.rollout.num_workers) == expected
    changed = {"train": {"num_ranks": expected[0]}, "rollout": {"num_workers": expected[1]}}
    assert smaller == four_node_config(**changed)  # and nothing else changes


def test_colocated_ranks_and_engines_shrink_together() -> None:
    config, device = four_node_config(train={"placement": "colocated"}), device_for("npu")
    assert has_room([NPU_NODE] * 2, demands(config, device))
    smaller = shrunk(config, device, [NPU_NODE], Path())
    assert (smaller.train.num_ranks, smaller.rollout.num_workers) == (16, 4)
    with pytest.raises(ConfigError, match="not even one of each fits"):
        shrunk(config, device, [{"CPU": 128.0, "NPU": 3.0}] * 4, Path())


def test_a_training_that_cannot_shrink_fails_with_the_reason() -> None:
    config, device = (
        four_node_config(train={"sequence_parallel": 1, "fsdp_size": 32}),
        device_for("npu"),
    )
    with pytest.raises(
        ConfigError,
        match=r"16\.0\}\]: train\.num_ranks=\d+ is not a multiple of train\.fsdp_size=32",
    ):
        shrunk(config, device, [NPU_NODE] * 2, Path())
    with pytest.raises(ConfigError, match=r"remaining nodes, \[\]: not even one of each fits"):
        shrunk(config, device, [], Path())


def test_larger_shards_must_fit_the_memory_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("Qwen/Qwen3-32B")))
    config, device = four_node_config(train={"device_model": "Atlas 800T A3"}), device_for("npu")
    with pytest.raises(
        ConfigError, match=r"with train\.num_ranks=8, a rank's device needs \d+\.\d GiB in phase"
    ):
        # 32 billion parameters, 12 + 4 bytes each, over 8 ranks
        shrunk(config, device, [NPU_NODE], tmp_path)
    allowed = four_node_config(
        train={"device_model": "Atlas 800T A3", "allow_oversubscription": True}
    )
    assert shrunk(allowed, device, [NPU_NODE], tmp_path).train.num_ranks == 8


@pytest.mark.parametrize(
    ("address", "is_restart", "on_lost_node", "expected"),
    [
        ("auto", False, "shrink", "300 s"),
        ("auto", True, "wait", "3600 s"),
        ("auto", True, "shrink", "shrink"),
        (None, True, "shrink", "3600 s"),  # a single machine has no node to lose
    ],
)
def test_a_restart_follows_on_lost_node(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    is_restart: bool,
    on_lost_node: str,
    expected: str,
) -> None:
    def place(*arguments: Any) -> None:
        raise ConfigError(f"{arguments[-1]:.0f} s")

    def place_left(*_: Any) -> None:
        raise ConfigError("shrink")

    monkeypatch.setattr(start, "connected_to_ray", lambda *_: nullcontext())
    monkeypatch.setattr(start, "place_roles", place)
    monkeypatch.setattr(start, "place_what_is_left", place_left)
    config = config_of(train={"ray_address": address, "on_lost_node": on_lost_node})
    with (
        pytest.raises(ConfigError, match=f"^{expected}$"),
        start.start_cluster(config, "", Path(), is_restart),
    ):
        pass


def test_a_dead_node_that_still_counts_as_free_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    config, places, pending = four_node_config(), Places([], []), cast("Any", object())
    nodes, removed, tried = [SimpleNamespace(free=NPU_NODE)] * 4, [], []

    def place(fit: Config, _: object, groups: list[Any], max_seconds: float = 300.0) -> Places:
        tried.append(fit.train.num_ranks)
        groups.append(pending)
        if len(tried) == 1:
            nodes.pop()  # Ray declares it dead
            raise ConfigError(f"no free resources after {max_seconds:.0f} s")
        return places

    monkeypatch.setattr(shrink, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(shrink, "living_nodes", lambda: nodes)
    monkeypatch.setattr(shrink, "place_roles", place)
    monkeypatch.setattr(shrink, "remove_placement_group", removed.append)
    groups: list[Any] = []
    fit, found = shrink.place_what_is_left(config, device_for("npu"), groups, Path())
    assert found is places
    assert (tried, fit.train.num_ranks, fit.rollout.num_workers) == ([32, 32], 32, 4)
    assert (removed, groups) == ([pending], [pending])


def test_a_node_reports_files_that_differ(tmp_path: Path) -> None:
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
        f"model folder {model} (different content)",
        f"output {output} (another folder)",
        f"custom_reward.path {scorer} (No such file or directory)",
    ]
    assert [path.name for path in output.iterdir()] == ["probe"]
