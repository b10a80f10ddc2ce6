"""Turns: which state ranks and engines keep on their devices in each phase of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dapo_core.memory.holdings import OF_RANKS, Phase, holdings

if TYPE_CHECKING:
    from dapo_core.cluster.policy_group import PolicyGroup
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.train import TrainConfig
    from dapo_core.machine.timers import PhaseTimer


class Turns:
    """Moves ranks and engines from phase to phase; in the first, `generate`, engines hold all."""

    def __init__(self, policy: PolicyGroup, rollouts: RolloutGroup, train: TrainConfig) -> None:
        self._policy = policy
        self._rollouts = rollouts
        self._holdings = holdings(train)
        self._phase: Phase = "generate"
        self._peaks: dict[str, float] = {}  # by metric, since the start of training
        self._phase_peaks: dict[
            str, float
        ] = {}  # by metric and phase, since the last `memory_metrics`
        if offloaded := OF_RANKS - self._holdings["generate"].ranks:
            policy.offload(offloaded)
        self.memory_metrics()  # discards the peaks of loading

    def enter(self, phase: Phase, timer: PhaseTimer) -> None:
        """Free what the phase does not need on both sides, then load what it does. Timed as turns.

        In-flight groups are suspended before engines free anything.
        """
        with timer.phase("turns"):
            self._record_memory()
            before, after = self._holdings[self._phase], self._holdings[phase]
            if before.engines - after.engines:
                self._rollouts.sleep()
            if offloaded := before.ranks - after.ranks:
                self._policy.offload(offloaded)
            if onloaded := after.ranks - before.ranks:
                self._policy.onload(onloaded)
            if woken := after.engines - before.engines:
                self._rollouts.wake(woken)
            self._phase = phase

    def memory_metrics(self) -> dict[str, float]:
        """Return the memory in GiB by metric name, per phase of the step and overall."""
        self._record_memory()
        phase_peaks, self._phase_peaks = self._phase_peaks, {}
        return {**self._peaks, **phase_peaks}

    def _record_memory(self) -> None:
        for name, value in self._policy.take_memory().items():
            in_phase = f"{name}/{self._phase}"
            self._phase_peaks[in_phase] = max(value, self._phase_peaks.get(in_phase, 0.0))
            self._peaks[name] = max(value, self._peaks.get(name, 0.0)) if "/max_" in name else value
