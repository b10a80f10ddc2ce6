"""Weight buckets, checksums and the probe detect engines with wrong weights."""

import dataclasses
import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_core.algorithm.batch import build_batch
from dapo_core.errors import RolloutError
from dapo_core.machine.device import device_for
from dapo_core.metrics.engine_checks import check_sampled_alike, probe_difference
from dapo_core.weights import inbox, links, outbox
from dapo_core.weights.inbox import open_inbox
from dapo_core.weights.links import Link, SharedMemory, new_slots
from dapo_core.weights.outbox import Outbox
from dapo_core.weights.plan import PlannedTensor, WeightPlan, plan_buckets
from dapo_core.weights.proof import (
    MULTIPLIER,
    Loaded,
    checksum,
    checksums,
    merge_checksums,
    require_arrived,
    weighted_sum,
)
from tests.batches import make_group
from tests.trainings import config_of

NAN = float("nan")


def _probe(engines: list[list[list[float]]], dtype: str = "float32") -> float:
    """Probe responses of 2 and 1 tokens with policy log-probs -1, -2 and -3."""
    group = make_group([1.0, 1.0], num_response_tokens=[2, 1], num_prompt_tokens=3)
    batch = build_batch([group], mask_truncated=False)
    requested = []

    def engine_log_probs(sequences: Any) -> list[list[list[float]]]:
        requested.extend(sequences)
        return engines

    difference = probe_difference(
        engine_log_probs, batch, torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), ["float32", dtype]
    )
    assert requested == [
        (group.prompt.input, rollout.response_ids.tolist()) for rollout in group.rollouts
    ]
    return difference


def _sampled(difference: float, is_stale: bool = False, **keys: Any) -> None:
    """Check a step whose engine log-probs differ by this much from the policy's."""
    batch = build_batch([make_group([1.0, 0.0], num_response_tokens=[2, 1])], mask_truncated=False)
    batch = dataclasses.replace(batch, is_stale=batch.response_mask & is_stale)
    config = config_of(**keys)
    check_sampled_alike(batch.rollout_log_probs + difference, batch, config, [torch.float32])


def test_tokens_sampled_from_another_distribution_stop_the_training() -> None:
    _sampled(1e-4)
    with pytest.raises(RolloutError) as caught:
        _sampled(0.1, rollout={"temperature": 0.5})
    assert "of the 3 tokens they sampled differ" in str(caught.value)
    assert "rollout.temperature=0.5 by 0.1 nats per token, more than the 0.002 that float32" in str(
        caught.value
    )
    with pytest.raises(RolloutError, match="3 of the policy's 3 log-probs are not finite"):
        _sampled(NAN)


def test_a_mismatch_may_warn_and_its_bound_is_a_key(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RolloutError, match=r"1e-05 that train\.max_mismatch allows.*=warn trains"):
        _sampled(1e-4, train={"max_mismatch": 1e-5})
    assert not caplog.records
    _sampled(1e-4, train={"max_mismatch": 1e-5, "on_mismatch": "warn"})
    assert "by 0.0001 nats per token, more than the 1e-05" in caplog.text
    _sampled(0.1, train={"max_mismatch": 0.2})


def test_incomparable_log_probs_are_skipped() -> None:
    _sampled(0.1, is_stale=True)
    _sampled(0.1, rollout={"top_p": 0.9}, sampler={"max_staleness": 0})
    _sampled(0.1, algorithm={"old_log_probs": "engine"})


