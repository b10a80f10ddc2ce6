"""What policy ranks and engines hold on their devices in each phase of a step, and the changes between phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dapo_core.cluster.policy_group import PolicyGroup
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.train import TrainConfig
    from dapo_core.metrics import PhaseTimer

Phase = Literal["generate", "anchor", "update", "publish"]

WEIGHTS, GRADIENTS, OPTIMIZER, KV_CACHE = "weights", "gradients", "optimizer", "kv_cache"
OF_RANKS = frozenset({WEIGHTS, GRADIENTS, OPTIMIZER})
OF_ENGINES = frozenset({WEIGHTS, KV_CACHE})
NOTHING: frozenset[str] = frozenset()


class Holding(NamedTuple):
    """What is on the devices."""

    ranks: frozenset[str]
    engines: frozenset[str]


# The order of a step, where ranks and engines share devices.
COLOCATED: dict[Phase, Holding] = {
    "generate": Holding(NOTHING, OF_ENGINES),
    "anchor": Holding(frozenset({WEIGHTS}), NOTHING),
    "update": Holding(OF_RANKS, NOTHING),
    "publish": Holding(frozenset({WEIGHTS}), frozenset({WEIGHTS})),
}


def holdings(train: TrainConfig) -> Mapping[Phase, Holding]:
    """Who holds what in which phase, under the training's placement.

    On devices of their own, engines hold everything all the time, and ranks what no train.offload key sends away.
    verl's ranks do the same on shared devices, but for gradients, which last no longer than an update.
    """
    is_own = train.backend == "own"
    if train.is_colocated and is_own:
        return COLOCATED
    offloaded = {WEIGHTS: train.offload_parameters, OPTIMIZER: train.offload_optimizer, GRADIENTS: not is_own}
    kept = frozenset(what for what in OF_RANKS if not offloaded[what])
    return {
        phase: Holding(shared.ranks | kept, shared.engines if train.is_colocated else OF_ENGINES)
        for phase, shared in COLOCATED.items()
    }


class Turns:
    """Moves ranks and engines from phase to phase; the first is `generate`, for which engines hold all."""

    def __init__(self, policy: PolicyGroup, rollouts: RolloutGroup, train: TrainConfig) -> None:
        self._policy = policy
        self._rollouts = rollouts
        self._holdings = holdings(train)
        self._phase: Phase = "generate"
        self._peaks: dict[str, float] = {}  # of the training so far, by metric
        self._of_step: dict[str, float] = {}  # likewise, by phase, since the last `memory_metrics`
        if given := OF_RANKS - self._holdings["generate"].ranks:
            policy.offload(given)
        self.memory_metrics()  # of loading, which belongs to no phase

    def enter(self, phase: Phase, timer: PhaseTimer) -> None:
        """Have both sides give back what they do not hold in the phase, then take what they do.

        All in-flight groups are suspended before engines give anything back. The time counts as phase `turns`.
        """
        with timer.phase("turns"):
            self._record_memory()
            before, after = self._holdings[self._phase], self._holdings[phase]
            if before.engines - after.engines:
                self._rollouts.sleep()
            if given := before.ranks - after.ranks:
                self._policy.offload(given)
            if taken := after.ranks - before.ranks:
                self._policy.onload(taken)
            if woken := after.engines - before.engines:
                self._rollouts.wake(woken)
            self._phase = phase

    def memory_metrics(self) -> dict[str, float]:
        """Memory in GiB by metric name, the largest over ranks: in each phase of the step, and so far in all."""
        self._record_memory()
        of_step, self._of_step = self._of_step, {}
        return {**self._peaks, **of_step}

    def _record_memory(self) -> None:
        for name, value in self._policy.take_memory().items():
            in_phase = f"{name}/{self._phase}"
            self._of_step[in_phase] = max(value, self._of_step.get(in_phase, 0.0))
            self._peaks[name] = max(value, self._peaks.get(name, 0.0)) if "/max_" in name else value
