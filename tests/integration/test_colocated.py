"""Ranks and engines take turns on shared devices: order of a step, equal results, memory."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dapo_core import trainer as trainer_module
from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.engines.hf_engine import HuggingFaceEngine
from dapo_core.memory.holdings import COLOCATED, OF_ENGINES, OF_RANKS, Phase
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.policy.rank import Policy
from dapo_core.training import train
from durable import read_json_lines
from tasks.artifacts.stage_key import PROJECT_ROOT
from tests.batches import random_batch
from tests.configs import make_config
from tests.in_process import without_ray
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny
from tests.trainings import World, config_of

NUM_STEPS = 3
# Phases in which each kind of work is done.
WORK: dict[str, set[Phase]] = {
    "decode": {"generate"},
    "engine log-probs": {"generate"},
    "policy log-probs": {"anchor", "update"},
    "load": {"update"},
    "update": {"update"},
    "gather": {"publish"},
    "load weights": {"publish"},
}


@dataclass
class Trace:
    """Records (work, state held by the rank, state held by the engine) whenever work is done."""

    ranks: frozenset[str] = OF_RANKS
    engines: frozenset[str] = OF_ENGINES
    work: list[tuple[str, frozenset[str], frozenset[str]]] = field(default_factory=list)

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """Record the policy and the engine of a training in this process."""

        def watch(owner: type, name: str, note: Callable[..., None]) -> None:
            method = getattr(owner, name)

            def watched(*arguments: Any, **named: Any) -> Any:
                note(*arguments[1:])
                return method(*arguments, **named)

            patch.setattr(owner, name, watched)

        def does(work: str) -> Callable[..., None]:
            return lambda *_: self.work.append((work, self.ranks, self.engines))

        def change(side: str, what: frozenset[str], is_taken: bool) -> None:
            held = getattr(self, side)
            setattr(self, side, held | set(what) if is_taken else held - set(what))

        watch(Policy, "onload", lambda what: change("ranks", what, True))
        watch(Policy, "offload", lambda what: change("ranks", what, False))
        watch(HuggingFaceEngine, "sleep", lambda: change("engines", OF_ENGINES, False))
        watch(HuggingFaceEngine, "wake", lambda what: change("engines", what, True))
        watch(HuggingFaceEngine, "step", does("decode"))
        watch(HuggingFaceEngine, "log_probs", does("engine log-probs"))
        watch(Policy, "log_probs", does("policy log-probs"))
        watch(Policy, "load", does("load"))
        watch(Policy, "update", does("update"))
        watch(Policy, "send_weights", does("gather"))
        watch(HuggingFaceEngine, "receive_weights", does("load weights"))


@dataclass(frozen=True)
class Training:
    folder: Path
    trace: Trace
    batches: list[Batch]


def _train(world: World, folder: Path, placement: str, ends: Sequence[int]) -> Training:
    """Train up to each of these steps, resuming in between."""
    trace, batches = Trace(), []
    with pytest.MonkeyPatch.context() as patch, without_ray():
        trace.record(patch)

        def build_batch(*arguments: Any, **named: Any) -> Batch:
            batches.append(built(*arguments, **named))
            return batches[-1]

        built = trainer_module.build_batch
        patch.setattr(trainer_module, "build_batch", build_batch)
        for end in ends:
            keys = {"num_ranks": 1, "total_steps": end, "placement": placement}
            train(config_of(train=keys), world.data, world.model, folder)
    return Training(folder, trace, batches)


@pytest.fixture(scope="module")
def trainings(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    folder = tmp_path_factory.mktemp("trainings")
    ends = {"separate": [NUM_STEPS], "colocated": [NUM_STEPS - 1, NUM_STEPS]}
    return {name: _train(world, folder / name, name, steps) for name, steps in ends.items()}


def test_work_finds_the_state_on_the_device_that_the_table_lists(
    trainings: dict[str, Training],
) -> None:
    trace = trainings["colocated"].trace.work
    assert {work for work, *_ in trace} == WORK.keys()
    for number, (work, ranks, engines) in enumerate(trace):
        assert (ranks, engines) in [COLOCATED[phase] for phase in WORK[work]], (number, work)


def test_phases_follow_the_order_of_the_table(trainings: dict[str, Training]) -> None:
    by_holding = {holding: phase for phase, holding in COLOCATED.items()}
    phases = [by_holding[ranks, engines] for _, ranks, engines in trainings["colocated"].trace.work]
    turns = [
        phase for number, phase in enumerate(phases) if number == 0 or phases[number - 1] != phase
    ]
    probe: list[Phase] = ["generate"]  # after the last step
    resume: list[Phase] = ["update", "publish"]
    assert turns == [*COLOCATED] * (NUM_STEPS - 1) + probe + resume + [*COLOCATED] + probe


def test_separate_devices_keep_their_state(trainings: dict[str, Training]) -> None:
    trace = trainings["separate"].trace
    assert {(ranks, engines) for _, ranks, engines in trace.work} == {(OF_RANKS, OF_ENGINES)}


def test_both_placements_train_bitwise_equally(
    trainings: dict[str, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    separate, colocated = trainings["separate"], trainings["colocated"]
    assert len(separate.batches) == NUM_STEPS
    for one, other in zip(separate.batches, colocated.batches, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.rollout_log_probs, other.rollout_log_probs)
        assert torch.equal(one.rewards, other.rewards)
    monkeypatch.syspath_prepend(str(PROJECT_ROOT / "bench"))
    crash = importlib.import_module("crash")
    assert crash.differences(separate.folder, colocated.folder) == []
    for line in read_json_lines(colocated.folder / METRICS_FILE):
        assert {f"perf/max_rss_gb/{phase}" for phase in COLOCATED} <= line.keys()
        assert line["perf/max_rss_gb"] >= max(
            line[f"perf/max_rss_gb/{phase}"] for phase in COLOCATED
        )


def _memory() -> float:
    """Return this process's resident memory in MB."""
    return psutil.Process().memory_info().rss / 1e6


