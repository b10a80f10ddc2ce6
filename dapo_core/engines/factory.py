"""Builds the engine that rollout.engine names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dapo_core.engines.base import Engine, EngineSettings
from dapo_core.machine.device import Device

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig


def build_engine(
    kind: Literal["vllm", "hf"],
    model_path: str | Path,
    settings: EngineSettings,
    seed: int,
    device: str = "cpu",
) -> Engine:
    """Build an engine with the folder's weights. vLLM selects its device itself."""
    if kind == "vllm":
        from dapo_core.engines.vllm_engine import VllmEngine

        return VllmEngine(model_path, settings, seed)
    from dapo_core.engines.hf_engine import HuggingFaceEngine

    return HuggingFaceEngine(model_path, settings, device)


def engine_settings(config: TrainingConfig, device: Device) -> EngineSettings:
    """Return the settings of a rollout worker's engine."""
    train = config.train
    lora = train.lora if train.lora.rank and config.rollout.lora == "adapter" else None
    sleep_level = device.sleep_level if train.takes_turns else None
    if (lora is not None or train.freeze) and sleep_level is not None:
        sleep_level = 1  # level 2 discards weights, which only a sync of all weights replaces
    return EngineSettings(
        dtype=str(device.resolve_dtype(config.rollout.dtype)).removeprefix("torch."),
        max_model_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        max_num_seqs=config.rollout.max_num_seqs,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        memory_bytes=int(config.rollout.memory_gigabytes * 1024**3),
        memory_utilization=config.rollout.memory_utilization,
        threads=config.threads_per_worker,
        trust_remote_code=config.model.trust_remote_code,
        tensor_parallel=config.rollout.tensor_parallel,
        pipeline_parallel=config.rollout.pipeline_parallel,
        expert_parallel=config.rollout.expert_parallel,
        speculation=config.rollout.speculation,
        batch_invariant=config.rollout.batch_invariant,
        engine_args=config.rollout.engine_args,
        lora=lora,
        freezes_tower="vision" in train.freeze,
        records_routing=config.algorithm.routing_replay == "rollout",
        sleep_level=sleep_level,
        seeds_responses=config.run.deterministic or device.seeds_responses,
    )
