"""The order in which copies, computation and the process wait for each other, on a fake
accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from dapo_core.policy.offload import Transfers
from dapo_core.policy.routing import Routing
from dapo_core.weights.inbox import Delivery, Inbox
from dapo_core.weights.plan import PlannedTensor, WeightPlan

HOST = torch.device("cpu")


class _Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: _Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.calls.append(f"the process waits for {self.name}")


class _Accelerator:
    """Fake of torch.cuda or torch.npu, and of its Device."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = _Stream("computation", self.calls)

    def module(self) -> _Accelerator:
        return self

    def Stream(self) -> _Stream:  # noqa: N802 - torch's name
        return _Stream("copies", self.calls)

    def current_stream(self) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty_cache(self) -> None:
        self.calls.append("free memory is released")


def test_copies_overlap_computation_and_are_awaited() -> None:
    accelerator: Any = _Accelerator()
    transfers = Transfers(accelerator)
    source = torch.ones(3)
    with transfers.queued():
        assert accelerator.current.name == "copies"
        copy = transfers.moved(source, torch.device("meta"))
    assert copy.is_meta
    assert accelerator.current.name == "computation"
    assert accelerator.calls == ["copies waits for computation"]
    transfers.join()
    assert accelerator.calls.pop() == "computation waits for copies"
    alive = weakref.ref(source)
    del source
    assert alive() is not None  # a copy may still read it
    transfers.finish()
    assert alive() is None
    assert accelerator.calls[1:] == ["the process waits for copies"]
    transfers.release()
    assert accelerator.calls[2:] == ["the process waits for copies", "free memory is released"]


def test_on_a_cpu_nothing_is_copied_or_kept() -> None:
    transfers = Transfers(device_for("cpu"))
    source = torch.ones(3)
    with transfers.queued():
        assert transfers.moved(source, HOST) is source
    transfers.join()
    transfers.finish()


class _Inbox(Inbox):
    """An inbox that sees whether a bucket is in use when it calls it taken."""

    def buckets(self) -> Iterator[torch.Tensor]:
        self.num_taken = self.num_in_use = 0
        for _ in self.plan.buckets:
            arrived = [torch.ones(2)]
            bucket = weakref.ref(arrived[0])
            yield arrived.pop()
            self.num_taken += 1
            self.num_in_use += bucket() is not None


def test_packed_rows_on_cuda_are_not_computed_by_kernels_that_are_built_for_each_shape() -> None:
    try:
        with patch("torch.cuda.is_available", return_value=True):
            device_for("cuda").require()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_missing_device_is_reported_with_torchs_reason() -> None:
    old = RuntimeError("The NVIDIA driver on your system is too old\nPlease update it")
    with (
        patch("torch.cuda.is_available", return_value=False),
        patch("torch.cuda.init", side_effect=old),
        pytest.raises(ConfigError, match=r"on this machine \(The NVIDIA driver .* too old\);"),
    ):
        device_for("cuda").require()


def test_a_bucket_is_out_of_use_once_its_rank_hears_that_it_was_taken() -> None:
    inbox = _Inbox(WeightPlan(torch.float32, tuple((PlannedTensor(n, (2,), (2,)),) for n in "ab")))
    delivery = Delivery(inbox, copies=True)
    assert [name for name, _ in delivery] == ["a", "b"]
    assert (inbox.num_taken, inbox.num_in_use) == (2, 0)


def test_no_record_of_a_pass_stays_on_the_device_after_an_update() -> None:
    routing = Routing(torch.nn.Identity(), keeps_logits=True)
    routing.experts, routing.entropy, routing.logits = ([torch.ones(1)] for _ in range(3))
    routing.take()
    assert [*routing.experts, *routing.entropy, *routing.logits] == []