def test_replayed_experts_of_older_weights_do_not_stop_the_training() -> None:
    """A carried response keeps its experts; the engine continued it after those of new weights."""
    batch = build_batch([make_group([1.0, 0.0], num_response_tokens=[3, 1])], mask_truncated=False)
    batch.is_stale[0, 0] = True
    log_probs = batch.rollout_log_probs + torch.tensor([[9.0, 0.1, 0.1], [0.0, 9.0, 9.0]])
    check = functools.partial(
        check_sampled_alike, config=config_of(), dtypes=[torch.float32], log_probs=log_probs
    )
    routing = [np.zeros((length, 1, 1), np.uint8) for length in batch.lengths]
    check(batch=dataclasses.replace(batch, routing=routing))
    with pytest.raises(RolloutError, match="of the 3 tokens they sampled differ"):
        check(batch=batch)
    log_probs[1, 0] += 0.1
    with pytest.raises(RolloutError, match="of the 1 tokens they sampled differ"):
        check(batch=dataclasses.replace(batch, routing=routing))


def _planned(**sizes: int) -> list[PlannedTensor]:
    return [PlannedTensor(name, (size,), (1,) * size) for name, size in sizes.items()]


def _names(plan: WeightPlan) -> list[list[str]]:
    return [[planned.name for planned in bucket] for bucket in plan.buckets]


def test_buckets_keep_order_and_size_limit() -> None:
    tensors = _planned(a=4, b=4, c=3, d=8, e=1, f=9)
    plan = plan_buckets(tensors, torch.bfloat16, max_bytes=20)  # 10 elements
    assert _names(plan) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert [[planned.offset for planned in bucket] for bucket in plan.buckets] == [
        [0, 4],
        [0],
        [0, 8],
        [0],
    ]
    assert plan.slot_numel == 9
    assert _names(plan_buckets(tensors, torch.bfloat16, max_bytes=1)) == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
        ["f"],
    ]
    assert plan_buckets([], torch.bfloat16, max_bytes=20).slot_numel == 0


def test_a_checksum_depends_on_every_bit_and_position() -> None:
    values = torch.arange(6, dtype=torch.bfloat16)
    swapped, negated = values[[1, 0, 2, 3, 4, 5]], values.clone()
    negated[0] = -0.0  # equal to 0, but with different bits
    for compute in (checksum, weighted_sum):
        assert compute(values) == compute(values.clone())
        assert (
            len({compute(each) for each in (values, swapped, negated, values[:5], values.float())})
            == 5
        )
    # 16-bit words of bfloat16 0 and 1 are 0 and 0x3F80; positions count from 1
    assert weighted_sum(values[:2]) == 0x3F80 * 2 * MULTIPLIER % 2**64


def test_a_checksum_covers_the_rows_of_one_rank() -> None:
    tensor = torch.arange(10.0).view(5, 2)
    planned = PlannedTensor("a", (5, 2), shard_rows=(2, 2, 1))  # three ranks: 2, 2 and 1 rows
    parts = [checksum(tensor[:2]), checksum(tensor[2:4]), checksum(tensor[4:])]
    assert checksums(tensor, planned) == tuple(parts)
    sent = [{"a": {2: parts[2]}}, {"a": {0: parts[0]}}, {"a": {1: parts[1]}, "b": {0: 7}}]
    assert merge_checksums(sent) == {"a": tuple(parts), "b": (7,)}


def test_each_engine_is_compared_with_the_sent_weights() -> None:
    plan = plan_buckets(_planned(a=1, b=1), torch.float32, 8)
    sent = {"a": (1, 2), "b": (3,)}
    intact = Loaded(7, {"a": (1, 2), "b": (3,)})
    require_arrived(plan, sent, {"first": intact, "second": intact}, 7)
    for wrong, message in (
        (
            Loaded(7, {"a": (1, 9), "b": (3,)}),
            r"^second loaded other bytes than the policy ranks sent for 1 \(a\) of 2",
        ),
        (
            Loaded(6, intact.checksums),
            r"^second has policy version 6 after 7 was published: rollouts would",
        ),
        (Loaded(7, {"b": (3,)}), r"^second did not load 1 \(a\) of 2 tensors of policy version 7"),
    ):
        with pytest.raises(RolloutError, match=message):
            require_arrived(plan, sent, {"first": intact, "second": wrong}, 7)


