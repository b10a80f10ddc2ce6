"""Where the sampler and validation get groups from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dapo_core.draw.groups import Group, GroupRequest


class GroupSource(Protocol):
    """Samples and scores groups: cluster.rollout_group.RolloutGroup."""

    @property
    def num_in_flight(self) -> int: ...

    @property
    def num_tokens_in_flight(self) -> int: ...

    def submit(self, requests: Sequence[GroupRequest]) -> None: ...

    def finished(self) -> list[Group]: ...

    def suspend(self) -> tuple[list[Group], list[GroupRequest]]: ...

    def take_reward_seconds(self) -> float: ...
