"""Inference engines behind one protocol: vLLM for accelerators and CPU, Hugging Face everywhere."""

from dapo_core.engines.base import Engine, EngineSettings, FinishReason, GenerationRequest, Response

__all__ = ["Engine", "EngineSettings", "FinishReason", "GenerationRequest", "Response"]