def _take_turns(rank: int, path: Path, folder: Path) -> dict[str, float]:
    """Measure memory in MB over turns, and check that offloaded state comes back unchanged."""
    steps = {"train_prompts": 4, "mini_prompts": 4, "learning_rate": 1e-2, "warmup_steps": 0}
    config = make_config(path, train={"placement": "colocated", **steps}, rollout={"group_size": 2})
    policy = Policy(path, config)
    batch = random_batch(num_groups=4, group_size=2)
    shares, _ = split_batch(batch, 1, 64)
    share, totals = shares[0], LossTotals.of(batch)
    policy.update(share, totals)
    facts = {"held": _memory()}
    tensors = [
        *policy.offloader.local_tensors("weights"),
        *policy.offloader.local_tensors("optimizer"),
    ]
    facts["state"] = sum(tensor.nbytes for tensor in tensors) / 1e6
    before = [tensor.clone() for tensor in tensors[:3]]
    for _ in range(2):  # the second call has no effect
        policy.offload(OF_RANKS)
    facts["given back"] = _memory()
    policy.save(str(folder), asynchronous=False)
    facts["after a checkpoint"] = _memory()
    for attempt in (lambda: policy.update(share, totals), lambda: policy.log_probs(share)):
        with pytest.raises(AssertionError, match=r"weights.* are in a file"):
            attempt()
    policy.onload({"weights"})
    log_probs, _ = policy.log_probs(share)
    facts["weights only"] = _memory()
    policy.onload(OF_RANKS - {"weights"})
    facts["same"] = float(all(map(torch.equal, tensors[:3], before)))
    policy.update(share, totals)
    policy.offload(OF_RANKS)
    facts["given back again"] = _memory()
    policy.onload(OF_RANKS)
    facts["learned"] = float(not torch.equal(policy.log_probs(share)[0], log_probs))
    policy.load(str(folder))
    facts["loaded"] = float(torch.equal(policy.log_probs(share)[0], log_probs))
    return facts


def test_a_rank_on_a_cpu_returns_its_memory_to_the_system(tmp_path: Path) -> None:
    """26 million parameters: 105 MB of weights, 210 MB of moments and 105 MB of gradients."""
    build_tiny(tmp_path / "model", "qwen3", hidden_size=1024, intermediate_size=4096)
    (facts,) = run_ranks(1, _take_turns, tmp_path / "model", tmp_path / "checkpoint")
    gradients = facts["state"] / 3
    freed = facts["held"] - facts["given back"]
    assert facts["state"] > 300, facts
    assert freed > 0.95 * (facts["state"] + gradients), facts
    assert facts["after a checkpoint"] < facts["given back"] + 0.2 * facts["state"], facts
    # and gathered layers
    assert facts["weights only"] < facts["given back"] + 0.8 * facts["state"], facts
    assert facts["given back again"] < facts["given back"] + 0.1 * facts["state"], facts
    assert (facts["same"], facts["learned"], facts["loaded"]) == (1, 1, 1), facts