def test_shared_memory_counts_buckets_and_is_released() -> None:
    memory = SharedMemory.create(2, 1000, torch.float32, 2)
    reader = SharedMemory.open(memory.address, 2, 1000, torch.float32, 2)
    memory.slots[1][:] = 3.0
    memory.publish(1)
    assert reader.num_sent() == 1
    assert reader.slots[1].eq(3.0).all()
    reader.take(0, 1)
    assert memory.num_taken() == 0  # the second reader has not
    reader.take(1, 1)
    assert memory.num_taken() == 1
    used = os.stat(memory.address).st_blocks
    memory.free_slots()
    assert os.stat(memory.address).st_blocks < used
    assert reader.slots[1].eq(0.0).all()
    assert reader.num_sent() == 1
    with pytest.raises(
        RolloutError, match="cannot open the shared memory of a policy rank on its node"
    ):
        SharedMemory.open("/proc/self/fd/9999", 2, 1000, torch.float32, 2)


def test_private_slots_use_huge_pages() -> None:
    plan = plan_buckets(_planned(a=2**20, b=2**20), torch.float32, 2**22)
    sender, device = Outbox(plan, device_for("cpu"), 0), torch.device("cpu")
    for slot in (sender.slot(), *new_slots(plan, device)):
        assert slot.shape == (2**20,)
        assert "hg" in _memory_flags(slot.data_ptr())  # advised, whether or not the system has any


def _memory_flags(address: int) -> list[str]:
    """Return the kernel flags of the memory at the address (proc_pid_smaps(5))."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is at {address:x}")


def test_a_barrier_of_senders_and_receivers_is_on_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HCCL's groups have none on the CPU, which is torch's default for them."""
    places = []

    class Group:
        def broadcast(self, *_: Any) -> Any:
            return SimpleNamespace(wait=lambda: None)

        def barrier(self, options: Any = SimpleNamespace(device=None)) -> Any:  # noqa: B008
            places.append(options.device)
            return SimpleNamespace(wait=lambda: None)

    for module in (inbox, outbox):
        monkeypatch.setattr(module, "join_group", lambda *_: Group())
    plan, device = plan_buckets(_planned(a=4), torch.float32, 16), device_for("cpu")
    sender = Outbox(plan, device, 0)
    sender.join("", 2, "hccl")
    sender.finish()
    assert len(list(open_inbox(Link(False, "", 1, 2), plan, device).buckets())) == 1
    assert places == [torch.device("cpu")] * 2


def test_waiting_for_weights_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STALL_SECONDS", 0.01)
    with pytest.raises(
        RolloutError, match=r"^waited 0 s for a bucket: a process of the training hangs"
    ):
        links.wait_until(lambda: False, "a bucket")


def test_the_probe_reports_the_worst_engine_and_tolerates_its_dtype() -> None:
    # first engine: (0 + 0 + 0.0003) / 3 = 0.0001; second: (0.0003 + 0.0006 + 0) / 3 = 0.0003
    engines = [[[-1.0, -2.0], [-3.0003]], [[-1.0003, -1.9994], [-3.0]]]
    assert _probe(engines) == pytest.approx(3e-4, rel=1e-3)
    assert _probe([[[-1.0, -2.0], [-3.3]]], "bfloat16") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (
            [[[-1.0, -2.0], [-3.3]]],
            r"differ from the policy's by 0\.1 nats per token, more than the 0\.001",
        ),
        ([[[NAN, -2.0], [-3.0]]], "by nan nats per token"),
        ([[[-1.0, -2.0], [-3.0]], [[-1.0, NAN], [-3.0]]], "by nan nats per token"),
        ([[[], []]], "returned 0 log-probs for a probe of 3 response tokens"),
        ([[[-1.0], [-3.0]]], "returned 2 log-probs for a probe of 3 response tokens"),
    ],
)
def test_an_engine_with_wrong_weights_fails_the_probe(
    engines: list[list[list[float]]], message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        _probe(engines)
