"""New weights through vLLM's own interface for weight transfer, from whatever carries them into the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

BACKEND = "dapo"  # of weight_transfer_config


@dataclass
class _Connected(WeightTransferInitInfo):
    """Nothing: Engine.inbox holds the connection."""


@dataclass
class _Stream(WeightTransferUpdateInfo):
    weights: Iterable[tuple[str, torch.Tensor]] = ()


class StreamEngine(WeightTransferEngine[_Connected, _Stream]):
    """Loads tensors of a stream layer by layer, and packs each layer for the device's kernels again."""

    init_info_cls = _Connected
    update_info_cls = _Stream

    def init_transfer_engine(self, init_info: _Connected) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # where torch has nothing to wait for, and raises
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _Stream, load_weights: Callable[[Any], Any] | None = None) -> None:
        """vLLM up to 0.23 passes `load_weights`, and starts and finishes the reload itself."""
        load: Any = load_weights or self.model.load_weights
        load(update_info.weights)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract up to vLLM 0.23; policy.weight_source sends."""
        raise NotImplementedError


def settings() -> dict[str, Any]:
    """Arguments of EngineArgs with which vLLM loads through StreamEngine; none where it cannot.

    vLLM up to 0.23 waits for an accelerator after each update, and fails where there is none.
    """
    if current_platform.is_cpu() and not hasattr(WeightTransferEngine, "start_weight_update"):
        return {}
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StreamEngine)
    return {"weight_transfer_config": {"backend": BACKEND}}


def replace_weights(engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all weights into an idle engine that was built with `settings`."""
    if not settings():
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        return
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=({"weights": weights},))
    engine.collective_rpc("finish_weight_update")
