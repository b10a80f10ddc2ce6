"""The configuration's section `evaluate` in the terms of the package eval, which knows no configuration."""

from __future__ import annotations

from dapo_core.config import EvaluateConfig
from eval.client import Endpoint, Sampling
from tasks.serve_model import Server


def endpoint_of(server: Server, settings: EvaluateConfig) -> Endpoint:
    """The client's view of a server."""
    return Endpoint(
        base_url=server.base_url,
        model=server.model,
        api_key=server.api_key,
        concurrency=settings.concurrency,
        timeout_seconds=settings.request_timeout_seconds,
        max_attempts=settings.max_attempts,
    )


def sampling_of(settings: EvaluateConfig) -> Sampling:
    """How the configuration wants answers sampled."""
    return Sampling(
        max_tokens=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
    )
