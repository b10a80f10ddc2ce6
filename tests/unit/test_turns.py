"""State on the devices in each phase, and settings that make sharing devices impossible."""

from types import SimpleNamespace
from typing import Any

import pytest

from dapo_core.config.derived import derive
from dapo_core.config.train import TrainConfig
from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from dapo_core.machine.timers import PhaseTimer
from dapo_core.memory.holdings import Phase
from dapo_core.turns import Turns
from tests.trainings import config_of

STEP: list[Phase] = ["anchor", "update", "publish", "generate"]


def _calls(**train: Any) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the calls of a step, and its memory metrics if phases peak at 1, 2, 3 ... GiB."""
    calls: list[tuple[str, ...]] = []
    peaks = iter(range(100))

    def record(name: str) -> Any:
        return lambda *what: calls.append((name, *sorted(each for names in what for each in names)))

    policy: Any = SimpleNamespace(
        onload=record("onload"),
        offload=record("offload"),
        take_memory=lambda: {"perf/max_rss_gb": float(next(peaks)), "perf/cpu_memory_used_gb": 7.0},
    )
    rollouts: Any = SimpleNamespace(sleep=record("sleep"), wake=record("wake"))
    turns = Turns(policy, rollouts, TrainConfig(**train))
    timer = PhaseTimer()
    for phase in STEP:
        turns.enter(phase, timer)
    assert set(timer.seconds) == {"turns"}
    return calls, turns.memory_metrics()


def test_shared_devices_are_freed_before_they_are_used() -> None:
    calls, memory = _calls(placement="colocated")
    assert calls == [
        ("offload", "gradients", "optimizer", "weights"),  # before the first phase
        ("sleep",),
        ("onload", "weights"),
        ("onload", "gradients", "optimizer"),
        ("offload", "gradients", "optimizer"),
        ("wake", "weights"),
        ("offload", "weights"),
        ("wake", "kv_cache"),
    ]
    # 0 of loading; 1 generate, 2 anchor, 3 update, 4 publish, 5 generate again
    assert {name: value for name, value in memory.items() if "rss" in name} == {
        "perf/max_rss_gb": 5.0,
        "perf/max_rss_gb/generate": 5.0,
        "perf/max_rss_gb/anchor": 2.0,
        "perf/max_rss_gb/update": 3.0,
        "perf/max_rss_gb/publish": 4.0,
    }
    assert memory["perf/cpu_memory_used_gb"] == 7.0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"placement": "resident"}, []),
        (
            {"offload_optimizer": True},
            [("offload", "optimizer"), ("onload", "optimizer"), ("offload", "optimizer")],
        ),
        (
            {"offload_parameters": True},
            [("offload", "weights"), ("onload", "weights"), ("offload", "weights")],
        ),
    ],
)
def test_without_turns_only_offload_keys_move_state(
    keys: dict[str, bool], expected: list[tuple[str, ...]]
) -> None:
    assert _calls(**keys)[0] == expected


def test_shared_devices_and_threads_count_once() -> None:
    changes: dict[str, dict[str, Any]] = {
        "train": {"num_ranks": 4, "threads_per_rank": 3},
        "rollout": {
            "engine": "vllm",
            "num_workers": 2,
            "tensor_parallel": 2,
            "threads_per_worker": 5,
        },
    }
    separate = config_of(**changes)
    changes["train"]["placement"] = "colocated"
    shared = config_of(**changes)
    assert (separate.num_devices, separate.num_cpus) == (8, 4 * 3 + 4 * 5)
    assert (shared.num_devices, shared.num_cpus) == (4, 4 * 5)
    lines = [quantity for quantity in derive(shared) if quantity.label.startswith("policy and")]
    assert lines == [("policy and rollouts, on the same", 4, "devices", "train.num_ranks")]


def test_ranks_and_engines_each_use_all_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    unset: dict[str, Any] = {"num_workers": 4, "threads_per_worker": None}
    alone = config_of(train={"num_ranks": 2}, rollout=unset)
    assert (alone.threads_per_rank, alone.threads_per_worker, alone.num_cpus) == (6, 3, 24)
    # other machines may have fewer cores than this one
    for elsewhere in ({"ray_address": "10.0.0.1:6379"}, {"device": "npu"}):
        other = config_of(train={"num_ranks": 2, **elsewhere}, rollout=unset)
        assert (other.threads_per_rank, other.threads_per_worker) == (1, 2)


def test_colocated_ranks_and_engines_must_match() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(train={"placement": "colocated"}, rollout={"num_workers": 3})
    message = str(caught.value)
    assert "train.num_ranks=2 and rollout.num_workers=3 engines take 1 devices each" in message
    assert (
        "set train.num_ranks=3, change rollout.num_workers, or set train.placement=separate"
        in message
    )
    with pytest.raises(
        ConfigError, match=r"enable_sleep_mode is set by the project: use train.placement"
    ):
        config_of(rollout={"engine": "vllm", "engine_args": {"enable_sleep_mode": True}})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("cuda", "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"),
        ("cuda", "PYTORCH_ALLOC_CONF", "expandable_segments:true"),
        ("npu", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        ("npu", "VLLM_ASCEND_ENABLE_NZ", "1"),
    ],
)
def test_settings_that_prevent_sleep_are_refused(kind: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value}"):
        device_for(kind).prepare({name: value}, is_shared=True)


def test_the_nz_layout_is_refused_on_an_npu() -> None:
    with pytest.raises(
        ConfigError, match=r"^VLLM_ASCEND_ENABLE_NZ=1: engines cannot load new weights"
    ):
        device_for("npu").prepare({"VLLM_ASCEND_ENABLE_NZ": "1"}, is_shared=False)
    environment = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    device_for("npu").prepare(environment, is_shared=False)
    assert environment == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "VLLM_ASCEND_ENABLE_NZ": "0",
    }


def test_variables_for_sharing_an_npu_are_set() -> None:
    environment = {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
    }
    device_for("npu").prepare(environment, is_shared=True)
    assert environment == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
        "VLLM_ASCEND_ENABLE_NZ": "0",
    }
    assert [device_for(kind).sleep_level for kind in ("cpu", "cuda", "npu")] == [None, 2, 1]
