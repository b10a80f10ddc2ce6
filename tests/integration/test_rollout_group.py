"""Rollout workers behind Ray: one that hangs ends training in time, whatever the trainer asks of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from dapo_core.cluster import RolloutGroup
from dapo_core.cluster.actors import Actors
from dapo_core.cluster.start import _connect
from dapo_core.data import Prompt
from dapo_core.errors import RolloutError
from dapo_core.rollout import GroupRequest
from tests.configs import make_config

REQUESTS = [GroupRequest(number, Prompt(number, (5,), "arithmetic", "1"), step=1) for number in range(2)]


class _Hanging:
    """A worker whose engine never comes back from its first step."""

    def submit(self, requests: Any) -> None:
        pass

    def poll(self, max_seconds: float) -> None:
        threading.Event().wait()

    def abort(self) -> None:
        pass

    def suspend(self) -> None:
        pass


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RolloutGroup]:
    _connect(make_config(tmp_path))
    worker = ray.remote(_Hanging).options(num_cpus=1).remote()
    try:
        ray.get(worker.submit.remote([]))  # its process takes a while
        yield RolloutGroup([worker], 2.0, Actors())
    finally:
        ray.kill(worker)
        ray.shutdown()


def test_a_worker_that_hangs_is_not_waited_for_without_end(group: RolloutGroup) -> None:
    group.submit(REQUESTS[:1])
    assert group.finished() == []  # the poll begins, and says nothing for a second
    questions: list[Callable[[], Any]] = [lambda: group.submit(REQUESTS[1:]), group.abort, group.suspend]
    for ask in questions:
        with pytest.raises(
            RolloutError, match=r"did not answer within 2 s: .*raise sampler\.max_seconds_without_kept"
        ):
            ask()
