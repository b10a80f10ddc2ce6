"""Inference engines behind one protocol: vLLM for accelerators and CPU, Hugging Face everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dapo_core.engines.base import Engine, EngineSettings, FinishReason, GenerationRequest, Response

__all__ = ["Engine", "EngineSettings", "FinishReason", "GenerationRequest", "Response", "build_engine"]


def build_engine(
    kind: Literal["vllm", "hf"],
    model_path: str | Path,
    settings: EngineSettings,
    seed: int,
    device: str = "cpu",
) -> Engine:
    """An engine with the folder's weights. vLLM finds its device itself; `device` is where Hugging Face runs."""
    if kind == "vllm":
        from dapo_core.engines.vllm_engine import VllmEngine

        return VllmEngine(model_path, settings, seed)
    from dapo_core.engines.hf_engine import HuggingFaceEngine

    return HuggingFaceEngine(model_path, settings, seed, device)
