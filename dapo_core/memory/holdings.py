"""Which state ranks and engines keep on their devices in each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig


Phase = Literal["generate", "anchor", "update", "publish"]
WEIGHTS, GRADIENTS, OPTIMIZER, KV_CACHE = "weights", "gradients", "optimizer", "kv_cache"
OF_RANKS = frozenset({WEIGHTS, GRADIENTS, OPTIMIZER})
OF_ENGINES = frozenset({WEIGHTS, KV_CACHE})
NOTHING: frozenset[str] = frozenset()


class Holding(NamedTuple):
    """State on the devices."""

    ranks: frozenset[str]
    engines: frozenset[str]


# In the order of a step, if ranks and engines share devices.
COLOCATED: dict[Phase, Holding] = {
    "generate": Holding(NOTHING, OF_ENGINES),
    "anchor": Holding(frozenset({WEIGHTS}), NOTHING),
    "update": Holding(OF_RANKS, NOTHING),
    "publish": Holding(frozenset({WEIGHTS}), frozenset({WEIGHTS})),
}


def holdings(train: TrainConfig) -> Mapping[Phase, Holding]:
    """Return what ranks and engines hold in each phase, for the training's placement.

    On separate devices, engines always hold everything, and ranks everything that no train.offload
    key moves away.
    """
    if train.takes_turns:
        if train.lora.rank and train.device != "cpu":  # adapters are sent from host memory
            return {**COLOCATED, "publish": Holding(NOTHING, frozenset({WEIGHTS}))}
        return COLOCATED
    offloaded = {WEIGHTS: train.offload_parameters, OPTIMIZER: train.offload_optimizer}
    kept = OF_RANKS - {name for name, is_moved in offloaded.items() if is_moved}
    return {phase: Holding(shared.ranks | kept, OF_ENGINES) for phase, shared in COLOCATED.items()}
