"""Loads new weights through vLLM's weight transfer interface from an iterator of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from dapo_core.machine.device import device_for

BACKEND = "dapo"  # name in weight_transfer_config


@dataclass
class _Connected(WeightTransferInitInfo):
    """Empty: Engine.inbox holds the connection."""


@dataclass
class _Stream(WeightTransferUpdateInfo):
    weights: Iterable[tuple[str, torch.Tensor]] = ()


class StreamEngine(WeightTransferEngine[_Connected, _Stream]):
    """Loads a stream of tensors layer by layer, and repacks each layer for the device's kernels."""

    init_info_cls = _Connected
    update_info_cls = _Stream

    def init_transfer_engine(self, init_info: _Connected) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # torch raises there
            torch.accelerator.synchronize()

    def receive_weights(
        self, update_info: _Stream, load_weights: Callable[[Any], Any] | None = None
    ) -> None:
        """Load the weights; vLLM up to 0.23 passes `load_weights` and wraps the reload itself."""
        load: Any = load_weights or self.model.load_weights
        load(update_info.weights)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Unused: policy.weight_source sends. Abstract up to vLLM 0.23."""
        raise NotImplementedError


@cache
def _register() -> None:
    WeightTransferEngineFactory.register_engine(BACKEND, StreamEngine)


def settings() -> dict[str, Any]:
    """Return the EngineArgs that enable StreamEngine; empty if vLLM does not support it.

    vLLM up to 0.23 synchronizes an accelerator after each update, which fails on a CPU.
    """
    if current_platform.is_cpu() and not hasattr(WeightTransferEngine, "start_weight_update"):
        return {}
    _register()
    return {"weight_transfer_config": {"backend": BACKEND}}


def replace_weights(engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all weights into an idle engine built with `settings`."""
    if not settings():
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        return
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=({"weights": weights},))
    engine.collective_rpc("finish_weight_update")
    if (module := device_for(current_platform.device_type).module()) is not None:
        module.empty_cache()  # the reload's memory, before keys and values wake beside it
